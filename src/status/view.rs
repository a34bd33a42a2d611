//! Adapter: what a pass hands to those who write status.

use jiff::Timestamp;

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
