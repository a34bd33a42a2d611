//! The scheduler of Jobs' pods, their status, and their deletion. Simplifications: only `nodeSelector` and required node
//! affinity count, taints are ignored, and a node takes any number of pods.

use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use super::{
    events::EventText,
    jobs::has_ended,
    pod_fate::text,
    selectors,
    store::{Object, State},
};

/// The node in a cluster without Node objects.
const ONLY_NODE: &str = "worker-0";

/// Returns a pod's `status.qosClass`.
pub fn quality(pod: &Value) -> &'static str {
    let containers = pod["containers"].as_array().cloned().unwrap_or_default();
    let bounded = |container: &Value, resource: &str| {
        let Value::Object(resources) = &container["resources"] else { return false };
        let of = |what: &str| resources.get(what).and_then(|given| given.get(resource));
        of("limits").is_some() && of("limits") == of("requests")
    };
    let nothing =
        |container: &Value| container["resources"].as_object().is_none_or(serde_json::Map::is_empty);
    if containers.iter().all(|container| bounded(container, "cpu") && bounded(container, "memory")) {
        "Guaranteed"
    } else if containers.iter().all(nothing) {
        "BestEffort"
    } else {
        "Burstable"
    }
}

/// Sets a condition of a pod; the condition's time only changes with its status.
pub fn set_condition(pod: &mut Value, kind: &str, held: bool, reason: &str, message: &str) {
    let held = if held { "True" } else { "False" };
    let mut new = json!({"type": kind, "status": held, "lastProbeTime": null});
    for (field, text) in [("reason", reason), ("message", message)] {
        if !text.is_empty() {
            new[field] = json!(text);
        }
    }
    if !pod["status"]["conditions"].is_array() {
        pod["status"]["conditions"] = json!([]);
    }
    let conditions = pod["status"]["conditions"].as_array_mut().unwrap();
    let now = json!(text(Timestamp::now()));
    if let Some(old) = conditions.iter_mut().find(|old| old["type"] == kind) {
        let same = old["status"] == held;
        new["lastTransitionTime"] = if same { old["lastTransitionTime"].clone() } else { now };
        *old = new;
    } else {
        new["lastTransitionTime"] = now;
        conditions.push(new);
    }
}

/// Returns the only container's status, and creates it if missing.
pub fn container_status(pod: &mut Value) -> &mut Value {
    if pod["status"]["containerStatuses"].is_null() {
        let container = &pod["spec"]["containers"][0];
        pod["status"]["containerStatuses"] = json!([{
            "name": container["name"], "image": container["image"], "imageID": "", "ready": false,
            "started": false, "restartCount": 0, "lastState": {}, "state": {},
        }]);
    }
    &mut pod["status"]["containerStatuses"][0]
}

/// Sets the status of a pod whose container has not started.
pub fn waiting(pod: &mut Value, reason: &str, message: &str) {
    let name = pod["spec"]["containers"][0]["name"].as_str().unwrap_or_default();
    let unready = format!("containers with unready status: [{name}]");
    set_condition(pod, "Ready", false, "ContainersNotReady", &unready);
    set_condition(pod, "ContainersReady", false, "ContainersNotReady", &unready);
    let mut state = json!({"reason": reason});
    if !message.is_empty() {
        state["message"] = json!(message);
    }
    container_status(pod)["state"] = json!({"waiting": state});
}

impl State {
    pub fn schedule_pods(&mut self) {
        for object in self.job_pods() {
            let pod = object.value();
            if object.node_name.is_empty() && !has_ended(&pod) {
                self.schedule_pod(&object, pod);
            }
        }
    }

    fn schedule_pod(&mut self, object: &Arc<Object>, mut pod: Value) {
        let kind = self.resource("pods");
        let ordered = self.jobs.as_ref().and_then(|jobs| jobs.unschedulable.values().next().cloned());
        match ordered.map_or_else(|| self.node_for(&pod), Err) {
            Ok(node) => {
                let message = format!("Successfully assigned {}/{} to {node}", object.namespace, object.name);
                pod["spec"]["nodeName"] = json!(node);
                set_condition(&mut pod, "PodScheduled", true, "", "");
                let told = EventText { by: "default-scheduler", reason: "Scheduled", message: &message };
                self.tell("Pod", &pod, told);
            }
            Err(why) => {
                let before = pod.clone();
                set_condition(&mut pod, "PodScheduled", false, "Unschedulable", &why);
                if pod == before {
                    return;
                }
                let told = EventText { by: "default-scheduler", reason: "FailedScheduling", message: &why };
                self.warn("Pod", &pod, told);
            }
        }
        self.replace(&kind, object, pod);
    }

    /// Returns the allowed node with the fewest Jobs' pods.
    fn node_for(&self, pod: &Value) -> Result<String, String> {
        let nodes = self.resource("nodes");
        let all: Vec<&Arc<Object>> = self.list(&nodes, "").collect();
        if all.is_empty() {
            return Ok(ONLY_NODE.to_owned());
        }
        let pods = self.job_pods();
        let load = |node: &str| {
            let here = pods.iter().filter(|pod| pod.node_name == node);
            here.filter(|pod| !has_ended(&pod.value())).count()
        };
        let allowed =
            all.iter().filter(|node| selectors::node_allowed(&pod["spec"], &node.name, &node.labels));
        allowed.min_by_key(|node| load(&node.name)).map(|node| node.name.clone()).ok_or_else(|| {
            let number = all.len();
            format!(
                "0/{number} nodes are available: {number} node(s) didn't match Pod's node affinity/selector. \
                 no new claims to deallocate, preemption: 0/{number} nodes are available: {number} Preemption is \
                 not helpful for scheduling."
            )
        })
    }

    /// Returns whether a kubelet of this server runs the pod.
    pub fn has_kubelet(&self, pod: &Object) -> bool {
        self.jobs.is_some() && pod.labels.contains_key("batch.kubernetes.io/controller-uid")
    }

    /// Deletes a pod of a Job like the API: at once without a kubelet, otherwise after the kubelet has ended the pod.
    pub fn terminate(&mut self, object: &Arc<Object>, grace: Option<u64>) {
        let kind = self.resource("pods");
        let present = self.get(&kind, &object.namespace, &object.name);
        let Some(object) = present.filter(|present| present.uid == object.uid) else { return };
        let mut pod = object.value();
        let own = pod["spec"]["terminationGracePeriodSeconds"].as_u64().unwrap_or(30);
        let grace = grace.unwrap_or(own);
        if !self.has_kubelet(&object) || object.node_name.is_empty() || has_ended(&pod) || grace == 0 {
            self.remove(&kind, &object);
        } else if pod["metadata"]["deletionTimestamp"].is_null() {
            let end = Timestamp::now() + SignedDuration::from_secs(i64::try_from(grace).unwrap_or(30));
            pod["metadata"]["deletionTimestamp"] = json!(text(end));
            pod["metadata"]["deletionGracePeriodSeconds"] = json!(grace);
            self.replace(&kind, &object, pod);
        }
    }

    /// Marks a pod that is about to be deleted involuntarily.
    pub fn mark_disrupted(&mut self, object: &Arc<Object>, reason: &str, message: &str) {
        let kind = self.resource("pods");
        let mut pod = object.value();
        set_condition(&mut pod, "DisruptionTarget", true, reason, message);
        self.replace(&kind, object, pod);
    }
}
