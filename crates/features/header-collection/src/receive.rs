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

use super::{Answer, Key, MOST, PATH, Parcel, text};

/// Maximum time without data from a node.
const SILENCE: Duration = Duration::from_secs(30);
/// Maximum time for a whole upload.
const DEADLINE: Duration = Duration::from_mins(10);

/// Receives header sets, one at a time.
pub struct Receiver {
    fetcher: Fetcher,
    /// Directory with one key file per kernel, named after the kernel label.
    keys: PathBuf,
    free: Semaphore,
}

/// HTTP status and reason of a refused upload; the reason goes to the node's log.
struct Refusal(StatusCode, String);

impl Receiver {
    /// Creates a receiver that stores header sets in the fetcher's store.
    pub fn new(fetcher: Fetcher, keys: PathBuf) -> Self {
        Self { fetcher, keys, free: Semaphore::new(1) }
    }

    /// Returns the router with the upload endpoint.
    pub fn router(self) -> Router {
        Router::new().route(PATH, post(receive)).with_state(Arc::new(self))
    }

    /// Verifies the MAC with the kernel's key. The answer is the same for an unknown kernel and a wrong key.
    fn check(&self, headers: &HeaderMap) -> Result<Parcel, Refusal> {
        let parcel = Parcel::of_headers(headers).ok_or_else(|| {
            Refusal(StatusCode::BAD_REQUEST, "the request is not a header set from a node".to_owned())
        })?;
        let label = KernelLabel::of(&parcel.release);
        let key = label.as_ref().and_then(|label| match Key::read(&self.keys.join(label.as_str())) {
            Ok(key) => Some(key),
            Err(error) => {
                tracing::warn!(kernel = %label, %error, "rejected headers from a node: no key for its kernel");
                None
            }
        });
        let said = text(headers, &AUTHORIZATION).unwrap_or_default();
        if !key.is_some_and(|key| key.has_signed(&parcel, said)) {
            let release = &parcel.release;
            return Err(Refusal(
                StatusCode::FORBIDDEN,
                format!("the key is not valid for headers of {release}"),
            ));
        }
        if parcel.size > MOST {
            let (size, why) = (parcel.size, "and the limit for a header set is");
            return Err(Refusal(
                StatusCode::PAYLOAD_TOO_LARGE,
                format!("it has {size} bytes, {why} {MOST} bytes"),
            ));
        }
        Ok(parcel)
    }

    async fn take(&self, parcel: Parcel, body: Body) -> Result<Answer, Refusal> {
        let _turn = self.free.try_acquire().map_err(|_| {
            Refusal(StatusCode::SERVICE_UNAVAILABLE, "another header set is being processed".to_owned())
        })?;
        // Nothing outside this directory sees the upload before it has been checked.
        let quarantine = self.fetcher.scratch().map_err(|error| failed(&error))?;
        let file = quarantine.path().join("collected-from-a-node");
        let written = timeout(DEADLINE, write(&parcel, body, &file)).await;
        written.unwrap_or_else(|_| Err(cut("the upload timed out")))?;
        let Parcel { release, arch, .. } = parcel;
        let (kernel, sources) = (release.to_string(), vec![ImportSource::Path(file)]);
        // Never replace an existing header set: images may have been built with it.
        let import = HeaderImport { sources, release, arch, replace: false };
        let imported = self.fetcher.headers().import(import).await.map_err(|error| failed(&error))?;
        let ImportedHeaders { outcome, content, stored, .. } = imported;
        let reference = stored.map(|stored| format!("{}@{}", stored.repository, stored.digest));
        tracing::info!(kernel, ?outcome, %content, reference, "stored headers from a node");
        Ok(Answer { outcome, content: content.to_string(), reference })
    }
}

async fn receive(State(receiver): State<Arc<Receiver>>, headers: HeaderMap, body: Body) -> Response {
    let taken = match receiver.check(&headers) {
        Ok(parcel) => receiver.take(parcel, body).await,
        Err(refusal) => Err(refusal),
    };
    match taken {
        // Serialization cannot fail: the answer contains only strings.
        Ok(answer) => serde_json::to_string(&answer).unwrap_or_default().into_response(),
        Err(Refusal(status, why)) => {
            tracing::warn!(%status, why, "rejected headers from a node");
            (status, why).into_response()
        }
    }
}

/// Writes the body to a file; size and digest must match the announced ones.
async fn write(parcel: &Parcel, body: Body, path: &Path) -> Result<(), Refusal> {
    let mut file = File::create_new(path).await.map_err(|error| failed(&error.into()))?;
    let (mut stream, mut hasher, mut got) = (body.into_data_stream(), Sha256::new(), 0_u64);
    while let Some(chunk) = timeout(SILENCE, stream.next()).await.map_err(|_| cut("the upload stalled"))? {
        let chunk = chunk.map_err(|_| cut("the connection broke"))?;
        got += chunk.len() as u64;
        if got > parcel.size {
            return Err(cut("the upload is larger than announced"));
        }
        hasher.update(&chunk);
        file.write_all(&chunk).await.map_err(|error| failed(&error.into()))?;
    }
    file.flush().await.map_err(|error| failed(&error.into()))?;
    let whole = got == parcel.size && hex::encode(hasher.finalize()) == parcel.digest.hex();
    if whole { Ok(()) } else { Err(cut("the upload does not match the announced size and digest")) }
}

/// Builds a refusal that makes the node send everything again.
fn cut(why: &str) -> Refusal {
    Refusal(StatusCode::SERVICE_UNAVAILABLE, why.to_owned())
}

fn failed(error: &FetchError) -> Refusal {
    let passes = error.is_transient();
    let status = if passes { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::UNPROCESSABLE_ENTITY };
    let hint = error.hint().map(|hint| format!("\n{hint}")).unwrap_or_default();
    Refusal(status, format!("{}{hint}", error_chain(error)))
}
