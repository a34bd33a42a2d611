//! Pure: when a rollout that is watched has to be looked at again, though nothing changes.

use std::time::Duration;

use jiff::Timestamp;

use super::{ClusterSnapshot, LiveDaemonSet, Record, RecordState, rollout::Limits};
use crate::image::Definitions;

/// How long it is until the first deadline of a watched rollout passes; `None` where none is ahead.
///
/// Pods that get ready are changes of the cluster and wake the loop by themselves. Pods that do not are none.
pub fn next_deadline(
    definitions: &Definitions,
    snapshot: &ClusterSnapshot,
    now: Timestamp,
) -> Option<Duration> {
    let specs = definitions.images.values().flat_map(|image| &image.spec.rollout);
    specs
        .filter_map(|spec| Some((spec.daemon_set()?, spec.watch()?)))
        .flat_map(|(wanted, watch)| {
            let named = snapshot.daemon_sets.iter().filter(|found| found.is_named(wanted));
            named.filter_map(move |found| Some((found.live.as_ref()?, watch)))
        })
        .flat_map(|(live, watch)| ends(live, Limits::of(watch, live), snapshot))
        .filter_map(|end| {
            // A second more, so that the deadline has passed by the next look, and not nearly.
            let left = Duration::try_from(end.duration_since(now)).ok()?;
            Some(left + Duration::from_secs(1))
        })
        .min()
}

/// When deadlines pass: that of the rewrite, those of pods that are not ready yet, and of those that must stay so.
fn ends(live: &LiveDaemonSet, limits: Limits, snapshot: &ClusterSnapshot) -> Vec<Timestamp> {
    // An annotation that another writer changed says nothing.
    let record = Record::of(&live.annotations).unwrap_or_default();
    if record.0.is_empty() {
        return Vec::new();
    }
    let set = record.0.values().filter(|field| field.state == RecordState::Set);
    let set = set.map(|field| (field.at, limits.deadline));
    let own =
        snapshot.pods.iter().filter(|pod| pod.daemon_set == live.version.uid && pod.bound && !pod.deleting);
    let pods = own.filter_map(|pod| {
        if pod.ready {
            Some((pod.steady_since?, limits.stable_for))
        } else {
            Some((pod.created?, limits.deadline))
        }
    });
    set.chain(pods).filter_map(|(from, wait)| from.checked_add(wait).ok()).collect()
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, sync::Arc};

    use super::*;
    use crate::plan::{
        LiveDaemonSet, ObjectVersion, PodCount, PodFacts, RECORD_ANNOTATION, UpdateStrategy, fixtures::World,
    };

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn watched(annotation: &str) -> World {
        let mut world = World::new(&[crate::plan::fixtures::K47]);
        world.image("mft").spec.rollout = vec![
            serde_json::from_value(serde_json::json!({
                "strategy": "image", "namespace": "kube-system", "daemonSet": "mft", "container": "driver",
                "deadline": "10m",
            }))
            .unwrap(),
        ];
        world.snapshot.daemon_sets[0].live = Some(LiveDaemonSet {
            version: ObjectVersion { uid: "u".to_owned(), resource_version: "1".to_owned() },
            annotations: [(RECORD_ANNOTATION.to_owned(), annotation.to_owned())].into(),
            labels: BTreeMap::new(),
            match_labels: BTreeMap::new(),
            update: UpdateStrategy::RollingUpdate,
            max_unavailable: PodCount::Number(1),
            deleting: false,
            manifest: Arc::new(serde_json::Value::Null),
        });
        world
    }

    fn left(world: &World, now: i64) -> Option<u64> {
        next_deadline(&world.definitions, &world.snapshot, at(now)).map(|left| left.as_secs())
    }

    #[test]
    fn the_deadline_of_a_rewrite_and_of_its_pods() {
        let mut world = watched(
            r#"{"driver": {"set": "b", "replaced": "a", "at": "1970-01-01T00:01:40Z", "state": "set"}}"#,
        );
        assert_eq!(left(&world, 100), Some(601));
        assert_eq!(left(&world, 699), Some(2));
        assert_eq!(left(&world, 800), None, "it is behind");
        world.snapshot.pods.push(PodFacts {
            namespace: "kube-system".to_owned(),
            name: "mft-1".to_owned(),
            version: ObjectVersion { uid: "p".to_owned(), resource_version: "1".to_owned() },
            daemon_set: "u".to_owned(),
            node: "n0".to_owned(),
            bound: true,
            images: BTreeMap::new(),
            ready: false,
            steady_since: None,
            created: Some(at(500)),
            deleting: false,
            messages: Vec::new(),
        });
        assert_eq!(left(&world, 800), Some(301));
        world.snapshot.pods[0].ready = true;
        assert_eq!(left(&world, 800), None);
    }

    #[test]
    fn nothing_is_waited_for_without_a_record() {
        assert_eq!(left(&watched("{}"), 100), None);
        assert_eq!(left(&watched("hostile"), 100), None);
    }
}
