//! Adapter: counts requests to the API server and limits how long farrier waits for a response. It also recognizes a server that
//! has not loaded its authorization rules yet, and measures the server's clock.
//!
//! It is a layer of the client, so that the requests of all parts of farrier are counted.

use std::{
    error::Error,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use http::{Method, Request, Response, StatusCode, header::RETRY_AFTER};
use jiff::{SignedDuration, Timestamp};
use oci::client::causes as error_causes;
use parking_lot::Mutex;
use prometheus_client::metrics::{counter::Counter, family::Family};
use tower::{BoxError, Layer, Service};

use crate::machine::clock_ahead;

/// Labels of a counter: `verb`, `kind` and `outcome`. All values are constants in this file.
type Labels = [(&'static str, &'static str); 3];

/// Counters of requests since the start of the process.
#[derive(Debug, Default)]
pub struct KubeStats {
    /// Requests by verb, kind of object and outcome.
    pub requests: Family<Labels, Counter>,
    /// End of the pause that the API server requested.
    pause: Mutex<Option<Instant>>,
    /// The latest outage.
    away: Mutex<Option<Away>>,
    /// Lead of the server's clock over this machine's, from the latest response with a time.
    clock_ahead: Mutex<Option<SignedDuration>>,
}

/// An outage of the API server.
#[derive(Clone, Copy, Debug)]
struct Away {
    /// Time of the latest request without a response.
    last: Instant,
    /// Whether a warning was logged about refused requests since the outage.
    told: bool,
}

/// Error: the API server responds with 403 shortly after an outage. It loads its authorization rules only after it starts
/// responding.
#[derive(Debug, thiserror::Error)]
#[error("the API server answers 403: it was unavailable and may not have loaded its authorization rules yet")]
pub(super) struct Starting;

/// Period after an outage in which the API server may refuse requests because it is still starting.
const STARTING: Duration = Duration::from_mins(1);

/// Whether the call failed only because the API server has just restarted. Such a call is retried without a message.
pub fn is_starting(error: &(dyn Error + 'static)) -> bool {
    error_causes(error).any(<dyn Error>::is::<Starting>)
}

impl KubeStats {
    fn count(&self, (verb, kind): (&'static str, &'static str), outcome: &'static str) {
        let labels = [("verb", verb), ("kind", kind), ("outcome", outcome)];
        self.requests.get_or_create(&labels).inc();
    }

    fn pause_for(&self, wait: Duration) {
        let until = Instant::now() + wait.min(LONGEST_PAUSE);
        let mut pause = self.pause.lock();
        *pause = pause.max(Some(until));
    }

    /// Records that the API server gave no response.
    pub(super) fn note_away(&self) {
        let mut away = self.away.lock();
        let told = away.is_some_and(|away| away.told && away.last.elapsed() < STARTING);
        *away = Some(Away { last: Instant::now(), told });
    }

    /// Whether a refusal may come from a starting API server. Logs a warning once for each outage.
    fn is_starting(&self) -> bool {
        let mut away = self.away.lock();
        let Some(away) = away.as_mut().filter(|away| away.last.elapsed() < STARTING) else { return false };
        if !std::mem::replace(&mut away.told, true) {
            let hint = "if this lasts longer than a minute, farrier names the missing rights";
            tracing::warn!(hint, "the API server was unavailable and still refuses requests: retrying them");
        }
        true
    }

    /// Returns how far the API server's clock is ahead of this machine's, if a response contained the time.
    pub fn clock_ahead(&self) -> Option<SignedDuration> {
        *self.clock_ahead.lock()
    }

    /// Returns how long the API server still asks clients to wait (`Retry-After`).
    pub(super) fn pause(&self) -> Duration {
        let pause = *self.pause.lock();
        pause.map_or(Duration::ZERO, |until| until.saturating_duration_since(Instant::now()))
    }
}

/// Upper limit of a pause. farrier retries after this time even if the server asks for more.
const LONGEST_PAUSE: Duration = Duration::from_mins(1);
/// The API server itself ends a request after a minute (`--request-timeout`). A watch responds immediately.
const ANSWER: Duration = Duration::from_mins(1);

/// The client layer.
#[derive(Clone, Debug)]
pub(super) struct Observe(pub(super) Arc<KubeStats>);

#[derive(Clone, Debug)]
pub(super) struct Observed<S> {
    inner: S,
    stats: Arc<KubeStats>,
}

impl<S> Layer<S> for Observe {
    type Service = Observed<S>;

    fn layer(&self, inner: S) -> Observed<S> {
        Observed { inner, stats: self.0.clone() }
    }
}

impl<S, A, B> Service<Request<A>> for Observed<S>
where
    S: Service<Request<A>, Response = Response<B>>,
    S::Error: Into<BoxError>,
    S::Future: Send + 'static,
    B: 'static,
{
    type Response = Response<B>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Response<B>, BoxError>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, request: Request<A>) -> Self::Future {
        let what = classify(request.method(), request.uri().path(), request.uri().query());
        let stats = self.stats.clone();
        let answer = self.inner.call(request);
        Box::pin(async move {
            let answer: Result<_, BoxError> = match tokio::time::timeout(ANSWER, answer).await {
                Ok(answer) => answer.map_err(Into::into),
                Err(_) => Err(format!("no answer within {} s", ANSWER.as_secs()).into()),
            };
            let code = answer.as_ref().ok().map(Response::status);
            stats.count(what, outcome(code));
            match &answer {
                Ok(response) if response.status() == StatusCode::FORBIDDEN && stats.is_starting() => {
                    return Err(Starting.into());
                }
                Ok(response) => {
                    if let Some(ahead) = clock_ahead(response.headers(), Timestamp::now()) {
                        *stats.clock_ahead.lock() = Some(ahead);
                    }
                    if matches!(response.status().as_u16(), 502..=504) {
                        stats.note_away();
                    }
                    if let Some(wait) = retry_after(response) {
                        stats.pause_for(wait);
                    }
                }
                Err(_) => stats.note_away(),
            }
            answer
        })
    }
}

/// Returns how long a busy server asks to wait. The API server uses seconds (`Retry-After: 1`).
fn retry_after<B>(response: &Response<B>) -> Option<Duration> {
    let busy = [StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE].contains(&response.status());
    let seconds = response.headers().get(RETRY_AFTER).filter(|_| busy)?;
    seconds.to_str().ok()?.trim().parse().ok().map(Duration::from_secs)
}

fn outcome(status: Option<StatusCode>) -> &'static str {
    match status.map(|status| status.as_u16()) {
        None => "unreachable",
        Some(401 | 403) => "forbidden",
        Some(404) => "not-found",
        Some(409) => "conflict",
        Some(410) => "gone",
        Some(429) => "too-many-requests",
        Some(400..500) => "invalid",
        Some(500..) => "server-error",
        Some(_) => "success",
    }
}

/// Classifies a request by method and path: `/api/v1/...` or `/apis/GROUP/VERSION/...`, then optionally `namespaces/NAME/`, then
/// the resource, the object's name and a subresource.
fn classify(method: &Method, path: &str, query: Option<&str>) -> (&'static str, &'static str) {
    let mut parts = path.split('/').filter(|part| !part.is_empty());
    let group = match parts.next() {
        Some("apis") => parts.next().unwrap_or_default(),
        _ => "",
    };
    let mut parts: Vec<&str> = parts.skip(1).collect();
    if parts.len() > 2 && parts[0] == "namespaces" {
        parts.drain(..2);
    }
    let kind = match (group, parts.as_slice()) {
        ("", ["pods", _, "eviction"]) => "evictions",
        ("", ["nodes", ..]) => "nodes",
        ("", ["pods", ..]) => "pods",
        ("" | "events.k8s.io", ["events", ..]) => "events",
        ("apps", ["daemonsets", ..]) => "daemonsets",
        ("coordination.k8s.io", ["leases", ..]) => "leases",
        ("farrier.dev", ["driverbuilds", ..]) => "driverbuilds",
        ("mellanox.com" | "nvidia.com", [_, ..]) => "operator-resources",
        _ => "other",
    };
    let watches = query.is_some_and(|query| query.split('&').any(|part| part == "watch=true"));
    let verb = match *method {
        Method::POST => "create",
        Method::PUT => "update",
        Method::PATCH => "patch",
        Method::DELETE => "delete",
        _ if watches => "watch",
        _ if parts.len() == 1 => "list",
        _ => "get",
    };
    (verb, kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_counted_by_what_they_ask() {
        let cases = [
            (Method::GET, "/api/v1/nodes", Some("limit=250"), "list", "nodes"),
            (Method::GET, "/api/v1/nodes", Some("&watch=true&x=1"), "watch", "nodes"),
            (Method::PATCH, "/api/v1/nodes/a", None, "patch", "nodes"),
            (Method::GET, "/api/v1/namespaces/x/pods", None, "list", "pods"),
            (Method::POST, "/api/v1/namespaces/x/pods/p/eviction", None, "create", "evictions"),
            (Method::DELETE, "/apis/apps/v1/namespaces/x/daemonsets/d", None, "delete", "daemonsets"),
            (Method::GET, "/apis/apps/v1/daemonsets", None, "list", "daemonsets"),
            (Method::GET, "/apis/nvidia.com/v1", None, "get", "other"),
            (Method::GET, "/apis/nvidia.com/v1/clusterpolicies", None, "list", "operator-resources"),
            (Method::PUT, "/apis/coordination.k8s.io/v1/namespaces/f/leases/l", None, "update", "leases"),
            (Method::GET, "/api/v1/namespaces/x", None, "get", "other"),
            (Method::GET, "/version", None, "get", "other"),
        ];
        for (method, path, query, verb, kind) in cases {
            assert_eq!(classify(&method, path, query), (verb, kind), "{method} {path}");
        }
    }

    #[test]
    fn requests_are_counted() {
        let stats = KubeStats::default();
        stats.count(("list", "nodes"), "success");
        stats.count(("list", "nodes"), "success");
        let labels = [("verb", "list"), ("kind", "nodes"), ("outcome", "success")];
        assert_eq!(stats.requests.get_or_create(&labels).get(), 2);
    }

    #[test]
    fn a_busy_server_is_left_alone() {
        let answer = |status: u16, wait: &str| {
            Response::builder().status(status).header(RETRY_AFTER, wait).body(()).unwrap()
        };
        assert_eq!(retry_after(&answer(429, "3")), Some(Duration::from_secs(3)));
        assert_eq!(retry_after(&answer(503, "x")), None);
        assert_eq!(retry_after(&answer(409, "3")), None);
        let stats = KubeStats::default();
        assert_eq!(stats.pause(), Duration::ZERO);
        stats.pause_for(Duration::from_secs(1_000_000));
        assert!(stats.pause() > Duration::ZERO && stats.pause() <= LONGEST_PAUSE);
    }

    #[test]
    fn a_refusal_is_not_believed_after_an_absence() {
        let stats = KubeStats::default();
        assert!(!stats.is_starting());
        stats.note_away();
        assert!(stats.is_starting() && stats.is_starting());
        // A second outage within the minute counts as the same start.
        stats.note_away();
        assert!(stats.away.lock().unwrap().told);
        let long_ago = Instant::now().checked_sub(STARTING).unwrap();
        *stats.away.lock() = Some(Away { last: long_ago, told: true });
        assert!(!stats.is_starting());
        stats.note_away();
        assert!(!stats.away.lock().unwrap().told);
    }

    #[test]
    fn a_server_that_starts_is_known_through_the_client() {
        let error = kube::Error::Service(Starting.into());
        assert!(is_starting(&error));
        assert!(!is_starting(&kube::Error::Service("403".into())));
    }

    #[test]
    fn every_status_has_a_class() {
        let of = |code: u16| outcome(Some(StatusCode::from_u16(code).unwrap()));
        assert_eq!((of(201), of(409), of(422), of(503)), ("success", "conflict", "invalid", "server-error",));
        assert_eq!(outcome(None), "unreachable");
    }
}
