//! Pure: what of a plan has not come to its end: kernels without their images, rollouts that wait or cannot go on.

use std::collections::BTreeSet;

use strum::{IntoStaticStr, VariantArray};

use super::{
    HoldReason, Outcome, Plan, PlannedCell, PlannedRollout, PlannedUpgrade, RolloutDecision, UpgradeStage,
    UpgradeWait,
};
use crate::{image::ImageName, kernel::KernelTarget};

/// Why a rollout has not come to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "lowercase")]
pub enum RolloutWait {
    /// It cannot go on by itself, or not now.
    Held,
    /// It is to be written, or goes on step by step, and has not come further.
    Unfinished,
}

/// A rollout that has not come to its end. One that moves is another one each time, so that its time begins anew.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct OpenRollout {
    /// Its driver image.
    pub image: String,
    /// Its rollout target.
    pub target: String,
    /// Why it has not.
    pub state: RolloutWait,
    /// How far it is.
    progress: String,
}

/// Kernels that nodes run and that lack something. An announced kernel changes nothing yet.
pub fn open_kernels(plan: &Plan) -> BTreeSet<KernelTarget> {
    let rewritten: BTreeSet<&ImageName> = plan
        .rollouts
        .iter()
        .filter(|rollout| {
            matches!(
                rollout.decision,
                RolloutDecision::Rewrite { .. }
                    | RolloutDecision::Steps { .. }
                    | RolloutDecision::Pending { .. }
            )
        })
        .map(|rollout| &rollout.image)
        .collect();
    let is_unresolved = |planned: &&PlannedCell| match &planned.outcome {
        Outcome::Build { .. }
        | Outcome::HeldBack { .. }
        | Outcome::Conflict { .. }
        | Outcome::Unknown { .. } => true,
        Outcome::UpToDate { .. } => rewritten.contains(&planned.image),
        Outcome::Waiting { .. } | Outcome::Skipped { .. } => false,
    };
    let run_by_nodes = plan.cells.iter().filter(|planned| planned.nodes > 0);
    run_by_nodes.filter(is_unresolved).map(|planned| planned.target.clone()).collect()
}

/// Rollouts on which something is to be done, or that cannot go on. Those that a person keeps back are not among them, nor those
/// that lack an image: the kernel says so.
pub fn open_rollouts(plan: &Plan) -> BTreeSet<OpenRollout> {
    let open = |rollout: &PlannedRollout| {
        let (state, progress) = match &rollout.decision {
            RolloutDecision::Hold(why) if is_stuck(why) => (RolloutWait::Held, String::new()),
            RolloutDecision::Hold(_) => return None,
            RolloutDecision::Rewrite { to, .. } => (RolloutWait::Unfinished, to.to_string()),
            RolloutDecision::Steps { now } => (RolloutWait::Unfinished, now.join("\n")),
            RolloutDecision::Pending { .. }
            | RolloutDecision::AlreadySet { .. }
            | RolloutDecision::Settled { .. } => open_upgrade(rollout.upgrade.as_ref()?)?,
        };
        let (image, target) = (rollout.image.to_string(), rollout.target.to_string());
        Some(OpenRollout { image, target, state, progress })
    };
    plan.rollouts.iter().filter_map(open).collect()
}

/// Does it need someone, or does it wait for what should come by itself and soon?
fn is_stuck(why: &HoldReason) -> bool {
    why.is_failure()
        || matches!(why, HoldReason::TooOften | HoldReason::Disruption { .. } | HoldReason::NotSynced { .. })
}

/// An upgrade that stopped because a node failed; or that goes on, and how far it is. Nodes that wait for a window, a pause or
/// someone's cordon have no haste.
fn open_upgrade(upgrade: &PlannedUpgrade) -> Option<(RolloutWait, String)> {
    if upgrade.failure().is_some() {
        return Some((RolloutWait::Held, String::new()));
    }
    let is_at_it = upgrade.nodes.iter().any(|turn| {
        matches!(turn.stage, UpgradeStage::UnderWay | UpgradeStage::Begins)
            || matches!(turn.waits, Some(UpgradeWait::Again { .. } | UpgradeWait::NoCanary))
    });
    let done = upgrade.nodes.iter().filter(|turn| turn.stage == UpgradeStage::Done).count();
    is_at_it.then(|| (RolloutWait::Unfinished, format!("nodes done: {done}")))
}
