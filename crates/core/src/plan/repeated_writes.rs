//! Stops a rollout whose values another writer keeps reverting, where no record on the object counts the reverts: in a manifest,
//! and in an object that the writer replaces together with the record. The count is lost when farrier restarts or another replica
//! leads.

use std::{collections::HashMap, time::Duration};

use serde_json::Value;

use super::{
    Change, ClusterSnapshot, HoldReason, PlannedRollout, RECORD_ANNOTATION, RolloutDecision, RolloutTarget,
};

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
    pub fn hold_reason(
        &mut self,
        rollout: &PlannedRollout,
        snapshot: &ClusterSnapshot,
        now: Duration,
    ) -> Option<HoldReason> {
        self.0.retain(|_, write| now < write.at + QUIET);
        let values = values(rollout, snapshot);
        let is_repeated = |write: &&mut LastWrite| write.times >= MAX_REVERTS && write.values == values;
        let write = self.0.get_mut(&rollout.target).filter(is_repeated)?;
        write.at = now;
        Some(HoldReason::ChangedBack { times: write.times })
    }

    /// Records a successful write. `snapshot` is the state before the write.
    pub fn record(&mut self, rollout: &PlannedRollout, snapshot: &ClusterSnapshot, now: Duration) {
        // farrier itself restores the previous image: no other writer reverted the last write.
        let restores_image = matches!(rollout.decision, RolloutDecision::Hold(_))
            && rollout.changes.iter().any(|change| change.sets_image(snapshot));
        if restores_image {
            self.0.remove(&rollout.target);
        }
        let values = values(rollout, snapshot);
        if values.is_empty() {
            return;
        }
        let before = self.0.get(&rollout.target).filter(|write| write.values == values);
        let times = 1 + before.map_or(0, |write| write.times);
        self.0.insert(rollout.target.clone(), LastWrite { values, times, at: now });
    }
}

/// Returns the values that a rollout sets in manifests, and in DaemonSets without a record. The UID of a DaemonSet is a part of
/// its value, because a new object has no record either.
fn values(rollout: &PlannedRollout, snapshot: &ClusterSnapshot) -> Vec<Value> {
    let in_manifests = rollout.target.location.is_some();
    let value = |change: &Change| match change {
        Change::DaemonSet(change) if in_manifests => serde_json::to_value(&change.images).ok(),
        Change::DaemonSet(change) if !change.image_changes().is_empty() => {
            let live = snapshot.daemon_set(&change.namespace, &change.name)?.live.as_ref()?;
            let has_record = live.annotations.contains_key(RECORD_ANNOTATION);
            let value = serde_json::to_value((&live.version.uid, &change.images)).ok();
            value.filter(|_| !has_record)
        }
        Change::Resource(change) if in_manifests => Some(change.spec.clone()),
        _ => None,
    };
    rollout.changes.iter().filter_map(value).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        kmod::Verdict,
        plan::{
            ManifestFacts, ManifestLocation,
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
        let snapshot = ClusterSnapshot::default();
        for _ in 0..2 {
            assert_eq!(writes.hold_reason(&rollout, &snapshot, now), None);
            writes.record(&rollout, &snapshot, now);
            now += Duration::from_mins(20);
        }
        // The hold lasts for as long as the other writer keeps its value.
        for _ in 0..9 {
            let hold = writes.hold_reason(&rollout, &snapshot, now);
            assert_eq!(hold, Some(HoldReason::ChangedBack { times: 2 }));
            now += Duration::from_mins(20);
        }
        let hold = writes.hold_reason(&rollout, &snapshot, now + QUIET);
        assert_eq!(hold, None, "the values were kept for an hour");
    }

    /// As `kubectl replace` and Argo CD with `Replace=true` do.
    #[test]
    fn a_writer_that_replaces_the_object_with_its_record_is_left() {
        let (mut world, mut writes) = (World::live(&[K47]), RepeatedWrites::default());
        world.publish(Verdict::Loads);
        let mut write = |world: &mut World, is_recorded: bool| {
            let rollout = world.plan().rollouts.swap_remove(0);
            assert!(matches!(rollout.decision, RolloutDecision::Rewrite { .. }));
            let hold = writes.hold_reason(&rollout, &world.snapshot, Duration::ZERO);
            if hold.is_none() {
                writes.record(&rollout, &world.snapshot, Duration::ZERO);
                world.apply(&rollout.changes[0]).unwrap();
            }
            world.set_by_another("registry.test/old:1");
            if !is_recorded {
                world.snapshot.daemon_sets[0].live.as_mut().unwrap().annotations.clear();
            }
            hold
        };
        let held = Some(HoldReason::ChangedBack { times: 2 });
        assert_eq!([(); 4].map(|()| write(&mut world, false)), [None, None, held.clone(), held]);
        world.snapshot.daemon_sets[0].live.as_mut().unwrap().version.uid = "another".to_owned();
        assert_eq!(write(&mut world, true), None, "a new object");
        assert_eq!(write(&mut world, false), None, "the record counts the reverts");
    }

    /// A person removes the record after each failure, so that farrier tries the image again.
    #[test]
    fn a_failed_image_is_tried_again_as_often_as_a_person_removes_the_record() {
        let (mut world, mut writes) = (World::live(&[K47]), RepeatedWrites::default());
        world.publish(Verdict::Loads);
        for attempt in 0..4 {
            let rollout = world.plan().rollouts.swap_remove(0);
            let hold = writes.hold_reason(&rollout, &world.snapshot, Duration::ZERO);
            assert_eq!(hold, None, "attempt {attempt}");
            writes.record(&rollout, &world.snapshot, Duration::ZERO);
            world.apply(&rollout.changes[0]).unwrap();
            world.run_pod("n0", false);
            world.now += jiff::SignedDuration::from_mins(11);
            let restored = world.plan().rollouts.swap_remove(0);
            assert!(matches!(restored.decision, RolloutDecision::Hold(HoldReason::RolloutFailed { .. })));
            writes.record(&restored, &world.snapshot, Duration::ZERO);
            world.apply(&restored.changes[0]).unwrap();
            world.snapshot.daemon_sets[0].live.as_mut().unwrap().annotations.clear();
        }
    }

    #[test]
    fn other_values_are_not_held() {
        let (rollout, mut writes, now) = (planned(), RepeatedWrites::default(), Duration::ZERO);
        let snapshot = ClusterSnapshot::default();
        let mut other = rollout.clone();
        let Change::DaemonSet(change) = &mut other.changes[0] else { panic!("no DaemonSet") };
        change.images.insert("driver".to_owned(), "registry.test/mft:2".to_owned());
        // A node that alternates between two kernels.
        for rollout in [&rollout, &other, &rollout, &other, &rollout] {
            assert_eq!(writes.hold_reason(rollout, &snapshot, now), None);
            writes.record(rollout, &snapshot, now);
        }
    }
}
