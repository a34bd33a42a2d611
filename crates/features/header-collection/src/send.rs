//! Sends a header set from a node to farrier.

use std::{io, time::Duration};

use farrier_inputs::PackedHeaders;
use farrier_net::{AccessPurpose, Net, NetError};
use farrier_store::registry::retry_delay;
use fs_err::tokio::File;
use http::{HeaderValue, StatusCode, header};
use reqwest::{Body, Method};
use tokio_util::io::ReaderStream;
use url::Url;

use super::{ARCH, DIGEST, KERNEL, Key, Receipt, UPLOAD_PATH, UploadHeaders};

/// Maximum number of characters kept from an error response.
const MAX_REASON_CHARS: usize = 2000;
/// Timeout of a request. farrier checks the header set before it responds.
const REQUEST_TIMEOUT: Duration = Duration::from_mins(15);

/// Reason why a header set was not sent.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// The packed header set cannot be read.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// farrier cannot be reached.
    #[error("cannot send headers to {0}")]
    Net(Url, #[source] NetError),
    /// farrier's response is unusable: farrier's address, and the reason.
    #[error("cannot send headers to {0}: {1}")]
    UnusableResponse(Url, String),
    /// farrier rejected the header set: the HTTP status, and farrier's reason.
    #[error("farrier rejected the headers ({0}): {1}")]
    Refused(u16, String),
}

impl SendError {
    /// Whether a retry may succeed.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Net(_, source) => source.is_transient(),
            Self::UnusableResponse(..) => true,
            Self::Refused(status, _) => matches!(status, 408 | 429 | 500..),
            Self::Io(_) => false,
        }
    }
}

/// Sends a header set. Retries transient failures, for example while farrier starts or processes another header set.
///
/// # Errors
/// Fails if farrier cannot be reached or rejects the header set.
pub async fn send(net: &Net, farrier: &Url, key: &Key, packed: &PackedHeaders) -> Result<Receipt, SendError> {
    let mut address = farrier.clone();
    address.set_path(UPLOAD_PATH);
    let mut attempt = 0;
    loop {
        let error = match send_once(net, &address, key, packed).await {
            Err(error) if error.is_transient() => error,
            outcome => return outcome,
        };
        let Some(delay) = retry_delay(attempt) else { return Err(error) };
        tracing::warn!(to = %address, %error, "retrying to send headers");
        attempt += 1;
        tokio::time::sleep(delay).await;
    }
}

async fn send_once(
    net: &Net,
    address: &Url,
    key: &Key,
    packed: &PackedHeaders,
) -> Result<Receipt, SendError> {
    let upload = UploadHeaders::of_packed(packed);
    let unusable_response = |why: String| SendError::UnusableResponse(address.clone(), why);
    let mut request = Net::request(Method::POST, address.clone());
    for (name, value) in [
        (KERNEL, upload.release.to_string()),
        (ARCH, upload.arch.to_string()),
        (DIGEST, upload.digest.to_string()),
        (header::CONTENT_LENGTH, upload.size.to_string()),
        (header::AUTHORIZATION, key.sign(&upload)),
    ] {
        let value = HeaderValue::try_from(value).map_err(|error| unusable_response(error.to_string()))?;
        request.headers_mut().insert(name, value);
    }
    *request.timeout_mut() = Some(REQUEST_TIMEOUT);
    let file = File::open(&packed.file()).await?;
    *request.body_mut() = Some(Body::wrap_stream(ReaderStream::new(file.into_parts().0)));
    let response = net.execute(request, &AccessPurpose::of("send headers")).await;
    let response = response.map_err(|source| SendError::Net(address.clone(), source))?;
    let status = response.status();
    let body = response.bytes().await.map_err(|error| unusable_response(error.without_url().to_string()))?;
    if status == StatusCode::OK {
        return serde_json::from_slice(&body).map_err(|error| unusable_response(error.to_string()));
    }
    let why = String::from_utf8_lossy(&body).chars().take(MAX_REASON_CHARS).collect();
    Err(SendError::Refused(status.as_u16(), why))
}
