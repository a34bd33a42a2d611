//! Adapter: a single run, which reconciles until nothing is left to do.

use std::{sync::Arc, time::Duration};

use farrier_core::image::Chains;
use tokio::sync::watch;

use super::{
    Live, LiveContext,
    builds::{BROKE_OFF, EndedBuild},
    queue::Queue,
};
use crate::{
    cluster::Cluster,
    controller::{Planned, ReconcileReport, RolloutReport, TargetReport, reconcile::BuildFault},
    parts::{Parts, Result},
    runtime::{Configuration, Health, Metrics},
};

/// Runs until nothing is left to do. Each cell is built at most once, and a target's failure does not stop the others.
/// Rollouts come last and are planned from the registry and the nodes at that time (guarantee 1), because a build may
/// have taken an hour.
pub async fn run_once(parts: Parts, cluster: Arc<dyn Cluster>) -> Result<ReconcileReport> {
    let definitions = Arc::new(parts.definitions.clone());
    let context = LiveContext {
        resync: Duration::from_hours(1),
        cluster,
        configuration: watch::channel(Configuration { definitions, error: None }).1,
        leads: watch::channel(true).1,
        status: None,
        page: None,
        asked: Arc::default(),
        metrics: Arc::new(Metrics::default()),
        health: Arc::new(Health::default()),
    };
    let queue = Queue::once(parts.limits);
    Box::pin(Live::with_queue(parts, context, queue).until_idle()).await
}

impl Live {
    /// Builds, publishes and rolls out everything that is planned, and reports the outcome.
    async fn until_idle(mut self) -> Result<ReconcileReport> {
        let mut report = ReconcileReport::default();
        let Some(mut planned) = self.plan().await? else { return Ok(report) };
        report.targets = self.complete(&planned.plan).await;
        self.build_all(&mut planned, &mut report).await?;
        if !report.targets.is_empty() {
            planned = self.plan_again(planned, &mut report).await?;
        }
        if !planned.plan.unions.is_empty() && !self.parts.cancel.is_cancelled() {
            report.targets.extend(self.publish_unions(&planned.plan).await);
            planned = self.plan_again(planned, &mut report).await?;
        }
        loop {
            let rollouts = self.roll_out(&mut planned).await?;
            let made: Vec<_> = report.rollouts.iter().map(|made| made.planned.target.clone()).collect();
            let is_new = |rollout: &RolloutReport| !made.contains(&rollout.planned.target);
            report.rollouts.extend(rollouts.into_iter().filter(is_new));
            if report.rollouts.len() >= planned.plan.rollouts.len() || self.parts.cancel.is_cancelled() {
                break;
            }
            // Nodes have changed since the plan was made. Plan again what was not written yet.
            report.rollouts.retain(|rollout| !rollout.planned.changes.is_empty());
            planned = self.plan_again(planned, &mut report).await?;
        }
        self.upgrade(&planned).await;
        self.label_nodes(&mut planned.plan).await;
        self.parts.record_kernels(&planned, &mut self.last_record).await;
        report.unreachable |= planned.unreachable;
        report.plan = planned.plan;
        Ok(report)
    }

    /// Returns a plan of the current state, or `before` on cancellation.
    async fn plan_again(&mut self, before: Planned, report: &mut ReconcileReport) -> Result<Planned> {
        report.unreachable |= before.unreachable;
        Ok(self.plan().await?.unwrap_or(before))
    }

    /// Runs the builds of a plan, and plans again whenever a new image unblocks builds that need it. After an error of
    /// the run itself, running builds are awaited: a dropped build would leave its resources in the engine.
    async fn build_all(&mut self, planned: &mut Planned, report: &mut ReconcileReport) -> Result<()> {
        let chains = Chains::of(&self.parts.definitions.images);
        let mut fault = None;
        self.builds.update(&planned.plan, &self.parts);
        loop {
            if fault.is_none() {
                self.start_builds();
            }
            if self.builds.running() == 0 {
                return fault.map_or(Ok(()), Err);
            }
            let ended = self.builds.next_end().await;
            self.note_build(&ended);
            let EndedBuild { cell, end, .. } = ended;
            let end = match end {
                Some(Ok(end)) => end,
                Some(Err(error)) => {
                    fault.get_or_insert(error);
                    continue;
                }
                None => {
                    let (subject, error) = (cell.subject(), BROKE_OFF.to_owned());
                    report.targets.push(TargetReport::Failed {
                        subject,
                        error,
                        hint: None,
                        detail: Vec::new(),
                    });
                    continue;
                }
            };
            report.unreachable |= end.fault == Some(BuildFault::Unreachable);
            report.targets.push(end.report);
            let is_needed = chains.dependents(&cell.image).next().is_some();
            if end.fault.is_some() || !is_needed || self.parts.cancel.is_cancelled() {
                continue;
            }
            match self.plan().await {
                Ok(Some(anew)) => {
                    report.unreachable |= planned.unreachable;
                    *planned = anew;
                    self.builds.update(&planned.plan, &self.parts);
                }
                Ok(None) => {}
                Err(error) => drop(fault.get_or_insert(error)),
            }
        }
    }
}
