//! Pure: what is known of the cluster, kept up to date by watches and by what farrier's own writes return.
//!
//! The store says which watches it needs ([`Store::needed`]): the nodes' labels of interest follow from the
//! DaemonSets that were found, and so do the pods. A snapshot is taken when everything needed has been listed, so
//! that a plan never takes what has not arrived yet for something that is not there.

mod states;
mod view;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque},
    sync::Arc,
};

use self::states::{is_newer, older, same_daemon_set, same_resource, track};
use super::{facts, words::MissingRight};
use crate::{
    image::OperatorResource,
    plan::{DaemonSetFacts, Interest, NodeFacts, ObjectVersion, PodFacts, ResourceFacts},
};

/// One watch.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Target {
    DaemonSets,
    Nodes,
    /// Those of one DaemonSet.
    Pods {
        namespace: String,
        daemon_set: String,
        uid: String,
    },
    Resources(OperatorResource),
}

/// What a watch was started for. A watch with another scope than what is needed now is started anew.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum WatchScope {
    /// The DaemonSets that are kept.
    Named(BTreeSet<(String, String)>),
    /// The labels that are kept.
    Labels(BTreeSet<String>),
    /// The pods' selector.
    Selector(String),
    /// All objects.
    All,
}

impl WatchScope {
    fn covers(&self, needed: &Self) -> bool {
        match (self, needed) {
            (Self::Labels(have), Self::Labels(need)) => have.is_superset(need),
            (have, need) => have == need,
        }
    }
}

/// Why a watch brings nothing.
#[derive(Clone, Debug)]
pub(super) enum Trouble {
    /// A right is missing.
    Forbidden(MissingRight),
    /// The credentials are not accepted.
    Unauthorized { attempts: u32, reason: String },
    /// No answer, or not the right one.
    Failing { attempts: u32, reason: String },
    /// The API does not serve this kind.
    Absent,
}

/// After so many failed attempts in a row somebody who waits for a first list is told. With the watch's backoff
/// (0.8 s, doubled each time) that is ten to twenty seconds.
const ATTEMPTS: u32 = 5;

#[derive(Debug)]
struct Watched {
    epoch: u64,
    scope: WatchScope,
    /// The first list is complete.
    synced: bool,
    trouble: Option<Trouble>,
    /// Keys of the list that is under way.
    listed: HashSet<Key>,
}

impl Watched {
    /// Is there nothing to wait for?
    fn settled(&self) -> bool {
        self.synced || matches!(self.trouble, Some(Trouble::Forbidden(_) | Trouble::Absent))
    }
}

/// What tells objects of one watch apart.
pub(super) type Key = (String, String);

/// An object as it arrived.
#[derive(Clone, Debug)]
pub(super) enum Update {
    /// With its resource version.
    Node(NodeFacts, String),
    DaemonSet(Box<DaemonSetFacts>),
    Pod(Box<PodFacts>),
    Resource(ResourceFacts),
}

/// What a watch brings.
#[derive(Clone, Debug)]
pub(super) enum Event {
    /// A list begins.
    Start,
    /// An object of the list.
    Listed(Update),
    /// The list is complete.
    Done,
    /// An object changed.
    Changed(Update),
    /// An object is gone.
    Deleted(Update),
}

/// How far the store is.
pub(super) enum Readiness {
    Ready,
    Waiting,
    /// What everything needs cannot be read.
    Forbidden(MissingRight),
    Unauthorized(String),
    /// A first list has failed too often.
    Failing(String),
}

/// A node, small: what repeats is shared.
#[derive(Debug, PartialEq, Eq)]
struct StoredNode {
    labels: Box<[(Arc<str>, Arc<str>)]>,
    annotations: BTreeMap<String, String>,
    kernel_version: Arc<str>,
    architecture: Arc<str>,
    os_image: Arc<str>,
    unschedulable: bool,
}

/// An object, and the resource versions that differ from its present one in nothing that a plan looks at.
#[derive(Debug)]
struct Tracked<T> {
    facts: T,
    same: VecDeque<String>,
}

/// So many resource versions are remembered: a DaemonSet's status changes once or twice for each of its pods.
const SAME: usize = 256;

#[derive(Debug, Default)]
pub(super) struct Store {
    interest: Interest,
    strings: HashSet<Arc<str>>,
    nodes: HashMap<String, (StoredNode, String)>,
    daemon_sets: BTreeMap<Key, Tracked<DaemonSetFacts>>,
    /// By uid of the DaemonSet.
    pods: HashMap<String, BTreeMap<String, PodFacts>>,
    resources: BTreeMap<(OperatorResource, String), Tracked<ResourceFacts>>,
    watched: HashMap<Target, Watched>,
    epochs: u64,
    /// Grows with each change that a plan can depend on.
    generation: u64,
}

impl Store {
    pub(super) fn new(interest: Interest) -> Self {
        Self { interest, ..Self::default() }
    }

    pub(super) fn generation(&self) -> u64 {
        self.generation
    }

    pub(super) fn set_interest(&mut self, interest: Interest) {
        if self.interest != interest {
            self.interest = interest;
            self.generation += 1;
        }
    }

    /// The watches that are needed, as far as that is known: nodes and pods follow from the DaemonSets.
    pub(super) fn needed(&self) -> Vec<(Target, WatchScope)> {
        let names = WatchScope::Named(self.interest.daemon_sets.clone());
        let first = self.watched.get(&Target::DaemonSets);
        let settled = first.is_some_and(|watched| watched.scope.covers(&names) && watched.settled());
        let mut needed = vec![(Target::DaemonSets, names)];
        let resources = self.interest.resources.iter();
        needed.extend(resources.map(|kind| (Target::Resources(*kind), WatchScope::All)));
        if !settled {
            return needed;
        }
        let mut labels = self.interest.labels.clone();
        for Tracked { facts, .. } in self.daemon_sets.values() {
            labels.extend(facts.label_keys().map(str::to_owned));
            let Some(live) = &facts.live else { continue };
            if let Some(selector) = facts::pod_selector(&live.manifest) {
                let target = Target::Pods {
                    namespace: facts.namespace.clone(),
                    daemon_set: facts.name.clone(),
                    uid: live.version.uid.clone(),
                };
                needed.push((target, WatchScope::Selector(selector)));
            }
        }
        needed.push((Target::Nodes, WatchScope::Labels(labels)));
        needed
    }

    /// Compares the watches that run with those that are needed: which to start, with the epoch that their events
    /// carry, and which to stop.
    pub(super) fn reconcile(&mut self) -> (Vec<(Target, WatchScope, u64)>, Vec<Target>) {
        let needed = self.needed();
        // While the DaemonSets are listed anew, nodes and pods go on as they are.
        let all_known = needed.iter().any(|(target, _)| *target == Target::Nodes);
        let wanted = |target: &Target| needed.iter().any(|(wanted, _)| wanted == target);
        let keeps = |target: &Target| {
            wanted(target) || (!all_known && matches!(target, Target::Nodes | Target::Pods { .. }))
        };
        let stop: Vec<Target> = self.watched.keys().filter(|target| !keeps(target)).cloned().collect();
        for target in &stop {
            self.watched.remove(target);
            self.forget(target);
        }
        let mut start = Vec::new();
        for (target, scope) in needed {
            if self.watched.get(&target).is_some_and(|watched| watched.scope.covers(&scope)) {
                continue;
            }
            self.epochs += 1;
            let epoch = self.epochs;
            let watched =
                Watched { epoch, scope: scope.clone(), synced: false, trouble: None, listed: HashSet::new() };
            self.watched.insert(target.clone(), watched);
            start.push((target, scope, epoch));
        }
        (start, stop)
    }

    fn forget(&mut self, target: &Target) {
        match target {
            Target::DaemonSets => self.daemon_sets.clear(),
            Target::Nodes => self.nodes.clear(),
            Target::Pods { uid, .. } => drop(self.pods.remove(uid)),
            Target::Resources(kind) => self.resources.retain(|(of, _), _| of != kind),
        }
        self.generation += 1;
    }

    /// Takes in an event of a watch; one that has been replaced meanwhile says nothing any more. Says whether the
    /// watches that are needed, or what a snapshot holds, may be others now.
    pub(super) fn event(&mut self, target: &Target, epoch: u64, event: Event) -> bool {
        let Some(watched) = self.watched.get_mut(target).filter(|watched| watched.epoch == epoch) else {
            return false;
        };
        let before = self.generation;
        match event {
            Event::Start => {
                watched.listed.clear();
                return false;
            }
            Event::Listed(update) => {
                let key = update.key();
                if self.put(update, true)
                    && let Some(watched) = self.watched.get_mut(target)
                {
                    watched.listed.insert(key);
                }
                // Somebody who waits, waits for the end of the list.
                return false;
            }
            Event::Done => {
                let listed = std::mem::take(&mut watched.listed);
                watched.trouble = None;
                let was_synced = std::mem::replace(&mut watched.synced, true);
                self.retain(target, &listed);
                self.strings.retain(|text| Arc::strong_count(text) > 1);
                if !was_synced {
                    self.generation += 1;
                }
                return true;
            }
            Event::Changed(update) => {
                watched.trouble = None;
                self.put(update, false);
            }
            Event::Deleted(update) => {
                watched.trouble = None;
                self.delete(&update);
            }
        }
        self.generation != before
    }

    /// Notes why a watch brings nothing.
    pub(super) fn trouble(&mut self, target: &Target, epoch: u64, trouble: Trouble) -> bool {
        let Some(watched) = self.watched.get_mut(target).filter(|watched| watched.epoch == epoch) else {
            return false;
        };
        let was_settled = watched.settled();
        let matters = match &trouble {
            Trouble::Forbidden(_) => !matches!(watched.trouble, Some(Trouble::Forbidden(_))),
            Trouble::Absent => !matches!(watched.trouble, Some(Trouble::Absent)),
            Trouble::Unauthorized { .. } | Trouble::Failing { .. } => false,
        };
        let absent = matches!(trouble, Trouble::Absent);
        watched.trouble = Some(trouble);
        if absent {
            watched.synced = false;
            if matters {
                self.forget(target);
            }
        }
        if matters {
            self.generation += 1;
        }
        matters || !was_settled
    }

    /// Keeps an object, unless nobody asks for it or a newer state of it is known. A list overrides what is known.
    /// Says whether it is (still) kept.
    pub(super) fn put(&mut self, update: Update, listed: bool) -> bool {
        match update {
            Update::Node(node, version) => self.put_node(node, version, listed),
            Update::DaemonSet(facts) => self.put_daemon_set(*facts, listed),
            Update::Pod(facts) => self.put_pod(*facts, listed),
            Update::Resource(facts) => {
                let key = (facts.kind, facts.name.clone());
                if listed
                    || !self
                        .resources
                        .get(&key)
                        .is_some_and(|old| is_newer(&old.facts.version, &facts.version))
                {
                    let changed =
                        track(&mut self.resources, key, facts, same_resource, |facts| &facts.version);
                    self.generation += u64::from(changed);
                }
                true
            }
        }
    }

    fn put_node(&mut self, node: NodeFacts, version: String, listed: bool) -> bool {
        let NodeFacts { name, labels, annotations, kernel_version, architecture, os_image, unschedulable } =
            node;
        let Some(Watched { scope: WatchScope::Labels(kept), .. }) = self.watched.get(&Target::Nodes) else {
            return false;
        };
        if !listed && self.nodes.get(&name).is_some_and(|(_, old)| older(&version, old)) {
            return true;
        }
        let kept: Vec<(String, String)> = labels.into_iter().filter(|(key, _)| kept.contains(key)).collect();
        let labels = kept.into_iter().map(|(key, value)| (self.share(&key), self.share(&value))).collect();
        let node = StoredNode {
            labels,
            annotations,
            kernel_version: self.share(&kernel_version),
            architecture: self.share(&architecture),
            os_image: self.share(&os_image),
            unschedulable,
        };
        let changed = self.nodes.get(&name).is_none_or(|(old, _)| *old != node);
        self.nodes.insert(name, (node, version));
        self.generation += u64::from(changed);
        true
    }

    fn put_daemon_set(&mut self, facts: DaemonSetFacts, listed: bool) -> bool {
        let key = (facts.namespace.clone(), facts.name.clone());
        let Some(live) = &facts.live else { return false };
        let copy = live.labels.contains_key(crate::plan::COPY_OF_LABEL);
        if !copy && !self.interest.daemon_sets.contains(&key) {
            if self.daemon_sets.remove(&key).is_some() {
                self.generation += 1;
            }
            return false;
        }
        let known = self.daemon_sets.get(&key).and_then(|old| old.facts.live.as_ref());
        if listed || !known.is_some_and(|known| is_newer(&known.version, &live.version)) {
            let changed =
                track(&mut self.daemon_sets, key, facts, same_daemon_set, |facts| match &facts.live {
                    Some(live) => &live.version,
                    None => &NO_VERSION,
                });
            self.generation += u64::from(changed);
        }
        true
    }

    fn put_pod(&mut self, facts: PodFacts, listed: bool) -> bool {
        let watched =
            |target: &Target| matches!(target, Target::Pods { uid, .. } if *uid == facts.daemon_set);
        if !self.watched.keys().any(watched) {
            return false;
        }
        let pods = self.pods.entry(facts.daemon_set.clone()).or_default();
        if let Some(old) = pods.get(&facts.name) {
            if !listed && is_newer(&old.version, &facts.version) {
                return true;
            }
            let version = facts.version.clone();
            self.generation += u64::from(
                PodFacts { version, ..old.clone() } != facts || old.version.uid != facts.version.uid,
            );
        } else {
            self.generation += 1;
        }
        pods.insert(facts.name.clone(), facts);
        true
    }

    /// Forgets an object that is gone; not one of the same name that was made meanwhile.
    pub(super) fn delete(&mut self, update: &Update) {
        let gone = match update {
            Update::Node(node, _) => self.nodes.remove(&node.name).is_some(),
            Update::DaemonSet(facts) => {
                let uid = |facts: &DaemonSetFacts| facts.live.as_ref().map(|live| live.version.uid.clone());
                let key = (facts.namespace.clone(), facts.name.clone());
                let same = self.daemon_sets.get(&key).is_some_and(|old| uid(&old.facts) == uid(facts));
                same && self.daemon_sets.remove(&key).is_some()
            }
            Update::Pod(facts) => self.pods.get_mut(&facts.daemon_set).is_some_and(|pods| {
                let same = pods.get(&facts.name).is_some_and(|old| old.version.uid == facts.version.uid);
                same && pods.remove(&facts.name).is_some()
            }),
            Update::Resource(facts) => {
                let key = (facts.kind, facts.name.clone());
                let same =
                    self.resources.get(&key).is_some_and(|old| old.facts.version.uid == facts.version.uid);
                same && self.resources.remove(&key).is_some()
            }
        };
        self.generation += u64::from(gone);
    }

    /// Forgets what a complete list did not have.
    fn retain(&mut self, target: &Target, listed: &HashSet<Key>) {
        let before = self.size(target);
        match target {
            Target::DaemonSets => self.daemon_sets.retain(|key, _| listed.contains(key)),
            Target::Nodes => self.nodes.retain(|name, _| listed.contains(&(String::new(), name.clone()))),
            Target::Pods { namespace, uid, .. } => {
                if let Some(pods) = self.pods.get_mut(uid) {
                    pods.retain(|name, _| listed.contains(&(namespace.clone(), name.clone())));
                }
            }
            Target::Resources(kind) => {
                self.resources
                    .retain(|(of, name), _| of != kind || listed.contains(&(String::new(), name.clone())));
            }
        }
        self.generation += u64::from(self.size(target) != before);
    }

    fn size(&self, target: &Target) -> usize {
        match target {
            Target::DaemonSets => self.daemon_sets.len(),
            Target::Nodes => self.nodes.len(),
            Target::Pods { uid, .. } => self.pods.get(uid).map_or(0, BTreeMap::len),
            Target::Resources(_) => self.resources.len(),
        }
    }

    fn share(&mut self, text: &str) -> Arc<str> {
        if let Some(shared) = self.strings.get(text) {
            return shared.clone();
        }
        let shared: Arc<str> = text.into();
        self.strings.insert(shared.clone());
        shared
    }
}

static NO_VERSION: ObjectVersion = ObjectVersion { uid: String::new(), resource_version: String::new() };

impl Update {
    fn key(&self) -> Key {
        match self {
            Self::Node(node, _) => (String::new(), node.name.clone()),
            Self::DaemonSet(facts) => (facts.namespace.clone(), facts.name.clone()),
            Self::Pod(facts) => (facts.namespace.clone(), facts.name.clone()),
            Self::Resource(facts) => (String::new(), facts.name.clone()),
        }
    }
}

#[cfg(test)]
#[path = "store_tests.rs"]
mod tests;
