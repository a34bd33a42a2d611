//! Decides whether a node may boot its next kernel: every image that the node will need must be published and must have passed
//! its check, and rollouts must be able to set the image while other nodes run other kernels. Automation that upgrades kernels
//! waits for the label that confirms this. A node that needs no image gets a different label, because nothing was checked for it.

use std::{
    cell::LazyCell,
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use serde::Serialize;

use super::{
    Change, NO_DRIVER_FOR, NodeChange, NodeFacts, Observed, PlanInputs, PlannedRollout, Platform, READY_FOR,
    guarantee::{RequiredKernels, admissible_image},
    outcome::{CellLookup, CellState, Outcome},
    rollout::{OneImage, RequestedRollouts, StoppedRollout},
    skip_reason::serialize_optional_reason,
};
use crate::{
    image::{DriverImage, ImageName, ImageReference},
    kernel::{KernelLabel, KernelTarget, match_family},
    kmod::Verdict,
};

/// Whether a node may boot a kernel, judged by its driver images.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, strum::IntoStaticStr)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum BootReadiness {
    /// No driver image is called for: nothing blocks the boot, and nothing was checked.
    NoDriver,
    /// Every image that the node will need is available.
    Ready,
    /// The answer is unknown.
    Unknown,
    /// An image is missing.
    Wait,
}

impl BootReadiness {
    /// Returns the answer in kebab case.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// Whether nothing blocks the boot.
    pub fn is_free(self) -> bool {
        matches!(self, Self::Ready | Self::NoDriver)
    }
}

/// Reason why a node may need a driver image although no definition's `nodes` match. It prevents [`NO_DRIVER_FOR`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, thiserror::Error)]
#[serde(rename_all = "kebab-case", tag = "reason")]
pub enum Blocker {
    /// No kernel family matches the target.
    #[error(
        "no kernel family matches, so whether this kernel exists is unknown; correct its release, or add a family"
    )]
    NoFamily,
    /// The node has no label that describes its hardware.
    #[error(
        "the node has no hardware label (feature.node.kubernetes.io/pci-...) yet, so the images that it will need are unknown; check that Node Feature Discovery runs on it"
    )]
    HardwareNotLabelled,
    /// NFD found a GPU of NVIDIA, and the GPU Operator has not set its labels.
    #[error(
        "the node has a GPU and no label nvidia.com/gpu.present=true yet, so the images that it will need are unknown; check that the GPU Operator runs"
    )]
    GpuNotLabelled,
}

/// State of one image that a node will need.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", rename_all_fields = "camelCase", tag = "state")]
pub enum Readiness {
    /// Published and accepted by the definition's check policy. Holds the check's verdict.
    Ready { verdict: Verdict },
    /// Missing or unsuitable, for this reason.
    Missing { message: String },
    /// The registry lookup failed with this error.
    Unknown { message: String },
}

/// Image that nodes will need.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RequiredImage {
    /// Driver image.
    pub image: ImageName,
    /// Reference of the image, where known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reference: Option<ImageReference>,
    /// State of the image.
    #[serde(flatten)]
    pub state: Readiness,
}

/// Kernel that nodes are to boot, with the images that they will need.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NextKernel {
    /// The kernel.
    pub kernel: KernelTarget,
    /// Needed images, in name order.
    pub needs: Vec<RequiredImage>,
    /// Reason why images may be needed although `needs` is empty.
    #[serde(
        rename = "doubt",
        serialize_with = "serialize_optional_reason",
        skip_serializing_if = "Option::is_none"
    )]
    pub blocker: Option<Blocker>,
}

impl NextKernel {
    /// Returns whether nodes may boot the kernel.
    pub fn may_boot(&self) -> BootReadiness {
        let state = |required: &RequiredImage| match required.state {
            Readiness::Ready { .. } => BootReadiness::Ready,
            Readiness::Missing { .. } => BootReadiness::Wait,
            Readiness::Unknown { .. } => BootReadiness::Unknown,
        };
        match (&self.blocker, self.needs.iter().map(state).max()) {
            (_, Some(worst)) => worst,
            (None, None) => BootReadiness::NoDriver,
            (Some(Blocker::NoFamily), None) => BootReadiness::Wait,
            (Some(Blocker::HardwareNotLabelled | Blocker::GpuNotLabelled), None) => BootReadiness::Unknown,
        }
    }
}

/// Node with a next kernel, or with a stale mark.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PlannedNode {
    /// Name of the node.
    pub node: String,
    /// Kernel that the node is to boot; `None` where none is announced any more.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next: Option<Arc<NextKernel>>,
    /// Whether the node may boot and images were checked for it.
    pub ready: bool,
    /// Detailed answer, with cases that `ready` does not distinguish.
    pub may_boot: BootReadiness,
    /// Change to write to the node; `None` where its marks are up to date.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub change: Option<Change>,
}

/// Facts about a node that decide whether it may boot a kernel.
#[derive(PartialEq, Eq, Hash)]
struct NextKernelKey<'a> {
    target: KernelTarget,
    /// For each image of the definitions, in their order, whether it selects the node.
    selection: Vec<bool>,
    /// Reason why images may select the node later.
    missing_labels: Option<Blocker>,
    /// Images that rollouts cannot set for the kernel, with the reasons.
    conflicts: Vec<(&'a ImageName, String)>,
}

/// Computes the mark of every node.
pub(super) fn nodes(
    inputs: &PlanInputs<'_>,
    observed: &Observed,
    cells: CellLookup<'_>,
    rollouts: &RequestedRollouts<'_>,
    planned_rollouts: &[PlannedRollout],
) -> Vec<PlannedNode> {
    let marks = [READY_FOR, NO_DRIVER_FOR].map(|mark| inputs.instance.mark(mark));
    let rollouts_with_one_image = LazyCell::new(|| rollouts.with_one_image(inputs));
    let stopped_rollouts = LazyCell::new(|| rollouts.stopped(inputs, observed, planned_rollouts));
    // Nodes with the same key share one `NextKernel`.
    let mut kernels: HashMap<NextKernelKey<'_>, Arc<NextKernel>> = HashMap::new();
    let mut planned = Vec::new();
    for node in inputs.snapshot.nodes.iter().filter(|node| node.ignored_by.is_none()) {
        // Labels that are missing for a while, as when NFD restarts, do not invalidate a published image: keep the
        // marks.
        if node.announced_release().is_some() && Platform::of(node).is_none() {
            continue;
        }
        let next = inputs.announced.next_kernel_of(node).map(|target| {
            let images = inputs.definitions().images.values();
            let key = NextKernelKey {
                selection: images.map(|image| node.is_selected_by(image)).collect(),
                missing_labels: missing_labels(inputs, node),
                conflicts: rollout_conflicts(
                    &rollouts_with_one_image,
                    &stopped_rollouts,
                    &cells,
                    node,
                    &target,
                ),
                target,
            };
            let entry = kernels.entry(key);
            Arc::clone(entry.or_insert_with_key(|key| Arc::new(next_kernel(inputs, observed, &cells, key))))
        });
        planned.extend(planned_node(&marks, node, next));
    }
    if inputs.snapshot.read_only_nodes {
        planned.retain(|node| node.next.is_some());
        for node in &mut planned {
            node.change = None;
        }
    }
    planned
}

/// Returns the reason why images may select a node later: labels of its hardware are still to come.
fn missing_labels(inputs: &PlanInputs<'_>, node: &NodeFacts) -> Option<Blocker> {
    if !node.has_hardware_labels {
        return Some(Blocker::HardwareNotLabelled);
    }
    let may_select = |image: &DriverImage| {
        let nodes = &image.spec.nodes;
        let awaits = |key: &str| node.awaits_gpu_label(key);
        let has = |key: &str, required: &str| node.labels.get(key).is_some_and(|label| label == required);
        nodes.own_driver(&node.labels).is_none()
            && nodes.match_labels.keys().any(|key| awaits(key.as_str()))
            && nodes
                .match_labels
                .iter()
                .all(|(key, value)| awaits(key.as_str()) || has(key.as_str(), value.as_str()))
    };
    inputs.definitions().images.values().any(may_select).then_some(Blocker::GpuNotLabelled)
}

/// Returns the images that a node would not get with its next kernel, each with the reason: all nodes of the rollout's
/// DaemonSet have one image, or the rollout sets no other image.
fn rollout_conflicts<'a>(
    rollouts_with_one_image: &[OneImage<'a>],
    stopped_rollouts: &[StoppedRollout<'a>],
    cells: &CellLookup<'_>,
    node: &NodeFacts,
    target: &KernelTarget,
) -> Vec<(&'a ImageName, String)> {
    let conflict = |rollout: &OneImage<'a>| {
        let tag =
            |kernel: &KernelTarget| Some(cells.get(rollout.image, kernel)?.outcome.cell()?.reference.clone());
        let own_tag = tag(target);
        let has_same_image =
            |kernel: &KernelTarget| kernel == target || (own_tag.is_some() && tag(kernel) == own_tag);
        Some((rollout.image, rollout.conflict(node, has_same_image)?))
    };
    let obstacles =
        stopped_rollouts.iter().filter_map(|rollout| Some((rollout.image, rollout.obstacle(node, target)?)));
    rollouts_with_one_image.iter().filter_map(conflict).chain(obstacles).collect()
}

/// Returns the images that nodes with this key need, with their states.
fn next_kernel(
    inputs: &PlanInputs<'_>,
    observed: &Observed,
    cells: &CellLookup<'_>,
    key: &NextKernelKey<'_>,
) -> NextKernel {
    let NextKernelKey { target, selection, missing_labels, conflicts } = key;
    let images = inputs.definitions().images.values().zip(selection);
    let mut needs: Vec<RequiredImage> = images
        .filter(|(_, is_selected)| **is_selected)
        .map(|(image, _)| required_image(inputs, observed, cells, image, target))
        .collect();
    for required in &mut needs {
        let conflict = conflicts.iter().find(|(image, _)| **image == required.image);
        if let (Readiness::Ready { .. }, Some((_, why))) = (&required.state, conflict) {
            required.state = Readiness::Missing { message: why.clone() };
        }
    }
    let blocker = match match_family(&inputs.definitions().families, target) {
        _ if !needs.is_empty() => None,
        None => Some(Blocker::NoFamily),
        Some(_) => missing_labels.clone(),
    };
    NextKernel { kernel: target.clone(), needs, blocker }
}

/// Returns the state of an image that a node will need for a kernel.
fn required_image(
    inputs: &PlanInputs<'_>,
    observed: &Observed,
    cells: &CellLookup<'_>,
    image: &DriverImage,
    target: &KernelTarget,
) -> RequiredImage {
    let name = &image.metadata.name;
    let missing = |message: &str| Readiness::Missing { message: message.to_owned() };
    // An outage also fails the lookups of headers, sources and bases. Without them the image itself is not looked up.
    let is_lookup_failure = || {
        let outcome = cells.get(name, target).map(|planned| &planned.outcome);
        inputs.cells.resolved.unreachable
            && matches!(outcome, Some(Outcome::Skipped { why }) if why.is_lookup_failure())
    };
    let (cell, state) = match cells.state(name, target) {
        CellState::Published(cell, _) if !inputs.cells.location.pullable => {
            (Some(cell), missing("images go to a layout directory, from which no node can pull"))
        }
        CellState::Published(cell, published) => {
            let kernel = RequiredKernels::Kernel(target);
            let state = match (
                admissible_image(inputs, observed, name, published, &cell.reference, kernel),
                published.verdict,
            ) {
                (Ok(_), Some(verdict)) => Readiness::Ready { verdict },
                (Ok(_), None) => missing("it has no check report"),
                (Err(why), _) => missing(&why.to_string()),
            };
            (Some(cell), state)
        }
        CellState::ToBuild(cell) => (Some(cell), missing("it is not built yet")),
        CellState::Absent(_) if cells.get(name, target).is_none() => {
            (None, missing("no image is planned for this kernel"))
        }
        CellState::Absent(absence) if absence.unknown || is_lookup_failure() => {
            (absence.cell, Readiness::Unknown { message: absence.why })
        }
        CellState::Absent(absence) => (absence.cell, missing(&absence.why)),
    };
    RequiredImage { image: name.clone(), reference: cell.map(|cell| cell.reference.clone()), state }
}

/// Compares a node's marks with the desired ones. `marks` are the keys for "ready" and for "needs no image", in this
/// order.
fn planned_node(marks: &[String; 2], node: &NodeFacts, next: Option<Arc<NextKernel>>) -> Option<PlannedNode> {
    let label = next.as_ref().and_then(|next| KernelLabel::of(&next.kernel.release));
    let label = label.map(|label| label.to_string());
    let may_boot = next.as_ref().map_or(BootReadiness::Wait, |next| next.may_boot());
    let mut values: BTreeMap<String, Option<String>> = BTreeMap::new();
    let mut is_marked = false;
    for (mark, readiness) in marks.iter().zip([BootReadiness::Ready, BootReadiness::NoDriver]) {
        let current = [node.annotations.get(mark), node.labels.get(mark)];
        is_marked |= current != [None; 2];
        // While the registry or the labels are unavailable, no node becomes ready, and no ready node loses its mark.
        let keeps_mark = readiness == BootReadiness::Ready
            && may_boot == BootReadiness::Unknown
            && label.as_ref().is_some_and(|label| current == [Some(label); 2]);
        let desired = label.clone().filter(|_| may_boot == readiness || keeps_mark);
        if current != [desired.as_ref(); 2] {
            values.insert(mark.clone(), desired);
        }
    }
    if next.is_none() && !is_marked {
        return None;
    }
    let change = (!values.is_empty()).then(|| {
        Change::Node(NodeChange {
            name: node.name.clone(),
            labels: values.clone(),
            annotations: values,
            ..NodeChange::default()
        })
    });
    let ready = may_boot == BootReadiness::Ready;
    Some(PlannedNode { node: node.name.clone(), next, ready, may_boot, change })
}

#[cfg(test)]
mod tests;
