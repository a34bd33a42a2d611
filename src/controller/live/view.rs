//! Adapter: what a pass hands to those who write status, who must never hold it up.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use jiff::Timestamp;
use tokio::{sync::Notify, task::JoinHandle};

use crate::{
    controller::RolloutReport,
    plan::{Activity, Plan},
};

/// How everything stands after a pass.
#[derive(Clone, Copy, Debug)]
pub struct PassView<'a> {
    /// What the pass decided.
    pub plan: &'a Plan,
    /// What builds do, and how they went.
    pub activity: &'a Activity,
    /// What became of the rollouts.
    pub rollouts: &'a [RolloutReport],
    /// What is wrong with the definitions on disk, while the last good ones are in use.
    pub configuration_error: Option<&'a str>,
    /// When.
    pub now: Timestamp,
}

/// Writes down how things stand: objects of the API, Events.
#[async_trait::async_trait]
pub trait StatusSink: Send + Sync {
    /// After a pass of the leader. Faults are the sink's own to report and to get over: it is called again.
    async fn pass(&self, view: &PassView<'_>);
}

/// The same, kept.
#[derive(Clone, Debug)]
pub(super) struct View {
    pub(super) plan: Plan,
    pub(super) activity: Activity,
    pub(super) rollouts: Vec<RolloutReport>,
    pub(super) configuration_error: Option<String>,
    pub(super) now: Timestamp,
}

/// Hands views to a sink, one after the other, in a task of its own. A view that a later one overtook is not shown;
/// what its rollouts did is handed on with the later one.
pub(super) struct StatusWorker {
    slot: Arc<Slot>,
    task: JoinHandle<()>,
}

/// The view that is to be shown next.
#[derive(Default)]
struct Slot {
    state: Mutex<SlotState>,
    filled: Notify,
}

#[derive(Default)]
struct SlotState {
    next: Option<View>,
    closed: bool,
}

impl Slot {
    fn lock(&self) -> MutexGuard<'_, SlotState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next view, when there is one; `None` after the last.
    async fn take(&self) -> Option<View> {
        loop {
            {
                let mut state = self.lock();
                if let Some(view) = state.next.take() {
                    return Some(view);
                }
                if state.closed {
                    return None;
                }
            }
            self.filled.notified().await;
        }
    }
}

impl StatusWorker {
    /// Starts the task.
    pub(super) fn start(sink: Arc<dyn StatusSink>) -> Self {
        let slot = Arc::new(Slot::default());
        let views = Arc::clone(&slot);
        let task = tokio::spawn(async move {
            while let Some(view) = views.take().await {
                sink.pass(&view.borrowed()).await;
            }
        });
        Self { slot, task }
    }

    /// Shows a view, now or when the sink has done with the one before it.
    pub(super) fn show(&self, mut view: View) {
        let mut state = self.slot.lock();
        if let Some(overtaken) = state.next.take() {
            let acted = overtaken.rollouts.into_iter().filter(|report| !report.planned.changes.is_empty());
            view.rollouts = acted.chain(view.rollouts).collect();
        }
        state.next = Some(view);
        drop(state);
        self.slot.filled.notify_one();
    }

    /// Lets the sink do what it was given last, for so long, and ends the task.
    pub(super) async fn finish(self, patience: Duration) {
        let Self { slot, mut task } = self;
        slot.lock().closed = true;
        slot.filled.notify_one();
        if tokio::time::timeout(patience, &mut task).await.is_err() {
            tracing::warn!("status was not written in time before the end");
            task.abort();
        }
    }
}

impl View {
    fn borrowed(&self) -> PassView<'_> {
        let Self { plan, activity, rollouts, configuration_error, now } = self;
        let configuration_error = configuration_error.as_deref();
        PassView { plan, activity, rollouts, configuration_error, now: *now }
    }
}
