//! Converts Pods and Jobs from the API server to facts.

use std::collections::BTreeMap;

use farrier_core::plan::{Holder, JOB_NAME, JobState, PodFacts, PullFailure, WorkloadFacts};
use jiff::Timestamp;
use k8s_openapi::{
    api::core::v1::{ContainerState, ContainerStateTerminated, ContainerStateWaiting, PodCondition},
    apimachinery::pkg::apis::meta::v1::{ManagedFieldsEntry, ObjectMeta},
};

use super::{
    api_fields::{Container, ContainerStatus, JobObject, JobStatus, PodObject, PodSpec, PodStatus},
    errors::one_line,
    facts::version,
    object::{Object, ObjectFacts, ObjectKey},
};

/// Texts of kubelets, containerd and CRI-O for a registry that does not answer or is overloaded, in lower case.
const OUTAGES: [&str; 20] = [
    "connection refused",
    "connection reset",
    "timeout",
    "time-out",
    "timed out",
    "deadline exceeded",
    "context canceled",
    "no route to host",
    "network is unreachable",
    "server misbehaving",
    "temporary failure in name resolution",
    ": try again",
    ": eof",
    "unexpected eof",
    "internal server error",
    "bad gateway",
    "unavailable",
    "too many requests",
    "toomanyrequests",
    "pull qps exceeded",
];

/// Returns a pod's facts. `daemon_set` is empty if no DaemonSet controls the pod.
pub(super) fn pod(pod: PodObject) -> Object {
    let PodObject { types: _, metadata, spec, status } = pod;
    let status = status.unwrap_or_default();
    let version = version(&metadata);
    let stable_since = stable_since(&metadata, &status);
    let mut owners = metadata.owner_references.into_iter().flatten();
    let owner = owners.find(|owner| owner.controller == Some(true) && owner.kind == "DaemonSet");
    let bound = spec.node_name.as_ref().is_some_and(|name| !name.is_empty());
    let node = if bound { spec.node_name.clone() } else { intended_node(&spec) };
    let facts = PodFacts {
        version: version.clone(),
        daemon_set: owner.map(|owner| owner.uid).unwrap_or_default(),
        node: node.unwrap_or_default(),
        bound,
        images: images(&spec),
        probed: spec.probed_containers().map(|container| container.name.clone()).collect(),
        pull_secrets: spec.image_pull_secrets.as_ref().map_or(0, Vec::len),
        ready: condition(&status, "Ready", "True").is_some(),
        stable_since,
        created: metadata.creation_timestamp.map(|time| time.0),
        deleting: metadata.deletion_timestamp.is_some(),
        messages: messages(&status),
        pull_failure: container_statuses(&status).find_map(pull_failure),
        namespace: metadata.namespace.unwrap_or_default(),
        name: metadata.name.unwrap_or_default(),
    };
    Object { version, facts: ObjectFacts::Pod(Box::new(facts)) }
}

/// Returns the facts of a pod that an upgrade may evict from its node. farrier's own pod (`own_pod`) is never evicted: if its
/// replacement could run only on this node, no farrier would be left to uncordon the node.
pub(super) fn workload(pod: PodObject, own_pod: Option<&ObjectKey>) -> Object {
    let PodObject { types: _, metadata, spec, status } = pod;
    let version = version(&metadata);
    let is_of_job = metadata.labels.as_ref().is_some_and(|labels| labels.contains_key(JOB_NAME));
    let is_own = own_pod.is_some_and(|(namespace, name)| {
        metadata.namespace.as_ref() == Some(namespace) && metadata.name.as_ref() == Some(name)
    });
    let is_mirror =
        metadata.annotations.iter().flatten().any(|(key, _)| key == "kubernetes.io/config.mirror");
    let belongs_to_node =
        metadata.owner_references.iter().flatten().any(|owner| {
            owner.controller == Some(true) && matches!(owner.kind.as_str(), "DaemonSet" | "Node")
        });
    let requests = spec.all_containers().flat_map(Container::requests).filter(|name| name.contains('/'));
    let facts = WorkloadFacts {
        uid: version.uid.clone(),
        stays: is_own || is_mirror || belongs_to_node,
        requests: requests.cloned().collect(),
        holders: status.filter(|_| is_of_job).map(|status| holders(&status)).unwrap_or_default(),
        node: spec.node_name.unwrap_or_default(),
        labels: metadata.labels.unwrap_or_default(),
        deleting: metadata.deletion_timestamp.is_some(),
        namespace: metadata.namespace.unwrap_or_default(),
        name: metadata.name.unwrap_or_default(),
    };
    Object { version, facts: ObjectFacts::Workload(Box::new(facts)) }
}

/// Returns the device users that an unload forecast found in its latest check, from the termination messages of its pod.
fn holders(status: &PodStatus) -> Vec<Holder> {
    let terminations = status.container_statuses.iter().flatten().filter_map(last_termination);
    let messages = terminations.filter_map(|terminated| terminated.message);
    let holders = messages.flat_map(|message| driver_entrypoint::holders::parse(&message));
    holders.map(|holder| Holder { pod: holder.pod, description: one_line(&holder.what) }).collect()
}

/// Returns how the container last ended. Between two restarts, this is its current state.
fn last_termination(status: &ContainerStatus) -> Option<ContainerStateTerminated> {
    let terminated = |state: &Option<ContainerState>| state.as_ref()?.terminated.clone();
    terminated(&status.state).or_else(|| terminated(&status.last_state))
}

/// Returns the state of a Job that checks a node.
pub(super) fn check(job: JobObject) -> Object {
    let JobObject { types: _, metadata, spec: _, status } = job;
    let JobStatus { conditions, active, failed } = status.unwrap_or_default();
    let conditions = conditions.unwrap_or_default();
    let has_pod = [active, failed].into_iter().flatten().any(|pods| pods > 0);
    let find_true = |kind: &str| conditions.iter().find(|c| c.kind == kind && c.status == "True");
    let state = match (find_true("Complete"), find_true("Failed")) {
        (_, Some(failed)) => JobState::Failed(one_line(&failed.message)),
        (Some(_), None) => JobState::Succeeded,
        (None, None) if has_pod => JobState::Running,
        (None, None) => JobState::WithoutPod,
    };
    let key = (metadata.namespace.clone().unwrap_or_default(), metadata.name.clone().unwrap_or_default());
    Object { version: version(&metadata), facts: ObjectFacts::Check(key, state) }
}

fn images(spec: &PodSpec) -> BTreeMap<String, String> {
    let all = spec.all_containers();
    all.map(|container| (container.name.clone(), container.image.clone().unwrap_or_default())).collect()
}

/// Returns the node for which the DaemonSet controller created the pod, as named by the pod's node affinity.
fn intended_node(spec: &PodSpec) -> Option<String> {
    let required = spec.required_nodes()?;
    let mut fields = required.node_selector_terms.iter().flat_map(|term| term.match_fields.iter().flatten());
    let field = fields.find(|field| field.key == "metadata.name" && field.operator == "In")?;
    field.values.as_ref()?.first().cloned()
}

/// Returns a condition if it has this status.
fn condition<'s>(status: &'s PodStatus, kind: &str, value: &str) -> Option<&'s PodCondition> {
    let mut conditions = status.conditions.iter().flatten();
    conditions.find(|condition| condition.type_ == kind && condition.status == value)
}

/// Returns the time since which the pod has been ready without a container start: the API server's time of the kubelet's last
/// report about the containers, because the node's clock may be wrong. Without such a time, the node's times. There the
/// condition alone is not enough: two transitions within the same second look like none.
fn stable_since(metadata: &ObjectMeta, status: &PodStatus) -> Option<Timestamp> {
    let ready = condition(status, "Ready", "True")?.last_transition_time.as_ref();
    let reported = |entry: &ManagedFieldsEntry| {
        entry.fields_v1.as_ref()?.0.pointer("/f:status/f:containerStatuses")?;
        Some(entry.time.as_ref()?.0)
    };
    if let Some(reported) = metadata.managed_fields.iter().flatten().filter_map(reported).max() {
        return Some(reported);
    }
    let running = |status: &ContainerStatus| status.state.as_ref()?.running.as_ref()?.started_at.clone();
    let starts = status.container_statuses.iter().flatten().filter_map(running);
    starts.chain(ready.cloned()).map(|time| time.0).max()
}

/// Returns the status of each container, the init containers first.
fn container_statuses(status: &PodStatus) -> impl Iterator<Item = &ContainerStatus> {
    status.init_container_statuses.iter().chain(&status.container_statuses).flatten()
}

/// Returns the reason why a container's image is not on the node. Before Kubernetes 1.32, only `ErrImagePull`, which lasts for
/// seconds after each attempt, has the cause.
fn pull_failure(status: &ContainerStatus) -> Option<PullFailure> {
    let ContainerStateWaiting { reason, message } = status.state.as_ref()?.waiting.as_ref()?;
    if !matches!(reason.as_deref()?, "ErrImagePull" | "RegistryUnavailable" | "ImagePullBackOff") {
        return None;
    }
    let message = message.as_deref().unwrap_or_default().to_ascii_lowercase();
    let is_outage = OUTAGES.iter().any(|outage| message.contains(outage));
    Some(if is_outage { PullFailure::Unanswered } else { PullFailure::Refused })
}

/// Returns the reasons why the pod's containers do not run.
fn messages(status: &PodStatus) -> Vec<String> {
    let containers = container_statuses(status).flat_map(container_messages);
    let unscheduled = condition(status, "PodScheduled", "False").and_then(|c| c.message.as_ref());
    let unscheduled =
        unscheduled.filter(|message| !message.is_empty()).map(|message| format!("not scheduled: {message}"));
    let pod = status.message.clone().filter(|message| !message.is_empty());
    containers.chain(unscheduled).chain(pod).map(|message| one_line(&message)).collect()
}

fn container_messages(status: &ContainerStatus) -> impl Iterator<Item = String> {
    let waiting = status.state.as_ref().and_then(|state| state.waiting.clone());
    let waiting = waiting.and_then(|ContainerStateWaiting { reason, message }| {
        describe(&status.name, reason.as_deref(), None, message.as_deref())
    });
    let ended = last_termination(status).and_then(|terminated| {
        let ContainerStateTerminated { reason, exit_code, message, .. } = terminated;
        describe(&status.name, reason.as_deref(), Some(exit_code), message.as_deref())
    });
    let restarts = match status.restart_count {
        0 => None,
        1 => Some(format!("{}: restarted once", status.name)),
        times => Some(format!("{}: restarted {times} times", status.name)),
    };
    // Termination messages come first, because short displays show only the beginning.
    ended.into_iter().chain(restarts).chain(waiting)
}

/// Describes a container state. Returns `None` for a harmless state: a container that is being created or that exited
/// successfully.
fn describe(
    container: &str,
    reason: Option<&str>,
    exit_code: Option<i32>,
    message: Option<&str>,
) -> Option<String> {
    let harmless = [Some("ContainerCreating"), Some("PodInitializing"), Some("Completed")].contains(&reason);
    if exit_code == Some(0) || harmless {
        return None;
    }
    let code = exit_code.map(|code| format!("exit code {code}"));
    let parts = [reason, code.as_deref(), message].into_iter().flatten().filter(|part| !part.is_empty());
    let parts: Vec<&str> = parts.collect();
    (!parts.is_empty()).then(|| format!("{container}: {}", parts.join(": ")))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn facts(spec: &Value, status: &Value) -> PodFacts {
        let found: PodObject = serde_json::from_value(json!({
            "metadata": {
                "name": "p", "namespace": "s", "uid": "u", "resourceVersion": "1",
                "creationTimestamp": "2026-01-02T03:04:05Z",
                "ownerReferences": [
                    {"kind": "Node", "name": "x", "uid": "no", "apiVersion": "v1"},
                    {"kind": "DaemonSet", "name": "d", "uid": "ds", "apiVersion": "apps/v1", "controller": true},
                ],
            },
            "spec": spec, "status": status,
        }))
        .unwrap();
        let ObjectFacts::Pod(facts) = pod(found).facts else { panic!("no pod") };
        *facts
    }

    #[test]
    fn a_pod_has_its_bound_or_its_intended_node() {
        let containers = json!([{"name": "c", "image": "i:1"}]);
        let bound = facts(&json!({"nodeName": "n1", "containers": containers}), &json!({}));
        assert_eq!((bound.node.as_str(), bound.bound, bound.daemon_set.as_str()), ("n1", true, "ds"));
        assert_eq!(bound.images, [("c".to_owned(), "i:1".to_owned())].into());
        let affinity = json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchFields": [
                {"key": "metadata.name", "operator": "In", "values": ["n2"]}]}]}}});
        let pending = facts(&json!({"affinity": affinity, "containers": containers}), &json!({}));
        assert_eq!((pending.node.as_str(), pending.bound), ("n2", false));
    }

    #[test]
    fn a_ready_pod_says_more_of_containers_with_a_probe_and_of_init_containers_that_end() {
        let exec = json!({"exec": {"command": ["true"]}});
        let found = facts(
            &json!({
                "initContainers": [
                    {"name": "ends"},
                    {"name": "sidecar", "restartPolicy": "Always"},
                    {"name": "probed-sidecar", "restartPolicy": "Always", "startupProbe": exec},
                ],
                "containers": [
                    {"name": "plain", "livenessProbe": exec},
                    {"name": "ready", "readinessProbe": exec},
                    {"name": "started", "startupProbe": exec},
                ],
            }),
            &json!({}),
        );
        assert_eq!(found.probed, ["ends", "probed-sidecar", "ready", "started"]);
    }

    #[test]
    fn messages_name_why_a_pod_does_not_run() {
        let status = json!({
            "conditions": [
                {"type": "Ready", "status": "False"},
                {"type": "PodScheduled", "status": "False", "message": "0/3 nodes fit"},
            ],
            "initContainerStatuses": [{"name": "i", "state": {"terminated": {"reason": "Completed", "exitCode": 0}}}],
            "containerStatuses": [
                {"name": "a", "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
                 "lastState": {"terminated": {"reason": "Error", "exitCode": 3, "message": "no\ndevice\u{1b}[0m"}}},
                {"name": "b", "state": {"waiting": {"reason": "ContainerCreating"}}},
            ],
        });
        let failing = facts(&json!({}), &status);
        assert!(!failing.ready);
        assert_eq!(
            failing.messages,
            [
                "a: Error: exit code 3: no device [0m",
                "a: CrashLoopBackOff: back-off",
                "not scheduled: 0/3 nodes fit",
            ]
        );
        let ready = facts(&json!({}), &json!({"conditions": [{"type": "Ready", "status": "True"}]}));
        assert!(ready.ready && ready.messages.is_empty());
    }

    #[test]
    fn a_drain_evicts_pods_that_do_not_belong_to_the_node() {
        let facts = |metadata: Value| {
            let container =
                json!({"name": "c", "resources": {"requests": {"cpu": "1", "nvidia.com/gpu": "2"}}});
            let found = json!({"metadata": metadata, "spec": {"nodeName": "n", "initContainers": null, "containers": [container]}});
            let own = ("s".to_owned(), "own".to_owned());
            let found = workload(serde_json::from_value(found).unwrap(), Some(&own));
            let ObjectFacts::Workload(facts) = found.facts else { panic!() };
            *facts
        };
        let owned = |kind: &str| {
            let owner =
                json!({"kind": kind, "name": "x", "uid": "o", "apiVersion": "v1", "controller": true});
            json!({"name": "p", "namespace": "s", "uid": "u", "labels": {"a": "b"}, "ownerReferences": [owner]})
        };
        let job = facts(owned("Job"));
        assert_eq!((job.node.as_str(), job.uid.as_str(), &job.labels["a"]), ("n", "u", &"b".to_owned()));
        assert_eq!(job.requests, ["nvidia.com/gpu".to_owned()].into());
        assert!(!job.stays && facts(owned("DaemonSet")).stays && facts(owned("Node")).stays);
        assert!(!facts(json!({"name": "bare"})).stays);
        assert!(facts(json!({"name": "own", "namespace": "s"})).stays, "farrier must uncordon the node");
        assert!(!facts(json!({"name": "own", "namespace": "another"})).stays);
        assert!(facts(json!({"name": "m", "annotations": {"kubernetes.io/config.mirror": "h"}})).stays);
    }

    /// The messages have the format of the program on the node. Between two checks, the container waits for a restart.
    #[test]
    fn the_holders_of_a_driver_are_read_from_termination_messages() {
        let holder = |pod: Option<&str>, what: &str| (pod.map(str::to_owned), what.to_owned());
        let all = [holder(Some("u-1"), "nvidia: used by process 12"), holder(None, "nvidia: 2 references")];
        let written = all.clone().map(|(pod, what)| driver_entrypoint::holders::Holder { pod, what });
        let message = driver_entrypoint::holders::to_text(&written);
        let ended = json!({"terminated": {"exitCode": 1, "message": message}});
        for (state, last) in
            [(ended.clone(), json!({})), (json!({"waiting": {"reason": "CrashLoopBackOff"}}), ended)]
        {
            let container = json!({"name": "forecast", "state": state, "lastState": last});
            let read = |labels: Value| {
                let found = json!({"metadata": {"name": "f", "labels": labels}, "spec": {}, "status": {"containerStatuses": [container]}});
                let found = workload(serde_json::from_value(found).unwrap(), None);
                let ObjectFacts::Workload(facts) = found.facts else { panic!() };
                facts.holders.into_iter().map(|holder| (holder.pod, holder.description)).collect::<Vec<_>>()
            };
            assert_eq!(read(json!({JOB_NAME: "farrier-forecast-0a1b2c3d"})), all);
            assert_eq!(read(json!({})), []);
        }
    }

    #[test]
    fn conditions_of_a_job_become_its_state() {
        for (status, wanted) in [
            (json!(null), JobState::WithoutPod),
            (json!({"conditions": [{"type": "Suspended", "status": "True"}]}), JobState::WithoutPod),
            (json!({"active": 1}), JobState::Running),
            (
                json!({"failed": 1, "conditions": [{"type": "Complete", "status": "False"}]}),
                JobState::Running,
            ),
            (json!({"conditions": [{"type": "Complete", "status": "True"}]}), JobState::Succeeded),
            (
                json!({"failed": 1, "conditions": [{"type": "Failed", "status": "True", "message": "too\noften"}]}),
                JobState::Failed("too often".to_owned()),
            ),
        ] {
            let job = json!({"metadata": {"name": "j", "namespace": "s"}, "spec": {}, "status": status});
            let ObjectFacts::Check(key, state) = check(serde_json::from_value(job).unwrap()).facts else {
                panic!()
            };
            assert_eq!((key.1.as_str(), state), ("j", wanted));
        }
    }

    /// Texts of kubelets, containerd and CRI-O.
    #[test]
    fn an_outage_of_the_registry_is_no_refusal() {
        let pull = |reason: &str, message: &str| {
            let state = json!({"waiting": {"reason": reason, "message": message}});
            let status = json!({"containerStatuses": [{"name": "a", "state": state}]});
            facts(&json!({}), &status).pull_failure
        };
        for outage in [
            r#"failed to resolve reference "r/i@sha256:1": failed to do request: Head "https://r/v2/i/manifests/1": dial tcp 10.0.0.1:443: connect: connection refused"#,
            r#"failed to resolve reference "r/i@sha256:1": failed to do request: Head "https://r/v2/i/manifests/1": dial tcp: lookup r: Try again"#,
            r#"failed to resolve reference "r/i@sha256:1": unexpected status from HEAD request to https://r/v2/i/manifests/1: 503 Service Unavailable"#,
            "failed to copy: httpReadSeeker: failed open: unexpected status from GET request to https://r/v2/i/blobs/1: 504 Gateway Time-out",
            r#"failed to resolve reference "r/i@sha256:1": unexpected status from HEAD request to https://r/v2/i/manifests/1: 429 Too Many Requests"#,
            r#"initializing source docker://r/i@sha256:1: pinging container registry r: Get "https://r/v2/": net/http: TLS handshake timeout"#,
            r#"initializing source docker://r/i@sha256:1: pinging container registry r: Get "https://r/v2/": dial tcp 10.0.0.1:443: connect: no route to host"#,
            "reading manifest sha256:1 in r/i: received unexpected HTTP status: 500 Internal Server Error",
            "image pull failed for r/i@sha256:1 because the registry is unavailable: pinging container registry r",
            "pull QPS exceeded",
        ] {
            let back_off = format!(r#"Back-off pulling image "r/i@sha256:1": ErrImagePull: {outage}"#);
            assert_eq!(pull("ErrImagePull", outage), Some(PullFailure::Unanswered), "{outage}");
            assert_eq!(pull("ImagePullBackOff", &back_off), Some(PullFailure::Unanswered), "{outage}");
        }
        for refusal in [
            r#"failed to resolve reference "r/i@sha256:1": r/i@sha256:1: not found"#,
            r#"failed to resolve reference "r/i@sha256:1": pull access denied, repository does not exist or may require authorization"#,
            r#"failed to resolve reference "r/i@sha256:1": unexpected status from HEAD request to https://r/v2/i/manifests/1: 403 Forbidden: denied: Your authorization token has expired. Reauthenticate and try again."#,
            r#"failed to resolve reference "r/i@sha256:1": failed to do request: Head "https://r/v2/i/manifests/1": tls: failed to verify certificate: x509: certificate signed by unknown authority"#,
            "failed to extract layer sha256:1: write /var/lib/containerd/tmpmounts/m/x.ko: no space left on device",
            "reading manifest sha256:1 in r/i: manifest unknown",
        ] {
            let back_off = format!(r#"Back-off pulling image "r/i@sha256:1": ErrImagePull: {refusal}"#);
            assert_eq!(pull("ErrImagePull", refusal), Some(PullFailure::Refused), "{refusal}");
            assert_eq!(pull("ImagePullBackOff", &back_off), Some(PullFailure::Refused), "{refusal}");
        }
        let without_cause = r#"Back-off pulling image "r/i@sha256:1""#;
        assert_eq!(
            pull("ImagePullBackOff", without_cause),
            Some(PullFailure::Refused),
            "before Kubernetes 1.32"
        );
        assert_eq!(pull("CrashLoopBackOff", "connection refused"), None);
    }

    #[test]
    fn the_clock_of_a_node_does_not_decide_since_when_its_pod_is_stable() {
        for clock_of_node in ["2025-01-01T00:00:00Z", "2027-01-01T00:00:00Z"] {
            let report = |fields: Value, time: &str| {
                json!({"manager": "k3s", "operation": "Update", "subresource": "status", "time": time,
                       "fieldsV1": {"f:status": fields}})
            };
            let found = json!({
                "metadata": {"name": "p", "managedFields": [
                    report(json!({"f:containerStatuses": {}}), "2026-01-02T03:04:05Z"),
                    report(json!({"f:conditions": {}}), "2026-01-02T09:09:09Z"),
                ]},
                "spec": {},
                "status": {
                    "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": clock_of_node}],
                    "containerStatuses": [{"name": "a", "state": {"running": {"startedAt": clock_of_node}}}],
                },
            });
            let ObjectFacts::Pod(facts) = pod(serde_json::from_value(found).unwrap()).facts else { panic!() };
            assert_eq!(facts.stable_since, Some("2026-01-02T03:04:05Z".parse().unwrap()));
        }
    }

    #[test]
    fn a_container_start_resets_stable_since() {
        let ready = |started: &str, restarts: i32| {
            let status = json!({
                "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-02T03:00:00Z"}],
                "containerStatuses": [{"name": "a", "image": "i", "imageID": "", "ready": true, "restartCount": restarts,
                    "state": {"running": {"startedAt": started}},
                    "lastState": {"terminated": {"reason": "Error", "exitCode": 1, "message": "no device"}}}],
            });
            facts(&json!({}), &status)
        };
        let at = |text: &str| Some(text.parse::<Timestamp>().unwrap());
        assert_eq!(ready("2026-01-02T02:59:59Z", 0).stable_since, at("2026-01-02T03:00:00Z"));
        let crashed = ready("2026-01-02T03:00:01Z", 2);
        assert_eq!(crashed.stable_since, at("2026-01-02T03:00:01Z"));
        assert_eq!(crashed.messages, ["a: Error: exit code 1: no device", "a: restarted 2 times"]);
    }
}
