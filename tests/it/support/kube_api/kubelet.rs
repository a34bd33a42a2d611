//! What kubelets say of a pod in the course of time.
//!
//! A crash loop was compared with what a kubelet of Kubernetes 1.36 says of a container that runs for 0.3 s without a readiness
//! probe (`kubectl get pods -w -o json`): the same states in the same order (ready, terminated, ready again at once, terminated,
//! `CrashLoopBackOff` for 10 s, ready, terminated, 20 s, ...), restart counts, last states and changes of conditions. Where it is
//! simpler: a real kubelet sees an end up to a second late, and the pod is ready for so much longer; a pod is not ready for seconds
//! while its image is pulled; states have the container's ID.

use std::{collections::BTreeMap, time::Duration};

use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

/// What a kubelet starts.
#[derive(Clone, Debug)]
pub struct Start {
    pub daemon_set: String,
    /// Of the containers, init containers first.
    pub images: Vec<String>,
    pub node: String,
    /// `status.nodeInfo.kernelVersion` of the node.
    pub kernel: String,
}

/// What becomes of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    Ready,
    /// It never gets ready; with the waiting container's reason and message, such as `ImagePullBackOff`.
    NotReady(String, String),
    /// Its containers end by themselves, again and again.
    Crashes(Crash),
}

/// How containers without a readiness probe end. Each start is ready from its first moment to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Crash {
    /// How long each start runs.
    pub after: Duration,
    pub exit_code: i32,
    /// What the container has left in its termination log.
    pub message: String,
    /// The first pause; each further one is twice as long. A kubelet's is ten seconds.
    pub back_off: Duration,
}

/// One start of a container, in times since the pod's first.
#[derive(Clone, Copy, Debug)]
struct Run {
    /// How many were before it.
    number: u32,
    from: Duration,
    to: Duration,
}

/// Where a container stands.
#[derive(Clone, Copy, Debug)]
enum Moment {
    Running(Run),
    /// Just ended.
    Terminated(Run),
    /// Ended a while ago.
    BackOff(Run),
}

impl Crash {
    /// It ends as soon as it has begun.
    pub fn at_once(message: &str) -> Self {
        Self::after(Duration::from_millis(200), message)
    }

    pub fn after(after: Duration, message: &str) -> Self {
        Self { after, exit_code: 1, message: message.to_owned(), back_off: Duration::from_secs(1) }
    }

    fn run(&self, number: u32, from: Duration) -> Run {
        Run { number, from, to: from + self.after }
    }

    /// The first restart comes at once, without a pause.
    fn pause(&self, number: u32) -> Duration {
        match number.checked_sub(1) {
            Some(doubled) => self.back_off * 2_u32.saturating_pow(doubled),
            None => self.seen_ended(),
        }
    }

    /// How long an end is seen before the kubelet has dealt with it.
    fn seen_ended(&self) -> Duration {
        self.back_off / 10
    }

    /// So long after the first start; with the run before this one.
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

/// When the pods were started whose nodes have a kubelet.
#[derive(Default)]
pub struct Clock {
    started: BTreeMap<String, Timestamp>,
}

impl Clock {
    /// What the kubelet says of a pod now.
    pub fn status(&mut self, pod: &Value, fate: &Fate) -> Value {
        let now = Timestamp::now();
        let uid = pod["metadata"]["uid"].as_str().unwrap_or_default().to_owned();
        let started = *self.started.entry(uid).or_insert(now);
        status(pod, fate, started, now)
    }
}

/// As the API has it: whole seconds.
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
    assert_eq!(seen(1_500), said("running", true, 1), "the first restart comes at once");
    assert_eq!(seen(2_100), said("terminated", false, 1));
    assert_eq!(seen(3_100), said("waiting", false, 1));
    assert_eq!(seen(12_100), said("running", true, 2));
    assert_eq!(seen(14_000), said("waiting", false, 2));
    assert_eq!(seen(32_400), said("waiting", false, 2), "the second pause is twice as long");
    assert_eq!(seen(32_600), said("running", true, 3));
}
