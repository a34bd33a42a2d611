//! Decides whether each image field is rewritten, with the reason.
//!
//! Each strategy has its own file and decides one target; this module has the common parts. Decisions are data: an
//! adapter makes the [`Change`]s in their order, and nothing else.

mod change;
mod context;
mod copy;
mod daemon_set;
mod field;
mod first_write;
mod git;
mod handover;
mod image;
mod live_object;
mod manifest;
mod merge;
mod operator;
mod past;
mod pause;
mod per_kernel;
mod publish_only;
mod reached;
mod record;
mod resource;
mod restart;
mod rollback;
mod single;
mod stopped;
mod union;
mod upgrade;
mod watch;

use std::collections::{BTreeSet, HashMap};

pub use self::context::{PlannedRollout, RolloutDecision};
use self::{
    context::{Context, Decided, no_image},
    reached::{NodesByKernel, Reached},
};
pub use change::{
    Change, DaemonSetChange, DaemonSetCopy, DaemonSetRetirement, ImageChange, NodeChange, NodeCheck,
    NodePrecondition, PodRestart, ResourceChange, Untaint,
};
pub(super) use copy::copies_of;
pub use first_write::RolloutWarning;
pub use git::{GitCommit, git_commit};
pub use handover::handover_label;
pub(super) use handover::{HANDED_OVER, short_hash};
pub(super) use operator::skip_labels;
pub use past::{PastUpgrade, past_table, past_upgrades};
pub use pause::{pause, paused};
pub use record::{Earlier, FieldRecord, RecordState, RewriteRecord};
pub use rollback::{RollbackOutcome, RollbackStep, rollback, set_by_others};
pub(super) use stopped::StoppedRollout;
pub(super) use union::{release_of_key, unused_kernels};
pub use upgrade::uncordoned;
pub(super) use watch::Limits;
pub use watch::is_same_image;

use super::{
    ClusterSnapshot, DaemonSetFacts, HoldReason, ImageContents, ManifestLocation, NodeFacts, Observed,
    PER_KERNEL_ANNOTATION, PlanInputs, PlannedUnion, PlannedUpgrade, ReachingObject, RolloutObject,
    RolloutTarget,
    chain_state::ChainStates,
    node::{NodeGroup, group_nodes},
    outcome::CellLookup,
};
use crate::{
    image::{Chains, ImageName, RolloutSpec, Strategy},
    kernel::KernelTarget,
};

/// Rollouts of the definitions, needed images before their dependents.
pub(super) struct RequestedRollouts<'a> {
    all: Vec<RequestedRollout<'a>>,
    /// Nodes, grouped by the labels that decide which objects reach them.
    groups: Vec<NodeGroup<'a>>,
}

struct RequestedRollout<'a> {
    image: &'a ImageName,
    spec: &'a RolloutSpec,
    target: RolloutTarget,
    /// Images whose rollouts name the same field, if there are several.
    claimed_by: Vec<ImageName>,
}

/// Rollout that gives one image to all nodes of a DaemonSet.
pub(super) struct OneImage<'a> {
    pub(super) image: &'a ImageName,
    target: &'a RolloutTarget,
    kernels: NodesByKernel<'a>,
}

impl OneImage<'_> {
    /// Returns the reason why the node would get no driver with its next kernel: the DaemonSet's other nodes need another
    /// image. `has_same_image` says whether another kernel's image has the same tag.
    pub(super) fn conflict(
        &self,
        node: &NodeFacts,
        has_same_image: impl Fn(&KernelTarget) -> bool,
    ) -> Option<String> {
        let is_node = |other: &&NodeFacts| other.name == node.name;
        if !self.kernels.values().flatten().any(is_node) {
            return None;
        }
        let needs_other_image = |(kernel, nodes): &(&&KernelTarget, &Vec<&NodeFacts>)| {
            !has_same_image(kernel) && !nodes.iter().all(is_node)
        };
        let (kernel, _) = self.kernels.iter().find(needs_other_image)?;
        Some(format!(
            "{} has one image for all its nodes, and another node runs {kernel}; use strategy per-kernel or union, or boot \
             all nodes at once",
            self.target
        ))
    }
}

/// Rollouts to each DaemonSet of the cluster.
type Peers<'a> = HashMap<(&'a str, &'a str), Vec<&'a RequestedRollout<'a>>>;

impl<'a> RequestedRollouts<'a> {
    /// Collects the rollouts.
    pub(super) fn of(inputs: &PlanInputs<'a>, chains: &Chains) -> Self {
        let images = &inputs.cells.definitions.images;
        let mut all = Vec::new();
        for (image, definition) in chains.order().iter().filter_map(|name| images.get_key_value(name)) {
            all.extend(definition.spec.rollout.iter().map(|spec| {
                let target = RolloutTarget::of(spec);
                RequestedRollout { image, spec, target, claimed_by: Vec::new() }
            }));
        }
        let claims = |rollout: &RequestedRollout<'_>| -> Vec<ImageName> {
            let same_field = all.iter().filter(|other| rollout.target.may_share_field(&other.target));
            same_field.map(|other| other.image.clone()).collect()
        };
        let claims: Vec<_> = all.iter().map(claims).collect();
        for (rollout, images) in all.iter_mut().zip(claims).filter(|(_, images)| images.len() > 1) {
            rollout.claimed_by = images;
        }
        let manifests = inputs.manifests.values().flatten();
        let in_manifests = manifests.flat_map(|facts| &facts.daemon_sets);
        let daemon_sets = inputs.snapshot.daemon_sets.iter().chain(in_manifests);
        let resource_labels = resource::label_keys(inputs);
        let labels = daemon_sets.flat_map(|facts| facts.placement.label_keys());
        let labels = labels.chain(resource_labels.iter().map(String::as_str));
        Self { all, groups: group_nodes(&inputs.snapshot.nodes, labels) }
    }

    /// Returns the rollouts that give all nodes of a DaemonSet one image, and thus the modules for one kernel.
    pub(super) fn with_one_image(&self, inputs: &PlanInputs<'a>) -> Vec<OneImage<'_>> {
        let has_one_image = |rollout: &&RequestedRollout<'_>| {
            matches!(rollout.target.strategy, Strategy::Image | Strategy::File | Strategy::Git)
        };
        let rollouts =
            self.all.iter().filter(has_one_image).filter_map(|RequestedRollout { image, target, .. }| {
                let object = ReachingObject::daemon_set(named_daemon_set(inputs, target)?, inputs.snapshot);
                Some(OneImage { image, target, kernels: Reached::by(&object, &self.groups).kernels })
            });
        rollouts.collect()
    }

    /// Returns the decided rollouts that do not give every node the image for its next kernel.
    pub(super) fn stopped<'r>(
        &'r self,
        inputs: &PlanInputs<'r>,
        observed: &'r Observed,
        planned: &'r [PlannedRollout],
    ) -> Vec<StoppedRollout<'r>> {
        planned
            .iter()
            .filter_map(|rollout| StoppedRollout::of(inputs, observed, &self.groups, rollout))
            .collect()
    }

    /// Returns the rollouts that share a DaemonSet, without those that claim the same field.
    fn peers(&self) -> Peers<'_> {
        let mut peers = Peers::new();
        for rollout in self.all.iter().filter(|rollout| rollout.claimed_by.is_empty()) {
            if let Some(daemon_set) = rollout.target.live_daemon_set() {
                peers.entry(daemon_set).or_default().push(rollout);
            }
        }
        peers
    }

    fn contexts<'r>(
        &'r self,
        inputs: &'r PlanInputs<'r>,
        observed: &'r Observed,
        cells: CellLookup<'r>,
        peers: &'r Peers<'r>,
    ) -> impl Iterator<Item = (&'r RequestedRollout<'r>, Context<'r>)> {
        self.all.iter().map(move |rollout| {
            let peers = rollout.target.live_daemon_set().and_then(|daemon_set| peers.get(&daemon_set));
            let peers = peers.map(Vec::as_slice).unwrap_or_default();
            let RequestedRollout { image, spec, .. } = rollout;
            (rollout, Context { inputs, observed, cells, groups: &self.groups, image, spec, peers })
        })
    }

    /// Returns every union image that [`Self::decide_all`] may ask for, whatever the registry has under their names.
    pub(super) fn possible_unions(
        &self,
        inputs: &PlanInputs<'_>,
        observed: &Observed,
        cells: CellLookup<'_>,
        chain_states: &ChainStates<'_>,
    ) -> Vec<PlannedUnion> {
        let complete = CellLookup { unavailable: Some(&chain_states.incomplete), ..cells };
        let mut unions = Vec::new();
        for (rollout, context) in self.contexts(inputs, observed, cells, &self.peers()) {
            if !matches!(rollout.spec, RolloutSpec::Union { .. }) || !rollout.claimed_by.is_empty() {
                continue;
            }
            // `decide_all` may use any of these views of an image with a chain.
            let on_hold = CellLookup { held_image: Some(rollout.image), ..complete };
            let variants =
                if chain_states.has(rollout.image) { &[cells, complete, on_hold][..] } else { &[cells] };
            for cells in variants {
                unions.extend(decide_rollout(&Context { cells: *cells, ..context }, &rollout.target).1);
            }
        }
        unions
    }

    /// Decides every rollout. Also returns the union images that the rollouts ask for.
    pub(super) fn decide_all(
        &self,
        inputs: &PlanInputs<'_>,
        observed: &Observed,
        cells: CellLookup<'_>,
        chain_states: &ChainStates<'_>,
    ) -> (Vec<PlannedRollout>, Vec<PlannedUnion>) {
        let peers = self.peers();
        let in_complete_chains = CellLookup { unavailable: Some(&chain_states.incomplete), ..cells };
        let (mut contexts, mut planned, mut unions) = (Vec::new(), Vec::new(), Vec::new());
        for (rollout, mut context) in self.contexts(inputs, observed, cells, &peers) {
            let RequestedRollout { image, spec, target, claimed_by } = rollout;
            let (mut decided, mut rollout_unions) = if claimed_by.is_empty() {
                decide_rollout(&context, target)
            } else {
                (Err(HoldReason::ClaimedTwice { images: claimed_by.clone() }), Vec::new())
            };
            // An image that is already set stays set while other images of its chain are rebuilt.
            let names_object = !matches!(spec, RolloutSpec::PublishOnly { .. });
            if names_object
                && !chain_states.incomplete.is_empty()
                && decided.as_ref().is_ok_and(|decided| decided.decision.advances())
            {
                context.cells = in_complete_chains;
                (decided, rollout_unions) = decide_rollout(&context, target);
            }
            unions.extend(rollout_unions);
            // Omit a definition that neither a node nor an object asks for, such as a built-in one.
            let has_object = names_object && !decided.as_ref().is_err_and(HoldReason::is_absence);
            if !has_object && cells.of(image).next().is_none() {
                continue;
            }
            let Decided { decision, changes } =
                decided.unwrap_or_else(|hold| RolloutDecision::Hold(hold).into());
            let upgrade =
                if claimed_by.is_empty() { planned_upgrade(&context, target, &decision) } else { None };
            planned.push(PlannedRollout {
                image: (*image).clone(),
                target: target.clone(),
                decision,
                changes,
                upgrade,
                warnings: first_write::warnings(&context, target),
                current_image: daemon_set::current_image(inputs, target),
            });
            contexts.push(context);
        }
        hold_shared_values(&mut planned);
        for (index, why) in chain_holds(&planned, chain_states) {
            let (Some(rollout), Some(context)) = (planned.get(index), contexts.get(index)) else { continue };
            let cells = CellLookup { held_image: Some(context.image), ..in_complete_chains };
            // A strategy in the middle of its steps may have to finish them even without an image, so decide before the hold.
            let (decided, _) = decide_rollout(&Context { cells, ..*context }, &rollout.target);
            let Decided { decision, changes } = decided.unwrap_or_else(|_| RolloutDecision::Hold(why).into());
            let upgrade = planned_upgrade(context, &rollout.target, &decision);
            let target = rollout.target.clone();
            for (rollout, context) in planned.iter_mut().zip(&contexts) {
                // Rollouts of several images to the copies of one DaemonSet are one decision.
                let shares_copies = |other: &RolloutTarget| {
                    [&target, other].iter().all(|target| target.strategy == Strategy::PerKernel)
                        && target.live_daemon_set() == other.live_daemon_set()
                };
                if rollout.target == target || shares_copies(&rollout.target) {
                    (rollout.decision, rollout.changes) = (decision.clone(), changes.clone());
                    rollout.upgrade = upgrade.clone().filter(|_| context.carries_upgrade(&rollout.target));
                }
            }
        }
        merge::one_write_for_each_object(inputs.snapshot, &mut planned);
        (planned, unions)
    }
}

/// Returns the DaemonSet that a rollout names: the live one, or else the one in the rollout's manifests.
fn named_daemon_set<'a>(inputs: &PlanInputs<'a>, target: &RolloutTarget) -> Option<&'a DaemonSetFacts> {
    let RolloutObject::DaemonSet(name) = &target.object else { return None };
    let live = inputs.snapshot.daemon_sets.iter().find(|daemon_set| daemon_set.is_named(name));
    live.or_else(|| Some(daemon_set::target_container(inputs, target).ok()?.daemon_set))
}

/// Holds the rollouts that would write a chart's value to which another rollout needs to write another image. The two would take
/// turns in overwriting the value.
fn hold_shared_values(planned: &mut [PlannedRollout]) {
    let hold = |rollout: &PlannedRollout| {
        let RolloutDecision::Rewrite { to, .. } = &rollout.decision else { return None };
        let differs = |other: &&PlannedRollout| match &other.decision {
            RolloutDecision::Rewrite { to: image, .. } | RolloutDecision::AlreadySet { image } => image != to,
            // Without nodes, no image can be wrong.
            decision => *decision != RolloutDecision::Hold(HoldReason::NoNodes),
        };
        let mut others = planned.iter().filter(|other| rollout.target.shares_chart_value(&other.target));
        let other = &others.find(differs)?.target;
        let detail =
            format!("its value also sets {other}, which needs another image: give each a separate value");
        Some(HoldReason::Fixed { detail })
    };
    let holds: Vec<Option<HoldReason>> = planned.iter().map(hold).collect();
    for (rollout, hold) in planned.iter_mut().zip(holds) {
        if let Some(why) = hold {
            rollout.hold(why);
        }
    }
}

/// Returns the rollouts, by index, that would change something while another rollout of their chain is broken, with the
/// reason for the hold.
fn chain_holds(planned: &[PlannedRollout], chains: &ChainStates<'_>) -> Vec<(usize, HoldReason)> {
    let broken: Vec<(&PlannedRollout, &HoldReason)> = planned
        .iter()
        .filter(|rollout| rollout.target.strategy != Strategy::PublishOnly)
        .filter_map(|rollout| match &rollout.decision {
            RolloutDecision::Hold(why) if why.is_failure() || *why == HoldReason::Paused => {
                Some((rollout, why))
            }
            _ => None,
        })
        .collect();
    let hold = |(index, rollout): (usize, &PlannedRollout)| {
        if !rollout.decision.is_change() {
            return None;
        }
        let (other, why) =
            broken.iter().find(|(other, _)| chains.are_linked(&other.image, &rollout.image))?;
        Some((index, HoldReason::Chain { image: other.image.clone(), why: why.to_string() }))
    };
    planned.iter().enumerate().filter_map(hold).collect()
}

/// Returns the next steps that roll back a `per-kernel` rollout, whatever the definitions say. The original DaemonSet,
/// given by namespace and name, is marked as rolled back. Then its nodes are returned to it, its node affinity is
/// restored, and the copies are deleted. Empty when nothing is left to do. A running loop reads the mark and takes the same
/// steps.
///
/// # Errors
/// The cluster has no such DaemonSet, the snapshot is not of a live cluster, or the DaemonSet is being deleted.
pub fn rollback_per_kernel(
    snapshot: &ClusterSnapshot,
    now: jiff::Timestamp,
    namespace: &str,
    name: &str,
) -> Result<Vec<Change>, HoldReason> {
    let daemon_set = snapshot.daemon_set(namespace, name).ok_or(HoldReason::NOT_FOUND)?;
    let live = daemon_set.live.as_ref().ok_or(HoldReason::OnlyLive)?;
    if live.deleting {
        return Err(HoldReason::Deleting);
    }
    Ok(per_kernel::rollback(&per_kernel::Original::observe(snapshot, daemon_set, live), now))
}

/// Returns namespace and name of the DaemonSets that are or were rolled out `per-kernel`: they carry the annotation for
/// it, or have copies.
pub fn per_kernel_originals(snapshot: &ClusterSnapshot) -> BTreeSet<(String, String)> {
    let original = |facts: &DaemonSetFacts| {
        let live = facts.live.as_ref()?;
        let own_name = live.annotations.contains_key(PER_KERNEL_ANNOTATION).then(|| facts.name.clone());
        Some((facts.namespace.clone(), own_name.or_else(|| copy::original_of(live))?))
    };
    snapshot.daemon_sets.iter().filter_map(original).collect()
}

/// Decides one rollout, and returns the union images that it asks for.
fn decide_rollout(
    context: &Context<'_>,
    target: &RolloutTarget,
) -> (Result<Decided, HoldReason>, Vec<PlannedUnion>) {
    if let Some(namespace) = unwritable_namespace(context) {
        return (Err(HoldReason::NotWritable { namespace }), Vec::new());
    }
    if let Some(why) = upgrade::obstacle(context, target) {
        return (Err(why), Vec::new());
    }
    let (mut decided, unions) = decide_by_strategy(context, target);
    let waits = |decided: &Decided| matches!(decided.decision, RolloutDecision::Pending { .. });
    if decided.as_ref().map_or(true, waits)
        && let Some(restored) = image::restore(context, target)
    {
        decided = Ok(match restored.decision {
            RolloutDecision::AlreadySet { .. } => Decided {
                decision: decided.map_or_else(RolloutDecision::Hold, |decided| decided.decision),
                ..restored
            },
            _ => restored,
        });
    }
    if let Ok(Decided { decision: decision @ RolloutDecision::AlreadySet { .. }, changes }) = &mut decided
        && changes.is_empty()
        && context.spec.upgrade().is_none()
        && let Ok(live_target) = daemon_set::live_target(context, target)
    {
        // A union plans its restarts itself: they do not wait until its record is written.
        if matches!(context.spec, RolloutSpec::Image { .. }) {
            *changes = restart::restarts(context, live_target);
        }
        if changes.is_empty()
            && let Some(how) = restart::unknown_images(context, live_target)
        {
            *decision = RolloutDecision::Settled { how };
        }
    }
    let writes = |decided: &Decided| decided.decision.advances() || !decided.changes.is_empty();
    if decided.as_ref().is_ok_and(writes) && pause::is_paused(context.inputs, target) {
        return (Err(HoldReason::Paused), unions);
    }
    (decided, unions)
}

/// Plans the upgrade of a rollout, where the definition asks for one and farrier may change the DaemonSet. An upgrade
/// in progress continues, whatever is decided about the image.
fn planned_upgrade(
    context: &Context<'_>,
    target: &RolloutTarget,
    decision: &RolloutDecision,
) -> Option<PlannedUpgrade> {
    if !context.carries_upgrade(target) {
        return None;
    }
    if unwritable_namespace(context).is_some() || upgrade::obstacle(context, target).is_some() {
        return None;
    }
    match context.spec {
        RolloutSpec::PerKernel { .. } => per_kernel::planned(context, target),
        _ => upgrade::planned(context, target, next_image(context, target, decision).as_ref()),
    }
}

/// Returns the image that a DaemonSet gets now, or after a pause of its rollout ends. The plan can therefore show an upgrade
/// before the upgrade starts.
fn next_image(
    context: &Context<'_>,
    target: &RolloutTarget,
    decision: &RolloutDecision,
) -> Option<upgrade::NextImage> {
    if !matches!(decision, RolloutDecision::Rewrite { .. } | RolloutDecision::Hold(HoldReason::Paused)) {
        return None;
    }
    let (decided, unions) = decide_by_strategy(context, target);
    let RolloutDecision::Rewrite { to, .. } = decided.ok()?.decision else { return None };
    let contents = if unions.is_empty() {
        // The strategy has verified that the image has modules for every kernel that the DaemonSet's nodes run.
        let kernels = context.groups.iter().filter_map(|group| group.target.as_ref().ok());
        ImageContents {
            kernels: kernels.map(|kernel| kernel.release.to_string()).collect(),
            ..ImageContents::default()
        }
    } else {
        PlannedUnion::contents(unions)
    };
    Some(upgrade::NextImage { image: to.to_string(), contents })
}

/// Decides by strategy, ignoring pauses.
fn decide_by_strategy(
    context: &Context<'_>,
    target: &RolloutTarget,
) -> (Result<Decided, HoldReason>, Vec<PlannedUnion>) {
    let decided = match context.spec {
        RolloutSpec::Image { .. } => image::decide(context, target),
        RolloutSpec::File { .. } => manifest::decide(context, target),
        RolloutSpec::Git { .. } => git::decide(context, target),
        RolloutSpec::PerKernel { .. } => per_kernel::decide(context, target),
        RolloutSpec::Union { .. } => return union::decide(context, target),
        RolloutSpec::PublishOnly { resource } => publish_only::decide(context, *resource),
        RolloutSpec::CustomResource { target: name } => resource::decide(context, target, name),
    };
    (decided, Vec::new())
}

/// Returns the namespace of a live target, if this farrier must not write there.
fn unwritable_namespace(context: &Context<'_>) -> Option<String> {
    if ManifestLocation::of(context.spec).is_some() {
        return None;
    }
    let namespace = context.spec.namespace()?.to_string();
    (!context.inputs.snapshot.writable.contains(&namespace)).then_some(namespace)
}

#[cfg(test)]
mod tests;
