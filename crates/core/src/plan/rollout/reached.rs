//! Pure: the nodes that a rollout reaches, and their kernels.

use std::collections::BTreeMap;

use super::{DaemonSetFacts, HoldReason, NodeGroup};
use crate::{
    kernel::KernelTarget,
    plan::{NodeAffinity, NodeFacts, NodeReason},
};

/// Kernels of the nodes that a rollout reaches.
#[derive(Default)]
pub(super) struct Reached<'a> {
    /// Number of nodes by kernel.
    pub(super) kernels: BTreeMap<&'a KernelTarget, usize>,
    /// Nodes whose kernel is unknown.
    pub(super) unknown: Vec<(&'a NodeFacts, &'a NodeReason)>,
}

impl<'a> Reached<'a> {
    /// Returns the kernels of the nodes that a DaemonSet reaches.
    pub(super) fn by(daemon_set: &DaemonSetFacts, groups: &'a [NodeGroup<'a>]) -> Result<Self, HoldReason> {
        let mut found = Self::default();
        for group in groups {
            found.add(group, reached(daemon_set, group)?);
        }
        Ok(found)
    }

    /// Adds reached nodes of a group.
    pub(super) fn add(&mut self, group: &'a NodeGroup<'a>, nodes: Vec<&'a NodeFacts>) {
        match &group.target {
            _ if nodes.is_empty() => {}
            // No rollout waits for a node whose kernel is rejected.
            Err(why) if why.is_rejected_claim() => {}
            Ok(kernel) => *self.kernels.entry(kernel).or_default() += nodes.len(),
            Err(why) => self.unknown.extend(nodes.into_iter().map(|node| (node, why))),
        }
    }

    /// Returns the kernels; there is at least one. Every reached node's kernel must be known.
    pub(super) fn known(self) -> Result<BTreeMap<&'a KernelTarget, usize>, HoldReason> {
        match unknown_node(self.unknown.into_iter()) {
            Some(why) => Err(why),
            None if self.kernels.is_empty() => Err(HoldReason::NoNodes),
            None => Ok(self.kernels),
        }
    }
}

/// Returns the hold that names the first of these nodes and their number.
pub(super) fn unknown_node<'a>(
    nodes: impl Iterator<Item = (&'a NodeFacts, &'a NodeReason)> + Clone,
) -> Option<HoldReason> {
    let count = nodes.clone().count();
    let (node, why) = nodes.min_by_key(|(node, why)| (&node.name, *why))?;
    Some(HoldReason::UnknownNode { node: node.name.clone(), count, why: why.clone() })
}

/// Returns the group's nodes that the DaemonSet reaches.
pub(super) fn reached<'a>(
    daemon_set: &DaemonSetFacts,
    group: &NodeGroup<'a>,
) -> Result<Vec<&'a NodeFacts>, HoldReason> {
    let reaches = |node: &NodeFacts| daemon_set.reaches(node).ok_or_else(|| not_understood(daemon_set));
    if !daemon_set.affinity.names_nodes() {
        return Ok(if reaches(group.sample)? { group.nodes.clone() } else { Vec::new() });
    }
    let mut nodes = Vec::new();
    for node in &group.nodes {
        if reaches(node)? {
            nodes.push(*node);
        }
    }
    Ok(nodes)
}

/// Returns the hold for a DaemonSet whose reached nodes are unknown.
fn not_understood(found: &DaemonSetFacts) -> HoldReason {
    let detail = match &found.affinity {
        NodeAffinity::Unsupported(detail) => detail.clone(),
        NodeAffinity::Any | NodeAffinity::Terms(_) => "a field other than metadata.name".to_owned(),
    };
    HoldReason::Affinity { detail }
}
