//! Adapter: tells nodes which kernel they may boot.

use std::collections::BTreeSet;

use futures::{StreamExt, stream};

use super::{Controller, chain, observe::AT_ONCE};
use crate::{cluster::Cluster, plan::PlannedNode};

impl Controller {
    /// Writes the marks that are not right. Those that were written are right afterwards; what fails is logged, once for
    /// each fault, and planned again by the next pass.
    pub async fn mark_nodes(&self, cluster: &dyn Cluster, nodes: &mut [PlannedNode]) {
        let planned: Vec<_> = nodes
            .iter()
            .enumerate()
            .filter_map(|(place, node)| Some((place, node.change.clone()?)))
            .collect();
        let outcomes = stream::iter(planned)
            .take_while(|_| std::future::ready(!self.cancel.is_cancelled()))
            .map(|(place, change)| async move { (place, cluster.apply(&change).await) })
            .buffer_unordered(AT_ONCE)
            .collect::<Vec<_>>()
            .await;
        let mut faults = BTreeSet::new();
        for (place, outcome) in outcomes {
            match outcome {
                Ok(()) => nodes[place].change = None,
                Err(error) => drop(faults.insert(chain(&error))),
            }
        }
        for error in faults {
            tracing::warn!(error, "nodes cannot be told which kernel they may boot");
        }
    }
}
