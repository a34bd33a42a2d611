//! Pure: did the first pods with a new image get ready in time?

use jiff::{SignedDuration, Timestamp};

use crate::{image::Period, plan::PodFacts};

/// How a new image does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// Pods with it still have time; or there is no such pod.
    Waiting,
    /// Every pod with it had its time, and most got ready.
    Good,
    /// As many pods with it are late as are ready or still have time: on the first nodes that is the first late one,
    /// while one broken node of a large fleet condemns no image.
    Failed {
        /// The node of the first late pod, by name.
        node: String,
        /// What its containers say, for people.
        messages: Vec<String>,
    },
}

/// Looks at the pods in which `container` runs `image`, which was set at `since`. A pod that was made later has its
/// own time; one that is bound to no node has none, because the cluster and not the image is what it waits for.
pub(super) fn progress<'a>(
    pods: impl IntoIterator<Item = &'a PodFacts>,
    container: &str,
    image: &str,
    since: Timestamp,
    deadline: Period,
    now: Timestamp,
) -> Progress {
    let deadline = SignedDuration::try_from(deadline.duration()).unwrap_or(SignedDuration::MAX);
    // A record from the future is one of a clock that jumped: the pod's own time is all that is known then.
    let since = Some(since).filter(|since| *since <= now);
    let mut late: Vec<&PodFacts> = Vec::new();
    let (mut ready, mut young) = (0, 0);
    for pod in pods {
        let runs = pod.images.get(container).is_some_and(|found| found == image);
        if !runs || pod.deleting || !pod.bound {
            continue;
        }
        // `None` is before every time. A clock that jumped back makes the pod young, not late.
        let from = pod.created.max(since).unwrap_or(now);
        match pod.ready {
            true => ready += 1,
            false if now.duration_since(from) > deadline => late.push(pod),
            false => young += 1,
        }
    }
    match late.iter().min_by_key(|pod| &pod.node) {
        Some(first) if late.len() >= ready + young => {
            Progress::Failed { node: first.node.clone(), messages: first.messages.clone() }
        }
        _ if young > 0 || ready == 0 => Progress::Waiting,
        _ => Progress::Good,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::fixtures::{live_daemon_set, pod};

    /// Pods on nodes n0, n1...: made so many seconds after the image was set, and ready or not; seen at `now` seconds.
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
        let image = &daemon_set.containers[0].image;
        progress(&pods, "driver", image, second(1000), Period::seconds(60), second(1000 + now))
    }

    fn failed_on(node: &str) -> Progress {
        let messages = vec!["driver: CrashLoopBackOff: no such device".to_owned()];
        Progress::Failed { node: node.to_owned(), messages }
    }

    #[test]
    fn the_first_pods_decide() {
        assert_eq!(at(10, &[]), Progress::Waiting);
        assert_eq!(at(60, &[(0, false)]), Progress::Waiting, "the deadline itself is in time");
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
            progress([&pod], "driver", &image, Timestamp::UNIX_EPOCH, Period::seconds(60), now)
        };
        assert_eq!(late(|_| ()), failed_on("n0"));
        assert_eq!(late(|pod| pod.bound = false), Progress::Waiting);
        assert_eq!(late(|pod| pod.deleting = true), Progress::Waiting);
        assert_eq!(late(|pod| drop(pod.images.insert("driver".into(), "x:1".into()))), Progress::Waiting);
    }
}
