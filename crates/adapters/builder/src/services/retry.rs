//! Retries an action after transient errors, with the delays of [`retry_delay`].

use std::error::Error;

use farrier_store::registry::{NotListening, log_retry, retry_delay, root_cause};
use oci::error_causes;
use tokio_util::sync::CancellationToken;

use super::error::BuildError;

/// Runs `action` until it succeeds, fails permanently, or exhausts the retries. Logs name the action `name`.
pub async fn with_retry<T, E, F>(
    name: &str,
    cancel: &CancellationToken,
    mut action: impl FnMut() -> F,
) -> Result<T, BuildError>
where
    F: Future<Output = Result<T, E>>,
    E: Into<BuildError>,
{
    let mut attempt = 0;
    loop {
        let outcome = tokio::select! {
            biased;
            () = cancel.cancelled() => return Err(BuildError::Canceled),
            outcome = action() => outcome,
        };
        let error: BuildError = match outcome {
            Ok(value) => return Ok(value),
            Err(error) => error.into(),
        };
        let no_server = error_causes(&error).any(<dyn Error>::is::<NotListening>)
            || NotListening::find(&error) == Some(NotListening::UnknownName);
        let is_worthwhile = error.is_transient() && !no_server;
        let delay = if is_worthwhile { retry_delay(attempt) } else { None };
        let Some(delay) = delay else { return Err(error) };
        attempt += 1;
        let (host, cause) = error.fault().unwrap_or_else(|| (name, root_cause(&error)));
        log_retry((host, &cause), name, attempt, &error);
        tokio::select! {
            () = cancel.cancelled() => return Err(BuildError::Canceled),
            () = tokio::time::sleep(delay) => {}
        }
    }
}
