//! Deadlines of rollouts. They need a timer, because no change of the cluster triggers a reconcile.

use std::time::Duration;

use jiff::Timestamp;

use super::{
    ClusterSnapshot, DaemonSetFacts, LiveDaemonSet, RecordState, RewriteRecord, UpgradeNote,
    rollout::{Limits, copies_of, unused_kernels},
};
use crate::image::{Definitions, Period, RolloutSpec};

/// Returns the time until the next deadline of any rollout, or `None` if there is none. A deadline is the end of:
///
/// - the time for its pods to become ready
/// - the time for which its pods must stay ready
/// - an unused kernel's grace time
/// - the time after which the site ignores a node that is not ready
///
/// Pods that become ready change the cluster and trigger a reconcile. Pods that never become ready do not, so their
/// deadline needs a timer.
pub fn next_deadline(
    definitions: &Definitions,
    snapshot: &ClusterSnapshot,
    now: Timestamp,
) -> Option<Duration> {
    let specs = definitions.images.values().flat_map(|image| &image.spec.rollout);
    let upgrades = specs.clone().any(|spec| spec.upgrade().is_some()).then(|| poll_interval(snapshot));
    let mut deadlines = Vec::new();
    for spec in specs {
        let Some(name) = spec.daemon_set() else { continue };
        for daemon_set in snapshot.daemon_sets.iter().filter(|daemon_set| daemon_set.is_named(name)) {
            deadlines.extend(deadlines_of(spec, daemon_set, snapshot));
        }
    }
    for since in snapshot.nodes.iter().filter(|node| node.not_ready).filter_map(|node| node.ready_changed) {
        let limits = definitions.site.ignore_nodes.iter().filter_map(|rule| rule.not_ready_for);
        deadlines.extend(limits.filter_map(|limit| after(since, limit)));
    }
    let waits = deadlines.into_iter().filter_map(|deadline| {
        // Add a second, so that the deadline has certainly passed at the next reconcile.
        let remaining = Duration::try_from(deadline.duration_since(now)).ok()?;
        Some(remaining + Duration::from_secs(1))
    });
    waits.chain(upgrades).min()
}

/// Returns the interval at which upgrades are polled, to retry refused evictions and to notice windows and timeouts.
fn poll_interval(snapshot: &ClusterSnapshot) -> Duration {
    let is_in_progress = snapshot.nodes.iter().any(|node| UpgradeNote::in_progress(node).is_some());
    Duration::from_secs(if is_in_progress { 5 } else { 60 })
}

/// Returns all deadlines of a rollout to this DaemonSet.
fn deadlines_of(spec: &RolloutSpec, facts: &DaemonSetFacts, snapshot: &ClusterSnapshot) -> Vec<Timestamp> {
    let (Some(live), Some(watch)) = (&facts.live, spec.watch()) else { return Vec::new() };
    // An annotation that another writer corrupted counts as an empty record.
    let record = RewriteRecord::of(&live.annotations).unwrap_or_default();
    let mut deadlines = Vec::new();
    if !record.0.is_empty() {
        let writes = record.0.values().filter(|field| field.state == RecordState::Set).map(|field| field.at);
        deadlines.extend(pod_deadlines(live, writes, Limits::of(watch, live), snapshot));
    }
    match spec {
        RolloutSpec::PerKernel { retire_after, .. } => {
            for copy in copies_of(facts, &snapshot.daemon_sets) {
                deadlines.extend(copy.unused_since.and_then(|since| after(since, *retire_after)));
                if let Some(since) = copy.watched_since() {
                    let limits = Limits::of(watch, copy.live);
                    deadlines.extend(pod_deadlines(copy.live, [since], limits, snapshot));
                }
            }
        }
        RolloutSpec::Union { drop_after, .. } => {
            let unused = unused_kernels(&live.annotations);
            deadlines.extend(unused.into_values().filter_map(|since| after(since, *drop_after)));
        }
        _ => {}
    }
    deadlines
}

fn after(since: Timestamp, period: Period) -> Option<Timestamp> {
    since.checked_add(period.signed_duration()).ok()
}

/// Returns the deadlines of rewrites, of pods that are not ready yet, and of pods that must stay ready for a while.
fn pod_deadlines(
    live: &LiveDaemonSet,
    writes: impl IntoIterator<Item = Timestamp>,
    limits: Limits,
    snapshot: &ClusterSnapshot,
) -> Vec<Timestamp> {
    let writes = writes.into_iter().map(|at| (at, limits.deadline));
    let own_pods =
        snapshot.pods.iter().filter(|pod| pod.daemon_set == live.version.uid && pod.bound && !pod.deleting);
    let pods = own_pods.filter_map(|pod| {
        if pod.ready {
            Some((pod.stable_since?, limits.stable_for))
        } else {
            Some((pod.created?, limits.deadline))
        }
    });
    writes.chain(pods).filter_map(|(from, wait)| from.checked_add(wait).ok()).collect()
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, sync::Arc};

    use super::*;
    use crate::plan::{
        LiveDaemonSet, ObjectVersion, OwnedFields, PodCount, PodFacts, RECORD_ANNOTATION, UpdateStrategy,
        fixtures::World,
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
            desired: 0,
            deleting: false,
            owned: OwnedFields::default(),
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
        assert_eq!(left(&world, 800), None, "the deadline has passed");
        world.snapshot.pods.push(PodFacts {
            namespace: "kube-system".to_owned(),
            name: "mft-1".to_owned(),
            version: ObjectVersion { uid: "p".to_owned(), resource_version: "1".to_owned() },
            daemon_set: "u".to_owned(),
            node: "n0".to_owned(),
            bound: true,
            probed: Vec::new(),
            pull_secrets: 0,
            images: BTreeMap::new(),
            ready: false,
            stable_since: None,
            created: Some(at(500)),
            deleting: false,
            messages: Vec::new(),
            pull_failure: None,
        });
        assert_eq!(left(&world, 800), Some(301));
        world.snapshot.pods[0].ready = true;
        assert_eq!(left(&world, 800), None);
        world.snapshot.pods[0].stable_since = Some(at(700));
        assert_eq!(left(&world, 800), Some(21), "until the pod has been ready for two minutes");
    }

    #[test]
    fn nothing_is_waited_for_without_a_record() {
        assert_eq!(left(&watched("{}"), 100), None);
        assert_eq!(left(&watched("hostile"), 100), None);
    }
}
