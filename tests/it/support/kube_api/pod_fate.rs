//! The status that kubelets report for a pod over time.
//!
//! The crash loop was compared with a kubelet of Kubernetes 1.36 that runs a container for 0.3 s without a readiness probe
//! (`kubectl get pods -w -o json`). The states follow in the same order: ready, terminated, ready again at once, terminated,
//! `CrashLoopBackOff` for 10 s, ready, terminated, 20 s, and so on. Restart counts, last states and changes of conditions
//! match, too.
//!
//! Simplifications: a real kubelet notices an end up to a second late, and the pod stays ready during that time. While the
//! image is pulled, a real pod is unready for seconds. Real states contain the container's ID.

use std::{collections::BTreeMap, time::Duration};

use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

/// A pod that a kubelet starts.
#[derive(Clone, Debug)]
pub struct Start {
    pub daemon_set: String,
    /// Images of the containers, init containers first.
    pub images: Vec<String>,
    pub node: String,
    /// `status.nodeInfo.kernelVersion` of the node.
    pub kernel: String,
}

/// The fate of a started pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    Ready,
    /// The pod never becomes ready, with the waiting container's reason and message, such as `ImagePullBackOff`.
    NotReady(String, String),
    /// The pod's containers end repeatedly.
    Crashes(Crash),
}

/// A crash loop of containers without a readiness probe. Each run is ready for its whole duration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Crash {
    /// Duration of each run.
    pub after: Duration,
    pub exit_code: i32,
    /// The container's termination message.
    pub message: String,
    /// The first backoff, which doubles each time. A kubelet's is ten seconds.
    pub back_off: Duration,
}

/// One run of a container, in time since the pod's start.
#[derive(Clone, Copy, Debug)]
struct Run {
    /// Number of earlier runs.
    number: u32,
    from: Duration,
    to: Duration,
}

/// State of a container at a point in time.
#[derive(Clone, Copy, Debug)]
enum Moment {
    Running(Run),
    /// Just ended.
    Terminated(Run),
    /// Waiting for its backoff.
    BackOff(Run),
}

impl Crash {
    /// Returns a crash that happens right after the start.
    pub fn at_once(message: &str) -> Self {
        Self::after(Duration::from_millis(200), message)
    }

    pub fn after(after: Duration, message: &str) -> Self {
        Self { after, exit_code: 1, message: message.to_owned(), back_off: Duration::from_secs(1) }
    }

    fn run(&self, number: u32, from: Duration) -> Run {
        Run { number, from, to: from + self.after }
    }

    /// Returns the pause after a run. The first restart has no backoff.
    fn pause(&self, number: u32) -> Duration {
        match number.checked_sub(1) {
            Some(doubled) => self.back_off * 2_u32.saturating_pow(doubled),
            None => self.seen_ended(),
        }
    }

    /// Returns how long a container shows as terminated before its restart or backoff.
    fn seen_ended(&self) -> Duration {
        self.back_off / 10
    }

    /// Returns the state `age` after the first start, and the previous run.
    fn at(&self, age: Duration) -> (Moment, Option<Run>) {
        let (mut run, mut before) = (self.run(0, Duration::ZERO), None);
        loop {
            let again = run.to + self.pause(run.number);
            let moment = if age < run.to {
                Some(Moment::Running(run))
            } else if age < run.to + self.seen_ended() {
                Some(Moment::Terminated(run))
            } else {
                (age < again).then_some(Moment::BackOff(run))
            };
            if let Some(moment) = moment {
                return (moment, before);
            }
            (run, before) = (self.run(run.number + 1, again), Some(run));
        }
    }
}

/// Start times of pods on nodes with a kubelet.
#[derive(Default)]
pub struct Clock {
    started: BTreeMap<String, Timestamp>,
}

impl Clock {
    /// Returns the pod's current status according to the kubelet.
    pub fn status(&mut self, pod: &Value, fate: &Fate) -> Value {
        let now = Timestamp::now();
        let uid = pod["metadata"]["uid"].as_str().unwrap_or_default().to_owned();
        let started = *self.started.entry(uid).or_insert(now);
        status(pod, fate, started, now)
    }
}

/// Formats a time like the API, in whole seconds.
pub fn text(time: Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

fn status(pod: &Value, fate: &Fate, started: Timestamp, now: Timestamp) -> Value {
    let at = |age: Duration| text(started + SignedDuration::try_from(age).unwrap());
    let age = Duration::try_from(now.duration_since(started)).unwrap_or_default();
    let containers = pod["spec"]["containers"].as_array().cloned().unwrap_or_default();
    let names: Vec<&str> = containers.iter().filter_map(|container| container["name"].as_str()).collect();
    let one = |container: &Value| {
        let (ready, restarts, state, last) = match fate {
            Fate::Ready => (true, 0, json!({"running": {"startedAt": text(started)}}), json!({})),
            Fate::NotReady(reason, message) => {
                (false, 1, json!({"waiting": {"reason": reason, "message": message}}), json!({}))
            }
            Fate::Crashes(crash) => {
                let ended = |run: Run| {
                    json!({"terminated": {
                        "exitCode": crash.exit_code, "reason": "Error", "message": crash.message,
                        "startedAt": at(run.from), "finishedAt": at(run.to),
                    }})
                };
                let (moment, before) = crash.at(age);
                let before = before.map_or_else(|| json!({}), ended);
                match moment {
                    Moment::Running(run) => {
                        (true, run.number, json!({"running": {"startedAt": at(run.from)}}), before)
                    }
                    Moment::Terminated(run) => (false, run.number, ended(run), before),
                    Moment::BackOff(run) => {
                        let (name, pod) = (container["name"].as_str().unwrap_or_default(), &pod["metadata"]);
                        let message = format!(
                            "back-off {}s restarting failed container={name} pod={}_{}({})",
                            crash.pause(run.number).as_secs(),
                            pod["name"].as_str().unwrap_or_default(),
                            pod["namespace"].as_str().unwrap_or_default(),
                            pod["uid"].as_str().unwrap_or_default(),
                        );
                        let waiting = json!({"waiting": {"reason": "CrashLoopBackOff", "message": message}});
                        (false, run.number, waiting, ended(run))
                    }
                }
            }
        };
        json!({
            "name": container["name"], "image": container["image"], "ready": ready, "started": ready,
            "restartCount": restarts, "state": state, "lastState": last,
        })
    };
    let statuses: Vec<Value> = containers.iter().map(one).collect();
    let ready = statuses.iter().all(|status| status["ready"] == true);
    let condition = |kind: &str, holds: bool| {
        let held = if holds { "True" } else { "False" };
        let old = pod["status"]["conditions"].as_array().into_iter().flatten();
        let same = old.into_iter().find(|old| old["type"] == kind && old["status"] == held);
        let since = same.map_or_else(|| json!(text(now)), |old| old["lastTransitionTime"].clone());
        let mut condition = json!({"type": kind, "status": held, "lastTransitionTime": since});
        if !holds {
            condition["reason"] = json!("ContainersNotReady");
            condition["message"] = json!(format!("containers with unready status: [{}]", names.join(" ")));
        }
        condition
    };
    json!({
        "phase": "Running",
        "startTime": text(started),
        "conditions": [
            condition("PodScheduled", true),
            condition("Initialized", true),
            condition("ContainersReady", ready),
            condition("Ready", ready),
        ],
        "containerStatuses": statuses,
    })
}

#[test]
fn a_crash_loop_shows_the_moments_that_a_kubelet_shows() {
    let pod = json!({
        "metadata": {"name": "p", "namespace": "s", "uid": "u"},
        "spec": {"containers": [{"name": "driver", "image": "i"}]},
    });
    let fate = Fate::Crashes(Crash {
        after: Duration::from_millis(500),
        back_off: Duration::from_secs(10),
        ..Crash::at_once("no such device")
    });
    let started = Timestamp::UNIX_EPOCH;
    let seen = |milliseconds: i64| {
        let status = status(&pod, &fate, started, started + SignedDuration::from_millis(milliseconds));
        let container = &status["containerStatuses"][0];
        let state = container["state"].as_object().unwrap().keys().next().unwrap().clone();
        (state, status["conditions"][3]["status"] == "True", container["restartCount"].as_u64().unwrap())
    };
    let said = |state: &str, ready: bool, restarts: u64| (state.to_owned(), ready, restarts);
    assert_eq!(seen(0), said("running", true, 0));
    assert_eq!(seen(500), said("terminated", false, 0));
    assert_eq!(seen(1_500), said("running", true, 1), "the first restart has no backoff");
    assert_eq!(seen(2_100), said("terminated", false, 1));
    assert_eq!(seen(3_100), said("waiting", false, 1));
    assert_eq!(seen(12_100), said("running", true, 2));
    assert_eq!(seen(14_000), said("waiting", false, 2));
    assert_eq!(seen(32_400), said("waiting", false, 2), "the second backoff is twice as long");
    assert_eq!(seen(32_600), said("running", true, 3));
}
