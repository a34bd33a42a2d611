//! Pure: the strategies `image` and `file`: one image for a DaemonSet whose nodes share one kernel.

use std::collections::BTreeMap;

use super::{
    CellState, Change, Context, DaemonSetChange, DaemonSetFacts, Decided, HoldReason, ImageReference,
    KernelTarget, NodeGroup, PlanInputs, RolloutDecision, RolloutObject, RolloutTarget, Seen,
};
use crate::{
    image::{ImageName, UnknownPolicy},
    kmod::Verdict,
    plan::{NodeAffinity, NodeFacts, NodeReason, Owner, Published},
};

/// The one DaemonSet that a target names.
pub(super) fn find_daemon_set<'a>(
    inputs: &PlanInputs<'a>,
    target: &RolloutTarget,
) -> Result<&'a DaemonSetFacts, HoldReason> {
    let RolloutObject::DaemonSet { namespace, daemon_set, container: _ } = &target.object else {
        return Err(HoldReason::NotFound);
    };
    if let (None, Some(detail)) = (&target.path, inputs.snapshot.unseen.get(&Seen::DaemonSets)) {
        return Err(HoldReason::Unreadable { detail: detail.clone() });
    }
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
    let mut named =
        candidates.iter().filter(|found| found.namespace == *namespace && found.name == *daemon_set);
    match (named.next(), named.count()) {
        (None, _) => Err(HoldReason::NotFound),
        (Some(found), 0) => Ok(found),
        (Some(_), more) => Err(HoldReason::Ambiguous { count: more + 1 }),
    }
}

/// Decides one target.
pub(super) fn decide(context: &Context<'_>, target: &RolloutTarget) -> Result<Decided, HoldReason> {
    let Context { inputs, states, groups, image, spec: _ } = *context;
    let daemon_set = find_daemon_set(inputs, target)?;
    let RolloutObject::DaemonSet { container: name, .. } = &target.object else {
        return Err(HoldReason::NotFound);
    };
    let mut named = daemon_set.containers.iter().filter(|found| found.name == *name);
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
        CellState::Building => Ok(RolloutDecision::Pending { on: cell.reference.clone() }.into()),
        CellState::Published(published) => {
            let to = published.pinned(&cell.reference);
            passes(inputs, image, published, &to, kernel)?;
            set_image(context, daemon_set, name, to)
        }
    }
}

/// Sets one container of a DaemonSet to an image of which it has been decided that it may be set.
pub(super) fn set_image(
    context: &Context<'_>,
    daemon_set: &DaemonSetFacts,
    container: &str,
    to: ImageReference,
) -> Result<Decided, HoldReason> {
    let _ = context;
    let found = daemon_set.containers.iter().find(|found| found.name == container);
    let from = found.map(|found| found.image.clone()).unwrap_or_default();
    if from == to.to_string() {
        return Ok(RolloutDecision::AlreadySet { image: to }.into());
    }
    let change = DaemonSetChange {
        namespace: daemon_set.namespace.clone(),
        name: daemon_set.name.clone(),
        version: daemon_set.live.as_ref().map(|live| live.version.clone()),
        expected: [(container.to_owned(), from.clone())].into(),
        images: [(container.to_owned(), to.to_string())].into(),
        affinity: None,
        annotations: BTreeMap::new(),
        proof: vec![to.clone()],
    };
    let decision = RolloutDecision::Rewrite { from, to };
    Ok(Decided { decision, changes: vec![Change::DaemonSet(change)] })
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
    let mut unknown: Vec<(&str, &NodeReason)> = Vec::new();
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
pub(super) fn reached<'a>(daemon_set: &DaemonSetFacts, group: &NodeGroup<'a>) -> Option<Vec<&'a NodeFacts>> {
    if daemon_set.affinity.names_nodes() {
        let answers = group.nodes.iter().map(|node| daemon_set.reaches(node).map(|yes| (*node, yes)));
        let answers: Option<Vec<_>> = answers.collect();
        return answers
            .map(|nodes| nodes.into_iter().filter_map(|(node, yes)| yes.then_some(node)).collect());
    }
    daemon_set.reaches(group.sample).map(|yes| if yes { group.nodes.clone() } else { Vec::new() })
}

/// Guarantee 1: by digest, checked, and for the exact release, which the tag's label does not tell.
pub(super) fn passes(
    inputs: &PlanInputs<'_>,
    name: &ImageName,
    published: &Published,
    image: &ImageReference,
    kernel: &KernelTarget,
) -> Result<(), HoldReason> {
    let spec = inputs.definitions.images.get(name).map(|image| &image.spec);
    let unknown = spec.map(|spec| spec.check.unknown).unwrap_or_default();
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

pub(super) fn why_no_cell(inputs: &PlanInputs<'_>, image: &ImageName, kernel: &KernelTarget) -> String {
    let skipped =
        inputs.matrix.skipped.iter().find(|skipped| skipped.image == *image && skipped.target == *kernel);
    match skipped {
        Some(skipped) => skipped.why.to_string(),
        None => format!("no node of this kernel matches the nodes of image {image}"),
    }
}

/// What to set instead of the DaemonSet that an operator writes.
pub(super) fn remedy(owner: &Owner) -> String {
    let fields = match owner.kind.as_str() {
        "NicClusterPolicy" => "spec.ofedDriver.{repository,image,version}",
        "ClusterPolicy" => "spec.driver.{repository,image,version}",
        "NVIDIADriver" => "spec.{repository,image,version}",
        _ => return format!("change {} {} instead", owner.kind, owner.name),
    };
    format!("set {fields} of {} {} instead", owner.kind, owner.name)
}
