//! The unfinished parts of a plan: kernels without their images, and rollouts that wait or are stuck.

use std::collections::BTreeSet;

use strum::{IntoStaticStr, VariantArray};

use super::{
    HoldReason, Outcome, Plan, PlannedCell, PlannedRollout, PlannedUpgrade, RolloutDecision, UpgradeStage,
    UpgradeWait,
};
use crate::{image::ImageName, kernel::KernelTarget};

/// Reason why a rollout is unfinished.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "lowercase")]
pub enum RolloutWait {
    /// The rollout cannot continue now, or not without intervention.
    Held,
    /// The rollout still has a write to make, or proceeds step by step.
    Unfinished,
}

/// Unfinished rollout. Its progress is part of its identity, so that the time spent waiting restarts whenever the
/// rollout advances.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct UnfinishedRollout {
    /// Driver image of the rollout.
    pub image: String,
    /// Rollout target.
    pub target: String,
    /// Reason why the rollout is unfinished.
    pub state: RolloutWait,
    /// Progress of the rollout.
    progress: String,
}

/// Returns the kernels that nodes run and that lack an image or a rewrite. Announced kernels do not count.
pub fn unfinished_kernels(plan: &Plan) -> BTreeSet<KernelTarget> {
    let rewritten = plan.rollouts.iter().filter(|rollout| rollout.decision.advances());
    let rewritten: BTreeSet<&ImageName> = rewritten.map(|rollout| &rollout.image).collect();
    let is_unresolved = |planned: &&PlannedCell| match &planned.outcome {
        Outcome::Build { .. }
        | Outcome::Failed { .. }
        | Outcome::Conflict { .. }
        | Outcome::Unknown { .. } => true,
        Outcome::UpToDate { .. } => rewritten.contains(&planned.image),
        skipped @ Outcome::Skipped { .. } => skipped.is_unbuildable(),
        Outcome::Waiting { .. } => false,
    };
    let run_by_nodes = plan.cells.iter().filter(|planned| planned.nodes > 0);
    run_by_nodes.filter(is_unresolved).map(|planned| planned.target.clone()).collect()
}

/// Returns the rollouts that still have work to do or cannot continue. Excludes rollouts that a person paused or rolled back, and
/// rollouts without an image: [`unfinished_kernels`] has their kernels.
pub fn unfinished_rollouts(plan: &Plan) -> BTreeSet<UnfinishedRollout> {
    let unfinished = |rollout: &PlannedRollout| {
        let (state, progress) = match &rollout.decision {
            RolloutDecision::Hold(why) if is_stuck(why) => (RolloutWait::Held, String::new()),
            RolloutDecision::Hold(_) => return None,
            RolloutDecision::Rewrite { to, .. } => (RolloutWait::Unfinished, to.to_string()),
            RolloutDecision::Steps { now } => (RolloutWait::Unfinished, now.join("\n")),
            RolloutDecision::Pending { .. }
            | RolloutDecision::AlreadySet { .. }
            | RolloutDecision::Settled { .. } => unfinished_upgrade(rollout.upgrade.as_ref()?)?,
        };
        let (image, target) = (rollout.image.to_string(), rollout.target.to_string());
        Some(UnfinishedRollout { image, target, state, progress })
    };
    plan.rollouts.iter().filter_map(unfinished).collect()
}

/// Whether the hold needs intervention, unlike a hold by a person, by the operator, or that ends without a change.
fn is_stuck(why: &HoldReason) -> bool {
    !matches!(
        why,
        HoldReason::NoNodes
            | HoldReason::NoImage { .. }
            | HoldReason::Deleting
            | HoldReason::RolledBack { .. }
            | HoldReason::CopiesRolledBack
            | HoldReason::Paused
            | HoldReason::Proposed { .. }
            | HoldReason::DriverOff { .. }
            | HoldReason::UpgradeInProgress { .. }
            | HoldReason::Chain { .. }
    )
}

/// Returns the state of an upgrade that stopped because a node failed, or that is in progress. Nodes that wait for a
/// window, a pause or a foreign cordon do not count as progress.
fn unfinished_upgrade(upgrade: &PlannedUpgrade) -> Option<(RolloutWait, String)> {
    if upgrade.failure().is_some() {
        return Some((RolloutWait::Held, String::new()));
    }
    let is_in_progress = upgrade.nodes.iter().any(|node_upgrade| {
        matches!(node_upgrade.stage, UpgradeStage::UnderWay | UpgradeStage::Begins)
            || matches!(node_upgrade.waits, Some(UpgradeWait::Again { .. } | UpgradeWait::NoCanary))
    });
    let done = upgrade.nodes.iter().filter(|node_upgrade| node_upgrade.stage == UpgradeStage::Done).count();
    is_in_progress.then(|| (RolloutWait::Unfinished, format!("nodes done: {done}")))
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            HeaderState,
            fixtures::{K47, World},
        },
        *,
    };

    #[test]
    fn a_kernel_whose_image_cannot_be_built_is_unfinished() {
        let mut world = World::new(&[K47]);
        let target = world.plan().cells[0].target.clone();
        world.observed.headers.insert(target.clone(), HeaderState::Missing("package".to_owned()));
        assert_eq!(unfinished_kernels(&world.plan()), BTreeSet::from([target]));
        // No definition is meant for this kernel.
        world.definitions.families.clear();
        assert_eq!(unfinished_kernels(&world.plan()), BTreeSet::new());
    }
}
