//! Uploads a blob, at first in one request.
//!
//! If the connection breaks, farrier requests the progress of the upload session, and sends the rest. If the registry has lost the
//! session, farrier opens a new one and sends the blob in chunks, so that the next interruption costs one chunk
//! (distribution-spec 1.1, "Pushing a blob in chunks").
//!
//! docker-registry 2.8 signs the number of acknowledged bytes into the session's address. It rejects the session after a partial
//! request (`upload resumed at wrong offset` in its log), so an upload to it resumes only if each request arrived completely or not
//! at all. This is the case behind a proxy that buffers requests.

use std::path::Path;

use fs_err::tokio as fs;
use reqwest::{
    Method, Response,
    header::{CONTENT_RANGE, CONTENT_TYPE, HeaderName, LOCATION, RANGE},
};
use url::Url;

use super::{
    auth::Scope,
    error::{RegistryError, Result},
    http::{Call, Http, Payload, header, unexpected},
    registry::{BlobContent, Upload},
    remote::RemoteRegistry,
    retry::delay_after,
    transport::RemoteName,
};
use crate::{Digest, Repository, error_chain};

/// Minimum size of a blob whose upload is resumed. A smaller blob is sent again, because requesting the progress costs as much.
const MIN_RESUMED: u64 = 4 << 20;
/// Progress in bytes after which attempts are counted anew. A large blob can be uploaded even if the connection breaks every
/// 20 MB, but not if the connection always breaks at once.
const PROGRESS_RESET: u64 = 1 << 20;
/// Maximum number of progress requests in one attempt. At the first request, the registry may still be writing received bytes.
const PROGRESS_REQUESTS: usize = 2;
/// Chunk size after a connection broke.
const CHUNK: u64 = 16 << 20;
/// Minimum chunk size of the registry, except for the last chunk (distribution-spec 1.1).
const MIN_CHUNK_HEADER: HeaderName = HeaderName::from_static("oci-chunk-min-length");

impl RemoteRegistry {
    /// Checks whether the blob exists, opens a session, and sends the whole blob. Resumes an interrupted upload of a file.
    pub(super) async fn upload(
        &self,
        repository: &Repository,
        digest: &Digest,
        content: BlobContent<'_>,
    ) -> Result<Upload> {
        let name = &RemoteName::of(repository);
        let size = match content {
            BlobContent::File(file) => fs::metadata(file).await?.len(),
            BlobContent::Source(source) => source.size(),
            BlobContent::Bytes(bytes) => bytes.len() as u64,
        };
        // Use the push token from the start, so that only one token is needed.
        if self.blob_exists(name, digest, Scope::Push).await? {
            return Ok(Upload::Present);
        }
        let action = &format!("push blob {digest} to {}", name.path);
        let session = Session { http: &self.http, name, action, digest };
        match content {
            BlobContent::File(file) => self.send_file(&session, file, size).await?,
            BlobContent::Source(source) => session.send(Payload::Source(source)).await?,
            BlobContent::Bytes(bytes) => session.send(Payload::Bytes(bytes)).await?,
        }
        Ok(Upload::Sent(size))
    }

    async fn send_file(&self, session: &Session<'_>, file: &Path, size: u64) -> Result<()> {
        let mut state =
            FileUpload { file, size, url: None, received: 0, chunk_size: CHUNK, in_chunks: false };
        let (mut attempt, mut last_reset) = (0, 0);
        loop {
            let error = match self.try_upload(session, &mut state).await {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            if state.received >= last_reset + PROGRESS_RESET {
                (attempt, last_reset) = (0, state.received);
            }
            let delay = delay_after(&error, attempt).filter(|_| size >= MIN_RESUMED);
            let Some(delay) = delay else { return Err(error) };
            attempt += 1;
            tracing::warn!(action = session.action, attempt, ?delay, error = %error_chain(&error), "upload interrupted, resuming");
            tokio::time::sleep(delay).await;
        }
    }

    /// Makes one attempt: resumes the previous session, or opens a new one.
    async fn try_upload(&self, session: &Session<'_>, state: &mut FileUpload<'_>) -> Result<()> {
        if state.url.is_some() {
            // The upload may be complete, if only the response was lost.
            if self.blob_exists(session.name, session.digest, Scope::Push).await? {
                return Ok(());
            }
            state.in_chunks = true;
            if session.resume(state).await? {
                return Ok(());
            }
            tracing::debug!(action = session.action, "cannot resume the upload, restarting");
        }
        if state.in_chunks {
            session.reopen(state).await?;
            if session.put_chunks(state).await? {
                return Ok(());
            }
            tracing::debug!(action = session.action, "the registry does not accept chunks");
            state.in_chunks = false;
        }
        let url = session.reopen(state).await?;
        session.put(url, Payload::File { path: state.file, from: 0, to: state.size }).await
    }
}

/// Upload progress of a file.
struct FileUpload<'a> {
    file: &'a Path,
    size: u64,
    /// Address of the session; `None` before the upload starts.
    url: Option<Url>,
    /// Bytes that the registry acknowledged.
    received: u64,
    /// Chunk size.
    chunk_size: u64,
    /// Whether to send chunks, because the upload was interrupted.
    in_chunks: bool,
}

/// Upload session of one blob.
struct Session<'a> {
    http: &'a Http,
    name: &'a RemoteName,
    /// Description for messages.
    action: &'a str,
    digest: &'a Digest,
}

impl Session<'_> {
    fn call(&self, method: Method, url: Url) -> Call<'_> {
        Call::new(method, self.name, Scope::Push, self.action, url)
    }

    /// Opens a session and sends the whole content.
    async fn send(&self, payload: Payload<'_>) -> Result<()> {
        let (url, _) = self.open().await?;
        self.put(url, payload).await
    }

    /// Opens a session. Returns its address and the registry's minimum chunk size.
    async fn open(&self) -> Result<(Url, u64)> {
        let call =
            self.http.call(Method::POST, self.name, Scope::Push, "blobs/uploads/", self.action).await?;
        let response = post_upload(self.http, &call).await?;
        let min_chunk = header(response.headers(), &MIN_CHUNK_HEADER).and_then(|text| text.parse().ok());
        Ok((upload_location(&call, &response)?, min_chunk.unwrap_or_default()))
    }

    /// Discards the previous session and opens a new one.
    async fn reopen(&self, state: &mut FileUpload<'_>) -> Result<Url> {
        (state.url, state.received) = (None, 0);
        let (url, min_chunk) = self.open().await?;
        state.chunk_size = CHUNK.max(min_chunk);
        Ok(state.url.insert(url).clone())
    }

    /// Completes the upload with this content, in a single request.
    async fn put(&self, mut url: Url, payload: Payload<'_>) -> Result<()> {
        url.query_pairs_mut().append_pair("digest", self.digest.as_str());
        let call = self.call(Method::PUT, url).with(CONTENT_TYPE, OCTETS).sending(payload);
        self.http.expect(&call, &[201, 204]).await.map(drop)
    }

    /// Requests the registry's progress and sends the rest. Returns `false` if the registry has lost the session or does not support
    /// resuming.
    async fn resume(&self, state: &mut FileUpload<'_>) -> Result<bool> {
        for _ in 0..PROGRESS_REQUESTS {
            let Some(url) = state.url.clone() else { return Ok(false) };
            let Some((url, received)) = self.progress(url).await? else { return Ok(false) };
            // Without progress, or with an invalid count, resuming has no advantage over a new session.
            if !(1..=state.size).contains(&received) {
                return Ok(false);
            }
            (state.url, state.received) = (Some(url), received);
            tracing::debug!(action = self.action, received, size = state.size, "resuming the upload");
            if self.put_chunks(state).await? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Sends the missing content in chunks and completes the upload. Returns `false` if the registry does not accept chunks.
    async fn put_chunks(&self, state: &mut FileUpload<'_>) -> Result<bool> {
        let Some(mut url) = state.url.clone() else { return Ok(false) };
        while state.received < state.size {
            let to = state.received.saturating_add(state.chunk_size).min(state.size);
            let chunk = Payload::File { path: state.file, from: state.received, to };
            let range = format!("{}-{}", state.received, to - 1);
            let call = self.call(Method::PATCH, url).with(CONTENT_TYPE, OCTETS).sending(chunk);
            let call = call.with(CONTENT_RANGE, range);
            let response = self.http.send(&call).await?;
            if !matches!(response.status().as_u16(), 200..=204) {
                let error = unexpected(&call, response).await;
                tracing::debug!(error = %error_chain(&error), "chunk rejected");
                return Ok(false);
            }
            url = upload_location(&call, &response)?;
            (state.url, state.received) = (Some(url.clone()), to);
        }
        match self.put(url, Payload::None).await {
            Ok(()) => Ok(true),
            // The registry has assembled the chunks incorrectly.
            Err(error @ RegistryError::Protocol { .. }) => {
                tracing::debug!(error = %error_chain(&error), "chunked upload rejected");
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// Returns the session's address and the number of bytes that the registry has. Returns `None` if the registry does not state
    /// the number.
    async fn progress(&self, url: Url) -> Result<Option<(Url, u64)>> {
        let call = self.call(Method::GET, url);
        let response = self.http.send(&call).await?;
        if !matches!(response.status().as_u16(), 200 | 202 | 204) {
            return Ok(None);
        }
        let received = header(response.headers(), &RANGE).and_then(received_bytes);
        Ok(received
            .map(|bytes| (upload_location(&call, &response).unwrap_or_else(|_| call.url.clone()), bytes)))
    }
}

/// Sends a request that opens an upload session or mounts a blob (201).
pub(super) async fn post_upload(http: &Http, call: &Call<'_>) -> Result<Response> {
    let response = http.expect(call, &[201, 202, 404]).await?;
    if response.status().as_u16() != 404 {
        return Ok(response);
    }
    Err(RegistryError::NoRepository {
        host: call.name.host.clone(),
        repository: call.name.path.clone(),
        action: call.action.to_owned(),
    })
}

/// Returns the address of the upload session, which may be relative and may have a query.
fn upload_location(call: &Call<'_>, response: &Response) -> Result<Url> {
    let text =
        header(response.headers(), &LOCATION).ok_or_else(|| call.protocol("202 without a location"))?;
    let url = response.url().join(text).map_err(|_| call.protocol("its upload location is not a URL"))?;
    match (call.url.scheme(), url.scheme()) {
        (_, "https") | ("http", "http") => Ok(url),
        _ => Err(call.protocol("its upload location does not use https")),
    }
}

const OCTETS: &str = "application/octet-stream";

/// Returns the number of bytes in a `Range` header: `0-1023` and `bytes=0-1023` mean 1024 bytes. Registries use `0-0` both for no
/// bytes and for one byte. Treating it as no bytes is safe.
fn received_bytes(range: &str) -> Option<u64> {
    let range = range.trim().trim_start_matches("bytes=").trim_start_matches("bytes ");
    let (first, last) = range.split_once('-')?;
    let (first, last) = (first.parse::<u64>().ok()?, last.parse::<u64>().ok()?);
    match (first, last) {
        (0, 0) => Some(0),
        (0, last) => last.checked_add(1),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_upload_sessions_are_parsed() {
        for (text, bytes) in [
            ("0-1023", Some(1024)),
            ("bytes=0-9", Some(10)),
            ("0-0", Some(0)),
            ("5-9", None),
            ("", None),
            ("0-", None),
            ("0--1", None),
            ("0-18446744073709551615", None),
            ("0-99999999999999999999", None),
        ] {
            assert_eq!(received_bytes(text), bytes, "{text:?}");
        }
    }
}
