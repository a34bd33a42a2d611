//! Pure: which image fields are rewritten, and why the others are not.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    path::PathBuf,
};

use serde::Serialize;

use super::{
    DaemonSetFacts, HoldReason, NodeAffinity, NodeFacts, Owner, PlanInputs, Published,
    decide::{CellState, CellStates},
    matrix::{NodeGroup, group_nodes},
    text,
};
use crate::{
    image::{ImageName, ImageReference, RolloutSpec, UnknownPolicy},
    kernel::KernelTarget,
    kmod::Verdict,
};

/// DaemonSets of the directories that `file` rollouts name, by the path in the definition; or why a
/// directory could not be read.
pub type Manifests = BTreeMap<PathBuf, Result<Vec<DaemonSetFacts>, String>>;

/// How a field is rewritten.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Strategy {
    /// In the cluster.
    Image,
    /// In a directory of manifests.
    File,
}

/// One container's image field.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RolloutTarget {
    /// How it is rewritten.
    pub strategy: Strategy,
    /// The directory or file, as the definition names it; for `file`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// The DaemonSet's namespace.
    pub namespace: String,
    /// The DaemonSet's name.
    pub daemon_set: String,
    /// The container's name.
    pub container: String,
}

impl RolloutTarget {
    fn of(spec: &RolloutSpec) -> Self {
        match spec.clone() {
            RolloutSpec::Image { namespace, daemon_set, container } => {
                Self { strategy: Strategy::Image, path: None, namespace, daemon_set, container }
            }
            RolloutSpec::File { path, namespace, daemon_set, container } => {
                Self { strategy: Strategy::File, path: Some(path), namespace, daemon_set, container }
            }
        }
    }
}

impl fmt::Display for RolloutTarget {
    /// `DaemonSet kube-system/driver, container main`, then the directory.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { strategy: _, path, namespace, daemon_set, container } = self;
        write!(f, "DaemonSet {namespace}/{daemon_set}, container {container}")?;
        path.as_ref().map_or(Ok(()), |path| write!(f, ", in {}", path.display()))
    }
}

/// What becomes of one image field.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "decision")]
pub enum RolloutDecision {
    /// It is set.
    Rewrite {
        /// What it holds.
        from: String,
        /// What it gets: always by digest.
        #[serde(serialize_with = "text::one")]
        to: ImageReference,
    },
    /// It is set when this image has been built, checked and published.
    Pending {
        /// What is waited for.
        #[serde(serialize_with = "text::one")]
        on: ImageReference,
    },
    /// It holds the right image.
    AlreadySet {
        /// That image.
        #[serde(serialize_with = "text::one")]
        image: ImageReference,
    },
    /// It stays as it is.
    #[serde(serialize_with = "text::explained")]
    Hold(HoldReason),
}

/// One image field of the definitions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PlannedRollout {
    /// The driver image.
    #[serde(serialize_with = "text::one")]
    pub image: ImageName,
    /// The field.
    pub target: RolloutTarget,
    /// What becomes of it.
    #[serde(flatten)]
    pub decision: RolloutDecision,
}

/// A rewrite, as handed to an adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageChange {
    /// The DaemonSet's namespace.
    pub namespace: String,
    /// The DaemonSet's name.
    pub daemon_set: String,
    /// The container's name.
    pub container: String,
    /// What the plan saw in the field; anything else is a conflict.
    pub expected: String,
    /// What it gets.
    pub to: ImageReference,
}

impl PlannedRollout {
    /// The change to make, where there is one.
    pub fn change(&self) -> Option<ImageChange> {
        let RolloutDecision::Rewrite { from, to } = &self.decision else { return None };
        let RolloutTarget { strategy: _, path: _, namespace, daemon_set, container } = &self.target;
        Some(ImageChange {
            namespace: namespace.clone(),
            daemon_set: daemon_set.clone(),
            container: container.clone(),
            expected: from.clone(),
            to: to.clone(),
        })
    }
}

/// Decides every rollout of the definitions.
pub(super) fn rollouts(inputs: &PlanInputs<'_>, states: &CellStates<'_>) -> Vec<PlannedRollout> {
    let wanted: Vec<(&ImageName, RolloutTarget)> = inputs
        .definitions
        .images
        .iter()
        .flat_map(|(name, image)| image.spec.rollout.iter().map(move |spec| (name, RolloutTarget::of(spec))))
        .collect();
    let mut claims: HashMap<&RolloutTarget, Vec<&ImageName>> = HashMap::new();
    for (image, target) in &wanted {
        claims.entry(target).or_default().push(image);
    }
    let found: Vec<Result<&DaemonSetFacts, HoldReason>> =
        wanted.iter().map(|(_, target)| find_daemon_set(inputs, target)).collect();
    let labels = found.iter().flatten().flat_map(|daemon_set| daemon_set.label_keys());
    let groups = group_nodes(&inputs.snapshot.nodes, labels);

    let decide = |((image, target), daemon_set): (&(&ImageName, RolloutTarget), Result<_, HoldReason>)| {
        let claimed = claims.get(target).filter(|images| images.len() > 1);
        let decision = match (claimed, daemon_set) {
            (Some(images), _) => {
                Err(HoldReason::ClaimedTwice { images: images.iter().copied().cloned().collect() })
            }
            (None, Err(hold)) => Err(hold),
            (None, Ok(daemon_set)) => decide(inputs, states, &groups, image, target, daemon_set),
        };
        PlannedRollout {
            image: (*image).clone(),
            target: target.clone(),
            decision: decision.unwrap_or_else(RolloutDecision::Hold),
        }
    };
    // A definition that neither a node nor a DaemonSet asks for, such as a built-in one, says nothing.
    let concerns = |((image, _), found): &(&(&ImageName, RolloutTarget), Result<_, HoldReason>)| {
        !matches!(found, Err(HoldReason::NotFound)) || inputs.matrix.calls_for(image)
    };
    wanted.iter().zip(found).filter(concerns).map(decide).collect()
}

fn find_daemon_set<'a>(
    inputs: &PlanInputs<'a>,
    target: &RolloutTarget,
) -> Result<&'a DaemonSetFacts, HoldReason> {
    let candidates = match &target.path {
        None => &inputs.snapshot.daemon_sets,
        Some(path) => match inputs.manifests.get(path) {
            Some(Ok(daemon_sets)) => daemon_sets,
            Some(Err(detail)) => return Err(HoldReason::Unreadable { detail: detail.clone() }),
            None => {
                return Err(HoldReason::Unreadable { detail: format!("{} was not read", path.display()) });
            }
        },
    };
    let mut named = candidates
        .iter()
        .filter(|found| found.namespace == target.namespace && found.name == target.daemon_set);
    match (named.next(), named.count()) {
        (None, _) => Err(HoldReason::NotFound),
        (Some(found), 0) => Ok(found),
        (Some(_), more) => Err(HoldReason::Ambiguous { count: more + 1 }),
    }
}

fn decide(
    inputs: &PlanInputs<'_>,
    states: &CellStates<'_>,
    groups: &[NodeGroup<'_>],
    image: &ImageName,
    target: &RolloutTarget,
    daemon_set: &DaemonSetFacts,
) -> Result<RolloutDecision, HoldReason> {
    let mut named = daemon_set.containers.iter().filter(|found| found.name == target.container);
    let (Some(container), None) = (named.next(), named.next()) else {
        let found = daemon_set.containers.iter().map(|container| container.name.clone()).collect();
        return Err(HoldReason::NoContainer { found });
    };
    if let Some(owner) = &daemon_set.owner {
        return Err(HoldReason::Owned { remedy: remedy(owner), owner: owner.clone() });
    }
    if let Some(detail) = &container.fixed {
        return Err(HoldReason::Fixed { detail: detail.clone() });
    }
    if !inputs.pullable {
        return Err(HoldReason::NotPullable);
    }
    let kernel = common_kernel(daemon_set, groups)?;
    let no_image = |detail: String| HoldReason::NoImage { kernel: kernel.to_string(), detail };
    let Some((cell, state)) = states.get(&(image, kernel)) else {
        return Err(no_image(why_no_cell(inputs, image, kernel)));
    };
    match state {
        CellState::Absent(detail) => Err(no_image(detail.clone())),
        CellState::Building => Ok(RolloutDecision::Pending { on: cell.reference.clone() }),
        CellState::Published(published) => {
            let to = published.pinned(&cell.reference);
            let spec = inputs.definitions.images.get(image).map(|image| &image.spec);
            passes(published, &to, kernel, spec.map(|spec| spec.check.unknown).unwrap_or_default())?;
            if container.image == to.to_string() {
                Ok(RolloutDecision::AlreadySet { image: to })
            } else {
                Ok(RolloutDecision::Rewrite { from: container.image.clone(), to })
            }
        }
    }
}

/// The one kernel that every reached node runs.
fn common_kernel<'a>(
    daemon_set: &DaemonSetFacts,
    groups: &'a [NodeGroup<'_>],
) -> Result<&'a KernelTarget, HoldReason> {
    let not_understood = || HoldReason::Affinity {
        detail: match &daemon_set.affinity {
            NodeAffinity::Unsupported(detail) => detail.clone(),
            NodeAffinity::Any | NodeAffinity::Terms(_) => "a field other than metadata.name".to_owned(),
        },
    };
    let mut kernels: BTreeMap<&KernelTarget, usize> = BTreeMap::new();
    let mut unknown: Vec<(&str, &super::NodeReason)> = Vec::new();
    for group in groups {
        let reached = reached(daemon_set, group).ok_or_else(not_understood)?;
        match &group.target {
            _ if reached.is_empty() => {}
            Ok(kernel) => *kernels.entry(kernel).or_default() += reached.len(),
            Err(why) => unknown.extend(reached.iter().map(|node| (node.name.as_str(), why))),
        }
    }
    if let Some((node, why)) = unknown.iter().min() {
        return Err(HoldReason::UnknownNode {
            node: (*node).to_owned(),
            count: unknown.len(),
            why: (*why).clone(),
        });
    }
    let mut distinct = kernels.keys();
    match (distinct.next(), distinct.next()) {
        (None, _) => Err(HoldReason::NoNodes),
        (Some(kernel), None) => Ok(kernel),
        (Some(_), Some(_)) => Err(HoldReason::MixedKernels {
            kernels: kernels.iter().map(|(kernel, nodes)| (kernel.to_string(), *nodes)).collect(),
        }),
    }
}

/// The group's nodes that the DaemonSet reaches; `None` where its affinity is not understood.
fn reached<'a>(daemon_set: &DaemonSetFacts, group: &NodeGroup<'a>) -> Option<Vec<&'a NodeFacts>> {
    if daemon_set.affinity.names_nodes() {
        let answers = group.nodes.iter().map(|node| daemon_set.reaches(node).map(|yes| (*node, yes)));
        let answers: Option<Vec<_>> = answers.collect();
        return answers
            .map(|nodes| nodes.into_iter().filter_map(|(node, yes)| yes.then_some(node)).collect());
    }
    daemon_set.reaches(group.sample).map(|yes| if yes { group.nodes.clone() } else { Vec::new() })
}

/// Guarantee 1: by digest, checked, and for the exact release, which the tag's label does not tell.
fn passes(
    published: &Published,
    image: &ImageReference,
    kernel: &KernelTarget,
    unknown: UnknownPolicy,
) -> Result<(), HoldReason> {
    let Published { digest: _, input_hash: _, verdict, kernel_release } = published;
    if kernel_release.as_deref() != Some(kernel.release.as_str()) {
        return Err(HoldReason::OtherKernel { image: image.clone(), found: kernel_release.clone() });
    }
    match (verdict, unknown) {
        (Some(Verdict::Loads), _) | (Some(Verdict::Unknown), UnknownPolicy::Allow) => Ok(()),
        (Some(Verdict::Unknown), UnknownPolicy::Deny) => {
            Err(HoldReason::UnknownDenied { image: image.clone() })
        }
        (Some(Verdict::Refused) | None, _) => {
            Err(HoldReason::NotPassed { image: image.clone(), verdict: *verdict })
        }
    }
}

fn why_no_cell(inputs: &PlanInputs<'_>, image: &ImageName, kernel: &KernelTarget) -> String {
    let skipped =
        inputs.matrix.skipped.iter().find(|skipped| skipped.image == *image && skipped.target == *kernel);
    match skipped {
        Some(skipped) => skipped.why.to_string(),
        None => format!("no node of this kernel matches the nodes of image {image}"),
    }
}

/// What to set instead of the DaemonSet that an operator writes.
fn remedy(owner: &Owner) -> String {
    let fields = match owner.kind.as_str() {
        "NicClusterPolicy" => "spec.ofedDriver.{repository,image,version}",
        "ClusterPolicy" => "spec.driver.{repository,image,version}",
        "NVIDIADriver" => "spec.{repository,image,version}",
        _ => return format!("change {} {} instead", owner.kind, owner.name),
    };
    format!("set {fields} of {} {} instead", owner.kind, owner.name)
}

#[cfg(test)]
mod tests;
