//! The known state of the cluster. Watches and the responses to farrier's writes keep it current.
//!
//! The store decides which watches it needs ([`Store::needed`]). The node labels of interest and the watched pods depend on the
//! DaemonSets that were found. A snapshot waits until everything needed has been listed, because a plan would treat objects
//! that have not arrived yet as missing.

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
    super::error::{ApiError, MissingPermission},
    bodies::CHECK_LABEL,
    facts::{PREFIX, pod_selector},
    object::{Object, ObjectFacts, ObjectKey, StoredObject},
    target::{WatchFailure, WatchScope, WatchTarget},
};

/// Number of consecutive failures of a first list after which a snapshot fails instead of waiting. With the watch's backoff
/// (0.8 s, doubled each time), a snapshot fails after ten to twenty seconds.
const MAX_FIRST_LIST_ATTEMPTS: u32 = 5;

/// A watch and the objects that it has delivered.
#[derive(Debug)]
struct WatchState {
    /// Number that distinguishes the watch from the watches that it replaced.
    epoch: u64,
    scope: WatchScope,
    /// Whether the first list is complete.
    synced: bool,
    failure: Option<WatchFailure>,
    /// Keys received so far of the list in progress.
    listed: HashSet<ObjectKey>,
    objects: BTreeMap<ObjectKey, StoredObject>,
}

impl WatchState {
    /// Whether the first list is complete, or is not possible, so that a snapshot does not wait for the watch.
    fn settled(&self) -> bool {
        self.synced || matches!(self.failure, Some(WatchFailure::Forbidden(_) | WatchFailure::NotServed))
    }

    fn forbidden(&self) -> Option<&MissingPermission> {
        match &self.failure {
            Some(WatchFailure::Forbidden(permission)) => Some(permission),
            _ => None,
        }
    }

    /// Stores an object, unless a newer state is known or plans do not need the object. An object from a list (`listed`) replaces
    /// even a newer known state. Returns whether the change matters for a plan.
    fn put(&mut self, snapshot_scope: &SnapshotScope, mut object: Object, listed: bool) -> bool {
        let key = object.key();
        if !is_needed(snapshot_scope, &key, &object.facts) {
            return self.objects.remove(&key).is_some();
        }
        if let (ObjectFacts::Node(node), WatchScope::Labels(kept)) = (&mut object.facts, &self.scope) {
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

/// Whether plans need the object. Of the DaemonSets, plans need only those that rollouts name, and farrier's copies. A rollback
/// also needs the DaemonSets with a record.
fn is_needed(scope: &SnapshotScope, key: &ObjectKey, facts: &ObjectFacts) -> bool {
    let ObjectFacts::DaemonSet(facts) = facts else { return true };
    let is_copy_or_recorded = |live: &LiveDaemonSet| {
        let records = [RECORD_ANNOTATION, PER_KERNEL_ANNOTATION];
        let has_record = records.iter().any(|record| live.annotations.contains_key(*record));
        live.labels.contains_key(COPY_OF_LABEL) || (scope.rollback && has_record)
    };
    scope.daemon_sets.contains(key) || facts.live.as_ref().is_some_and(is_copy_or_recorded)
}

/// Whether everything that a snapshot needs has been listed.
pub(super) enum Readiness {
    Ready,
    Waiting,
    /// Nodes, which every plan needs, cannot be read; or a first list has failed too often.
    Failed(ApiError),
}

#[derive(Debug, Default)]
pub(super) struct Store {
    snapshot_scope: SnapshotScope,
    /// Namespaces in which DaemonSets and pods are written. Pods of other namespaces are not even read.
    pub(super) writable: WriteNamespaces,
    watched: BTreeMap<WatchTarget, WatchState>,
    /// Epoch of the newest watch.
    last_epoch: u64,
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
        let watched = self.watched.get(&WatchTarget::DaemonSets);
        watched.into_iter().flat_map(|watched| watched.objects.values()).filter_map(|stored| {
            match &stored.object.facts {
                ObjectFacts::DaemonSet(facts) => Some(&**facts),
                _ => None,
            }
        })
    }

    /// Returns the needed watches. Until the objects that select nodes are listed, these are only the watches of such objects,
    /// because the watches of nodes and pods depend on them.
    fn needed(&self) -> Vec<(WatchTarget, WatchScope)> {
        let scope = &self.snapshot_scope;
        let mut needed = vec![(WatchTarget::DaemonSets, WatchScope::Named(scope.daemon_sets.clone()))];
        let resources = scope.resources.iter();
        needed.extend(resources.map(|kind| (WatchTarget::Resources(*kind), WatchScope::All)));
        if !needed.iter().all(|(target, scope)| self.is_settled(target, scope)) {
            return needed;
        }
        needed.extend(self.pod_watches());
        needed.push((WatchTarget::Nodes, WatchScope::Labels(self.needed_labels())));
        needed.extend(self.check_watches());
        needed.extend(self.workload_watches());
        needed
    }

    fn is_settled(&self, target: &WatchTarget, scope: &WatchScope) -> bool {
        self.watched.get(target).is_some_and(|watched| watched.scope.covers(scope) && watched.settled())
    }

    /// Returns the node labels that the definitions and the selectors of known objects use.
    fn needed_labels(&self) -> BTreeSet<String> {
        let objects = self.watched.values().flat_map(|watched| watched.objects.values());
        let selected = objects.flat_map(|stored| stored.object.facts.label_keys());
        self.snapshot_scope.labels.iter().cloned().chain(selected).collect()
    }

    /// Returns the watches of the DaemonSets' pods. A rollback needs none.
    fn pod_watches(&self) -> Vec<(WatchTarget, WatchScope)> {
        let mut watches = Vec::new();
        if self.snapshot_scope.rollback {
            return watches;
        }
        for facts in self.daemon_sets().filter(|facts| self.writable.contains(&facts.namespace)) {
            let Some(live) = &facts.live else { continue };
            let Some(selector) = pod_selector(&live.manifest) else { continue };
            let target = WatchTarget::Pods {
                namespace: facts.namespace.clone(),
                daemon_set: facts.name.clone(),
                uid: live.version.uid.clone(),
            };
            watches.push((target, WatchScope::Selector(selector)));
        }
        watches
    }

    fn check_watches(&self) -> impl Iterator<Item = (WatchTarget, WatchScope)> {
        let namespaces = self.snapshot_scope.checks.iter();
        namespaces.filter(move |namespace| self.writable.contains(namespace)).map(|namespace| {
            let target = WatchTarget::Checks { namespace: namespace.clone() };
            (target, WatchScope::Selector(CHECK_LABEL.to_owned()))
        })
    }

    fn workload_watches(&self) -> impl Iterator<Item = (WatchTarget, WatchScope)> {
        self.draining_nodes().map(|node| {
            let fields = format!("spec.nodeName={node},status.phase!=Succeeded,status.phase!=Failed");
            (WatchTarget::Workloads { node: node.to_owned() }, WatchScope::Fields(fields))
        })
    }

    /// Returns the nodes whose pods determine the next step of an upgrade.
    fn draining_nodes(&self) -> impl Iterator<Item = &str> {
        let nodes = self.watched.get(&WatchTarget::Nodes).filter(|_| self.snapshot_scope.drains);
        nodes.into_iter().flat_map(|watched| watched.objects.values()).filter_map(|stored| {
            let ObjectFacts::Node(node) = &stored.object.facts else { return None };
            UpgradeNote::of(node).filter(UpgradeNote::needs_workloads).map(|_| node.name.as_str())
        })
    }

    /// Compares the running watches with the needed ones. Returns the watches to start, with the epoch of their events, and the
    /// watches to stop.
    pub(super) fn reconcile(&mut self) -> (Vec<(WatchTarget, WatchScope, u64)>, Vec<WatchTarget>) {
        let needed = self.needed();
        // While the DaemonSets are relisted, `needed` is incomplete, and the watches of nodes and pods continue.
        let is_complete = needed.iter().any(|(target, _)| *target == WatchTarget::Nodes);
        let is_kept = |target: &WatchTarget| {
            needed.iter().any(|(needed, _)| needed == target)
                || (!is_complete && !matches!(target, WatchTarget::DaemonSets | WatchTarget::Resources(_)))
        };
        let stop: Vec<WatchTarget> = self.watched.keys().filter(|target| !is_kept(target)).cloned().collect();
        for target in &stop {
            self.watched.remove(target);
            self.generation += 1;
        }
        let mut start = Vec::new();
        for (target, scope) in needed {
            if self.watched.get(&target).is_some_and(|watched| watched.scope.covers(&scope)) {
                continue;
            }
            self.last_epoch += 1;
            // The objects of a replaced watch remain valid until the new list is complete.
            let objects = self.watched.remove(&target).map(|watched| watched.objects).unwrap_or_default();
            let watched = WatchState {
                epoch: self.last_epoch,
                scope: scope.clone(),
                synced: false,
                failure: None,
                listed: HashSet::new(),
                objects,
            };
            self.watched.insert(target.clone(), watched);
            start.push((target, scope, self.last_epoch));
        }
        (start, stop)
    }

    /// Processes an event of a watch, and ignores events of a replaced watch. Returns whether the needed watches or the snapshot
    /// may have changed.
    pub(super) fn event(&mut self, target: &WatchTarget, epoch: u64, event: Event<Object>) -> bool {
        let Some(watched) = self.watched.get_mut(target).filter(|watched| watched.epoch == epoch) else {
            return false;
        };
        let (changed, notify) = match event {
            Event::Init => {
                watched.listed.clear();
                (false, false)
            }
            // Subscribers are notified at the end of the list.
            Event::InitApply(object) => (watched.put(&self.snapshot_scope, object, true), false),
            Event::InitDone => {
                let listed = std::mem::take(&mut watched.listed);
                let before = watched.objects.len();
                watched.objects.retain(|key, _| listed.contains(key));
                watched.failure = None;
                let was_synced = std::mem::replace(&mut watched.synced, true);
                (!was_synced || watched.objects.len() != before, true)
            }
            Event::Apply(object) => {
                watched.failure = None;
                let changed = watched.put(&self.snapshot_scope, object, false);
                (changed, changed)
            }
            Event::Delete(object) => {
                watched.failure = None;
                let changed = watched.delete(&object);
                (changed, changed)
            }
        };
        self.generation += u64::from(changed);
        notify
    }

    /// Stores the object that a write returned.
    pub(super) fn put(&mut self, target: &WatchTarget, object: Object) {
        if let Some(watched) = self.watched.get_mut(target) {
            self.generation += u64::from(watched.put(&self.snapshot_scope, object, false));
        }
    }

    /// Records why a watch delivers nothing. Returns whether subscribers must be notified.
    pub(super) fn record_failure(&mut self, target: &WatchTarget, epoch: u64, failure: WatchFailure) -> bool {
        let Some(watched) = self.watched.get_mut(target).filter(|watched| watched.epoch == epoch) else {
            return false;
        };
        if let (WatchFailure::Failing { .. }, Some(WatchFailure::Forbidden(_))) = (&failure, &watched.failure)
        {
            // An unavailable server does not show that a missing permission was granted.
            return false;
        }
        let was_settled = watched.settled();
        let is_new = match (&failure, &watched.failure) {
            (WatchFailure::Forbidden(_), Some(WatchFailure::Forbidden(_)))
            | (WatchFailure::NotServed, Some(WatchFailure::NotServed))
            | (WatchFailure::Failing { .. }, _) => false,
            (WatchFailure::Forbidden(_) | WatchFailure::NotServed, _) => true,
        };
        if matches!(failure, WatchFailure::NotServed) {
            watched.synced = false;
            watched.objects.clear();
        }
        watched.failure = Some(failure);
        self.generation += u64::from(is_new);
        is_new || !was_settled
    }

    /// Returns the ImageStreams that kernel families name.
    pub(super) fn image_streams(&self) -> BTreeSet<ImageStream> {
        self.snapshot_scope.image_streams.clone()
    }

    /// Whether everything needed has been listed.
    pub(super) fn readiness(&self) -> Readiness {
        let needed = self.needed();
        let mut waiting = !needed.iter().any(|(target, _)| *target == WatchTarget::Nodes);
        for (target, scope) in needed {
            let watched = self.watched.get(&target).filter(|watched| watched.scope.covers(&scope));
            let Some(watched) = watched else {
                waiting = true;
                continue;
            };
            match &watched.failure {
                Some(WatchFailure::Forbidden(permission)) if target == WatchTarget::Nodes => {
                    return Readiness::Failed(ApiError::Forbidden(Box::new(permission.clone())));
                }
                Some(WatchFailure::Failing { attempts, error })
                    if *attempts >= MAX_FIRST_LIST_ATTEMPTS && !watched.synced =>
                {
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
                WatchTarget::Resources(_) | WatchTarget::Checks { .. } => watched.forbidden().is_some(),
                WatchTarget::Pods { namespace, .. } => {
                    snapshot.why_unseen(ObservedKind::Pods, namespace).is_some()
                }
                _ => snapshot.unseen.contains_key(&target.observed_kind()),
            };
            for stored in watched.objects.values().filter(|_| !hidden) {
                match &stored.object.facts {
                    ObjectFacts::Node(facts) => snapshot.nodes.push(facts.clone()),
                    ObjectFacts::DaemonSet(facts) => snapshot.daemon_sets.push((**facts).clone()),
                    ObjectFacts::Pod(facts) => snapshot.pods.push((**facts).clone()),
                    ObjectFacts::Resource(facts) => snapshot.resources.push((**facts).clone()),
                    ObjectFacts::Workload(facts) => snapshot.workloads.push((**facts).clone()),
                    ObjectFacts::Check((_, name), state) => {
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

    /// Returns the kinds that farrier has no permission to read, with the missing permissions. The first map is for the whole
    /// cluster, the second one for single namespaces.
    fn unseen(&self) -> (BTreeMap<ObservedKind, String>, BTreeMap<(ObservedKind, String), String>) {
        let mut sentences: BTreeMap<(ObservedKind, Option<&str>), BTreeSet<String>> = BTreeMap::new();
        for (target, watched) in &self.watched {
            let Some(permission) = watched.forbidden() else { continue };
            let sentence = format!("{}: {}", permission.sentence(), permission.remedy());
            sentences.entry((target.observed_kind(), target.namespace())).or_default().insert(sentence);
        }
        let (mut in_cluster, mut in_namespaces) = (BTreeMap::new(), BTreeMap::new());
        for ((kind, namespace), sentences) in sentences {
            let reason = sentences.into_iter().collect::<Vec<_>>().join("; ");
            match namespace {
                Some(namespace) => drop(in_namespaces.insert((kind, namespace.to_owned()), reason)),
                None => drop(in_cluster.insert(kind, reason)),
            }
        }
        (in_cluster, in_namespaces)
    }

    /// Returns the current state of an object.
    pub(super) fn get(&self, target: &WatchTarget, key: &ObjectKey) -> Option<&StoredObject> {
        self.watched.get(target)?.objects.get(key)
    }

    /// Whether the pod is terminating or gone.
    pub(super) fn pod_has_ended(&self, uid: &str) -> bool {
        let objects = self.watched.values().flat_map(|watched| watched.objects.values());
        let mut facts = objects.map(|stored| &stored.object.facts);
        !facts.any(|facts| match facts {
            ObjectFacts::Pod(pod) => pod.version.uid == uid && !pod.deleting,
            ObjectFacts::Workload(pod) => pod.uid == uid && !pod.deleting,
            _ => false,
        })
    }
}

#[cfg(test)]
#[path = "store_tests.rs"]
mod tests;
