//! Adapter: calls that change something, tried again after transient faults, and never while the fence is closed.

use std::{
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use http::{Method, Request, header::CONTENT_TYPE};
use http_body_util::BodyExt;
use kube::{Client, client::Body, core::Status};
use serde_json::Value;

use super::{
    super::{ClusterError, Fence},
    errors::{Verdict, causes, judge},
    stats::retry_after,
    words::{MissingRight, one_line},
};
use crate::registry::retry_delay;

/// One call.
#[derive(Clone, Debug)]
pub(super) struct Call {
    /// For messages: what is done, to what.
    pub(super) action: String,
    pub(super) method: Method,
    /// With the query.
    pub(super) path: String,
    pub(super) content_type: &'static str,
    pub(super) body: Value,
    /// What is missing where the API server forbids it.
    pub(super) right: MissingRight,
}

/// How long one try may take. A write is small; the API server's own webhooks have ten seconds each.
const TRY: Duration = Duration::from_secs(15);
/// The longest wait that a busy server is granted between two tries; with a longer one the call is given up.
const WAIT: Duration = Duration::from_secs(10);

/// The client, and whether it may write.
pub(super) struct Caller {
    client: Client,
    fence: RwLock<Option<Arc<dyn Fence>>>,
}

impl Caller {
    pub(super) fn new(client: Client) -> Self {
        Self { client, fence: RwLock::new(None) }
    }

    pub(super) fn set_fence(&self, fence: Arc<dyn Fence>) {
        *self.fence.write().unwrap_or_else(PoisonError::into_inner) = Some(fence);
    }

    /// Makes a call; returns the object that the API server answers with.
    pub(super) async fn call(&self, call: &Call) -> Result<Value, ClusterError> {
        let mut attempt = 0;
        loop {
            self.check_fence(call)?;
            let (reason, wait) = match tokio::time::timeout(TRY, self.attempt(call)).await {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(Verdict::Final(error))) => return Err(error),
                Ok(Err(Verdict::Retry { reason, wait })) => (reason, wait),
                Err(_) => (format!("no answer within {} s", TRY.as_secs()), Duration::ZERO),
            };
            let unavailable = |reason| ClusterError::Unavailable { action: call.action.clone(), reason };
            let Some(delay) = retry_delay(attempt).filter(|_| wait <= WAIT) else {
                return Err(unavailable(reason));
            };
            attempt += 1;
            tracing::debug!(action = call.action, attempt, reason, "transient fault, trying again");
            tokio::time::sleep(delay.max(wait)).await;
        }
    }

    /// Reads change nothing, so that any process may make them.
    fn check_fence(&self, call: &Call) -> Result<(), ClusterError> {
        if call.method == Method::GET {
            return Ok(());
        }
        let fence = self.fence.read().unwrap_or_else(PoisonError::into_inner);
        match fence.as_ref().and_then(|fence| fence.closed()) {
            Some(reason) => Err(ClusterError::Fenced { action: call.action.clone(), reason }),
            None => Ok(()),
        }
    }

    async fn attempt(&self, call: &Call) -> Result<Value, Verdict> {
        let Call { action, method, path, content_type, body, right } = call;
        let unusable = |reason: String| {
            Verdict::Final(ClusterError::Rejected { action: action.clone(), reason: one_line(&reason) })
        };
        let again = |error: &(dyn std::error::Error + 'static)| Verdict::Retry {
            reason: one_line(&causes(error)),
            wait: Duration::ZERO,
        };
        let body = if *method == Method::GET { Vec::new() } else { body.to_string().into_bytes() };
        let request = Request::builder().method(method).uri(path).header(CONTENT_TYPE, *content_type);
        let request = request.body(Body::from(body)).map_err(|error| unusable(error.to_string()))?;
        let answer = self.client.send(request).await.map_err(|error| match error {
            kube::Error::Auth(error) => Verdict::Final(ClusterError::Unauthorized {
                action: action.clone(),
                reason: one_line(&causes(&error)),
            }),
            error => again(&error),
        })?;
        let wait = retry_after(&answer);
        let code = answer.status();
        let bytes = answer.into_body().collect().await.map_err(|error| again(&error))?.to_bytes();
        if code.is_success() {
            return serde_json::from_slice(&bytes)
                .map_err(|error| unusable(format!("its answer is no JSON: {error}")));
        }
        // A proxy on the way answers in words of its own.
        let status = serde_json::from_slice::<Status>(&bytes)
            .unwrap_or_else(|_| Status::failure(&String::from_utf8_lossy(&bytes), ""))
            .with_code(code.as_u16());
        Err(judge(action, right, &status, wait))
    }
}
