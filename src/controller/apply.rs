//! Adapter: writes of a pass to the cluster: what is proved directly before a change, and the labels of nodes.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use futures::{StreamExt, stream};
use tokio::time::Instant;

use crate::{
    cluster::Cluster,
    error_chain,
    parts::{AT_ONCE, FindingKind, Parts, TargetError},
    plan::{Change, PlannedNode},
};

/// Guarantee 1 once more, directly before a write: each image that the change points at is in the registry, by digest.
/// That its check passed for the kernel of every node that the change reaches was decided from the same digest, and
/// what a digest names cannot change.
pub(super) async fn prove(parts: &Parts, change: &Change) -> Result<(), TargetError> {
    for reference in change.proof() {
        if parts.registry.manifest(&reference.repository, &reference.version).await?.is_none() {
            let message = format!("{reference} is not in the registry any more");
            return Err(TargetError::finding(FindingKind::Unmet, message, None));
        }
    }
    Ok(())
}

/// So often the same is written to a node within [`A_WHILE`]: then another writer takes it back, and would again.
const TIMES: u32 = 3;
const A_WHILE: Duration = Duration::from_mins(10);

/// What was written to nodes lately.
#[derive(Debug, Default)]
pub(super) struct Marks {
    written: BTreeMap<String, (Change, u32, Instant)>,
    /// Was it said that another writer takes it back?
    told: bool,
}

impl Marks {
    /// Would another writer take it back?
    fn is_contested(&self, node: &str, change: &Change) -> bool {
        self.written.get(node).is_some_and(|(written, times, _)| written == change && *times >= TIMES)
    }

    fn note(&mut self, node: &str, change: Change, now: Instant) {
        let before = self.written.get(node).filter(|(written, ..)| *written == change);
        let (times, since) = before.map_or((1, now), |(_, times, since)| (times + 1, *since));
        self.written.insert(node.to_owned(), (change, times, since));
    }

    /// The nodes to write to, each with its place among all.
    fn planned(&mut self, nodes: &[PlannedNode], now: Instant) -> Vec<(usize, Change)> {
        self.written.retain(|_, (.., since)| now - *since < A_WHILE);
        let changes =
            nodes.iter().enumerate().filter_map(|(place, node)| Some((place, node.change.clone()?)));
        let (contested, planned): (Vec<_>, Vec<_>) =
            changes.partition(|(place, change)| self.is_contested(&nodes[*place].node, change));
        let news = contested.first().filter(|_| !self.told);
        if let Some((place, _)) = news {
            let hint = "two farriers of one cluster need names of their own (--instance); nodes are written to again later";
            let (node, count) = (&nodes[*place].node, contested.len());
            tracing::warn!(
                node,
                count,
                hint,
                "another writer takes back what nodes are told of their next kernel"
            );
        }
        self.told = !contested.is_empty();
        planned
    }
}

/// Writes the labels that tell nodes which kernel they may boot, where they are not right. Those that were written are
/// right afterwards; what fails is logged, once for each fault, and planned again by the next pass.
pub(super) async fn label_nodes(
    parts: &Parts,
    cluster: &dyn Cluster,
    nodes: &mut [PlannedNode],
    marks: &mut Marks,
) {
    let planned = marks.planned(nodes, Instant::now());
    let outcomes = stream::iter(planned)
        .take_while(|_| std::future::ready(!parts.cancel.is_cancelled()))
        .map(|(place, change)| async move { (place, cluster.apply(&change).await, change) })
        .buffer_unordered(AT_ONCE)
        .collect::<Vec<_>>()
        .await;
    let mut faults = BTreeSet::new();
    for (place, outcome, change) in outcomes {
        match outcome {
            Ok(()) => {
                marks.note(&nodes[place].node, change, Instant::now());
                nodes[place].change = None;
            }
            Err(error) => drop(faults.insert(error_chain(&error))),
        }
    }
    for error in faults {
        tracing::warn!(error, "nodes cannot be told which kernel they may boot");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{controller::testing::Logs, plan::testing::Fleet};

    #[test]
    fn a_mark_that_another_writer_takes_back_is_left_for_a_while() {
        let logs = Logs::start();
        let mut fleet = Fleet::new(&["6.1.0-47-amd64"]);
        fleet.node(0).labels.remove("pci");
        fleet.announce(0, "6.1.0-48-amd64");
        let nodes = fleet.plan().nodes;
        let (mut marks, began) = (Marks::default(), Instant::now());
        let mut written = 0;
        for second in 0..100 {
            let now = began + Duration::from_secs(second);
            for (place, change) in marks.planned(&nodes, now) {
                written += 1;
                marks.note(&nodes[place].node, change, now);
            }
        }
        assert_eq!(written, TIMES);
        let said = logs.with("another writer");
        assert!(said.len() == 1 && said[0].contains("--instance"), "{said:?}");
        assert_eq!(marks.planned(&nodes, began + A_WHILE).len(), 1);

        // Another mark is another matter.
        fleet.announce(0, "6.1.0-49-amd64");
        assert_eq!(marks.planned(&fleet.plan().nodes, began).len(), 1);
    }
}
