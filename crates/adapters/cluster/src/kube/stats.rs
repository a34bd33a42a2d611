//! Tower layer for the client of the API server, through which every request of farrier passes. The layer:
//!
//! - counts requests,
//! - limits the time to wait for a response,
//! - records the pauses that the server requests (`Retry-After`),
//! - recognizes a server that has restarted and not loaded its authorization rules yet,
//! - measures the clock skew between the server and this machine.

use std::{
    error::Error,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use farrier_local::machine::clock_ahead;
use http::{Method, Request, Response, StatusCode, header::RETRY_AFTER};
use jiff::{SignedDuration, Timestamp};
use oci::error_causes;
use parking_lot::Mutex;
use prometheus_client::metrics::{counter::Counter, family::Family};
use tower::{BoxError, Layer, Service};

/// Labels of a counter: `verb`, `kind` and `outcome`. All values are constants in this file.
type Labels = [(&'static str, &'static str); 3];

/// Counters of requests since the start of the process.
#[derive(Debug, Default)]
pub struct KubeStats {
    /// Requests by verb, kind of object and outcome.
    pub requests: Family<Labels, Counter>,
    /// End of the pause that the API server requested (`Retry-After`).
    paused_until: Mutex<Option<Instant>>,
    latest_outage: Mutex<Option<Outage>>,
    /// Time of the first request without a response since the latest response or event.
    silence: Mutex<Option<(Instant, Timestamp)>>,
    /// Clock offset of the server from the latest response that states the time. A positive offset means that the server is ahead
    /// of this machine.
    clock_ahead: Mutex<Option<SignedDuration>>,
}

/// An outage of the API server.
#[derive(Clone, Copy, Debug)]
struct Outage {
    /// Time of the latest request that the API server did not respond to.
    last_failure: Instant,
    /// Whether a warning was logged about refused requests since the outage.
    warned: bool,
}

/// Error: the API server responded with 403 shortly after an outage. A restarted API server responds before it has loaded
/// its authorization rules.
#[derive(Debug, thiserror::Error)]
#[error("the API server answers 403: it was unavailable and may not have loaded its authorization rules yet")]
pub(super) struct Starting;

/// Period after an outage in which the API server may refuse requests because it is still starting.
const STARTUP_PERIOD: Duration = Duration::from_mins(1);

/// Whether the call failed only because the API server has just restarted. The caller retries the call without logging.
pub fn is_starting(error: &(dyn Error + 'static)) -> bool {
    error_causes(error).any(<dyn Error>::is::<Starting>)
}

impl KubeStats {
    fn count(&self, (verb, kind): (&'static str, &'static str), outcome: &'static str) {
        let labels = [("verb", verb), ("kind", kind), ("outcome", outcome)];
        self.requests.get_or_create(&labels).inc();
    }

    fn pause_for(&self, wait: Duration) {
        let until = Instant::now() + wait.min(MAX_PAUSE);
        let mut paused_until = self.paused_until.lock();
        *paused_until = paused_until.max(Some(until));
    }

    /// Records that the API server gave no response.
    pub(super) fn note_unavailable(&self) {
        let mut latest = self.latest_outage.lock();
        let warned =
            latest.is_some_and(|outage| outage.warned && outage.last_failure.elapsed() < STARTUP_PERIOD);
        *latest = Some(Outage { last_failure: Instant::now(), warned });
        self.silence.lock().get_or_insert_with(|| (Instant::now(), Timestamp::now()));
    }

    /// Records that the API server answered a request, or sent an event.
    pub(super) fn note_answer(&self) {
        *self.silence.lock() = None;
    }

    /// Returns the time since which the API server has not answered, if that is longer than [`SILENCE_LIMIT`].
    pub(super) fn silent_since(&self) -> Option<Timestamp> {
        let (began, time) = (*self.silence.lock())?;
        (began.elapsed() >= SILENCE_LIMIT).then_some(time)
    }

    /// Whether a refusal may come from a starting API server. Logs a warning once for each outage.
    fn is_starting(&self) -> bool {
        let mut latest = self.latest_outage.lock();
        let recent = latest.as_mut().filter(|outage| outage.last_failure.elapsed() < STARTUP_PERIOD);
        let Some(outage) = recent else { return false };
        if !std::mem::replace(&mut outage.warned, true) {
            let hint = "if this lasts longer than a minute, farrier names the missing permissions";
            tracing::warn!(hint, "the API server was unavailable and still refuses requests: retrying them");
        }
        true
    }

    /// Returns how far the API server's clock is ahead of this machine's, if a response contained the time.
    pub fn clock_ahead(&self) -> Option<SignedDuration> {
        *self.clock_ahead.lock()
    }

    /// Returns the rest of the pause that the API server requested (`Retry-After`).
    pub(super) fn pause(&self) -> Duration {
        let paused_until = *self.paused_until.lock();
        paused_until.map_or(Duration::ZERO, |until| until.saturating_duration_since(Instant::now()))
    }
}

/// Time without a response after which the known state of the cluster counts as stale. A single request may fail, and a watch
/// that breaks is opened again within seconds.
const SILENCE_LIMIT: Duration = Duration::from_secs(30);
/// Upper limit of a pause. farrier retries after this time even if the server asks for more.
const MAX_PAUSE: Duration = Duration::from_mins(1);
/// Timeout for the start of a response. The API server itself ends a request after a minute (`--request-timeout`), and
/// responds to a watch immediately.
const RESPONSE_TIMEOUT: Duration = Duration::from_mins(1);

/// Layer that records requests and responses in the statistics.
#[derive(Clone, Debug)]
pub(super) struct StatsLayer(pub(super) Arc<KubeStats>);

#[derive(Clone, Debug)]
pub(super) struct StatsService<S> {
    inner: S,
    stats: Arc<KubeStats>,
}

impl<S> Layer<S> for StatsLayer {
    type Service = StatsService<S>;

    fn layer(&self, inner: S) -> StatsService<S> {
        StatsService { inner, stats: self.0.clone() }
    }
}

impl<S, A, B> Service<Request<A>> for StatsService<S>
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
        let class = classify(request.method(), request.uri().path(), request.uri().query());
        let stats = self.stats.clone();
        let response = self.inner.call(request);
        Box::pin(async move {
            let result: Result<_, BoxError> = match tokio::time::timeout(RESPONSE_TIMEOUT, response).await {
                Ok(result) => result.map_err(Into::into),
                Err(_) => Err(format!("no answer within {} s", RESPONSE_TIMEOUT.as_secs()).into()),
            };
            let code = result.as_ref().ok().map(Response::status);
            stats.count(class, outcome(code));
            match &result {
                Ok(response) if response.status() == StatusCode::FORBIDDEN && stats.is_starting() => {
                    return Err(Starting.into());
                }
                Ok(response) => {
                    if let Some(ahead) = clock_ahead(response.headers(), Timestamp::now()) {
                        *stats.clock_ahead.lock() = Some(ahead);
                    }
                    if matches!(response.status().as_u16(), 502..=504) {
                        stats.note_unavailable();
                    } else {
                        stats.note_answer();
                    }
                    if let Some(wait) = retry_after(response) {
                        stats.pause_for(wait);
                    }
                }
                Err(_) => stats.note_unavailable(),
            }
            result
        })
    }
}

/// Returns the delay that a busy server requests. The API server states it in seconds (`Retry-After: 1`).
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
    let mut segments = path.split('/').filter(|segment| !segment.is_empty());
    let group = match segments.next() {
        Some("apis") => segments.next().unwrap_or_default(),
        _ => "",
    };
    let mut segments: Vec<&str> = segments.skip(1).collect();
    if segments.len() > 2 && segments[0] == "namespaces" {
        segments.drain(..2);
    }
    let kind = match (group, segments.as_slice()) {
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
    let watches = query.is_some_and(|query| query.split('&').any(|parameter| parameter == "watch=true"));
    let verb = match *method {
        Method::POST => "create",
        Method::PUT => "update",
        Method::PATCH => "patch",
        Method::DELETE => "delete",
        _ if watches => "watch",
        _ if segments.len() == 1 => "list",
        _ => "get",
    };
    (verb, kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_classified_by_verb_and_kind() {
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
    fn a_busy_server_pauses_requests() {
        let response = |status: u16, wait: &str| {
            Response::builder().status(status).header(RETRY_AFTER, wait).body(()).unwrap()
        };
        assert_eq!(retry_after(&response(429, "3")), Some(Duration::from_secs(3)));
        assert_eq!(retry_after(&response(503, "x")), None);
        assert_eq!(retry_after(&response(409, "3")), None);
        let stats = KubeStats::default();
        assert_eq!(stats.pause(), Duration::ZERO);
        stats.pause_for(Duration::from_secs(1_000_000));
        assert!(stats.pause() > Duration::ZERO && stats.pause() <= MAX_PAUSE);
    }

    #[test]
    fn a_refusal_shortly_after_an_outage_is_transient() {
        let stats = KubeStats::default();
        assert!(!stats.is_starting());
        stats.note_unavailable();
        assert!(stats.is_starting() && stats.is_starting());
        // A second outage within `STARTUP_PERIOD` logs no second warning.
        stats.note_unavailable();
        assert!(stats.latest_outage.lock().unwrap().warned);
        let long_ago = Instant::now().checked_sub(STARTUP_PERIOD).unwrap();
        *stats.latest_outage.lock() = Some(Outage { last_failure: long_ago, warned: true });
        assert!(!stats.is_starting());
        stats.note_unavailable();
        assert!(!stats.latest_outage.lock().unwrap().warned);
    }

    #[test]
    fn a_server_without_an_answer_for_long_is_silent() {
        let stats = KubeStats::default();
        stats.note_unavailable();
        assert_eq!(stats.silent_since(), None, "a single request may fail");
        let long_ago = Instant::now().checked_sub(SILENCE_LIMIT).unwrap();
        *stats.silence.lock() = Some((long_ago, Timestamp::UNIX_EPOCH));
        stats.note_unavailable();
        assert_eq!(stats.silent_since(), Some(Timestamp::UNIX_EPOCH));
        stats.note_answer();
        assert_eq!(stats.silent_since(), None);
    }

    #[test]
    fn a_starting_server_is_recognized_in_client_errors() {
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
