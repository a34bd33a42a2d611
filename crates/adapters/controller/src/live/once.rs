//! A single run of the controller, which ends when nothing is left to do.
//!
//! The loop ([`Live::run`]) reacts to events: each reconcile makes the rollouts that are ready and starts builds, whose ends
//! cause later reconciles. A single run has no later reconcile, so it takes the steps of a reconcile in the order in which
//! they depend on each other, builds, union images, rollouts, and plans again after each step that changed the registry or the cluster.

use std::{sync::Arc, time::Duration};

use farrier_builder::services::{BuildServices, Result};
use farrier_cluster::Cluster;
use farrier_core::{
    image::Chains,
    plan::{PlannedRollout, retry},
};
use tokio::sync::watch;

use super::{
    Live, LiveContext, NodeTask,
    builds::{FinishedBuild, NO_BUILD_RESULT},
    queue::Queue,
};
use crate::{
    Planned, ReconcileReport, RolloutReport, TargetReport,
    reconcile::{BuildFault, record_kernels_in_use},
    runtime::{Configuration, Health, Metrics},
};

/// Maximum number of plans for the rollouts of a single run, if the nodes change between each plan and its writes.
const MAX_PLANS: u32 = 5;

/// Runs the controller until nothing is left to do. Builds each cell at most once. The failure of one target does not stop
/// the others.
///
/// Rollouts come last. They are planned again from the current registry and nodes (guarantee 1), because a build may have
/// taken an hour.
pub async fn run_once(
    services: BuildServices,
    cluster: Arc<dyn Cluster>,
    node_tasks: Vec<Arc<dyn NodeTask>>,
) -> Result<ReconcileReport> {
    let definitions = Arc::new(services.definitions.clone());
    let context = LiveContext {
        resync: Duration::from_hours(1),
        cluster,
        configuration: watch::channel(Configuration { definitions, error: None }).1,
        leads: watch::channel(true).1,
        status: None,
        page: None,
        node_tasks,
        reconcile_request: Arc::default(),
        metrics: Arc::new(Metrics::default()),
        health: Arc::new(Health::default()),
    };
    let queue = Queue::once(services.tools.limits);
    Box::pin(Live::with_queue(services, context, queue).run_to_completion()).await
}

impl Live {
    /// Builds, publishes and rolls out everything in the plan, and reports the outcome.
    async fn run_to_completion(mut self) -> Result<ReconcileReport> {
        let mut report = ReconcileReport::default();
        let Some(mut planned) = self.plan().await? else { return Ok(report) };
        report.targets = self.add_tags_and_signatures(&planned.plan).await;
        self.build_all(&mut planned, &mut report).await?;
        if !report.targets.is_empty() {
            self.plan_again(&mut planned, &mut report).await?;
        }
        if !planned.plan.unions.is_empty() && !self.services.process.cancel.is_cancelled() {
            report.targets.extend(self.publish_unions(&planned.plan).await);
            self.plan_again(&mut planned, &mut report).await?;
        }
        let after = self.roll_out_all(&mut planned, &mut report).await?;
        report.steps.extend(self.upgrade(&planned).await);
        let labels = self.label_nodes(&planned.plan).await;
        record_kernels_in_use(&self.services, &planned, &mut self.last_record).await;
        report.unreachable |= planned.unreachable;
        report.plan = planned.after(after, &labels).plan;
        report.steps.extend(labels.steps);
        Ok(report)
    }

    /// Replaces `planned` by a plan for the current state, unless the run is canceled.
    async fn plan_again(&mut self, planned: &mut Planned, report: &mut ReconcileReport) -> Result<()> {
        report.unreachable |= planned.unreachable;
        if let Some(replanned) = self.plan().await? {
            *planned = replanned;
        }
        Ok(())
    }

    /// Runs the builds of a plan. Plans again whenever a finished image unblocks other builds.
    ///
    /// After an error of the run itself, no new builds start, but running builds are awaited: a dropped build would leave its
    /// resources in the engine.
    async fn build_all(&mut self, planned: &mut Planned, report: &mut ReconcileReport) -> Result<()> {
        let chains = Chains::of(&self.services.definitions.images);
        let mut run_error = None;
        self.builds.update(&planned.plan, &self.services);
        loop {
            if run_error.is_none() {
                self.start_builds();
            }
            if self.builds.running() == 0 {
                return run_error.map_or(Ok(()), Err);
            }
            let finished = self.builds.next_end().await;
            self.record_build_end(&finished);
            let FinishedBuild { cell, outcome, .. } = finished;
            let result = match outcome {
                Some(Ok(result)) => result,
                Some(Err(error)) => {
                    run_error.get_or_insert(error);
                    continue;
                }
                None => {
                    let (subject, error) = (cell.subject(), NO_BUILD_RESULT.to_owned());
                    report.targets.push(TargetReport::Failed {
                        subject,
                        error,
                        hint: None,
                        detail: Vec::new(),
                    });
                    continue;
                }
            };
            report.unreachable |= result.fault == Some(BuildFault::Unreachable);
            report.targets.push(result.report);
            let is_needed = chains.dependents(&cell.image).next().is_some();
            if result.fault.is_some() || !is_needed || self.services.process.cancel.is_cancelled() {
                continue;
            }
            match self.plan_again(planned, report).await {
                Ok(()) => self.builds.update(&planned.plan, &self.services),
                Err(error) => drop(run_error.get_or_insert(error)),
            }
        }
    }

    /// Makes rollouts until each has a report. Returns every rollout of the last plan, in its state after the writes. Gives up
    /// after [`MAX_PLANS`].
    async fn roll_out_all(
        &mut self,
        planned: &mut Planned,
        report: &mut ReconcileReport,
    ) -> Result<Vec<PlannedRollout>> {
        let mut plans = 1;
        loop {
            let (reports, after) = self.roll_out(planned).await?;
            report.steps.extend(reports.iter().flat_map(RolloutReport::steps));
            let reported: Vec<_> =
                report.rollouts.iter().map(|rollout| rollout.planned.target.clone()).collect();
            let is_new = |rollout: &RolloutReport| !reported.contains(&rollout.planned.target);
            report.rollouts.extend(reports.into_iter().filter(is_new));
            let all_reported = report.rollouts.len() >= planned.plan.rollouts.len();
            if all_reported || self.services.process.cancel.is_cancelled() {
                return Ok(after);
            }
            if plans == MAX_PLANS {
                let change = self.node_change.as_deref().unwrap_or("another rollout of its chain waits");
                let error = format!(
                    "not rolled out: each of {plans} plans was out of date before its write: {change}; find out what changes \
                     the nodes, or let ignoreNodes in site.yaml ignore them, and run farrier again"
                );
                for planned in &after {
                    if !report.rollouts.iter().any(|made| made.planned.target == planned.target) {
                        let (planned, error) = (planned.clone(), Some(error.clone()));
                        report.rollouts.push(RolloutReport { planned, error });
                    }
                }
                return Ok(after);
            }
            // A rollout without a report waits for a new plan. Keep the reports of written rollouts, and plan the others again.
            report.rollouts.retain(|rollout| !rollout.planned.changes.is_empty());
            let pause = tokio::time::sleep(retry::reconcile_delay(plans, 0.0));
            self.services.process.cancel.run_until_cancelled(pause).await;
            plans += 1;
            self.plan_again(planned, report).await?;
        }
    }
}
