//! Adapter: writes of a pass to the cluster: what is proved directly before a change, and the labels of nodes.

use std::collections::BTreeSet;

use futures::{StreamExt, stream};

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

/// Writes the labels that tell nodes which kernel they may boot, where they are not right. Those that were written are
/// right afterwards; what fails is logged, once for each fault, and planned again by the next pass.
pub(super) async fn label_nodes(parts: &Parts, cluster: &dyn Cluster, nodes: &mut [PlannedNode]) {
    let planned: Vec<_> =
        nodes.iter().enumerate().filter_map(|(place, node)| Some((place, node.change.clone()?))).collect();
    let outcomes = stream::iter(planned)
        .take_while(|_| std::future::ready(!parts.cancel.is_cancelled()))
        .map(|(place, change)| async move { (place, cluster.apply(&change).await) })
        .buffer_unordered(AT_ONCE)
        .collect::<Vec<_>>()
        .await;
    let mut faults = BTreeSet::new();
    for (place, outcome) in outcomes {
        match outcome {
            Ok(()) => nodes[place].change = None,
            Err(error) => drop(faults.insert(error_chain(&error))),
        }
    }
    for error in faults {
        tracing::warn!(error, "nodes cannot be told which kernel they may boot");
    }
}
