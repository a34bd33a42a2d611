//! The observed state of a cluster. All values are raw and untrusted.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    ops::DerefMut,
    sync::Arc,
};

use jiff::{SignedDuration, Timestamp};
use serde::Serialize;

use super::{
    JobState, ManifestLocation, NO_DRIVER_FOR, NodeReach, Placement, READY_FOR, ReachingObject,
    RejectedClaims, RolloutObject, RolloutTarget, Taint, UPGRADE, WriteNamespaces,
    labels::HANDOVER_LABEL_PREFIX, operator_resources::OperatorResources, reach::operator_placement,
};
use crate::{
    image::{DaemonSetContainer, DriverImage, OperatorResource, ResourceName, Strategy},
    kernel::ImageStreams,
};

/// Facts that consecutive snapshots share: of 10,000 nodes few change between two reconciles. Mutable access clones the
/// facts (copy on write).
#[derive(Clone, Debug, Default, PartialEq, Eq, derive_more::Deref)]
pub struct CowArc<T>(#[deref(forward)] Arc<T>);

impl<T> From<T> for CowArc<T> {
    fn from(facts: T) -> Self {
        Self(Arc::new(facts))
    }
}

impl<T: Clone> DerefMut for CowArc<T> {
    fn deref_mut(&mut self) -> &mut T {
        Arc::make_mut(&mut self.0)
    }
}

/// Node, as it describes itself. Nothing is validated yet; [`super::node_target`] does that.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeFacts {
    /// `metadata.name`.
    pub name: String,
    /// `metadata.creationTimestamp`.
    pub created: Option<Timestamp>,
    /// `metadata.labels`; from a live cluster only labels of interest ([`super::SnapshotScope`]), and farrier's own.
    pub labels: BTreeMap<String, String>,
    /// `metadata.annotations` whose keys begin with `farrier.dev/`.
    pub annotations: BTreeMap<String, String>,
    /// `status.nodeInfo.kernelVersion`.
    pub kernel_version: String,
    /// `status.nodeInfo.architecture`.
    pub architecture: String,
    /// `status.nodeInfo.osImage`; tells apart systems with kernels of one release where labels are missing.
    pub os_image: String,
    /// `spec.unschedulable`: whether the node is cordoned, for example while it is drained.
    pub unschedulable: bool,
    /// Whether the condition `Ready` is present and not true.
    pub not_ready: bool,
    /// Time of the last change of the condition `Ready`.
    pub ready_changed: Option<Timestamp>,
    /// `spec.taints`.
    pub taints: Vec<Taint>,
    /// `status.nodeInfo.operatingSystem`.
    pub operating_system: String,
    /// Index of the rule in `site.yaml` (`ignoreNodes`) that ignores the node.
    pub ignored_by: Option<usize>,
    /// Whether the node has a label that describes its hardware ([`super::is_hardware_label`]). The snapshot need not contain
    /// the label.
    pub has_hardware_labels: bool,
    /// Rejected claims of the node, as decided by [`super::NodeKernelLimiter`].
    pub rejected_claims: RejectedClaims,
}

/// Container or init container of a pod template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Container {
    /// Name of the container.
    pub name: String,
    /// Image of the container; empty where the manifest gives none.
    pub image: String,
    /// Reason why the image cannot be set, if any (for example a value that other fields share).
    pub why_not_editable: Option<String>,
    /// Whether the manifest has a separate field for the tag, so that an image by digest is written with its tag.
    pub tagged: bool,
}

/// Controller that owns an object (`metadata.ownerReferences` with `controller: true`).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Owner {
    /// Kind of the owner, such as `NicClusterPolicy`.
    pub kind: String,
    /// Name of the owner.
    pub name: String,
}

/// Version of the object that a decision was made from. A write names it as a precondition, so that the API server
/// refuses the write after a concurrent change.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ObjectVersion {
    /// `metadata.uid`.
    pub uid: String,
    /// `metadata.resourceVersion`.
    pub resource_version: String,
}

/// Way in which a DaemonSet replaces its pods (`spec.updateStrategy`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UpdateStrategy {
    /// The controller replaces pods as soon as the template changes.
    #[default]
    RollingUpdate,
    /// The controller replaces a pod only after another actor has deleted it.
    OnDelete,
}

/// Number or percentage of the desired pods (`rollingUpdate.maxUnavailable`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodCount {
    /// Absolute number.
    Number(usize),
    /// Percentage, rounded up as the DaemonSet controller does.
    Percent(usize),
}

/// Facts about a DaemonSet that only a live cluster has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiveDaemonSet {
    /// Identity and version of the object.
    pub version: ObjectVersion,
    /// `metadata.annotations` whose keys begin with `farrier.dev/`.
    pub annotations: BTreeMap<String, String>,
    /// `metadata.labels`.
    pub labels: BTreeMap<String, String>,
    /// `spec.selector.matchLabels`.
    pub match_labels: BTreeMap<String, String>,
    /// `spec.updateStrategy`.
    pub update: UpdateStrategy,
    /// `spec.updateStrategy.rollingUpdate.maxUnavailable`; 1 where absent. farrier also honors the value for
    /// `OnDelete`.
    pub max_unavailable: PodCount,
    /// `status.desiredNumberScheduled`: number of nodes that should run a pod, with taints taken into account.
    pub desired: usize,
    /// Whether `metadata.deletionTimestamp` is set.
    pub deleting: bool,
    /// Fields that this farrier owns, by `metadata.managedFields`.
    pub owned: OwnedFields,
    /// Object from the API server, without `managedFields` and `status`: the source of a per-kernel copy.
    pub manifest: Arc<serde_json::Value>,
}

/// Fields of a DaemonSet that farrier applied, and that no other writer has changed since.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OwnedFields {
    /// Containers whose image is farrier's.
    pub images: BTreeSet<String>,
    /// Whether the required node affinity is farrier's.
    pub affinity: bool,
}

/// DaemonSet: where its pods run, and with which images.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DaemonSetFacts {
    /// `metadata.namespace`; `default` where the manifest gives none.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
    /// Containers and init containers.
    pub containers: Vec<Container>,
    /// Rules of `spec.template.spec` for the nodes of its pods.
    pub placement: Placement,
    /// Controller that owns the DaemonSet, if any.
    pub owner: Option<Owner>,
    /// Whether a manifest has the annotation that pauses rollouts. For a live cluster, see [`LiveDaemonSet::annotations`].
    pub paused: bool,
    /// Facts from a live cluster; `None` in a directory of manifests.
    pub live: Option<LiveDaemonSet>,
}

/// Pod of a DaemonSet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodFacts {
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
    /// Identity and version of the object.
    pub version: ObjectVersion,
    /// UID of the DaemonSet that controls the pod.
    pub daemon_set: String,
    /// Node that the pod runs on or is meant for (`spec.nodeName`, else the node affinity that the DaemonSet controller
    /// sets).
    pub node: String,
    /// Whether the pod is bound to that node.
    pub bound: bool,
    /// Image by container, init containers included.
    pub images: BTreeMap<String, String>,
    /// Containers whose success follows from the readiness of the pod: containers with a readiness or startup probe, and init
    /// containers that end.
    pub probed: Vec<String>,
    /// Number of `imagePullSecrets`, including the ServiceAccount's.
    pub pull_secrets: usize,
    /// Whether the `Ready` condition is true.
    pub ready: bool,
    /// Time since which the pod is ready without a restart, by the API server's clock where the object tells. `None` where
    /// the pod is not ready. For a ready pod without such a time, `None` means since its creation.
    pub stable_since: Option<Timestamp>,
    /// `metadata.creationTimestamp`.
    pub created: Option<Timestamp>,
    /// Whether `metadata.deletionTimestamp` is set.
    pub deleting: bool,
    /// Reasons from the containers' states why they do not run, for people: `driver: CrashLoopBackOff: ...`.
    pub messages: Vec<String>,
    /// Reason why an image of the pod is not on the node, if the kubelet failed to pull one.
    pub pull_failure: Option<PullFailure>,
}

/// Reason why a kubelet failed to pull an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PullFailure {
    /// The registry did not answer, or was overloaded.
    Unanswered,
    /// Any other reason, such as missing credentials, or no reason.
    Refused,
}

/// Pod on a draining node that may keep its driver in use. Pods that have ended are excluded.
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
    /// Whether a drain leaves the pod running: a pod of a DaemonSet, a static pod, or a farrier pod.
    pub stays: bool,
    /// Extended resources that the pod's containers request.
    pub requests: BTreeSet<String>,
    /// Whether `metadata.deletionTimestamp` is set.
    pub deleting: bool,
    /// For a forecast pod (`driver-entrypoint forecast --message`): the holders that it found last.
    pub holders: Vec<Holder>,
}

/// Holder of a driver's modules on a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// UID of the pod that the holder belongs to; `None` for a holder outside of pods, or an unknown one.
    pub pod: Option<String>,
    /// Description for people.
    pub description: String,
}

/// Custom resource whose operator writes the driver DaemonSet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResourceFacts {
    /// Kind of the resource.
    pub kind: OperatorResource,
    /// `metadata.name`, after `metadata.namespace` if the kind is namespaced: `kmm/acme`.
    pub name: String,
    /// Identity and version of the object; `None` in a directory of manifests.
    pub version: Option<ObjectVersion>,
    /// In a directory of manifests: the driver's fields that cannot be set where they are written, with the reasons. An
    /// empty key means all fields.
    pub why_not_editable: BTreeMap<String, String>,
    /// `metadata.annotations` whose keys begin with `farrier.dev/`.
    pub annotations: BTreeMap<String, String>,
    /// In the live object: fields of the driver's section that this farrier owns, by `metadata.managedFields`.
    pub owned: BTreeSet<String>,
    /// `metadata.creationTimestamp` of the live object.
    pub created: Option<Timestamp>,
    /// In the live object: why the operator could not apply the driver, in the operator's words.
    pub operator_error: Option<String>,
    /// The whole `spec`.
    pub spec: Arc<serde_json::Value>,
}

/// Kinds of objects that farrier may be unable to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, strum::Display)]
#[serde(rename_all = "kebab-case")]
pub enum ObservedKind {
    /// Nodes; there is no plan without them.
    #[strum(to_string = "nodes")]
    Nodes,
    /// DaemonSets.
    DaemonSets,
    /// Pods.
    #[strum(to_string = "pods")]
    Pods,
    /// Operators' resources.
    #[strum(to_string = "operators' resources")]
    Resources,
    /// All pods of nodes that upgrades drain.
    #[strum(to_string = "pods of other namespaces")]
    Workloads,
    /// Jobs that check nodes with a new driver.
    #[strum(to_string = "checks")]
    Checks,
}

/// All facts about a cluster that a plan needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterSnapshot {
    /// Nodes.
    pub nodes: Vec<CowArc<NodeFacts>>,
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
    /// Kinds of objects that could not be read, with the reason and the remedy. Everything that depends on them is
    /// held.
    pub unseen: BTreeMap<ObservedKind, String>,
    /// Kinds of objects that could not be read in one namespace. Rollouts in other namespaces continue.
    pub unseen_in: BTreeMap<(ObservedKind, String), String>,
    /// Whether the nodes are manifests, which farrier never writes to.
    pub read_only_nodes: bool,
    /// Files and objects in a directory that were skipped, with the reasons.
    pub skipped: Vec<String>,
    /// Namespaces in which DaemonSets and pods may be written.
    pub writable: WriteNamespaces,
    /// Time since which the API server has not answered, if it is silent. The snapshot is then the last known state.
    pub stale_since: Option<Timestamp>,
}

/// Content of one manifest location.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ManifestFacts {
    /// DaemonSets in the manifests.
    pub daemon_sets: Vec<DaemonSetFacts>,
    /// Operators' resources in the manifests.
    pub resources: Vec<ResourceFacts>,
    /// Files and objects that were skipped, with the reasons.
    pub skipped: Vec<String>,
    /// Branches of the Git repository with changes that wait for a pull request.
    pub proposals: BTreeSet<String>,
    /// Commit of the Git repository; empty for files on this machine.
    pub commit: String,
}

/// Content of each location that `file` and `git` rollouts name, or the reason why the location could not be read.
pub type Manifests = BTreeMap<ManifestLocation, Result<ManifestFacts, String>>;

/// Whether farrier itself sets this node label during a rollout.
fn is_farrier_label(label: &str) -> bool {
    [HANDOVER_LABEL_PREFIX, READY_FOR, NO_DRIVER_FOR, UPGRADE].iter().any(|own| label.starts_with(own))
}

/// Facts about a node that decide which images may reach it.
type NodeFingerprint<'a> =
    (Option<&'a str>, [&'a str; 3], (bool, Option<usize>), Vec<(&'a str, &'a str)>, Vec<&'a Taint>);

impl NodeFacts {
    /// Returns the time since which the node is ready; `None` where it is not ready, or the time is unknown.
    pub(super) fn ready_since(&self) -> Option<Timestamp> {
        self.ready_changed.filter(|_| !self.not_ready)
    }

    fn fingerprint(&self, by_name: bool) -> NodeFingerprint<'_> {
        let labels = self.labels.iter().filter(|(key, _)| !is_farrier_label(key));
        let labels = labels.map(|(key, value)| (key.as_str(), value.as_str())).collect();
        let rejection = (self.rejected_claims.kernel.is_some(), self.ignored_by);
        // Pods of DaemonSets tolerate taints of temporary node conditions, such as a network outage.
        let taints = self.taints.iter().filter(|taint| !taint.is_always_tolerated()).collect();
        let name = by_name.then_some(self.name.as_str());
        (name, [&self.kernel_version, &self.architecture, &self.os_image], rejection, labels, taints)
    }

    /// Describes what distinguishes the node from its state in an earlier snapshot.
    fn change_since(&self, before: Option<&Self>) -> String {
        let name = &self.name;
        let Some(before) = before else { return format!("node {name} joined") };
        if self.kernel_version != before.kernel_version {
            return format!(
                "node {name} runs {:.80} instead of {:.80}",
                self.kernel_version, before.kernel_version
            );
        }
        let mut keys = self.labels.keys().chain(before.labels.keys()).filter(|key| !is_farrier_label(key));
        match keys.find(|key| self.labels.get(*key) != before.labels.get(*key)) {
            Some(key) => {
                let [from, to] =
                    [before, self].map(|node| node.labels.get(key).map_or("(none)", String::as_str));
                format!("label {key} of node {name} changed from {from} to {to}")
            }
            None => format!("the taints or the nodeInfo of node {name} changed"),
        }
    }

    /// Whether the image applies to the node: its labels match, the host provides no driver, and `site.yaml` does not ignore it.
    pub fn is_selected_by(&self, image: &DriverImage) -> bool {
        let nodes = &image.spec.nodes;
        self.ignored_by.is_none() && nodes.matches(&self.labels) && nodes.own_driver(&self.labels).is_none()
    }
}

impl ClusterSnapshot {
    pub(super) fn daemon_set(&self, namespace: &str, name: &str) -> Option<&DaemonSetFacts> {
        self.daemon_sets.iter().find(|found| found.namespace == namespace && found.name == name)
    }

    /// Returns the reason why objects of this kind cannot be read in a namespace.
    pub fn why_unseen(&self, kind: ObservedKind, namespace: &str) -> Option<&String> {
        self.unseen.get(&kind).or_else(|| self.unseen_in.get(&(kind, namespace.to_owned())))
    }

    /// Returns all kinds of objects that could not be read, with the reasons.
    pub fn all_unseen(&self) -> impl Iterator<Item = (&ObservedKind, &String)> {
        self.unseen.iter().chain(self.unseen_in.iter().map(|((kind, _), why)| (kind, why)))
    }

    /// Describes a node of a later snapshot that a rollout to this target may reach, and that has no equivalent in this
    /// snapshot. Nodes are equivalent if they agree in kernel, system, architecture, labels, and in the name where nodes are
    /// selected by name. With `None`, a rollout that was decided from this snapshot reaches no kernel that is new to the
    /// decision. farrier's own labels are ignored, because they change during a rollout.
    pub fn node_change(&self, later: &Self, target: &RolloutTarget) -> Option<String> {
        let by_name = self.daemon_sets.iter().any(|daemon_set| daemon_set.placement.names_nodes());
        // Copies, operators' resources and manifests are not limited to the nodes of one DaemonSet.
        let object = match (target.strategy, &target.object) {
            (Strategy::Image | Strategy::Union, RolloutObject::DaemonSet(name)) => {
                let planned = self.daemon_sets.iter().find(|daemon_set| daemon_set.is_named(name));
                let current = later.daemon_sets.iter().find(|daemon_set| daemon_set.is_named(name));
                let (Some(planned), Some(current)) = (planned, current) else {
                    return Some(format!("{target} was deleted"));
                };
                if planned.placement != current.placement {
                    return Some(format!("{target} selects other nodes"));
                }
                Some(ReachingObject::daemon_set(current, later))
            }
            _ => None,
        };
        let is_reached = |node: &&CowArc<NodeFacts>| {
            object.as_ref().is_none_or(|object| !matches!(object.reach(node), NodeReach::Excluded(_)))
        };
        let known: HashSet<_> = self.nodes.iter().map(|node| node.fingerprint(by_name)).collect();
        let is_new = |node: &&CowArc<NodeFacts>| !known.contains(&node.fingerprint(by_name));
        let node = later.nodes.iter().filter(is_reached).find(is_new)?;
        let before = self.nodes.iter().find(|before| before.name == node.name);
        Some(node.change_since(before.map(|before| &**before)))
    }
}

impl DaemonSetFacts {
    /// Whether a rollout names this DaemonSet.
    pub fn is_named(&self, target: &DaemonSetContainer) -> bool {
        self.namespace == *target.namespace && self.name == *target.daemon_set
    }

    /// Returns the image of a container.
    pub fn image_of(&self, container: &str) -> Option<&str> {
        self.containers.iter().find(|other| other.name == container).map(|other| other.image.as_str())
    }
}

impl PodFacts {
    /// Whether the pod has been ready for this time without a restart.
    pub(crate) fn is_stable(&self, stable_for: SignedDuration, now: Timestamp) -> bool {
        let since = self.stable_since.or(self.created);
        self.ready && since.is_none_or(|since| now.duration_since(since) >= stable_for)
    }

    /// Whether the pod waits for a registry that does not answer, which says nothing about the image. `is_registry_down`
    /// tells whether farrier gets no answer either.
    pub(crate) fn awaits_registry(&self, is_registry_down: bool, now: Timestamp) -> bool {
        /// Time after which a registry that does not answer a node counts like an image that does not work.
        const MAX_OUTAGE: SignedDuration = SignedDuration::from_hours(4);
        let is_young = self.created.is_some_and(|created| now.duration_since(created) < MAX_OUTAGE);
        is_young && self.pull_failure.is_some_and(|why| is_registry_down || why == PullFailure::Unanswered)
    }
}

impl ResourceFacts {
    /// Whether a rollout names this resource.
    pub fn is_named(&self, target: &ResourceName) -> bool {
        self.kind == target.resource && self.name == target.full_name()
    }

    /// Returns the namespace, which may be empty, and the name.
    pub fn split_name(&self) -> (&str, &str) {
        self.name.rsplit_once('/').unwrap_or(("", &self.name))
    }

    /// Returns the rules of the DaemonSet that the operator creates, without the effect of other resources.
    pub fn placement(&self) -> Placement {
        operator_placement(self.kind, &self.name, &self.spec)
    }

    /// Returns the rules of the DaemonSet that the operator creates, with the effect of the cluster's other resources.
    pub(super) fn placement_in(&self, snapshot: &ClusterSnapshot) -> Placement {
        OperatorResources::live(snapshot).placement_of(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{NodeAffinity, Operator, Requirement, SelectorTerm};

    impl ClusterSnapshot {
        fn covers_nodes_of(&self, later: &Self, target: &RolloutTarget) -> bool {
            self.node_change(later, target).is_none()
        }
    }

    fn node(name: &str, kernel: &str, label: (&str, &str)) -> CowArc<NodeFacts> {
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

    fn of(nodes: &[CowArc<NodeFacts>]) -> ClusterSnapshot {
        ClusterSnapshot { nodes: nodes.to_vec(), ..ClusterSnapshot::default() }
    }

    fn daemon_set() -> DaemonSetFacts {
        DaemonSetFacts {
            namespace: "drivers".to_owned(),
            name: "d".to_owned(),
            containers: Vec::new(),
            placement: Placement::default(),
            owner: None,
            paused: false,
            live: None,
        }
    }

    #[test]
    fn a_node_that_the_rollout_does_not_reach_says_nothing() {
        let with = |nodes: &[CowArc<NodeFacts>], zone: &str| {
            let node_selector = [("zone".to_owned(), zone.to_owned())].into();
            let placement = Placement { node_selector, ..Placement::default() };
            let daemon_sets = vec![DaemonSetFacts { placement, ..daemon_set() }];
            ClusterSnapshot { daemon_sets, ..of(nodes) }
        };
        let (x, y) = (node("a", "6.1", ("zone", "x")), node("b", "6.2", ("zone", "y")));
        let planned = with(&[x.clone(), y.clone()], "x");
        let elsewhere = with(&[x.clone(), node("b", "6.3", ("zone", "y"))], "x");
        assert!(planned.covers_nodes_of(&elsewhere, &target("image")));
        assert!(!planned.covers_nodes_of(&elsewhere, &target("per-kernel")), "the copies reach other nodes");
        let reached = with(&[node("a", "6.3", ("zone", "x")), y.clone()], "x");
        assert!(!planned.covers_nodes_of(&reached, &target("image")));
        assert!(
            !planned.covers_nodes_of(&with(&[x, y], "y"), &target("image")),
            "the DaemonSet now selects other nodes"
        );
        assert!(!planned.covers_nodes_of(&of(&planned.nodes), &target("image")), "the DaemonSet is gone");
    }

    #[test]
    fn a_node_like_those_that_were_planned_for_is_known() {
        let planned = of(&[node("a", "6.1", ("zone", "x")), node("b", "6.2", ("zone", "y"))]);
        assert!(planned.covers_nodes_of(&planned, &target("per-kernel")));
        assert!(planned.covers_nodes_of(&of(&[]), &target("per-kernel")));
        // Another name, another order, fewer nodes or farrier's own label: nothing new.
        let mut marked = node("c", "6.1", ("zone", "x"));
        marked.labels.insert("farrier.dev/driver.0a1b2c3d".to_owned(), "yes".to_owned());
        assert!(
            planned.covers_nodes_of(&of(&[node("b", "6.2", ("zone", "y")), marked]), &target("per-kernel"))
        );

        let mut arm64 = node("a", "6.1", ("zone", "x"));
        "arm64".clone_into(&mut arm64.architecture);
        for other in [node("a", "6.3", ("zone", "x")), node("a", "6.1", ("zone", "y")), arm64] {
            assert!(
                !planned
                    .covers_nodes_of(&of(&[planned.nodes[0].clone(), other.clone()]), &target("per-kernel")),
                "{other:?}"
            );
        }
    }

    #[test]
    fn a_change_is_described() {
        let planned = of(&[node("a", "6.1", ("zone", "x"))]);
        let changes = [
            node("b", "6.2", ("zone", "x")),
            node("a", "6.2", ("zone", "x")),
            node("a", "6.1", ("zone", "y")),
            node("a", "6.1", ("pool", "x")),
            NodeFacts { os_image: "Debian".to_owned(), ..(*planned.nodes[0]).clone() }.into(),
        ];
        let changes = changes.map(|node| planned.node_change(&of(&[node]), &target("per-kernel")).unwrap());
        insta::assert_snapshot!(changes.join("\n"), @r"
        node b joined
        node a runs 6.2 instead of 6.1
        label zone of node a changed from x to y
        label pool of node a changed from (none) to x
        the taints or the nodeInfo of node a changed
        ");
    }

    #[test]
    fn names_matter_where_somebody_selects_by_name() {
        let mut planned = of(&[node("a", "6.1", ("zone", "x"))]);
        let other = of(&[node("b", "6.1", ("zone", "x"))]);
        assert!(planned.covers_nodes_of(&other, &target("per-kernel")));
        let field = Requirement {
            key: "metadata.name".to_owned(),
            operator: Operator::In,
            values: vec!["a".to_owned()],
        };
        let terms = vec![SelectorTerm { expressions: Vec::new(), fields: vec![field] }];
        let placement = Placement { affinity: NodeAffinity::Terms(terms), ..Placement::default() };
        planned.daemon_sets.push(DaemonSetFacts { placement, ..daemon_set() });
        assert!(!planned.covers_nodes_of(&other, &target("per-kernel")));
    }
}
