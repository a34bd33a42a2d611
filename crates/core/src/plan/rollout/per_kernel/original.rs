//! The original DaemonSet of a `per-kernel` rollout, with its copies and their nodes.

use std::collections::BTreeMap;

use super::super::{
    DaemonSetFacts,
    copy::{LiveCopy, read_copy},
    handover::{handover_label, is_fenced, is_handed_over, without_fence},
};
use crate::{
    kernel::KernelTarget,
    plan::{ClusterSnapshot, CowArc, Instance, LiveDaemonSet, NodeFacts, Placement},
};

/// DaemonSet that the copies are made from.
pub(in super::super) struct Original<'a> {
    pub(super) facts: &'a DaemonSetFacts,
    pub(super) live: &'a LiveDaemonSet,
    /// Key of the handover label.
    pub(super) label: String,
    /// Placement of the DaemonSet, without the fence.
    pub(super) base: Placement,
    pub(super) copies: BTreeMap<KernelTarget, LiveCopy<'a>>,
    nodes: &'a [CowArc<NodeFacts>],
}

impl<'a> Original<'a> {
    /// Finds the copies of the DaemonSet.
    pub(in super::super) fn observe(
        snapshot: &'a ClusterSnapshot,
        facts: &'a DaemonSetFacts,
        live: &'a LiveDaemonSet,
    ) -> Self {
        let label = handover_label(&facts.namespace, &facts.name);
        let affinity = without_fence(&facts.placement.affinity, &label);
        let base = Placement { affinity, ..facts.placement.clone() };
        let copies = snapshot.daemon_sets.iter().filter_map(|daemon_set| read_copy(facts, daemon_set));
        let copies = copies.map(|copy| (copy.target.clone(), copy)).collect();
        Self { facts, live, label, base, copies, nodes: &snapshot.nodes }
    }

    /// Whether the fence keeps the DaemonSet off handed-over nodes.
    pub(super) fn is_fenced(&self) -> bool {
        is_fenced(&self.facts.placement.affinity, &self.label)
    }

    /// Returns another farrier that set the image of a copy, and the name of the copy.
    pub(super) fn other_owner(&self, instance: &Instance) -> Option<(&String, &String)> {
        let mut owners =
            self.copies.values().filter_map(|copy| Some((&copy.record.as_ref()?.by, &copy.facts.name)));
        owners.find(|(name, _)| !name.is_empty() && **name != instance.to_string())
    }

    /// Returns the nodes with the handover label, whether or not the DaemonSet reaches them.
    pub(super) fn marked_nodes(&self) -> impl Iterator<Item = &'a NodeFacts> {
        self.nodes.iter().map(|node| &**node).filter(|node| is_handed_over(node, &self.label))
    }
}
