//! Connections of the HTTP port. Limits their number and the time that a client may take, and chooses the
//! connection to close when a new one arrives. This keeps slow or silent clients from locking out probes.

use std::{collections::BTreeMap, convert::Infallible, sync::Arc, time::Duration};

use axum::{
    Router,
    body::Body,
    extract::{Request, State},
    http::{StatusCode, header},
    middleware::Next,
    response::{IntoResponse as _, Response},
    serve::Listener,
};
use http_body_util::BodyExt as _;
use hyper::{server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
};
use tokio_util::sync::CancellationToken;
use tower::Service as _;

/// Maximum number of connections. They may also take at most `1 / PART_OF_FILES` of the process's file
/// descriptors, because builds and the cluster client need the rest.
const CONNECTIONS: usize = 512;
const PART_OF_FILES: u64 = 2;
/// Bytes of a request's head, and of the send buffer.
const BUFFER: usize = 64 << 10;

/// Limits for the clients of the port.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Maximum number of connections. A new one above the limit closes the connection that has been idle for
    /// longest.
    pub(super) connections: usize,
    /// Maximum number of concurrent requests, except probes. It is below `connections`.
    pub(super) requests: usize,
    /// Timeout for the head of a request, counted from the start of the connection or the end of the previous
    /// request.
    pub(super) head: Duration,
    /// Timeout for a client that reads none of the sent data.
    pub(super) unread: Duration,
}

impl Limits {
    /// Derives the number of connections from the limit of file descriptors.
    pub(super) fn of_process() -> Self {
        let files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        let part =
            files.map_or(CONNECTIONS, |files| usize::try_from(files / PART_OF_FILES).unwrap_or(CONNECTIONS));
        let connections = part.clamp(8, CONNECTIONS);
        Self {
            connections,
            requests: connections / 4 * 3,
            head: Duration::from_secs(20),
            unread: Duration::from_mins(1),
        }
    }
}

/// Serves every connection of a listener.
pub(super) async fn serve(mut listener: TcpListener, router: Router, limits: Limits) {
    let connections = Connections::default();
    loop {
        let (stream, _) = Listener::accept(&mut listener).await;
        if let Some(connection) = connections.admit(limits.connections) {
            tokio::spawn(answer(stream, connection, router.clone(), limits));
        }
    }
}

async fn answer(stream: TcpStream, connection: Connection, router: Router, limits: Limits) {
    let Connection { closed, .. } = &connection;
    let unread = u32::try_from(limits.unread.as_millis()).unwrap_or(u32::MAX);
    if let Err(error) = rustix::net::sockopt::set_tcp_user_timeout(&stream, unread) {
        tracing::debug!(%error, "cannot set the timeout for a client that does not read");
    }
    let service = service_fn(|request: hyper::Request<hyper::body::Incoming>| {
        let (busy, mut router) = (connection.begin_request(), router.clone());
        async move {
            let response = router.call(request).await?;
            Ok::<_, Infallible>(response.map(|body| held(body, busy)))
        }
    });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head)
        .max_buf_size(BUFFER)
        .serve_connection(TokioIo::new(stream), service);
    tokio::select! {
        outcome = served => if let Err(error) = outcome {
            tracing::debug!(%error, "a connection ended");
        },
        () = closed.cancelled() => tracing::debug!("closed a connection to make room for another"),
    }
}

/// Refuses a request above the limit, so that probes are still served.
pub(super) async fn limit_requests(
    State(free): State<Arc<Semaphore>>,
    request: Request,
    next: Next,
) -> Response {
    let Ok(permit) = free.try_acquire_owned() else {
        let text = "too many requests at once\n";
        return (StatusCode::SERVICE_UNAVAILABLE, [(header::CONNECTION, "close")], text).into_response();
    };
    next.run(request).await.map(|body| held(body, permit))
}

/// Keeps a value alive until the body is sent or dropped.
fn held<T: Send + 'static>(body: Body, kept: T) -> Body {
    Body::new(body.map_err(move |error| {
        let _ = &kept;
        error
    }))
}

#[derive(Clone, Default)]
struct Connections(Arc<Mutex<Open>>);

#[derive(Default)]
struct Open {
    /// Logical clock: counts admissions and ends of requests.
    clock: u64,
    by_number: BTreeMap<u64, Entry>,
}

struct Entry {
    /// Number of requests in progress; 0 for an idle connection.
    requests: usize,
    /// Logical time since which the connection has been idle.
    waits_since: u64,
    closed: CancellationToken,
}

impl Connections {
    /// Admits a connection if there is room, or after closing an idle one.
    fn admit(&self, most: usize) -> Option<Connection> {
        let mut open = self.0.lock();
        if open.by_number.len() >= most {
            let waiting = open.by_number.iter().filter(|(_, entry)| entry.requests == 0);
            let (&number, _) = waiting.min_by_key(|(_, entry)| entry.waits_since)?;
            if let Some(entry) = open.by_number.remove(&number) {
                entry.closed.cancel();
            }
        }
        open.clock += 1;
        let (number, closed) = (open.clock, CancellationToken::new());
        let entry = Entry { requests: 0, waits_since: number, closed: closed.clone() };
        open.by_number.insert(number, entry);
        Some(Connection { all: self.clone(), number, closed })
    }
}

/// An open connection. Dropping it frees its place.
struct Connection {
    all: Connections,
    number: u64,
    /// Canceled when the connection has to make room for another.
    closed: CancellationToken,
}

impl Connection {
    fn begin_request(&self) -> Busy {
        if let Some(entry) = self.all.0.lock().by_number.get_mut(&self.number) {
            entry.requests += 1;
        }
        Busy { all: self.all.clone(), number: self.number }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.all.0.lock().by_number.remove(&self.number);
    }
}

/// A request in progress.
struct Busy {
    all: Connections,
    number: u64,
}

impl Drop for Busy {
    fn drop(&mut self) {
        let mut open = self.all.0.lock();
        open.clock += 1;
        let now = open.clock;
        if let Some(entry) = open.by_number.get_mut(&self.number) {
            entry.requests = entry.requests.saturating_sub(1);
            entry.waits_since = now;
        }
    }
}

#[cfg(test)]
#[path = "connections_tests.rs"]
mod tests;
