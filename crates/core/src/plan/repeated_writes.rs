//! Stops a rollout whose values in a manifest another writer keeps reverting, as the record on a live object does. A manifest has
//! no record, so the count is lost when farrier restarts or another replica leads.

use std::{collections::HashMap, time::Duration};

use serde_json::Value;

use super::{Change, HoldReason, PlannedRollout, RolloutTarget};

/// Number of reverts after which farrier stops writing.
const MAX_REVERTS: u32 = 2;
/// Time without a write, or a hold, after which the count starts again.
const QUIET: Duration = Duration::from_hours(1);

/// The last write of each target. Times are durations since a fixed, arbitrary start.
#[derive(Debug, Default)]
pub struct RepeatedWrites(HashMap<RolloutTarget, LastWrite>);

#[derive(Debug)]
struct LastWrite {
    values: Vec<Value>,
    /// Number of consecutive writes of the same values.
    times: u32,
    at: Duration,
}

impl RepeatedWrites {
    /// Returns the hold of a rollout whose last writes of the same values were reverted. A hold lasts until the values change, or
    /// the other writer accepts them.
    pub fn hold_reason(&mut self, rollout: &PlannedRollout, now: Duration) -> Option<HoldReason> {
        self.0.retain(|_, write| now < write.at + QUIET);
        let values = values(rollout);
        let is_repeated = |write: &&mut LastWrite| write.times >= MAX_REVERTS && write.values == values;
        let write = self.0.get_mut(&rollout.target).filter(is_repeated)?;
        write.at = now;
        Some(HoldReason::ChangedBack { times: write.times })
    }

    /// Records a successful write.
    pub fn record(&mut self, rollout: &PlannedRollout, now: Duration) {
        let values = values(rollout);
        if values.is_empty() {
            return;
        }
        let before = self.0.get(&rollout.target).filter(|write| write.values == values);
        let times = 1 + before.map_or(0, |write| write.times);
        self.0.insert(rollout.target.clone(), LastWrite { values, times, at: now });
    }
}

/// Returns the values that a rollout sets in manifests.
fn values(rollout: &PlannedRollout) -> Vec<Value> {
    let value = |change: &Change| match change {
        Change::DaemonSet(change) => serde_json::to_value(&change.images).ok(),
        Change::Resource(change) => Some(change.spec.clone()),
        _ => None,
    };
    let changes = rollout.changes.iter().filter(|_| rollout.target.location.is_some());
    changes.filter_map(value).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        kmod::Verdict,
        plan::{
            ManifestFacts, ManifestLocation, RolloutDecision,
            fixtures::{K47, World, daemon_set},
        },
    };

    fn planned() -> PlannedRollout {
        let mut world = World::new(&[K47]);
        world.publish(Verdict::Loads);
        let file = serde_json::json!({
            "strategy": "file", "path": "gitops", "namespace": "kube-system", "daemonSet": "mft", "container": "driver",
        });
        world.image("mft").spec.rollout = vec![serde_json::from_value(file).unwrap()];
        let place = ManifestLocation::of(&world.image("mft").spec.rollout[0]).unwrap();
        let facts = ManifestFacts { daemon_sets: vec![daemon_set("mft")], ..ManifestFacts::default() };
        world.manifests.insert(place, Ok(facts));
        let rollout = world.plan().rollouts.swap_remove(0);
        assert!(matches!(rollout.decision, RolloutDecision::Rewrite { .. }));
        rollout
    }

    #[test]
    fn a_revert_is_answered_once_and_then_left() {
        let (rollout, mut writes, mut now) = (planned(), RepeatedWrites::default(), Duration::from_secs(7));
        for _ in 0..2 {
            assert_eq!(writes.hold_reason(&rollout, now), None);
            writes.record(&rollout, now);
            now += Duration::from_mins(20);
        }
        // The hold lasts for as long as the other writer keeps its value.
        for _ in 0..9 {
            assert_eq!(writes.hold_reason(&rollout, now), Some(HoldReason::ChangedBack { times: 2 }));
            now += Duration::from_mins(20);
        }
        assert_eq!(writes.hold_reason(&rollout, now + QUIET), None, "the values were kept for an hour");
    }

    #[test]
    fn other_values_and_live_objects_are_not_held() {
        let (rollout, mut writes, now) = (planned(), RepeatedWrites::default(), Duration::ZERO);
        let mut other = rollout.clone();
        let Change::DaemonSet(change) = &mut other.changes[0] else { panic!("no DaemonSet") };
        change.images.insert("driver".to_owned(), "registry.test/mft:2".to_owned());
        // A node that alternates between two kernels.
        for rollout in [&rollout, &other, &rollout, &other, &rollout] {
            assert_eq!(writes.hold_reason(rollout, now), None);
            writes.record(rollout, now);
        }
        let live =
            PlannedRollout { target: RolloutTarget { location: None, ..rollout.target.clone() }, ..rollout };
        for _ in 0..5 {
            assert_eq!(writes.hold_reason(&live, now), None);
            writes.record(&live, now);
        }
    }
}
