//! Pure: limits how often one target is rewritten. Otherwise a node that flaps between two kernels, or a writer that
//! replaces the object together with farrier's record, would cause endless pod restarts.

use std::{collections::HashMap, time::Duration};

use super::RolloutTarget;

/// Number of rewrites of one target that may follow each other immediately: more than any real sequence of kernel
/// changes needs.
const AT_ONCE: u32 = 4;
/// Time after which one more rewrite is allowed.
const ONE_MORE: Duration = Duration::from_secs(15);

/// Rewrites left for each target. Times are durations since one arbitrary moment, the same for all calls.
#[derive(Debug, Default)]
pub struct Pace(HashMap<RolloutTarget, Allowance>);

#[derive(Clone, Copy, Debug)]
struct Allowance {
    left: u32,
    /// Time at which `left` was accurate.
    at: Duration,
}

impl Pace {
    /// Returns the time at which the target may be rewritten again; `None` where it may be rewritten now.
    pub fn wait(&mut self, target: &RolloutTarget, now: Duration) -> Option<Duration> {
        self.0.retain(|_, allowance| now < allowance.at + ONE_MORE * AT_ONCE);
        let allowance = self.0.entry(target.clone()).or_insert(Allowance { left: AT_ONCE, at: now });
        while allowance.left < AT_ONCE && now >= allowance.at + ONE_MORE {
            allowance.left += 1;
            allowance.at += ONE_MORE;
        }
        if allowance.left == AT_ONCE {
            allowance.at = now;
        }
        (allowance.left == 0).then(|| allowance.at + ONE_MORE)
    }

    /// Records a rewrite.
    pub fn take(&mut self, target: &RolloutTarget) {
        if let Some(allowance) = self.0.get_mut(target) {
            allowance.left = allowance.left.saturating_sub(1);
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
        let (mut pace, start) = (Pace::default(), Duration::from_secs(7));
        let rewrite = |pace: &mut Pace, now| {
            let wait = pace.wait(&target, now);
            if wait.is_none() {
                pace.take(&target);
            }
            wait
        };
        let mut made = 0;
        for tenth in 0..600 {
            made += u32::from(rewrite(&mut pace, start + Duration::from_millis(100) * tenth).is_none());
        }
        assert_eq!(made, AT_ONCE + 3, "one more for each quarter of the minute");
        let calm = start + Duration::from_mins(5);
        let taken: Vec<bool> = (0..6).map(|_| rewrite(&mut pace, calm).is_none()).collect();
        assert_eq!(taken, [true, true, true, true, false, false]);
        assert_eq!(rewrite(&mut pace, calm), Some(calm + ONE_MORE));
        for _ in 0..9 {
            assert_eq!(pace.wait(&target, calm + ONE_MORE), None, "a query uses up no allowance");
        }
    }
}
