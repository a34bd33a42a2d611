//! When something is tried again: after a transient fault, and after losing a race with another writer.

use std::time::Duration;

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
}
