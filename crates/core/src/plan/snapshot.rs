//! Pure: what was observed in a cluster, raw and untrusted.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    ops::DerefMut,
    sync::Arc,
};

use jiff::{SignedDuration, Timestamp};
use serde::Serialize;

use super::{
    Distrust, JobState, ManifestPlace, NO_DRIVER_FOR, NodeAffinity, READY_FOR, RolloutObject, RolloutTarget,
    UPGRADE, WriteNamespaces, labels::HANDOVER_LABELS,
};
use crate::{
    image::{DaemonSetContainer, DriverImage, OperatorResource, Strategy},
    kernel::ImageStreams,
};

/// Facts that one snapshot has in common with the next: of 10,000 nodes few change between two passes. Whoever changes them gets a copy of
/// their own.
#[derive(Clone, Debug, Default, PartialEq, Eq, derive_more::Deref)]
pub struct Shared<T>(#[deref(forward)] Arc<T>);

impl<T> From<T> for Shared<T> {
    fn from(facts: T) -> Self {
        Self(Arc::new(facts))
    }
}

impl<T: Clone> DerefMut for Shared<T> {
    fn deref_mut(&mut self) -> &mut T {
        Arc::make_mut(&mut self.0)
    }
}

/// A node, as it describes itself. Nothing in it is checked yet; [`super::node_target`] does that.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeFacts {
    /// `metadata.name`.
    pub name: String,
    /// `metadata.labels`; from a live cluster only those that are asked for ([`super::Interest`]), and farrier's own.
    pub labels: BTreeMap<String, String>,
    /// Those of `metadata.annotations` that begin with `farrier.dev/`.
    pub annotations: BTreeMap<String, String>,
    /// `status.nodeInfo.kernelVersion`.
    pub kernel_version: String,
    /// `status.nodeInfo.architecture`.
    pub architecture: String,
    /// `status.nodeInfo.osImage`, for people.
    pub os_image: String,
    /// `spec.unschedulable`: cordoned, as while it is drained.
    pub unschedulable: bool,
    /// Its condition `Ready` is there, and not true.
    pub not_ready: bool,
    /// Is there a label that tells which hardware it has ([`super::tells_hardware`]), also where that is not kept?
    pub hardware_labelled: bool,
    /// What of it is not believed, as far as [`super::Claims`] was asked.
    pub distrust: Distrust,
}

/// A container or init container of a pod template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Container {
    /// Its name.
    pub name: String,
    /// Its image; empty where the manifest gives none.
    pub image: String,
    /// Why its image cannot be set, where it cannot (a value that other places share).
    pub fixed: Option<String>,
}

/// The controller that owns an object (`metadata.ownerReferences` with `controller: true`).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Owner {
    /// Such as `NicClusterPolicy`.
    pub kind: String,
    /// The owner's name.
    pub name: String,
}

/// Which state of which object a decision was made from: a write names it, so that the API server refuses it when another was faster.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ObjectVersion {
    /// `metadata.uid`.
    pub uid: String,
    /// `metadata.resourceVersion`.
    pub resource_version: String,
}

/// How a DaemonSet replaces its pods (`spec.updateStrategy`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UpdateStrategy {
    /// By itself, as soon as the template changes.
    #[default]
    RollingUpdate,
    /// The time of their deletion, where that is under way.
    OnDelete,
}

/// A number of pods, or a share of those that are wanted (`rollingUpdate.maxUnavailable`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodCount {
    /// So many.
    Number(usize),
    /// So many of a hundred, rounded up, as the DaemonSet controller does.
    Percent(usize),
}

/// What only a live cluster tells about a DaemonSet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiveDaemonSet {
    /// The object's identity and state.
    pub version: ObjectVersion,
    /// Those of `metadata.annotations` that begin with `farrier.dev/`.
    pub annotations: BTreeMap<String, String>,
    /// `metadata.labels`.
    pub labels: BTreeMap<String, String>,
    /// `spec.selector.matchLabels`.
    pub match_labels: BTreeMap<String, String>,
    /// `spec.updateStrategy`.
    pub update: UpdateStrategy,
    /// `spec.updateStrategy.rollingUpdate.maxUnavailable`, 1 where it is not given. farrier keeps to it for
    /// `OnDelete`, too.
    pub max_unavailable: PodCount,
    /// `status.desiredNumberScheduled`: on so many nodes its pods are to run, taints taken into account.
    pub desired: usize,
    /// `metadata.deletionTimestamp` is set.
    pub deleting: bool,
    /// The object as the API server gave it, without `managedFields` and `status`: what a per-kernel copy is made
    /// from.
    pub manifest: Arc<serde_json::Value>,
}

/// A DaemonSet: where its pods run and with which images.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DaemonSetFacts {
    /// `metadata.namespace`; `default` where the manifest gives none.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
    /// Containers and init containers.
    pub containers: Vec<Container>,
    /// `spec.template.spec.nodeSelector`.
    pub node_selector: BTreeMap<String, String>,
    /// The required part of `spec.template.spec.affinity.nodeAffinity`.
    pub affinity: NodeAffinity,
    /// The controller that owns it, if any.
    pub owner: Option<Owner>,
    /// The rest; `None` in a directory of manifests.
    pub live: Option<LiveDaemonSet>,
}

/// A pod of a DaemonSet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodFacts {
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
    /// The object's identity and state.
    pub version: ObjectVersion,
    /// uid of the DaemonSet that controls it.
    pub daemon_set: String,
    /// The node that it runs on, or is meant for (`spec.nodeName`, else the node affinity that the DaemonSet
    /// controller gives it).
    pub node: String,
    /// Is it bound to that node?
    pub bound: bool,
    /// Image by container, init containers included.
    pub images: BTreeMap<String, String>,
    /// The `Ready` condition is true.
    pub ready: bool,
    /// Since when it is ready without a restart: the later of the `Ready` condition's last change and the last start of
    /// a container. `None` where it is not ready; where it does not say, it is ready since it was made.
    pub steady_since: Option<Timestamp>,
    /// `metadata.creationTimestamp`.
    pub created: Option<Timestamp>,
    /// `metadata.deletionTimestamp` is set.
    pub deleting: bool,
    /// What its containers' states say of why they do not run, for people: `driver: CrashLoopBackOff: ...`.
    pub messages: Vec<String>,
}

/// A pod that may be in a driver's way, on a node whose upgrade drains it. Those that have ended are none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkloadFacts {
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
    /// `metadata.uid`.
    pub uid: String,
    /// `spec.nodeName`.
    pub node: String,
    /// `metadata.labels`.
    pub labels: BTreeMap<String, String>,
    /// Is it of a DaemonSet, a static pod, or farrier's own, which no drain ends?
    pub stays: bool,
    /// Extended resources that its containers request.
    pub requests: BTreeSet<String>,
    /// `metadata.deletionTimestamp` is set.
    pub deleting: bool,
    /// Of a forecast (`driver-entrypoint forecast --message`): what it has found last.
    pub holders: Vec<Holder>,
}

/// What holds a driver's modules on a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The uid of the pod that it belongs to; `None` for what is the node's own, or not known.
    pub pod: Option<String>,
    /// For people.
    pub what: String,
}

/// A custom resource whose operator writes the driver DaemonSet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResourceFacts {
    /// Which kind.
    pub kind: OperatorResource,
    /// `metadata.name`; all of these kinds are cluster-scoped.
    pub name: String,
    /// The object's identity and state.
    pub version: ObjectVersion,
    /// Those of `metadata.annotations` that begin with `farrier.dev/`.
    pub annotations: BTreeMap<String, String>,
    /// The whole `spec`.
    pub spec: Arc<serde_json::Value>,
}

/// What farrier may be unable to see.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, strum::Display)]
#[serde(rename_all = "kebab-case")]
pub enum Seen {
    /// Nodes; without them there is no plan.
    #[strum(to_string = "nodes")]
    Nodes,
    /// DaemonSets.
    DaemonSets,
    /// Pods.
    #[strum(to_string = "pods")]
    Pods,
    /// The operators' resources.
    #[strum(to_string = "operators' resources")]
    Resources,
    /// All pods of nodes that upgrades drain.
    #[strum(to_string = "pods of other namespaces")]
    Workloads,
    /// Jobs that check nodes with a new driver.
    #[strum(to_string = "checks")]
    Checks,
}

/// Everything that a plan needs to know about a cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterSnapshot {
    /// Nodes.
    pub nodes: Vec<Shared<NodeFacts>>,
    /// DaemonSets.
    pub daemon_sets: Vec<DaemonSetFacts>,
    /// Pods of the DaemonSets that rollouts name, and of their per-kernel copies.
    pub pods: Vec<PodFacts>,
    /// Operators' resources.
    pub resources: Vec<ResourceFacts>,
    /// ImageStreams that kernel families name.
    pub image_streams: ImageStreams,
    /// Pods of nodes that upgrades are draining.
    pub workloads: Vec<WorkloadFacts>,
    /// Jobs that check nodes with a new driver, by name.
    pub checks: BTreeMap<String, JobState>,
    /// What could not be read, and why, with what to do: what depends on it holds.
    pub unseen: BTreeMap<Seen, String>,
    /// The same for a namespace: what is in others goes on.
    pub unseen_in: BTreeMap<(Seen, String), String>,
    /// Nodes are manifests, to which nothing is written.
    pub read_only_nodes: bool,
    /// Where DaemonSets and pods may be written.
    pub writable: WriteNamespaces,
}

/// What stands at a place of manifests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ManifestFacts {
    /// Its DaemonSets.
    pub daemon_sets: Vec<DaemonSetFacts>,
    /// Branches of its Git repository with changes that wait for a pull request.
    pub proposals: BTreeSet<String>,
}

/// What stands at the places that `file` and `git` rollouts name; or why one could not be read.
pub type Manifests = BTreeMap<ManifestPlace, Result<ManifestFacts, String>>;

/// Labels that farrier gives to nodes while it rolls out.
fn is_written_here(label: &str) -> bool {
    [HANDOVER_LABELS, READY_FOR, NO_DRIVER_FOR, UPGRADE].iter().any(|own| label.starts_with(own))
}

/// What of a node decides which images may reach it.
type Likeness<'a> = (Option<&'a str>, &'a str, &'a str, bool, Vec<(&'a str, &'a str)>);

impl NodeFacts {
    fn likeness(&self, by_name: bool) -> Likeness<'_> {
        let labels = self.labels.iter().filter(|(key, _)| !is_written_here(key));
        let labels = labels.map(|(key, value)| (key.as_str(), value.as_str())).collect();
        let distrusted = self.distrust.kernel.is_some();
        (by_name.then_some(self.name.as_str()), &self.kernel_version, &self.architecture, distrusted, labels)
    }

    /// Does it carry the labels that the image asks for, and none that says that it has its own driver?
    pub fn calls_for(&self, image: &DriverImage) -> bool {
        let nodes = &image.spec.nodes;
        nodes.matches(&self.labels) && nodes.own_driver(&self.labels).is_none()
    }
}

impl ClusterSnapshot {
    /// Why this cannot be read in a namespace.
    pub fn why_unseen(&self, what: Seen, namespace: &str) -> Option<&String> {
        self.unseen.get(&what).or_else(|| self.unseen_in.get(&(what, namespace.to_owned())))
    }

    /// All that could not be read, and why.
    pub fn all_unseen(&self) -> impl Iterator<Item = (&Seen, &String)> {
        self.unseen.iter().chain(self.unseen_in.iter().map(|((what, _), why)| (what, why)))
    }

    /// Has each node of a later snapshot that a rollout to this target may reach its like in this one, in all that decides which
    /// images may reach it: what it runs, its labels, and its name where nodes are selected by name? Then no rollout that was decided
    /// from this snapshot reaches a kernel of which it did not know. Labels of farrier's own change while it rolls out.
    pub fn knows_nodes_of(&self, later: &Self, target: &RolloutTarget) -> bool {
        let by_name = self.daemon_sets.iter().any(|found| found.affinity.names_nodes());
        // The nodes of copies, of operators' resources and of manifests are not those of one DaemonSet.
        let one = match (target.strategy, &target.object) {
            (Strategy::Image | Strategy::Union, RolloutObject::DaemonSet(wanted)) => {
                let mut planned = self.daemon_sets.iter().filter(|found| found.is_named(wanted));
                let now = later.daemon_sets.iter().find(|found| found.is_named(wanted));
                let (Some(planned), Some(now)) = (planned.next(), now) else { return false };
                if planned.node_selector != now.node_selector || planned.affinity != now.affinity {
                    return false;
                }
                Some(now)
            }
            _ => None,
        };
        let is_reached =
            |node: &&Shared<NodeFacts>| one.is_none_or(|found| found.reaches(node) != Some(false));
        let known: HashSet<_> = self.nodes.iter().map(|node| node.likeness(by_name)).collect();
        later.nodes.iter().filter(is_reached).all(|node| known.contains(&node.likeness(by_name)))
    }
}

impl DaemonSetFacts {
    /// Is it the one that a rollout names?
    pub fn is_named(&self, wanted: &DaemonSetContainer) -> bool {
        self.namespace == *wanted.namespace && self.name == *wanted.daemon_set
    }

    /// The image of a container.
    pub fn image_of(&self, container: &str) -> Option<&str> {
        self.containers.iter().find(|found| found.name == container).map(|found| found.image.as_str())
    }

    /// May its pods run on this node? Taints are left out of account: the answer is a superset of the
    /// nodes that it runs on, so that a rewrite is held too often rather than too seldom. `None` where
    /// its affinity is not understood.
    pub fn reaches(&self, node: &NodeFacts) -> Option<bool> {
        let selected = self.node_selector.iter().all(|(key, value)| node.labels.get(key) == Some(value));
        self.affinity.admits(&node.name, &node.labels).map(|admitted| admitted && selected)
    }

    /// The label keys that decide which nodes it reaches.
    pub fn label_keys(&self) -> impl Iterator<Item = &str> {
        self.node_selector.keys().map(String::as_str).chain(self.affinity.label_keys())
    }
}

impl PodFacts {
    /// Has it been ready for so long, without a restart? Then it counts.
    pub fn is_steady(&self, stable_for: SignedDuration, now: Timestamp) -> bool {
        let since = self.steady_since.or(self.created);
        self.ready && since.is_none_or(|since| now.duration_since(since) >= stable_for)
    }
}

impl ResourceFacts {
    /// The resource's own `nodeSelector`, for the kinds that have one. A value that is no string selects nothing
    /// less: what is not understood makes the answer larger.
    pub fn node_selector(&self) -> impl Iterator<Item = (&str, &str)> {
        let selects = matches!(self.kind, OperatorResource::NicNodePolicy | OperatorResource::NvidiaDriver);
        let selector = self.spec.get("nodeSelector").filter(|_| selects).and_then(|found| found.as_object());
        selector.into_iter().flatten().filter_map(|(key, value)| Some((key.as_str(), value.as_str()?)))
    }

    /// The label keys that decide which nodes it reaches.
    pub fn label_keys(&self) -> impl Iterator<Item = &str> {
        self.node_selector().map(|(key, _)| key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Operator, Requirement, SelectorTerm};

    fn node(name: &str, kernel: &str, label: (&str, &str)) -> Shared<NodeFacts> {
        let labels = [(label.0.to_owned(), label.1.to_owned())].into();
        NodeFacts { name: name.to_owned(), kernel_version: kernel.to_owned(), labels, ..NodeFacts::default() }
            .into()
    }

    fn target(strategy: &str) -> RolloutTarget {
        let spec = serde_json::json!({
            "strategy": strategy, "namespace": "drivers", "daemonSet": "d", "container": "driver",
        });
        RolloutTarget::of(&serde_json::from_value(spec).unwrap())
    }

    fn of(nodes: &[Shared<NodeFacts>]) -> ClusterSnapshot {
        ClusterSnapshot { nodes: nodes.to_vec(), ..ClusterSnapshot::default() }
    }

    fn daemon_set() -> DaemonSetFacts {
        DaemonSetFacts {
            namespace: "drivers".to_owned(),
            name: "d".to_owned(),
            containers: Vec::new(),
            node_selector: BTreeMap::new(),
            affinity: NodeAffinity::Any,
            owner: None,
            live: None,
        }
    }

    #[test]
    fn a_node_that_the_rollout_does_not_reach_says_nothing() {
        let with = |nodes: &[Shared<NodeFacts>], zone: &str| {
            let node_selector = [("zone".to_owned(), zone.to_owned())].into();
            let daemon_sets = vec![DaemonSetFacts { node_selector, ..daemon_set() }];
            ClusterSnapshot { daemon_sets, ..of(nodes) }
        };
        let (x, y) = (node("a", "6.1", ("zone", "x")), node("b", "6.2", ("zone", "y")));
        let planned = with(&[x.clone(), y.clone()], "x");
        let elsewhere = with(&[x.clone(), node("b", "6.3", ("zone", "y"))], "x");
        assert!(planned.knows_nodes_of(&elsewhere, &target("image")));
        assert!(!planned.knows_nodes_of(&elsewhere, &target("per-kernel")), "its copies reach others");
        let reached = with(&[node("a", "6.3", ("zone", "x")), y.clone()], "x");
        assert!(!planned.knows_nodes_of(&reached, &target("image")));
        assert!(!planned.knows_nodes_of(&with(&[x, y], "y"), &target("image")), "it selects others now");
        assert!(!planned.knows_nodes_of(&of(&planned.nodes), &target("image")), "it has gone");
    }

    #[test]
    fn a_node_like_those_that_were_planned_for_is_known() {
        let planned = of(&[node("a", "6.1", ("zone", "x")), node("b", "6.2", ("zone", "y"))]);
        assert!(planned.knows_nodes_of(&planned, &target("per-kernel")));
        assert!(planned.knows_nodes_of(&of(&[]), &target("per-kernel")));
        // Another name, another order, fewer of them, a mark of farrier's own: nothing new.
        let mut marked = node("c", "6.1", ("zone", "x"));
        marked.labels.insert("farrier.dev/driver.0a1b2c3d".to_owned(), "yes".to_owned());
        assert!(
            planned.knows_nodes_of(&of(&[node("b", "6.2", ("zone", "y")), marked]), &target("per-kernel"))
        );

        let mut arm64 = node("a", "6.1", ("zone", "x"));
        "arm64".clone_into(&mut arm64.architecture);
        for other in [node("a", "6.3", ("zone", "x")), node("a", "6.1", ("zone", "y")), arm64] {
            assert!(
                !planned
                    .knows_nodes_of(&of(&[planned.nodes[0].clone(), other.clone()]), &target("per-kernel")),
                "{other:?}"
            );
        }
    }

    #[test]
    fn names_matter_where_somebody_selects_by_name() {
        let mut planned = of(&[node("a", "6.1", ("zone", "x"))]);
        let other = of(&[node("b", "6.1", ("zone", "x"))]);
        assert!(planned.knows_nodes_of(&other, &target("per-kernel")));
        let field = Requirement {
            key: "metadata.name".to_owned(),
            operator: Operator::In,
            values: vec!["a".to_owned()],
        };
        let terms = vec![SelectorTerm { expressions: Vec::new(), fields: vec![field] }];
        planned.daemon_sets.push(DaemonSetFacts { affinity: NodeAffinity::Terms(terms), ..daemon_set() });
        assert!(!planned.knows_nodes_of(&other, &target("per-kernel")));
    }
}
