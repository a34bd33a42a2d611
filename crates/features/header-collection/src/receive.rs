//! Receives the header sets that nodes send.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    extract::State,
    http::{HeaderMap, StatusCode, header::AUTHORIZATION},
    response::{IntoResponse, Response},
    routing::post,
};
use farrier_core::kernel::KernelLabel;
use farrier_inputs::{FetchError, Fetcher, HeaderImport, ImportSource, ImportedHeaders};
use fs_err::tokio::File;
use futures::StreamExt as _;
use oci::error_chain;
use sha2::{Digest as _, Sha256};
use tokio::{io::AsyncWriteExt as _, sync::Semaphore, time::timeout};

use super::{Key, MAX_SIZE, Receipt, UPLOAD_PATH, UploadHeaders, text};

/// Maximum time between two chunks of an upload.
const CHUNK_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum duration of an upload.
const UPLOAD_TIMEOUT: Duration = Duration::from_mins(10);

/// Receives header sets, one at a time.
pub struct Receiver {
    fetcher: Fetcher,
    /// Directory with one key file per kernel, named after the kernel label.
    keys: PathBuf,
    uploads: Semaphore,
}

/// HTTP status and reason of a rejected upload. The sender logs the reason.
struct Rejection(StatusCode, String);

impl Receiver {
    /// Creates a receiver that stores header sets in the fetcher's store.
    pub fn new(fetcher: Fetcher, keys: PathBuf) -> Self {
        Self { fetcher, keys, uploads: Semaphore::new(1) }
    }

    /// Returns the router with the upload endpoint.
    pub fn router(self) -> Router {
        Router::new().route(UPLOAD_PATH, post(receive)).with_state(Arc::new(self))
    }

    /// Verifies the MAC with the kernel's key. The response does not reveal whether farrier has a key for the kernel.
    fn check(&self, headers: &HeaderMap) -> Result<UploadHeaders, Rejection> {
        let upload = UploadHeaders::of_headers(headers).ok_or_else(|| {
            Rejection(StatusCode::BAD_REQUEST, "the request is not a header set from a node".to_owned())
        })?;
        let label = KernelLabel::of(&upload.release);
        let key = label.as_ref().and_then(|label| match Key::read(&self.keys.join(label.as_str())) {
            Ok(key) => Some(key),
            Err(error) => {
                tracing::warn!(kernel = %label, %error, "rejected headers from a node: no key for its kernel");
                None
            }
        });
        let authorization = text(headers, &AUTHORIZATION).unwrap_or_default();
        if !key.is_some_and(|key| key.verifies(&upload, authorization)) {
            let why = format!("the key is not valid for headers of {}", upload.release);
            return Err(Rejection(StatusCode::FORBIDDEN, why));
        }
        if upload.size > MAX_SIZE {
            let why = format!("the header set has {} bytes; the limit is {MAX_SIZE} bytes", upload.size);
            return Err(Rejection(StatusCode::PAYLOAD_TOO_LARGE, why));
        }
        Ok(upload)
    }

    async fn store_upload(&self, upload: UploadHeaders, body: Body) -> Result<Receipt, Rejection> {
        let _permit = self.uploads.try_acquire().map_err(|_| {
            Rejection(StatusCode::SERVICE_UNAVAILABLE, "another header set is being processed".to_owned())
        })?;
        // Keep the upload in a temporary directory until it has been checked.
        let quarantine = self.fetcher.scratch().map_err(|error| failed(&error))?;
        let file = quarantine.path().join("collected-from-a-node");
        let written = timeout(UPLOAD_TIMEOUT, write(&upload, body, &file)).await;
        written.unwrap_or_else(|_| Err(retryable("the upload timed out")))?;
        let UploadHeaders { release, arch, .. } = upload;
        let (kernel, sources) = (release.to_string(), vec![ImportSource::Path(file)]);
        // Never replace an existing header set, because images may have been built with it.
        let import = HeaderImport { sources, release, arch, replace: false };
        let imported = self.fetcher.headers().import(import).await.map_err(|error| failed(&error))?;
        let ImportedHeaders { outcome, content, stored, .. } = imported;
        let reference = stored.map(|stored| format!("{}@{}", stored.repository, stored.digest));
        tracing::info!(kernel, ?outcome, %content, reference, "stored headers from a node");
        Ok(Receipt { outcome, content: content.to_string(), reference })
    }
}

async fn receive(State(receiver): State<Arc<Receiver>>, headers: HeaderMap, body: Body) -> Response {
    let stored = match receiver.check(&headers) {
        Ok(upload) => receiver.store_upload(upload, body).await,
        Err(rejection) => Err(rejection),
    };
    match stored {
        // Serialization cannot fail, because the response contains only strings.
        Ok(response) => serde_json::to_string(&response).unwrap_or_default().into_response(),
        Err(Rejection(status, why)) => {
            tracing::warn!(%status, why, "rejected headers from a node");
            (status, why).into_response()
        }
    }
}

/// Writes the body to a file, and checks that size and digest match the announced ones.
async fn write(upload: &UploadHeaders, body: Body, path: &Path) -> Result<(), Rejection> {
    let mut file = File::create_new(path).await.map_err(|error| failed(&error.into()))?;
    let (mut stream, mut hasher, mut received) = (body.into_data_stream(), Sha256::new(), 0_u64);
    while let Some(chunk) =
        timeout(CHUNK_TIMEOUT, stream.next()).await.map_err(|_| retryable("the upload stalled"))?
    {
        let chunk = chunk.map_err(|_| retryable("the connection broke"))?;
        received += chunk.len() as u64;
        if received > upload.size {
            return Err(retryable("the upload is larger than announced"));
        }
        hasher.update(&chunk);
        file.write_all(&chunk).await.map_err(|error| failed(&error.into()))?;
    }
    file.flush().await.map_err(|error| failed(&error.into()))?;
    if received == upload.size && hex::encode(hasher.finalize()) == upload.digest.hex() {
        return Ok(());
    }
    Err(retryable("the upload does not match the announced size and digest"))
}

/// Returns a rejection that makes the node send the header set again.
fn retryable(why: &str) -> Rejection {
    Rejection(StatusCode::SERVICE_UNAVAILABLE, why.to_owned())
}

fn failed(error: &FetchError) -> Rejection {
    let is_transient = error.is_transient();
    let status =
        if is_transient { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::UNPROCESSABLE_ENTITY };
    let hint = error.hint().map(|hint| format!("\n{hint}")).unwrap_or_default();
    Rejection(status, format!("{}{hint}", error_chain(error)))
}
