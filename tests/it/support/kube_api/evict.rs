//! The `eviction` subresource of pods, subject to PodDisruptionBudgets.

use std::sync::Arc;

use serde_json::{Value, json};

use super::{
    answer::Failure,
    daemon_sets,
    selectors::label_selector,
    store::{Object, State},
    write::{Target, check_preconditions},
};

impl State {
    pub fn evict(&mut self, target: Target<'_>, eviction: &Value) -> Result<(), Failure> {
        let Target { kind, namespace, name } = target;
        let found = self.get(kind, namespace, name);
        let pod = found.ok_or_else(|| Failure::not_found(kind, name))?;
        let options = &eviction["deleteOptions"];
        // The real server reports this only after retrying for ten seconds.
        check_preconditions(kind, &pod, options)?;
        if pod.value()["status"]["phase"] != "Pending" {
            self.budgets_allow(&pod)?;
        }
        if self.has_kubelet(&pod) {
            self.mark_disrupted(&pod, "EvictionByEvictionAPI", "Eviction API: evicting");
        }
        self.delete(target, options).map(|_| ())
    }

    fn budgets_allow(&self, pod: &Arc<Object>) -> Result<(), Failure> {
        let budgets = self.resource("poddisruptionbudgets.policy");
        let pods = self.resource("pods");
        let covers = |budget: &Value, pod: &Object| label_selector(&budget["spec"]["selector"], &pod.labels);
        for budget in self.list(&budgets, &pod.namespace) {
            let (name, budget) = (&budget.name, budget.value());
            if !covers(&budget, pod) {
                continue;
            }
            let covered: Vec<Value> = self
                .list(&pods, &pod.namespace)
                .filter(|pod| covers(&budget, pod))
                .map(|pod| pod.value())
                .collect();
            let healthy = covered.iter().filter(|pod| daemon_sets::is_ready(pod)).count();
            let ready = daemon_sets::is_ready(&pod.value());
            let wanted = needed(&budget["spec"], covered.len());
            let allowed = if ready { healthy > wanted } else { healthy >= wanted && healthy > 0 };
            if !allowed {
                return Err(refusal(name, wanted, healthy));
            }
        }
        Ok(())
    }
}

/// Returns the number of pods that must stay healthy. DaemonSets have no scale subresource, so the real controller cannot
/// evaluate a percentage or `maxUnavailable` and allows no eviction.
fn needed(spec: &Value, covered: usize) -> usize {
    let number = spec["minAvailable"].as_u64().and_then(|number| usize::try_from(number).ok());
    number.unwrap_or(covered)
}

fn refusal(name: &str, wanted: usize, healthy: usize) -> Failure {
    let message =
        format!("The disruption budget {name} needs {wanted} healthy pods and has {healthy} currently");
    Failure::new(
        429,
        "TooManyRequests",
        "Cannot evict pod as it would violate the pod's disruption budget.",
        json!({"causes": [{"reason": "DisruptionBudget", "message": message}]}),
    )
}
