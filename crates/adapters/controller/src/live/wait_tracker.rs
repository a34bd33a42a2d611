//! Tracks how long kernels wait for images and rollouts stay unfinished. The tracker is a state machine: the set of
//! waiting items and the time are arguments.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tokio::time::Instant;

/// Start time of each wait.
#[derive(Debug)]
pub(super) struct WaitTracker<K> {
    waits_since: BTreeMap<K, Instant>,
}

impl<K> Default for WaitTracker<K> {
    fn default() -> Self {
        Self { waits_since: BTreeMap::new() }
    }
}

impl<K: Ord> WaitTracker<K> {
    /// Replaces the set of waiting items after a reconcile. Items that are already known keep their start time.
    pub(super) fn update(&mut self, waiting: BTreeSet<K>, now: Instant) {
        self.waits_since.retain(|key, _| waiting.contains(key));
        for key in waiting {
            self.waits_since.entry(key).or_insert(now);
        }
    }

    /// Returns the waiting items, each with the duration of its wait.
    pub(super) fn waits(&self, now: Instant) -> impl Iterator<Item = (&K, Duration)> {
        self.waits_since.iter().map(move |(key, since)| (key, now - *since))
    }
}

#[cfg(test)]
mod tests {
    use farrier_core::plan::{
        HoldReason, Plan, RolloutDecision, RolloutWait, UnfinishedRollout, testing::Fleet,
        unfinished_rollouts,
    };
    use kmod::Verdict;

    use super::*;

    const K47: &str = "6.1.0-47-amd64";

    fn second(second: u64) -> Duration {
        Duration::from_secs(second)
    }

    /// Returns the unfinished rollouts at second `at`, each with the seconds that it has waited.
    fn seen(
        waits: &mut WaitTracker<UnfinishedRollout>,
        start: Instant,
        at: u64,
        plan: &Plan,
    ) -> Vec<(RolloutWait, u64)> {
        waits.update(unfinished_rollouts(plan), start + second(at));
        waits.waits(start + second(at)).map(|(rollout, wait)| (rollout.state, wait.as_secs())).collect()
    }

    #[test]
    fn a_wait_lasts_until_the_rollout_settles_or_changes_state() {
        let (start, mut waits, mut fleet) = (Instant::now(), WaitTracker::default(), Fleet::new(&[K47]));
        let nothing: [(RolloutWait, u64); 0] = [];
        // A rollout that waits for its image is counted under its kernel.
        assert_eq!(seen(&mut waits, start, 0, &fleet.plan()), nothing);
        fleet.publish(Verdict::Loads);
        let lost = fleet.without_daemon_sets().plan();
        assert_eq!(seen(&mut waits, start, 10, &lost), [(RolloutWait::Held, 0)]);
        assert_eq!(seen(&mut waits, start, 70, &lost), [(RolloutWait::Held, 60)]);
        // The same rollout in another state starts a new wait.
        assert_eq!(seen(&mut waits, start, 80, &fleet.plan()), [(RolloutWait::Unfinished, 0)]);
        assert_eq!(seen(&mut waits, start, 95, &fleet.plan()), [(RolloutWait::Unfinished, 15)]);
        let mut settled = fleet.plan();
        settled.rollouts[0].decision = RolloutDecision::Settled { how: "as it should be".to_owned() };
        assert_eq!(seen(&mut waits, start, 99, &settled), nothing);
    }

    #[test]
    fn progress_restarts_a_wait_and_holds_by_people_are_no_waits() {
        let (start, mut waits, mut fleet) = (Instant::now(), WaitTracker::default(), Fleet::new(&[K47]));
        fleet.publish(Verdict::Loads);
        let mut plan = fleet.plan();
        for (at, now) in [(0, "one"), (50, "two"), (90, "two")] {
            plan.rollouts[0].decision = RolloutDecision::Steps { now: vec![now.to_owned()] };
            let since = if at == 90 { 40 } else { 0 };
            assert_eq!(seen(&mut waits, start, at, &plan), [(RolloutWait::Unfinished, since)]);
        }
        for (why, is_open) in [
            (HoldReason::Paused, false),
            (HoldReason::NoNodes, false),
            (HoldReason::MixedKernels { kernels: BTreeMap::new(), not_ready: None }, true),
            (HoldReason::Affinity { detail: "no".to_owned() }, true),
            (HoldReason::NotPullable, true),
            (HoldReason::ReachDiffers { cluster: "a".to_owned(), manifest: "b".to_owned() }, true),
            (HoldReason::Disruption { detail: "no".to_owned() }, true),
            (HoldReason::NotSynced { found: "another".to_owned() }, true),
            (HoldReason::Proposed { branch: "b".to_owned() }, false),
        ] {
            plan.rollouts[0].decision = RolloutDecision::Hold(why);
            assert_eq!(
                unfinished_rollouts(&plan).len(),
                usize::from(is_open),
                "{:?}",
                plan.rollouts[0].decision
            );
        }
    }
}
