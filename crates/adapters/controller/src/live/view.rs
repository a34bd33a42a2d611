//! Hands the result of a reconcile to the status sinks, without ever blocking on them.

use std::{sync::Arc, time::Duration};

use farrier_core::{
    image::Definitions,
    plan::{Activity, ClusterSnapshot, Plan},
};
use jiff::Timestamp;
use tokio::{sync::mpsc, task::JoinHandle};

use super::activity::SharedActivity;
use crate::RolloutReport;

use parking_lot::Mutex;
/// State of the cluster and the builds after a reconcile.
#[derive(Clone, Debug)]
pub struct ReconcileView {
    pub plan: Arc<Plan>,
    /// Cluster snapshot that the plan was computed from.
    pub snapshot: Arc<ClusterSnapshot>,
    /// The definitions in use.
    pub definitions: Arc<Definitions>,
    /// Activity and outcomes of the builds at that time.
    pub activity: Activity,
    /// Activity of the builds, updated as they progress.
    pub live: SharedActivity,
    /// Outcomes of the rollouts.
    pub rollouts: Vec<RolloutReport>,
    /// Error in the definitions on disk, while the last valid ones are in use.
    pub configuration_error: Option<String>,
    /// Time of the reconcile.
    pub now: Timestamp,
}

/// Publishes status: API objects, Events, or a page.
#[async_trait::async_trait]
pub trait StatusSink: Send + Sync {
    /// Called after a reconcile. The sink logs and handles its errors itself; the next reconcile calls it again.
    async fn reconciled(&self, view: &ReconcileView);

    /// Discards what the sink knows of earlier reconciles, because another replica may have written since.
    fn forget(&self) {}
}

/// Passes views to a sink in a separate task, one after the other. A newer view replaces one that the sink has not
/// started, and takes over its rollout reports.
pub(super) struct StatusWorker {
    /// The view to show next.
    next: Arc<Mutex<Option<ReconcileView>>>,
    sink: Arc<dyn StatusSink>,
    filled: mpsc::Sender<()>,
    task: JoinHandle<()>,
}

impl StatusWorker {
    /// Starts the task.
    pub(super) fn start(sink: Arc<dyn StatusSink>) -> Self {
        let next = Arc::<Mutex<Option<ReconcileView>>>::default();
        // One notification is enough, even if a newer view replaces the one that triggered it.
        let (filled, mut notices) = mpsc::channel(1);
        let (views, shown) = (Arc::clone(&next), Arc::clone(&sink));
        let task = tokio::spawn(async move {
            while notices.recv().await.is_some() {
                let view = views.lock().take();
                if let Some(view) = view {
                    shown.reconciled(&view).await;
                }
            }
        });
        Self { next, sink, filled, task }
    }

    /// Shows a view as soon as the sink has finished the previous one.
    pub(super) fn show(&self, mut view: ReconcileView) {
        let mut next = self.next.lock();
        if let Some(overtaken) = next.take() {
            let acted = overtaken.rollouts.into_iter().filter(|report| !report.planned.changes.is_empty());
            view.rollouts = acted.chain(view.rollouts).collect();
        }
        *next = Some(view);
        drop(next);
        // If a notification is pending, it covers this view too.
        let _ = self.filled.try_send(());
    }

    /// Drops the pending view, which is stale, and resets the sink.
    pub(super) fn forget(&self) {
        self.next.lock().take();
        self.sink.forget();
    }

    /// Lets the sink finish its last view, up to a timeout, then ends the task.
    pub(super) async fn finish(self, patience: Duration) {
        let Self { next: _, sink: _, filled, mut task } = self;
        drop(filled);
        if tokio::time::timeout(patience, &mut task).await.is_err() {
            tracing::warn!("status was not written before the shutdown timeout");
            task.abort();
        }
    }
}
