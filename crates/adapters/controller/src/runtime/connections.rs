//! Connections of the HTTP port. Limits on their number, on concurrent requests and on the time that a client may take keep slow
//! or silent clients from locking out probes.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::{
    Router,
    body::{Body, Bytes, HttpBody},
    extract::{Request, State},
    http::{StatusCode, header},
    middleware::Next,
    response::{IntoResponse as _, Response},
    serve::Listener,
};
use hyper::{
    body::{Frame, SizeHint},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
};
use tokio_util::sync::CancellationToken;
use tower::Service as _;

/// Maximum number of connections.
const MAX_CONNECTIONS: usize = 512;
/// Connections may take at most `1 / FILE_LIMIT_DIVISOR` of the process's file descriptors. A request for a log takes another
/// one. Builds and the cluster client need the rest, which is more than half.
const FILE_LIMIT_DIVISOR: u64 = 4;
/// Maximum size of a request's head, and size of the send buffer.
const BUFFER_BYTES: usize = 64 << 10;
/// Maximum size of a part of a body that is moved to the send buffer at once.
const CHUNK_BYTES: usize = 16 << 10;

/// Limits on the clients of the port.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Maximum number of connections. A new connection above the limit closes the connection that has been idle for longest.
    pub(super) connections: usize,
    /// Maximum number of concurrent requests, except probes. Lower than `connections`.
    pub(super) requests: usize,
    /// Timeout for the head of a request, counted from the start of the connection or the end of the previous request.
    pub(super) head_timeout: Duration,
    /// Timeout for a client that reads none of the sent data.
    pub(super) unread_timeout: Duration,
}

impl Limits {
    /// Derives the number of connections from the process's limit on file descriptors.
    pub(super) fn of_process() -> Self {
        Self::of_files(rustix::process::getrlimit(rustix::process::Resource::Nofile).current)
    }

    fn of_files(files: Option<u64>) -> Self {
        let part = files.map_or(MAX_CONNECTIONS, |files| {
            usize::try_from(files / FILE_LIMIT_DIVISOR).unwrap_or(MAX_CONNECTIONS)
        });
        let connections = part.clamp(8, MAX_CONNECTIONS);
        Self {
            connections,
            requests: connections / 4 * 3,
            head_timeout: Duration::from_secs(20),
            unread_timeout: Duration::from_mins(1),
        }
    }
}

/// Serves every connection of a listener.
pub(super) async fn serve(mut listener: TcpListener, router: Router, limits: Limits) {
    let connections = Connections::default();
    loop {
        let (stream, _) = Listener::accept(&mut listener).await;
        if let Some(connection) = connections.admit(limits.connections) {
            tokio::spawn(serve_connection(stream, connection, router.clone(), limits));
        }
    }
}

async fn serve_connection(stream: TcpStream, connection: Connection, router: Router, limits: Limits) {
    let Connection { closed, .. } = &connection;
    let unread_timeout = u32::try_from(limits.unread_timeout.as_millis()).unwrap_or(u32::MAX);
    if let Err(error) = rustix::net::sockopt::set_tcp_user_timeout(&stream, unread_timeout) {
        tracing::debug!(%error, "cannot set the timeout for a client that does not read");
    }
    let service = service_fn(|request: hyper::Request<hyper::body::Incoming>| {
        let (busy, mut router) = (connection.begin_request(), router.clone());
        async move {
            let response = router.call(request).await?;
            Ok::<_, Infallible>(response.map(|body| GuardedBody::wrap(body, busy)))
        }
    });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head_timeout)
        .max_buf_size(BUFFER_BYTES)
        .serve_connection(TokioIo::new(stream), service);
    tokio::select! {
        outcome = served => if let Err(error) = outcome {
            tracing::debug!(%error, "a connection ended");
        },
        () = closed.cancelled() => tracing::debug!("closed a connection to make room for another"),
    }
}

/// Rejects a request above the limit, so that capacity for probes remains.
pub(super) async fn limit_requests(
    State(permits): State<Arc<Semaphore>>,
    request: Request,
    next: Next,
) -> Response {
    let Ok(permit) = permits.try_acquire_owned() else {
        let text = "too many requests at once\n";
        return (StatusCode::SERVICE_UNAVAILABLE, [(header::CONNECTION, "close")], text).into_response();
    };
    next.run(request).await.map(|body| GuardedBody::wrap(body, permit))
}

/// A body that keeps a value alive until the send buffer has the last chunk, or the body is dropped.
struct GuardedBody<T> {
    body: Body,
    /// Part of the current frame that is not sent yet.
    unsent: Bytes,
    _guard: T,
}

impl<T: Send + Unpin + 'static> GuardedBody<T> {
    fn wrap(body: Body, guard: T) -> Body {
        Body::new(Self { body, unsent: Bytes::new(), _guard: guard })
    }
}

impl<T: Unpin> HttpBody for GuardedBody<T> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let Self { body, unsent, .. } = self.get_mut();
        if unsent.is_empty() {
            match ready!(Pin::new(body).poll_frame(context)).transpose()?.map(Frame::into_data) {
                Some(Ok(data)) => *unsent = data,
                Some(Err(trailers)) => return Poll::Ready(Some(Ok(trailers))),
                None => return Poll::Ready(None),
            }
        }
        let chunk = unsent.split_to(unsent.len().min(CHUNK_BYTES));
        Poll::Ready(Some(Ok(Frame::data(chunk))))
    }

    fn is_end_stream(&self) -> bool {
        self.unsent.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint() + SizeHint::with_exact(self.unsent.len() as u64)
    }
}

#[derive(Clone, Default)]
struct Connections(Arc<Mutex<ConnectionTable>>);

#[derive(Default)]
struct ConnectionTable {
    /// Logical clock: counts admissions and ends of requests.
    clock: u64,
    by_number: BTreeMap<u64, ConnectionEntry>,
}

/// State of an open connection.
struct ConnectionEntry {
    /// Number of requests in progress; 0 for an idle connection.
    requests: usize,
    /// Logical time since which the connection has been idle.
    idle_since: u64,
    closed: CancellationToken,
}

impl Connections {
    /// Admits a connection. At the limit, first closes the connection that has been idle for longest. Returns `None` if all
    /// connections have requests in progress.
    fn admit(&self, limit: usize) -> Option<Connection> {
        let mut table = self.0.lock();
        if table.by_number.len() >= limit {
            let idle = table.by_number.iter().filter(|(_, entry)| entry.requests == 0);
            let (&number, _) = idle.min_by_key(|(_, entry)| entry.idle_since)?;
            if let Some(entry) = table.by_number.remove(&number) {
                entry.closed.cancel();
            }
        }
        table.clock += 1;
        let (number, closed) = (table.clock, CancellationToken::new());
        let entry = ConnectionEntry { requests: 0, idle_since: number, closed: closed.clone() };
        table.by_number.insert(number, entry);
        Some(Connection { all: self.clone(), number, closed })
    }
}

/// An open connection. Dropping this value removes the connection from the table.
struct Connection {
    all: Connections,
    number: u64,
    /// Canceled when the connection must close in favor of another connection.
    closed: CancellationToken,
}

impl Connection {
    fn begin_request(&self) -> RequestGuard {
        if let Some(entry) = self.all.0.lock().by_number.get_mut(&self.number) {
            entry.requests += 1;
        }
        RequestGuard { all: self.all.clone(), number: self.number }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.all.0.lock().by_number.remove(&self.number);
    }
}

/// Counts a request as in progress until dropped.
struct RequestGuard {
    all: Connections,
    number: u64,
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        let mut table = self.all.0.lock();
        table.clock += 1;
        let now = table.clock;
        if let Some(entry) = table.by_number.get_mut(&self.number) {
            entry.requests = entry.requests.saturating_sub(1);
            entry.idle_since = now;
        }
    }
}

#[cfg(test)]
#[path = "connections_tests.rs"]
mod tests;
