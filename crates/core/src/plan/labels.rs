//! The labels and annotations that farrier reads and writes.

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

/// Label of the nodes on which the GPU Operator found a GPU.
pub(super) const GPU_PRESENT: &str = "nvidia.com/gpu.present";
/// [`GPU_PRESENT`], and the labels of NFD from which the GPU Operator derives it (`gpuNodeLabels` in
/// `controllers/state_manager.go`).
pub(super) const GPU_LABELS: [&str; 4] = [
    GPU_PRESENT,
    "feature.node.kubernetes.io/pci-10de.present",
    "feature.node.kubernetes.io/pci-0300_10de.present",
    "feature.node.kubernetes.io/pci-0302_10de.present",
];

/// Labels of nodes with the state of an operator's driver upgrade (Network and GPU Operator).
pub const UPGRADE_STATE_LABELS: [&str; 2] =
    ["nvidia.com/ofed-driver-upgrade-state", "nvidia.com/gpu-driver-upgrade-state"];

/// Returns the remedy for an upgrade state that may last for weeks; `None` for other states (k8s-operator-libs,
/// `pkg/upgrade/consts.go`, `ProcessUpgradeFailedNodes`).
pub(super) fn stall_remedy(state: &str) -> Option<&'static str> {
    match state {
        "upgrade-required" => Some(
            "the node waits for its operator: check autoUpgrade, maxParallelUpgrades and maxUnavailable in upgradePolicy, and the node's label",
        ),
        "upgrade-failed" => Some(
            "the operator marked the upgrade as failed: repair the driver's pod; see also the node's label",
        ),
        _ => None,
    }
}

/// Whether the operator is upgrading a node in this state. A stalled upgrade does not count.
pub(super) fn is_in_progress(state: &str) -> bool {
    !matches!(state, "" | "upgrade-done") && stall_remedy(state).is_none()
}

/// Returns the label and state where the operator is upgrading the driver of the node.
pub(super) fn operator_upgrade_in_progress(
    labels: &BTreeMap<String, String>,
) -> Option<(&'static str, &str)> {
    let mut states =
        UPGRADE_STATE_LABELS.into_iter().filter_map(|key| Some((key, labels.get(key)?.as_str())));
    states.find(|(_, state)| is_in_progress(state))
}

/// Annotation in which a node, or the automation that upgrades it, names the kernel to boot next.
pub const NEXT_KERNEL_ANNOTATION: &str = "farrier.dev/next-kernel";
/// Label with the kernel to boot next, from a feature file that `farrier-host` writes for NFD. The value has `.plus.` for `+`.
pub const NEXT_KERNEL_LABEL: &str = "feature.node.kubernetes.io/farrier-next-kernel";
/// Prefix of the labels with the drivers that `farrier-host` has loaded, by name of the image. The value is the start of the
/// system extension's digest.
pub const HOST_DRIVER_PREFIX: &str = "feature.node.kubernetes.io/farrier-host.";
/// Label and annotation of a node that may boot its next kernel. The value is that kernel's label.
pub const READY_FOR: &str = "farrier.dev/ready-for";
/// Label and annotation of a node that needs no driver image for its next kernel. The value is that kernel's label.
/// Nothing was checked for the node.
pub const NO_DRIVER_FOR: &str = "farrier.dev/no-driver-for";

/// Prefixes of NFD's hardware labels, one per source. NFD writes the labels of all its sources at once.
const HARDWARE_PREFIXES: [&str; 4] = [
    "feature.node.kubernetes.io/pci-",
    "feature.node.kubernetes.io/cpu-",
    "feature.node.kubernetes.io/usb-",
    "feature.node.kubernetes.io/rdma.",
];

/// Whether this label describes a node's hardware. A node without any such label has not been examined yet.
pub fn is_hardware_label(label: &str) -> bool {
    HARDWARE_PREFIXES.iter().any(|prefix| label.starts_with(prefix))
}

/// Prefix of the labels that hand nodes over to a copy of a DaemonSet.
pub(super) const HANDOVER_LABEL_PREFIX: &str = "farrier.dev/driver.";
/// On a copy and its pods: the DaemonSet that the copy was made from.
pub const COPY_OF_LABEL: &str = "farrier.dev/copy-of";
/// On a copy and its pods: label of the copy's kernel.
pub const COPY_KERNEL_LABEL: &str = "farrier.dev/kernel";
/// On the original DaemonSet of a `per-kernel` rollout: farrier's state of the rollout, as JSON.
pub const PER_KERNEL_ANNOTATION: &str = "farrier.dev/per-kernel";
/// On a DaemonSet or an operator's resource: pauses rollouts to the object while present and not `false`.
pub const PAUSED_ANNOTATION: &str = "farrier.dev/paused";
/// Whether the annotations pause rollouts. Any value but `false` does, so that a mistyped value is safe.
pub fn has_pause_annotation(annotations: &BTreeMap<String, String>) -> bool {
    annotations.get(PAUSED_ANNOTATION).is_some_and(|value| value != "false")
}

/// The annotation that holds the record of rewrites, as JSON.
pub const RECORD_ANNOTATION: &str = "farrier.dev/record";
/// On a copy: record of its image (`CopyRecord`), as JSON.
pub(super) const COPY_RECORD_ANNOTATION: &str = "farrier.dev/rollout";

/// Label in which Kubernetes names the Job that created a pod.
pub const JOB_NAME: &str = "batch.kubernetes.io/job-name";

/// On a node: as a label, the state of its upgrade; as an annotation, the whole record of the upgrade, as JSON.
pub const UPGRADE: &str = "farrier.dev/upgrade";
/// Annotation with which an external check confirms that a node works with a new driver. The value is the image.
pub const UPGRADE_CHECKED: &str = "farrier.dev/upgrade-checked";
