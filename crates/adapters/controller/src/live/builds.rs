//! Runs builds in separate tasks.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use farrier_builder::{
    Attempts,
    parts::{Parts, Result},
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

/// Error shown for a build that panicked, or whose outcome could not be recorded.
pub(super) const NO_BUILD_RESULT: &str = "the build ended without a result; farrier's log says why";

/// Error shown for a build during which farrier itself was killed.
fn without_outcome(attempts: u32) -> String {
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
    /// Outcome; `None` if the build panicked.
    pub(super) end: Option<Result<AttemptResult>>,
    took: Duration,
}

impl FinishedBuild {
    /// Whether the build found a changed input.
    pub(super) fn is_outdated(&self) -> bool {
        matches!(&self.end, Some(Ok(end)) if end.fault == Some(BuildFault::Outdated))
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
    pub(super) fn update(&mut self, plan: &Plan, parts: &Parts) {
        let images = &parts.definitions.images;
        let cost = |cell: &Cell| images.get(&cell.image).map(|image| image.spec.build);
        let costed = |cell: &Arc<Cell>| (Arc::clone(cell), cost(cell).unwrap_or_default());
        let renewed = self.queue.update(plan.builds().map(costed));
        for key in &renewed {
            self.activity.renewed(key);
        }
        // A single run tries each build once, without delay.
        if !self.is_single_run() {
            let attempts = Attempts::in_cache(&parts.cache).without_outcome();
            for (key, attempts, wait) in self.queue.deferred(&attempts, Instant::now(), fastrand::f64()) {
                self.activity.deferred(&key, attempts, without_outcome(attempts), wait);
            }
        }
        for key in self.queue.queued() {
            self.activity.queued(key);
        }
    }

    /// Whether the builds belong to a single run, which shows them as progress and reports them at its end.
    pub(super) fn is_single_run(&self) -> bool {
        self.queue.is_once()
    }

    /// Starts every build that may start now.
    pub(super) fn start(&mut self, parts: &Parts) {
        let logs = !self.is_single_run();
        while let Some(cell) = self.queue.start(Instant::now()) {
            let key = key_of(&cell);
            self.activity.started(&key);
            let builder = Parts {
                reporter: Arc::new(BuildReporter {
                    key,
                    activity: self.activity.clone(),
                    next: Arc::clone(&parts.reporter),
                    logs,
                }),
                cancel: self.term.child_token(),
                ..parts.clone()
            };
            let span = tracing::info_span!(
                "build",
                image = %cell.image,
                kernel = %cell.target.release,
                target = %cell.target
            );
            let task_cell = Arc::clone(&cell);
            let build = async move {
                if logs {
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
            let (id, end) = match self.tasks.join_next_with_id().await {
                Some(Ok((id, end))) => (id, Some(end)),
                // A panic is a bug in farrier. It ends this build and no other.
                Some(Err(error)) => (error.id(), None),
                None => std::future::pending().await,
            };
            if let Some((cell, since)) = self.started.remove(&id) {
                return FinishedBuild { cell, end, took: since.elapsed() };
            }
        }
    }

    /// Records and logs the end of a build. Returns the cell's new phase, or `None` if the build was stopped.
    pub(super) fn note(&mut self, ended: &FinishedBuild, metrics: &Metrics) -> Option<Phase> {
        let FinishedBuild { cell, end, took } = ended;
        let (key, took) = (key_of(cell), *took);
        let end = match end {
            Some(Ok(end)) => Some(end),
            Some(Err(error)) => {
                let hint = error.hint();
                tracing::error!(
                    error = error_chain(error),
                    hint,
                    "the build's outcome could not be recorded"
                );
                None
            }
            None => None,
        };
        let (how, label) = match end.map(|end| end.fault) {
            Some(None) => (BuildDisposition::Settled, label_of(end)),
            Some(Some(BuildFault::Permanent)) => (BuildDisposition::Settled, BuildOutcomeLabel::Failed),
            Some(Some(BuildFault::Tampered)) => (BuildDisposition::Settled, BuildOutcomeLabel::Tampered),
            Some(Some(BuildFault::Stopped)) => (BuildDisposition::Stopped, BuildOutcomeLabel::Stopped),
            // The next plan has another input hash and starts from scratch. If the hash is the same, the backoff
            // prevents a busy loop.
            Some(Some(BuildFault::Outdated)) => (BuildDisposition::Transient, BuildOutcomeLabel::Stopped),
            Some(Some(BuildFault::Transient | BuildFault::Unreachable)) | None => {
                (BuildDisposition::Transient, BuildOutcomeLabel::Faulted)
            }
        };
        metrics.build(label, took);
        let retry_in = self.queue.ended(&key, how, Instant::now(), fastrand::f64());
        let error = match end.map(|end| &end.report) {
            Some(TargetReport::Failed { error, hint, .. }) => {
                let hint = hint.as_ref().map(|hint| format!(" ({hint})")).unwrap_or_default();
                Some(format!("{error}{hint}"))
            }
            Some(_) => None,
            None => Some(NO_BUILD_RESULT.to_owned()),
        };
        let phase = match (&error, retry_in) {
            (None, _) => Phase::Published,
            (Some(_), Some(_)) => Phase::Retrying,
            (Some(_), None) => Phase::Failed,
        };
        if how == BuildDisposition::Stopped {
            self.activity.stopped(&key);
            return None;
        }
        let (image, kernel) = (&cell.image, &cell.target.release);
        match &error {
            _ if self.is_single_run() => {}
            None => tracing::info!(%image, %kernel, target = %cell.target, ?took, "build published"),
            Some(error) if ended.is_outdated() => {
                tracing::info!(%image, %kernel, target = %cell.target, ?took, why = error, "build is stale, planning it again");
            }
            Some(error) => {
                let retry_in_seconds = retry_in.map(|wait| wait.as_secs());
                tracing::warn!(%image, %kernel, target = %cell.target, ?took, retry_in_seconds, error, "build failed");
            }
        }
        self.activity.ended(&key, took, error, retry_in);
        Some(phase)
    }

    /// Stops the builds when the leadership is lost. They are queued again for the next term.
    pub(super) fn abandon(&mut self) {
        self.term.cancel();
        self.term = self.cancel.child_token();
    }

    /// Stops all builds, and waits until the engine has cleaned up.
    pub(super) async fn stop(&mut self) {
        self.cancel.cancel();
        while self.tasks.join_next().await.is_some() {}
    }

    /// Forgets the activity of cells that are neither in `cells` nor in the queue.
    pub(super) fn forget_others(&self, cells: &BTreeSet<CellKey>) {
        self.activity.retain(|key| cells.contains(key) || self.queue.holds(key));
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

fn label_of(end: Option<&AttemptResult>) -> BuildOutcomeLabel {
    match end.map(|end| &end.report) {
        Some(TargetReport::Reused { .. }) => BuildOutcomeLabel::Reused,
        _ => BuildOutcomeLabel::Built,
    }
}
