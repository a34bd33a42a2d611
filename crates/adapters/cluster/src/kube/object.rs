//! Objects in the store, each with its earlier versions that are equivalent to the current one for a plan.

use std::collections::VecDeque;

use farrier_core::plan::{
    CowArc, DaemonSetFacts, JobState, NodeFacts, ObjectVersion, Placement, PodFacts, ResourceFacts,
    WorkloadFacts,
};

/// Namespace and name, which identify an object within one watch.
pub(super) type ObjectKey = (String, String);

/// An object, reduced to the facts that plans use, and its version.
#[derive(Clone, Debug)]
pub(super) struct Object {
    pub(super) version: ObjectVersion,
    pub(super) facts: ObjectFacts,
}

#[derive(Clone, Debug)]
pub(super) enum ObjectFacts {
    Node(CowArc<NodeFacts>),
    DaemonSet(Box<DaemonSetFacts>),
    Pod(Box<PodFacts>),
    Resource(Box<ResourceFacts>),
    Workload(Box<WorkloadFacts>),
    Check(ObjectKey, JobState),
}

impl ObjectFacts {
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
    pub(super) fn key(&self) -> ObjectKey {
        match &self.facts {
            ObjectFacts::Node(node) => (String::new(), node.name.clone()),
            ObjectFacts::DaemonSet(facts) => (facts.namespace.clone(), facts.name.clone()),
            ObjectFacts::Pod(facts) => (facts.namespace.clone(), facts.name.clone()),
            ObjectFacts::Resource(facts) => {
                let (namespace, name) = facts.split_name();
                (namespace.to_owned(), name.to_owned())
            }
            ObjectFacts::Workload(facts) => (facts.namespace.clone(), facts.name.clone()),
            ObjectFacts::Check(key, _) => key.clone(),
        }
    }

    /// Whether this is a newer state of the same object. Resource versions are comparable as numbers (KEP-5504). Returns false if
    /// one of them is not a number.
    pub(super) fn is_newer_than(&self, other: &Self) -> bool {
        let number = |object: &Self| object.version.resource_version.parse::<u128>();
        let newer = matches!((number(self), number(other)), (Ok(own), Ok(other)) if own > other);
        newer && self.version.uid == other.version.uid
    }

    /// Whether the states are equivalent for a plan.
    fn is_equivalent_for_plan(&self, other: &Self) -> bool {
        let is_equivalent = match (&self.facts, &other.facts) {
            (ObjectFacts::Node(old), ObjectFacts::Node(new)) => old == new,
            // The manifest contains all facts except the version and the owned fields.
            (ObjectFacts::DaemonSet(old), ObjectFacts::DaemonSet(new)) => match (&old.live, &new.live) {
                (Some(old), Some(new)) => (&old.owned, &old.manifest) == (&new.owned, &new.manifest),
                (None | Some(_), None) | (None, Some(_)) => false,
            },
            (ObjectFacts::Pod(old), ObjectFacts::Pod(new)) => {
                PodFacts { version: new.version.clone(), ..(**old).clone() } == **new
            }
            (ObjectFacts::Resource(old), ObjectFacts::Resource(new)) => {
                (&old.annotations, &old.owned, &old.spec) == (&new.annotations, &new.owned, &new.spec)
            }
            (ObjectFacts::Workload(old), ObjectFacts::Workload(new)) => old == new,
            (ObjectFacts::Check(_, old), ObjectFacts::Check(_, new)) => old == new,
            _ => false,
        };
        is_equivalent && self.version.uid == other.version.uid
    }
}

/// An object, and the earlier resource versions that are equivalent to the current one for a plan.
#[derive(Debug)]
pub(super) struct StoredObject {
    pub(super) object: Object,
    /// Earlier resource versions, the newest last.
    equivalent_versions: VecDeque<String>,
}

/// Maximum number of equivalent resource versions to keep. A DaemonSet's status changes once or twice for each of its pods.
const MAX_EQUIVALENT_VERSIONS: usize = 256;

impl StoredObject {
    pub(super) fn new(object: Object) -> Self {
        Self { object, equivalent_versions: VecDeque::new() }
    }

    /// Replaces the object's state. Returns whether the change matters for a plan.
    pub(super) fn replace(&mut self, object: Object) -> bool {
        if !self.object.is_equivalent_for_plan(&object) {
            *self = Self::new(object);
            return true;
        }
        let before = std::mem::replace(&mut self.object, object).version.resource_version;
        // Only writes of these kinds have the plan's resource version as a precondition.
        let has_precondition =
            matches!(self.object.facts, ObjectFacts::DaemonSet(_) | ObjectFacts::Resource(_));
        if has_precondition && !self.equivalent_versions.contains(&before) {
            self.equivalent_versions.push_back(before);
            if self.equivalent_versions.len() > MAX_EQUIVALENT_VERSIONS {
                self.equivalent_versions.pop_front();
            }
        }
        false
    }

    /// Whether this version is equivalent to the current one for a plan.
    pub(super) fn is_equivalent_version(&self, version: &ObjectVersion) -> bool {
        let ObjectVersion { uid, resource_version } = version;
        let current = &self.object.version;
        *uid == current.uid
            && (*resource_version == current.resource_version
                || self.equivalent_versions.contains(resource_version))
    }
}
