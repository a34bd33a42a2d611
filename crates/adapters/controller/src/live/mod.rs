//! The controller's long-running loop: observe, plan, roll out, and build concurrently.
//!
//! One task observes, plans and rolls out. Builds run in separate tasks and never block it. A reconcile is triggered
//! when the cluster, the definitions or the leadership change, when a build ends, and when a wait is over. A periodic
//! resync finds images that the registry has lost. A single run ([`once`]) takes the same steps, in another order.

mod activity;
mod builds;
pub mod once;
mod queue;
mod reconcile_timer;
mod rollouts;
mod states;
mod view;
mod wait_tracker;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

pub use activity::SharedActivity;
use farrier_builder::{
    images::LastRecord,
    services::{BuildServices, Result},
};
use farrier_cluster::Cluster;
use farrier_core::{
    image::Definitions,
    kernel::KernelTarget,
    plan::{
        Change, ClusterSnapshot, NodeKernelLimiter, NodeWriteLimiter, Outcome, Plan, RepeatedWrites,
        RewriteRateLimiter, RolloutTarget, SnapshotScope, UnfinishedRollout, next_deadline, retry,
        unfinished_kernels, unfinished_rollouts,
    },
    site::ignore_nodes,
};
use jiff::Timestamp;
use oci::error_chain;
use tokio::{
    sync::{Notify, watch},
    time::Instant,
};
pub use view::{ReconcileView, StatusSink};

use self::{
    builds::{Builds, FinishedBuild},
    queue::Queue,
    reconcile_timer::ReconcileTimer,
    states::{StateLog, log_while_waiting},
    view::StatusWorker,
    wait_tracker::WaitTracker,
};
use super::{
    LookupCache, Planned, RolloutReport, TargetReport,
    apply::{NodeLabelWrites, NodeLabeler, label_nodes},
    reconcile::{add_missing_tags, plan_for, publish_planned_union, record_kernels_in_use, sign_planned},
};
use crate::runtime::{Configuration, Health, Metrics, ReconcileOutcomeLabel};

/// Longest wait for a single event. Each iteration reports liveness, so a longer silence means that the loop hangs.
const MAX_WAIT: Duration = Duration::from_secs(10);
/// Timeout for writing the last status on shutdown.
const LAST_STATUS_TIMEOUT: Duration = Duration::from_secs(5);

/// Writes to nodes that an optional feature adds to each reconcile.
pub trait NodeTask: Send + Sync {
    /// Returns the writes for a plan.
    fn changes(&self, definitions: &Definitions, planned: &Planned) -> Vec<Change>;
}

/// Dependencies of the loop, in addition to [`BuildServices`].
pub struct LiveContext {
    /// Resync interval, after which a reconcile drops all cached lookups. Within this time farrier notices a tag that the
    /// registry has lost.
    pub resync: Duration,
    /// Cluster with the nodes and rollout targets.
    pub cluster: Arc<dyn Cluster>,
    /// Definitions in use, and the error in the definitions on disk. If the sender is dropped, the definitions never change.
    pub configuration: watch::Receiver<Configuration>,
    /// Whether this replica considers itself the leader. A standby observes and plans, but neither builds nor writes.
    pub leads: watch::Receiver<bool>,
    /// Sink that writes the leader's status.
    pub status: Option<Arc<dyn StatusSink>>,
    /// Sink that shows every reconcile, on a standby too.
    pub page: Option<Arc<dyn StatusSink>>,
    /// Optional features that write to nodes.
    pub node_tasks: Vec<Arc<dyn NodeTask>>,
    /// Notified when a user's action needs a reconcile.
    pub reconcile_request: Arc<Notify>,
    /// Prometheus metrics.
    pub metrics: Arc<Metrics>,
    /// Liveness and readiness.
    pub health: Arc<Health>,
}

/// The controller's loop.
pub struct Live {
    services: BuildServices,
    context: LiveContext,
    status: Option<StatusWorker>,
    page: Option<StatusWorker>,
    builds: Builds,
    timer: ReconcileTimer,
    lookup_cache: LookupCache,
    cache_since: Instant,
    last_record: LastRecord,
    /// Kernels that wait for an image or a rollout.
    kernels: WaitTracker<KernelTarget>,
    /// Rollouts that are held or unfinished.
    rollouts: WaitTracker<UnfinishedRollout>,
    states: StateLog,
    node_kernel_limiter: NodeKernelLimiter,
    labels: NodeLabeler,
    /// Nodes that were recently handed over, uncordoned or changed by a node task.
    handovers: NodeWriteLimiter,
    rewrite_rate_limiter: RewriteRateLimiter,
    repeated_writes: RepeatedWrites,
    /// Earliest time of the next eviction after a refusal, by rollout target or by pod.
    evictions: BTreeMap<String, Instant>,
    /// Fields that the API server did not keep, each with the earliest time of the next write.
    not_kept: BTreeMap<RolloutTarget, (Instant, String)>,
    /// Change of the nodes for which a rollout last waited for another plan.
    node_change: Option<String>,
    /// Reference point for `rewrite_rate_limiter`, `repeated_writes` and the handovers.
    started: Instant,
    /// Number of consecutive reconciles with a fault.
    consecutive_failures: u32,
}

/// Waits for a change; forever if the sender is dropped.
async fn changed<T>(receiver: &mut watch::Receiver<T>) {
    if receiver.changed().await.is_err() {
        std::future::pending::<()>().await;
    }
}

impl Live {
    /// Creates a loop, which starts with [`Self::run`].
    pub fn new(services: BuildServices, context: LiveContext) -> Self {
        let queue = Queue::new(services.tools.limits);
        Self::with_queue(services, context, queue)
    }

    fn with_queue(services: BuildServices, mut context: LiveContext, queue: Queue) -> Self {
        let builds = Builds::new(queue, services.process.cancel.child_token());
        let now = Instant::now();
        Self {
            services,
            status: context.status.take().map(StatusWorker::start),
            page: context.page.take().map(StatusWorker::start),
            context,
            builds,
            timer: ReconcileTimer::new(now),
            lookup_cache: LookupCache::default(),
            cache_since: now,
            last_record: LastRecord::default(),
            kernels: WaitTracker::default(),
            rollouts: WaitTracker::default(),
            states: StateLog::default(),
            node_kernel_limiter: NodeKernelLimiter::default(),
            labels: NodeLabeler::new(now),
            handovers: NodeWriteLimiter::default(),
            rewrite_rate_limiter: RewriteRateLimiter::default(),
            repeated_writes: RepeatedWrites::default(),
            evictions: BTreeMap::new(),
            not_kept: BTreeMap::new(),
            node_change: None,
            started: now,
            consecutive_failures: 0,
        }
    }

    /// Runs until canceled. On cancellation it finishes the current rewrite, stops the builds, and writes nothing
    /// further to the cluster except the last status.
    pub async fn run(mut self) {
        self.context.metrics.leader(*self.context.leads.borrow_and_update());
        self.apply_configuration();
        while !self.services.process.cancel.is_cancelled() {
            self.context.health.beat();
            self.handle_next_event().await;
        }
        self.builds.stop().await;
        if let Some(status) = self.status.take() {
            status.finish(LAST_STATUS_TIMEOUT).await;
        }
    }

    /// Waits for the next event and handles the event.
    async fn handle_next_event(&mut self) {
        let latest = Instant::now() + MAX_WAIT;
        let due = self.timer.due().map_or(latest, |due| due.min(latest));
        // The cluster reports a change until the next snapshot. Do not poll it while a reconcile of a change is scheduled.
        let may_poll_cluster = !self.timer.has_change();
        tokio::select! {
            biased;
            () = self.services.process.cancel.cancelled() => {}
            () = changed(&mut self.context.leads) => self.handle_leadership_change(),
            () = changed(&mut self.context.configuration) => {
                self.apply_configuration();
                self.timer.record_change(Instant::now());
            }
            finished = self.builds.next_end() => {
                self.record_build_end(&finished);
                self.start_builds();
                self.timer.record_change(Instant::now());
            }
            () = self.context.reconcile_request.notified() => self.timer.record_change(Instant::now()),
            () = tokio::time::sleep_until(due) => self.run_due().await,
            () = self.context.cluster.changed(), if may_poll_cluster => self.timer.record_change(Instant::now()),
        }
    }

    /// Starts builds whose wait is over, and reconciles if the scheduled time has come.
    async fn run_due(&mut self) {
        let now = Instant::now();
        self.start_builds();
        self.update_wait_metrics(now);
        if self.timer.due().is_some_and(|due| due <= now) {
            self.reconcile().await;
        }
    }

    fn update_wait_metrics(&self, now: Instant) {
        let kernels = self.kernels.waits(now).map(|(target, wait)| (target.to_string(), wait));
        self.context.metrics.kernels(kernels.collect());
        let rollouts = self.rollouts.waits(now);
        let rollouts =
            rollouts.map(|(rollout, wait)| (&*rollout.image, &*rollout.target, rollout.state, wait));
        self.context.metrics.rollouts(rollouts);
    }

    /// Reconciles once and schedules the next reconcile.
    async fn reconcile(&mut self) {
        let began = Instant::now();
        self.timer.begin(began);
        if began - self.cache_since >= self.context.resync {
            self.lookup_cache.reset();
            self.cache_since = began;
        }
        let health = Arc::clone(&self.context.health);
        let outcome = health.beat_during(Box::pin(self.reconcile_once())).await;
        if self.services.process.cancel.is_cancelled() {
            return;
        }
        let outcome = outcome.unwrap_or_else(|error| {
            let (cluster, hint) = (self.context.cluster.describe(), error.hint());
            let error = error_chain(&error);
            tracing::warn!(error, cluster, hint, "reconcile failed");
            if let Some(page) = &self.page {
                page.failed(&error);
            }
            ReconcileOutcomeLabel::Failed
        });
        tracing::debug!(took = ?began.elapsed(), ?outcome, "reconcile finished");
        self.context.metrics.reconciled(outcome, began.elapsed());
        let now = Instant::now();
        self.timer.schedule(self.cache_since.max(began) + self.context.resync);
        if let Some(due) = self.lookup_cache.repositories_due() {
            self.timer.schedule(due);
        }
        let is_done = outcome == ReconcileOutcomeLabel::Done;
        self.consecutive_failures = if is_done { 0 } else { self.consecutive_failures.saturating_add(1) };
        let next = now + retry::reconcile_delay(self.consecutive_failures, fastrand::f64());
        match outcome {
            ReconcileOutcomeLabel::Done => {}
            ReconcileOutcomeLabel::Unreachable | ReconcileOutcomeLabel::Refused => self.timer.schedule(next),
            ReconcileOutcomeLabel::Failed => self.timer.back_off(next),
        }
    }

    async fn reconcile_once(&mut self) -> Result<ReconcileOutcomeLabel> {
        let Some(mut planned) = self.plan().await? else { return Ok(ReconcileOutcomeLabel::Done) };
        let definitions = &self.services.definitions;
        let until_deadline = next_deadline(definitions, &planned.snapshot, Timestamp::now());
        let (mut rollouts, mut targets) = (Vec::new(), Vec::new());
        if self.may_act() {
            self.states.log_warnings(&planned.plan);
            let (reports, after) = self.roll_out(&planned).await?;
            rollouts = reports;
            targets = self.add_tags_and_signatures(&planned.plan).await;
            targets.extend(self.publish_unions(&planned.plan).await);
            self.upgrade(&planned).await;
            let labels = self.label_nodes(&planned.plan).await;
            planned = planned.after(after, &labels);
            self.builds.update(&planned.plan, &self.services);
            self.start_builds();
            // Write the record last, because nothing depends on it.
            record_kernels_in_use(&self.services, &planned, &mut self.last_record).await;
        }
        let now = Instant::now();
        self.kernels.update(unfinished_kernels(&planned.plan), now);
        self.rollouts.update(unfinished_rollouts(&planned.plan), now);
        let activity = self.builds.activity().snapshot();
        self.context.metrics.plan(&planned.plan, &activity);
        self.update_wait_metrics(now);
        if let Some(wait) = until_deadline {
            self.timer.schedule(now + wait);
        }
        let was_refused = rollouts.iter().any(|report| report.error.is_some())
            || targets.iter().any(|report| matches!(report, TargetReport::Failed { .. }));
        if let Some(since) = planned.snapshot.stale_since {
            tracing::warn!(%since, "the API server does not answer: planned with the last known state of the cluster");
        }
        let outcome = if planned.unreachable || planned.snapshot.stale_since.is_some() {
            ReconcileOutcomeLabel::Unreachable
        } else if was_refused {
            ReconcileOutcomeLabel::Refused
        } else {
            ReconcileOutcomeLabel::Done
        };
        // The leader logs state changes; a standby does not.
        if self.may_act() {
            self.states.log(&planned.plan, &activity);
        }
        self.show(planned, rollouts);
        Ok(outcome)
    }

    /// Observes and plans, retrying failed lookups. Returns `None` on cancellation.
    async fn plan(&mut self) -> Result<Option<Planned>> {
        let Some(snapshot) = self.snapshot().await? else { return Ok(None) };
        self.context.health.set_ready();
        let services = self.services.in_use();
        let planning = Box::pin(plan_for(&services, snapshot, &mut self.lookup_cache));
        log_while_waiting(planning).await.map(Some)
    }

    /// Returns a snapshot of the cluster, with untrusted nodes marked, or `None` on cancellation.
    async fn snapshot(&mut self) -> Result<Option<ClusterSnapshot>> {
        let observed = self.context.cluster.snapshot();
        let Some(observed) = self.services.process.cancel.run_until_cancelled(observed).await else {
            return Ok(None);
        };
        let mut snapshot = observed?;
        ignore_nodes(&mut snapshot, &self.services.definitions.site.ignore_nodes, Timestamp::now());
        self.node_kernel_limiter.limit(&mut snapshot, &self.services.definitions, self.started.elapsed());
        Ok(Some(snapshot))
    }

    /// Whether this replica leads and its fence allows writes.
    fn may_act(&self) -> bool {
        *self.context.leads.borrow() && self.services.process.ensure_may_write().is_ok()
    }

    /// Adds missing tags and signatures to published images.
    async fn add_tags_and_signatures(&mut self, plan: &Plan) -> Vec<TargetReport> {
        let mut reports = Vec::new();
        // An index is signed together with its images.
        for planned in &plan.signatures {
            let report = sign_planned(&self.services.in_use(), planned).await;
            reports.push(self.record_report(report));
        }
        for planned in &plan.cells {
            let Outcome::UpToDate { cell, published, missing_tags, .. } = &planned.outcome else { continue };
            if missing_tags.is_empty() {
                continue;
            }
            let report =
                add_missing_tags(&self.services.in_use(), cell, &published.digest, missing_tags).await;
            self.lookup_cache.forget(cell.references());
            reports.push(self.record_report(report));
        }
        reports
    }

    /// Publishes union images.
    async fn publish_unions(&mut self, plan: &Plan) -> Vec<TargetReport> {
        let mut reports = Vec::new();
        for union in &plan.unions {
            let report = publish_planned_union(&self.services.in_use(), union).await;
            self.lookup_cache.forget([&union.reference]);
            reports.push(self.record_report(report));
        }
        reports
    }

    /// Logs a signature, added tags or a union image. Schedules a reconcile if rollouts may have waited for the result.
    fn record_report(&mut self, report: TargetReport) -> TargetReport {
        if matches!(report, TargetReport::Signed { .. } | TargetReport::United { .. }) {
            // That reconcile finds the new image or signature in the registry.
            self.timer.record_change(Instant::now());
        }
        if self.builds.is_single_run() {
            return report;
        }
        match &report {
            TargetReport::Tagged { subject, references } => {
                tracing::info!(subject, tags = references.len(), "tags added");
            }
            TargetReport::Failed { subject, error, .. } => {
                tracing::warn!(subject, error, "tag, signature or union image not published");
            }
            TargetReport::Signed { subject, image } => tracing::info!(subject, image, "image signed"),
            TargetReport::Built { subject, image, .. }
            | TargetReport::Reused { subject, image, .. }
            | TargetReport::United { subject, image, .. } => {
                tracing::info!(subject, image, "union image published");
            }
        }
        report
    }

    fn record_build_end(&mut self, finished: &FinishedBuild) {
        self.lookup_cache.forget_build(&finished.cell, finished.is_outdated());
        if let Some(phase) = self.builds.record_end(finished, &self.context.metrics) {
            self.states.record_build_end(&finished.cell, phase);
        }
    }

    /// Labels nodes with the kernel that they may boot.
    async fn label_nodes(&mut self, plan: &Plan) -> NodeLabelWrites {
        let (cancel, cluster) = (&self.services.process.cancel, self.context.cluster.as_ref());
        label_nodes(cancel, cluster, &plan.nodes, &mut self.labels).await
    }

    fn start_builds(&mut self) {
        if self.may_act() && !self.services.process.cancel.is_cancelled() {
            self.builds.start(&self.services);
        }
        self.context.metrics.queue(self.builds.running(), self.builds.waiting());
        if let Some(due) = self.builds.next_due() {
            self.timer.schedule(due);
        }
    }

    /// Sends the result of a reconcile to the page, and to the status sink if this replica leads.
    fn show(&self, Planned { plan, snapshot, .. }: Planned, rollouts: Vec<RolloutReport>) {
        let cells = plan.cells.iter().filter(|planned| planned.outcome.cell().is_some());
        let cells = cells.map(|planned| (planned.image.clone(), planned.target.clone())).collect();
        self.builds.retain_activity(&cells);
        let status = self.status.as_ref().filter(|_| self.may_act());
        if status.is_none() && self.page.is_none() {
            return;
        }
        let Configuration { definitions, error } = self.context.configuration.borrow().clone();
        let view = ReconcileView {
            plan: Arc::new(plan),
            snapshot: Arc::new(snapshot),
            definitions,
            activity: self.builds.activity().snapshot(),
            live: self.builds.activity().clone(),
            rollouts,
            configuration_error: error,
            now: Timestamp::now(),
        };
        for worker in self.page.iter().chain(status) {
            worker.show(view.clone());
        }
    }

    fn apply_configuration(&mut self) {
        let Configuration { definitions, error } = self.context.configuration.borrow_and_update().clone();
        self.context.metrics.configuration(error.is_none());
        if self.services.definitions != *definitions {
            self.services.definitions = definitions.as_ref().clone();
            self.context.cluster.set_snapshot_scope(&SnapshotScope::of(&self.services.definitions));
            self.context.metrics.certificates(self.services.certificate_expiries());
            self.lookup_cache = LookupCache::default();
            self.cache_since = Instant::now();
        }
    }

    /// Handles a change of leadership. A leader that loses access to the API server keeps its builds: builds do not need the
    /// API server, and are published once the lease is renewed.
    fn handle_leadership_change(&mut self) {
        let leads = *self.context.leads.borrow_and_update();
        self.context.metrics.leader(self.may_act());
        if self.may_act() {
            // Another replica may have led in between, so that cached lookups and the knowledge of written status are stale.
            self.lookup_cache = LookupCache::default();
            self.status.iter().for_each(StatusWorker::forget);
            self.cache_since = Instant::now();
            self.timer.schedule(Instant::now());
        } else if !leads {
            self.builds.abandon();
        }
    }
}

#[cfg(test)]
mod tests;
