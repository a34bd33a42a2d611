//! Calls to the API server, with retries after transient errors. No write is sent while the fence is closed.

use std::{sync::Arc, time::Duration};

use ::oci::client::retry_delay;

use super::{
    super::{
        error::{ApiError, MissingRight},
        source::Fence,
    },
    errors::{Verdict, judge},
    stats::KubeStats,
};

use parking_lot::RwLock;
/// Timeout of one attempt. Writes are small, and the API server's webhooks have ten seconds each.
const TRY: Duration = Duration::from_secs(15);
/// Longest delay between two attempts that a busy server may request. If it requests more, the call fails.
const WAIT: Duration = Duration::from_secs(10);

/// Sends calls to the API server, with a fence for writes and the server's requested delays.
pub(super) struct Caller {
    stats: Arc<KubeStats>,
    fence: RwLock<Option<Arc<dyn Fence>>>,
}

impl Caller {
    pub(super) fn new(stats: Arc<KubeStats>) -> Self {
        Self { stats, fence: RwLock::new(None) }
    }

    pub(super) fn set_fence(&self, fence: Arc<dyn Fence>) {
        *self.fence.write() = Some(fence);
    }

    fn check_fence(&self) -> Result<(), ApiError> {
        let fence = self.fence.read();
        fence.as_ref().and_then(|fence| fence.closed()).map_or(Ok(()), |reason| Err(ApiError::Fenced(reason)))
    }

    /// Makes a call and retries it. `right` is the permission that a `403` reports as missing. Reads are always allowed; before
    /// each attempt of any other call, the fence is checked.
    pub(super) async fn call<T, F>(
        &self,
        right: &MissingRight,
        request: impl Fn() -> F,
    ) -> Result<T, ApiError>
    where
        F: Future<Output = kube::Result<T>>,
    {
        let mut attempt = 0;
        loop {
            if !matches!(right.verb, "get" | "list") {
                self.check_fence()?;
            }
            let (reason, wait) = match tokio::time::timeout(TRY, request()).await {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(error)) => match judge(right, &error) {
                    Verdict::Final(error) => return Err(error),
                    Verdict::Retry { reason, wait } => (reason, wait.max(self.stats.pause())),
                },
                Err(_) => (format!("no answer within {} s", TRY.as_secs()), Duration::ZERO),
            };
            let Some(delay) = retry_delay(attempt).filter(|_| wait <= WAIT) else {
                return Err(ApiError::Unavailable(reason));
            };
            attempt += 1;
            tracing::debug!(
                verb = right.verb,
                resource = right.resource,
                attempt,
                reason,
                "retrying a call to the API server"
            );
            tokio::time::sleep(delay.max(wait)).await;
        }
    }
}
