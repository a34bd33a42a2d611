//! When something is tried again: after a transient fault, and after losing a race with another writer.

use std::time::Duration;

use super::error::RegistryError;

/// Tries after the first one. With the waits between them they outlast a restart, and a mistyped address is still
/// reported while the user looks on.
const RETRIES: u32 = 4;
const FIRST: Duration = Duration::from_millis(500);

/// How long to wait after the given failed attempt (0 is the first), or `None` to give up.
///
/// The wait doubles from half a second to four. Chance takes off up to half of it, so that many clients that met the
/// same fault do not come back together.
pub fn retry_delay(attempt: u32) -> Option<Duration> {
    (attempt < RETRIES).then(|| (FIRST * (1 << attempt)).mul_f64(1.0 - fastrand::f64() / 2.0))
}

/// The longest that a call waits because the registry asks for it.
const LONGEST_ASKED: Duration = Duration::from_mins(2);

/// How long to wait before a call that failed so is tried again: as [`retry_delay`] says, and for as long as the registry wants
/// to be left alone. `None` where the fault does not pass, after the last try, and where the registry asks for more than a
/// call waits.
pub fn delay_after(error: &RegistryError, attempt: u32) -> Option<Duration> {
    let delay = retry_delay(attempt).filter(|_| error.is_transient())?;
    match error {
        RegistryError::Server { after: Some(asked), .. } => {
            (*asked <= LONGEST_ASKED).then(|| delay.max(*asked))
        }
        _ => Some(delay),
    }
}

/// Tries to get one's addition into a tag that others write, too. The protocol has no lock: a writer reads what the tag
/// holds, adds to it, writes it, and reads again whether its addition is still there.
pub const MAX_TRIES: u32 = 5;
/// Before the second try, and that much longer before each further one.
const PAUSE: Duration = Duration::from_millis(100);

/// Waits before a try; the first is 0.
pub async fn pause_before(attempt: u32) {
    if attempt > 0 {
        tokio::time::sleep(PAUSE * attempt).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubles_and_gives_up() {
        for (attempt, full) in [500, 1000, 2000, 4000].map(Duration::from_millis).into_iter().enumerate() {
            let wait = retry_delay(u32::try_from(attempt).unwrap()).unwrap();
            assert!(wait <= full && wait * 2 >= full, "{attempt}: {wait:?}");
        }
        assert_eq!(retry_delay(4), None);
        assert_eq!(retry_delay(u32::MAX), None);
    }

    #[test]
    fn a_registry_that_asks_for_time_gets_it_or_is_given_up() {
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
        assert!(delay_after(&error(None), 0).unwrap() <= FIRST);
        assert_eq!(delay_after(&RegistryError::Cancelled, 0), None);
        insta::assert_snapshot!(
            error(Some(30)),
            @"r.example answered 429 to list tags of x, and wants to be asked again in 30 s"
        );
    }
}
