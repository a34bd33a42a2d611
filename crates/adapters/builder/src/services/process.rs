//! Control of this process: progress reports, cancellation, and permission to write.

use std::{sync::Arc, time::Duration};

use farrier_cluster::Fence;
use farrier_core::plan::Instance;
use tokio_util::sync::CancellationToken;

use super::{
    error::{BuildError, Result},
    report::Reporter,
    retry::with_retry,
};

/// Interval at which a process behind a closed fence checks the fence.
const FENCE_POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Progress reports, cancellation and the fence of this process. Clones share all of them.
#[derive(Clone)]
pub struct ProcessControl {
    /// Receives progress reports.
    pub reporter: Arc<dyn Reporter>,
    /// Name of this farrier, if a cluster has several.
    pub instance: Instance,
    /// Tells whether this process may still write; `None` if no other process can be the writer.
    pub fence: Option<Arc<dyn Fence>>,
    /// Cancels all work. Nothing incomplete is left behind.
    pub cancel: CancellationToken,
}

impl ProcessControl {
    /// Fails if this process may not write, for example after it has lost the lease. Called before each write to a
    /// registry or cluster.
    pub fn ensure_may_write(&self) -> Result<()> {
        match self.fence.as_ref().and_then(|fence| fence.closed_reason()) {
            Some(why) => Err(BuildError::Fenced(why)),
            None => Ok(()),
        }
    }

    /// Waits until this process may write. Fails on cancellation.
    pub(crate) async fn wait_until_writable(&self) -> Result<()> {
        while let Err(fenced) = self.ensure_may_write() {
            tracing::debug!(%fenced, "waiting to publish");
            let wait = tokio::time::sleep(FENCE_POLL_INTERVAL);
            self.cancel.run_until_cancelled(wait).await.ok_or(BuildError::Canceled)?;
        }
        Ok(())
    }

    /// Runs `action` until it succeeds, fails permanently, or exhausts the retries. Registry clients retry on their
    /// own.
    pub async fn retry<T, E, F>(&self, name: &str, action: impl FnMut() -> F) -> Result<T>
    where
        F: Future<Output = Result<T, E>>,
        E: Into<BuildError>,
    {
        with_retry(name, &self.cancel, action).await
    }
}
