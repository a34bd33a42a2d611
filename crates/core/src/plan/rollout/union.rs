//! The strategy `union`: one image holds the modules for all kernels of the DaemonSet. These are the kernels that nodes run,
//! announced kernels, and kernels that no node has run for a short time. Nodes of several architectures get an index with
//! one such image per architecture.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
};

use jiff::Timestamp;

use super::{
    Change, Context, Decided, HoldReason, RewriteRecord, RolloutDecision, RolloutTarget,
    daemon_set::{LiveTarget, live_target},
    image::{set_image, unchanged_fields},
    no_image,
    reached::{Reached, check_supported, runs_one_of, unknown_node, unlabeled_node},
    restart::restarts,
};
use crate::{
    image::{Digest, ImageReference, Period, RolloutSpec},
    kernel::{Architecture, KernelRelease, KernelTarget},
    plan::{
        ImageContents, LiveDaemonSet, NodeFacts, ReachingObject, UpdateStrategy,
        guarantee::{RequiredKernels, admissible_image},
        node::NodeGroup,
        outcome::CellState,
        union::{MAX_MEMBERS, PlannedUnion, UnionMember, UnionMembers},
    },
};

/// On the DaemonSet: kernels of its image that no node runs, each with the time of the last use, as JSON. In an image
/// for several architectures, each kernel has its architecture as a prefix: `arm64/6.8.0-45-generic`.
const UNION_LEFT: &str = "farrier.dev/union-left";

/// Returns the unused kernels that a DaemonSet's next union may keep, each with the time of the last use.
pub(in crate::plan) fn unused_kernels(annotations: &BTreeMap<String, String>) -> BTreeMap<String, Timestamp> {
    annotations.get(UNION_LEFT).and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default()
}

/// Returns the kernel release in a key of [`unused_kernels`].
pub(in crate::plan) fn release_of_key(key: &str) -> &str {
    key.rsplit('/').next().unwrap_or(key)
}

/// Desired state of a DaemonSet.
enum Desired<'a> {
    /// Images to set, one for each architecture. `unused` has the kernels in them that no node runs ([`UNION_LEFT`]).
    Unions { target: LiveTarget<'a>, unions: Vec<PlannedUnion>, unused: BTreeMap<String, Timestamp> },
    /// Image to wait for.
    Pending(ImageReference),
}

/// Decides one target, and returns the union images that it asks for.
pub(super) fn decide(
    context: &Context<'_>,
    target: &RolloutTarget,
) -> (Result<Decided, HoldReason>, Vec<PlannedUnion>) {
    match desired(context, target) {
        Err(why) => (Err(why), Vec::new()),
        Ok(Desired::Pending(on)) => (Ok(RolloutDecision::Pending { on }.into()), Vec::new()),
        Ok(Desired::Unions { target, unions, unused }) => match rejected(context, target, &unions) {
            Some(why) => (Err(why), Vec::new()),
            None => (set(context, target, &unions, &unused), unions),
        },
    }
}

/// Returns the hold for a union that contains only members of an image that failed or was rolled back. Once the
/// previous image is restored, kernels that no node runs can drop out of the union. The union then is a different image
/// with the same rejected modules.
fn rejected(context: &Context<'_>, target: LiveTarget<'_>, unions: &[PlannedUnion]) -> Option<HoldReason> {
    let LiveTarget { daemon_set, live, container } = target;
    let record = RewriteRecord::of(&live.annotations).ok()?.0.remove(container)?;
    let has_all = |image: &str| {
        let contents = context.observed.contents.get(image);
        let has = |union: &PlannedUnion, member: &UnionMember| {
            let contents = contents.and_then(|contents| contents.for_architecture(union.architecture));
            contents.and_then(|contents| contents.members.get(member.kernel.as_str())) == Some(&member.digest)
        };
        unions.iter().all(|union| union.members.iter().all(|member| has(union, member)))
    };
    let is_rejected = has_all(record.set.as_str()?) && !has_all(daemon_set.image_of(container)?);
    record.refused().filter(|_| is_rejected)
}

/// Sets the union image, once it is published for every architecture.
fn set(
    context: &Context<'_>,
    target: LiveTarget<'_>,
    unions: &[PlannedUnion],
    unused: &BTreeMap<String, Timestamp>,
) -> Result<Decided, HoldReason> {
    let observed = context.observed;
    let mut to = Err(HoldReason::NoNodes);
    for union in unions {
        if let Some(why) = observed.lookup_error(&union.reference) {
            let kernel = format!("{} kernels", union.members.len());
            let detail = format!("{}: {why}", union.reference);
            return Err(HoldReason::NoImage { kernel, detail });
        }
        let Some(published) = observed.image(&union.reference, union.architecture) else {
            return Ok(RolloutDecision::Pending { on: union.reference.clone() }.into());
        };
        let made_for = RequiredKernels::Members(union.input_hash);
        to = Ok(admissible_image(
            context.inputs,
            observed,
            context.image,
            published,
            &union.reference,
            made_for,
        )?);
    }
    if let [PlannedUnion { reference, .. }, _, ..] = unions
        && let Some(index) = observed.published.get(reference)
    {
        to = Ok(index.pinned(reference));
    }
    let tag = unions.last().map(|union| &union.reference);
    let mut decided = set_image(context, target.daemon_set, target.container, to?, tag)?;
    record_unused(target, unused, &mut decided);
    if matches!(decided.decision, RolloutDecision::AlreadySet { .. }) {
        decided.changes.extend(restarts(context, target));
    }
    Ok(decided)
}

fn desired<'a>(context: &Context<'a>, target: &RolloutTarget) -> Result<Desired<'a>, HoldReason> {
    let RolloutSpec::Union { drop_after, .. } = context.spec else { return Err(HoldReason::NOT_FOUND) };
    let target = live_target(context, target)?;
    let LiveTarget { daemon_set, live, container } = target;
    let current = daemon_set.image_of(container).and_then(|image| context.observed.contents.get(image));
    check_supported(&daemon_set.placement)?;
    let object = ReachingObject::daemon_set(daemon_set, context.inputs.snapshot);
    let reached = Reached::by(&object, context.groups);
    if reached.kernels.is_empty() && reached.unknown.is_empty() {
        return Err(unlabeled_node(reached.undetermined.into_iter()).unwrap_or(HoldReason::NoNodes));
    }
    let mut kernels: BTreeSet<&KernelTarget> = reached.kernels.keys().copied().collect();
    if let Some((kernel, other)) =
        kernels.iter().find_map(|kernel| Some((kernel, overlapping(kernel, &kernels)?)))
    {
        let detail = format!("the modules for {kernel} and for {other} have one directory");
        return Err(HoldReason::NoUnion { detail });
    }
    let announced = context.announced().filter(|cell| cell.outcome.cell().is_some()).map(|cell| &cell.target);
    // Kernels that nodes run take precedence over announced ones.
    for kernel in announced {
        let has_room = kernels.iter().filter(|other| other.arch == kernel.arch).count() < MAX_MEMBERS;
        if has_room && overlapping(kernel, &kernels).is_none() {
            kernels.insert(kernel);
        }
    }
    let mut members = Members::default();
    for kernel in &kernels {
        members.add(context, kernel, current);
    }
    let unused = members.keep(context, live, current, &kernels, *drop_after);
    if let Some(on) = members.awaited_build(live, current, reached)? {
        return Ok(Desired::Pending(on));
    }
    Ok(Desired::Unions { target, unions: members.unions(context)?, unused })
}

/// Returns another kernel whose modules would overlap in `/lib/modules` with `kernel`'s modules: two operating systems can have
/// kernels of one release.
fn overlapping<'a>(kernel: &KernelTarget, kernels: &BTreeSet<&'a KernelTarget>) -> Option<&'a KernelTarget> {
    let KernelTarget { os: _, os_version: _, release, arch } = kernel;
    let is_overlapping =
        |other: &&KernelTarget| *other != kernel && (&other.release, &other.arch) == (release, arch);
    kernels.iter().copied().find(is_overlapping)
}

/// Images that go into the unions.
#[derive(Default)]
struct Members {
    images: UnionMembers,
    building: BTreeMap<KernelTarget, ImageReference>,
    missing: BTreeMap<KernelTarget, HoldReason>,
}

impl Members {
    fn has(&self, arch: Architecture, release: &str) -> bool {
        let images = self.images.get(&arch);
        images.is_some_and(|images| images.keys().any(|kernel| kernel.as_str() == release))
    }

    /// Adds the kernel's image: the published one, or as a fallback the one in the current image.
    fn add(&mut self, context: &Context<'_>, kernel: &KernelTarget, current: Option<&ImageContents>) {
        let reason = match context.cells.state(context.image, kernel) {
            CellState::Published(cell, published) => match context.admissible_image(cell, published) {
                Ok(_) => return self.insert(kernel, &published.digest),
                Err(reason) => reason,
            },
            CellState::ToBuild(cell) => {
                self.building.insert(kernel.clone(), cell.reference.clone());
                return;
            }
            CellState::Absent(absence) => {
                let current = current.and_then(|current| current.for_architecture(kernel.arch));
                let fallback = current.filter(|_| absence.cell.is_some());
                if let Some(digest) = fallback.and_then(|image| image.members.get(kernel.release.as_str())) {
                    return self.insert(kernel, digest);
                }
                no_image(kernel, absence.why)
            }
        };
        self.missing.insert(kernel.clone(), reason);
    }

    fn insert(&mut self, kernel: &KernelTarget, digest: &Digest) {
        self.images.entry(kernel.arch).or_default().insert(kernel.release.clone(), digest.clone());
    }

    /// Keeps kernels that no node runs any more for their grace time, and returns the time since which each is unused. Kernels
    /// are kept only while the images are built from the same inputs, because payloads of two driver versions do not
    /// belong in one image. If the image would have too many members, the kernels that left last are kept.
    fn keep(
        &mut self,
        context: &Context<'_>,
        live: &LiveDaemonSet,
        current: Option<&ImageContents>,
        desired: &BTreeSet<&KernelTarget>,
        drop_after: Period,
    ) -> BTreeMap<String, Timestamp> {
        let Some(current) = current else { return BTreeMap::new() };
        let earlier = unused_kernels(&live.annotations);
        let now = context.inputs.now;
        let mut unused = Vec::new();
        for arch in self.unchanged_architectures(current) {
            let Some(contents) = current.for_architecture(arch) else { continue };
            let desired: BTreeSet<&KernelRelease> =
                desired.iter().filter(|target| target.arch == arch).map(|target| &target.release).collect();
            let mut retained = Vec::new();
            for (release, digest) in &contents.members {
                let Ok(kernel) = release.parse::<KernelRelease>() else { continue };
                if desired.contains(&kernel) {
                    continue;
                }
                let since = earlier.get(&format!("{arch}/{release}")).or_else(|| earlier.get(release));
                let since = since.copied().unwrap_or(now);
                let has_expired =
                    now > since && now.duration_since(since).unsigned_abs() >= drop_after.duration();
                let may_run = may_run(context.groups, release);
                if may_run || !has_expired {
                    retained.push(((!may_run).then_some(since), kernel, digest));
                }
            }
            // Kernels that a node may still run come first, then the most recently unused ones.
            retained.sort_by(|(a, kernel, _), (b, other, _)| {
                (a.is_some(), Reverse(a), kernel).cmp(&(b.is_some(), Reverse(b), other))
            });
            for (since, kernel, digest) in
                retained.into_iter().take(MAX_MEMBERS.saturating_sub(desired.len()))
            {
                unused.extend(since.map(|since| (arch, kernel.clone(), since)));
                self.images.entry(arch).or_default().insert(kernel, digest.clone());
            }
        }
        let key = |arch, kernel| match self.images.len() {
            0 | 1 => format!("{kernel}"),
            _ => format!("{arch}/{kernel}"),
        };
        unused.into_iter().map(|(arch, kernel, since)| (key(arch, kernel), since)).collect()
    }

    /// Returns the architectures whose images share a member with the current image. An architecture without desired
    /// kernels is included if any other architecture is.
    fn unchanged_architectures(&self, current: &ImageContents) -> Vec<Architecture> {
        let shares_member = |arch: Architecture| {
            let (new, old) = (self.images.get(&arch)?, current.for_architecture(arch)?);
            Some(new.iter().any(|(kernel, digest)| old.members.get(kernel.as_str()) == Some(digest)))
        };
        let all: BTreeSet<Architecture> =
            self.images.keys().chain(current.platforms.keys()).copied().collect();
        let any = all.iter().any(|arch| shares_member(*arch) == Some(true));
        all.into_iter().filter(|arch| shares_member(*arch).unwrap_or(any)).collect()
    }

    /// Returns the image whose build the rollout waits for, if any. Fails if a node would be left without modules: there is no
    /// image for its kernel, or its kernel is unknown.
    fn awaited_build(
        &self,
        live: &LiveDaemonSet,
        current: Option<&ImageContents>,
        reached: Reached<'_>,
    ) -> Result<Option<ImageReference>, HoldReason> {
        let Reached { kernels, unknown, undetermined } = reached;
        let on_delete = live.update == UpdateStrategy::OnDelete;
        let in_current =
            |arch: Architecture, release: &str| current.map(|current| current.has(arch, release));
        let is_served = |arch: Architecture, release: &str| {
            // With `OnDelete`, the rewrite itself restarts no pod. If the current image has no modules for the kernel, the
            // next one need not have any.
            self.has(arch, release) || (on_delete && in_current(arch, release) == Some(false))
        };
        if let Some(kernel) = kernels.keys().find(|kernel| !is_served(kernel.arch, kernel.release.as_str())) {
            if let Some(on) = self.building.get(*kernel) {
                return Ok(Some(on.clone()));
            }
            let reason = self.missing.get(*kernel).cloned();
            return Err(reason.unwrap_or_else(|| no_image(kernel, String::new())));
        }
        let keeps_modules = |arch: Architecture, release: &str| {
            let old = current.and_then(|current| current.for_architecture(arch)?.members.get(release));
            let mut images = self.images.get(&arch).into_iter().flatten();
            images.any(|(kernel, digest)| kernel.as_str() == release && old == Some(digest))
        };
        let is_node_served = |node: &NodeFacts| match node.architecture.parse() {
            Ok(arch) if self.has(arch, &node.kernel_version) => {
                runs_one_of(&kernels, node) || keeps_modules(arch, &node.kernel_version)
            }
            Ok(arch) => is_served(arch, &node.kernel_version),
            // No farrier image has modules for this node, neither the current nor the next one.
            Err(_) => current.is_some(),
        };
        let unknown = unknown.into_iter().filter(|(node, _)| !(on_delete && is_node_served(node)));
        let undetermined = undetermined.into_iter().filter(|node| !is_node_served(node));
        if let Some(why) = unknown_node(unknown).or_else(|| unlabeled_node(undetermined)) {
            return Err(why);
        }
        // Wait for all builds if no node gains modules from the images that are published: one rewrite is better than two.
        let gains_modules = |kernel: &&KernelTarget| {
            let (arch, release) = (kernel.arch, kernel.release.as_str());
            self.has(arch, release) && in_current(arch, release) != Some(true)
        };
        let can_wait = !kernels.keys().any(gains_modules);
        Ok(self.building.values().next().filter(|_| can_wait).cloned())
    }

    fn unions(&self, context: &Context<'_>) -> Result<Vec<PlannedUnion>, HoldReason> {
        if let Some(images) = self.images.values().find(|images| images.len() > MAX_MEMBERS) {
            let detail = format!(
                "{} kernels exceed the {MAX_MEMBERS} that fit into one image, a layer each",
                images.len()
            );
            return Err(HoldReason::NoUnion { detail });
        }
        let cell = context.cells.of(context.image).find_map(|planned| planned.outcome.cell());
        let (Some(cell), false) = (cell, self.images.is_empty()) else {
            return Err(self.missing.values().next().cloned().unwrap_or(HoldReason::NoNodes));
        };
        PlannedUnion::all(context.image, &cell.version, &cell.reference.repository, &self.images)
            .ok_or_else(|| HoldReason::NoUnion { detail: format!("version {:?} gives no tag", cell.version) })
    }
}

/// Whether a node may run a kernel that its labels do not confirm: labels can be missing for a moment, while nodeInfo
/// still names the kernel.
fn may_run(groups: &[NodeGroup<'_>], release: &str) -> bool {
    let is_unknown = |group: &NodeGroup<'_>| group.target.is_err() && !group.blocks_no_rollout();
    groups.iter().any(|group| is_unknown(group) && group.sample.kernel_version == *release)
}

/// Records the times since which kernels are unused: in the planned changes of the DaemonSet, or in a separate change if only
/// this record differs.
fn record_unused(
    LiveTarget { daemon_set, live, .. }: LiveTarget<'_>,
    unused: &BTreeMap<String, Timestamp>,
    decided: &mut Decided,
) {
    let text = if unused.is_empty() { None } else { serde_json::to_string(unused).ok() };
    let is_recorded = live.annotations.get(UNION_LEFT) == text.as_ref();
    let has_change = decided.changes.iter().any(|change| matches!(change, Change::DaemonSet(_)));
    if !has_change && !is_recorded && matches!(decided.decision, RolloutDecision::AlreadySet { .. }) {
        let record = RewriteRecord::of(&live.annotations).unwrap_or_default();
        decided.changes.push(Change::DaemonSet(unchanged_fields(daemon_set, &record)));
    }
    for change in &mut decided.changes {
        let Change::DaemonSet(change) = change else { continue };
        match &text {
            Some(text) => drop(change.annotations.insert(UNION_LEFT.to_owned(), text.clone())),
            None => drop(change.annotations.remove(UNION_LEFT)),
        }
    }
}

#[cfg(test)]
mod tests;
