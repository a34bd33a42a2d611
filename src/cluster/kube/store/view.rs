//! Pure: what is read out of the store.

use std::collections::{BTreeMap, BTreeSet};

use super::{ATTEMPTS, Readiness, Store, StoredNode, Target, Trouble};
use crate::{
    image::OperatorResource,
    plan::{ClusterSnapshot, DaemonSetFacts, LiveDaemonSet, NodeFacts, ObjectVersion, ResourceFacts, Seen},
};

impl Store {
    /// Has everything that is needed been listed?
    pub(in super::super) fn readiness(&self) -> Readiness {
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
                    return Readiness::Forbidden(right.clone());
                }
                Some(Trouble::Unauthorized { attempts, reason })
                    if *attempts >= ATTEMPTS && !watched.synced =>
                {
                    return Readiness::Unauthorized(reason.clone());
                }
                Some(Trouble::Failing { attempts, reason }) if *attempts >= ATTEMPTS && !watched.synced => {
                    return Readiness::Failing(reason.clone());
                }
                _ => waiting |= !watched.settled(),
            }
        }
        if waiting { Readiness::Waiting } else { Readiness::Ready }
    }

    /// All facts, sorted by name, without what cannot be read (any more).
    pub(in super::super) fn snapshot(&self) -> ClusterSnapshot {
        let unseen = self.unseen();
        let seen = |what: Seen| !unseen.contains_key(&what);
        let mut nodes: Vec<NodeFacts> = self.nodes.iter().map(|(name, (node, _))| node.facts(name)).collect();
        nodes.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        let daemon_sets: Vec<DaemonSetFacts> = self
            .daemon_sets
            .values()
            .filter(|_| seen(Seen::DaemonSets))
            .map(|old| old.facts.clone())
            .collect();
        let uids = daemon_sets.iter().filter_map(|facts| facts.live.as_ref()).map(|live| &live.version.uid);
        let pods =
            uids.filter(|_| seen(Seen::Pods)).filter_map(|uid| self.pods.get(uid)).flat_map(BTreeMap::values);
        let pods = pods.cloned().collect();
        let forbidden = |kind: OperatorResource| {
            let trouble =
                self.watched.get(&Target::Resources(kind)).and_then(|watched| watched.trouble.as_ref());
            matches!(trouble, Some(Trouble::Forbidden(_)))
        };
        let resources = self.resources.values().map(|old| &old.facts);
        let resources = resources.filter(|facts| !forbidden(facts.kind)).cloned().collect();
        ClusterSnapshot { nodes, daemon_sets, pods, resources, unseen, read_only_nodes: false }
    }

    /// What cannot be read, with the rule that is missing.
    fn unseen(&self) -> BTreeMap<Seen, String> {
        let mut sentences: BTreeMap<Seen, BTreeSet<String>> = BTreeMap::new();
        for (target, watched) in &self.watched {
            let Some(Trouble::Forbidden(right)) = &watched.trouble else { continue };
            let what = match target {
                Target::Nodes => Seen::Nodes,
                Target::DaemonSets => Seen::DaemonSets,
                Target::Pods { .. } => Seen::Pods,
                Target::Resources(_) => Seen::Resources,
            };
            sentences.entry(what).or_default().insert(format!("{}: {}", right.sentence(), right.remedy()));
        }
        let join = |sentences: BTreeSet<String>| sentences.into_iter().collect::<Vec<_>>().join("; ");
        sentences.into_iter().map(|(what, sentences)| (what, join(sentences))).collect()
    }

    /// A DaemonSet as it is now.
    pub(in super::super) fn daemon_set(
        &self,
        namespace: &str,
        name: &str,
    ) -> Option<(&DaemonSetFacts, &LiveDaemonSet)> {
        let tracked = self.daemon_sets.get(&(namespace.to_owned(), name.to_owned()))?;
        Some((&tracked.facts, tracked.facts.live.as_ref()?))
    }

    /// Is this resource version of a DaemonSet like the present one, for a plan?
    pub(in super::super) fn is_same_daemon_set(
        &self,
        namespace: &str,
        name: &str,
        version: &ObjectVersion,
    ) -> bool {
        let tracked = self.daemon_sets.get(&(namespace.to_owned(), name.to_owned()));
        tracked.is_some_and(|tracked| {
            let uid = tracked.facts.live.as_ref().map(|live| &live.version.uid);
            uid == Some(&version.uid) && tracked.same.contains(&version.resource_version)
        })
    }

    /// Is this pod going, or gone?
    pub(in super::super) fn pod_ends(&self, uid: &str) -> bool {
        let mut pods = self.pods.values().flat_map(BTreeMap::values);
        pods.find(|pod| pod.version.uid == uid).is_none_or(|pod| pod.deleting)
    }

    /// An operator's resource as it is now, and whether this resource version of it is like that, for a plan.
    pub(in super::super) fn resource(
        &self,
        kind: OperatorResource,
        name: &str,
        version: &ObjectVersion,
    ) -> Option<(&ResourceFacts, bool)> {
        let tracked = self.resources.get(&(kind, name.to_owned()))?;
        let same =
            tracked.facts.version.uid == version.uid && tracked.same.contains(&version.resource_version);
        Some((&tracked.facts, same))
    }
}

impl StoredNode {
    fn facts(&self, name: &str) -> NodeFacts {
        let Self { labels, annotations, kernel_version, architecture, os_image, unschedulable } = self;
        let labels = labels.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect();
        NodeFacts {
            name: name.to_owned(),
            labels,
            annotations: annotations.clone(),
            kernel_version: kernel_version.to_string(),
            architecture: architecture.to_string(),
            os_image: os_image.to_string(),
            unschedulable: *unschedulable,
        }
    }
}
