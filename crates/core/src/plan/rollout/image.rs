//! The strategies `image`, `file` and `git`: one image for a DaemonSet whose nodes share one kernel, or one tag for several
//! architectures.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{
    Change, Context, DaemonSetChange, DaemonSetFacts, Decided, HoldReason, RewriteRecord, RolloutDecision,
    RolloutTarget,
    daemon_set::{LiveTarget, TargetContainer, live_target, target_container},
    field::{self, Field, FieldDecision},
    no_image,
    reached::{NodesByKernel, Reached, check_supported},
    record::FieldRecord,
    upgrade,
    watch::{Limits, Progress, is_same_image, progress, runs},
};
use crate::{
    image::{ImageReference, RolloutSpec},
    kernel::KernelTarget,
    plan::{
        Container, ImageContents, NodeFacts, NotReadyNode, ObservedKind, Published, ReachingObject,
        outcome::CellState,
    },
};

pub(super) fn decide(context: &Context<'_>, target: &RolloutTarget) -> Result<Decided, HoldReason> {
    let container = target_container(context.inputs, target)?;
    decide_for(context, container, container.daemon_set)
}

/// Decides which image a container gets, for the nodes that the DaemonSet `reaching` reaches.
pub(super) fn decide_for(
    context: &Context<'_>,
    TargetContainer { daemon_set, container: Container { name, image: in_field, .. } }: TargetContainer<'_>,
    reaching: &DaemonSetFacts,
) -> Result<Decided, HoldReason> {
    check_supported(&reaching.placement)?;
    let object = ReachingObject::daemon_set(reaching, context.inputs.snapshot);
    let kernels = Reached::by(&object, context.groups).known()?;
    let shared = common_tag(context, &kernels)?;
    let (mut image, mut tag) = (None, shared);
    for (kernel, nodes) in &kernels {
        match context.cells.state(context.image, kernel) {
            CellState::Absent(absence) => {
                let suffix = first_not_ready([nodes]).map(|node| format!("; {node}")).unwrap_or_default();
                return Err(no_image(kernel, absence.why + &suffix));
            }
            CellState::ToBuild(cell) => {
                return Ok(RolloutDecision::Pending { on: cell.reference.clone() }.into());
            }
            CellState::Published(cell, published) => {
                image = Some(context.admissible_image(cell, published)?);
                tag = tag.or(Some(&cell.reference));
            }
        }
    }
    if let Some(tag) = shared {
        let index = context.observed.published.get(tag);
        let has_architectures =
            |index: &&Published| kernels.keys().all(|kernel| index.platforms.contains_key(&kernel.arch));
        let Some(index) = index.filter(has_architectures) else {
            return Ok(RolloutDecision::Pending { on: tag.clone() }.into());
        };
        image = Some(index.pinned(tag));
    } else if let Some(tag) = tag
        && let Some(index) = context.observed.published.get(tag).map(|index| index.pinned(tag))
        && is_same_image(in_field, &index.to_string())
    {
        // The nodes of another architecture have left. The index still gives these nodes the same image, and another name
        // for the image would restart their pods.
        image = Some(index);
    }
    set_image(context, daemon_set, name, image.ok_or(HoldReason::NoNodes)?, tag)
}

/// Returns the tag that the images for these kernels share, as the images of several architectures can. Returns `None`
/// for a single kernel, and fails if the tags differ.
fn common_tag<'a>(
    context: &Context<'a>,
    kernels: &NodesByKernel<'a>,
) -> Result<Option<&'a ImageReference>, HoldReason> {
    if kernels.len() < 2 {
        return Ok(None);
    }
    let tag =
        |kernel: &&KernelTarget| Some(&context.cells.get(context.image, kernel)?.outcome.cell()?.reference);
    let mut tags = kernels.keys().map(tag);
    let first = tags.next().flatten();
    if first.is_some() && tags.all(|tag| tag == first) {
        return Ok(first);
    }
    Err(HoldReason::MixedKernels {
        kernels: kernels.iter().map(|(kernel, nodes)| (kernel.to_string(), nodes.len())).collect(),
        not_ready: first_not_ready(kernels.values()),
    })
}

/// Returns a node of a kernel whose nodes are all not ready. Each item has the nodes of one kernel.
fn first_not_ready<'a>(kernels: impl IntoIterator<Item = &'a Vec<&'a NodeFacts>>) -> Option<NotReadyNode> {
    let not_ready = kernels.into_iter().filter(|nodes| nodes.iter().all(|node| node.not_ready));
    NotReadyNode::first(not_ready.flatten().copied())
}

/// Formats `to` as the new value of the container's image. The value includes `tag` if the manifest has a tag beside the
/// digest.
fn image_text(from: &Container, to: &ImageReference, tag: Option<&ImageReference>) -> String {
    if from.image.parse().is_ok_and(|image: ImageReference| image == *to) {
        return from.image.clone();
    }
    let is_tag = |(_, tag): (&str, &str)| !tag.contains('/');
    let name = from.image.split_once('@').map(|(name, _)| name);
    let has_tag = from.tagged || name.and_then(|name| name.rsplit_once(':')).is_some_and(is_tag);
    let tag = tag.filter(|_| has_tag).map(|tag| tag.version.to_string()).unwrap_or_default();
    format!("{}{tag}{}", to.repository, to.version)
}

/// Sets one container of a DaemonSet to an image that may be rolled out. In a live cluster the record also decides
/// ([`field`]); a directory of manifests has version control as its history.
pub(super) fn set_image(
    context: &Context<'_>,
    daemon_set: &DaemonSetFacts,
    container: &str,
    to: ImageReference,
    tag: Option<&ImageReference>,
) -> Result<Decided, HoldReason> {
    let current = daemon_set.containers.iter().find(|other| other.name == container);
    let from = current.map(|current| current.image.clone()).unwrap_or_default();
    let text = current.map_or_else(|| to.to_string(), |current| image_text(current, &to, tag));
    let Some(live) = &daemon_set.live else {
        if from == text {
            return Ok(RolloutDecision::AlreadySet { image: to }.into());
        }
        let mut change = unchanged_fields(daemon_set, &RewriteRecord::default());
        change.expected.insert(container.to_owned(), from.clone());
        change.images.insert(container.to_owned(), text);
        change.required_images.push(to.clone());
        let decision = RolloutDecision::Rewrite { from, to };
        return Ok(Decided { decision, changes: vec![Change::DaemonSet(change)] });
    };
    if live.deleting {
        return Err(HoldReason::Deleting);
    }
    let record = RewriteRecord::of(&live.annotations)?;
    let (current, desired) = (Value::String(from.clone()), Value::String(text.clone()));
    let field = Field {
        record: record.0.get(container),
        current: &current,
        desired: &desired,
        now: context.inputs.now,
        instance: context.inputs.instance,
    };
    let target = LiveTarget { daemon_set, live, container };
    let field_decision = field::decide(&field, |set| pod_progress(context, target, set));
    let change = |entry: FieldRecord, value: Option<&str>| {
        let mut change = unchanged_fields(daemon_set, &record.with(container, entry));
        if let Some(value) = value {
            change.expected.insert(container.to_owned(), from.clone());
            change.images.insert(container.to_owned(), value.to_owned());
        }
        change
    };
    let (decision, change) = match field_decision {
        FieldDecision::Keep => (RolloutDecision::AlreadySet { image: to }, None),
        FieldDecision::UpdateRecord(entry) => {
            (RolloutDecision::AlreadySet { image: to }, Some(change(entry, None)))
        }
        FieldDecision::Set(entry) => {
            let mut change = change(entry, Some(&text));
            change.required_images.push(to.clone());
            (RolloutDecision::Rewrite { from: from.clone(), to }, Some(change))
        }
        // Do not look up the previous image: an image that may be gone from the registry is better than one that does
        // not start.
        FieldDecision::Restore(entry, why) => {
            let previous = entry.replaced.as_str().map(str::to_owned);
            match previous
                .as_deref()
                .and_then(|image| kernel_without_modules(context, daemon_set, &from, image))
            {
                Some(kernel) => {
                    let why = entry.why.unwrap_or_default();
                    (RolloutDecision::Hold(HoldReason::NotRestored { at: entry.at, why, kernel }), None)
                }
                None => (RolloutDecision::Hold(why), Some(change(entry, previous.as_deref()))),
            }
        }
        FieldDecision::Hold(entry, why) => {
            (RolloutDecision::Hold(why), entry.map(|entry| change(entry, None)))
        }
    };
    Ok(Decided { decision, changes: change.into_iter().map(Change::DaemonSet).collect() })
}

/// Returns a kernel whose nodes would lose their modules with an earlier image (guarantee 1): the earlier image is known to
/// have none for the kernel, and the current image has some or has unknown contents.
fn kernel_without_modules(
    context: &Context<'_>,
    daemon_set: &DaemonSetFacts,
    current: &str,
    earlier: &str,
) -> Option<String> {
    let [current, earlier] = [current, earlier].map(|image| context.observed.contents.get(image));
    let earlier = earlier?;
    let object = ReachingObject::daemon_set(daemon_set, context.inputs.snapshot);
    let kernels = Reached::by(&object, context.groups).kernels;
    let has = |image: &ImageContents, kernel: &KernelTarget| image.has(kernel.arch, kernel.release.as_str());
    let loses =
        |kernel: &&&KernelTarget| current.is_none_or(|current| has(current, kernel)) && !has(earlier, kernel);
    kernels.keys().find(loses).map(ToString::to_string)
}

/// Restores the previous image where the current one does not work, or updates its record. This waits neither for kernels
/// to be known nor for builds.
pub(super) fn restore(context: &Context<'_>, target: &RolloutTarget) -> Option<Decided> {
    if !matches!(context.spec, RolloutSpec::Image { .. } | RolloutSpec::Union { .. }) {
        return None;
    }
    let LiveTarget { daemon_set, container, .. } = live_target(context, target).ok()?;
    let image = daemon_set.image_of(container)?.parse().ok()?;
    let decided = set_image(context, daemon_set, container, image, None).ok()?;
    let is_due = matches!(
        decided.decision,
        RolloutDecision::AlreadySet { .. } | RolloutDecision::Hold(HoldReason::RolloutFailed { .. })
    );
    (is_due && !decided.changes.is_empty()).then_some(decided)
}

/// Returns a change that sets nothing new and names all fields that farrier owns in a DaemonSet. An apply gives up fields
/// that it does not name, and the API server removes a field without an owner.
pub(super) fn unchanged_fields(daemon_set: &DaemonSetFacts, record: &RewriteRecord) -> DaemonSetChange {
    let live = daemon_set.live.as_ref();
    let owned = live.map(|live| live.owned.clone()).unwrap_or_default();
    let containers = daemon_set.containers.iter().filter(|container| owned.images.contains(&container.name));
    let images: BTreeMap<String, String> =
        containers.map(|container| (container.name.clone(), container.image.clone())).collect();
    DaemonSetChange {
        namespace: daemon_set.namespace.clone(),
        name: daemon_set.name.clone(),
        version: live.map(|live| live.version.clone()),
        expected: images.clone(),
        images,
        affinity: owned.affinity.then(|| daemon_set.placement.affinity.clone()),
        annotations: live.map(|live| record.annotations(&live.annotations)).unwrap_or_default(),
        required_images: Vec::new(),
    }
}

/// Returns the progress of the pods with the recorded image. Pods that farrier cannot see count as waiting.
fn pod_progress(context: &Context<'_>, target: LiveTarget<'_>, record: &FieldRecord) -> Progress {
    if let Some(progress) = upgrade::progress(context, target) {
        return progress;
    }
    let LiveTarget { daemon_set, live, container } = target;
    let snapshot = context.inputs.snapshot;
    match (record.set.as_str(), context.spec.watch()) {
        (Some(image), Some(watch))
            if snapshot.why_unseen(ObservedKind::Pods, &daemon_set.namespace).is_none() =>
        {
            let pods = snapshot.pods.iter().filter(|pod| pod.daemon_set == live.version.uid);
            let pods = pods.filter(|pod| runs(pod, container, image));
            let limits = Limits::of(watch, live);
            progress(pods, record.at, limits, context.observed.is_registry_down, context.inputs.now)
        }
        _ => Progress::Waiting,
    }
}

#[cfg(test)]
mod tests;
