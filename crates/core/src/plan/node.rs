//! Determines the kernel target that a node runs, provided that its labels agree with its nodeInfo.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use serde::Serialize;

use super::{
    ARCH_LABEL, ClusterSnapshot, CowArc, KERNEL_LABEL, NodeFacts, OS_ID_LABEL, OS_VERSION_LABEL,
    labels::{GPU_LABELS, TARGET_LABELS},
};
use crate::{
    image::Period,
    kernel::{
        Architecture, KernelFamily, KernelLabel, KernelRelease, KernelTarget, NodeSystem,
        OSTREE_VERSION_LABEL, OsId, OsVersion, RHEL_VERSION_LABEL, match_family,
    },
    shell::shell_word,
};

/// Limit in `site.yaml` that a node's kernels exceeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExceededLimit {
    /// The node named more kernels than one node may within this time.
    PerNode { most: u32, within: Period },
    /// The fleet runs more kernels than this limit, and others take precedence over the node's kernel.
    Distinct(u32),
}

/// Claims rejected for a node. A rejected kernel calls for no image, and no rollout waits for it.
/// [`NodeKernelLimiter`](super::NodeKernelLimiter) decides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RejectedClaims {
    /// Limit that rejects the node's running kernel.
    pub kernel: Option<ExceededLimit>,
    /// Limit that rejects the node's announced kernel.
    pub announcement: Option<ExceededLimit>,
}

/// Reason why a node's kernel target is unknown. Such a node is skipped (guarantee 6).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, thiserror::Error)]
#[serde(rename_all = "kebab-case", rename_all_fields = "camelCase", tag = "reason")]
pub enum NodeReason {
    /// Labels that Node Feature Discovery sets are missing.
    #[error("{}", missing(.labels))]
    MissingLabel { labels: Vec<&'static str> },
    /// The kernel label differs from the running kernel: NFD has not noticed a reboot yet, or another writer set the
    /// label.
    #[error("kernel label {label:?} contradicts the running kernel {release:?}")]
    KernelLabelDiffers { label: String, release: String },
    /// The architecture label differs from the node's architecture.
    #[error("architecture label {label:?} contradicts the node's architecture {architecture:?}")]
    ArchitectureLabelDiffers { label: String, architecture: String },
    /// A value of the node is malformed.
    #[error("{detail}")]
    Malformed { detail: String },
    /// The node runs another operating system than Linux.
    #[error("it runs {os}, and drivers are for Linux nodes")]
    NotLinux { os: String },
    /// Two nodes of the snapshot have this name.
    #[error("two nodes have this name")]
    DefinedTwice,
    /// The site ignores the node.
    #[error("ignoreNodes[{rule}] in site.yaml ignores it")]
    Ignored { rule: usize },
    /// The node named more kernels than one node may, and no trusted node runs its kernel.
    #[error(
        "it named more than {most} kernels within {within}, and no other node runs its current one: it is \
         untrusted until those expire, and blocks no other nodes; find out who changes its kernel and its \
         labels, or raise kernelLimits.perNode in site.yaml"
    )]
    TooManyNamed { most: u32, within: Period },
    /// The nodes run more kernels than the limit for the fleet.
    #[error(
        "nodes run more than {most} kernels, and the other kernels run on more nodes or for longer: this node is \
         skipped, and blocks no other nodes; retire kernels, or raise kernelLimits.distinct in site.yaml"
    )]
    TooManyKernels { most: u32 },
}

impl NodeReason {
    /// Whether the node's claim is rejected.
    pub fn is_rejected_claim(&self) -> bool {
        matches!(self, Self::TooManyNamed { .. } | Self::TooManyKernels { .. })
    }

    /// Whether no rollout waits for the node.
    pub(crate) fn blocks_no_rollout(&self) -> bool {
        self.is_rejected_claim() || matches!(self, Self::Ignored { .. } | Self::NotLinux { .. })
    }

    /// Returns the fact about the node that the reason leaves unknown.
    pub(super) fn unknown_fact(&self) -> &'static str {
        match self {
            Self::MissingLabel { labels }
                if labels.iter().all(|label| [OS_ID_LABEL, OS_VERSION_LABEL].contains(label)) =>
            {
                "operating system"
            }
            _ => "kernel",
        }
    }

    /// Returns the remedy: a command that repairs the node or shows details, or a change of the node's manifest. Empty where the
    /// message already contains the remedy.
    pub fn remedy(&self, node: &str, is_manifest: bool) -> String {
        let node = shell_word(node);
        let edit_manifest = |labels: String| format!("set {labels} in the manifest of node {node}");
        let value = |label: &&str| match *label {
            // The form of NFD's label, as `KernelLabel` computes it.
            KERNEL_LABEL => format!(
                "{KERNEL_LABEL}=\"$(kubectl get node {node} -o jsonpath={{.status.nodeInfo.kernelVersion}} | sed \
                 's/[^-A-Za-z0-9_.]/_/g; s/[-_.]*$//')\""
            ),
            OS_VERSION_LABEL => format!("{OS_VERSION_LABEL}=VERSION_ID"),
            label => format!("{label}=ID"),
        };
        let label_command = |labels: &[&str]| {
            let values: Vec<String> = labels.iter().map(value).collect();
            let from = match labels {
                [KERNEL_LABEL] => "",
                _ => ", with ID and VERSION_ID of its /etc/os-release (on Debian testing and sid, the suite)",
            };
            format!(
                "Node Feature Discovery sets this within a minute; without it: `kubectl label --overwrite node \
                 {node} {}`{from}",
                values.join(" ")
            )
        };
        match self {
            Self::MissingLabel { labels } if is_manifest => edit_manifest(labels.join(", ")),
            Self::MissingLabel { labels } => label_command(labels),
            Self::KernelLabelDiffers { release, .. } if is_manifest => {
                edit_manifest(format!("{KERNEL_LABEL} as Node Feature Discovery writes {release}"))
            }
            Self::KernelLabelDiffers { .. } => label_command(&[KERNEL_LABEL]),
            Self::ArchitectureLabelDiffers { architecture, .. } if is_manifest => {
                edit_manifest(format!("{ARCH_LABEL} to {architecture}"))
            }
            Self::ArchitectureLabelDiffers { label: _, architecture } => {
                format!("`kubectl label --overwrite node {node} {ARCH_LABEL}={}`", shell_word(architecture))
            }
            Self::Malformed { .. } if is_manifest => format!("correct the manifest of node {node}"),
            Self::Malformed { .. } => format!("`kubectl get node {node} -o yaml`"),
            Self::DefinedTwice
            | Self::NotLinux { .. }
            | Self::Ignored { .. }
            | Self::TooManyNamed { .. }
            | Self::TooManyKernels { .. } => String::new(),
        }
    }
}

impl From<ExceededLimit> for NodeReason {
    fn from(limit: ExceededLimit) -> Self {
        match limit {
            ExceededLimit::PerNode { most, within } => Self::TooManyNamed { most, within },
            ExceededLimit::Distinct(most) => Self::TooManyKernels { most },
        }
    }
}

impl NodeFacts {
    /// Whether the node runs Linux. Manifests may lack the field.
    pub(super) fn is_linux(&self) -> bool {
        ["", "linux"].contains(&self.operating_system.as_str())
    }
}

/// Returns the kernel target that a node runs.
pub fn node_target(node: &NodeFacts) -> Result<KernelTarget, NodeReason> {
    if let Some(rule) = node.ignored_by {
        return Err(NodeReason::Ignored { rule });
    }
    if !node.is_linux() {
        return Err(NodeReason::NotLinux { os: node.operating_system.clone() });
    }
    // Only a hand-written manifest can lack these fields; a kubelet always sets both.
    for (value, field) in [(&node.kernel_version, "kernelVersion"), (&node.architecture, "architecture")] {
        if value.is_empty() {
            return Err(NodeReason::Malformed { detail: format!("status.nodeInfo.{field} is missing") });
        }
    }
    let release: KernelRelease = node.kernel_version.parse().map_err(malformed)?;
    let arch: Architecture = node.architecture.parse().map_err(malformed)?;
    let label = |key: &str| node.labels.get(key).filter(|value| !value.is_empty());
    let [Some(kernel_label), Some(os), Some(os_version)] =
        [KERNEL_LABEL, OS_ID_LABEL, OS_VERSION_LABEL].map(label)
    else {
        let mut labels = vec![KERNEL_LABEL, OS_ID_LABEL, OS_VERSION_LABEL];
        labels.retain(|key| label(key).is_none());
        return Err(NodeReason::MissingLabel { labels });
    };
    if KernelLabel::of(&release).is_none_or(|expected| expected.as_str() != kernel_label.as_str()) {
        return Err(NodeReason::KernelLabelDiffers {
            label: shortened(kernel_label),
            release: release.as_str().to_owned(),
        });
    }
    // The kubelet writes both values from the same source. A node may lack the label, but must not contradict it.
    if let Some(value) = node.labels.get(ARCH_LABEL)
        && *value != node.architecture
    {
        return Err(NodeReason::ArchitectureLabelDiffers {
            label: shortened(value),
            architecture: node.architecture.clone(),
        });
    }
    let os: OsId = os.parse().map_err(malformed)?;
    let os_version: OsVersion = os_version.parse().map_err(malformed)?;
    match node.rejected_claims.kernel {
        Some(limit) => Err(limit.into()),
        None => Ok(KernelTarget { os, os_version, release, arch }),
    }
}

/// Returns the kernel targets that nodes run. Each target has the facts about the nodes' system and the matching tags of the
/// cluster's ImageStreams.
pub fn node_systems(
    snapshot: &ClusterSnapshot,
    families: &[KernelFamily],
) -> BTreeMap<KernelTarget, NodeSystem> {
    let mut systems: BTreeMap<KernelTarget, NodeSystem> = BTreeMap::new();
    for node in &snapshot.nodes {
        let Ok(target) = node_target(node) else { continue };
        let label = |key: &str| node.labels.get(key).map(String::as_str);
        systems.entry(target).or_default().add_labels(label(OSTREE_VERSION_LABEL), label(RHEL_VERSION_LABEL));
    }
    for (target, system) in &mut systems {
        let family = match_family(families, target);
        if let Some(stream) = family.and_then(|family| family.spec.image_stream.as_ref()) {
            system.look_up_digest(stream, &snapshot.image_streams);
        }
    }
    systems
}

fn missing(labels: &[&str]) -> String {
    match labels {
        [label] => format!("label {label} is missing"),
        labels => format!("labels {} are missing", labels.join(", ")),
    }
}

fn malformed(error: impl std::error::Error) -> NodeReason {
    NodeReason::Malformed { detail: error.to_string() }
}

/// Labels are untrusted input: shorten them, so that no message grows beyond a label's size.
fn shortened(value: &str) -> String {
    value.chars().take(80).collect()
}

/// Nodes with equal taints, and equal values in every label of interest.
pub(super) struct NodeGroup<'a> {
    /// One of the nodes. All nodes have the same kernel, taints and labels of interest.
    pub(super) sample: &'a NodeFacts,
    /// All nodes of the group.
    pub(super) nodes: Vec<&'a NodeFacts>,
    /// Kernel target of the nodes.
    pub(super) target: Result<KernelTarget, NodeReason>,
}

impl NodeGroup<'_> {
    /// Whether no rollout waits for the nodes.
    pub(super) fn blocks_no_rollout(&self) -> bool {
        self.target.as_ref().is_err_and(NodeReason::blocks_no_rollout)
    }
}

/// Groups nodes by the labels of interest. Later steps then scale with the number of groups instead of the number of
/// nodes.
pub(super) fn group_nodes<'a, 'l>(
    nodes: &'a [CowArc<NodeFacts>],
    labels: impl IntoIterator<Item = &'l str>,
) -> Vec<NodeGroup<'a>> {
    let labels: BTreeSet<&str> = TARGET_LABELS.into_iter().chain(GPU_LABELS).chain(labels).collect();
    let mut names: HashSet<&str> = HashSet::with_capacity(nodes.len());
    let repeated = nodes.iter().map(|node| node.name.as_str()).filter(|name| !names.insert(name));
    let defined_twice: BTreeSet<&str> = repeated.collect();
    let mut indices: HashMap<Vec<Option<&str>>, usize> = HashMap::new();
    let mut groups: Vec<NodeGroup<'a>> = Vec::new();
    let mut key = Vec::with_capacity(labels.len() + 8);
    for node in nodes.iter().map(|node| &**node) {
        let is_duplicate = defined_twice.contains(node.name.as_str());
        key.clear();
        key.push(Some(node.kernel_version.as_str()));
        key.push(Some(node.architecture.as_str()));
        key.push(is_duplicate.then_some("twice"));
        key.push(node.rejected_claims.kernel.map(|limit| match limit {
            ExceededLimit::PerNode { .. } => "per node",
            ExceededLimit::Distinct(_) => "distinct",
        }));
        key.push(node.ignored_by.map(|_| "ignored"));
        key.extend(labels.iter().map(|label| node.labels.get(*label).map(String::as_str)));
        let taints = node.taints.iter().flat_map(|taint| [&taint.key, &taint.value, &taint.effect]);
        key.extend(taints.map(|text| Some(text.as_str())));
        let index = indices.get(&key).copied().unwrap_or_else(|| {
            indices.insert(key.clone(), groups.len());
            let target = if is_duplicate { Err(NodeReason::DefinedTwice) } else { node_target(node) };
            groups.push(NodeGroup { sample: node, nodes: Vec::new(), target });
            groups.len() - 1
        });
        groups[index].nodes.push(node);
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(release: &str, label: &str) -> NodeFacts {
        NodeFacts {
            name: "n".to_owned(),
            labels: [(OS_ID_LABEL, "debian"), (OS_VERSION_LABEL, "12"), (KERNEL_LABEL, label)]
                .map(|(k, v)| (k.to_owned(), v.to_owned()))
                .into(),
            kernel_version: release.to_owned(),
            architecture: "amd64".to_owned(),
            ..NodeFacts::default()
        }
    }

    #[test]
    fn agreeing_nodes_have_a_target() {
        let target = node_target(&node("6.1.192-acme+", "6.1.192-acme")).unwrap();
        assert_eq!(target.to_string(), "6.1.192-acme+ (debian 12, amd64)");
    }

    #[test]
    fn a_label_that_lags_behind_a_reboot_is_no_target() {
        let reason = node_target(&node("6.1.0-48-amd64", "6.1.0-47-amd64")).unwrap_err();
        insta::assert_snapshot!(reason, @r#"kernel label "6.1.0-47-amd64" contradicts the running kernel "6.1.0-48-amd64""#);
    }

    #[test]
    fn each_label_is_needed() {
        for missing in [OS_ID_LABEL, OS_VERSION_LABEL, KERNEL_LABEL] {
            let mut facts = node("6.1.0-47-amd64", "6.1.0-47-amd64");
            facts.labels.remove(missing);
            assert_eq!(node_target(&facts), Err(NodeReason::MissingLabel { labels: vec![missing] }));
            facts.labels.insert(missing.to_owned(), String::new());
            assert_eq!(node_target(&facts), Err(NodeReason::MissingLabel { labels: vec![missing] }));
        }
    }

    #[test]
    fn hostile_values_are_no_target() {
        for release in ["", "6.1.0$(reboot)", "../../etc", "6.1.0\n", &"6.1".repeat(40)] {
            let reason = node_target(&node(release, "6.1.0")).unwrap_err();
            assert!(matches!(reason, NodeReason::Malformed { .. }), "{release:?}: {reason:?}");
        }
        let mut facts = node("6.1.0-47-amd64", "6.1.0-47-amd64");
        facts.labels.insert(OS_ID_LABEL.to_owned(), "../debian".to_owned());
        assert!(matches!(node_target(&facts), Err(NodeReason::Malformed { .. })));
        facts.labels.insert(KERNEL_LABEL.to_owned(), "\u{1b}[2J".repeat(1000));
        let message = node_target(&facts).unwrap_err().to_string();
        assert!(message.len() < 700 && !message.contains('\u{1b}'), "{message}");
    }

    #[test]
    fn what_is_wrong_comes_with_a_command() {
        let remedies = [
            NodeReason::MissingLabel { labels: vec![KERNEL_LABEL] },
            NodeReason::MissingLabel { labels: vec![OS_ID_LABEL] },
            NodeReason::MissingLabel { labels: vec![KERNEL_LABEL, OS_ID_LABEL, OS_VERSION_LABEL] },
            NodeReason::ArchitectureLabelDiffers {
                label: "arm64".to_owned(),
                architecture: "amd64".to_owned(),
            },
            NodeReason::Malformed { detail: "no kernel".to_owned() },
        ]
        .map(|why| why.remedy("n1; reboot", false));
        insta::assert_snapshot!(remedies.join("\n"), @r#"
        Node Feature Discovery sets this within a minute; without it: `kubectl label --overwrite node 'n1; reboot' feature.node.kubernetes.io/kernel-version.full="$(kubectl get node 'n1; reboot' -o jsonpath={.status.nodeInfo.kernelVersion} | sed 's/[^-A-Za-z0-9_.]/_/g; s/[-_.]*$//')"`
        Node Feature Discovery sets this within a minute; without it: `kubectl label --overwrite node 'n1; reboot' feature.node.kubernetes.io/system-os_release.ID=ID`, with ID and VERSION_ID of its /etc/os-release (on Debian testing and sid, the suite)
        Node Feature Discovery sets this within a minute; without it: `kubectl label --overwrite node 'n1; reboot' feature.node.kubernetes.io/kernel-version.full="$(kubectl get node 'n1; reboot' -o jsonpath={.status.nodeInfo.kernelVersion} | sed 's/[^-A-Za-z0-9_.]/_/g; s/[-_.]*$//')" feature.node.kubernetes.io/system-os_release.ID=ID feature.node.kubernetes.io/system-os_release.VERSION_ID=VERSION_ID`, with ID and VERSION_ID of its /etc/os-release (on Debian testing and sid, the suite)
        `kubectl label --overwrite node 'n1; reboot' kubernetes.io/arch=amd64`
        `kubectl get node 'n1; reboot' -o yaml`
        "#);
    }

    /// farrier never writes to a directory's nodes, and neither does `kubectl`.
    #[test]
    fn the_remedy_for_a_node_in_a_directory_is_a_change_of_its_manifest() {
        let remedies = [
            NodeReason::MissingLabel { labels: vec![KERNEL_LABEL] },
            NodeReason::MissingLabel { labels: vec![OS_ID_LABEL, OS_VERSION_LABEL] },
            NodeReason::KernelLabelDiffers { label: "6.1".to_owned(), release: "6.1.192-acme+".to_owned() },
            NodeReason::ArchitectureLabelDiffers {
                label: "arm64".to_owned(),
                architecture: "amd64".to_owned(),
            },
            NodeReason::Malformed { detail: "no kernel".to_owned() },
        ]
        .map(|why| why.remedy("edge-1", true));
        insta::assert_snapshot!(remedies.join("\n"), @r"
        set feature.node.kubernetes.io/kernel-version.full in the manifest of node edge-1
        set feature.node.kubernetes.io/system-os_release.ID, feature.node.kubernetes.io/system-os_release.VERSION_ID in the manifest of node edge-1
        set feature.node.kubernetes.io/kernel-version.full as Node Feature Discovery writes 6.1.192-acme+ in the manifest of node edge-1
        set kubernetes.io/arch to amd64 in the manifest of node edge-1
        correct the manifest of node edge-1
        ");
    }

    #[test]
    fn a_windows_node_has_no_target_and_holds_nothing() {
        let mut facts = node("10.0.20348.2402", "10.0.20348.2402");
        facts.operating_system = "windows".to_owned();
        let why = node_target(&facts).unwrap_err();
        assert_eq!(why.to_string(), "it runs windows, and drivers are for Linux nodes");
        assert!(
            why.blocks_no_rollout() && why.remedy("n", false).is_empty() && why.remedy("n", true).is_empty()
        );
    }

    #[test]
    fn architectures_must_agree_and_be_supported() {
        let mut facts = node("6.1.0-47-amd64", "6.1.0-47-amd64");
        facts.labels.insert(ARCH_LABEL.to_owned(), "arm64".to_owned());
        assert!(matches!(node_target(&facts), Err(NodeReason::ArchitectureLabelDiffers { .. })));
        facts.labels.remove(ARCH_LABEL);
        facts.architecture = "s390x".to_owned();
        insta::assert_snapshot!(node_target(&facts).unwrap_err(), @r#"architecture "s390x" is not supported; amd64 and arm64 are"#);
    }
}
