//! Adapter: counts what is asked of the API server, and bounds how long an answer is waited for.
//!
//! It is a layer of the client, so that every request is counted, whichever part of farrier makes it.

use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::{Duration, Instant},
};

use http::{Method, Request, Response, StatusCode, header::RETRY_AFTER};
use tower::{BoxError, Layer, Service};

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ApiVerb {
    /// One object, or what the API serves.
    Get,
    /// A page of a list.
    List,
    /// A stream of changes.
    Watch,
    /// A new object, or an eviction.
    Create,
    /// An object, replaced.
    Update,
    /// An object, patched or applied.
    Patch,
    /// An object's end.
    Delete,
}

/// Which kind of object a request is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ApiKind {
    /// Nodes.
    Nodes,
    /// DaemonSets.
    DaemonSets,
    /// Pods.
    Pods,
    /// Evictions of pods.
    Evictions,
    /// The operators' resources.
    OperatorResources,
    /// farrier's own resources.
    DriverBuilds,
    /// Leases.
    Leases,
    /// Events.
    Events,
    /// Anything else.
    Other,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ApiOutcome {
    /// 2xx.
    Success,
    /// 409: somebody was faster.
    Conflict,
    /// 403, 401.
    Forbidden,
    /// 404.
    NotFound,
    /// 410: a watch that fell behind.
    Gone,
    /// 429.
    TooManyRequests,
    /// Another 4xx.
    Invalid,
    /// 5xx.
    ServerError,
    /// No answer.
    Unreachable,
}

macro_rules! labels {
    ($type:ident: $($variant:ident = $label:literal),+ $(,)?) => {
        impl $type {
            /// All of them.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// The metric label.
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $label),+
                }
            }
        }
    };
}

labels!(ApiVerb: Get = "get", List = "list", Watch = "watch", Create = "create", Update = "update",
    Patch = "patch", Delete = "delete");
labels!(ApiKind: Nodes = "nodes", DaemonSets = "daemonsets", Pods = "pods", Evictions = "evictions",
    OperatorResources = "operator-resources", DriverBuilds = "driverbuilds", Leases = "leases",
    Events = "events", Other = "other");
labels!(ApiOutcome: Success = "success", Conflict = "conflict", Forbidden = "forbidden", NotFound = "not-found",
    Gone = "gone", TooManyRequests = "too-many-requests", Invalid = "invalid", ServerError = "server-error",
    Unreachable = "unreachable");

const CELLS: usize = ApiVerb::ALL.len() * ApiKind::ALL.len() * ApiOutcome::ALL.len();

/// Counters of requests, since the start.
#[derive(Debug)]
pub struct KubeStats {
    cells: Box<[AtomicU64]>,
    /// Until when the API server asked to be left alone.
    pause: Mutex<Option<Instant>>,
}

impl Default for KubeStats {
    fn default() -> Self {
        Self { cells: (0..CELLS).map(|_| AtomicU64::new(0)).collect(), pause: Mutex::new(None) }
    }
}

impl KubeStats {
    /// Every combination that happened, and how often.
    pub fn requests(&self) -> Vec<(ApiVerb, ApiKind, ApiOutcome, u64)> {
        let mut found = Vec::new();
        for verb in ApiVerb::ALL {
            for kind in ApiKind::ALL {
                for outcome in ApiOutcome::ALL {
                    let count = self.cells[cell(*verb, *kind, *outcome)].load(Ordering::Relaxed);
                    if count > 0 {
                        found.push((*verb, *kind, *outcome, count));
                    }
                }
            }
        }
        found
    }

    /// How many pages of lists of a kind were asked for.
    pub fn lists(&self, kind: ApiKind) -> u64 {
        self.sum(|verb, of, _| verb == ApiVerb::List && of == kind)
    }

    /// How many writes of a kind succeeded.
    pub fn writes(&self, kind: ApiKind) -> u64 {
        use ApiVerb::{Create, Delete, Patch, Update};
        self.sum(|verb, of, outcome| {
            of == kind && outcome == ApiOutcome::Success && matches!(verb, Create | Update | Patch | Delete)
        })
    }

    fn sum(&self, counts: impl Fn(ApiVerb, ApiKind, ApiOutcome) -> bool) -> u64 {
        let counted =
            self.requests().into_iter().filter(|(verb, kind, outcome, _)| counts(*verb, *kind, *outcome));
        counted.map(|(.., count)| count).sum()
    }

    fn count(&self, verb: ApiVerb, kind: ApiKind, outcome: ApiOutcome) {
        self.cells[cell(verb, kind, outcome)].fetch_add(1, Ordering::Relaxed);
    }

    fn pause_for(&self, wait: Duration) {
        let until = Instant::now() + wait.min(LONGEST_PAUSE);
        let mut pause = self.pause.lock().unwrap_or_else(PoisonError::into_inner);
        *pause = pause.max(Some(until));
    }

    /// How long the API server still wants to be left alone (`Retry-After`).
    pub(super) fn pause(&self) -> Duration {
        let pause = *self.pause.lock().unwrap_or_else(PoisonError::into_inner);
        pause.map_or(Duration::ZERO, |until| until.saturating_duration_since(Instant::now()))
    }
}

fn cell(verb: ApiVerb, kind: ApiKind, outcome: ApiOutcome) -> usize {
    (verb as usize * ApiKind::ALL.len() + kind as usize) * ApiOutcome::ALL.len() + outcome as usize
}

/// A server that asks for more is asked again after this.
const LONGEST_PAUSE: Duration = Duration::from_mins(1);
/// The API server itself ends a request after a minute (`--request-timeout`). A watch begins at once.
const ANSWER: Duration = Duration::from_mins(1);

/// The layer.
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
        let (verb, kind) = classify(request.method(), request.uri().path(), request.uri().query());
        let stats = self.stats.clone();
        let answer = self.inner.call(request);
        Box::pin(async move {
            let answer: Result<_, BoxError> = match tokio::time::timeout(ANSWER, answer).await {
                Ok(answer) => answer.map_err(Into::into),
                Err(_) => Err(format!("no answer within {} s", ANSWER.as_secs()).into()),
            };
            let code = answer.as_ref().ok().map(Response::status);
            stats.count(verb, kind, outcome(code));
            if let Ok(response) = &answer
                && let Some(wait) = retry_after(response)
            {
                stats.pause_for(wait);
            }
            answer
        })
    }
}

/// How long a busy server asks to wait; it writes seconds (`Retry-After: 1`).
pub(super) fn retry_after<B>(response: &Response<B>) -> Option<Duration> {
    let busy = [StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE].contains(&response.status());
    let seconds = response.headers().get(RETRY_AFTER).filter(|_| busy)?;
    seconds.to_str().ok()?.trim().parse().ok().map(Duration::from_secs)
}

fn outcome(status: Option<StatusCode>) -> ApiOutcome {
    match status.map(|status| status.as_u16()) {
        None => ApiOutcome::Unreachable,
        Some(401 | 403) => ApiOutcome::Forbidden,
        Some(404) => ApiOutcome::NotFound,
        Some(409) => ApiOutcome::Conflict,
        Some(410) => ApiOutcome::Gone,
        Some(429) => ApiOutcome::TooManyRequests,
        Some(400..500) => ApiOutcome::Invalid,
        Some(500..) => ApiOutcome::ServerError,
        Some(_) => ApiOutcome::Success,
    }
}

/// From a request's method and path: `/api/v1/...` or `/apis/GROUP/VERSION/...`, then `namespaces/NAME/` or not,
/// then the resource, the object's name and a subresource.
fn classify(method: &Method, path: &str, query: Option<&str>) -> (ApiVerb, ApiKind) {
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
        ("", ["pods", _, "eviction"]) => ApiKind::Evictions,
        ("", ["nodes", ..]) => ApiKind::Nodes,
        ("", ["pods", ..]) => ApiKind::Pods,
        ("" | "events.k8s.io", ["events", ..]) => ApiKind::Events,
        ("apps", ["daemonsets", ..]) => ApiKind::DaemonSets,
        ("coordination.k8s.io", ["leases", ..]) => ApiKind::Leases,
        ("farrier.dev", ["driverbuilds", ..]) => ApiKind::DriverBuilds,
        ("mellanox.com" | "nvidia.com", [_, ..]) => ApiKind::OperatorResources,
        _ => ApiKind::Other,
    };
    let watches = query.is_some_and(|query| query.split('&').any(|part| part == "watch=true"));
    let verb = match *method {
        Method::POST => ApiVerb::Create,
        Method::PUT => ApiVerb::Update,
        Method::PATCH => ApiVerb::Patch,
        Method::DELETE => ApiVerb::Delete,
        _ if watches => ApiVerb::Watch,
        _ if parts.len() == 1 => ApiVerb::List,
        _ => ApiVerb::Get,
    };
    (verb, kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_counted_by_what_they_ask() {
        let cases = [
            (Method::GET, "/api/v1/nodes", Some("limit=250"), ApiVerb::List, ApiKind::Nodes),
            (Method::GET, "/api/v1/nodes", Some("&watch=true&x=1"), ApiVerb::Watch, ApiKind::Nodes),
            (Method::PATCH, "/api/v1/nodes/a", None, ApiVerb::Patch, ApiKind::Nodes),
            (Method::GET, "/api/v1/namespaces/x/pods", None, ApiVerb::List, ApiKind::Pods),
            (Method::POST, "/api/v1/namespaces/x/pods/p/eviction", None, ApiVerb::Create, ApiKind::Evictions),
            (
                Method::DELETE,
                "/apis/apps/v1/namespaces/x/daemonsets/d",
                None,
                ApiVerb::Delete,
                ApiKind::DaemonSets,
            ),
            (Method::GET, "/apis/apps/v1/daemonsets", None, ApiVerb::List, ApiKind::DaemonSets),
            (Method::GET, "/apis/nvidia.com/v1", None, ApiVerb::Get, ApiKind::Other),
            (
                Method::GET,
                "/apis/nvidia.com/v1/clusterpolicies",
                None,
                ApiVerb::List,
                ApiKind::OperatorResources,
            ),
            (
                Method::PUT,
                "/apis/coordination.k8s.io/v1/namespaces/f/leases/l",
                None,
                ApiVerb::Update,
                ApiKind::Leases,
            ),
            (Method::GET, "/api/v1/namespaces/x", None, ApiVerb::Get, ApiKind::Other),
            (Method::GET, "/version", None, ApiVerb::Get, ApiKind::Other),
        ];
        for (method, path, query, verb, kind) in cases {
            assert_eq!(classify(&method, path, query), (verb, kind), "{method} {path}");
        }
    }

    #[test]
    fn sums_are_over_what_happened() {
        let stats = KubeStats::default();
        stats.count(ApiVerb::List, ApiKind::Nodes, ApiOutcome::Success);
        stats.count(ApiVerb::List, ApiKind::Nodes, ApiOutcome::ServerError);
        stats.count(ApiVerb::Patch, ApiKind::DaemonSets, ApiOutcome::Conflict);
        stats.count(ApiVerb::Patch, ApiKind::DaemonSets, ApiOutcome::Success);
        assert_eq!((stats.lists(ApiKind::Nodes), stats.lists(ApiKind::Pods)), (2, 0));
        assert_eq!(stats.writes(ApiKind::DaemonSets), 1);
        assert_eq!(stats.requests().len(), 4);
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
    fn every_status_has_a_class() {
        let of = |code: u16| outcome(Some(StatusCode::from_u16(code).unwrap()));
        assert_eq!(
            (of(201), of(409), of(422), of(503)),
            (ApiOutcome::Success, ApiOutcome::Conflict, ApiOutcome::Invalid, ApiOutcome::ServerError,)
        );
        assert_eq!(outcome(None), ApiOutcome::Unreachable);
    }
}
