//! Retry policy: backoff after a transient fault, and retries after losing a race with another writer.

use std::{
    collections::BTreeMap,
    error::Error,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use super::error::RegistryError;
use crate::error_chain;

/// Number of retries after the first attempt. With the backoff, they outlast a restart of a registry, and still report a mistyped
/// address while the user waits.
const RETRIES: u32 = 4;
const INITIAL_DELAY: Duration = Duration::from_millis(500);

/// Returns the delay after a failed attempt (the first one is 0), or `None` to give up.
///
/// The delay doubles from half a second to four seconds. Jitter subtracts up to half of the delay, so that clients with the same
/// fault do not retry at the same moment.
pub fn retry_delay(attempt: u32) -> Option<Duration> {
    (attempt < RETRIES).then(|| (INITIAL_DELAY * (1 << attempt)).mul_f64(1.0 - fastrand::f64() / 2.0))
}

/// Longest delay that a registry may request. If a registry requests a longer one, the call fails.
const MAX_REQUESTED_DELAY: Duration = Duration::from_mins(2);

/// Returns the delay before a failed call is retried: the backoff of [`retry_delay`], or the delay that the registry requests if
/// that delay is longer. Returns `None`, to give up,
///
/// - for a permanent error,
/// - if nothing listens at the registry's address,
/// - after the last attempt,
/// - if the registry requests a delay of more than two minutes.
pub fn delay_after(error: &RegistryError, attempt: u32) -> Option<Duration> {
    let delay = retry_delay(attempt).filter(|_| error.is_transient())?;
    match error {
        RegistryError::Refused { .. } => None,
        RegistryError::Server { after: Some(requested), .. } => {
            (*requested <= MAX_REQUESTED_DELAY).then(|| delay.max(*requested))
        }
        _ => Some(delay),
    }
}

/// Time without a fault after which its next occurrence is logged as a warning again.
const QUIET_PERIOD: Duration = Duration::from_mins(1);

/// Faults that were logged as warnings, by subject and cause, with the time of their last occurrence.
type Faults = BTreeMap<(String, String), Instant>;

/// Records a fault, and returns whether it has not occurred for a minute.
fn is_new(faults: &mut Faults, subject: &str, cause: &str, now: Instant) -> bool {
    faults.retain(|_, last| now.duration_since(*last) < QUIET_PERIOD);
    faults.insert((subject.to_owned(), cause.to_owned()), now).is_none()
}

/// Logs a fault before a retry: its details at debug level, and one short warning for each subject (a host or an action) and cause.
pub fn log_retry((subject, cause): (&str, &str), what: &str, attempt: u32, error: &(dyn Error + 'static)) {
    static FAULTS: Mutex<Faults> = Mutex::new(Faults::new());
    if is_new(&mut FAULTS.lock(), subject, cause, Instant::now()) {
        tracing::warn!(at = subject, cause, "transient fault, retrying");
    }
    tracing::debug!(what, attempt, error = %error_chain(error), "transient fault, retrying");
}

/// Maximum number of attempts to add an entry to a tag that other clients write too. The protocol has no lock: a writer reads the
/// tag, adds its entry, writes the tag, and reads the tag again to check that its entry is still there.
pub const MAX_TRIES: u32 = 5;
/// Pause before the second attempt. The pause before each further attempt is longer by this time.
const RACE_PAUSE: Duration = Duration::from_millis(100);

/// Waits before an attempt, except before attempt 0.
pub async fn pause_before(attempt: u32) {
    if attempt > 0 {
        tokio::time::sleep(RACE_PAUSE * attempt).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::error::NotListening;

    #[test]
    fn the_delay_doubles_until_the_last_attempt() {
        for (attempt, full) in [500, 1000, 2000, 4000].map(Duration::from_millis).into_iter().enumerate() {
            let wait = retry_delay(u32::try_from(attempt).unwrap()).unwrap();
            assert!(wait <= full && wait * 2 >= full, "{attempt}: {wait:?}");
        }
        assert_eq!(retry_delay(4), None);
        assert_eq!(retry_delay(u32::MAX), None);
    }

    #[test]
    fn a_fault_is_new_for_each_host_and_cause_and_after_a_minute_without_it() {
        let (mut faults, start) = (Faults::default(), Instant::now());
        let mut is_new = |host: &str, cause: &str, seconds| {
            super::is_new(&mut faults, host, cause, start + Duration::from_secs(seconds))
        };
        assert!(is_new("a.example", "status 503", 0));
        assert!(!is_new("a.example", "status 503", 30));
        assert!(is_new("a.example", "connection refused", 31) && is_new("b.example", "status 503", 31));
        assert!(!is_new("a.example", "status 503", 80), "less than a minute after the last occurrence");
        assert!(is_new("a.example", "status 503", 141));
    }

    #[test]
    fn a_requested_delay_is_respected_up_to_a_limit() {
        let error = |after: Option<u64>| RegistryError::Server {
            host: "r.example".to_owned(),
            status: 429,
            action: "list tags of x".to_owned(),
            after: after.map(Duration::from_secs),
        };
        assert_eq!(delay_after(&error(Some(30)), 0), Some(Duration::from_secs(30)));
        assert!(delay_after(&error(Some(0)), 3).unwrap() >= Duration::from_secs(2));
        assert_eq!(delay_after(&error(Some(3600)), 0), None);
        assert_eq!(delay_after(&error(Some(30)), RETRIES), None);
        assert!(delay_after(&error(None), 0).unwrap() <= INITIAL_DELAY);
        assert_eq!(delay_after(&RegistryError::Canceled, 0), None);
        let refused = RegistryError::Refused { host: "r.example".to_owned(), source: NotListening::Refused };
        assert_eq!((delay_after(&refused, 0), refused.is_transient()), (None, true));
        insta::assert_snapshot!(
            error(Some(30)),
            @"r.example answered 429 to list tags of x; retry after 30 s"
        );
    }
}
