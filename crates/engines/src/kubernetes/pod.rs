//! Derives the state of a build's pod from its status and Events.

use k8s_openapi::api::core::v1::{ContainerStateTerminated, Event, Pod, PodCondition, PodSpec, PodStatus};

use super::job::{CONTAINER, is_same_program};
use crate::EngineError;

/// State of a build's pod.
#[derive(Debug)]
pub enum PodState {
    /// Not running yet; the cluster's explanation.
    Waiting(String),
    /// The node cannot pull the image and retries.
    WithoutImage(String),
    /// Running: the runner can be reached.
    Running,
    /// Ended, evicted or deleted.
    Ended(EngineError),
}

/// Kind of a pod's end without a result from the runner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// A retry would fail the same way.
    Permanent,
    /// A retry may succeed on another node or at another time.
    Transient,
}

/// Reasons for removing a pod that did nothing wrong
/// (<https://kubernetes.io/docs/concepts/workloads/pods/disruptions/#pod-disruption-conditions>, and the kubelet's own).
const DISRUPTIONS: [&str; 9] = [
    "DeletionByPodGC",
    "DeletionByTaintManager",
    "EvictionByEvictionAPI",
    "Evicted",
    "NodeAffinity",
    "NodeLost",
    "NodeShutdown",
    "Preempting",
    "PreemptionByScheduler",
];

/// Returns the state of a pod, which must run the expected program.
pub fn pod_state(pod: &Pod, expected: &PodSpec) -> PodState {
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    if pod.spec.as_ref().is_none_or(|spec| !is_same_program(spec, expected)) {
        return PodState::Ended(runs_other_programs(
            name,
            pod.metadata.namespace.as_deref().unwrap_or_default(),
        ));
    }
    let Some(status) = &pod.status else { return PodState::Waiting("it is not scheduled yet".to_owned()) };
    let disrupted = condition(status, "DisruptionTarget").filter(|condition| condition.status == "True");
    if let Some(PodCondition { reason, message, .. }) = disrupted {
        return ended(End::Transient, name, reason.as_deref(), message.as_deref());
    }
    if pod.metadata.deletion_timestamp.is_some() {
        return ended(End::Transient, name, None, Some("it was deleted"));
    }
    match status.phase.as_deref() {
        Some("Failed" | "Succeeded") => finished(name, status),
        Some("Running") => match terminated_state(status) {
            Some(end) => state_of_terminated(name, end),
            None => PodState::Running,
        },
        _ => waiting(name, status),
    }
}

/// Parts of the API server's messages about a pod that it refuses. Other messages are about a fault of the cluster, such as a
/// webhook that does not respond: the cluster tries again.
const REFUSALS: [&str; 3] = ["is forbidden: ", "is invalid: ", "denied the request"];
/// Parts of refusals that end by themselves: a quota may have room later, and a new namespace has no service account at first.
const PASSING_REFUSALS: [&str; 3] =
    ["exceeded quota", "status unknown for quota", "error looking up service account"];

/// Whether the API server's refusal of a Job or pod ends by itself.
pub fn is_passing_refusal(message: &str) -> bool {
    PASSING_REFUSALS.iter().any(|part| message.contains(part))
}

/// Returns the state of a Job without a pod, from its Events. A refusal that does not end by itself is permanent. The Job waits
/// otherwise.
pub fn state_without_pod(job: &str, events: &[Event]) -> PodState {
    let refusal = events.iter().rev().find(|event| event.reason.as_deref() == Some("FailedCreate"));
    // The text before the reason contains the name of a pod, which differs on each try.
    let full = refusal.and_then(|event| event.message.as_deref());
    let is_refused = |full: &str| REFUSALS.iter().any(|part| full.contains(part));
    let may_pass = full.is_some_and(|full| !is_refused(full) || is_passing_refusal(full));
    let message = full.map(|message| message.split_once("is forbidden: ").map_or(message, |(_, why)| why));
    match message {
        None => PodState::Waiting("its Job has no pod yet".to_owned()),
        Some(message) if may_pass => PodState::Waiting(message.to_owned()),
        Some(message) => PodState::Ended(EngineError::Pod {
            message: format!("the cluster refuses pods of Job {job}: {message}"),
            hint: "the namespace of builds must admit pods that keep to Pod Security Standards `restricted`; the cluster's own policies \
                   may require more: spec.builds in site.yaml can add labels and fields"
                .to_owned(),
            is_transient: false,
        }),
    }
}

/// Returns the state of a build whose Job or pod was deleted by another client.
pub fn deleted(job: &str, reason: &str) -> PodState {
    ended(End::Transient, &format!("of Job {job}"), None, Some(reason))
}

fn runs_other_programs(name: &str, namespace: &str) -> EngineError {
    EngineError::Pod {
        message: format!("pod {name} runs other programs than the build"),
        hint: format!("exempt namespace {namespace} from the webhook that changes pods"),
        is_transient: true,
    }
}

fn condition<'a>(status: &'a PodStatus, kind: &str) -> Option<&'a PodCondition> {
    status.conditions.iter().flatten().find(|condition| condition.type_ == kind)
}

fn terminated_state(status: &PodStatus) -> Option<&ContainerStateTerminated> {
    let status = status.container_statuses.iter().flatten().find(|status| status.name == CONTAINER);
    status?.state.as_ref()?.terminated.as_ref()
}

fn waiting(name: &str, status: &PodStatus) -> PodState {
    let scheduled = condition(status, "PodScheduled").filter(|condition| condition.status == "False");
    if let Some(PodCondition { message: Some(message), .. }) = scheduled {
        return PodState::Waiting(message.clone());
    }
    let container = status.container_statuses.iter().flatten().find(|status| status.name == CONTAINER);
    let state = container.and_then(|status| status.state.as_ref()?.waiting.as_ref());
    let (reason, message) = match state {
        None => return PodState::Waiting("it is not scheduled yet".to_owned()),
        Some(state) => {
            (state.reason.as_deref().unwrap_or_default(), state.message.as_deref().unwrap_or_default())
        }
    };
    match reason {
        // Permanent refusals: the kubelet retries in all other cases.
        "InvalidImageName" | "ErrImageNeverPull" | "CreateContainerConfigError" => {
            ended(End::Permanent, name, Some(reason), Some(message))
        }
        "ErrImagePull" | "ImagePullBackOff" => PodState::WithoutImage(message.to_owned()),
        "ContainerCreating" => PodState::Waiting("its node pulls the image".to_owned()),
        _ => PodState::Waiting(format!("{reason}: {message}")),
    }
}

fn finished(name: &str, status: &PodStatus) -> PodState {
    let reason = status.reason.as_deref();
    match (reason, terminated_state(status)) {
        (Some("DeadlineExceeded"), _) => {
            PodState::Ended(EngineError::Deadline(format!("pod {name} did not end within its deadline")))
        }
        (Some("Evicted"), _) if exceeds_disk_limit(status) => {
            let message = status.message.as_deref().unwrap_or_default().trim_end();
            PodState::Ended(EngineError::FixedLimit(format!("pod {name} was evicted: {message}")))
        }
        (Some(reason), _) if DISRUPTIONS.contains(&reason) => {
            ended(End::Transient, name, Some(reason), status.message.as_deref())
        }
        (_, Some(end)) => state_of_terminated(name, end),
        (reason, None) => ended(End::Transient, name, reason, status.message.as_deref()),
    }
}

/// Whether the kubelet evicted a pod for the pod's own disk limit, and not because its node's disk is full. Only the message
/// differs.
fn exceeds_disk_limit(status: &PodStatus) -> bool {
    let message = status.message.as_deref().unwrap_or_default();
    ["exceeded its local ephemeral storage limit", "exceeds the total limit of containers"]
        .iter()
        .any(|words| message.contains(words))
}

fn state_of_terminated(name: &str, end: &ContainerStateTerminated) -> PodState {
    match end.reason.as_deref() {
        Some("OOMKilled") => PodState::Ended(EngineError::MemoryLimit(format!(
            "pod {name} used more memory than it may (OOMKilled)"
        ))),
        // The runner is missing or belongs to another architecture.
        Some(reason @ ("ContainerCannotRun" | "StartError")) => {
            ended(End::Permanent, name, Some(reason), end.message.as_deref())
        }
        reason => {
            let message = end.message.clone().unwrap_or_else(|| format!("exit code {}", end.exit_code));
            ended(End::Transient, name, reason, Some(&message))
        }
    }
}

fn ended(end: End, name: &str, reason: Option<&str>, message: Option<&str>) -> PodState {
    let details: Vec<&str> =
        [reason, message].into_iter().flatten().filter(|details| !details.is_empty()).collect();
    let is_transient = end == End::Transient;
    let hint = if is_transient { "farrier retries automatically" } else { "see `kubectl describe pod`" };
    PodState::Ended(EngineError::Pod {
        message: format!("pod {name} ended without a result: {}", details.join(": ")),
        hint: hint.to_owned(),
        is_transient,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn told(status: &Value) -> String {
        let pod = json!({"metadata": {"name": "p"}, "spec": {"containers": []}, "status": status});
        match pod_state(&serde_json::from_value(pod).unwrap(), &PodSpec::default()) {
            PodState::Waiting(why) => format!("waits: {why}"),
            PodState::WithoutImage(why) => format!("has no image: {why}"),
            PodState::Running => "runs".to_owned(),
            PodState::Ended(error) => {
                format!("{}: {error}", if error.is_transient() { "again" } else { "never again" })
            }
        }
    }

    fn state(phase: &str, state: &Value) -> Value {
        json!({"phase": phase, "containerStatuses": [{
            "name": "build", "image": "i", "imageID": "", "ready": false, "restartCount": 0, "state": state,
        }]})
    }

    #[test]
    fn whatever_ends_or_holds_a_pod_is_told_in_words() {
        let unschedulable = json!({"phase": "Pending", "conditions": [{
            "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
            "message": "0/3 nodes are available: 3 Insufficient memory.",
        }]});
        let evicted = json!({"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."});
        let disk = json!({
            "phase": "Failed", "reason": "Evicted",
            "message": "Container build exceeded its local ephemeral storage limit \"32Gi\". ",
        });
        let pod_disk = json!({
            "phase": "Failed", "reason": "Evicted",
            "message": "Pod ephemeral local storage usage exceeds the total limit of containers 32Gi. ",
        });
        let lost = json!({"phase": "Running", "conditions": [{
            "type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager",
            "message": "Taint manager: deleting due to NoExecute taint",
        }]});
        let late = json!({"phase": "Failed", "reason": "DeadlineExceeded"});
        let pull = state("Pending", &json!({"waiting": {"reason": "ErrImagePull", "message": "not found"}}));
        let creating = state("Pending", &json!({"waiting": {"reason": "ContainerCreating"}}));
        let memory = json!({"terminated": {"reason": "OOMKilled", "exitCode": 137}});
        let code = json!({"terminated": {"reason": "Error", "exitCode": 1}});
        let start =
            json!({"terminated": {"reason": "StartError", "exitCode": 128, "message": "exec format error"}});
        let all = [
            json!({"phase": "Pending"}),
            unschedulable,
            creating,
            pull,
            state("Running", &json!({"running": {}})),
            evicted,
            disk,
            pod_disk,
            lost,
            late,
            state("Failed", &memory),
            state("Running", &memory),
            state("Failed", &code),
            state("Failed", &start),
        ];
        insta::assert_snapshot!(all.each_ref().map(told).join("\n"));
    }

    #[test]
    fn a_pod_over_its_disk_limit_gets_no_hint_about_memory() {
        let pod = json!({
            "spec": {"containers": []},
            "status": {
                "phase": "Failed", "reason": "Evicted",
                "message": "Pod ephemeral local storage usage exceeds the total limit of containers 32Gi. ",
            },
        });
        let PodState::Ended(error) = pod_state(&serde_json::from_value(pod).unwrap(), &PodSpec::default())
        else {
            panic!("it does not end")
        };
        assert_eq!(error.hint().unwrap(), "use less in the build: this limit is fixed");
    }

    #[test]
    fn a_pod_with_another_container_ends_the_build_at_once() {
        let pod = json!({
            "metadata": {"name": "p", "namespace": "builds"},
            "spec": {"containers": [{"name": "istio-proxy"}]},
            "status": {"phase": "Running"},
        });
        let PodState::Ended(error) = pod_state(&serde_json::from_value(pod).unwrap(), &PodSpec::default())
        else {
            panic!("it does not end")
        };
        assert!(error.is_transient());
        assert_eq!(error.to_string(), "pod p runs other programs than the build");
        assert_eq!(error.hint().unwrap(), "exempt namespace builds from the webhook that changes pods");
    }

    #[test]
    fn a_quota_makes_wait_and_a_policy_refuses() {
        let event = |message: &str| {
            let event = json!({
                "metadata": {}, "involvedObject": {}, "reason": "FailedCreate", "type": "Warning", "message": message,
            });
            serde_json::from_value::<Event>(event).unwrap()
        };
        let quota =
            "Error creating: pods \"j-x\" is forbidden: exceeded quota: builds, requested: limits.memory=4Gi";
        let policy =
            "Error creating: pods \"j-x\" is forbidden: ValidatingAdmissionPolicy 'ours' denied request: no";
        assert!(matches!(state_without_pod("j", &[]), PodState::Waiting(_)));
        for passing in [
            "Error creating: Internal error occurred: failed calling webhook \"k\": connection refused",
            "Error creating: pods \"j-x\" is forbidden: status unknown for quota: builds, resources: pods",
            "Error creating: pods \"j-x\" is forbidden: error looking up service account builds/default: serviceaccount \
             \"default\" not found",
        ] {
            let state = state_without_pod("j", &[event(passing)]);
            assert!(matches!(&state, PodState::Waiting(_)), "{state:?}");
        }
        for refusal in ["admission webhook \"k\" denied the request: no", "Pod \"j-x\" is invalid: spec: no"]
        {
            let state = state_without_pod("j", &[event(&format!("Error creating: {refusal}"))]);
            assert!(matches!(&state, PodState::Ended(error) if !error.is_transient()), "{state:?}");
        }
        assert!(
            matches!(state_without_pod("j", &[event(quota)]), PodState::Waiting(why) if quota.ends_with(&why))
        );
        let PodState::Ended(error) = state_without_pod("j", &[event(quota), event(policy)]) else {
            panic!("it waits")
        };
        assert_eq!(
            error.to_string(),
            "the cluster refuses pods of Job j: ValidatingAdmissionPolicy 'ours' denied request: no"
        );
        assert!(!error.is_transient() && error.hint().is_some());
    }
}
