//! Determines the nodes that the pods of an object reach. Follows the DaemonSet controller (`NodeShouldRunDaemonPod`).
//!
//! A node without a kernel label is *unlabeled*: NFD removes all of its labels when it restarts, and adds them again. The GPU
//! Operator follows: it writes `nvidia.com/gpu.present=false`, and `true` some time after NFD. A rule that fails only because
//! of such labels leaves the node undetermined instead of excluding it.

use std::{
    collections::{BTreeMap, HashSet},
    fmt,
};

use serde::{Deserialize, Serialize, Serializer};
use serde_json::Value;

use super::{
    ClusterSnapshot, DaemonSetFacts, KERNEL_LABEL, NodeAffinity, NodeFacts,
    labels::{GPU_LABELS, GPU_PRESENT},
    operator_resources::OperatorResources,
};
use crate::image::OperatorResource;

const NO_EXECUTE: &str = "NoExecute";
const NO_SCHEDULE: &str = "NoSchedule";

/// Taints that every pod of a DaemonSet tolerates (`AddOrUpdateDaemonPodTolerations`).
const ALWAYS_TOLERATED: [(&str, &str); 6] = [
    ("node.kubernetes.io/not-ready", NO_EXECUTE),
    ("node.kubernetes.io/unreachable", NO_EXECUTE),
    ("node.kubernetes.io/disk-pressure", NO_SCHEDULE),
    ("node.kubernetes.io/memory-pressure", NO_SCHEDULE),
    ("node.kubernetes.io/pid-pressure", NO_SCHEDULE),
    ("node.kubernetes.io/unschedulable", NO_SCHEDULE),
];

/// Taint that pods in the node's network namespace tolerate in addition.
const TOLERATED_ON_HOST_NETWORK: (&str, &str) = ("node.kubernetes.io/network-unavailable", NO_SCHEDULE);

/// Domains of labels that NFD writes, or that operators derive from NFD's labels.
const NFD_DOMAINS: [&str; 6] = [
    "feature.node.kubernetes.io",
    "profile.node.kubernetes.io",
    "nvidia.com",
    "mellanox.com",
    "amd.com",
    "intel.com",
];

/// Taint of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Taint {
    /// `key`.
    pub key: String,
    /// `value`; may be empty.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub value: String,
    /// `effect`.
    pub effect: String,
}

impl Taint {
    /// Whether every pod of a DaemonSet tolerates the taint.
    pub(super) fn is_always_tolerated(&self) -> bool {
        ALWAYS_TOLERATED.contains(&(self.key.as_str(), self.effect.as_str()))
    }
}

impl fmt::Display for Taint {
    /// Formats the taint as `kubectl taint` does: `key=value:effect`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, value, effect } = self;
        let equals = if value.is_empty() { "" } else { "=" };
        write!(f, "{key}{equals}{value}:{effect}")
    }
}

/// Label in which the GPU Operator records the NVIDIADriver of a node, since version 26.7.
pub(super) const DRIVER_OWNER: &str = "nvidia.com/gpu-operator.driver.owner";

/// Assignment of nodes to the NVIDIADriver `name`. Each node has one owner. A resource with `spec.default` owns the nodes that
/// no other resource selects (GPU Operator 26.7, `internal/nvidiadriver` and `internal/state/nodepool.go`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DriverOwnership {
    name: String,
    /// Whether the operator assigns nodes. Older operators only follow the node selector.
    in_use: bool,
    /// Names and node selectors of the other resources, except for the resource with `spec.default`.
    others: Vec<(String, BTreeMap<String, String>)>,
}

impl DriverOwnership {
    /// Assignment of an operator that only follows the node selector.
    fn by_selector(name: &str) -> Self {
        Self { name: name.to_owned(), ..Self::default() }
    }

    /// Assignment among several resources.
    pub(super) fn among(name: &str, resources: OperatorResources<'_>) -> Self {
        let drivers = resources.of(OperatorResource::NvidiaDriver);
        let others = drivers.filter(|driver| driver.name != name && driver.spec["default"] != true);
        Self {
            name: name.to_owned(),
            in_use: resources.has_driver_owners(),
            others: others.map(|driver| (driver.name.clone(), driver_selector(&driver.spec))).collect(),
        }
    }

    /// Returns the reason why the operator does not assign a node to this resource, although the node selector matches. A
    /// node that another resource owns will change its owner, unless another resource also selects the node.
    fn exclusion<'a>(&'a self, node: &NodeFacts) -> Option<Exclusion<'a>> {
        if !self.in_use || node.labels.get(DRIVER_OWNER) == Some(&self.name) {
            return None;
        }
        if node.labels.get(GPU_PRESENT).is_none_or(|present| present != "true") {
            return Some(Exclusion::NodeSelector { key: GPU_PRESENT, value: "true" });
        }
        let selects = |selector: &BTreeMap<String, String>| {
            selector.iter().all(|(key, value)| node.labels.get(key) == Some(value))
        };
        let other = self.others.iter().find(|(_, selector)| selects(selector))?;
        Some(Exclusion::Owner { name: &other.0 })
    }
}

/// Returns the node selector of an NVIDIADriver without `spec.default`.
fn driver_selector(spec: &Value) -> BTreeMap<String, String> {
    if spec["nodeSelector"].is_null() {
        return BTreeMap::from([(GPU_PRESENT.to_owned(), "true".to_owned())]);
    }
    strings(&spec["nodeSelector"])
}

/// Toleration of a pod template. Empty fields have the API's defaults.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Toleration {
    /// `key`; empty for every key.
    pub key: String,
    /// `operator`; empty for `Equal`.
    pub operator: String,
    /// `value`.
    pub value: String,
    /// `effect`; empty for every effect.
    pub effect: String,
}

impl Toleration {
    fn tolerates(&self, taint: &Taint) -> bool {
        let Self { key, operator, value, effect } = self;
        let applies = (key.is_empty() || *key == taint.key) && (effect.is_empty() || *effect == taint.effect);
        let numbers = || Some((taint.value.parse::<i64>().ok()?, value.parse::<i64>().ok()?));
        applies
            && match operator.as_str() {
                "" | "Equal" => *value == taint.value,
                "Exists" => true,
                "Lt" => numbers().is_some_and(|(number, bound)| number < bound),
                "Gt" => numbers().is_some_and(|(number, bound)| number > bound),
                _ => false,
            }
    }
}

/// Rules of a pod template that decide which nodes its pods run on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// `nodeName`.
    pub node_name: Option<String>,
    /// `nodeSelector`.
    pub node_selector: BTreeMap<String, String>,
    /// Required part of `affinity.nodeAffinity`.
    pub affinity: NodeAffinity,
    /// `tolerations`, without those that DaemonSet pods always have.
    pub tolerations: Vec<Toleration>,
    /// `hostNetwork`.
    pub host_network: bool,
    /// Assignment of nodes to an NVIDIADriver.
    pub ownership: Option<DriverOwnership>,
}

impl Placement {
    /// Reads the rules from the `spec` of a pod template.
    pub fn of_pod(spec: &Value) -> Self {
        Self {
            node_name: spec["nodeName"].as_str().filter(|name| !name.is_empty()).map(str::to_owned),
            node_selector: strings(&spec["nodeSelector"]),
            affinity: NodeAffinity::required(&spec["affinity"]["nodeAffinity"]),
            tolerations: tolerations(&spec["tolerations"]),
            host_network: spec["hostNetwork"] == true,
            ownership: None,
        }
    }

    /// Returns the label keys that decide which nodes are reached.
    pub fn label_keys(&self) -> impl Iterator<Item = &str> {
        let owner = self.ownership.iter().flat_map(|ownership| {
            let selectors = ownership.others.iter().flat_map(|(_, selector)| selector.keys());
            [DRIVER_OWNER, GPU_PRESENT].into_iter().chain(selectors.map(String::as_str))
        });
        self.node_selector.keys().map(String::as_str).chain(self.affinity.label_keys()).chain(owner)
    }

    /// Whether nodes are selected by name.
    pub(super) fn names_nodes(&self) -> bool {
        self.node_name.is_some() || self.affinity.names_nodes()
    }

    /// Returns whether pods with these rules reach a node. `has_pod` says whether the node has a pod of the object.
    pub fn reach<'a>(&'a self, node: &'a NodeFacts, has_pod: bool) -> NodeReach<'a> {
        if let Some(rule) = node.ignored_by {
            return NodeReach::Excluded(Exclusion::Ignored { rule });
        }
        if let Some(name) = self.node_name.as_deref().filter(|name| *name != node.name) {
            return NodeReach::Excluded(Exclusion::NodeName { name });
        }
        // `GPU_PRESENT` is unknown while labels are missing, so the node's owner is not examined.
        let ownership = self.ownership.as_ref().filter(|_| node.missing_label().is_none());
        if let Some(why) = ownership.and_then(|ownership| ownership.exclusion(node)) {
            return NodeReach::Excluded(why);
        }
        let find_mismatch = |ignore_missing: bool| {
            self.node_selector.iter().find(|(key, value)| {
                node.labels.get(*key) != Some(value) && !(ignore_missing && node.awaits_label(key))
            })
        };
        let admits = |ignore_missing: bool| {
            self.affinity.admits(&node.name, |key| match node.labels.get(key) {
                _ if ignore_missing && node.awaits_label(key) => LabelState::Unknown,
                Some(value) => LabelState::Present(value),
                None => LabelState::Absent,
            })
        };
        let (mismatch, is_admitted) = (find_mismatch(false), admits(false));
        let mut is_undetermined = false;
        if mismatch.is_some() || !is_admitted {
            is_undetermined = find_mismatch(true).is_none() && admits(true);
            if !is_undetermined {
                return NodeReach::Excluded(match mismatch {
                    Some((key, value)) => Exclusion::NodeSelector { key, value },
                    None => Exclusion::Affinity,
                });
            }
        }
        // A pod that already runs on the node stays, unless a taint evicts it.
        let mut untolerated = node.taints.iter().filter(|taint| !self.tolerates(taint));
        let excluding_taint = untolerated.find(|taint| match taint.effect.as_str() {
            NO_EXECUTE => true,
            NO_SCHEDULE => !has_pod,
            _ => false,
        });
        match excluding_taint {
            Some(taint) => NodeReach::Excluded(Exclusion::Taint(taint)),
            None if is_undetermined => NodeReach::Undetermined,
            None => NodeReach::Reached,
        }
    }

    /// Returns the taint that keeps new pods off a node.
    pub(super) fn excluding_taint<'a>(&'a self, node: &'a NodeFacts) -> Option<&'a Taint> {
        match self.reach(node, false) {
            NodeReach::Excluded(Exclusion::Taint(taint)) => Some(taint),
            _ => None,
        }
    }

    fn tolerates(&self, taint: &Taint) -> bool {
        taint.is_always_tolerated()
            || (self.host_network && (taint.key.as_str(), taint.effect.as_str()) == TOLERATED_ON_HOST_NETWORK)
            || self.tolerations.iter().any(|toleration| toleration.tolerates(taint))
    }
}

/// Whether the pods of an object reach a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeReach<'a> {
    /// The DaemonSet controller runs a pod on the node, or leaves an existing one there.
    Reached,
    /// No pod runs on the node, for the given reason.
    Excluded(Exclusion<'a>),
    /// The node is reached once its labels are back.
    Undetermined,
}

/// Reason why the pods of an object do not reach a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Exclusion<'a> {
    /// The site ignores the node.
    #[error("ignoreNodes[{rule}] in site.yaml ignores it")]
    Ignored { rule: usize },
    /// The pod template names another node.
    #[error("the pod template is for node {name}")]
    NodeName { name: &'a str },
    /// A label of the node selector is missing or has another value.
    #[error("it does not have the label {key}={value} of the node selector")]
    NodeSelector { key: &'a str, value: &'a str },
    /// The GPU Operator assigns the node to another NVIDIADriver.
    #[error("NVIDIADriver {name} also selects the node")]
    Owner { name: &'a str },
    /// The required node affinity does not match.
    #[error("the node affinity does not match it")]
    Affinity,
    /// The pods do not tolerate a taint.
    #[error("its taint {0} is not tolerated")]
    Taint(&'a Taint),
}

/// Label of a node, as far as it is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LabelState<'a> {
    /// Value of the label.
    Present(&'a str),
    /// The node does not have the label.
    Absent,
    /// The node lost the label, or does not have it yet. Every requirement counts as met.
    Unknown,
}

/// Whether NFD writes the label, or an operator derives it from NFD's labels.
fn is_nfd_label(key: &str) -> bool {
    let Some((domain, _)) = key.split_once('/') else { return false };
    NFD_DOMAINS
        .iter()
        .any(|own| domain.strip_suffix(own).is_some_and(|sub| sub.is_empty() || sub.ends_with('.')))
}

/// Label that NFD or the GPU Operator has yet to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MissingLabel {
    /// NFD has not labeled the node yet, or has removed its labels.
    Kernel,
    /// The GPU Operator has not updated its labels since NFD labeled the node.
    GpuPresent,
}

impl MissingLabel {
    /// Returns the label, with its value if another value does not count.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Kernel => KERNEL_LABEL,
            Self::GpuPresent => "nvidia.com/gpu.present=true",
        }
    }

    /// Returns the writer of the label.
    pub(super) fn writer(self) -> &'static str {
        match self {
            Self::Kernel => "Node Feature Discovery",
            Self::GpuPresent => "the GPU Operator",
        }
    }
}

impl Serialize for MissingLabel {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

impl NodeFacts {
    /// Returns the label that NFD has yet to add, or that the GPU Operator has yet to derive from NFD's labels.
    pub(super) fn missing_label(&self) -> Option<MissingLabel> {
        // Neither NFD nor the operators run on other systems.
        if !self.is_linux() {
            return None;
        }
        if self.labels.get(KERNEL_LABEL).is_none_or(String::is_empty) {
            return Some(MissingLabel::Kernel);
        }
        let [present, pci @ ..] = GPU_LABELS.map(|key| self.labels.get(key).map(String::as_str));
        let lags = present == Some("false") && pci.contains(&Some("true"));
        lags.then_some(MissingLabel::GpuPresent)
    }

    /// Whether the value of a label is unknown until NFD or an operator has labeled the node.
    pub(super) fn awaits_label(&self, key: &str) -> bool {
        // People set other labels to `false`, such as `nvidia.com/gpu.deploy.driver`.
        let is_set = self.labels.get(key).is_some_and(|value| key != GPU_PRESENT || value != "false");
        match self.missing_label() {
            Some(MissingLabel::Kernel) => !is_set && is_nfd_label(key),
            Some(MissingLabel::GpuPresent) => !is_set && key.starts_with("nvidia.com/"),
            None => false,
        }
    }

    /// Whether the GPU Operator has yet to set a label of the node, on which NFD found a GPU.
    pub(super) fn awaits_gpu_label(&self, key: &str) -> bool {
        let [present, pci @ ..] = GPU_LABELS.map(|key| self.labels.get(key).map(String::as_str));
        let is_labeled = present == Some("true") || !pci.contains(&Some("true"));
        let is_set = key != GPU_PRESENT && self.labels.contains_key(key);
        !is_labeled && !is_set && key.starts_with("nvidia.com/")
    }
}

/// Object whose pods run on nodes.
#[derive(Clone, Debug)]
pub struct ReachingObject<'a> {
    placement: &'a Placement,
    /// Names of the nodes that have a pod of the object.
    with_pods: HashSet<&'a str>,
}

impl<'a> ReachingObject<'a> {
    /// Creates an object whose pods are controlled by the DaemonSets with these UIDs.
    pub(super) fn new(
        placement: &'a Placement,
        snapshot: &'a ClusterSnapshot,
        daemon_sets: impl IntoIterator<Item = &'a str>,
    ) -> Self {
        let daemon_sets: HashSet<&str> = daemon_sets.into_iter().collect();
        let pods = snapshot.pods.iter().filter(|pod| !daemon_sets.is_empty() && !pod.deleting);
        let pods = pods.filter(|pod| daemon_sets.contains(pod.daemon_set.as_str()));
        Self { placement, with_pods: pods.map(|pod| pod.node.as_str()).collect() }
    }

    /// Creates the object for a DaemonSet.
    pub fn daemon_set(daemon_set: &'a DaemonSetFacts, snapshot: &'a ClusterSnapshot) -> Self {
        let uid = daemon_set.live.as_ref().map(|live| live.version.uid.as_str());
        Self::new(&daemon_set.placement, snapshot, uid)
    }

    /// Returns whether the object's pods reach a node.
    pub fn reach<'n>(&'n self, node: &'n NodeFacts) -> NodeReach<'n> {
        self.placement.reach(node, self.with_pods.contains(node.name.as_str()))
    }

    /// Returns which of these nodes are reached. The nodes are equal except for their names.
    pub(super) fn reach_of_equal_nodes<'n>(&self, nodes: &[&'n NodeFacts]) -> Reach<'n> {
        let mut reach = Reach::default();
        let Some(first) = nodes.first() else { return reach };
        let differs_by_node = self.placement.names_nodes() || !first.taints.is_empty();
        let common = (!differs_by_node).then(|| self.reach(first));
        for node in nodes {
            match common.unwrap_or_else(|| self.reach(node)) {
                NodeReach::Reached => reach.reached.push(*node),
                NodeReach::Undetermined => reach.undetermined.push(*node),
                NodeReach::Excluded(_) => {}
            }
        }
        reach
    }
}

/// Nodes that the pods of an object reach, or may reach.
#[derive(Clone, Debug, Default)]
pub(super) struct Reach<'a> {
    /// Reached nodes.
    pub(super) reached: Vec<&'a NodeFacts>,
    /// Nodes that are reached once their labels are back.
    pub(super) undetermined: Vec<&'a NodeFacts>,
}

/// Returns the strings of a JSON object. Values of other types are ignored, which makes a selection larger.
fn strings(object: &Value) -> BTreeMap<String, String> {
    let entries = object.as_object().into_iter().flatten();
    entries.filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned()))).collect()
}

/// Returns the tolerations in a list; malformed ones are ignored.
fn tolerations(list: &Value) -> Vec<Toleration> {
    let items = list.as_array().into_iter().flatten();
    items.filter_map(|item| Toleration::deserialize(item).ok()).collect()
}

/// Returns the rules of the DaemonSet that an operator creates from its resource.
///
/// Facts: Network Operator `manifests/state-ofed-driver/0050_ofed-driver-ds.yaml`; GPU Operator
/// `manifests/state-driver/0500_daemonset.yaml` and `applyCommonDaemonsetConfig` in `controllers/object_controls.go`.
pub(super) fn operator_placement(kind: OperatorResource, name: &str, spec: &Value) -> Placement {
    let gpu_toleration = Toleration {
        key: "nvidia.com/gpu".to_owned(),
        operator: "Exists".to_owned(),
        effect: NO_SCHEDULE.to_owned(),
        ..Toleration::default()
    };
    let is_network_operator = kind.group() == OperatorResource::NicClusterPolicy.group();
    let mut tolerations = match kind {
        OperatorResource::ClusterPolicy => tolerations(&spec["daemonsets"]["tolerations"]),
        _ => tolerations(&spec["tolerations"]),
    };
    // A ClusterPolicy's tolerations replace the default one. A Module has no default.
    if kind != OperatorResource::Module && (kind != OperatorResource::ClusterPolicy || tolerations.is_empty())
    {
        tolerations.push(gpu_toleration);
    }
    Placement {
        node_name: None,
        node_selector: match kind {
            OperatorResource::NicNodePolicy | OperatorResource::NvidiaDriver => {
                strings(&spec["nodeSelector"])
            }
            OperatorResource::Module => strings(&spec["selector"]),
            OperatorResource::NicClusterPolicy
            | OperatorResource::ClusterPolicy
            | OperatorResource::GpuCluster => BTreeMap::new(),
        },
        affinity: if is_network_operator {
            NodeAffinity::required(&spec["nodeAffinity"])
        } else {
            NodeAffinity::Any
        },
        tolerations,
        host_network: is_network_operator,
        ownership: (kind == OperatorResource::NvidiaDriver).then(|| DriverOwnership::by_selector(name)),
    }
}

#[cfg(test)]
mod tests;
