//! Sends HTTP requests to registries: chooses the scheme and enforces timeouts. Authorization is in `auth`.
//!
//! This client uses reqwest and not oci-client. oci-client drops errors of the token server and continues without a token
//! (`get_auth_token`), so that wrong credentials look like missing images. It also cannot limit the size or the time of transfers.

use std::{
    collections::{HashMap, HashSet},
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use bytes::Bytes;
use parking_lot::Mutex;
use reqwest::{Method, Request, Response, header::CONTENT_LENGTH};
use tokio::time::timeout;
use url::Url;

use super::{
    error::{
        ConnectionProblem, NotListening, RegistryError, Result, connection_problem, excerpt,
        may_speak_plain_http,
    },
    pace::{Pace, Pacer, TooSlow},
    registry::Access,
};
use crate::{Repository, is_docker_hub};

/// API host of Docker Hub.
const HUB_API: &str = "registry-1.docker.io";

/// A repository, split as the protocol needs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RemoteName {
    /// `host[:port]` as users write it.
    pub host: String,
    /// `host[:port]` to connect to.
    pub authority: String,
    /// The path below `/v2/`.
    pub path: String,
}

impl RemoteName {
    pub(super) fn of(repository: &Repository) -> Self {
        let (host, path) = repository.normalized();
        let authority = if is_docker_hub(&host) { HUB_API.to_owned() } else { host.clone() };
        Self { host: repository.host().map_or(host, str::to_owned), authority, path }
    }

    /// Whether an address belongs to the registry: it has the same host and port, where a missing port is the scheme's default. Only
    /// these addresses receive credentials, and only their responses are quoted. The scheme need not be compared, because nothing
    /// downgrades from TLS.
    pub(super) fn serves(&self, url: &Url) -> bool {
        let own = Url::parse(&format!("{}://{}/", url.scheme(), self.authority));
        own.is_ok_and(|own| own.origin() == url.origin())
    }

    /// Returns the text of a response for an error message, which everyone who sees the status of a build may read.
    ///
    /// Only text of the registry itself is returned. A registry may redirect farrier to an internal host, whose responses the reader
    /// may not see. For a response of another host, the error is the host's name, and the log has the text.
    pub(super) fn quote(&self, response: &Response, body: &[u8]) -> Result<String, String> {
        let (url, text) = (response.url(), excerpt(body));
        if self.serves(url) {
            return Ok(text);
        }
        let (host, status) = (url.host_str().unwrap_or_default(), response.status().as_u16());
        tracing::debug!(
            registry = self.host,
            host,
            status,
            text,
            "error response of a host that the registry refers to"
        );
        Err(host.to_owned())
    }
}

/// Sends requests, and caches the scheme of each host.
pub(super) struct Transport {
    pub(super) access: Arc<dyn Access>,
    /// Minimum speed of transfers in both directions.
    pub(super) pace: Pace,
    /// Detected scheme of each host that may be used without TLS.
    schemes: Mutex<HashMap<String, &'static str>>,
    /// Registries that have responded before. If one of them refuses a connection, it restarts.
    responsive_hosts: Mutex<HashSet<String>>,
}

impl Transport {
    pub(super) fn new(access: Arc<dyn Access>) -> Self {
        Self { access, pace: Pace::default(), schemes: Mutex::default(), responsive_hosts: Mutex::default() }
    }

    /// Returns `<scheme>://<host>/v2/<repository>/<path>`.
    pub(super) async fn url(&self, name: &RemoteName, path: &str, action: &str) -> Result<Url> {
        let scheme = self.scheme(name, action).await?;
        address(name, &format!("{scheme}://{}/v2/{}/{path}", name.authority, name.path))
    }

    /// Returns `https`, unless the host does not speak TLS and may be used without it. Asks again after a connection that broke,
    /// because the registry may have been restarting.
    async fn scheme(&self, name: &RemoteName, action: &str) -> Result<&'static str> {
        let authority = name.authority.as_str();
        if !self.access.may_be_plain(authority) {
            return Ok("https");
        }
        if let Some(scheme) = self.schemes.lock().get(authority) {
            return Ok(scheme);
        }
        let probe = Request::new(Method::HEAD, address(name, &format!("https://{authority}/v2/"))?);
        let scheme = match self.execute(probe, &AtomicU64::default(), action, &name.host, None).await {
            Ok(_) => "https",
            Err(RegistryError::Unreachable { source, .. }) if may_speak_plain_http(source.as_ref()) => {
                if connection_problem(source.as_ref()) != ConnectionProblem::NotTls {
                    return Ok("http");
                }
                "http"
            }
            Err(error) => return Err(error),
        };
        self.schemes.lock().insert(authority.to_owned(), scheme);
        Ok(scheme)
    }

    /// Sends a request. Has no overall time limit while `sent_bytes`, the count of streamed bytes, grows at the required pace. The
    /// caller reads the response body with [`next_chunk`]. `host` is the registry.
    pub(super) async fn execute(
        &self,
        request: Request,
        sent_bytes: &AtomicU64,
        action: &str,
        host: &str,
        redirected_by: Option<&str>,
    ) -> Result<Response> {
        let size = request.headers().get(CONTENT_LENGTH).and_then(|size| size.to_str().ok()?.parse().ok());
        let mut sending = self.access.execute(request, action, host, redirected_by);
        let mut previously_sent = sent_bytes.load(Ordering::Relaxed);
        loop {
            if let Ok(response) = timeout(self.pace.period, &mut sending).await {
                let mut response = response.map_err(|error| self.classify(error, host))?;
                self.responsive_hosts.lock().insert(host.to_owned());
                response.extensions_mut().insert(Pacer::new(self.pace));
                return Ok(response);
            }
            let now = sent_bytes.load(Ordering::Relaxed);
            // After the last byte, the registry has a full interval to respond.
            let has_just_ended = now > previously_sent && Some(now) == size;
            if now - previously_sent < self.pace.min_bytes && !has_just_ended {
                return Err(too_slow(TooSlow(self.pace), host, action));
            }
            previously_sent = now;
        }
    }

    fn classify(&self, error: RegistryError, host: &str) -> RegistryError {
        let source = match &error {
            RegistryError::Unreachable { source, .. } => NotListening::find(source.as_ref()),
            _ => None,
        };
        match source.filter(|_| !self.responsive_hosts.lock().contains(host)) {
            Some(source) => RegistryError::Refused { host: host.to_owned(), source },
            None => error,
        }
    }
}

fn address(name: &RemoteName, text: &str) -> Result<Url> {
    Url::parse(text).map_err(|error| {
        RegistryError::Options(format!("repository {}/{}", name.host, name.path), error.to_string())
    })
}

fn too_slow(slow: TooSlow, host: &str, action: &str) -> RegistryError {
    RegistryError::unreachable(host, action, io::Error::new(io::ErrorKind::TimedOut, slow))
}

/// Returns the next chunk of a response body. The pace applies to the whole body.
pub(super) async fn next_chunk(response: &mut Response, host: &str, action: &str) -> Result<Option<Bytes>> {
    let mut pacer = response.extensions().get().copied().unwrap_or_else(|| Pacer::new(Pace::default()));
    let chunk = pacer.wait(response.chunk()).await.map_err(|slow| too_slow(slow, host, action))?;
    // Remove the URL from the error, because it may contain a signature that grants access.
    let chunk = chunk.map_err(|error| RegistryError::unreachable(host, action, error.without_url()))?;
    pacer.moved(chunk.as_ref().map_or(0, Bytes::len) as u64);
    response.extensions_mut().insert(pacer);
    Ok(chunk)
}

/// Returns the start of a body, for error messages. Ignores read errors.
pub(super) async fn body_start(response: &mut Response, limit: usize) -> Vec<u8> {
    let mut body = Vec::new();
    while body.len() < limit
        && let Ok(Some(chunk)) = next_chunk(response, "", "").await
    {
        body.extend_from_slice(&chunk);
    }
    body.truncate(limit);
    body
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_split_and_docker_hub_is_resolved() {
        let name = |text: &str| {
            let RemoteName { host, authority, path } = RemoteName::of(&text.parse().unwrap());
            (host, authority, path)
        };
        let texts = |h: &str, a: &str, p: &str| (h.to_owned(), a.to_owned(), p.to_owned());
        assert_eq!(name("127.0.0.1:5000/a/b"), texts("127.0.0.1:5000", "127.0.0.1:5000", "a/b"));
        assert_eq!(name("localhost/a"), texts("localhost", "localhost", "a"));
        assert_eq!(name("docker.io/debian"), texts("docker.io", "registry-1.docker.io", "library/debian"));
        assert_eq!(name("acme/x"), texts("docker.io", "registry-1.docker.io", "acme/x"));
    }

    #[test]
    fn addresses_of_a_registry_have_its_host_and_port() {
        for (repository, url, own) in [
            ("r.example:443/x", "https://r.example/v2/", true),
            ("r.example/x", "https://r.example:443/v2/", true),
            ("r.example:80/x", "http://r.example/v2/", true),
            ("R.Example/x", "https://r.example/v2/", true),
            ("127.0.0.1:5000/x", "http://127.0.0.1:5000/v2/x/blobs/uploads/1", true),
            ("docker.io/x", "https://registry-1.docker.io/v2/", true),
            ("r.example/x", "https://r.example:5000/v2/", false),
            ("r.example:80/x", "https://r.example/v2/", false),
            ("r.example/x", "https://cdn.r.example/v2/", false),
            ("r.example/x", "https://r.example@evil.example/v2/", false),
            ("docker.io/x", "https://docker.io/v2/", false),
        ] {
            let name = RemoteName::of(&repository.parse().unwrap());
            assert_eq!(name.serves(&url.parse().unwrap()), own, "{repository} {url}");
        }
    }
}
