//! Pure: an object of the cluster as it is kept, and which of its states are one and the same for a plan.

use std::collections::VecDeque;

use crate::plan::{
    DaemonSetFacts, JobState, NodeFacts, ObjectVersion, PodFacts, ResourceFacts, Shared, WorkloadFacts,
};

/// Namespace and name: what tells objects of one watch apart.
pub(super) type Key = (String, String);

/// An object, cut down to facts, and its state.
#[derive(Clone, Debug)]
pub(super) struct Object {
    pub(super) version: ObjectVersion,
    pub(super) facts: Facts,
}

#[derive(Clone, Debug)]
pub(super) enum Facts {
    Node(Shared<NodeFacts>),
    DaemonSet(Box<DaemonSetFacts>),
    Pod(Box<PodFacts>),
    Resource(Box<ResourceFacts>),
    Workload(Box<WorkloadFacts>),
    Check(Key, JobState),
}

impl Facts {
    /// The keys of the node labels by which the object selects nodes. The store keeps those labels and no others, so a
    /// kind that selects nodes must name its keys here.
    pub(super) fn label_keys(&self) -> Vec<&str> {
        match self {
            Self::DaemonSet(facts) => facts.label_keys().collect(),
            Self::Resource(facts) => facts.label_keys().collect(),
            Self::Node(_) | Self::Pod(_) | Self::Workload(_) | Self::Check(..) => Vec::new(),
        }
    }
}

impl Object {
    pub(super) fn key(&self) -> Key {
        match &self.facts {
            Facts::Node(node) => (String::new(), node.name.clone()),
            Facts::DaemonSet(facts) => (facts.namespace.clone(), facts.name.clone()),
            Facts::Pod(facts) => (facts.namespace.clone(), facts.name.clone()),
            Facts::Resource(facts) => (String::new(), facts.name.clone()),
            Facts::Workload(facts) => (facts.namespace.clone(), facts.name.clone()),
            Facts::Check(key, _) => key.clone(),
        }
    }

    /// Is it a newer state of the same object? Resource versions are comparable as numbers (KEP-5504); what is no
    /// number is taken for newer.
    pub(super) fn is_newer_than(&self, other: &Self) -> bool {
        let number = |object: &Self| object.version.resource_version.parse::<u128>();
        let newer = matches!((number(self), number(other)), (Ok(own), Ok(other)) if own > other);
        newer && self.version.uid == other.version.uid
    }

    /// Does it differ from another state in nothing that a plan looks at?
    fn is_like(&self, other: &Self) -> bool {
        let like = match (&self.facts, &other.facts) {
            (Facts::Node(old), Facts::Node(new)) => old == new,
            // The manifest is all there is, but for the version.
            (Facts::DaemonSet(old), Facts::DaemonSet(new)) => match (&old.live, &new.live) {
                (Some(old), Some(new)) => old.manifest == new.manifest,
                (None | Some(_), None) | (None, Some(_)) => false,
            },
            (Facts::Pod(old), Facts::Pod(new)) => {
                PodFacts { version: new.version.clone(), ..(**old).clone() } == **new
            }
            (Facts::Resource(old), Facts::Resource(new)) => {
                (&old.annotations, &old.spec) == (&new.annotations, &new.spec)
            }
            (Facts::Workload(old), Facts::Workload(new)) => old == new,
            (Facts::Check(_, old), Facts::Check(_, new)) => old == new,
            _ => false,
        };
        like && self.version.uid == other.version.uid
    }
}

/// An object, and the resource versions that differ from its present one in nothing that a plan looks at.
#[derive(Debug)]
pub(super) struct Kept {
    pub(super) object: Object,
    same: VecDeque<String>,
}

/// So many resource versions are remembered: a DaemonSet's status changes once or twice for each of its pods.
const SAME: usize = 256;

impl Kept {
    pub(super) fn new(object: Object) -> Self {
        Self { object, same: VecDeque::new() }
    }

    /// Takes over another state of the object; returns whether a plan can tell it from the one before.
    pub(super) fn replace(&mut self, object: Object) -> bool {
        if !self.object.is_like(&object) {
            *self = Self::new(object);
            return true;
        }
        let before = std::mem::replace(&mut self.object, object).version.resource_version;
        // Only these are written with the state that a plan saw as a precondition.
        let is_written = matches!(self.object.facts, Facts::DaemonSet(_) | Facts::Resource(_));
        if is_written && !self.same.contains(&before) {
            self.same.push_back(before);
            if self.same.len() > SAME {
                self.same.pop_front();
            }
        }
        false
    }

    /// Is this state like the present one, for a plan?
    pub(super) fn is_same(&self, version: &ObjectVersion) -> bool {
        let ObjectVersion { uid, resource_version } = version;
        let present = &self.object.version;
        *uid == present.uid
            && (*resource_version == present.resource_version || self.same.contains(resource_version))
    }
}
