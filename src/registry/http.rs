//! Adapter: HTTP to registries: schemes, timeouts, and which answers are errors.
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
    Body, Method, Request, Response,
    header::{ACCEPT, AUTHORIZATION, CONTENT_LENGTH, HeaderName, HeaderValue},
};
use tokio::io::{AsyncReadExt as _, AsyncSeekExt as _};
use tokio_util::io::ReaderStream;
use url::Url;

use super::{
    RegistryError, RegistryOptions,
    auth::{Access, Authorizer, authority_of},
    error::excerpt,
    name::RemoteName,
    stream::{BlobSource, read_source},
};
use crate::{
    net::{Asker, Fault, Net, fault, hung_up},
    site::HostPort,
};

/// Longest silence in either direction.
const IDLE_TIMEOUT: Duration = Duration::from_mins(1);
/// Read of an error's body.
const MAX_ERROR_BODY: usize = 8 << 10;
/// Read from a file at once.
const CHUNK: usize = 256 << 10;

/// Schemes and timeouts; knows nothing of authorization.
pub(super) struct Transport {
    net: Net,
    /// The scheme of each host that may be plain.
    schemes: Mutex<HashMap<String, &'static str>>,
}

impl Transport {
    /// May this host be talked to without TLS?
    pub(super) fn allows_plain(&self, url: &Url) -> bool {
        HostPort::of_url(url).is_some_and(|host| self.net.allows_plain(&host))
    }

    /// https, unless the host may be plain and does not speak TLS.
    async fn scheme(&self, name: &RemoteName, action: &str) -> Result<&'static str, RegistryError> {
        let authority = name.authority.as_str();
        let may_be_plain = authority
            .parse::<HostPort>()
            .is_ok_and(|host| self.net.allows_plain(&host) && !self.net.wants_tls(&host));
        if !may_be_plain {
            return Ok("https");
        }
        let known = |schemes: &Mutex<HashMap<_, _>>| {
            schemes.lock().unwrap_or_else(PoisonError::into_inner).get(authority).copied()
        };
        if let Some(scheme) = known(&self.schemes) {
            return Ok(scheme);
        }
        let probe = Net::request(Method::HEAD, address(name, &format!("https://{authority}/v2/"))?);
        let scheme = match self.execute(probe, &Asker::of(action), &name.host).await {
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

    /// Sends a request whose body, if any, is in memory. `host` is the registry's.
    pub(super) async fn execute(
        &self,
        request: Request,
        asker: &Asker<'_>,
        host: &str,
    ) -> Result<Response, RegistryError> {
        match tokio::time::timeout(IDLE_TIMEOUT, self.net.execute(request, asker)).await {
            Ok(answer) => answer.map_err(|error| RegistryError::of_net(host, asker.what, error)),
            Err(_) => Err(silent(host, asker.what)),
        }
    }

    /// Sends a request that streams a file; as long as it takes, if only something moves.
    async fn execute_moving(
        &self,
        request: Request,
        moved: &AtomicU64,
        asker: &Asker<'_>,
        host: &str,
    ) -> Result<Response, RegistryError> {
        let mut sending = std::pin::pin!(self.net.execute(request, asker));
        let mut before = moved.load(Ordering::Relaxed);
        loop {
            if let Ok(answer) = tokio::time::timeout(IDLE_TIMEOUT, &mut sending).await {
                return answer.map_err(|error| RegistryError::of_net(host, asker.what, error));
            }
            let now = moved.load(Ordering::Relaxed);
            if now == before {
                return Err(silent(host, asker.what));
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
        Fault::Connection => hung_up(error),
        Fault::Certificate | Fault::CertificateTime | Fault::CertificateName | Fault::ClientCertificate => {
            false
        }
    }
}

fn broken(host: &str, action: &str, error: reqwest::Error) -> RegistryError {
    let (host, action) = (host.to_owned(), action.to_owned());
    // The address may hold a signature that grants access.
    RegistryError::Unreachable { host, action, source: Box::new(error.without_url()) }
}

fn address(name: &RemoteName, text: &str) -> Result<Url, RegistryError> {
    Url::parse(text).map_err(|error| RegistryError::Options {
        what: format!("repository {}/{}", name.host, name.path),
        reason: error.to_string(),
    })
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
    /// The bytes of a file from one offset to another.
    File {
        path: &'a Path,
        from: u64,
        to: u64,
    },
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

impl<'a> Call<'a> {
    /// Asks for something.
    pub(super) fn get(name: &'a RemoteName, action: &'a str, url: Url) -> Self {
        Self {
            name,
            access: Access::Pull,
            action,
            method: Method::GET,
            url,
            headers: Vec::new(),
            payload: Payload::None,
        }
    }

    /// The same, for these media types only.
    pub(super) fn accepting(mut self, media_types: &str) -> Self {
        self.headers.push((ACCEPT, media_types.to_owned()));
        self
    }
}

/// Requests with authorization.
pub(super) struct Http {
    transport: Transport,
    authorizer: Authorizer,
}

impl Http {
    pub(super) fn new(options: &RegistryOptions) -> Self {
        let RegistryOptions { credentials, net } = options;
        let transport = Transport { net: net.clone(), schemes: Mutex::default() };
        Self { transport, authorizer: Authorizer::new(credentials.clone()) }
    }

    /// `<scheme>://<host>/v2/<repository>/<rest>`.
    pub(super) async fn url(
        &self,
        name: &RemoteName,
        rest: &str,
        action: &str,
    ) -> Result<Url, RegistryError> {
        let scheme = self.transport.scheme(name, action).await?;
        address(name, &format!("{scheme}://{}/v2/{}/{rest}", name.authority, name.path))
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
            let mut request = Net::request(call.method.clone(), call.url.clone());
            for (key, value) in &call.headers {
                let value = HeaderValue::from_str(value).map_err(|error| RegistryError::Options {
                    what: format!("header {key} to {action}"),
                    reason: error.to_string(),
                })?;
                request.headers_mut().append(key, value);
            }
            if let Some(value) = &header {
                request.headers_mut().insert(AUTHORIZATION, value.clone());
            }
            let sent_by = (!own_host).then_some(name.host.as_str());
            let mut response = self.transmit(call, request, &Asker { what: action, sent_by }).await?;
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

    async fn transmit(
        &self,
        call: &Call<'_>,
        mut request: Request,
        asker: &Asker<'_>,
    ) -> Result<Response, RegistryError> {
        let host = &call.name.host;
        match &call.payload {
            Payload::None => self.transport.execute(request, asker, host).await,
            Payload::Bytes(bytes) => {
                *request.body_mut() = Some(bytes.clone().into());
                self.transport.execute(request, asker, host).await
            }
            Payload::File { path, from, to } => {
                let reading = || RegistryError::io(format!("read {}", path.display()));
                let mut file = tokio::fs::File::open(path).await.map_err(reading())?;
                file.seek(io::SeekFrom::Start(*from)).await.map_err(reading())?;
                let length = to.saturating_sub(*from);
                let stream = ReaderStream::with_capacity(file.take(length), CHUNK);
                self.transmit_stream(call, request, asker, stream, length).await
            }
            Payload::Source(source) => {
                let size = source.size();
                self.transmit_stream(call, request, asker, read_source(Arc::clone(source)), size).await
            }
        }
    }

    async fn transmit_stream(
        &self,
        call: &Call<'_>,
        mut request: Request,
        asker: &Asker<'_>,
        stream: impl Stream<Item = io::Result<Bytes>> + Send + 'static,
        size: u64,
    ) -> Result<Response, RegistryError> {
        let moved = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&moved);
        let stream = stream.inspect(move |chunk| {
            let bytes = chunk.as_ref().map_or(0, Bytes::len);
            counter.fetch_add(bytes as u64, Ordering::Relaxed);
        });
        request.headers_mut().insert(CONTENT_LENGTH, HeaderValue::from(size));
        *request.body_mut() = Some(Body::wrap_stream(stream));
        self.transport.execute_moving(request, &moved, asker, &call.name.host).await
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
