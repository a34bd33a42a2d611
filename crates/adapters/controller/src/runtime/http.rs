//! The HTTP server for probes, metrics and further routes.

use std::{
    net::{IpAddr, SocketAddr},
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

/// Error of the server's start.
#[derive(Debug, thiserror::Error)]
#[error("listen on {address}")]
pub struct HttpError {
    /// Address to listen on.
    address: SocketAddr,
    /// Error of the operating system.
    source: std::io::Error,
}

/// A listening server that does not answer yet.
pub struct HttpServer {
    listener: TcpListener,
    router: Router,
    limits: Limits,
}

#[derive(Clone)]
struct Shown {
    health: Arc<Health>,
    metrics: Arc<Metrics>,
}

impl HttpServer {
    /// Listens without answering yet. `further` holds the routes beside probes and metrics. On a loopback
    /// address the server only answers requests whose host is a loopback name.
    pub async fn bind(
        address: SocketAddr,
        health: Arc<Health>,
        metrics: Arc<Metrics>,
        further: Router,
    ) -> Result<Self, HttpError> {
        Self::bind_with(address, health, metrics, further, Limits::of_process()).await
    }

    /// Like [`HttpServer::bind`], with explicit limits.
    pub(super) async fn bind_with(
        address: SocketAddr,
        health: Arc<Health>,
        metrics: Arc<Metrics>,
        further: Router,
        limits: Limits,
    ) -> Result<Self, HttpError> {
        let free = Arc::new(Semaphore::new(limits.requests));
        let listener = TcpListener::bind(address).await.map_err(|source| HttpError { address, source })?;
        let mut router = Router::new()
            .route("/metrics", get(figures))
            .route("/healthz", get(alive))
            .route("/readyz", get(ready))
            .with_state(Shown { health, metrics })
            .merge(further.layer(from_fn_with_state(free, connections::limit_requests)));
        if address.ip().is_loopback() {
            router = router.layer(from_fn(refuse_foreign_names));
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

/// Whether a request names the loopback device as its host. A foreign web page can reach the port under its
/// own host name if that name resolves to 127.0.0.1 (DNS rebinding).
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

async fn refuse_foreign_names(request: Request, next: Next) -> Response {
    if names_loopback(request.headers()) {
        return next.run(request).await;
    }
    let text = "this port is on the loopback interface: address it as 127.0.0.1, [::1] or localhost\n";
    (StatusCode::MISDIRECTED_REQUEST, text).into_response()
}

async fn figures(State(shown): State<Shown>) -> Response {
    match shown.metrics.text() {
        Ok(text) => ([(header::CONTENT_TYPE, OPEN_METRICS)], text).into_response(),
        Err(error) => {
            (StatusCode::INTERNAL_SERVER_ERROR, format!("write metrics: {error}\n")).into_response()
        }
    }
}

async fn alive(State(shown): State<Shown>) -> Response {
    match shown.health.stalled() {
        None => "ok\n".into_response(),
        Some(still) => {
            let text = format!("the control loop has made no progress for {} s\n", still.as_secs());
            (StatusCode::SERVICE_UNAVAILABLE, text).into_response()
        }
    }
}

async fn ready(State(shown): State<Shown>) -> Response {
    if shown.health.is_ready() {
        "ok\n".into_response()
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "the cluster has not been read yet\n").into_response()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    async fn ask(address: SocketAddr, path: &str) -> (u16, String) {
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
    async fn probes_and_figures() {
        let (health, metrics) = (Arc::new(Health::default()), Arc::new(Metrics::default()));
        let address = ([127, 0, 0, 1], 0).into();
        let server = HttpServer::bind(address, Arc::clone(&health), metrics, Router::new()).await.unwrap();
        let (address, cancel) = (server.listener.local_addr().unwrap(), CancellationToken::new());
        let task = tokio::spawn(server.serve(cancel.clone()));

        assert_eq!(ask(address, "/healthz").await.0, 200);
        assert_eq!(ask(address, "/readyz").await.0, 503);
        health.set_ready();
        assert_eq!(ask(address, "/readyz").await.0, 200);
        let (status, figures) = ask(address, "/metrics").await;
        assert_eq!(status, 200);
        assert!(
            figures.contains(OPEN_METRICS) && figures.contains("farrier_configuration_valid 1"),
            "{figures}"
        );
        assert_eq!(ask(address, "/else").await.0, 404);

        cancel.cancel();
        task.await.unwrap();
    }

    /// A foreign page whose host name resolves to the loopback device (DNS rebinding) can read neither the
    /// fleet nor metrics.
    #[tokio::test]
    async fn a_port_of_the_loopback_device_answers_to_loopback_names_only() {
        let further = Router::new().route("/", get(|| async { "the fleet" }));
        for (address, foreign) in [([127_u8, 0, 0, 1], 421), ([0_u8; 4], 200)] {
            let (health, metrics) = (Arc::new(Health::default()), Arc::new(Metrics::default()));
            let server =
                HttpServer::bind((address, 0).into(), health, metrics, further.clone()).await.unwrap();
            let port = server.address().unwrap().port();
            let (here, cancel) = (SocketAddr::from(([127, 0, 0, 1], port)), CancellationToken::new());
            let task = tokio::spawn(server.serve(cancel.clone()));
            for path in ["/", "/metrics", "/healthz"] {
                for own in ["127.0.0.1:81", "localhost:81", "LOCALHOST", "[::1]:81", "127.0.0.2"] {
                    let (status, said) = get_as(here, path, &format!("host: {own}\r\n")).await;
                    assert_eq!(status, 200, "{address:?} {path} {own}: {said}");
                }
                for other in ["attacker.test:81", "127.0.0.1.attacker.test", "10.0.0.7:8080", "localhost@x"] {
                    let (status, said) = get_as(here, path, &format!("host: {other}\r\n")).await;
                    assert_eq!(status, foreign, "{address:?} {path} {other}: {said}");
                }
            }
            let twice = "host: localhost\r\nhost: attacker.test\r\n";
            assert_ne!((foreign, get_as(here, "/", twice).await.0), (421, 200), "the second name is foreign");
            cancel.cancel();
            task.await.unwrap();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_loop_that_does_not_turn_is_not_alive() {
        let health = Health::default();
        assert_eq!(health.stalled(), None);
        tokio::time::advance(Duration::from_mins(6)).await;
        assert!(health.stalled().is_some());
        health.beat();
        assert_eq!(health.stalled(), None);
    }
}
