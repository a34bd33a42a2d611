//! The original DaemonSet of a `per-kernel` rollout, with its copies and their nodes.

use std::collections::BTreeMap;

use super::{
    super::{
        DaemonSetFacts,
        copy::{LiveCopy, copies_of},
        handover::{handover_label, is_fenced, is_handed_over, without_fence},
    },
    OriginalRecord,
};
use crate::{
    kernel::KernelTarget,
    plan::{ClusterSnapshot, CowArc, Instance, LiveDaemonSet, NodeFacts, Placement, ReachingObject},
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
        let copies = copies_of(facts, &snapshot.daemon_sets);
        let copies = copies.map(|copy| (copy.target.clone(), copy)).collect();
        Self { facts, live, label, base, copies, nodes: &snapshot.nodes }
    }

    /// Returns the object whose pods are those of the original and of its copies.
    pub(in super::super) fn reaching_object<'o>(
        &'o self,
        snapshot: &'o ClusterSnapshot,
    ) -> ReachingObject<'o> {
        let copies = self.copies.values().map(|copy| copy.live);
        let uids = copies.chain([self.live]).map(|live| live.version.uid.as_str());
        ReachingObject::new(&self.base, snapshot, uids)
    }

    /// Whether a person rolled back the rollout.
    pub(in super::super) fn is_rolled_back(&self) -> bool {
        OriginalRecord::read(self.live).is_rolled_back()
    }

    /// Whether a copy has no working image.
    pub(in super::super) fn has_failed_copies(&self) -> bool {
        self.copies.values().any(|copy| copy.failure().is_some())
    }

    /// Returns the reason why a node that boots a kernel would get no driver. `stop` is the reason why the rollout neither
    /// creates copies nor hands nodes over.
    pub(in super::super) fn obstacle(
        &self,
        node: &NodeFacts,
        kernel: &KernelTarget,
        stop: Option<&str>,
    ) -> Option<String> {
        let copy = self.copies.get(kernel).filter(|copy| !copy.live.deleting);
        if let Some(failed) = copy.and_then(LiveCopy::failure) {
            return Some(failed.hold(kernel).to_string());
        }
        let has_copy = copy.is_some() && is_handed_over(node, &self.label) && !self.is_rolled_back();
        stop.filter(|_| !has_copy).map(str::to_owned)
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
