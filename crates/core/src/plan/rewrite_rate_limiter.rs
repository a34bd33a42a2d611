//! Limits how often one target is rewritten. Otherwise a node that flaps between two kernels, or a writer that replaces
//! the object together with farrier's record, would cause endless pod restarts.

use std::{collections::HashMap, time::Duration};

use super::RolloutTarget;

/// Number of rewrites of one target that may follow each other immediately: more than any real sequence of kernel
/// changes needs.
const BURST: u32 = 4;
/// Time after which one more rewrite is allowed.
const REFILL_INTERVAL: Duration = Duration::from_secs(15);

/// Token bucket of each target: a rewrite takes a token. Times are durations since a fixed, arbitrary start.
#[derive(Debug, Default)]
pub struct RewriteRateLimiter(HashMap<RolloutTarget, TokenBucket>);

#[derive(Clone, Copy, Debug)]
struct TokenBucket {
    tokens: u32,
    /// Time of the last refill.
    refilled: Duration,
}

impl RewriteRateLimiter {
    /// Returns the time at which the target may be rewritten again; `None` where it may be rewritten now.
    pub fn retry_at(&mut self, target: &RolloutTarget, now: Duration) -> Option<Duration> {
        self.0.retain(|_, bucket| now < bucket.refilled + REFILL_INTERVAL * BURST);
        let bucket = self.0.entry(target.clone()).or_insert(TokenBucket { tokens: BURST, refilled: now });
        while bucket.tokens < BURST && now >= bucket.refilled + REFILL_INTERVAL {
            bucket.tokens += 1;
            bucket.refilled += REFILL_INTERVAL;
        }
        if bucket.tokens == BURST {
            bucket.refilled = now;
        }
        (bucket.tokens == 0).then(|| bucket.refilled + REFILL_INTERVAL)
    }

    /// Records a rewrite.
    pub fn take(&mut self, target: &RolloutTarget) {
        if let Some(bucket) = self.0.get_mut(target) {
            bucket.tokens = bucket.tokens.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::RolloutSpec;

    #[test]
    fn a_flood_becomes_a_trickle_and_calm_restores_the_allowance() {
        let spec = serde_json::json!({
            "strategy": "image", "namespace": "drivers", "daemonSet": "mft", "container": "driver",
        });
        let target = RolloutTarget::of(&serde_json::from_value::<RolloutSpec>(spec).unwrap());
        let (mut limiter, start) = (RewriteRateLimiter::default(), Duration::from_secs(7));
        let rewrite = |limiter: &mut RewriteRateLimiter, now| {
            let wait = limiter.retry_at(&target, now);
            if wait.is_none() {
                limiter.take(&target);
            }
            wait
        };
        let mut made = 0;
        for tenth in 0..600 {
            made += u32::from(rewrite(&mut limiter, start + Duration::from_millis(100) * tenth).is_none());
        }
        assert_eq!(made, BURST + 3, "one more for each quarter of the minute");
        let calm = start + Duration::from_mins(5);
        let taken: Vec<bool> = (0..6).map(|_| rewrite(&mut limiter, calm).is_none()).collect();
        assert_eq!(taken, [true, true, true, true, false, false]);
        assert_eq!(rewrite(&mut limiter, calm), Some(calm + REFILL_INTERVAL));
        for _ in 0..9 {
            assert_eq!(limiter.retry_at(&target, calm + REFILL_INTERVAL), None, "a query uses up no rewrite");
        }
    }
}
