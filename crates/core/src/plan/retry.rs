//! Backoff after transient faults.

use std::time::Duration;

/// Returns how long the loop waits before it builds again after the given number of failed attempts (1 is the first):
/// ten seconds, doubling to ten minutes. Transient faults are retried indefinitely. `jitter`, in `0.0..1.0`, shortens
/// the wait by up to half, so that farriers with the same fault do not retry at the same time.
pub fn build_delay(failed: u32, jitter: f64) -> Duration {
    delay(Duration::from_secs(10), Duration::from_mins(10), failed, jitter)
}

/// Returns how long the loop waits for its next reconcile after the given number of consecutive reconciles (1 is the
/// first) that met a fault, if no event triggers it earlier: a second, doubling to a minute. `jitter` is as in
/// [`build_delay`].
pub fn reconcile_delay(failed: u32, jitter: f64) -> Duration {
    delay(Duration::from_secs(1), Duration::from_mins(1), failed, jitter)
}

fn delay(first: Duration, longest: Duration, failed: u32, jitter: f64) -> Duration {
    let doublings = failed.saturating_sub(1).min(10);
    let full = first.saturating_mul(1 << doublings).min(longest);
    let jitter = if jitter.is_finite() { jitter.clamp(0.0, 1.0) } else { 0.0 };
    full.mul_f64(1.0 - jitter / 2.0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn builds_and_passes_wait_longer_and_never_give_up() {
        let builds: Vec<_> = (0..9).map(|failed| build_delay(failed, 0.0).as_secs()).collect();
        assert_eq!(builds, [10, 10, 20, 40, 80, 160, 320, 600, 600]);
        let delays: Vec<_> = (1..9).map(|failed| reconcile_delay(failed, 0.0).as_secs()).collect();
        assert_eq!(delays, [1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(build_delay(u32::MAX, 1.0), Duration::from_mins(5));
    }

    proptest! {
        #[test]
        fn jitter_takes_off_at_most_half(attempt: u32, jitter: f64) {
            let (wait, full) = (build_delay(attempt, jitter), build_delay(attempt, 0.0));
            prop_assert!(wait <= full && wait * 2 >= full);
        }
    }
}
