//! Pure: when a transient fault is tried again.

use std::time::Duration;

/// Tries after the first one. With the waits between them they outlast a restart, and somebody who
/// mistyped an address still learns it while looking on: the loop comes back with its next pass.
const RETRIES: u32 = 4;
const FIRST: Duration = Duration::from_millis(500);

/// How long to wait after the given failed attempt (0 is the first), or `None` to give up.
///
/// The wait doubles from half a second to four. `jitter`, anywhere in `0.0..1.0`, takes off up to half of
/// it, so that many farriers that met the same fault do not come back together.
pub fn delay(attempt: u32, jitter: f64) -> Option<Duration> {
    if attempt >= RETRIES {
        return None;
    }
    let full = FIRST * (1 << attempt);
    let jitter = if jitter.is_finite() { jitter.clamp(0.0, 1.0) } else { 0.0 };
    Some(full.mul_f64(1.0 - jitter / 2.0))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn doubles_and_gives_up() {
        let waits: Vec<_> = (0..6).map(|attempt| delay(attempt, 0.0).map(|d| d.as_millis())).collect();
        assert_eq!(waits, [Some(500), Some(1000), Some(2000), Some(4000), None, None]);
    }

    proptest! {
        #[test]
        fn jitter_takes_off_at_most_half(attempt: u32, jitter: f64) {
            if let (Some(wait), Some(full)) = (delay(attempt, jitter), delay(attempt, 0.0)) {
                prop_assert!(wait <= full && wait * 2 >= full);
            }
        }
    }
}
