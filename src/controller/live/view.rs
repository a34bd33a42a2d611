//! Adapter: what a pass hands to those who write status, who must never hold it up.

use std::{sync::Arc, time::Duration};

use jiff::Timestamp;
use tokio::{sync::mpsc, task::JoinHandle};

use super::activity::SharedActivity;
use crate::{
    controller::RolloutReport,
    image::Definitions,
    plan::{Activity, ClusterSnapshot, Plan},
};

use parking_lot::Mutex;
/// How everything stands after a pass.
#[derive(Clone, Debug)]
pub struct PassView {
    /// What the pass decided.
    pub plan: Arc<Plan>,
    /// What it was made from.
    pub snapshot: Arc<ClusterSnapshot>,
    /// The definitions in use.
    pub definitions: Arc<Definitions>,
    /// What builds did at that time, and how they went.
    pub activity: Activity,
    /// What they do by now.
    pub live: SharedActivity,
    /// What became of the rollouts.
    pub rollouts: Vec<RolloutReport>,
    /// What is wrong with the definitions on disk, while the last good ones are in use.
    pub configuration_error: Option<String>,
    /// When.
    pub now: Timestamp,
}

/// Writes down how things stand: objects of the API, Events, a page.
#[async_trait::async_trait]
pub trait StatusSink: Send + Sync {
    /// After a pass. Faults are the sink's own to report and to get over: it is called again.
    async fn pass(&self, view: &PassView);

    /// Another farrier may have written since the last pass: what was known then is not compared with any more.
    fn forget(&self) {}
}

/// Hands views to a sink, one after the other, in a task of its own. A view that a later one overtook is not shown;
/// what its rollouts did is handed on with the later one.
pub(super) struct StatusWorker {
    /// The view that is to be shown next.
    next: Arc<Mutex<Option<PassView>>>,
    sink: Arc<dyn StatusSink>,
    filled: mpsc::Sender<()>,
    task: JoinHandle<()>,
}

impl StatusWorker {
    /// Starts the task.
    pub(super) fn start(sink: Arc<dyn StatusSink>) -> Self {
        let next = Arc::<Mutex<Option<PassView>>>::default();
        // One notice is enough: the view that it announces may be replaced meanwhile.
        let (filled, mut notices) = mpsc::channel(1);
        let (views, shown) = (Arc::clone(&next), Arc::clone(&sink));
        let task = tokio::spawn(async move {
            while notices.recv().await.is_some() {
                let view = views.lock().take();
                if let Some(view) = view {
                    shown.pass(&view).await;
                }
            }
        });
        Self { next, sink, filled, task }
    }

    /// Shows a view, now or when the sink has done with the one before it.
    pub(super) fn show(&self, mut view: PassView) {
        let mut next = self.next.lock();
        if let Some(overtaken) = next.take() {
            let acted = overtaken.rollouts.into_iter().filter(|report| !report.planned.changes.is_empty());
            view.rollouts = acted.chain(view.rollouts).collect();
        }
        *next = Some(view);
        drop(next);
        // Where there is a notice already, it will do for this view.
        let _ = self.filled.try_send(());
    }

    /// Makes the sink begin anew. What it has not shown yet is of a time that is over.
    pub(super) fn forget(&self) {
        self.next.lock().take();
        self.sink.forget();
    }

    /// Lets the sink do what it was given last, for so long, and ends the task.
    pub(super) async fn finish(self, patience: Duration) {
        let Self { next: _, sink: _, filled, mut task } = self;
        drop(filled);
        if tokio::time::timeout(patience, &mut task).await.is_err() {
            tracing::warn!("status was not written in time before the end");
            task.abort();
        }
    }
}
