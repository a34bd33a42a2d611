//! Adapter: HTTP to registries: schemes, timeouts, redirects, and which answers are errors.
//!
//! On reqwest and not on oci-client, which drops the token server's errors and goes on without a token
//! (`get_auth_token`), so that wrong credentials look like missing images, and which cannot bound or
//! time its transfers.

use std::{
    collections::HashMap,
    io,
    path::Path,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use futures::{Stream, StreamExt as _};
use reqwest::{
    Body, Client, Method, RequestBuilder, Response,
    header::{AUTHORIZATION, CONTENT_LENGTH, HeaderName},
    redirect,
};
use tokio_util::io::ReaderStream;
use url::Url;

use super::{
    RegistryError, RegistryOptions,
    auth::{Access, Authorizer, authority_of},
    error::{Fault, excerpt, fault, hung_up},
    name::{RemoteName, host_name, is_loopback},
    stream::{BlobSource, read_source},
    tls,
};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest silence in either direction.
const IDLE_TIMEOUT: Duration = Duration::from_mins(1);
const MAX_REDIRECTS: usize = 5;
/// Read of an error's body.
const MAX_ERROR_BODY: usize = 8 << 10;
/// Read from a file at once.
const CHUNK: usize = 256 << 10;

/// Clients, schemes and timeouts; knows nothing of authorization.
pub(super) struct Transport {
    /// For loopback: a proxy's loopback is another machine.
    direct: Client,
    /// For everything else, through the environment's proxy where there is one.
    general: Client,
    insecure: Vec<String>,
    /// The scheme of each host that may be plain.
    schemes: Mutex<HashMap<String, &'static str>>,
}

impl Transport {
    fn new(ca_file: Option<&Path>, insecure: Vec<String>) -> Result<Self, RegistryError> {
        let tls = tls::client_config(ca_file)?;
        let builder = || {
            Client::builder()
                .tls_backend_preconfigured(tls.clone())
                .user_agent(concat!("farrier/", env!("CARGO_PKG_VERSION")))
                .connect_timeout(CONNECT_TIMEOUT)
                .referer(false)
                // reqwest itself drops Authorization when the host, port or scheme changes.
                .redirect(redirect::Policy::custom(|attempt| {
                    let from_tls = attempt.previous().iter().any(|url| url.scheme() == "https");
                    if attempt.previous().len() > MAX_REDIRECTS {
                        attempt.error("too many redirects")
                    } else if from_tls && attempt.url().scheme() != "https" {
                        attempt.error("redirect from https to plain http")
                    } else {
                        attempt.follow()
                    }
                }))
        };
        let failed = |error: reqwest::Error| RegistryError::Options {
            what: "HTTP client".to_owned(),
            reason: error.to_string(),
        };
        Ok(Self {
            direct: builder().no_proxy().build().map_err(failed)?,
            general: builder().build().map_err(failed)?,
            insecure,
            schemes: Mutex::default(),
        })
    }

    pub(super) fn client(&self, authority: &str) -> &Client {
        if is_loopback(authority) { &self.direct } else { &self.general }
    }

    /// May this host be talked to without TLS?
    pub(super) fn allows_plain(&self, authority: &str) -> bool {
        is_loopback(authority)
            || self.insecure.iter().any(|host| host == authority || host == host_name(authority))
    }

    /// https, unless the host may be plain and does not speak TLS.
    async fn scheme(&self, name: &RemoteName, action: &str) -> Result<&'static str, RegistryError> {
        let authority = name.authority.as_str();
        if !self.allows_plain(authority) {
            return Ok("https");
        }
        let known = |schemes: &Mutex<HashMap<_, _>>| {
            schemes.lock().unwrap_or_else(PoisonError::into_inner).get(authority).copied()
        };
        if let Some(scheme) = known(&self.schemes) {
            return Ok(scheme);
        }
        let probe = self.client(authority).head(format!("https://{authority}/v2/"));
        let scheme = match self.execute(probe, &name.host, action).await {
            Ok(_) => "https",
            Err(RegistryError::Unreachable { source, host, action }) => {
                if speaks_something_else(source.as_ref()) {
                    "http"
                } else {
                    return Err(RegistryError::Unreachable { host, action, source });
                }
            }
            Err(other) => return Err(other),
        };
        let mut schemes = self.schemes.lock().unwrap_or_else(PoisonError::into_inner);
        schemes.insert(authority.to_owned(), scheme);
        Ok(scheme)
    }

    /// Sends a request whose body, if any, is in memory.
    pub(super) async fn execute(
        &self,
        request: RequestBuilder,
        host: &str,
        action: &str,
    ) -> Result<Response, RegistryError> {
        match tokio::time::timeout(IDLE_TIMEOUT, request.send()).await {
            Ok(answer) => answer.map_err(|error| broken(host, action, error)),
            Err(_) => Err(silent(host, action)),
        }
    }

    /// Sends a request that streams a file; as long as it takes, if only something moves.
    async fn execute_moving(
        &self,
        request: RequestBuilder,
        moved: &AtomicU64,
        host: &str,
        action: &str,
    ) -> Result<Response, RegistryError> {
        let mut sending = std::pin::pin!(request.send());
        let mut before = moved.load(Ordering::Relaxed);
        loop {
            if let Ok(answer) = tokio::time::timeout(IDLE_TIMEOUT, &mut sending).await {
                return answer.map_err(|error| broken(host, action, error));
            }
            let now = moved.load(Ordering::Relaxed);
            if now == before {
                return Err(silent(host, action));
            }
            before = now;
        }
    }
}

/// The TCP connection stood, and TLS did not: then there may be plain HTTP. A certificate that is not
/// trusted is no reason to do without.
fn speaks_something_else(error: &(dyn std::error::Error + 'static)) -> bool {
    match fault(error) {
        Fault::NotTls => true,
        Fault::Certificate => false,
        Fault::Connection => hung_up(error),
    }
}

fn broken(host: &str, action: &str, error: reqwest::Error) -> RegistryError {
    let (host, action) = (host.to_owned(), action.to_owned());
    if error.is_redirect() {
        let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
        return RegistryError::Protocol { host, action, reason: format!("redirect not followed: {cause}") };
    }
    // The address may hold a signature that grants access.
    RegistryError::Unreachable { host, action, source: Box::new(error.without_url()) }
}

fn silent(host: &str, action: &str) -> RegistryError {
    let message = format!("nothing moved for {} seconds", IDLE_TIMEOUT.as_secs());
    RegistryError::Unreachable {
        host: host.to_owned(),
        action: action.to_owned(),
        source: Box::new(io::Error::new(io::ErrorKind::TimedOut, message)),
    }
}

/// What is sent along.
pub(super) enum Payload<'a> {
    None,
    Bytes(Bytes),
    File { path: &'a Path, size: u64 },
    Source(Arc<dyn BlobSource>),
}

/// One request of the protocol.
pub(super) struct Call<'a> {
    pub name: &'a RemoteName,
    pub access: Access,
    /// In words, such as `fetch manifest of drivers/x:1`.
    pub action: &'a str,
    pub method: Method,
    pub url: Url,
    pub headers: Vec<(HeaderName, String)>,
    pub payload: Payload<'a>,
}

/// Requests with authorization.
pub(super) struct Http {
    transport: Transport,
    authorizer: Authorizer,
}

impl Http {
    pub(super) fn new(options: &RegistryOptions) -> Result<Self, RegistryError> {
        let RegistryOptions { credentials, ca_file, insecure } = options;
        let transport = Transport::new(ca_file.as_deref(), insecure.clone())?;
        Ok(Self { transport, authorizer: Authorizer::new(credentials.clone()) })
    }

    /// `<scheme>://<host>/v2/<repository>/<rest>`.
    pub(super) async fn url(
        &self,
        name: &RemoteName,
        rest: &str,
        action: &str,
    ) -> Result<Url, RegistryError> {
        let scheme = self.transport.scheme(name, action).await?;
        let text = format!("{scheme}://{}/v2/{}/{rest}", name.authority, name.path);
        Url::parse(&text).map_err(|error| RegistryError::Options {
            what: format!("repository {}/{}", name.host, name.path),
            reason: error.to_string(),
        })
    }

    /// Sends the request, answering challenges. Refusals and server faults come back as errors, every other
    /// status as a response.
    pub(super) async fn send(&self, call: &Call<'_>) -> Result<Response, RegistryError> {
        let Call { name, access, action, .. } = *call;
        // Uploads may be sent elsewhere; credentials are only for the registry itself.
        let own_host = authority_of(&call.url) == name.authority;
        let mut header = if own_host { self.authorizer.known(name, access).await } else { None };
        let mut challenged = false;
        loop {
            let mut request = self
                .transport
                .client(&authority_of(&call.url))
                .request(call.method.clone(), call.url.clone());
            for (key, value) in &call.headers {
                request = request.header(key, value);
            }
            if let Some(value) = &header {
                request = request.header(AUTHORIZATION, value);
            }
            let mut response = self.transmit(call, request).await?;
            // Once: the second answer is to what the first 401 led to.
            if response.status().as_u16() == 401 && !challenged && own_host {
                challenged = true;
                let new = self
                    .authorizer
                    .answer(&self.transport, name, access, action, &response, header.as_ref())
                    .await?;
                if new.is_some() {
                    header = new;
                    continue;
                }
            }
            let (host, action) = (name.host.clone(), action.to_owned());
            return match response.status().as_u16() {
                status @ (401 | 403) => {
                    let words = excerpt(&body_start(&mut response, MAX_ERROR_BODY).await.unwrap_or_default());
                    let reason = match (status, words.is_empty()) {
                        (401, _) => self.authorizer.explain(name, header.as_ref()),
                        (_, true) => "403 without a reason".to_owned(),
                        (_, false) => words,
                    };
                    Err(RegistryError::Denied { host, action, reason })
                }
                status @ (429 | 500..=599) => Err(RegistryError::Server { host, status, action }),
                _ => Ok(response),
            };
        }
    }

    async fn transmit(&self, call: &Call<'_>, request: RequestBuilder) -> Result<Response, RegistryError> {
        let Call { name, action, .. } = *call;
        match &call.payload {
            Payload::None => self.transport.execute(request, &name.host, action).await,
            Payload::Bytes(bytes) => {
                self.transport.execute(request.body(bytes.clone()), &name.host, action).await
            }
            Payload::File { path, size } => {
                let file = tokio::fs::File::open(path)
                    .await
                    .map_err(RegistryError::io(format!("open {}", path.display())))?;
                let stream = ReaderStream::with_capacity(file, CHUNK);
                self.transmit_stream(call, request, stream, *size).await
            }
            Payload::Source(source) => {
                let size = source.size();
                self.transmit_stream(call, request, read_source(Arc::clone(source)), size).await
            }
        }
    }

    async fn transmit_stream(
        &self,
        call: &Call<'_>,
        request: RequestBuilder,
        stream: impl Stream<Item = io::Result<Bytes>> + Send + 'static,
        size: u64,
    ) -> Result<Response, RegistryError> {
        let moved = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&moved);
        let stream = stream.inspect(move |chunk| {
            let bytes = chunk.as_ref().map_or(0, Bytes::len);
            counter.fetch_add(bytes as u64, Ordering::Relaxed);
        });
        let request = request.header(CONTENT_LENGTH, size).body(Body::wrap_stream(stream));
        self.transport.execute_moving(request, &moved, &call.name.host, call.action).await
    }

    /// The error for a status that is none of the expected ones.
    pub(super) async fn unexpected(&self, call: &Call<'_>, mut response: Response) -> RegistryError {
        let status = response.status().as_u16();
        let words = excerpt(&body_start(&mut response, MAX_ERROR_BODY).await.unwrap_or_default());
        let reason = if words.is_empty() { status.to_string() } else { format!("{status}, {words}") };
        RegistryError::Protocol { host: call.name.host.clone(), action: call.action.to_owned(), reason }
    }

    /// The next part of a body.
    pub(super) async fn chunk(
        &self,
        call: &Call<'_>,
        response: &mut Response,
    ) -> Result<Option<Bytes>, RegistryError> {
        next_chunk(response, &call.name.host, call.action).await
    }

    /// A whole body, if it is no longer than `limit`.
    pub(super) async fn body(
        &self,
        call: &Call<'_>,
        response: &mut Response,
        limit: usize,
    ) -> Result<Vec<u8>, RegistryError> {
        let mut body = Vec::new();
        while let Some(chunk) = self.chunk(call, response).await? {
            if body.len() + chunk.len() > limit {
                return Err(RegistryError::Protocol {
                    host: call.name.host.clone(),
                    action: call.action.to_owned(),
                    reason: format!("more than {limit} bytes"),
                });
            }
            body.extend_from_slice(&chunk);
        }
        Ok(body)
    }
}

/// The next part of an answer's body.
pub(super) async fn next_chunk(
    response: &mut Response,
    host: &str,
    action: &str,
) -> Result<Option<Bytes>, RegistryError> {
    match tokio::time::timeout(IDLE_TIMEOUT, response.chunk()).await {
        Ok(chunk) => chunk.map_err(|error| broken(host, action, error)),
        Err(_) => Err(silent(host, action)),
    }
}

/// The first bytes of a body; for errors, whose own errors do not matter.
pub(super) async fn body_start(response: &mut Response, limit: usize) -> Option<Vec<u8>> {
    let mut body = Vec::new();
    while body.len() < limit {
        match tokio::time::timeout(IDLE_TIMEOUT, response.chunk()).await.ok()?.ok()? {
            Some(chunk) => body.extend_from_slice(&chunk),
            None => break,
        }
    }
    body.truncate(limit);
    Some(body)
}
