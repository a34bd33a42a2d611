//! Passes the result of each reconcile to the status sinks, and never blocks on a sink.

use std::{sync::Arc, time::Duration};

use farrier_core::{
    image::Definitions,
    plan::{Activity, ClusterSnapshot, Plan},
};
use jiff::Timestamp;
use parking_lot::Mutex;
use tokio::{sync::mpsc, task::JoinHandle};

use super::activity::SharedActivity;
use crate::RolloutReport;

/// State of the cluster and the builds after a reconcile.
#[derive(Clone, Debug)]
pub struct ReconcileView {
    pub plan: Arc<Plan>,
    /// Cluster snapshot that the plan was computed from.
    pub snapshot: Arc<ClusterSnapshot>,
    /// The definitions in use.
    pub definitions: Arc<Definitions>,
    /// Activity and outcomes of the builds at the time of the reconcile.
    pub activity: Activity,
    /// Activity of the builds, updated as they progress.
    pub live: SharedActivity,
    /// Outcomes of the rollouts.
    pub rollouts: Vec<RolloutReport>,
    /// Error in the definitions on disk. The last valid definitions are in use meanwhile.
    pub configuration_error: Option<String>,
    /// Time of the reconcile.
    pub now: Timestamp,
}

/// Publishes status: API objects, Events, or a page.
#[async_trait::async_trait]
pub trait StatusSink: Send + Sync {
    /// Shows the result of a reconcile. The sink logs its errors itself, and can retry at the next reconcile.
    async fn reconciled(&self, view: &ReconcileView);

    /// Shows that a reconcile failed, so that the last view is outdated.
    fn failed(&self, _error: &str) {}

    /// Discards the sink's knowledge of earlier reconciles, because another replica may have written status since.
    fn forget(&self) {}
}

/// Task that passes views to a sink, one after the other. A newer view replaces a view that the sink has not received yet, and
/// takes over the rollout reports of the replaced view.
pub(super) struct StatusWorker {
    /// The view that the sink receives next.
    next: Arc<Mutex<Option<ReconcileView>>>,
    sink: Arc<dyn StatusSink>,
    /// Wakes the task when `next` is set.
    notifier: mpsc::Sender<()>,
    task: JoinHandle<()>,
}

impl StatusWorker {
    /// Starts the task.
    pub(super) fn start(sink: Arc<dyn StatusSink>) -> Self {
        let next = Arc::<Mutex<Option<ReconcileView>>>::default();
        // One pending notification is enough, because the task takes the newest view.
        let (notifier, mut notifications) = mpsc::channel(1);
        let (task_next, task_sink) = (Arc::clone(&next), Arc::clone(&sink));
        let task = tokio::spawn(async move {
            while notifications.recv().await.is_some() {
                let view = task_next.lock().take();
                if let Some(view) = view {
                    task_sink.reconciled(&view).await;
                }
            }
        });
        Self { next, sink, notifier, task }
    }

    /// Passes a view to the sink as soon as the sink has finished the previous view.
    pub(super) fn show(&self, mut view: ReconcileView) {
        let mut next = self.next.lock();
        if let Some(replaced) = next.take() {
            let written = replaced.rollouts.into_iter().filter(|report| !report.planned.changes.is_empty());
            view.rollouts = written.chain(view.rollouts).collect();
        }
        *next = Some(view);
        drop(next);
        // An error means that a notification is pending, which covers this view too.
        let _ = self.notifier.try_send(());
    }

    /// Tells the sink that a reconcile failed.
    pub(super) fn failed(&self, error: &str) {
        self.sink.failed(error);
    }

    /// Drops the pending view, which is stale, and resets the sink.
    pub(super) fn forget(&self) {
        self.next.lock().take();
        self.sink.forget();
    }

    /// Lets the sink finish its last view, up to a timeout, then ends the task.
    pub(super) async fn finish(self, timeout: Duration) {
        let Self { next: _, sink: _, notifier, mut task } = self;
        drop(notifier);
        if tokio::time::timeout(timeout, &mut task).await.is_err() {
            tracing::warn!("status was not written before the shutdown timeout");
            task.abort();
        }
    }
}
