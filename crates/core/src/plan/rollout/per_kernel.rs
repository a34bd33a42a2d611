//! The strategy `per-kernel`: every kernel gets a copy of the DaemonSet with its own image.
//!
//! One plan takes one kind of step, and the next plan decides from the resulting state of the cluster. It therefore
//! does not matter where a reconcile is interrupted. The order of steps:
//!
//! 1. Create the copies.
//! 2. Keep the original off handed-over nodes (the fence).
//! 3. Hand nodes over: first one as a trial, then as many at once as the DaemonSet allows to be unavailable.

mod fleet;
mod order;
mod original;
mod record;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;

use self::{
    fleet::{Fleet, Image, ReadyImage},
    record::next_record,
};
use super::{
    Change, Context, DaemonSetChange, DaemonSetCopy, DaemonSetRetirement, Decided, HoldReason, NodeChange,
    RewriteRecord, RolloutDecision, RolloutTarget,
    copy::{CopyRecord, DesiredCopy, LiveCopy, copy_name, manifest, original_of},
    handover::{self, HANDED_OVER},
    image::unchanged_fields,
    reached::{unknown_node, unlabeled_node},
    record::QUIET_PERIOD,
};
use crate::{
    image::{Period, RolloutSpec, Watch},
    kernel::KernelTarget,
    plan::{NodeAffinity, NotReadyNode, ObservedKind, PER_KERNEL_ANNOTATION, PlannedUpgrade},
    text::some_of,
};

pub(super) use self::{original::Original, record::OriginalRecord};

/// Changes to make now, each with its description.
#[derive(Default)]
struct Steps {
    changes: Vec<Change>,
    now: Vec<String>,
}

impl Steps {
    fn add(&mut self, change: Change, description: String) {
        self.changes.push(change);
        self.now.push(description);
    }
}

/// Plans the upgrade of the rollout's nodes.
pub(super) fn planned(context: &Context<'_>, target: &RolloutTarget) -> Option<PlannedUpgrade> {
    let fleet = Fleet::observe(context, target).ok()?;
    order::planned(&fleet.rollouts[0].0, &fleet)
}

pub(super) fn decide(context: &Context<'_>, target: &RolloutTarget) -> Result<Decided, HoldReason> {
    let fleet = Fleet::observe(context, target)?;
    let context = &fleet.rollouts[0].0;
    let record = OriginalRecord::read(fleet.original.live);
    if record.rolled_back.is_some() {
        let steps = undo_steps(&fleet.original, &record);
        return if steps.changes.is_empty() { Err(HoldReason::CopiesRolledBack) } else { Ok(decided(steps)) };
    }
    if fleet.members.is_empty() && fleet.original.copies.is_empty() {
        let undetermined = fleet.undetermined.iter().copied();
        return Err(unlabeled_node(undetermined).unwrap_or(HoldReason::NoNodes));
    }
    let RolloutSpec::PerKernel { watch, retire_after, .. } = context.spec else {
        return Err(HoldReason::NOT_FOUND);
    };
    let images = fleet.images();
    let mut steps = Steps::default();
    return_failed_nodes(&fleet, &images, &mut steps);
    let upgrade = order::planned(context, &fleet);
    update_copies(context, &fleet, &images, upgrade.as_ref(), *watch, *retire_after, &mut steps)?;
    if !fleet.original.is_fenced() {
        let fenced = fence(context, &fleet, &images, record, &mut steps);
        // Other steps do not wait for the fence.
        if steps.changes.is_empty() {
            fenced?;
        }
    } else if let Some(detail) =
        context.inputs.snapshot.why_unseen(ObservedKind::Pods, &fleet.original.facts.namespace)
    {
        if steps.changes.is_empty() {
            return Err(HoldReason::Unreadable { detail: detail.clone() });
        }
    } else if context.spec.upgrade().is_none() {
        hand_over(&fleet, &images, &mut steps);
    }
    if !steps.changes.is_empty() {
        return Ok(decided(steps));
    }
    final_decision(&fleet, &images)
}

fn decided(steps: Steps) -> Decided {
    Decided { decision: RolloutDecision::Steps { now: steps.now }, changes: steps.changes }
}

/// Returns the next step of `farrier rollback`: marks the original as rolled back, so that no node is handed over again,
/// then returns all nodes to it. Empty when nothing is left to do.
pub(super) fn rollback(original: &Original<'_>, now: Timestamp) -> Vec<Change> {
    let mut record = OriginalRecord::read(original.live);
    if record.rolled_back.is_none() {
        record.rolled_back = Some(now);
        return vec![Change::DaemonSet(original.change_of_record(&record))];
    }
    undo_steps(original, &record).changes
}

/// Returns the next steps that undo the rollout. The handover labels go first, while the copies still exist: a node
/// without the label belongs to the original.
fn undo_steps(original: &Original<'_>, record: &OriginalRecord) -> Steps {
    let mut steps = Steps::default();
    for node in original.marked_nodes() {
        let description = format!("returns node {} to DaemonSet {}", node.name, original.facts.name);
        steps.add(set_handover(&node.name, &original.label, false), description);
    }
    if steps.changes.is_empty() && original.is_fenced() {
        let description = format!("restores the node affinity of DaemonSet {}", original.facts.name);
        steps.add(original.write(original.base.affinity.clone(), record), description);
    }
    if steps.changes.is_empty() {
        for copy in original.copies.values().filter(|copy| !copy.live.deleting) {
            let description = format!("deletes DaemonSet {}", copy.facts.name);
            steps.add(retirement(&original.facts.namespace, copy), description);
        }
    }
    steps
}

/// Returns nodes to the original if their kernel has neither a copy nor an image, or if the copy's image failed and does
/// not work on the node. Skips kernels for which the original is known to have no modules either.
fn return_failed_nodes(fleet: &Fleet<'_>, images: &BTreeMap<KernelTarget, Image>, steps: &mut Steps) {
    if fleet.original.copies.is_empty() && !fleet.original.is_fenced() {
        for node in fleet.original.marked_nodes() {
            let description =
                format!("removes the handover label of an earlier rollout from node {}", node.name);
            steps.add(set_handover(&node.name, &fleet.original.label, false), description);
        }
        return;
    }
    for member in fleet.members.iter().filter(|member| member.handed_over) {
        let Ok(kernel) = member.target else { continue };
        if fleet.original_lacks(kernel) {
            continue;
        }
        let why = match fleet.original.copies.get(kernel) {
            None if images.get(kernel).and_then(Image::ready).is_none() => "there is no image for its kernel",
            Some(copy) if !copy.record.as_ref().is_some_and(CopyRecord::is_failed) => continue,
            Some(copy) if !fleet.is_ready(copy, &member.node.name) => "its pod did not become ready",
            Some(copy) if fleet.has_failed(copy, member.node) => "its driver did not work",
            _ => continue,
        };
        let (node, original) = (&member.node.name, &fleet.original.facts.name);
        steps.add(
            set_handover(node, &fleet.original.label, false),
            format!("returns node {node} to DaemonSet {original}: {why}"),
        );
    }
}

/// Creates copies, updates outdated ones, and deletes those that are no longer needed.
fn update_copies(
    context: &Context<'_>,
    fleet: &Fleet<'_>,
    images: &BTreeMap<KernelTarget, Image>,
    upgrade: Option<&PlannedUpgrade>,
    watch: Watch,
    retire_after: Period,
    steps: &mut Steps,
) -> Result<(), HoldReason> {
    let now = context.inputs.now;
    let kernels: BTreeSet<&KernelTarget> = images.keys().chain(fleet.original.copies.keys()).collect();
    for kernel in kernels {
        let copy = fleet.original.copies.get(kernel);
        if copy.is_some_and(|copy| copy.live.deleting || !copy.belongs_to(fleet.original.live)) {
            continue;
        }
        let image = images.get(kernel).and_then(Image::ready);
        let Some(record) = next_record(context, fleet, copy, image, watch, upgrade) else { continue };
        let unused_since = match copy {
            Some(copy) if !fleet.is_used(context.groups, kernel) => Some(copy.unused_since.unwrap_or(now)),
            _ => None,
        };
        if let Some(copy) = copy
            && let (Some(since), Some(_)) = (copy.unused_since, unused_since)
            && now.duration_since(since).unsigned_abs() >= retire_after.duration()
            && now > since
        {
            let description =
                format!("deletes DaemonSet {}: no node has run {kernel} since {since:.0}", copy.facts.name);
            steps.add(retirement(&fleet.original.facts.namespace, copy), description);
            continue;
        }
        let Some(name) =
            copy.map(|copy| copy.facts.name.clone()).or_else(|| copy_name(fleet.original.facts, kernel))
        else {
            continue;
        };
        let desired = DesiredCopy {
            original: fleet.original.facts,
            containers: &fleet.containers,
            handover: &fleet.original.label,
            name: &name,
            target: kernel,
            record: &record,
            unused_since,
        };
        let manifest = manifest(&desired).ok_or_else(|| HoldReason::Unreadable {
            detail: format!("DaemonSet {} is not a valid DaemonSet", fleet.original.facts.name),
        })?;
        let same_image = copy.is_some_and(|copy| copy.has_images(&fleet.containers, &record.image));
        if same_image && copy.is_some_and(|copy| copy.matches(&manifest)) {
            continue;
        }
        let description = match copy {
            None => format!("creates DaemonSet {name} for {kernel} with {}", record.image),
            Some(_) if !same_image => format!("DaemonSet {name} gets {}", record.image),
            Some(_) if unused_since.is_some() => {
                format!("DaemonSet {name} is kept for a while: no node runs {kernel}")
            }
            Some(_) => format!("brings DaemonSet {name} up to date"),
        };
        // As in the other strategies, do not look up a previous image: an image that may be gone from the registry is
        // better than one that does not start.
        let is_new = |image: &&ReadyImage| !same_image && image.text == record.image;
        let required_images = image.filter(is_new).map(|image| image.references.clone()).unwrap_or_default();
        let change = DaemonSetCopy {
            namespace: fleet.original.facts.namespace.clone(),
            name,
            version: copy.map(|copy| copy.live.version.clone()),
            manifest,
            required_images,
        };
        steps.add(Change::Copy(change), description);
    }
    Ok(())
}

fn retirement(namespace: &str, copy: &LiveCopy<'_>) -> Change {
    Change::Retire(DaemonSetRetirement {
        namespace: namespace.to_owned(),
        name: copy.facts.name.clone(),
        version: copy.live.version.clone(),
    })
}

/// Keeps the original off handed-over nodes, as soon as there is a copy to hand a node over to. No pod moves, because
/// no node is handed over yet.
fn fence(
    context: &Context<'_>,
    fleet: &Fleet<'_>,
    images: &BTreeMap<KernelTarget, Image>,
    mut record: OriginalRecord,
    steps: &mut Steps,
) -> Result<(), HoldReason> {
    let runs =
        |kernel: &KernelTarget| fleet.members.iter().any(|member| member.target.as_ref() == Ok(kernel));
    let has_copies = !fleet.original.copies.is_empty();
    let needed = images.keys().any(|kernel| fleet.accepts(kernel, images) && runs(kernel))
        || fleet.members.iter().any(|member| has_copies && member.handed_over && member.target.is_ok());
    if !needed {
        return Ok(());
    }
    if let Some(at) = record.fenced_at {
        let is_quiet = context.inputs.now.duration_since(at) >= QUIET_PERIOD;
        record.undone = if is_quiet { 1 } else { record.undone + 1 };
        if record.undone >= 2 {
            return Err(HoldReason::FenceUndone { times: record.undone });
        }
    }
    record.fenced_at = Some(context.inputs.now);
    let affinity = handover::fenced(&fleet.original.facts.placement.affinity, &fleet.original.label);
    let description =
        format!("keeps DaemonSet {} off nodes that have been handed over", fleet.original.facts.name);
    steps.add(fleet.original.write(affinity, &record), description);
    Ok(())
}

/// Hands nodes over, starting with nodes whose original pod does not work: they do not wait for `maxUnavailable`. Skips nodes
/// that would get no pod, because the rollout would wait for them forever. Skips nodes that are not Ready, because their pods
/// would count as failures of the image.
fn hand_over(fleet: &Fleet<'_>, images: &BTreeMap<KernelTarget, Image>, steps: &mut Steps) {
    let limit = handover::unavailable_limit(fleet.original.live.max_unavailable, fleet.members.len());
    let is_unavailable = |member: &&fleet::Member<'_>| {
        member.handed_over
            && !handover::is_in_maintenance(member.node)
            && !fleet.has_ready_copy(&member.node.name)
    };
    let mut free = limit.saturating_sub(fleet.members.iter().filter(is_unavailable).count());
    let mut candidates: Vec<_> = fleet
        .members
        .iter()
        .filter(|member| !member.handed_over && !handover::is_in_maintenance(member.node))
        .filter(|member| fleet.can_get_pods(member.node))
        .filter_map(|member| Some((member.node, member.target.as_ref().ok()?)))
        .collect();
    candidates.sort_by_key(|(node, _)| (fleet.original_is_ready_on(&node.name), &node.name));
    let mut unready_counts: BTreeMap<&KernelTarget, usize> = BTreeMap::new();
    for (node, kernel) in candidates {
        let Some(copy) = fleet.original.copies.get(kernel).filter(|_| fleet.accepts(kernel, images)) else {
            continue;
        };
        let has_driver = fleet.original_is_ready_on(&node.name);
        if (has_driver && free == 0) || !fleet.would_schedule(copy, node) {
            continue;
        }
        let is_good = copy.record.as_ref().is_some_and(|record| record.good);
        let unready = unready_counts.entry(kernel).or_insert_with(|| fleet.unready_count(copy, kernel));
        if !is_good && *unready > 0 {
            continue;
        }
        *unready += 1;
        free = free.saturating_sub(1);
        let description = format!("hands node {} over to DaemonSet {}", node.name, copy.facts.name);
        steps.add(set_handover(&node.name, &fleet.original.label, true), description);
    }
}

fn set_handover(node: &str, label: &str, on: bool) -> Change {
    Change::Node(NodeChange {
        name: node.to_owned(),
        labels: [(label.to_owned(), on.then(|| HANDED_OVER.to_owned()))].into(),
        ..NodeChange::default()
    })
}

/// Returns the decision when no change is left to make.
fn final_decision(fleet: &Fleet<'_>, images: &BTreeMap<KernelTarget, Image>) -> Result<Decided, HoldReason> {
    for (kernel, copy) in fleet.original.copies.iter().filter(|(kernel, _)| images.contains_key(*kernel)) {
        if let Some(failed) = copy.record.as_ref().and_then(|record| record.failed.as_ref()) {
            return Err(failed.hold(kernel));
        }
    }
    if let Some(Image::Building(on)) = images.values().find(|image| matches!(image, Image::Building(_))) {
        return Ok(RolloutDecision::Pending { on: on.clone() }.into());
    }
    if let Some(why) = images.values().find_map(Image::absence) {
        return Err(why.clone());
    }
    let mut copies = fleet.original.copies.values().filter(|copy| !copy.live.deleting);
    if let Some(copy) = copies.find(|copy| original_of(copy.live).is_none()) {
        return Err(HoldReason::CopyWithoutOwner { copy: copy.facts.name.clone() });
    }
    let unfinished: Vec<&str> = fleet.unfinished().map(|node| node.name.as_str()).collect();
    if !unfinished.is_empty() {
        let not_ready = NotReadyNode::first(fleet.unfinished()).map(|node| format!("; {node}"));
        let nodes = some_of(&unfinished, 3);
        let description = format!("waits for node {nodes}{}", not_ready.unwrap_or_default());
        return Ok(RolloutDecision::Steps { now: vec![description] }.into());
    }
    if let Some(why) = unknown_node(fleet.unknown_without_pod().iter().map(|(node, why)| (*node, why))) {
        return Err(why);
    }
    let kernels = fleet.original.copies.len();
    let nodes = fleet.members.iter().filter(|member| member.handed_over).count();
    let how = format!("{nodes} nodes, {kernels} kernels, a DaemonSet for each kernel");
    Ok(RolloutDecision::Settled { how }.into())
}

impl Original<'_> {
    /// Returns the change that sets the node affinity of the original.
    fn write(&self, affinity: NodeAffinity, record: &OriginalRecord) -> Change {
        Change::DaemonSet(DaemonSetChange { affinity: Some(affinity), ..self.change_of_record(record) })
    }

    /// Returns the change that sets nothing but the record.
    fn change_of_record(&self, record: &OriginalRecord) -> DaemonSetChange {
        // A record of other rollouts that cannot be parsed stays as it is.
        let rewrites = RewriteRecord::of(&self.live.annotations).unwrap_or_default();
        let mut change = unchanged_fields(self.facts, &rewrites);
        change.annotations.insert(PER_KERNEL_ANNOTATION.to_owned(), record.to_text());
        change
    }
}
