//! Calls to the API server, with retries after transient errors. No write is sent while the fence is closed.

use std::{sync::Arc, time::Duration};

use ::oci::client::retry_delay;
use parking_lot::RwLock;

use super::{
    super::{
        error::{ApiError, MissingPermission},
        source::Fence,
    },
    errors::{ErrorClass, classify},
    stats::KubeStats,
};

/// Timeout of one attempt. Writes are small, and the API server's webhooks have ten seconds each.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(15);
/// Longest delay before a retry that a busy server may request. If the server requests a longer delay, the call fails.
const MAX_REQUESTED_DELAY: Duration = Duration::from_secs(10);

/// Sends calls to the API server. Respects the fence, and the delays that the server requests.
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
        let closed_reason = self.fence.read().as_ref().and_then(|fence| fence.closed_reason());
        closed_reason.map_or(Ok(()), |reason| Err(ApiError::Fenced(reason)))
    }

    /// Makes a call and retries it after transient errors. Checks the fence before each attempt of a write. `permission` is the
    /// permission that a `403` reports as missing.
    pub(super) async fn call<T, F>(
        &self,
        permission: &MissingPermission,
        request: impl Fn() -> F,
    ) -> Result<T, ApiError>
    where
        F: Future<Output = kube::Result<T>>,
    {
        let mut attempt = 0;
        loop {
            if !matches!(permission.verb, "get" | "list") {
                self.check_fence()?;
            }
            let (reason, wait) = match tokio::time::timeout(ATTEMPT_TIMEOUT, request()).await {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(error)) => match classify(permission, &error) {
                    ErrorClass::Final(error) => return Err(error),
                    ErrorClass::Retry { reason, wait } => (reason, wait.max(self.stats.pause())),
                },
                Err(_) => (format!("no answer within {} s", ATTEMPT_TIMEOUT.as_secs()), Duration::ZERO),
            };
            // An eviction is not retried: other people's webhooks would hold the reconcile. The next one plans it again.
            let is_retried = wait <= MAX_REQUESTED_DELAY && !permission.resource.ends_with("/eviction");
            let Some(delay) = retry_delay(attempt).filter(|_| is_retried) else {
                return Err(ApiError::Unavailable(reason));
            };
            attempt += 1;
            tracing::debug!(
                verb = permission.verb,
                resource = permission.resource,
                attempt,
                reason,
                "retrying a call to the API server"
            );
            tokio::time::sleep(delay.max(wait)).await;
        }
    }
}
