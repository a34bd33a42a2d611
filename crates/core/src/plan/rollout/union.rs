//! Pure: the strategy `union`: one image holds the modules for every kernel that the DaemonSet's nodes run, that was
//! announced, or that left only a while ago.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
};

use jiff::Timestamp;

use super::{
    Change, Context, DaemonSetFacts, Decided, HoldReason, Record, RolloutDecision, RolloutTarget,
    daemon_set::original,
    image::{naming, set_image},
    no_image,
    reached::{Reached, unknown_node},
    restart::restarts,
};
use crate::{
    image::{Digest, ImageReference, Period, RolloutSpec},
    kernel::{KernelRelease, KernelTarget},
    plan::{
        ImageContents, LiveDaemonSet, NodeFacts, NodeReason, UpdateStrategy,
        guarantee::{MadeFor, passing},
        node::NodeGroup,
        outcome::State,
        union::{MAX_MEMBERS, PlannedUnion},
    },
};

/// On the DaemonSet: since when which kernels of its image are run by no node, as JSON.
const LEFT: &str = "farrier.dev/union-left";

/// Kernels that a DaemonSet's next union may hold still, though no node runs them, with the time since when that is so.
pub(in crate::plan) fn left_kernels(annotations: &BTreeMap<String, String>) -> BTreeMap<String, Timestamp> {
    annotations.get(LEFT).and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default()
}

/// What the image of a DaemonSet is to be.
struct Wanted<'a> {
    found: &'a DaemonSetFacts,
    live: &'a LiveDaemonSet,
    container: &'a str,
    /// The image, or what is waited for.
    image: Result<PlannedUnion, ImageReference>,
    left: BTreeMap<String, Timestamp>,
}

/// Decides one target, with the union image that it asks for.
pub(super) fn decide(
    context: &Context<'_>,
    target: &RolloutTarget,
) -> (Result<Decided, HoldReason>, Option<PlannedUnion>) {
    let wanted = match wanted(context, target) {
        Ok(wanted) => wanted,
        Err(why) => return (Err(why), None),
    };
    match &wanted.image {
        Ok(union) => (set(context, &wanted, union), Some(union.clone())),
        Err(on) => (Ok(RolloutDecision::Pending { on: on.clone() }.into()), None),
    }
}

/// Sets the union image, once it is published.
fn set(context: &Context<'_>, wanted: &Wanted<'_>, union: &PlannedUnion) -> Result<Decided, HoldReason> {
    let Wanted { found, live, container, image: _, left } = wanted;
    let Some(published) = context.inputs.observed.image(&union.reference, union.architecture) else {
        return Ok(RolloutDecision::Pending { on: union.reference.clone() }.into());
    };
    let made_for = MadeFor::Members(union.input_hash);
    let to = passing(context.inputs, context.image, published, &union.reference, made_for)?;
    let mut decided = set_image(context, found, container, to)?;
    note_left(found, live, left, &mut decided);
    if matches!(decided.decision, RolloutDecision::AlreadySet { .. }) {
        decided.changes.extend(restarts(context, found, live, container));
    }
    Ok(decided)
}

fn wanted<'a>(context: &Context<'a>, target: &'a RolloutTarget) -> Result<Wanted<'a>, HoldReason> {
    let RolloutSpec::Union { drop_after, .. } = context.spec else { return Err(HoldReason::NotFound) };
    let (found, live, container) = original(context, target)?;
    let image = found.image_of(container);
    let current = image.and_then(|image| context.inputs.observed.contents.get(image));
    let Reached { kernels: live_kernels, unknown } = Reached::by(found, context.groups)?;
    if live_kernels.is_empty() && unknown.is_empty() {
        return Err(HoldReason::NoNodes);
    }
    let mut members = Members::default();
    let announced = context.announced().filter(|cell| cell.outcome.cell().is_some()).map(|cell| &cell.target);
    // Kernels that nodes run go before those that they may run one day.
    let announced = announced.take(MAX_MEMBERS.saturating_sub(live_kernels.len()));
    let all: BTreeSet<&KernelTarget> = live_kernels.keys().copied().chain(announced).collect();
    for kernel in &all {
        members.add(context, kernel, current)?;
    }
    let left = members.keep(context, live, current, &all, *drop_after);
    let done = |image| Ok(Wanted { found, live, container, image, left });

    let spared = |kernel: &str| {
        // A pod that is not restarted keeps its image, and a kernel that has no modules in either has nothing to lose.
        live.update == UpdateStrategy::OnDelete
            && current.is_some_and(|current| !current.kernels.contains(kernel))
    };
    for kernel in live_kernels.keys().filter(|kernel| !members.has(kernel.release.as_str())) {
        match members.building.get(*kernel) {
            _ if spared(kernel.release.as_str()) => {}
            Some(on) => return done(Err(on.clone())),
            None => {
                let reason = members.missing.remove(*kernel);
                return Err(reason.unwrap_or_else(|| no_image(kernel, String::new())));
            }
        }
    }
    let is_harmed = |(node, _): &(&NodeFacts, &NodeReason)| {
        let release = &node.kernel_version;
        live.update == UpdateStrategy::RollingUpdate || !(members.has(release) || spared(release))
    };
    if let Some(why) = unknown_node(unknown.into_iter().filter(is_harmed)) {
        return Err(why);
    }
    // One rewrite rather than two, where no node waits for the first.
    let is_served = |kernel: &&&KernelTarget| {
        current.is_some_and(|current| current.kernels.contains(kernel.release.as_str()))
            || !members.has(kernel.release.as_str())
    };
    if let Some(on) = members.building.values().next()
        && live_kernels.keys().all(|kernel| is_served(&kernel))
    {
        return done(Err(on.clone()));
    }
    let union = members.union(context, &all)?;
    done(Ok(union))
}

/// What goes into the image.
#[derive(Default)]
struct Members {
    images: BTreeMap<KernelRelease, Digest>,
    building: BTreeMap<KernelTarget, ImageReference>,
    missing: BTreeMap<KernelTarget, HoldReason>,
}

impl Members {
    fn has(&self, release: &str) -> bool {
        self.images.keys().any(|kernel| kernel.as_str() == release)
    }

    /// Adds the kernel's image: the published one, or while there is none the one in the image that is in use.
    fn add(
        &mut self,
        context: &Context<'_>,
        kernel: &KernelTarget,
        current: Option<&ImageContents>,
    ) -> Result<(), HoldReason> {
        let reason = match context.cells.state(context.image, kernel) {
            State::Published(cell, published) => match context.passing(cell, published) {
                Ok(_) => return self.insert(kernel, &published.digest),
                Err(reason) => reason,
            },
            State::Building(cell) => {
                self.building.insert(kernel.clone(), cell.reference.clone());
                return Ok(());
            }
            State::Absent(absence) => {
                let held = current.filter(|_| absence.cell.is_some());
                if let Some(digest) = held.and_then(|held| held.members.get(kernel.release.as_str())) {
                    return self.insert(kernel, digest);
                }
                no_image(kernel, absence.why)
            }
        };
        self.missing.insert(kernel.clone(), reason);
        Ok(())
    }

    /// Two targets with one release would lie over each other in `/lib/modules`.
    fn insert(&mut self, kernel: &KernelTarget, digest: &Digest) -> Result<(), HoldReason> {
        match self.images.insert(kernel.release.clone(), digest.clone()) {
            Some(other) if other != *digest => Err(HoldReason::NoUnion {
                detail: format!("two kernel targets have the release {}", kernel.release),
            }),
            _ => Ok(()),
        }
    }

    /// Keeps kernels that no node runs any more for their grace time, and says since when that is. Only as long as the
    /// image is still made from the same things, as payloads of two driver versions do not belong in one image; and only
    /// while there is room: those that left last are kept first.
    fn keep(
        &mut self,
        context: &Context<'_>,
        live: &LiveDaemonSet,
        current: Option<&ImageContents>,
        wanted: &BTreeSet<&KernelTarget>,
        drop_after: Period,
    ) -> BTreeMap<String, Timestamp> {
        let Some(current) = current else { return BTreeMap::new() };
        let is_alike =
            self.images.iter().any(|(kernel, digest)| current.members.get(kernel.as_str()) == Some(digest));
        let before = left_kernels(&live.annotations);
        let is_unknown = |group: &NodeGroup<'_>| group.target.as_ref().is_err_and(|why| !why.is_distrust());
        let now = context.inputs.now;
        let mut left = BTreeMap::new();
        let mut kept = Vec::new();
        for (release, digest) in current.members.iter().filter(|_| is_alike) {
            let Ok(kernel) = release.parse::<KernelRelease>() else { continue };
            if wanted.iter().any(|target| target.release == kernel) {
                continue;
            }
            // A node whose labels are gone for a moment still says what it runs.
            let may_run = context
                .groups
                .iter()
                .any(|group| is_unknown(group) && group.sample.kernel_version == *release);
            let since = before.get(release).copied().unwrap_or(now);
            let is_over = now > since && now.duration_since(since).unsigned_abs() >= drop_after.duration();
            if may_run || !is_over {
                kept.push(((!may_run).then_some(since), kernel, digest));
            }
        }
        // Those that a node may still run, then the last that left.
        kept.sort_by(|(a, kernel, _), (b, other, _)| {
            (a.is_some(), Reverse(a), kernel).cmp(&(b.is_some(), Reverse(b), other))
        });
        for (since, kernel, digest) in kept.into_iter().take(MAX_MEMBERS.saturating_sub(wanted.len())) {
            left.extend(since.map(|since| (kernel.to_string(), since)));
            self.images.insert(kernel, digest.clone());
        }
        left
    }

    fn union(
        &self,
        context: &Context<'_>,
        kernels: &BTreeSet<&KernelTarget>,
    ) -> Result<PlannedUnion, HoldReason> {
        let architectures: BTreeSet<_> = kernels.iter().map(|kernel| kernel.arch.as_str()).collect();
        if architectures.len() > 1 {
            let all: Vec<_> = architectures.into_iter().collect();
            return Err(HoldReason::NoUnion { detail: format!("its kernels are for {}", all.join(" and ")) });
        }
        if self.images.len() > MAX_MEMBERS {
            let detail = format!(
                "{} kernels are more than {MAX_MEMBERS}, for which an image has layers",
                self.images.len()
            );
            return Err(HoldReason::NoUnion { detail });
        }
        let cell = context.cells.of(context.image).find_map(|planned| planned.outcome.cell());
        let (Some(cell), Some(kernel), false) = (cell, kernels.first(), self.images.is_empty()) else {
            return Err(self.missing.values().next().cloned().unwrap_or(HoldReason::NoNodes));
        };
        PlannedUnion::new(context.image, &cell.version, &cell.reference.repository, kernel.arch, &self.images)
            .ok_or_else(|| HoldReason::NoUnion { detail: format!("version {:?} gives no tag", cell.version) })
    }
}

/// Writes down since when kernels are unused: with a change that is made anyhow, or by itself when that differs.
fn note_left(
    found: &DaemonSetFacts,
    live: &LiveDaemonSet,
    left: &BTreeMap<String, Timestamp>,
    decided: &mut Decided,
) {
    let text = if left.is_empty() { None } else { serde_json::to_string(left).ok() };
    let is_noted = live.annotations.get(LEFT) == text.as_ref();
    let has_change = decided.changes.iter().any(|change| matches!(change, Change::DaemonSet(_)));
    if !has_change && !is_noted && matches!(decided.decision, RolloutDecision::AlreadySet { .. }) {
        let record = Record::of(&live.annotations).unwrap_or_default();
        decided.changes.push(Change::DaemonSet(naming(found, &record)));
    }
    for change in &mut decided.changes {
        let Change::DaemonSet(change) = change else { continue };
        match &text {
            Some(text) => drop(change.annotations.insert(LEFT.to_owned(), text.clone())),
            None => drop(change.annotations.remove(LEFT)),
        }
    }
}

#[cfg(test)]
mod tests;
