//! Sends a header set from a node to farrier.

use std::{io, time::Duration};

use farrier_inputs::PackedHeaders;
use farrier_net::{Asker, Net, NetError};
use farrier_store::registry::retry_delay;
use fs_err::tokio::File;
use http::{HeaderValue, StatusCode, header};
use reqwest::{Body, Method};
use tokio_util::io::ReaderStream;
use url::Url;

use super::{ARCH, Answer, DIGEST, KERNEL, Key, PATH, Parcel};

/// Maximum number of characters kept from an error answer.
const WORDS: usize = 2000;
/// Request timeout; farrier checks the header set before it answers.
const PATIENCE: Duration = Duration::from_mins(15);

/// Reason why a header set was not sent.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// The packed header set cannot be read.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// farrier cannot be reached.
    #[error("send headers to {0}")]
    Net(Url, #[source] NetError),
    /// farrier's answer is unusable: its address, and the reason.
    #[error("send headers to {0}: {1}")]
    Answer(Url, String),
    /// farrier refused the header set: the HTTP status, and the reason in farrier's words.
    #[error("farrier rejected the headers ({0}): {1}")]
    Refused(u16, String),
}

impl SendError {
    /// Whether a retry may succeed.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Net(_, source) => source.is_transient(),
            Self::Answer(..) => true,
            Self::Refused(status, _) => matches!(status, 408 | 429 | 500..),
            Self::Io(_) => false,
        }
    }
}

/// Sends a header set. Retries transient failures, such as a farrier that is starting or is busy with another header set.
///
/// # Errors
/// farrier cannot be reached, or refuses the header set.
pub async fn send(net: &Net, farrier: &Url, key: &Key, packed: &PackedHeaders) -> Result<Answer, SendError> {
    let mut to = farrier.clone();
    to.set_path(PATH);
    let mut attempt = 0;
    loop {
        let error = match once(net, &to, key, packed).await {
            Err(error) if error.is_transient() => error,
            outcome => return outcome,
        };
        let Some(delay) = retry_delay(attempt) else { return Err(error) };
        tracing::warn!(%to, %error, "retrying to send headers");
        attempt += 1;
        tokio::time::sleep(delay).await;
    }
}

async fn once(net: &Net, to: &Url, key: &Key, packed: &PackedHeaders) -> Result<Answer, SendError> {
    let parcel = Parcel::of_packed(packed);
    let unusable = |why: String| SendError::Answer(to.clone(), why);
    let mut request = Net::request(Method::POST, to.clone());
    for (name, value) in [
        (KERNEL, parcel.release.to_string()),
        (ARCH, parcel.arch.to_string()),
        (DIGEST, parcel.digest.to_string()),
        (header::CONTENT_LENGTH, parcel.size.to_string()),
        (header::AUTHORIZATION, key.sign(&parcel)),
    ] {
        let value = HeaderValue::try_from(value).map_err(|error| unusable(error.to_string()))?;
        request.headers_mut().insert(name, value);
    }
    *request.timeout_mut() = Some(PATIENCE);
    let file = File::open(&packed.file()).await?;
    *request.body_mut() = Some(Body::wrap_stream(ReaderStream::new(file.into_parts().0)));
    let answer = net.execute(request, &Asker::of("send headers")).await;
    let answer = answer.map_err(|source| SendError::Net(to.clone(), source))?;
    let status = answer.status();
    let body = answer.bytes().await.map_err(|error| unusable(error.without_url().to_string()))?;
    if status == StatusCode::OK {
        return serde_json::from_slice(&body).map_err(|error| unusable(error.to_string()));
    }
    let why = String::from_utf8_lossy(&body).chars().take(WORDS).collect();
    Err(SendError::Refused(status.as_u16(), why))
}
