//! Pure: the strategies `image` and `file`: one image for a DaemonSet whose nodes share one kernel.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{
    Change, Context, DaemonSetChange, DaemonSetFacts, Decided, HoldReason, NodeGroup, Record,
    RolloutDecision, RolloutTarget,
    daemon_set::{Named, named, not_understood},
    field::{self, Field, Step},
    no_image,
    record::FieldRecord,
    watch::{Progress, progress},
};
use crate::{
    image::ImageReference,
    kernel::KernelTarget,
    plan::{
        ClusterSnapshot, Container, LiveDaemonSet, NodeFacts, NodeReason, PER_KERNEL_ANNOTATION, Seen,
        outcome::State,
    },
};

/// Decides one target.
pub(super) fn decide(context: &Context<'_>, target: &RolloutTarget) -> Result<Decided, HoldReason> {
    let Named { daemon_set, container: Container { name, .. } } = named(context.inputs, target)?;
    let kernel = common_kernel(daemon_set, context.groups)?;
    match context.cells.state(context.image, kernel) {
        State::Absent(absence) => Err(no_image(kernel, absence.why)),
        State::Building(cell) => Ok(RolloutDecision::Pending { on: cell.reference.clone() }.into()),
        State::Published(cell, published) => {
            set_image(context, daemon_set, name, context.passing(cell, published)?)
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
        // The earlier image is not looked up: better an image that may have gone than one that does not
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
/// name, and a field without an owner is removed. A value that another writer has set since is theirs.
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
    let mut kernels: BTreeMap<&KernelTarget, usize> = BTreeMap::new();
    let mut unknown: Vec<(&str, &NodeReason)> = Vec::new();
    for group in groups {
        let reached = reached(daemon_set, group).ok_or_else(|| not_understood(daemon_set))?;
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

#[cfg(test)]
mod tests;
