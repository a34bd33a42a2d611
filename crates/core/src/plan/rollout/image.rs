//! Pure: the strategies `image` and `file`: one image for a DaemonSet whose nodes share one kernel.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{
    CellState, Change, Context, DaemonSetChange, DaemonSetFacts, Decided, HoldReason, ImageReference,
    KernelTarget, NodeGroup, PER_KERNEL_ANNOTATION, PlanInputs, Record, RolloutDecision, RolloutTarget, Seen,
    daemon_set::{Named, named},
    field::{self, Field, Step},
    record::FieldRecord,
    watch::{Progress, progress},
};
use crate::{
    image::{ImageName, UnknownPolicy},
    kmod::Verdict,
    plan::{
        ClusterSnapshot, Container, LiveDaemonSet, NodeAffinity, NodeFacts, NodeReason, Published, Waiting,
        signatures,
    },
};

/// Decides one target.
pub(super) fn decide(context: &Context<'_>, target: &RolloutTarget) -> Result<Decided, HoldReason> {
    let Context { inputs, states, groups, image, spec: _ } = *context;
    let Named { daemon_set, container: Container { name, .. } } = named(inputs, target)?;
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

/// Sets one container of a DaemonSet to an image of which it has been decided that it may be set. In a live cluster
/// the record has a say in it ([`field`]); in a directory of manifests its history is version control.
pub(super) fn set_image(
    context: &Context<'_>,
    daemon_set: &DaemonSetFacts,
    container: &str,
    to: ImageReference,
) -> Result<Decided, HoldReason> {
    let found = daemon_set.containers.iter().find(|found| found.name == container);
    let from = found.map(|found| found.image.clone()).unwrap_or_default();
    let Some(live) = &daemon_set.live else {
        if from == to.to_string() {
            return Ok(RolloutDecision::AlreadySet { image: to }.into());
        }
        let mut change = naming(daemon_set, &Record::default());
        change.expected.insert(container.to_owned(), from.clone());
        change.images.insert(container.to_owned(), to.to_string());
        change.proof.push(to.clone());
        let decision = RolloutDecision::Rewrite { from, to };
        return Ok(Decided { decision, changes: vec![Change::DaemonSet(change)] });
    };
    if live.deleting {
        return Err(HoldReason::Deleting);
    }
    let record = Record::of(&live.annotations)?;
    let (current, wished) = (Value::String(from.clone()), Value::String(to.to_string()));
    let field = Field {
        record: record.0.get(container),
        current: &current,
        wished: &wished,
        now: context.inputs.now,
    };
    let step = field::decide(&field, |set| how_pods_do(context, live, container, set));
    let change = |noted: FieldRecord, value: Option<&str>| {
        let mut change = naming(daemon_set, &record.with(container, noted));
        if let Some(value) = value {
            change.expected.insert(container.to_owned(), from.clone());
            change.images.insert(container.to_owned(), value.to_owned());
        }
        change
    };
    let (decision, change) = match step {
        Step::Keep => (RolloutDecision::AlreadySet { image: to }, None),
        Step::Note(noted) => (RolloutDecision::AlreadySet { image: to }, Some(change(noted, None))),
        Step::Set(noted) => {
            let mut change = change(noted, Some(&to.to_string()));
            change.proof.push(to.clone());
            (RolloutDecision::Rewrite { from: from.clone(), to }, Some(change))
        }
        // No proof is asked of what was there before: better an image that may have gone than one that does not
        // come up.
        Step::PutBack(noted, why) => {
            let before = noted.replaced.as_str().map(str::to_owned);
            (RolloutDecision::Hold(why), Some(change(noted, before.as_deref())))
        }
        Step::Leave(noted, why) => (RolloutDecision::Hold(why), noted.map(|noted| change(noted, None))),
    };
    Ok(Decided { decision, changes: change.into_iter().map(Change::DaemonSet).collect() })
}

/// A change that sets nothing, and keeps all that farrier has set in a DaemonSet: an apply gives up what it does not
/// name, and a field that nobody owns any more is removed. What somebody else has set since is theirs.
pub(super) fn naming(daemon_set: &DaemonSetFacts, record: &Record) -> DaemonSetChange {
    let ours = daemon_set.containers.iter().filter(|found| {
        let written = record.0.get(&found.name).and_then(FieldRecord::written);
        written.and_then(Value::as_str) == Some(&found.image)
    });
    let images: BTreeMap<String, String> =
        ours.map(|found| (found.name.clone(), found.image.clone())).collect();
    let live = daemon_set.live.as_ref();
    DaemonSetChange {
        namespace: daemon_set.namespace.clone(),
        name: daemon_set.name.clone(),
        version: live.map(|live| live.version.clone()),
        expected: images.clone(),
        images,
        // The fence of a rollout by kernel is farrier's, too.
        affinity: live
            .filter(|live| live.annotations.contains_key(PER_KERNEL_ANNOTATION))
            .map(|_| daemon_set.affinity.clone()),
        annotations: live.map(|live| record.annotations(&live.annotations)).unwrap_or_default(),
        proof: Vec::new(),
    }
}

/// How the pods do that have the recorded image; nothing is said of pods that cannot be seen.
fn how_pods_do(
    context: &Context<'_>,
    live: &LiveDaemonSet,
    container: &str,
    record: &FieldRecord,
) -> Progress {
    let ClusterSnapshot { pods, unseen, .. } = context.inputs.snapshot;
    match (record.set.as_str(), context.spec.deadline()) {
        (Some(image), Some(deadline)) if !unseen.contains_key(&Seen::Pods) => {
            let own = pods.iter().filter(|pod| pod.daemon_set == live.version.uid);
            progress(own, container, image, record.at, deadline, context.inputs.now)
        }
        _ => Progress::Waiting,
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
pub(in crate::plan) fn passes(
    inputs: &PlanInputs<'_>,
    name: &ImageName,
    published: &Published,
    image: &ImageReference,
    kernel: &KernelTarget,
) -> Result<(), HoldReason> {
    let spec = inputs.definitions.images.get(name).map(|image| &image.spec);
    let unknown = spec.map(|spec| spec.check.unknown).unwrap_or_default();
    let Published { digest: _, input_hash: _, exposed: _, verdict, kernel_release } = published;
    if kernel_release.as_deref() != Some(kernel.release.as_str()) {
        return Err(HoldReason::OtherKernel { image: image.clone(), found: kernel_release.clone() });
    }
    signatures::accepts(inputs, image)?;
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
    let is_it = |waiting: &&Waiting| waiting.image == *image && waiting.target == *kernel;
    match (skipped, inputs.matrix.waiting.iter().find(is_it)) {
        (Some(skipped), _) => skipped.why.to_string(),
        (None, Some(waiting)) => format!("it {}", waiting.why()),
        (None, None) => format!("no node of this kernel matches the nodes of image {image}"),
    }
}

#[cfg(test)]
mod tests;
