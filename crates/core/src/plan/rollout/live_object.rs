//! Objects of a live cluster that rollouts write.

use std::collections::BTreeMap;

use super::RolloutObject;
use crate::plan::{
    ClusterSnapshot, DaemonSetFacts, LiveDaemonSet, ResourceFacts, labels::has_pause_annotation,
};

/// Object of a live cluster.
#[derive(Clone, Copy)]
pub(super) enum LiveObject<'a> {
    DaemonSet(&'a DaemonSetFacts, &'a LiveDaemonSet),
    Resource(&'a ResourceFacts),
}

impl<'a> LiveObject<'a> {
    /// Returns all objects of the cluster.
    pub(super) fn all(snapshot: &'a ClusterSnapshot) -> impl Iterator<Item = Self> {
        let daemon_sets = snapshot.daemon_sets.iter();
        let daemon_sets = daemon_sets.filter_map(|facts| Some(Self::DaemonSet(facts, facts.live.as_ref()?)));
        daemon_sets.chain(snapshot.resources.iter().map(Self::Resource))
    }

    /// Returns `namespace/name` of a DaemonSet, `Kind/name` of an operator's resource.
    pub(super) fn name(self) -> String {
        match self {
            Self::DaemonSet(DaemonSetFacts { namespace, name, .. }, _) => format!("{namespace}/{name}"),
            Self::Resource(ResourceFacts { kind, name, .. }) => format!("{kind}/{name}"),
        }
    }

    /// Whether a rollout names the object.
    pub(super) fn is_named_by(self, object: &RolloutObject) -> bool {
        match (self, object) {
            (Self::DaemonSet(facts, _), RolloutObject::DaemonSet(name)) => facts.is_named(name),
            (Self::Resource(facts), RolloutObject::Resource(name)) => facts.is_named(name),
            _ => false,
        }
    }

    /// Returns farrier's annotations.
    pub(super) fn annotations(self) -> &'a BTreeMap<String, String> {
        match self {
            Self::DaemonSet(_, live) => &live.annotations,
            Self::Resource(facts) => &facts.annotations,
        }
    }

    /// Whether the object has the annotation that pauses rollouts.
    pub(super) fn is_paused(self) -> bool {
        has_pause_annotation(self.annotations())
    }
}
