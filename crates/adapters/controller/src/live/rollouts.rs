//! Makes the rollouts of a reconcile. A rollout that must wait also holds the later rollouts of its chain.

use std::time::Duration;

use farrier_builder::services::{BuildError, Result};
use farrier_core::plan::{
    Change, ClusterSnapshot, HoldReason, ManifestLocation, PlannedRollout, PlannedUpgrade, RolloutTarget,
    uncordoned,
};
use oci::error_chain;
use tokio::time::Instant;

use super::Live;
use crate::{
    Planned, RolloutReport, apply::apply_upgrade_steps, broken_chains::BrokenChains, reconcile::roll_out,
    runtime::RewriteOutcomeLabel,
};

/// Delay before retrying an eviction that was refused.
const EVICTION_RETRY_DELAY: Duration = Duration::from_secs(15);
/// Delay before repeating a write that the API server did not keep.
const LOST_FIELD_RETRY_DELAY: Duration = Duration::from_hours(1);

impl Live {
    /// Makes the planned rollouts. A rollout that would reach a node unknown to the plan waits for the next plan, with
    /// the rest of its chain (guarantee 1). Other rollouts are not affected.
    ///
    /// Returns the reports of the rollouts that were made, failed or are held, and every rollout of the plan in its state
    /// after the writes.
    pub(super) async fn roll_out(
        &mut self,
        planned: &Planned,
    ) -> Result<(Vec<RolloutReport>, Vec<PlannedRollout>)> {
        let mut chains = BrokenChains::of(&self.services.definitions);
        let mut reports = Vec::with_capacity(planned.plan.rollouts.len());
        let mut after = planned.plan.rollouts.clone();
        for rollout in &mut after {
            if self.services.process.cancel.is_cancelled() {
                break;
            }
            if let Some(report) = self.roll_out_one(rollout.clone(), &planned.snapshot, &mut chains).await? {
                *rollout = report.rollout_after();
                reports.push(report);
            }
        }
        Ok((reports, after))
    }

    /// Makes one rollout. Returns `None` if the rollout waits for the next plan.
    async fn roll_out_one(
        &mut self,
        mut rollout: PlannedRollout,
        snapshot: &ClusterSnapshot,
        chains: &mut BrokenChains,
    ) -> Result<Option<RolloutReport>> {
        if let Some(why) = chains.earlier_failure(&rollout) {
            if !self.builds.is_single_run() {
                tracing::warn!(image = %rollout.image, target = %rollout.target, why, "rollout waits");
            }
            chains.record_failure(&rollout, &why);
            return Ok(Some(RolloutReport { planned: rollout, error: Some(why) }));
        }
        if chains.is_deferred(&rollout) {
            chains.record_deferral(&rollout);
            return Ok(None);
        }
        if let Some(why) = chains.earlier_hold(&rollout).or_else(|| self.hold_reason(&rollout, snapshot)) {
            tracing::warn!(image = %rollout.image, target = %rollout.target, %why, "rollout waits");
            if matches!(why, HoldReason::TooOften) {
                chains.record_deferral(&rollout);
            }
            chains.record_hold(&rollout, &why);
            match why {
                HoldReason::TooOften => rollout.hold_rewrites(snapshot),
                HoldReason::NotKept { .. } => rollout.hold_applies(why),
                _ => rollout.hold(why),
            }
        }
        self.drop_contested(&mut rollout);
        if !rollout.changes.is_empty()
            && let Some(change) = self.change_since_plan(snapshot, &rollout.target).await?
        {
            tracing::debug!(target = %rollout.target, change, "the rollout's nodes have changed since the plan was made");
            chains.record_deferral(&rollout);
            self.node_change = Some(change);
            return Ok(None);
        }
        // Only a write counts toward the rate limit.
        if rollout.is_rewrite(snapshot) {
            self.rewrite_rate_limiter.take(&rollout.target);
        }
        let Err(error) = self.write(&rollout).await else {
            self.handovers.record_writes(&rollout.changes, self.started.elapsed());
            self.repeated_writes.record(&rollout, snapshot, self.started.elapsed());
            self.log(snapshot, &rollout, None);
            return Ok(Some(RolloutReport { planned: rollout, error: None }));
        };
        if let BuildError::Cluster(error) = &error
            && let Some(detail) = error.disruption()
        {
            self.evictions.insert(rollout.target.to_string(), Instant::now() + EVICTION_RETRY_DELAY);
            self.timer.schedule(Instant::now() + EVICTION_RETRY_DELAY);
            tracing::info!(image = %rollout.image, target = %rollout.target, detail, "a pod may not be evicted now");
            let why = HoldReason::Disruption { detail: detail.to_owned() };
            chains.record_hold(&rollout, &why);
            rollout.hold(why);
            return Ok(Some(RolloutReport { planned: rollout, error: None }));
        }
        if let BuildError::Cluster(error) = &error
            && let Some(field) = error.lost_field()
        {
            let next = Instant::now() + LOST_FIELD_RETRY_DELAY;
            self.not_kept.insert(rollout.target.clone(), (next, field.to_owned()));
        }
        let error = error_chain(&error);
        chains.record_failure(&rollout, &error);
        self.log(snapshot, &rollout, Some(&error));
        Ok(Some(RolloutReport { planned: rollout, error: Some(error) }))
    }

    /// Drops the changes of nodes that another writer keeps reverting.
    fn drop_contested(&mut self, rollout: &mut PlannedRollout) {
        let contested = self.handovers.drop_contested(&mut rollout.changes, self.started.elapsed());
        if let Some(node) = contested.first() {
            let (count, target) = (contested.len(), &rollout.target);
            let hint = "configure the other writer to keep the labels farrier.dev/driver... of nodes; farrier writes them again later";
            tracing::warn!(%target, node, count, hint, "another writer reverts the labels that assign nodes to DaemonSets");
        }
    }

    /// Writes the changes of a rollout.
    async fn write(&mut self, rollout: &PlannedRollout) -> Result<()> {
        let outcome = roll_out(&self.services, self.context.cluster.as_ref(), rollout).await;
        if let Some(ManifestLocation::Git(location)) = &rollout.target.location
            && !rollout.changes.is_empty()
        {
            self.lookup_cache.forget_repository(location);
            self.timer.record_change(Instant::now());
        }
        outcome
    }

    /// Reason to delay a rollout that is otherwise ready: a recent refused eviction, a field that the API server did not keep,
    /// reverts, or too many rewrites.
    fn hold_reason(&mut self, rollout: &PlannedRollout, snapshot: &ClusterSnapshot) -> Option<HoldReason> {
        let now = Instant::now();
        self.evictions.retain(|_, next| now < *next);
        if rollout.changes.iter().any(|change| matches!(change, Change::Restart(_)))
            && let Some(next) = self.evictions.get(&rollout.target.to_string())
        {
            self.timer.schedule(*next);
            let detail = "the last eviction was refused a moment ago".to_owned();
            return Some(HoldReason::Disruption { detail });
        }
        self.not_kept.retain(|_, (next, _)| now < *next);
        if let Some((_, field)) = self.not_kept.get(&rollout.target)
            && rollout.has_applies()
        {
            return Some(HoldReason::NotKept { field: field.clone() });
        }
        if !rollout.is_rewrite(snapshot) {
            return None;
        }
        if let Some(why) = self.repeated_writes.hold_reason(rollout, snapshot, self.started.elapsed()) {
            return Some(why);
        }
        let next = self.rewrite_rate_limiter.retry_at(&rollout.target, self.started.elapsed())?;
        self.timer.schedule(self.started + next);
        Some(HoldReason::TooOften)
    }

    /// Describes a node that the rollout reaches now and that the plan does not cover. Taking a snapshot consumes the
    /// cluster's change notification, so any difference schedules another reconcile.
    async fn change_since_plan(
        &mut self,
        planned: &ClusterSnapshot,
        target: &RolloutTarget,
    ) -> Result<Option<String>> {
        let Some(now) = self.snapshot().await? else { return Ok(Some("farrier is stopping".to_owned())) };
        if now != *planned {
            self.timer.record_change(Instant::now());
        }
        Ok(planned.node_change(&now, target))
    }

    /// Applies the next step of each upgrading node, uncordons nodes that no planned upgrade covers, and applies the changes of
    /// node tasks. Returns the applied steps.
    pub(super) async fn upgrade(&mut self, planned: &Planned) -> Vec<String> {
        let now = Instant::now();
        self.evictions.retain(|_, next| now < *next);
        let rollouts = &planned.plan.rollouts;
        let upgrades = rollouts.iter().filter_map(|rollout| rollout.upgrade.as_ref());
        let is_due = |step: &&Change| !self.evictions.contains_key(&step.object());
        let mut steps: Vec<Change> =
            upgrades.flat_map(PlannedUpgrade::changes).filter(is_due).cloned().collect();
        let mut node_changes = uncordoned(&planned.snapshot, rollouts, &self.services.process.instance);
        let tasks = self.context.node_tasks.iter();
        node_changes.extend(tasks.flat_map(|task| task.changes(&self.services.definitions, planned)));
        let contested = self.handovers.drop_contested(&mut node_changes, self.started.elapsed());
        if let Some(node) = contested.first() {
            let count = contested.len();
            let hint = "let the other writer set a startup taint only when a node registers; farrier writes to the nodes again later";
            tracing::warn!(node, count, hint, "another writer reverts farrier's changes of nodes");
        }
        steps.extend(node_changes.iter().cloned());
        let (applied, refused) =
            apply_upgrade_steps(&self.services.process.cancel, self.context.cluster.as_ref(), steps).await;
        node_changes.retain(|change| applied.contains(&change.step()));
        self.handovers.record_writes(&node_changes, self.started.elapsed());
        let retry_at = Instant::now() + EVICTION_RETRY_DELAY;
        self.evictions.extend(refused.into_iter().map(|pod| (pod, retry_at)));
        applied
    }

    /// Logs a rollout and counts it in the metrics. Changes that set no image are not counted.
    fn log(&self, snapshot: &ClusterSnapshot, rollout: &PlannedRollout, error: Option<&str>) {
        if self.builds.is_single_run() {
            return;
        }
        let (image, target, changes) = (&rollout.image, &rollout.target, rollout.changes.len());
        let sets_image = rollout.changes.iter().any(|change| change.sets_image(snapshot));
        let outcome = match error {
            None if sets_image => {
                tracing::info!(%image, %target, changes, "rolled out");
                RewriteOutcomeLabel::Made
            }
            None => return,
            Some(error) => {
                tracing::warn!(%image, %target, error, "rollout failed, planning it again");
                RewriteOutcomeLabel::Failed
            }
        };
        if sets_image {
            self.context.metrics.rewrite(rollout.target.strategy, outcome);
        }
    }
}
