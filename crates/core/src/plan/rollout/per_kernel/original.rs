//! Pure: a DaemonSet that is rolled out by kernel, as the cluster has it: its copies, and the nodes that they have.

use std::collections::BTreeMap;

use super::super::{
    DaemonSetFacts,
    copy::{FoundCopy, read_copy},
    handover::{handover_label, is_fenced, is_handed_over, without_fence},
};
use crate::{
    kernel::KernelTarget,
    plan::{ClusterSnapshot, LiveDaemonSet, NodeFacts, Shared},
};

/// The DaemonSet that copies are made of.
pub(in super::super) struct Original<'a> {
    pub(super) facts: &'a DaemonSetFacts,
    pub(super) live: &'a LiveDaemonSet,
    /// The handover label's key.
    pub(super) label: String,
    /// The same without what farrier added to its affinity.
    pub(super) base: DaemonSetFacts,
    pub(super) copies: BTreeMap<KernelTarget, FoundCopy<'a>>,
    nodes: &'a [Shared<NodeFacts>],
}

impl<'a> Original<'a> {
    /// Finds its copies.
    pub(in super::super) fn observe(
        snapshot: &'a ClusterSnapshot,
        facts: &'a DaemonSetFacts,
        live: &'a LiveDaemonSet,
    ) -> Self {
        let label = handover_label(&facts.namespace, &facts.name);
        let base = DaemonSetFacts { affinity: without_fence(&facts.affinity, &label), ..facts.clone() };
        let copies = snapshot.daemon_sets.iter().filter_map(|found| read_copy(facts, found));
        let copies = copies.map(|copy| (copy.target.clone(), copy)).collect();
        Self { facts, live, label, base, copies, nodes: &snapshot.nodes }
    }

    /// Does it keep off nodes that are handed over?
    pub(super) fn is_fenced(&self) -> bool {
        is_fenced(&self.facts.affinity, &self.label)
    }

    /// Nodes that carry the handover label, whether or not it reaches them.
    pub(super) fn marked_nodes(&self) -> impl Iterator<Item = &'a NodeFacts> {
        self.nodes.iter().map(|node| &**node).filter(|node| is_handed_over(node, &self.label))
    }
}
