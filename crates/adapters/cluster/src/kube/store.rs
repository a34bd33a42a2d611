//! The known state of the cluster, kept current by watches and by the responses to farrier's writes.
//!
//! The store decides which watches it needs ([`Store::needed`]). The node labels of interest and the watched pods depend on the
//! DaemonSets that were found. A snapshot is taken only after everything needed has been listed. Otherwise a plan could mistake
//! objects that have not arrived yet for missing ones.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use farrier_core::{
    image::checked::ImageStream,
    plan::{
        COPY_OF_LABEL, ClusterSnapshot, DaemonSetFacts, LiveDaemonSet, ObservedKind, PER_KERNEL_ANNOTATION,
        RECORD_ANNOTATION, SnapshotScope, UpgradeNote, WriteNamespaces,
    },
};
use kube::runtime::watcher::Event;

use super::{
    super::error::{ApiError, MissingRight},
    bodies::CHECK_LABEL,
    facts::{PREFIX, pod_selector},
    object::{Facts, Key, Object, StoredObject},
    target::{Target, Trouble, WatchScope},
};

/// Number of consecutive failures after which waiting for a first list fails. With the watch's backoff (0.8 s, doubled each time)
/// that is ten to twenty seconds.
const ATTEMPTS: u32 = 5;

/// A watch and the objects that it has delivered.
#[derive(Debug)]
struct Watched {
    epoch: u64,
    scope: WatchScope,
    /// Whether the first list is complete.
    synced: bool,
    trouble: Option<Trouble>,
    /// Keys of the current list so far.
    listed: HashSet<Key>,
    objects: BTreeMap<Key, StoredObject>,
}

impl Watched {
    /// Whether nothing more is expected from the watch before a snapshot.
    fn settled(&self) -> bool {
        self.synced || matches!(self.trouble, Some(Trouble::Forbidden(_) | Trouble::Absent))
    }

    fn forbidden(&self) -> Option<&MissingRight> {
        match &self.trouble {
            Some(Trouble::Forbidden(right)) => Some(right),
            _ => None,
        }
    }

    /// Stores an object, unless a newer state is known or the definitions do not need it. A list overrides the known state.
    /// Returns whether the change matters for a plan.
    fn put(&mut self, snapshot_scope: &SnapshotScope, mut object: Object, listed: bool) -> bool {
        let key = object.key();
        if !asks_for(snapshot_scope, &key, &object.facts) {
            return self.objects.remove(&key).is_some();
        }
        if let (Facts::Node(node), WatchScope::Labels(kept)) = (&mut object.facts, &self.scope) {
            node.labels.retain(|key, _| kept.contains(key) || key.starts_with(PREFIX));
        }
        if listed {
            self.listed.insert(key.clone());
        }
        match self.objects.get_mut(&key) {
            Some(known) if !listed && known.object.is_newer_than(&object) => false,
            Some(known) => known.replace(object),
            None => self.objects.insert(key, StoredObject::new(object)).is_none(),
        }
    }

    /// Removes a deleted object, but not a new object of the same name.
    fn delete(&mut self, object: &Object) -> bool {
        let key = object.key();
        let known = self.objects.get(&key);
        let same = known.is_some_and(|known| known.object.version.uid == object.version.uid);
        same && self.objects.remove(&key).is_some()
    }
}

/// Whether the object is needed. Rollouts name DaemonSets, and farrier's copies have a label. For a rollback, DaemonSets with a
/// record are needed, too.
fn asks_for(scope: &SnapshotScope, key: &Key, facts: &Facts) -> bool {
    let Facts::DaemonSet(facts) = facts else { return true };
    let is_ours = |live: &LiveDaemonSet| {
        let records = [RECORD_ANNOTATION, PER_KERNEL_ANNOTATION];
        let recorded = records.iter().any(|record| live.annotations.contains_key(*record));
        live.labels.contains_key(COPY_OF_LABEL) || (scope.rollback && recorded)
    };
    scope.daemon_sets.contains(key) || facts.live.as_ref().is_some_and(is_ours)
}

/// Whether everything that a snapshot needs has been listed.
pub(super) enum Readiness {
    Ready,
    Waiting,
    /// A resource that every plan needs cannot be read, or a first list has failed too often.
    Failed(ApiError),
}

#[derive(Debug, Default)]
pub(super) struct Store {
    snapshot_scope: SnapshotScope,
    /// Namespaces in which DaemonSets and pods are written. Pods of other namespaces are not even read.
    pub(super) writable: WriteNamespaces,
    watched: BTreeMap<Target, Watched>,
    epochs: u64,
    /// Incremented by each change that a plan can depend on.
    generation: u64,
}

impl Store {
    pub(super) fn new(snapshot_scope: SnapshotScope) -> Self {
        Self { snapshot_scope, ..Self::default() }
    }

    pub(super) fn generation(&self) -> u64 {
        self.generation
    }

    pub(super) fn set_snapshot_scope(&mut self, scope: SnapshotScope) {
        if self.snapshot_scope != scope {
            self.snapshot_scope = scope;
            self.generation += 1;
        }
    }

    fn daemon_sets(&self) -> impl Iterator<Item = &DaemonSetFacts> {
        let watched = self.watched.get(&Target::DaemonSets);
        watched.into_iter().flat_map(|watched| watched.objects.values()).filter_map(|kept| {
            let Facts::DaemonSet(facts) = &kept.object.facts else { return None };
            Some(&**facts)
        })
    }

    /// Returns the watches known to be needed. The watches of nodes and pods depend on the objects that select nodes, which are
    /// listed first.
    fn needed(&self) -> Vec<(Target, WatchScope)> {
        let wanted = &self.snapshot_scope;
        let mut needed = vec![(Target::DaemonSets, WatchScope::Named(wanted.daemon_sets.clone()))];
        let resources = wanted.resources.iter();
        needed.extend(resources.map(|kind| (Target::Resources(*kind), WatchScope::All)));
        let is_settled = |(target, scope): &(Target, WatchScope)| {
            self.watched.get(target).is_some_and(|watched| watched.scope.covers(scope) && watched.settled())
        };
        if !needed.iter().all(is_settled) {
            return needed;
        }
        let mut labels = wanted.labels.clone();
        let objects = self.watched.values().flat_map(|watched| watched.objects.values());
        labels.extend(objects.flat_map(|kept| kept.object.facts.label_keys()));
        let are_watched =
            |facts: &&DaemonSetFacts| !wanted.rollback && self.writable.contains(&facts.namespace);
        for facts in self.daemon_sets().filter(are_watched) {
            let Some(live) = &facts.live else { continue };
            if let Some(selector) = pod_selector(&live.manifest) {
                let target = Target::Pods {
                    namespace: facts.namespace.clone(),
                    daemon_set: facts.name.clone(),
                    uid: live.version.uid.clone(),
                };
                needed.push((target, WatchScope::Selector(selector)));
            }
        }
        needed.push((Target::Nodes, WatchScope::Labels(labels)));
        let checks = wanted.checks.iter().filter(|namespace| self.writable.contains(namespace));
        needed.extend(checks.map(|namespace| {
            let target = Target::Checks { namespace: namespace.clone() };
            (target, WatchScope::Selector(CHECK_LABEL.to_owned()))
        }));
        needed.extend(self.drained().map(|node| {
            let fields = format!("spec.nodeName={node},status.phase!=Succeeded,status.phase!=Failed");
            (Target::Workloads { node: node.to_owned() }, WatchScope::Fields(fields))
        }));
        needed
    }

    /// Returns the nodes whose pods determine the next step of an upgrade.
    fn drained(&self) -> impl Iterator<Item = &str> {
        let nodes = self.watched.get(&Target::Nodes).filter(|_| self.snapshot_scope.drains);
        nodes.into_iter().flat_map(|watched| watched.objects.values()).filter_map(|kept| {
            let Facts::Node(node) = &kept.object.facts else { return None };
            UpgradeNote::of(node).filter(UpgradeNote::needs_workloads).map(|_| node.name.as_str())
        })
    }

    /// Compares the running watches with the needed ones. Returns the watches to start, with the epoch of their events, and the
    /// watches to stop.
    pub(super) fn reconcile(&mut self) -> (Vec<(Target, WatchScope, u64)>, Vec<Target>) {
        let needed = self.needed();
        // While the DaemonSets are relisted, the watches of nodes and pods continue.
        let all_known = needed.iter().any(|(target, _)| *target == Target::Nodes);
        let keeps = |target: &Target| {
            needed.iter().any(|(needed, _)| needed == target)
                || (!all_known && !matches!(target, Target::DaemonSets | Target::Resources(_)))
        };
        let stop: Vec<Target> = self.watched.keys().filter(|target| !keeps(target)).cloned().collect();
        for target in &stop {
            self.watched.remove(target);
            self.generation += 1;
        }
        let mut start = Vec::new();
        for (target, scope) in needed {
            if self.watched.get(&target).is_some_and(|watched| watched.scope.covers(&scope)) {
                continue;
            }
            self.epochs += 1;
            // The objects of a replaced watch remain valid until the new list is complete.
            let objects = self.watched.remove(&target).map(|watched| watched.objects).unwrap_or_default();
            let watched = Watched {
                epoch: self.epochs,
                scope: scope.clone(),
                synced: false,
                trouble: None,
                listed: HashSet::new(),
                objects,
            };
            self.watched.insert(target.clone(), watched);
            start.push((target, scope, self.epochs));
        }
        (start, stop)
    }

    /// Processes an event of a watch; events of a replaced watch are ignored. Returns whether the needed watches or the snapshot
    /// may have changed.
    pub(super) fn event(&mut self, target: &Target, epoch: u64, event: Event<Object>) -> bool {
        let Some(watched) = self.watched.get_mut(target).filter(|watched| watched.epoch == epoch) else {
            return false;
        };
        let (changed, rings) = match event {
            Event::Init => {
                watched.listed.clear();
                (false, false)
            }
            // Listeners wait for the end of the list.
            Event::InitApply(object) => (watched.put(&self.snapshot_scope, object, true), false),
            Event::InitDone => {
                let listed = std::mem::take(&mut watched.listed);
                let before = watched.objects.len();
                watched.objects.retain(|key, _| listed.contains(key));
                watched.trouble = None;
                let was_synced = std::mem::replace(&mut watched.synced, true);
                (!was_synced || watched.objects.len() != before, true)
            }
            Event::Apply(object) => {
                watched.trouble = None;
                let changed = watched.put(&self.snapshot_scope, object, false);
                (changed, changed)
            }
            Event::Delete(object) => {
                watched.trouble = None;
                let changed = watched.delete(&object);
                (changed, changed)
            }
        };
        self.generation += u64::from(changed);
        rings
    }

    /// Stores the object that a write returned.
    pub(super) fn put(&mut self, target: &Target, object: Object) {
        if let Some(watched) = self.watched.get_mut(target) {
            self.generation += u64::from(watched.put(&self.snapshot_scope, object, false));
        }
    }

    /// Records why a watch delivers nothing. Returns whether listeners must be notified.
    pub(super) fn trouble(&mut self, target: &Target, epoch: u64, trouble: Trouble) -> bool {
        let Some(watched) = self.watched.get_mut(target).filter(|watched| watched.epoch == epoch) else {
            return false;
        };
        if let (Trouble::Failing { .. }, Some(Trouble::Forbidden(_))) = (&trouble, &watched.trouble) {
            // An unavailable server does not show that a missing permission was granted.
            return false;
        }
        let was_settled = watched.settled();
        let is_news = match (&trouble, &watched.trouble) {
            (Trouble::Forbidden(_), Some(Trouble::Forbidden(_)))
            | (Trouble::Absent, Some(Trouble::Absent))
            | (Trouble::Failing { .. }, _) => false,
            (Trouble::Forbidden(_) | Trouble::Absent, _) => true,
        };
        if matches!(trouble, Trouble::Absent) {
            watched.synced = false;
            watched.objects.clear();
        }
        watched.trouble = Some(trouble);
        self.generation += u64::from(is_news);
        is_news || !was_settled
    }

    /// Returns the ImageStreams that kernel families name.
    pub(super) fn image_streams(&self) -> BTreeSet<ImageStream> {
        self.snapshot_scope.image_streams.clone()
    }

    /// Whether everything needed has been listed.
    pub(super) fn readiness(&self) -> Readiness {
        let needed = self.needed();
        let mut waiting = !needed.iter().any(|(target, _)| *target == Target::Nodes);
        for (target, scope) in needed {
            let watched = self.watched.get(&target).filter(|watched| watched.scope.covers(&scope));
            let Some(watched) = watched else {
                waiting = true;
                continue;
            };
            match &watched.trouble {
                Some(Trouble::Forbidden(right)) if target == Target::Nodes => {
                    return Readiness::Failed(ApiError::Forbidden(Box::new(right.clone())));
                }
                Some(Trouble::Failing { attempts, error }) if *attempts >= ATTEMPTS && !watched.synced => {
                    return Readiness::Failed(error.clone());
                }
                _ => waiting |= !watched.settled(),
            }
        }
        if waiting { Readiness::Waiting } else { Readiness::Ready }
    }

    /// Returns all facts, sorted by name, except objects that farrier has no permission to read.
    pub(super) fn snapshot(&self) -> ClusterSnapshot {
        let (unseen, unseen_in) = self.unseen();
        let mut snapshot = ClusterSnapshot {
            unseen,
            unseen_in,
            writable: self.writable.clone(),
            ..ClusterSnapshot::default()
        };
        for (target, watched) in &self.watched {
            let hidden = match target {
                Target::Resources(_) | Target::Checks { .. } => watched.forbidden().is_some(),
                Target::Pods { namespace, .. } => {
                    snapshot.why_unseen(ObservedKind::Pods, namespace).is_some()
                }
                _ => snapshot.unseen.contains_key(&target.seen()),
            };
            for kept in watched.objects.values().filter(|_| !hidden) {
                match &kept.object.facts {
                    Facts::Node(facts) => snapshot.nodes.push(facts.clone()),
                    Facts::DaemonSet(facts) => snapshot.daemon_sets.push((**facts).clone()),
                    Facts::Pod(facts) => snapshot.pods.push((**facts).clone()),
                    Facts::Resource(facts) => snapshot.resources.push((**facts).clone()),
                    Facts::Workload(facts) => snapshot.workloads.push((**facts).clone()),
                    Facts::Check((_, name), state) => {
                        snapshot.checks.insert(name.clone(), state.clone());
                    }
                }
            }
        }
        let live = snapshot.daemon_sets.iter().filter_map(|facts| facts.live.as_ref());
        let uids: HashSet<&str> = live.map(|live| live.version.uid.as_str()).collect();
        snapshot.pods.retain(|pod| uids.contains(pod.daemon_set.as_str()));
        snapshot
    }

    /// Returns what cannot be read, with the missing permission: in the whole cluster, and by namespace.
    fn unseen(&self) -> (BTreeMap<ObservedKind, String>, BTreeMap<(ObservedKind, String), String>) {
        let mut sentences: BTreeMap<(ObservedKind, Option<&str>), BTreeSet<String>> = BTreeMap::new();
        for (target, watched) in &self.watched {
            let Some(right) = watched.forbidden() else { continue };
            let sentence = format!("{}: {}", right.sentence(), right.remedy());
            sentences.entry((target.seen(), target.namespace())).or_default().insert(sentence);
        }
        let (mut everywhere, mut of_namespaces) = (BTreeMap::new(), BTreeMap::new());
        for ((what, namespace), sentences) in sentences {
            let why = sentences.into_iter().collect::<Vec<_>>().join("; ");
            match namespace {
                Some(namespace) => drop(of_namespaces.insert((what, namespace.to_owned()), why)),
                None => drop(everywhere.insert(what, why)),
            }
        }
        (everywhere, of_namespaces)
    }

    /// Returns the current state of an object.
    pub(super) fn get(&self, target: &Target, key: &Key) -> Option<&StoredObject> {
        self.watched.get(target)?.objects.get(key)
    }

    /// Whether the pod is terminating or gone.
    pub(super) fn pod_ends(&self, uid: &str) -> bool {
        let objects = self.watched.values().flat_map(|watched| watched.objects.values());
        let mut facts = objects.map(|kept| &kept.object.facts);
        !facts.any(|facts| match facts {
            Facts::Pod(pod) => pod.version.uid == uid && !pod.deleting,
            Facts::Workload(pod) => pod.uid == uid && !pod.deleting,
            _ => false,
        })
    }
}

#[cfg(test)]
#[path = "store_tests.rs"]
mod tests;
