//! Adapter: how long each kernel has waited for its images. A state machine: plans and the time come in as arguments.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tokio::time::Instant;

use crate::{
    image::ImageName,
    kernel::KernelTarget,
    plan::{Outcome, Plan, PlannedCell, RolloutDecision},
};

/// Since when kernels lack an image, or a rewrite that would bring them one.
#[derive(Debug, Default)]
pub(super) struct KernelChanges {
    open: BTreeMap<KernelTarget, Instant>,
}

impl KernelChanges {
    /// Takes over how things stand after a pass.
    pub(super) fn update(&mut self, plan: &Plan, now: Instant) {
        let unresolved = unresolved(plan);
        self.open.retain(|target, _| unresolved.contains(target));
        for target in unresolved {
            self.open.entry(target).or_insert(now);
        }
    }

    /// The kernels that wait, and for how long.
    pub(super) fn waiting(&self, now: Instant) -> Vec<(String, Duration)> {
        self.open.iter().map(|(target, since)| (target.to_string(), now - *since)).collect()
    }
}

/// Kernels that nodes run and that lack something. An announced kernel changes nothing yet.
fn unresolved(plan: &Plan) -> BTreeSet<KernelTarget> {
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
