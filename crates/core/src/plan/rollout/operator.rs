//! Names of precompiled driver images, as the operators compute them, and the fields of their resources that set the names.
//!
//! Facts: Network Operator `pkg/state/state_ofed.go` (`<version>-<kernel label>-<os><os version>-<arch>`) and GPU
//! Operator `api/nvidia/v1alpha1/nvidiadriver_types.go`, `controllers/object_controls.go` (`<version>-<kernel
//! label>-<os tag>`). The operators assemble the tags themselves: a resource contains only the part before the kernel.
//!
//! Before 26.7 the GPU Operator keeps the minor version in the tags of NVIDIADriver resources for Oracle Linux and for RHEL up
//! to 9 (`getOSTag` in `internal/state/nodepool.go`): `rhel9.4` instead of `rhel9`.

use std::{borrow::Cow, collections::BTreeMap};

use crate::{
    image::{ImageReference, OperatorResource, Version},
    kernel::{KernelLabel, KernelTarget},
    plan::{Cell, UPGRADE_STATE_LABELS, operator_resources::OperatorResources},
};

/// Returns the suffix of the tag that the operator looks for on nodes of this target; `None` where the kernel has no
/// label, and thus no tag.
pub(super) fn tag_suffix(form: TagForm, target: &KernelTarget) -> Option<String> {
    let KernelTarget { os, os_version, release, arch } = target;
    let label = KernelLabel::of(release)?;
    Some(match form {
        TagForm::Abbreviated => format!("-{label}-{}", target.os_tag()),
        TagForm::Whole => format!("-{label}-{os}{os_version}"),
        TagForm::WithArchitecture => format!("-{label}-{os}{os_version}-{}", arch.as_str()),
    })
}

/// Form of the tags that an operator computes for a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TagForm {
    /// As `{{os_tag}}`: the major version for Enterprise Linux.
    Abbreviated,
    /// The whole version of the operating system.
    Whole,
    /// The whole version, then the architecture.
    WithArchitecture,
}

impl TagForm {
    pub(super) fn of(
        kind: OperatorResource,
        target: &KernelTarget,
        resources: OperatorResources<'_>,
    ) -> Self {
        if !kind.is_of_gpu_operator() {
            return Self::WithArchitecture;
        }
        let major = target.os_version.as_str().split('.').next().and_then(|major| major.parse::<u32>().ok());
        let has_minor = match target.os.as_str() {
            "ol" => true,
            "rhel" => major.is_some_and(|major| major < 10),
            _ => false,
        };
        if kind == OperatorResource::NvidiaDriver && has_minor && !resources.has_driver_owners() {
            Self::Whole
        } else {
            Self::Abbreviated
        }
    }

    /// Returns a pattern for an image's `tags` that gives tags in this form.
    pub(super) fn pattern(self) -> &'static str {
        match self {
            Self::Abbreviated => "{{version}}-{{kernel_label}}-{{os_tag}}",
            Self::Whole => "{{version}}-{{kernel_label}}-{{os_id}}{{os_version}}",
            Self::WithArchitecture => "{{version}}-{{kernel_label}}-{{os_id}}{{os_version}}-{{arch}}",
        }
    }
}

/// Value of the version field, with the tag that the operator derives from it.
#[derive(Clone)]
pub(super) struct TagVersion<'a> {
    pub(super) value: Cow<'a, str>,
    pub(super) tag: &'a ImageReference,
}

/// Returns the values of the version field with which the operator finds this image, in the order of the image's tags.
pub(super) fn versions<'a>(
    kind: OperatorResource,
    cell: &'a Cell,
    resources: OperatorResources<'_>,
) -> Vec<TagVersion<'a>> {
    if kind == OperatorResource::Module {
        return with_variable(cell);
    }
    let form = TagForm::of(kind, &cell.target, resources);
    let Some(suffix) = tag_suffix(form, &cell.target) else { return Vec::new() };
    let version = |reference: &'a ImageReference| {
        let Version::Tag(tag) = &reference.version else { return None };
        let version = tag.as_str().strip_suffix(suffix.as_str()).filter(|version| !version.is_empty())?;
        Some(TagVersion { value: version.into(), tag: reference })
    };
    cell.references().filter_map(version).collect()
}

/// Returns the image's tags twice: with KMM's variable instead of the kernel, and unchanged.
fn with_variable(cell: &Cell) -> Vec<TagVersion<'_>> {
    let release = cell.target.release.as_str();
    let release = release.strip_suffix('+').unwrap_or(release);
    // As in KMM's `NormalizeVersion`.
    let is_kept = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let kernel: String = release.chars().map(|c| if is_kept(c) { c } else { '_' }).collect();
    let unchanged: Vec<_> = cell
        .references()
        .filter_map(|tag| Some(TagVersion { value: tag.version.tag()?.as_str().into(), tag }))
        .collect();
    let filled = unchanged.iter().map(|TagVersion { value, tag }| TagVersion {
        value: value.replace(&kernel, "${KERNEL_FULL_VERSION}").into(),
        tag,
    });
    filled.chain(unchanged.iter().cloned()).collect()
}

/// Returns the field that makes the operator look for precompiled drivers; `None` where it cannot be set.
pub(super) fn precompiled_field(kind: OperatorResource) -> Option<&'static str> {
    match kind {
        OperatorResource::NicClusterPolicy | OperatorResource::NicNodePolicy => Some("forcePrecompiled"),
        OperatorResource::ClusterPolicy => Some("usePrecompiled"),
        // NVIDIADriver's field is immutable (a validation rule of the CRD); the other kinds have no such field.
        OperatorResource::NvidiaDriver | OperatorResource::Module | OperatorResource::GpuCluster => None,
    }
}

/// Returns the node label in which the operator reports the state of its driver upgrade. `None` for KMM: in its ordered
/// upgrades, an administrator starts the upgrade of each node.
pub(super) fn upgrade_label(kind: OperatorResource) -> Option<&'static str> {
    let [ofed, gpu] = UPGRADE_STATE_LABELS;
    (kind != OperatorResource::Module).then_some(if kind.is_of_gpu_operator() { gpu } else { ofed })
}

/// Labels, with their values, that make the GPU Operator skip a node. Its driver manager found a driver that the host provides,
/// or the driver or all operands are disabled on the node (`controllers/state_manager.go`, `assets/state-driver`; driver manager:
/// "NVIDIA GPU driver is already pre-installed on the node").
const SKIP_LABELS: [(&str, &[&str]); 2] = [
    ("nvidia.com/gpu.deploy.driver", &["pre-installed", "false"]),
    ("nvidia.com/gpu.deploy.operands", &["false"]),
];
/// Label that names the workload of a node's GPUs: containers or virtual machines.
const WORKLOAD_LABEL: &str = "nvidia.com/gpu.workload.config";
/// Workload for which the GPU Operator installs its driver.
const CONTAINERS: &str = "container";

/// Returns the node labels that can make the operator skip a node. The Network Operator has no such label.
pub(in crate::plan) fn skip_labels(kind: OperatorResource) -> impl Iterator<Item = &'static str> {
    let keys = SKIP_LABELS.into_iter().map(|(key, _)| key).chain([WORKLOAD_LABEL]);
    keys.filter(move |_| kind.is_of_gpu_operator())
}

/// Returns the workload of nodes without [`WORKLOAD_LABEL`], if a ClusterPolicy enables virtual machines. Otherwise the GPU
/// Operator ignores the label (`gpuStateLabels` in `controllers/state_manager.go`).
pub(super) fn default_workload(kind: OperatorResource, resources: OperatorResources<'_>) -> Option<&str> {
    let workloads = &resources.cluster_policy()?.spec["sandboxWorkloads"];
    let is_enabled = workloads["enabled"] == true && kind.is_of_gpu_operator();
    is_enabled.then(|| workloads["defaultWorkload"].as_str().unwrap_or(CONTAINERS))
}

/// Whether the operator skips the driver of a node with these labels. `workload` is the result of [`default_workload`].
pub(super) fn skips(
    kind: OperatorResource,
    labels: &BTreeMap<String, String>,
    workload: Option<&str>,
) -> bool {
    let has = |(key, values): (&str, &[&str])| {
        labels.get(key).is_some_and(|value| values.contains(&value.as_str()))
    };
    let is_vm = |default: &str| labels.get(WORKLOAD_LABEL).map_or(default, String::as_str) != CONTAINERS;
    kind.is_of_gpu_operator() && (SKIP_LABELS.into_iter().any(has) || workload.is_some_and(is_vm))
}

/// Whether the operator installs its driver on a node with these labels, whatever the image's own selector is.
pub(super) fn selects(kind: OperatorResource, labels: &BTreeMap<String, String>) -> bool {
    kind.node_label().is_none_or(|key| labels.get(key).is_some_and(|value| value == "true"))
}
