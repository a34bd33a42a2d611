//! Pure: the labels and annotations that farrier reads and writes.

use std::collections::BTreeMap;

/// NFD's label for the operating system's id.
pub const OS_ID_LABEL: &str = "feature.node.kubernetes.io/system-os_release.ID";
/// NFD's label for the operating system's version.
pub const OS_VERSION_LABEL: &str = "feature.node.kubernetes.io/system-os_release.VERSION_ID";
/// NFD's label for the kernel release.
pub const KERNEL_LABEL: &str = "feature.node.kubernetes.io/kernel-version.full";
/// The kubelet's label for the architecture.
pub const ARCH_LABEL: &str = "kubernetes.io/arch";
/// The labels that decide a node's target.
pub(super) const TARGET_LABELS: [&str; 4] = [OS_ID_LABEL, OS_VERSION_LABEL, KERNEL_LABEL, ARCH_LABEL];

/// Labels of nodes that say where an operator's driver upgrade stands (Network and GPU Operator).
pub const UPGRADE_STATE_LABELS: [&str; 2] =
    ["nvidia.com/ofed-driver-upgrade-state", "nvidia.com/gpu-driver-upgrade-state"];

/// Is an operator at a node in this state? One that failed is at rest: the operator does nothing there until the driver's pod is as it
/// should be, and another version may be what ends it (k8s-operator-libs, `pkg/upgrade/consts.go`, `ProcessUpgradeFailedNodes`).
pub(super) fn is_upgrading(state: &str) -> bool {
    !matches!(state, "" | "upgrade-done" | "upgrade-failed")
}

/// The label of an operator's driver upgrade that a node is in, with its state.
pub(super) fn operators_upgrade(labels: &BTreeMap<String, String>) -> Option<(&'static str, &str)> {
    let mut states =
        UPGRADE_STATE_LABELS.into_iter().filter_map(|key| Some((key, labels.get(key)?.as_str())));
    states.find(|(_, state)| is_upgrading(state))
}

/// The same, where the operator has begun: `upgrade-required` is a place in its queue, which a node may keep for good
/// (`nvidia.com/...-driver-upgrade.skip`, an operator that was taken away).
pub(super) fn operator_at_work(labels: &BTreeMap<String, String>) -> Option<(&'static str, &str)> {
    operators_upgrade(labels).filter(|(_, state)| *state != "upgrade-required")
}

/// The annotation by which a node (or whoever upgrades it) names the kernel that it is to boot next.
pub const NEXT_KERNEL_ANNOTATION: &str = "farrier.dev/next-kernel";
/// The label and annotation of a node that names the kernel which it may boot: its value is the kernel's label.
pub const READY_FOR: &str = "farrier.dev/ready-for";
/// The same of a node that no driver image is called for on, whatever kernel it runs: there is nothing to wait for, and
/// nothing that was checked.
pub const NO_DRIVER_FOR: &str = "farrier.dev/no-driver-for";

/// What NFD's labels of hardware begin with, each after its source. NFD writes the labels of all its sources at once.
const HARDWARE: [&str; 4] = [
    "feature.node.kubernetes.io/pci-",
    "feature.node.kubernetes.io/cpu-",
    "feature.node.kubernetes.io/usb-",
    "feature.node.kubernetes.io/rdma.",
];

/// Does this label tell which hardware a node has? A node without any has not been looked at yet.
pub fn tells_hardware(label: &str) -> bool {
    HARDWARE.iter().any(|source| label.starts_with(source))
}

/// The prefix of the labels by which nodes are handed over to a copy of a DaemonSet.
pub(super) const HANDOVER_LABELS: &str = "farrier.dev/driver.";
/// On a copy and its pods: the DaemonSet that it is a copy of.
pub const COPY_OF_LABEL: &str = "farrier.dev/copy-of";
/// On a copy and its pods: the kernel label that it is for.
pub const COPY_KERNEL_LABEL: &str = "farrier.dev/kernel";
/// On the original DaemonSet of a rollout by kernel: what farrier did to it, as JSON.
pub const PER_KERNEL_ANNOTATION: &str = "farrier.dev/per-kernel";
/// On a DaemonSet or an operator's resource: as long as it is there and not `false`, nothing is rolled out to the object.
pub const PAUSED_ANNOTATION: &str = "farrier.dev/paused";
/// Do annotations pause? Any value but `false` does: what is not understood stops.
pub(super) fn says_paused(annotations: &BTreeMap<String, String>) -> bool {
    annotations.get(PAUSED_ANNOTATION).is_some_and(|value| value != "false")
}

/// The annotation that holds the record of rewrites, as JSON.
pub const RECORD_ANNOTATION: &str = "farrier.dev/record";

/// The label by which Kubernetes says which Job has made a pod.
pub const JOB_NAME: &str = "batch.kubernetes.io/job-name";

/// On a node: as label where its upgrade stands, as annotation all that farrier knows of it, as JSON.
pub const UPGRADE: &str = "farrier.dev/upgrade";
/// The annotation by which something else says that a node does well with a new driver: the image is its value.
pub const UPGRADE_CHECKED: &str = "farrier.dev/upgrade-checked";
