//! Adapter: how long each kernel has waited for its images. A state machine: plans and the time come in as arguments.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tokio::time::Instant;

use crate::{
    image::ImageName,
    kernel::KernelTarget,
    plan::{Cell, Plan, RolloutDecision},
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
    let lacking = plan
        .builds
        .iter()
        .map(|planned| &planned.cell)
        .chain(plan.held_back.iter().map(|held| &held.cell))
        .chain(plan.conflicts.iter().map(|conflict| &conflict.cell))
        .chain(plan.unknown.iter().map(|unknown| &unknown.cell))
        .map(AsRef::as_ref);
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
    let published = plan.up_to_date.iter().map(|found| found.cell.as_ref());
    let not_rolled_out = published.filter(|cell| rewritten.contains(&cell.image));
    let run_by_nodes = |cell: &&Cell| !cell.nodes.is_empty();
    lacking.chain(not_rolled_out).filter(run_by_nodes).map(|cell| cell.target.clone()).collect()
}
