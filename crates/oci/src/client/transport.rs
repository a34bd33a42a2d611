//! Adapter: HTTP to registries without authorization: schemes and timeouts.
//!
//! On reqwest and not on oci-client, which drops the token server's errors and goes on without a token
//! (`get_auth_token`), so that wrong credentials look like missing images, and which cannot bound or
//! time its transfers.

use std::{
    collections::HashMap,
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
    error::{RegistryError, Result, excerpt, speaks_something_else},
    pace::{Pace, Pacer, TooSlow},
    registry::Access,
};
use crate::{Repository, is_docker_hub};

/// The host that serves what is named after Docker Hub.
const HUB_API: &str = "registry-1.docker.io";

/// A repository as the protocol needs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RemoteName {
    /// `host[:port]` as people write it.
    pub host: String,
    /// `host[:port]` that is talked to.
    pub authority: String,
    /// The path below `/v2/`.
    pub path: String,
}

impl RemoteName {
    pub(super) fn of(repository: &Repository) -> Self {
        let (host, path) = repository.normalised();
        let authority = if is_docker_hub(&host) { HUB_API.to_owned() } else { host.clone() };
        Self { host: repository.host().map_or(host, str::to_owned), authority, path }
    }

    /// Is an address the registry's own: its host, and its port, which is the scheme's where none is named? Credentials are for
    /// such addresses, and only their answers are quoted. The scheme is not compared: what begins with TLS is sent nowhere
    /// without.
    pub(super) fn serves(&self, url: &Url) -> bool {
        let own = Url::parse(&format!("{}://{}/", url.scheme(), self.authority));
        own.is_ok_and(|own| own.origin() == url.origin())
    }

    /// The words of an answer, for a message, which everyone may come to read who sees the status of a build. They are the
    /// registry's own or none: it may have sent farrier to a host that answers farrier, and not them. Then the error is the host,
    /// and the log has the words.
    pub(super) fn quote(&self, response: &Response, body: &[u8]) -> Result<String, String> {
        let (url, words) = (response.url(), excerpt(body));
        if self.serves(url) {
            return Ok(words);
        }
        let (host, status) = (url.host_str().unwrap_or_default(), response.status().as_u16());
        tracing::debug!(
            registry = self.host,
            host,
            status,
            words,
            "answer of a host that the registry names"
        );
        Err(host.to_owned())
    }
}

/// Requests, and what is known of the hosts' schemes.
pub(super) struct Transport {
    pub(super) access: Arc<dyn Access>,
    /// The slowest transfer, in either direction.
    pub(super) pace: Pace,
    /// The scheme of each host that may be plain.
    schemes: Mutex<HashMap<String, &'static str>>,
}

impl Transport {
    pub(super) fn new(access: Arc<dyn Access>) -> Self {
        Self { access, pace: Pace::default(), schemes: Mutex::default() }
    }

    /// `<scheme>://<host>/v2/<repository>/<rest>`.
    pub(super) async fn url(&self, name: &RemoteName, rest: &str, action: &str) -> Result<Url> {
        let scheme = self.scheme(name, action).await?;
        address(name, &format!("{scheme}://{}/v2/{}/{rest}", name.authority, name.path))
    }

    /// https, unless the host may be plain and does not speak TLS.
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
            Err(RegistryError::Unreachable { source, .. }) if speaks_something_else(source.as_ref()) => {
                "http"
            }
            Err(error) => return Err(error),
        };
        self.schemes.lock().insert(authority.to_owned(), scheme);
        Ok(scheme)
    }

    /// Sends a request; as long as it takes, if only `moved`, the bytes of a streamed body, keeps to the pace. What follows the
    /// answer's head is read with [`next_chunk`]. `host` is the registry's.
    pub(super) async fn execute(
        &self,
        request: Request,
        moved: &AtomicU64,
        action: &str,
        host: &str,
        sent_by: Option<&str>,
    ) -> Result<Response> {
        let size = request.headers().get(CONTENT_LENGTH).and_then(|size| size.to_str().ok()?.parse().ok());
        let mut sending = self.access.execute(request, action, host, sent_by);
        let mut before = moved.load(Ordering::Relaxed);
        loop {
            if let Ok(answer) = timeout(self.pace.within, &mut sending).await {
                let mut answer = answer?;
                answer.extensions_mut().insert(Pacer::new(self.pace));
                return Ok(answer);
            }
            let now = moved.load(Ordering::Relaxed);
            // After the last byte the registry has its own time to answer.
            let has_just_ended = now > before && Some(now) == size;
            if now - before < self.pace.least && !has_just_ended {
                return Err(too_slow(TooSlow(self.pace), host, action));
            }
            before = now;
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

/// The next part of an answer's body, which keeps to a pace from its beginning on.
pub(super) async fn next_chunk(response: &mut Response, host: &str, action: &str) -> Result<Option<Bytes>> {
    let mut pacer = response.extensions().get().copied().unwrap_or_else(|| Pacer::new(Pace::default()));
    let chunk = pacer.wait(response.chunk()).await.map_err(|slow| too_slow(slow, host, action))?;
    // The address may hold a signature that grants access.
    let chunk = chunk.map_err(|error| RegistryError::unreachable(host, action, error.without_url()))?;
    pacer.moved(chunk.as_ref().map_or(0, Bytes::len) as u64);
    response.extensions_mut().insert(pacer);
    Ok(chunk)
}

/// The first bytes of a body; for errors, whose own errors do not matter.
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
    fn hosts_and_hub() {
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
    fn a_registrys_own_addresses_have_its_host_and_port() {
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
