use std::net::SocketAddr;

use axum::routing::get;
use bytes::Bytes;
use futures::{StreamExt as _, stream};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    sync::{Notify, mpsc},
};

use super::{super::http::HttpServer, *};
use crate::runtime::{Health, Metrics};

/// Timeout that no test reaches.
const NEVER: Duration = Duration::from_hours(1);
const LIMITS: Limits = Limits { connections: 8, requests: 4, head_timeout: NEVER, unread_timeout: NEVER };

async fn start(extra_routes: Router, limits: Limits) -> SocketAddr {
    let (health, metrics) = (Arc::new(Health::default()), Arc::new(Metrics::default()));
    let address = ([127, 0, 0, 1], 0).into();
    let server = HttpServer::bind_with(address, health, metrics, extra_routes, limits).await.unwrap();
    let address = server.address().unwrap();
    tokio::spawn(server.serve(CancellationToken::new()));
    address
}

async fn send(address: SocketAddr, text: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(text.as_bytes()).await.unwrap();
    stream
}

/// Reads until the server closes the connection.
async fn read_to_end(mut stream: TcpStream) -> String {
    let mut response = Vec::new();
    // Data that was still in flight to a closed connection makes the kernel send a reset.
    let _ = stream.read_to_end(&mut response).await;
    String::from_utf8(response).unwrap()
}

async fn status(address: SocketAddr, path: &str) -> String {
    let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    read_to_end(send(address, &request).await).await.split(' ').nth(1).unwrap_or("none").to_owned()
}

#[tokio::test]
async fn incomplete_requests_do_not_lock_out_probes() {
    let address = start(Router::new(), LIMITS).await;
    let mut halves = Vec::new();
    for _ in 0..100 {
        halves.push(send(address, "GET /healthz HTTP/1.1\r\nhost: loc").await);
    }
    for path in ["/healthz", "/metrics"] {
        assert_eq!(status(address, path).await, "200", "{path}");
    }
    // The connections that had been idle for longest were closed without an answer.
    for half in halves.drain(..90) {
        assert_eq!(read_to_end(half).await, "");
    }
}

#[tokio::test]
async fn a_connection_without_request_head_times_out() {
    let address = start(Router::new(), Limits { head_timeout: Duration::from_millis(50), ..LIMITS }).await;
    for begun in ["", "GET /healthz HTTP/1.1\r\nhost: loc"] {
        let response = read_to_end(send(address, begun).await).await;
        assert!(response.is_empty() || response.starts_with("HTTP/1.1 408"), "{response}");
    }
    // After an answer the timeout for the next head is the same.
    let response = read_to_end(send(address, "GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n").await).await;
    assert!(response.starts_with("HTTP/1.1 200") && response.ends_with("ok\n"), "{response}");
}

#[tokio::test]
async fn requests_in_progress_do_not_lock_out_probes() {
    let (asked, mut started) = mpsc::unbounded_channel();
    let go = Arc::new(Notify::new());
    let waits = Arc::clone(&go);
    let slow = get(async move || {
        asked.send(()).unwrap();
        waits.notified().await;
        "done\n"
    });
    let address = start(Router::new().route("/slow", slow), LIMITS).await;
    let mut under_way = Vec::new();
    for _ in 0..LIMITS.requests {
        under_way.push(tokio::spawn(status(address, "/slow")));
        started.recv().await.unwrap();
    }
    assert_eq!(status(address, "/slow").await, "503");
    let mut halves = Vec::new();
    for _ in 0..20 {
        halves.push(send(address, "GET").await);
    }
    assert_eq!(status(address, "/readyz").await, "503", "not ready, but answered");
    assert_eq!(status(address, "/healthz").await, "200");
    go.notify_waiters();
    for request in under_way {
        assert_eq!(request.await.unwrap(), "200", "a request in progress is never closed to make room");
    }
    go.notify_one();
    assert_eq!(status(address, "/slow").await, "200", "there is room again");
}

/// A client that does not read makes farrier keep the rest of the page.
#[tokio::test]
async fn a_page_that_is_not_read_counts_as_a_request() {
    let page = get(async || vec![b'x'; 32 << 20]);
    let address = start(Router::new().route("/page", page), LIMITS).await;
    let mut slow = Vec::new();
    for _ in 0..LIMITS.requests {
        let mut client = send(address, "GET /page HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
        client.read_exact(&mut [0; 12]).await.unwrap();
        slow.push(client);
    }
    assert_eq!(status(address, "/page").await, "503");
}

/// Sends a message when dropped.
struct Told(mpsc::UnboundedSender<()>);

impl Drop for Told {
    fn drop(&mut self) {
        self.0.send(()).unwrap();
    }
}

#[tokio::test]
async fn a_client_that_reads_nothing_is_disconnected() {
    let (dropped, mut given_up) = mpsc::unbounded_channel();
    let endless = get(async move || {
        let chunks = stream::repeat(Bytes::from(vec![b'x'; 1 << 16]));
        let kept = Told(dropped.clone());
        Body::from_stream(chunks.map(move |chunk| {
            let _ = &kept;
            Ok::<_, Infallible>(chunk)
        }))
    });
    let address = start(
        Router::new().route("/log", endless),
        Limits { unread_timeout: Duration::from_millis(100), ..LIMITS },
    )
    .await;
    let silent = send(address, "GET /log HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
    assert_eq!(given_up.recv().await, Some(()));
    drop(silent);
}

#[test]
fn the_limit_of_requests_is_below_the_limit_of_connections() {
    let limits = Limits::of_process();
    assert!((1..limits.connections).contains(&limits.requests), "{limits:?}");
}

#[test]
fn connections_and_logs_take_less_than_half_of_the_file_descriptors() {
    for files in [64, 1024, 2048, 1 << 20] {
        let limits = Limits::of_files(Some(files));
        let taken = u64::try_from(limits.connections + limits.requests).unwrap();
        assert!(taken < files / 2, "{files}: {limits:?}");
    }
}
