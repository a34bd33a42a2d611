//! Decides whether the first pods with a new image became ready in time.

use jiff::{SignedDuration, Timestamp};

use crate::{
    image::Watch,
    plan::{LiveDaemonSet, PodFacts},
};

/// State of a new image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// Pods with the image still have time, or there is no such pod.
    Waiting,
    /// As [`Self::Waiting`], but half of the time is over for pods that wait for a registry that does not answer, and other
    /// pods do not show that the image works. The time starts again, so that the pods have some left when the registry answers.
    Stalled,
    /// The time of every pod with the image is over, and more pods are ready than late or waiting for the registry.
    Good,
    /// At least as many pods with the image are late as are ready or still have time. One late pod suffices while few
    /// pods have the image; later, one broken node of a large fleet does not fail the image. Contains the node of the first
    /// late pod, by name, and the messages of its containers.
    Failed { node: String, messages: Vec<String> },
}

/// Whether two references name the same image. A webhook may write another registry into pods and DaemonSets, but the
/// digest identifies the image.
pub fn is_same_image(one: &str, other: &str) -> bool {
    let digests = one.split_once('@').zip(other.split_once('@'));
    one == other || digests.is_some_and(|((_, one), (_, other))| one == other)
}

/// Whether a container of the pod runs an image.
pub(super) fn runs(pod: &PodFacts, container: &str, image: &str) -> bool {
    pod.images.get(container).is_some_and(|current| is_same_image(current, image))
}

/// Examines the pods that run an image, which was set at `since`. The deadline of a pod that was created later counts from
/// its creation. A pod that is not bound to a node is ignored, because it waits for the cluster and not for the image. A pod
/// that became ready within the deadline gets the time that it must stay ready. A pod that waits for the registry
/// ([`PodFacts::awaits_registry`]) does not show whether the image works.
pub(super) fn progress<'a>(
    pods: impl IntoIterator<Item = &'a PodFacts>,
    since: Timestamp,
    Limits { deadline, stable_for }: Limits,
    is_registry_down: bool,
    now: Timestamp,
) -> Progress {
    // A time in the future comes from a clock that jumped: use only the creation time of the pod.
    let since = Some(since).filter(|since| *since <= now);
    let mut late: Vec<&PodFacts> = Vec::new();
    let (mut ready, mut in_time, mut stalled) = (0, 0, 0);
    for pod in pods {
        if pod.deleting || !pod.bound {
            continue;
        }
        // `None` sorts before every time. After a clock jumped back, the pod counts as in time instead of late.
        let start = pod.created.max(since).unwrap_or(now);
        let was_ready_in_time =
            pod.ready && pod.stable_since.is_some_and(|since| since.duration_since(start) <= deadline);
        if pod.is_stable(stable_for, now) {
            ready += 1;
            continue;
        }
        let awaits_registry = pod.awaits_registry(is_registry_down, now);
        let age = now.duration_since(start);
        if awaits_registry && age > deadline / 2 {
            stalled += 1;
        } else if !awaits_registry && age > deadline && !was_ready_in_time {
            late.push(pod);
        } else {
            in_time += 1;
        }
    }
    match late.iter().min_by_key(|pod| &pod.node) {
        Some(first) if late.len() >= ready + in_time => {
            Progress::Failed { node: first.node.clone(), messages: first.messages.clone() }
        }
        _ if stalled > 0 && late.len() + stalled >= ready => Progress::Stalled,
        _ if in_time > 0 || ready == 0 => Progress::Waiting,
        _ => Progress::Good,
    }
}

/// Time limits for pods.
#[derive(Clone, Copy, Debug)]
pub(in crate::plan) struct Limits {
    /// Time to become ready.
    pub(in crate::plan) deadline: SignedDuration,
    /// Time to stay ready.
    pub(in crate::plan) stable_for: SignedDuration,
}

impl Limits {
    /// Returns the definition's limits, or the DaemonSet's own `minReadySeconds` where that is longer than the
    /// definition's `stableFor`.
    pub(in crate::plan) fn of(watch: Watch, live: &LiveDaemonSet) -> Self {
        let min_ready = live.manifest.pointer("/spec/minReadySeconds").and_then(serde_json::Value::as_i64);
        let min_ready = SignedDuration::from_secs(min_ready.unwrap_or_default());
        let stable_for = watch.stable_for.signed_duration().max(min_ready);
        Self { deadline: watch.deadline.signed_duration(), stable_for }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        image::Period,
        plan::{
            PullFailure,
            fixtures::{live_daemon_set, pod},
        },
    };

    /// Evaluates pods on nodes n0, n1..., each given by its creation in seconds after the image was set and its
    /// readiness, at `now` seconds.
    fn at(now: i64, pods: &[(i64, bool)]) -> Progress {
        let second = |second| Timestamp::from_second(second).unwrap();
        let daemon_set = live_daemon_set("mft");
        let pods: Vec<PodFacts> = pods
            .iter()
            .enumerate()
            .map(|(number, (created, ready))| PodFacts {
                created: Some(second(1000 + created)),
                ..pod(&daemon_set, &format!("n{number}"), *ready)
            })
            .collect();
        progress(&pods, second(1000), LIMITS, false, second(1000 + now))
    }

    const LIMITS: Limits =
        Limits { deadline: SignedDuration::from_secs(60), stable_for: SignedDuration::from_secs(30) };

    /// Evaluates one pod, created with the rewrite and stable since the given second, at `now` seconds.
    fn stable(since: i64, now: i64) -> Progress {
        let second = |second| Timestamp::from_second(1000 + second).unwrap();
        let daemon_set = live_daemon_set("mft");
        let pod = PodFacts {
            created: Some(second(0)),
            stable_since: Some(second(since)),
            ..pod(&daemon_set, "n0", true)
        };
        progress([&pod], second(0), LIMITS, false, second(now))
    }

    #[test]
    fn ready_must_last() {
        assert_eq!(
            stable(5, 5),
            Progress::Waiting,
            "a container that crashes at its start is ready for a moment"
        );
        assert_eq!(stable(5, 34), Progress::Waiting);
        assert_eq!(stable(5, 35), Progress::Good);
        assert_eq!(stable(60, 70), Progress::Waiting, "ready in time, so it gets time to stay ready");
        assert_eq!(stable(60, 90), Progress::Good);
        assert!(matches!(stable(61, 70), Progress::Failed { .. }), "restarted after the deadline");
    }

    /// As a kubelet reports it: ready for a second after each start, away for longer after each exit.
    #[test]
    fn a_pod_that_crashes_at_each_start_is_never_good() {
        let starts = [0, 2, 13, 34, 75];
        let second = |second: i64| Timestamp::from_second(1000 + second).unwrap();
        let daemon_set = live_daemon_set("mft");
        let limits = Limits { deadline: SignedDuration::from_secs(30), ..LIMITS };
        let failed = (0..90).find(|now| {
            let running = starts.iter().copied().find(|start| (*start..=start + 1).contains(now));
            let pod = PodFacts {
                created: Some(second(0)),
                stable_since: running.map(second),
                ..pod(&daemon_set, "n0", running.is_some())
            };
            let found = progress([&pod], second(0), limits, false, second(*now));
            assert_ne!(found, Progress::Good, "at {now} s");
            found != Progress::Waiting
        });
        assert_eq!(failed, Some(31), "the first second after the deadline");
    }

    #[test]
    fn the_daemon_sets_own_time_counts_where_it_is_longer() {
        let mut live = live_daemon_set("mft").live.unwrap();
        let watch = Watch { deadline: Period::seconds(60), stable_for: Period::seconds(30) };
        for (seconds, expected) in [(10, 30), (300, 300)] {
            live.manifest = std::sync::Arc::new(serde_json::json!({"spec": {"minReadySeconds": seconds}}));
            assert_eq!(Limits::of(watch, &live).stable_for.as_secs(), expected);
        }
    }

    fn failed_on(node: &str) -> Progress {
        let messages = vec!["driver: CrashLoopBackOff: no such device".to_owned()];
        Progress::Failed { node: node.to_owned(), messages }
    }

    #[test]
    fn the_first_pods_decide() {
        assert_eq!(at(10, &[]), Progress::Waiting);
        assert_eq!(at(60, &[(0, false)]), Progress::Waiting, "the deadline itself counts as in time");
        assert_eq!(at(61, &[(0, false)]), failed_on("n0"));
        assert_eq!(at(61, &[(0, true), (10, false)]), Progress::Waiting);
        assert_eq!(at(75, &[(0, true), (10, false)]), failed_on("n1"), "half of the first nodes");
        assert_eq!(at(10, &[(0, true)]), Progress::Good);
    }

    #[test]
    fn one_broken_node_condemns_no_image() {
        assert_eq!(at(90, &[(0, true), (0, true), (0, false)]), Progress::Good);
        assert_eq!(at(90, &[(0, true), (0, true), (0, false), (80, false)]), Progress::Waiting);
    }

    #[test]
    fn pods_that_wait_for_the_registry_neither_condemn_nor_hold_an_image() {
        let second = |second| Timestamp::from_second(second).unwrap();
        let daemon_set = live_daemon_set("mft");
        let after_deadline = |states: &[(bool, Option<PullFailure>)]| {
            let pods = states.iter().enumerate().map(|(number, (ready, pull_failure))| PodFacts {
                created: Some(second(1000)),
                pull_failure: *pull_failure,
                ..pod(&daemon_set, &format!("n{number}"), *ready)
            });
            let pods: Vec<PodFacts> = pods.collect();
            progress(&pods, second(1000), LIMITS, false, second(1090))
        };
        let (works, crashes, waits) = ((true, None), (false, None), (false, Some(PullFailure::Unanswered)));
        assert_eq!(after_deadline(&[waits]), Progress::Stalled);
        assert_eq!(after_deadline(&[works, waits]), Progress::Stalled);
        assert_eq!(after_deadline(&[works, works, waits]), Progress::Good, "one node without a network");
        assert_eq!(after_deadline(&[works, works, works, crashes, waits, waits]), Progress::Stalled);
        assert_eq!(
            after_deadline(&[crashes, waits, waits]),
            failed_on("n0"),
            "it works on no node that has it"
        );
    }

    #[test]
    fn a_pod_from_before_the_image_was_set_has_the_whole_time() {
        assert_eq!(at(50, &[(-500, false)]), Progress::Waiting);
    }

    #[test]
    fn a_clock_that_jumped_back_makes_no_pod_late() {
        assert_eq!(at(-5000, &[(0, false)]), Progress::Waiting);
        assert_eq!(at(-100, &[(-200, false)]), failed_on("n0"), "the pod's own time counts");
    }

    #[test]
    fn other_pods_do_not_count() {
        let daemon_set = live_daemon_set("mft");
        let image = daemon_set.containers[0].image.clone();
        let late = |change: fn(&mut PodFacts)| {
            let mut pod = PodFacts { created: Some(Timestamp::UNIX_EPOCH), ..pod(&daemon_set, "n0", false) };
            change(&mut pod);
            let now = Timestamp::from_second(9999).unwrap();
            let pods = [&pod].into_iter().filter(|pod| runs(pod, "driver", &image));
            progress(pods, Timestamp::UNIX_EPOCH, LIMITS, false, now)
        };
        assert_eq!(late(|_| ()), failed_on("n0"));
        assert_eq!(late(|pod| pod.bound = false), Progress::Waiting);
        assert_eq!(late(|pod| pod.deleting = true), Progress::Waiting);
        assert_eq!(late(|pod| drop(pod.images.insert("driver".into(), "x:1".into()))), Progress::Waiting);
    }
}
