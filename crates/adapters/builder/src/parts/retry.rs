//! Retries an action after transient errors, with the delays of [`retry_delay`].

use std::error::Error;

use farrier_store::registry::{NotListening, retry_delay};
use oci::{error_causes, error_chain};
use tokio_util::sync::CancellationToken;

use super::error::TargetError;

/// Runs `action` until it succeeds, fails permanently, or exhausts the retries.
pub async fn with_retry<T, E, F>(
    what: &str,
    cancel: &CancellationToken,
    mut action: impl FnMut() -> F,
) -> Result<T, TargetError>
where
    F: Future<Output = Result<T, E>>,
    E: Into<TargetError>,
{
    let mut attempt = 0;
    loop {
        let outcome = tokio::select! {
            biased;
            () = cancel.cancelled() => return Err(TargetError::Canceled),
            outcome = action() => outcome,
        };
        let error: TargetError = match outcome {
            Ok(value) => return Ok(value),
            Err(error) => error.into(),
        };
        let is_worthwhile =
            error.is_transient() && !error_causes(&error).any(<dyn Error>::is::<NotListening>);
        let delay = if is_worthwhile { retry_delay(attempt) } else { None };
        let Some(delay) = delay else { return Err(error) };
        attempt += 1;
        tracing::warn!(what, attempt, ?delay, error = %error_chain(&error), "transient fault, retrying");
        tokio::select! {
            () = cancel.cancelled() => return Err(TargetError::Canceled),
            () = tokio::time::sleep(delay) => {}
        }
    }
}
