//! The HTTP server for probes and metrics, and for routes of other crates.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
};

use axum::{
    Router,
    extract::{Request, State},
    http::{HeaderMap, StatusCode, header},
    middleware::{Next, from_fn, from_fn_with_state},
    response::{IntoResponse, Response},
    routing::get,
};
use tokio::{net::TcpListener, sync::Semaphore};
use tokio_util::sync::CancellationToken;

use super::{
    connections::{self, Limits},
    health::Health,
    metrics::Metrics,
};

/// Content type of OpenMetrics, as `prometheus-client` writes it.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The server cannot listen on its address.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {address}")]
pub struct HttpError {
    /// Address to listen on.
    address: SocketAddr,
    /// Error of the operating system.
    source: std::io::Error,
}

/// A server that listens but does not serve requests yet.
pub struct HttpServer {
    listener: TcpListener,
    router: Router,
    limits: Limits,
}

#[derive(Clone)]
struct ProbeState {
    health: Arc<Health>,
    metrics: Arc<Metrics>,
}

impl HttpServer {
    /// Listens without serving requests yet. `extra_routes` are the routes besides probes and metrics. On a loopback address the
    /// server rejects requests whose host is not a loopback name.
    pub async fn bind(
        address: SocketAddr,
        health: Arc<Health>,
        metrics: Arc<Metrics>,
        extra_routes: Router,
    ) -> Result<Self, HttpError> {
        Self::bind_with(address, health, metrics, extra_routes, Limits::of_process()).await
    }

    /// Like [`HttpServer::bind`], with explicit limits.
    pub(super) async fn bind_with(
        address: SocketAddr,
        health: Arc<Health>,
        metrics: Arc<Metrics>,
        extra_routes: Router,
        limits: Limits,
    ) -> Result<Self, HttpError> {
        let permits = Arc::new(Semaphore::new(limits.requests));
        let listener = listen(address).await.map_err(|source| HttpError { address, source })?;
        let mut router = Router::new()
            .route("/metrics", get(metrics_text))
            .route("/healthz", get(liveness))
            .route("/readyz", get(readiness))
            .with_state(ProbeState { health, metrics })
            .merge(extra_routes.layer(from_fn_with_state(permits, connections::limit_requests)));
        if address.ip().is_loopback() {
            router = router.layer(from_fn(reject_foreign_hosts));
        }
        Ok(Self { listener, router, limits })
    }

    /// Returns the address that the server listens on.
    pub fn address(&self) -> Option<SocketAddr> {
        self.listener.local_addr().ok()
    }

    /// Serves requests until canceled.
    pub async fn serve(self, cancel: CancellationToken) {
        let Self { listener, router, limits } = self;
        // Connections that a scraper keeps open must not delay the shutdown.
        tokio::select! {
            () = cancel.cancelled() => {}
            () = connections::serve(listener, router, limits) => {}
        }
    }
}

/// Listens on an address. `[::]` includes IPv4, and is IPv4 alone on a machine without IPv6.
async fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    let listener = TcpListener::bind(address).await;
    if listener.is_err() && address.ip() == Ipv6Addr::UNSPECIFIED {
        return TcpListener::bind((Ipv4Addr::UNSPECIFIED, address.port())).await;
    }
    listener
}

/// Whether a request's host is a loopback name. With DNS rebinding, where a foreign host name resolves to 127.0.0.1, a web page
/// can reach the port under its own name.
pub fn names_loopback(headers: &HeaderMap) -> bool {
    let mut hosts = headers.get_all(header::HOST).iter();
    let (Some(host), None) = (hosts.next(), hosts.next()) else { return false };
    let host = host.to_str().unwrap_or_default();
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    let address = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    name.eq_ignore_ascii_case("localhost")
        || address.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

async fn reject_foreign_hosts(request: Request, next: Next) -> Response {
    if names_loopback(request.headers()) {
        return next.run(request).await;
    }
    let text = "this port is on the loopback interface: address it as 127.0.0.1, [::1] or localhost\n";
    (StatusCode::MISDIRECTED_REQUEST, text).into_response()
}

async fn metrics_text(State(state): State<ProbeState>) -> Response {
    match state.metrics.text() {
        Ok(text) => ([(header::CONTENT_TYPE, OPEN_METRICS)], text).into_response(),
        Err(error) => {
            (StatusCode::INTERNAL_SERVER_ERROR, format!("cannot write metrics: {error}\n")).into_response()
        }
    }
}

async fn liveness(State(state): State<ProbeState>) -> Response {
    match state.health.stalled() {
        None => "ok\n".into_response(),
        Some(elapsed) => {
            let text = format!("the control loop has made no progress for {} s\n", elapsed.as_secs());
            (StatusCode::SERVICE_UNAVAILABLE, text).into_response()
        }
    }
}

async fn readiness(State(state): State<ProbeState>) -> Response {
    if state.health.is_ready() {
        "ok\n".into_response()
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "the cluster has not been read yet\n").into_response()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    async fn get_local(address: SocketAddr, path: &str) -> (u16, String) {
        get_as(address, path, "host: localhost\r\n").await
    }

    async fn get_as(address: SocketAddr, path: &str, headers: &str) -> (u16, String) {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\n{headers}connection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
        (status, answer)
    }

    #[tokio::test]
    async fn probes_and_metrics_are_served() {
        let (health, metrics) = (Arc::new(Health::default()), Arc::new(Metrics::default()));
        let address = ([127, 0, 0, 1], 0).into();
        let server = HttpServer::bind(address, Arc::clone(&health), metrics, Router::new()).await.unwrap();
        let (address, cancel) = (server.listener.local_addr().unwrap(), CancellationToken::new());
        let task = tokio::spawn(server.serve(cancel.clone()));

        assert_eq!(get_local(address, "/healthz").await.0, 200);
        assert_eq!(get_local(address, "/readyz").await.0, 503);
        health.set_ready();
        assert_eq!(get_local(address, "/readyz").await.0, 200);
        let (status, metrics_text) = get_local(address, "/metrics").await;
        assert_eq!(status, 200);
        assert!(
            metrics_text.contains(OPEN_METRICS) && metrics_text.contains("farrier_configuration_valid 1"),
            "{metrics_text}"
        );
        assert_eq!(get_local(address, "/else").await.0, 404);

        cancel.cancel();
        task.await.unwrap();
    }

    #[tokio::test]
    async fn the_unspecified_address_includes_both_families() {
        let (health, metrics) = (Arc::new(Health::default()), Arc::new(Metrics::default()));
        let any_port = (Ipv6Addr::UNSPECIFIED, 0).into();
        let server = HttpServer::bind(any_port, health, metrics, Router::new()).await.unwrap();
        let (port, cancel) = (server.address().unwrap().port(), CancellationToken::new());
        let task = tokio::spawn(server.serve(cancel.clone()));
        assert_eq!(get_local((Ipv4Addr::LOCALHOST, port).into(), "/healthz").await.0, 200);
        // Containers often have no IPv6.
        if TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).await.is_ok() {
            assert_eq!(get_local((Ipv6Addr::LOCALHOST, port).into(), "/healthz").await.0, 200);
        }
        cancel.cancel();
        task.await.unwrap();
    }

    /// A foreign page whose host name resolves to the loopback interface (DNS rebinding) can read neither the fleet nor metrics.
    #[tokio::test]
    async fn a_loopback_port_rejects_foreign_host_names() {
        let extra_routes = Router::new().route("/", get(|| async { "the fleet" }));
        for (address, foreign) in [([127_u8, 0, 0, 1], 421), ([0_u8; 4], 200)] {
            let (health, metrics) = (Arc::new(Health::default()), Arc::new(Metrics::default()));
            let server =
                HttpServer::bind((address, 0).into(), health, metrics, extra_routes.clone()).await.unwrap();
            let port = server.address().unwrap().port();
            let (here, cancel) = (SocketAddr::from(([127, 0, 0, 1], port)), CancellationToken::new());
            let task = tokio::spawn(server.serve(cancel.clone()));
            for path in ["/", "/metrics", "/healthz"] {
                for own in ["127.0.0.1:81", "localhost:81", "LOCALHOST", "[::1]:81", "127.0.0.2"] {
                    let (status, response) = get_as(here, path, &format!("host: {own}\r\n")).await;
                    assert_eq!(status, 200, "{address:?} {path} {own}: {response}");
                }
                for other in ["attacker.test:81", "127.0.0.1.attacker.test", "10.0.0.7:8080", "localhost@x"] {
                    let (status, response) = get_as(here, path, &format!("host: {other}\r\n")).await;
                    assert_eq!(status, foreign, "{address:?} {path} {other}: {response}");
                }
            }
            let twice = "host: localhost\r\nhost: attacker.test\r\n";
            assert_ne!((foreign, get_as(here, "/", twice).await.0), (421, 200), "the second name is foreign");
            cancel.cancel();
            task.await.unwrap();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_stalled_loop_is_not_alive() {
        let health = Health::default();
        assert_eq!(health.stalled(), None);
        tokio::time::advance(Duration::from_mins(6)).await;
        assert!(health.stalled().is_some());
        health.beat();
        assert_eq!(health.stalled(), None);
    }
}
