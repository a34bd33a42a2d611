//! Sends requests of the distribution protocol with authorization, and decides which responses are errors.

use std::{
    io,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use bytes::Bytes;
use fs_err::tokio::File;
use futures::{Stream, StreamExt as _};
use reqwest::{
    Body, Method, Request, Response,
    header::{AUTHORIZATION, CONTENT_LENGTH, HeaderMap, HeaderName, HeaderValue, LINK},
};
use tokio::io::{AsyncReadExt as _, AsyncSeekExt as _};
use tokio_util::io::ReaderStream;
use url::Url;

use super::{
    auth::{Authorizer, Purpose, Scope, explain},
    error::{RegistryError, Result, is_transient_status},
    registry::{Access, BlobSource},
    retry_after::{RequestedDelays, retry_after},
    stream::{CHUNK, read_source},
    transport::{RemoteName, Transport, body_start, next_chunk},
};
use crate::MAX_MANIFEST;

/// Maximum number of bytes read from an error response.
const MAX_ERROR_BODY: usize = 8 << 10;
/// Maximum number of pages in one list. More pages mean that the registry's links form a loop.
const MAX_PAGES: usize = 1000;

/// Maximum size of all pages of a list in bytes.
const MAX_LIST_BYTES: usize = 64 << 20;

/// Body of a request.
pub(super) enum Payload<'a> {
    /// No body.
    None,
    /// Bytes in memory.
    Bytes(&'a [u8]),
    /// Bytes of a file between two offsets.
    File { path: &'a Path, from: u64, to: u64 },
    /// Bytes that the source generates during the upload.
    Source(&'a Arc<dyn BlobSource>),
}

impl Payload<'_> {
    /// Size in bytes.
    fn size(&self) -> u64 {
        match self {
            Self::None => 0,
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::File { from, to, .. } => to.saturating_sub(*from),
            Self::Source(source) => source.size(),
        }
    }
}

/// One request of the protocol.
pub(super) struct Call<'a> {
    pub name: &'a RemoteName,
    pub scope: Scope,
    /// Path of another repository that the request reads.
    pub source: Option<&'a str>,
    /// Description, such as `fetch manifest of drivers/x:1`.
    pub action: &'a str,
    pub method: Method,
    pub url: Url,
    pub headers: Vec<(HeaderName, String)>,
    pub payload: Payload<'a>,
}

impl<'a> Call<'a> {
    pub(super) fn new(method: Method, name: &'a RemoteName, scope: Scope, action: &'a str, url: Url) -> Self {
        Self { name, scope, source: None, action, method, url, headers: Vec::new(), payload: Payload::None }
    }

    pub(super) fn with(mut self, header: HeaderName, value: impl Into<String>) -> Self {
        self.headers.push((header, value.into()));
        self
    }

    pub(super) fn sending(self, payload: Payload<'a>) -> Self {
        Self { payload, ..self }
    }

    pub(super) fn protocol(&self, reason: impl Into<String>) -> RegistryError {
        RegistryError::protocol(&self.name.host, self.action, reason)
    }

    /// Returns the error for an unusable body, with the start of the body.
    pub(super) fn unusable(&self, reason: &str, response: &Response, body: &[u8]) -> RegistryError {
        self.protocol(match self.name.quote(response, body) {
            Ok(text) => format!("{reason}: {text}"),
            Err(other) => format!("{reason}, from {other}, to which the registry refers"),
        })
    }
}

/// Outcome of a request that was sent with one scope.
enum Outcome {
    /// Any other response than a refusal.
    Answered(Response),
    /// The registry itself, and no host that it refers to, answered 401 or 403.
    Refused(RegistryError),
}

/// Sends requests with authorization.
pub(super) struct Http {
    pub(super) transport: Transport,
    authorizer: Authorizer,
    delays: RequestedDelays,
}

impl Http {
    pub(super) fn new(access: Arc<dyn Access>) -> Self {
        Self {
            transport: Transport::new(access),
            authorizer: Authorizer::default(),
            delays: RequestedDelays::default(),
        }
    }

    /// Creates a request for `path` (such as `manifests/1.0`) in the repository.
    pub(super) async fn call<'a>(
        &self,
        method: Method,
        name: &'a RemoteName,
        scope: Scope,
        path: &str,
        action: &'a str,
    ) -> Result<Call<'a>> {
        Ok(Call::new(method, name, scope, action, self.transport.url(name, path, action).await?))
    }

    /// Sends the request. Statuses other than the expected ones are errors.
    pub(super) async fn expect(&self, call: &Call<'_>, statuses: &[u16]) -> Result<Response> {
        let response = self.send(call).await?;
        if statuses.contains(&response.status().as_u16()) {
            return Ok(response);
        }
        Err(unexpected(call, response).await)
    }

    /// Sends the request, and once more with a new header if the registry rejects the authorization. Rejections (401, 403),
    /// transient faults ([`is_transient_status`]) are errors. Every other status returns the response.
    ///
    /// Quay and GitLab refuse a token for `pull` where the repository does not exist yet, and answer 404 to a token for
    /// `pull,push` (containers/image issue 1265). A refused read is therefore sent again with the wider scope.
    pub(super) async fn send(&self, call: &Call<'_>) -> Result<Response> {
        let refusal = match self.send_in(call, call.scope).await? {
            Outcome::Answered(response) => return Ok(response),
            Outcome::Refused(error) => error,
        };
        if call.scope == Scope::Pull
            && self.authorizer.uses_tokens(call.name)
            && let Ok(Outcome::Answered(response)) = self.send_in(call, Scope::Push).await
        {
            return Ok(response);
        }
        Err(refusal)
    }

    /// Sends the request with authorization for a scope.
    async fn send_in(&self, call: &Call<'_>, scope: Scope) -> Result<Outcome> {
        let Call { name, source, action, .. } = *call;
        let purpose = Purpose { name, scope, source };
        // An upload may go to another host, but credentials are only for the registry itself.
        let is_registry = name.serves(&call.url);
        if is_registry
            && let Some((status, remaining)) = self.delays.remaining(&name.authority, Instant::now())
        {
            let (host, action) = (name.host.clone(), action.to_owned());
            return Err(RegistryError::Server { host, status, action, after: Some(remaining) });
        }
        let mut header = if is_registry { self.authorizer.cached(purpose).await } else { None };
        let mut retried = false;
        loop {
            let request = request_for(call, header.as_ref())?;
            let redirected_by = (!is_registry).then_some(name.host.as_str());
            let response = self.transmit(call, request, redirected_by).await?;
            // The registry may have redirected the request to another host, which must not trigger authentication.
            let is_from_registry = is_registry && name.serves(response.url());
            if is_from_registry && !retried {
                let renewed = self.renewed_header(call, purpose, &response, header.as_ref()).await?;
                if renewed.is_some() {
                    (header, retried) = (renewed, true);
                    continue;
                }
            }
            return self.check_status(call, response, is_from_registry, header.as_ref()).await;
        }
    }

    /// Returns a better header after a 401 or 403 to a request that carried `used`, if there is one.
    async fn renewed_header(
        &self,
        call: &Call<'_>,
        purpose: Purpose<'_>,
        response: &Response,
        used: Option<&HeaderValue>,
    ) -> Result<Option<HeaderValue>> {
        match (response.status().as_u16(), used) {
            (401, _) => {
                self.authorizer.after_401(&self.transport, purpose, call.action, response, used).await
            }
            (403, Some(used)) => {
                Ok(self.authorizer.after_403(&self.transport, purpose, call.action, used).await)
            }
            _ => Ok(None),
        }
    }

    /// Turns rejections, throttling and server errors into errors, and records a requested delay.
    async fn check_status(
        &self,
        call: &Call<'_>,
        mut response: Response,
        is_from_registry: bool,
        used: Option<&HeaderValue>,
    ) -> Result<Outcome> {
        let name = call.name;
        let (host, action) = (name.host.clone(), call.action.to_owned());
        match response.status().as_u16() {
            status @ (401 | 403) => {
                let body = body_start(&mut response, MAX_ERROR_BODY).await;
                let reason = match (status, name.quote(&response, &body)) {
                    (_, Err(other)) => format!("{status} from {other}, to which the registry refers"),
                    (401, _) => explain(&self.transport, name, used),
                    (_, Ok(text)) if text.is_empty() => "403 without a reason".to_owned(),
                    (_, Ok(text)) => text,
                };
                let refusal = RegistryError::Denied { host, action, reason };
                if is_from_registry { Ok(Outcome::Refused(refusal)) } else { Err(refusal) }
            }
            status if is_transient_status(status) => {
                let after = retry_after(response.headers());
                if let Some(wait) = after.filter(|_| is_from_registry) {
                    self.delays.record(&name.authority, status, wait, Instant::now());
                }
                Err(RegistryError::Server { host, status, action, after })
            }
            _ => Ok(Outcome::Answered(response)),
        }
    }

    async fn transmit(
        &self,
        call: &Call<'_>,
        mut request: Request,
        redirected_by: Option<&str>,
    ) -> Result<Response> {
        let sent_bytes = Arc::new(AtomicU64::new(0));
        match &call.payload {
            Payload::None => {}
            Payload::Bytes(bytes) => *request.body_mut() = Some(bytes.to_vec().into()),
            Payload::File { path, from, to } => {
                let mut file = File::open(path).await?;
                file.seek(io::SeekFrom::Start(*from)).await?;
                let length = to.saturating_sub(*from);
                let stream = ReaderStream::with_capacity(file.take(length), CHUNK);
                set_body(&mut request, stream, length, &sent_bytes);
            }
            Payload::Source(source) => {
                set_body(&mut request, read_source(Arc::clone(source)), source.size(), &sent_bytes);
            }
        }
        self.transport.execute(request, &sent_bytes, call.action, &call.name.host, redirected_by).await
    }

    /// Reads a paginated list, and returns whether the list exists. `absent` has the statuses of a list that does not exist.
    /// `parse_page` parses a page, and returns the reason if it is invalid.
    pub(super) async fn pages(
        &self,
        mut call: Call<'_>,
        absent: &[u16],
        mut parse_page: impl FnMut(&[u8]) -> Result<(), String> + Send,
    ) -> Result<bool> {
        let mut remaining = MAX_LIST_BYTES;
        for number in 0..MAX_PAGES {
            // A list whose next page does not exist is incomplete.
            let absent = if number == 0 { absent } else { &[] };
            let mut response = self.expect(&call, &[&[200], absent].concat()).await?;
            if absent.contains(&response.status().as_u16()) {
                return Ok(false);
            }
            let next = next_page(&response);
            let page = body(&call, &mut response).await?;
            remaining = remaining
                .checked_sub(page.len())
                .ok_or_else(|| call.protocol(format!("a list of more than {} MiB", MAX_LIST_BYTES >> 20)))?;
            parse_page(&page).map_err(|reason| call.unusable(&reason, &response, &page))?;
            let Some(url) = next else { return Ok(true) };
            if url == call.url {
                return Err(call.protocol("a page of the list that is its own next page".to_owned()));
            }
            call.url = url;
        }
        Err(call.protocol(format!("more than {MAX_PAGES} pages")))
    }
}

/// Creates the request of a call without its body.
fn request_for(call: &Call<'_>, authorization: Option<&HeaderValue>) -> Result<Request> {
    let mut request = Request::new(call.method.clone(), call.url.clone());
    for (key, value) in &call.headers {
        let value = HeaderValue::from_str(value).map_err(|error| {
            RegistryError::Options(format!("header {key} to {}", call.action), error.to_string())
        })?;
        request.headers_mut().append(key, value);
    }
    if let Some(value) = authorization {
        request.headers_mut().insert(AUTHORIZATION, value.clone());
    }
    Ok(request)
}

/// Sets a streamed body, and counts the bytes that the connection reads from it.
fn set_body(
    request: &mut Request,
    stream: impl Stream<Item = io::Result<Bytes>> + Send + 'static,
    size: u64,
    sent_bytes: &Arc<AtomicU64>,
) {
    let counter = Arc::clone(sent_bytes);
    let stream = stream.inspect(move |chunk| {
        let bytes = chunk.as_ref().map_or(0, Bytes::len);
        counter.fetch_add(bytes as u64, Ordering::Relaxed);
    });
    request.headers_mut().insert(CONTENT_LENGTH, HeaderValue::from(size));
    *request.body_mut() = Some(Body::wrap_stream(stream));
}

/// Returns the error for a response with an unexpected status.
pub(super) async fn unexpected(call: &Call<'_>, mut response: Response) -> RegistryError {
    let body = body_start(&mut response, MAX_ERROR_BODY).await;
    let status = response.status().as_u16();
    call.protocol(match call.name.quote(&response, &body) {
        _ if status == 413 => format!(
            "413: the registry, or a proxy in front of it, accepts no request of {} bytes (nginx: client_max_body_size)",
            call.payload.size()
        ),
        Ok(text) if text.is_empty() => status.to_string(),
        Ok(text) => format!("{status}, {text}"),
        Err(other) => format!("{status} from {other}, to which the registry refers"),
    })
}

/// Reads a whole body, up to the size limit of manifests and lists.
pub(super) async fn body(call: &Call<'_>, response: &mut Response) -> Result<Vec<u8>> {
    let mut body = Vec::new();
    while let Some(chunk) = next_chunk(response, &call.name.host, call.action).await? {
        if body.len() + chunk.len() > MAX_MANIFEST {
            return Err(call.protocol(format!("more than {MAX_MANIFEST} bytes")));
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

pub(super) fn header<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

/// Returns the address of the next page (RFC 8288), at the host of the response. Of an address at another host, only the path and the
/// query count: a registry behind a proxy may name its inner address.
fn next_page(response: &Response) -> Option<Url> {
    let link = header(response.headers(), &LINK)?;
    let (target, parameters) = link.strip_prefix('<')?.split_once('>')?;
    if !parameters.replace('"', "").split(';').any(|p| p.trim().eq_ignore_ascii_case("rel=next")) {
        return None;
    }
    let target = response.url().join(target).ok()?;
    let mut next = response.url().clone();
    next.set_path(target.path());
    next.set_query(target.query());
    Some(next)
}
