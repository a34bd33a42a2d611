//! An object in the store, with the earlier versions of the object that are equivalent for a plan.

use std::collections::VecDeque;

use farrier_core::plan::{
    CowArc, DaemonSetFacts, JobState, NodeFacts, ObjectVersion, Placement, PodFacts, ResourceFacts,
    WorkloadFacts,
};

/// Namespace and name, which identify an object within one watch.
pub(super) type Key = (String, String);

/// An object, reduced to facts, and its version.
#[derive(Clone, Debug)]
pub(super) struct Object {
    pub(super) version: ObjectVersion,
    pub(super) facts: Facts,
}

#[derive(Clone, Debug)]
pub(super) enum Facts {
    Node(CowArc<NodeFacts>),
    DaemonSet(Box<DaemonSetFacts>),
    Pod(Box<PodFacts>),
    Resource(Box<ResourceFacts>),
    Workload(Box<WorkloadFacts>),
    Check(Key, JobState),
}

impl Facts {
    /// Returns the keys of the node labels that the object's selectors use. The store keeps only those labels, so a kind that
    /// selects nodes must name its keys here.
    pub(super) fn label_keys(&self) -> Vec<String> {
        let keys = |placement: &Placement| placement.label_keys().map(str::to_owned).collect();
        match self {
            Self::DaemonSet(facts) => keys(&facts.placement),
            Self::Resource(facts) => keys(&facts.placement()),
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

    /// Whether this is a newer state of the same object. Resource versions are comparable as numbers (KEP-5504). If one of them
    /// is not a number, the result is false.
    pub(super) fn is_newer_than(&self, other: &Self) -> bool {
        let number = |object: &Self| object.version.resource_version.parse::<u128>();
        let newer = matches!((number(self), number(other)), (Ok(own), Ok(other)) if own > other);
        newer && self.version.uid == other.version.uid
    }

    /// Whether the states are equivalent for a plan.
    fn is_equivalent_for_plan(&self, other: &Self) -> bool {
        let like = match (&self.facts, &other.facts) {
            (Facts::Node(old), Facts::Node(new)) => old == new,
            // The manifest contains all facts except the version.
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

/// An object, and earlier resource versions of it that are equivalent to the current one for a plan.
#[derive(Debug)]
pub(super) struct StoredObject {
    pub(super) object: Object,
    same: VecDeque<String>,
}

/// Maximum number of equivalent resource versions to keep. A DaemonSet's status changes once or twice for each of its pods.
const SAME: usize = 256;

impl StoredObject {
    pub(super) fn new(object: Object) -> Self {
        Self { object, same: VecDeque::new() }
    }

    /// Replaces the state of the object. Returns whether the new state differs for a plan.
    pub(super) fn replace(&mut self, object: Object) -> bool {
        if !self.object.is_equivalent_for_plan(&object) {
            *self = Self::new(object);
            return true;
        }
        let before = std::mem::replace(&mut self.object, object).version.resource_version;
        // Keep versions only of the kinds that are written with the plan's resource version as a precondition.
        let is_written = matches!(self.object.facts, Facts::DaemonSet(_) | Facts::Resource(_));
        if is_written && !self.same.contains(&before) {
            self.same.push_back(before);
            if self.same.len() > SAME {
                self.same.pop_front();
            }
        }
        false
    }

    /// Whether this version is equivalent to the current one for a plan.
    pub(super) fn is_same(&self, version: &ObjectVersion) -> bool {
        let ObjectVersion { uid, resource_version } = version;
        let present = &self.object.version;
        *uid == present.uid
            && (*resource_version == present.resource_version || self.same.contains(resource_version))
    }
}
