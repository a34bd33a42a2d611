//! Pure: when a transient fault is tried again.

use std::time::Duration;

/// Tries after the first one.
const RETRIES: u32 = 5;
const FIRST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(30);

/// How long to wait after the given failed attempt (0 is the first), or `None` to give up.
///
/// The wait doubles from one second to at most thirty. `jitter`, anywhere in `0.0..1.0`, takes off up to
/// half of it, so that many farriers that met the same fault do not come back together.
pub fn delay(attempt: u32, jitter: f64) -> Option<Duration> {
    if attempt >= RETRIES {
        return None;
    }
    let full = FIRST.saturating_mul(1 << attempt).min(LONGEST);
    let jitter = if jitter.is_finite() { jitter.clamp(0.0, 1.0) } else { 0.0 };
    Some(full.mul_f64(1.0 - jitter / 2.0))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn doubles_and_gives_up() {
        let seconds: Vec<_> = (0..7).map(|attempt| delay(attempt, 0.0).map(|d| d.as_secs())).collect();
        assert_eq!(seconds, [Some(1), Some(2), Some(4), Some(8), Some(16), None, None]);
    }

    proptest! {
        #[test]
        fn jitter_takes_off_at_most_half(attempt: u32, jitter: f64) {
            if let (Some(wait), Some(full)) = (delay(attempt, jitter), delay(attempt, 0.0)) {
                prop_assert!(wait <= full && wait * 2 >= full && full <= LONGEST);
            }
        }
    }
}
