//! A reconcile's writes to the cluster: the check before each change, node labels, and upgrade steps.

use std::collections::BTreeSet;

use farrier_builder::services::{BuildError, ImageAccess, MAX_CONCURRENT_REQUESTS, ProblemKind, Result};
use farrier_cluster::{Cluster, ClusterError};
use farrier_core::plan::{Change, NodeWriteLimiter, PlannedNode};
use futures::{StreamExt, stream};
use oci::error_chain;
use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Verifies directly before a write that each image that the change sets is still in the registry (guarantee 1). The plan has
/// already decided that the check of the same digest passed for every node that the change reaches.
pub(super) async fn ensure_published(access: &ImageAccess, change: &Change) -> Result<()> {
    for reference in change.required_images() {
        if access.registry.manifest(&reference.repository, &reference.version).await?.is_none() {
            let message = format!("{reference} is no longer in the registry");
            return Err(BuildError::problem(ProblemKind::Unmet, message, None));
        }
    }
    Ok(())
}

/// Writes the next-kernel labels of nodes, and backs off where another writer reverts them.
#[derive(Debug)]
pub(super) struct NodeLabeler {
    limiter: NodeWriteLimiter,
    /// Reference point for the times in `limiter`.
    started: Instant,
    /// Whether the warning about another writer has been logged.
    warned: bool,
}

impl NodeLabeler {
    pub(super) fn new(started: Instant) -> Self {
        Self { limiter: NodeWriteLimiter::default(), started, warned: false }
    }

    /// Returns the changes to write now, each with its node's index. Logs one warning when nodes are skipped because
    /// another writer reverts their labels.
    fn due(&mut self, nodes: &[PlannedNode]) -> Vec<(usize, Change)> {
        let (due, contested) = self.limiter.due(nodes, self.started.elapsed());
        if let Some(node) = contested.first().filter(|_| !self.warned) {
            let hint = "give each farrier of the cluster its own name with --instance; farrier writes to the nodes again later";
            let count = contested.len();
            tracing::warn!(
                node,
                count,
                hint,
                "another writer reverts farrier's labels for the next kernel of nodes"
            );
        }
        self.warned = !contested.is_empty();
        due
    }

    fn note(&mut self, node: &str, change: Change) {
        self.limiter.note(node, change, self.started.elapsed());
    }
}

/// Writes of next-kernel labels.
#[derive(Debug, Default)]
pub(super) struct NodeLabelWrites {
    /// Nodes that were written.
    pub(super) nodes: BTreeSet<String>,
    /// Descriptions of the writes.
    pub(super) steps: Vec<String>,
}

/// Updates stale labels that tell nodes which kernel they may boot. Logs each distinct error once. The next reconcile plans the
/// failed writes again.
pub(super) async fn label_nodes(
    cancel: &CancellationToken,
    cluster: &dyn Cluster,
    nodes: &[PlannedNode],
    labels: &mut NodeLabeler,
) -> NodeLabelWrites {
    let outcomes = stream::iter(labels.due(nodes))
        .take_while(|_| std::future::ready(!cancel.is_cancelled()))
        .map(|(index, change)| async move { (index, cluster.apply(&change).await, change) })
        .buffer_unordered(MAX_CONCURRENT_REQUESTS)
        .collect::<Vec<_>>()
        .await;
    let (mut faults, mut written) = (BTreeSet::new(), NodeLabelWrites::default());
    for (index, outcome, change) in outcomes {
        match outcome {
            Ok(()) => {
                let node = &nodes[index].node;
                written.steps.push(change.step());
                written.nodes.insert(node.clone());
                labels.note(node, change);
            }
            Err(error) => drop(faults.insert(error_chain(&error))),
        }
    }
    for error in faults {
        tracing::warn!(error, "the labels for the next kernel cannot be written to nodes");
    }
    written.steps.sort();
    written
}

/// Applies upgrade steps independently: a refused step does not hold the others, and the next reconcile plans the refused step
/// again. Returns the applied steps, and the pods whose eviction was refused or not requested, and is to be retried later.
pub(super) async fn apply_upgrade_steps(
    cancel: &CancellationToken,
    cluster: &dyn Cluster,
    steps: Vec<Change>,
) -> (Vec<String>, Vec<String>) {
    let unanswered = Mutex::default();
    let unanswered = &unanswered;
    let outcomes = stream::iter(steps)
        .take_while(|_| std::future::ready(!cancel.is_cancelled()))
        .map(|step| async move { (apply_upgrade_step(cluster, &step, unanswered).await, step) })
        .buffer_unordered(MAX_CONCURRENT_REQUESTS)
        .collect::<Vec<_>>()
        .await;
    let (mut applied, mut refused) = (Vec::new(), Vec::new());
    for (outcome, step) in outcomes {
        let object = step.object();
        match outcome {
            None => refused.push(object),
            Some(Ok(())) => {
                let step = step.step();
                tracing::info!(object, step, "change applied");
                applied.push(step);
            }
            // On a conflict the pod is gone, as intended, or the object has changed and the next reconcile decides again.
            Some(Err(error)) if error.is_conflict() => tracing::debug!(object, "upgrade step is stale"),
            Some(Err(error)) => {
                if let Some(detail) = error.disruption() {
                    tracing::info!(object, detail, "a pod may not be evicted now");
                } else {
                    tracing::warn!(object, error = error_chain(&error), "upgrade step failed");
                }
                if matches!(step, Change::Restart(_)) {
                    refused.push(object);
                }
            }
        }
    }
    (applied, refused)
}

/// Applies an upgrade step. After an eviction without an answer, as from a webhook that does not run, returns `None` for further
/// evictions in the pod's namespace: each would hold the reconcile until its timeout.
async fn apply_upgrade_step(
    cluster: &dyn Cluster,
    step: &Change,
    unanswered: &Mutex<BTreeSet<String>>,
) -> Option<std::result::Result<(), ClusterError>> {
    let Change::Restart(pod) = step else { return Some(cluster.apply(step).await) };
    if unanswered.lock().contains(&pod.namespace) {
        return None;
    }
    let outcome = cluster.apply(step).await;
    if outcome.as_ref().is_err_and(ClusterError::is_unreachable) {
        unanswered.lock().insert(pod.namespace.clone());
    }
    Some(outcome)
}

#[cfg(test)]
mod tests {
    use farrier_builder::testing::{self, Logs};
    use farrier_cluster::ApiError;
    use farrier_core::plan::{PodRestart, testing::Fleet};

    use super::*;

    #[tokio::test(flavor = "local", start_paused = true)]
    async fn a_refused_eviction_is_retried_later_whatever_the_reason() {
        let cluster = testing::Fleet::new(|state| {
            let silent = || ApiError::Unavailable("failed calling webhook".to_owned());
            state.refused.insert("a".to_owned(), silent());
            state.refused.insert("b".to_owned(), silent());
            state.refused.insert("d".to_owned(), ApiError::Rejected("denied".to_owned()));
            state.refused.insert("e".to_owned(), ApiError::Gone);
        });
        let evict = |(namespace, name): (&str, &str)| {
            Change::Restart(PodRestart {
                namespace: namespace.to_owned(),
                name: name.to_owned(),
                ..PodRestart::default()
            })
        };
        let pods = [("jobs", "a"), ("jobs", "b"), ("drivers", "c"), ("vm", "d"), ("vm", "e")];
        let steps = pods.map(evict).to_vec();
        let (applied, mut refused) = apply_upgrade_steps(&CancellationToken::new(), &*cluster, steps).await;
        refused.sort();
        assert_eq!(refused, ["pod jobs/a", "pod jobs/b", "pod vm/d"]);
        assert_eq!(
            (applied.len(), cluster.state().evictions.len()),
            (1, 4),
            "jobs/b would have no answer either"
        );
    }

    #[test]
    fn another_writer_of_marks_is_said_once() {
        let logs = Logs::start();
        let mut fleet = Fleet::new(&["6.1.0-47-amd64"]);
        fleet.node(0).labels.remove("pci");
        fleet.announce(0, "6.1.0-48-amd64");
        let nodes = fleet.plan().nodes;
        let mut labels = NodeLabeler::new(Instant::now());
        for _ in 0..9 {
            for (index, change) in labels.due(&nodes) {
                labels.note(&nodes[index].node, change);
            }
        }
        let said = logs.with("another writer");
        assert!(said.len() == 1 && said[0].contains("--instance"), "{said:?}");
    }
}
