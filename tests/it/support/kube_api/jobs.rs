//! The Job controller, for Jobs of one pod. Its objects and counters match a controller of Kubernetes 1.36.
//! Simplifications: no `parallelism`, no indexes, no failure policies, and no backoff between failed pods.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
};

use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use super::{
    events::EventText,
    pod_fate::text,
    restricted, scheduler,
    store::{Object, State},
};

/// State of the controllers, and the faults that a test injected.
pub struct Jobs {
    /// The engine, whose id labels this cluster's containers.
    pub engine: Arc<super::containers::Engine>,
    pub refusals: BTreeMap<u64, Refusal>,
    /// Scheduler messages by fault number.
    pub unschedulable: BTreeMap<u64, String>,
    /// Bytes of standard output after which an exec is cut.
    pub cuts: VecDeque<u64>,
    /// Disruptions by pod uid.
    pub disrupted: BTreeMap<String, NodeDisruption>,
    known: BTreeMap<String, Known>,
}

/// Reason for not admitting a pod.
pub enum Refusal {
    /// The message after `pods "x" is forbidden: `.
    Words(String),
    /// The name of a quota, and the number of pods that it allows in a namespace.
    Quota(String, usize),
}

/// A pod's involuntary end that its kubelet or the loss of its node causes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeDisruption {
    Evicted(String),
    NodeLost,
}

/// The controller's state of a Job.
#[derive(Default)]
struct Known {
    /// Success by pod uid; `None` before the pod's end.
    pods: BTreeMap<String, Option<bool>>,
    /// Pods that were deleted because the Job was suspended, which do not count as failed.
    spared: BTreeSet<String>,
    refused: u32,
    again: Option<Timestamp>,
}

impl Jobs {
    pub fn new(engine: Arc<super::containers::Engine>) -> Self {
        Self {
            engine,
            refusals: BTreeMap::new(),
            unschedulable: BTreeMap::new(),
            cuts: VecDeque::new(),
            disrupted: BTreeMap::new(),
            known: BTreeMap::new(),
        }
    }

    /// Revokes a fault. Refused pods are retried at once.
    pub fn take_back(&mut self, id: u64) {
        if self.refusals.remove(&id).is_some() {
            self.known.values_mut().for_each(|known| known.again = None);
        }
        self.unschedulable.remove(&id);
    }
}

/// Sets the selector and the labels that the server gives a new Job.
pub fn select_by_uid(job: &mut Value) {
    let (uid, name) = (job["metadata"]["uid"].clone(), job["metadata"]["name"].clone());
    job["spec"]["selector"] = json!({"matchLabels": {"batch.kubernetes.io/controller-uid": uid}});
    for (label, value) in [("controller-uid", uid), ("job-name", name)] {
        let labels = &mut job["spec"]["template"]["metadata"]["labels"];
        labels[format!("batch.kubernetes.io/{label}")] = value.clone();
        labels[label] = value;
    }
}

pub fn holds(object: &Value, condition: &str) -> bool {
    let conditions = object["status"]["conditions"].as_array().into_iter().flatten();
    conditions.into_iter().any(|given| given["type"] == condition && given["status"] == "True")
}

/// Returns a pod name that respects the API's length limit.
fn pod_name(job: &str) -> String {
    const LETTERS: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
    let base: String = job.chars().take(57).collect();
    let letters = (0..5).map(|_| char::from(LETTERS[fastrand::usize(..LETTERS.len())]));
    format!("{base}-{}", letters.collect::<String>())
}

fn after(since: &Value, seconds: &Value, now: Timestamp) -> bool {
    let since = since.as_str().and_then(|text| text.parse::<Timestamp>().ok());
    let due = since.zip(seconds.as_i64()).map(|(since, seconds)| since + SignedDuration::from_secs(seconds));
    due.is_some_and(|due| due <= now)
}

impl State {
    /// Advances the controller and the scheduler by one step.
    pub fn step_jobs(&mut self, now: Timestamp) {
        let kind = self.resource("jobs.batch");
        let all: Vec<Arc<Object>> = self.list(&kind, "").cloned().collect();
        for job in all {
            self.manage_job(&job, now);
        }
        self.schedule_pods();
    }

    /// Returns the pods of all Jobs.
    pub fn job_pods(&self) -> Vec<Arc<Object>> {
        let pods = self.resource("pods");
        let of_job = |pod: &&Arc<Object>| pod.labels.contains_key("batch.kubernetes.io/controller-uid");
        self.list(&pods, "").filter(of_job).cloned().collect()
    }

    fn pods_of_job(&self, uid: &str) -> Vec<(Arc<Object>, Value)> {
        let label = "batch.kubernetes.io/controller-uid";
        let owned = |pod: &Arc<Object>| pod.labels.get(label).is_some_and(|owner| owner == uid);
        self.job_pods().into_iter().filter(owned).map(|pod| (Arc::clone(&pod), pod.value())).collect()
    }

    fn manage_job(&mut self, object: &Arc<Object>, now: Timestamp) {
        let kind = self.resource("jobs.batch");
        let mut job = object.value();
        let pods = self.pods_of_job(&object.uid);
        if !job["metadata"]["deletionTimestamp"].is_null() {
            // Foreground deletion: the Job is deleted after its pods.
            if pods.is_empty() {
                self.remove(&kind, object);
            }
            for (pod, _) in &pods {
                self.terminate(pod, None);
            }
            return;
        }
        if holds(&job, "Complete") || holds(&job, "Failed") {
            let conditions = job["status"]["conditions"].as_array();
            let ended = &conditions.unwrap()[conditions.unwrap().len() - 1]["lastTransitionTime"];
            if after(ended, &job["spec"]["ttlSecondsAfterFinished"], now) {
                self.remove(&kind, object);
                for (pod, _) in &pods {
                    self.terminate(pod, None);
                }
            }
            return;
        }
        let suspended = job["spec"]["suspend"] == true;
        let (succeeded, failed) = self.count(object, &pods);
        let old = job["status"].clone();
        let status = &mut job["status"];
        if !status.is_object() {
            *status = json!({});
        }
        if suspended {
            status.as_object_mut().unwrap().remove("startTime");
            if !holds(&json!({"status": status}), "Suspended") {
                condition(status, "Suspended", "True", "JobSuspended", "Job suspended", now);
            }
        } else {
            if status["startTime"].is_null() {
                status["startTime"] = json!(text(now));
            }
            if holds(&json!({"status": status}), "Suspended") {
                condition(status, "Suspended", "False", "JobResumed", "Job resumed", now);
            }
        }
        let limit = job["spec"]["backoffLimit"].as_u64().unwrap_or(6);
        let overdue = after(&job["status"]["startTime"], &job["spec"]["activeDeadlineSeconds"], now);
        if !holds(&job, "FailureTarget") && succeeded == 0 {
            let (reason, message) = if failed as u64 > limit {
                ("BackoffLimitExceeded", "Job has reached the specified backoff limit")
            } else if overdue {
                ("DeadlineExceeded", "Job was active longer than specified deadline")
            } else {
                ("", "")
            };
            if !reason.is_empty() {
                condition(&mut job["status"], "FailureTarget", "True", reason, message, now);
                self.warn("Job", &job, EventText { by: "job-controller", reason, message });
            }
        }
        let failing = holds(&job, "FailureTarget");
        if failing || suspended {
            for (pod, value) in pods.iter().filter(|(_, pod)| !has_ended(pod)) {
                if value["metadata"]["deletionTimestamp"].is_null() {
                    if suspended {
                        let known = self.jobs.as_mut().unwrap().known.entry(object.uid.clone()).or_default();
                        known.pods.remove(&pod.uid);
                        known.spared.insert(pod.uid.clone());
                    }
                    self.terminate(pod, None);
                    let message = format!("Deleted pod: {}", pod.name);
                    let told =
                        EventText { by: "job-controller", reason: "SuccessfulDelete", message: &message };
                    self.tell("Job", &job, told);
                }
            }
        }
        let running = self.pods_of_job(&object.uid).iter().any(|(_, pod)| !has_ended(pod));
        if succeeded == 0 && !failing && !suspended && !running {
            self.make_pod(object, &job, now);
        }
        self.write_status(object, job, &old, (succeeded, failed), now);
    }

    /// Returns the numbers of succeeded and failed pods. A deleted pod, or one under deletion, has failed.
    fn count(&mut self, job: &Object, pods: &[(Arc<Object>, Value)]) -> (usize, usize) {
        let known = self.jobs.as_mut().unwrap().known.entry(job.uid.clone()).or_default();
        for (object, pod) in pods {
            let going = !pod["metadata"]["deletionTimestamp"].is_null();
            let ended = match pod["status"]["phase"].as_str() {
                _ if known.spared.contains(&object.uid) => continue,
                Some("Succeeded") => Some(true),
                Some("Failed") => Some(false),
                _ => going.then_some(false),
            };
            let remembered = known.pods.entry(object.uid.clone()).or_default();
            *remembered = remembered.or(ended);
        }
        let is_there = |uid: &String| pods.iter().any(|(object, _)| object.uid == *uid);
        for (uid, ended) in &mut known.pods {
            if ended.is_none() && !is_there(uid) {
                *ended = Some(false);
            }
        }
        let ended = |how: bool| known.pods.values().filter(|ended| **ended == Some(how)).count();
        (ended(true), ended(false))
    }

    fn write_status(
        &mut self,
        object: &Arc<Object>,
        mut job: Value,
        old: &Value,
        (succeeded, failed): (usize, usize),
        now: Timestamp,
    ) {
        let kind = self.resource("jobs.batch");
        let pods = self.pods_of_job(&object.uid);
        let going = |pod: &Value| !pod["metadata"]["deletionTimestamp"].is_null();
        let active = pods.iter().filter(|(_, pod)| !has_ended(pod) && !going(pod));
        let ready = active.clone().filter(|(_, pod)| super::daemon_sets::is_ready(pod)).count();
        let terminating = pods.iter().filter(|(_, pod)| going(pod)).count();
        let active = active.count();
        let status = &mut job["status"];
        status["ready"] = json!(ready);
        status["terminating"] = json!(terminating);
        status["uncountedTerminatedPods"] = json!({});
        for (field, number) in [("active", active), ("succeeded", succeeded), ("failed", failed)] {
            if number > 0 {
                status[field] = json!(number);
            } else {
                status.as_object_mut().unwrap().remove(field);
            }
        }
        let end = if succeeded > 0 {
            Some(("SuccessCriteriaMet", "Complete"))
        } else {
            (holds(&job, "FailureTarget") && active + terminating == 0).then_some(("FailureTarget", "Failed"))
        };
        let reached = ("CompletionsReached", "Reached expected number of succeeded pods");
        if succeeded > 0 && !holds(&job, "SuccessCriteriaMet") {
            condition(&mut job["status"], "SuccessCriteriaMet", "True", reached.0, reached.1, now);
        }
        if job["status"] == *old {
            return;
        }
        let object = self.replace(&kind, object, job.clone());
        // Like the real controller, set the final condition in a separate write.
        let Some((target, end)) = end else { return };
        let conditions = job["status"]["conditions"].as_array().unwrap();
        let first = conditions.iter().find(|given| given["type"] == target).unwrap().clone();
        let word = |field: &str| first[field].as_str().unwrap_or_default().to_owned();
        condition(&mut job["status"], end, "True", &word("reason"), &word("message"), now);
        if end == "Complete" {
            job["status"]["completionTime"] = json!(text(now));
            let told = EventText { by: "job-controller", reason: "Completed", message: "Job completed" };
            self.tell("Job", &job, told);
        }
        self.replace(&kind, &object, job);
    }

    fn make_pod(&mut self, object: &Object, job: &Value, now: Timestamp) {
        let known = self.jobs.as_mut().unwrap().known.entry(object.uid.clone()).or_default();
        if known.again.is_some_and(|again| again > now) {
            return;
        }
        let pod = new_pod(job);
        let name = pod["metadata"]["name"].as_str().unwrap().to_owned();
        if let Some(why) = self.refusal(&pod) {
            let message = format!("Error creating: pods \"{name}\" is forbidden: {why}");
            self.warn(
                "Job",
                job,
                EventText { by: "job-controller", reason: "FailedCreate", message: &message },
            );
            let known = self.jobs.as_mut().unwrap().known.entry(object.uid.clone()).or_default();
            let pause = SignedDuration::from_secs(1_i64 << known.refused.min(6));
            (known.refused, known.again) = (known.refused + 1, Some(now + pause));
            return;
        }
        let kind = self.resource("pods");
        let made = self.insert(&kind, pod);
        let known = self.jobs.as_mut().unwrap().known.entry(object.uid.clone()).or_default();
        known.pods.insert(made.uid.clone(), None);
        (known.refused, known.again) = (0, None);
        let message = format!("Created pod: {name}");
        self.tell(
            "Job",
            job,
            EventText { by: "job-controller", reason: "SuccessfulCreate", message: &message },
        );
    }

    /// Returns the message if admission refuses the pod.
    fn refusal(&self, pod: &Value) -> Option<String> {
        let namespace = pod["metadata"]["namespace"].as_str().unwrap_or_default();
        let namespaces = self.resource("namespaces");
        let labels = self.get(&namespaces, "", namespace).map(|object| object.labels.clone());
        let level = labels.and_then(|labels| labels.get("pod-security.kubernetes.io/enforce").cloned());
        if level.as_deref() == Some("restricted")
            && let Some(why) = restricted::refusal(&pod["spec"])
        {
            return Some(why);
        }
        let pods = self.resource("pods");
        let used = self.list(&pods, namespace).filter(|pod| !has_ended(&pod.value())).count();
        self.jobs.as_ref()?.refusals.values().find_map(|refusal| match refusal {
            Refusal::Words(why) => Some(why.clone()),
            Refusal::Quota(name, allowed) => (used >= *allowed).then(|| {
                format!(
                    "exceeded quota: {name}, requested: pods=1, used: pods={used}, limited: pods={allowed}"
                )
            }),
        })
    }
}

/// Returns whether a pod is in a final phase.
pub fn has_ended(pod: &Value) -> bool {
    matches!(pod["status"]["phase"].as_str(), Some("Succeeded" | "Failed"))
}

fn condition(status: &mut Value, kind: &str, held: &str, reason: &str, message: &str, now: Timestamp) {
    let new = json!({
        "type": kind, "status": held, "reason": reason, "message": message,
        "lastProbeTime": text(now), "lastTransitionTime": text(now),
    });
    if !status["conditions"].is_array() {
        status["conditions"] = json!([]);
    }
    let conditions = status["conditions"].as_array_mut().unwrap();
    conditions.retain(|given| given["type"] != kind);
    conditions.push(new);
}

fn new_pod(job: &Value) -> Value {
    let metadata = &job["metadata"];
    let template = &job["spec"]["template"];
    let name = metadata["name"].as_str().unwrap();
    let mut spec = template["spec"].clone();
    spec["serviceAccountName"] = match &spec["serviceAccountName"] {
        Value::Null => json!("default"),
        given => given.clone(),
    };
    for container in spec["containers"].as_array_mut().into_iter().flatten() {
        // The request of a resource defaults to its limit.
        let limits = container["resources"]["limits"].clone();
        for (resource, limit) in limits.as_object().into_iter().flatten() {
            if container["resources"]["requests"][resource].is_null() {
                container["resources"]["requests"][resource] = limit.clone();
            }
        }
    }
    let mut pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": pod_name(name), "generateName": format!("{name}-"), "namespace": metadata["namespace"],
            "labels": template["metadata"]["labels"],
            "finalizers": ["batch.kubernetes.io/job-tracking"],
            "ownerReferences": [{
                "apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": metadata["uid"],
                "controller": true, "blockOwnerDeletion": true,
            }],
        },
        "status": {"phase": "Pending", "qosClass": scheduler::quality(&spec)},
        "spec": spec,
    });
    if let given @ Value::Object(_) = &template["metadata"]["annotations"] {
        pod["metadata"]["annotations"] = given.clone();
    }
    pod
}
