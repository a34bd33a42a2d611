//! Runs builds in separate tasks.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use farrier_builder::{
    Attempts,
    services::{BuildServices, ProcessControl, Result},
};
use farrier_core::plan::{Cell, Phase, Plan};
use oci::error_chain;
use tokio::{
    task::{Id, JoinSet},
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use tracing::Instrument as _;

use super::{
    activity::{BuildReporter, SharedActivity},
    queue::{BuildDisposition, CellKey, Queue, key_of},
};
use crate::{
    TargetReport,
    reconcile::{AttemptResult, BuildFault, build_planned},
    runtime::{BuildOutcomeLabel, Metrics},
};

/// Error of a build that panicked, or whose outcome could not be recorded.
pub(super) const NO_BUILD_RESULT: &str = "the build ended without a result; farrier's log says why";

/// Returns the error of a build whose last `attempts` attempts ended because farrier itself was killed.
fn killed_message(attempts: u32) -> String {
    let attempts = match attempts {
        1 => "the last attempt".to_owned(),
        attempts => format!("the last {attempts} attempts"),
    };
    format!(
        "{attempts} ended without a result: farrier was killed during the build (`kubectl describe pod` says why; if it ran out of \
         memory, raise the limit)"
    )
}

/// Queued and running builds of the loop.
pub(super) struct Builds {
    queue: Queue,
    activity: SharedActivity,
    tasks: JoinSet<Result<AttemptResult>>,
    started: HashMap<Id, (Arc<Cell>, Instant)>,
    /// Cancels all builds of the loop.
    cancel: CancellationToken,
    /// Cancels the builds of the current term of leadership.
    term: CancellationToken,
}

/// A build that has ended.
pub(super) struct FinishedBuild {
    pub(super) cell: Arc<Cell>,
    /// Outcome. `None` if the build panicked.
    pub(super) outcome: Option<Result<AttemptResult>>,
    took: Duration,
}

impl FinishedBuild {
    /// Whether the build found a changed input.
    pub(super) fn is_outdated(&self) -> bool {
        matches!(&self.outcome, Some(Ok(result)) if result.fault == Some(BuildFault::Outdated))
    }
}

impl Builds {
    pub(super) fn new(queue: Queue, cancel: CancellationToken) -> Self {
        let term = cancel.child_token();
        Self {
            queue,
            activity: SharedActivity::default(),
            tasks: JoinSet::new(),
            started: HashMap::new(),
            cancel,
            term,
        }
    }

    /// Updates the queue with the builds of a plan.
    pub(super) fn update(&mut self, plan: &Plan, services: &BuildServices) {
        let images = &services.definitions.images;
        let builds = plan.builds().map(|cell| {
            let cost = images.get(&cell.image).map(|image| image.spec.build).unwrap_or_default();
            (Arc::clone(cell), cost)
        });
        let with_changed_inputs = self.queue.update(builds);
        for key in &with_changed_inputs {
            self.activity.reset(key);
        }
        // A single run tries each build once, without delay.
        if !self.is_single_run() {
            let attempts = Attempts::in_cache(&services.cache).without_outcome();
            for (key, attempts, wait) in self.queue.delay_killed(&attempts, Instant::now(), fastrand::f64()) {
                self.activity.record_delay(&key, attempts, killed_message(attempts), wait);
            }
        }
        for key in self.queue.queued() {
            self.activity.record_queued(key);
        }
    }

    /// Whether the builds belong to a single run. A single run shows builds as progress and reports them at its end, instead of
    /// logging them.
    pub(super) fn is_single_run(&self) -> bool {
        self.queue.is_once()
    }

    /// Starts every build that may start now.
    pub(super) fn start(&mut self, services: &BuildServices) {
        let logs_stages = !self.is_single_run();
        while let Some(cell) = self.queue.start(Instant::now()) {
            let key = key_of(&cell);
            self.activity.record_start(&key);
            let reporter = Arc::new(BuildReporter {
                key,
                activity: self.activity.clone(),
                next: Arc::clone(&services.process.reporter),
                logs_stages,
            });
            let process =
                ProcessControl { reporter, cancel: self.term.child_token(), ..services.process.clone() };
            let builder = BuildServices { process, ..services.clone() };
            let span = tracing::info_span!(
                "build",
                image = %cell.image,
                kernel = %cell.target.release,
                target = %cell.target
            );
            let task_cell = Arc::clone(&cell);
            let build = async move {
                if logs_stages {
                    tracing::info!("build starts");
                }
                build_planned(&builder, &task_cell).await
            };
            let handle = self.tasks.spawn(build.instrument(span));
            self.started.insert(handle.id(), (cell, Instant::now()));
        }
    }

    /// Waits for the next build to end; forever if none runs.
    pub(super) async fn next_end(&mut self) -> FinishedBuild {
        loop {
            let (id, outcome) = match self.tasks.join_next_with_id().await {
                Some(Ok((id, outcome))) => (id, Some(outcome)),
                // A panic is a bug in farrier. It affects no other build.
                Some(Err(error)) => (error.id(), None),
                None => std::future::pending().await,
            };
            if let Some((cell, since)) = self.started.remove(&id) {
                return FinishedBuild { cell, outcome, took: since.elapsed() };
            }
        }
    }

    /// Records and logs the end of a build. Returns the cell's new phase, or `None` if the build was stopped.
    pub(super) fn record_end(&mut self, finished: &FinishedBuild, metrics: &Metrics) -> Option<Phase> {
        let (key, took) = (key_of(&finished.cell), finished.took);
        if let Some(Err(error)) = &finished.outcome {
            let hint = error.hint();
            tracing::error!(error = error_chain(error), hint, "the build's outcome could not be recorded");
        }
        let result = finished.outcome.as_ref().and_then(|outcome| outcome.as_ref().ok());
        let (disposition, label) = disposition_of(result);
        metrics.build(label, took);
        let retry_in = self.queue.record_end(&key, disposition, Instant::now(), fastrand::f64());
        if disposition == BuildDisposition::Stopped {
            self.activity.record_stop(&key);
            return None;
        }
        let error = error_of(result);
        if !self.is_single_run() {
            log_end(finished, error.as_deref(), retry_in);
        }
        let phase = match (&error, retry_in) {
            (None, _) => Phase::Published,
            (Some(_), Some(_)) => Phase::Retrying,
            (Some(_), None) => Phase::Failed,
        };
        self.activity.record_end(&key, took, error, retry_in);
        Some(phase)
    }

    /// Stops the builds of a lost leadership. The stopped builds are queued for the next term.
    pub(super) fn abandon(&mut self) {
        self.term.cancel();
        self.term = self.cancel.child_token();
    }

    /// Stops all builds, and waits until the engine has cleaned up.
    pub(super) async fn stop(&mut self) {
        self.cancel.cancel();
        while self.tasks.join_next().await.is_some() {}
    }

    /// Discards the activity of cells that are neither in `cells` nor in the queue.
    pub(super) fn retain_activity(&self, cells: &BTreeSet<CellKey>) {
        self.activity.retain(|key| cells.contains(key) || self.queue.contains(key));
    }

    pub(super) fn activity(&self) -> &SharedActivity {
        &self.activity
    }

    pub(super) fn next_due(&self) -> Option<Instant> {
        self.queue.next_due(Instant::now())
    }

    pub(super) fn running(&self) -> usize {
        self.queue.running()
    }

    pub(super) fn waiting(&self) -> usize {
        self.queue.waiting()
    }
}

/// Returns what the queue does after a build, and the build's outcome in the metrics. `result` is `None` if the build has no
/// result.
fn disposition_of(result: Option<&AttemptResult>) -> (BuildDisposition, BuildOutcomeLabel) {
    let Some(AttemptResult { report, fault }) = result else {
        return (BuildDisposition::Transient, BuildOutcomeLabel::Faulted);
    };
    match fault {
        None if matches!(report, TargetReport::Reused { .. }) => {
            (BuildDisposition::Settled, BuildOutcomeLabel::Reused)
        }
        None => (BuildDisposition::Settled, BuildOutcomeLabel::Built),
        Some(BuildFault::Permanent) => (BuildDisposition::Settled, BuildOutcomeLabel::Failed),
        Some(BuildFault::Tampered) => (BuildDisposition::Settled, BuildOutcomeLabel::Tampered),
        Some(BuildFault::Stopped) => (BuildDisposition::Stopped, BuildOutcomeLabel::Stopped),
        // If the next plan has a new input hash, the build starts without backoff. Otherwise the backoff prevents a busy loop.
        Some(BuildFault::Outdated) => (BuildDisposition::Transient, BuildOutcomeLabel::Stopped),
        Some(BuildFault::Transient | BuildFault::Unreachable) => {
            (BuildDisposition::Transient, BuildOutcomeLabel::Faulted)
        }
    }
}

/// Returns the error of a build with its hint, or `None` if the build succeeded.
fn error_of(result: Option<&AttemptResult>) -> Option<String> {
    match result.map(|result| &result.report) {
        Some(TargetReport::Failed { error, hint, .. }) => {
            let hint = hint.as_ref().map(|hint| format!(" ({hint})")).unwrap_or_default();
            Some(format!("{error}{hint}"))
        }
        Some(_) => None,
        None => Some(NO_BUILD_RESULT.to_owned()),
    }
}

fn log_end(finished: &FinishedBuild, error: Option<&str>, retry_in: Option<Duration>) {
    let FinishedBuild { cell, took, .. } = finished;
    let (image, kernel) = (&cell.image, &cell.target.release);
    match error {
        None => tracing::info!(%image, %kernel, target = %cell.target, ?took, "build published"),
        Some(error) if finished.is_outdated() => {
            tracing::info!(%image, %kernel, target = %cell.target, ?took, why = error, "build is stale, planning it again");
        }
        Some(error) => {
            let retry_in_seconds = retry_in.map(|wait| wait.as_secs());
            tracing::warn!(%image, %kernel, target = %cell.target, ?took, retry_in_seconds, error, "build failed");
        }
    }
}
