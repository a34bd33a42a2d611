//! The kubelet of Jobs' pods: one task per pod, which runs the pod from the image pull to the end in a real container. States,
//! conditions and their order were compared with a kubelet of Kubernetes 1.36.
//!
//! Simplifications: one container, no init containers, no probes, no variables from other objects and no network. `emptyDir` is
//! the only volume, without a size limit. The only termination message is the end of the log, under `FallbackToLogsOnError`.

use std::{sync::Arc, time::Duration};

use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::{
    Shared,
    containers::{End, Engine, security_of},
    events::EventText,
    jobs::{NodeDisruption, has_ended},
    pod_fate::text,
    scheduler::{container_status, set_condition, waiting},
    store::{Object, State},
};

/// Reason to stop waiting for a container.
enum StopReason {
    /// The container ended.
    Ended,
    /// The container failed to start, which was already reported.
    NeverStarted,
    /// The pod was deleted, with this grace period in seconds.
    Deleted(u64),
    Deadline,
    Disrupted(NodeDisruption),
    TestOver,
}

/// One pod and its node.
pub struct JobKubelet {
    shared: Arc<Shared>,
    engine: Arc<Engine>,
    stopped: watch::Receiver<bool>,
    uid: String,
    namespace: String,
    name: String,
    pod: Value,
    started: Timestamp,
}

impl JobKubelet {
    pub fn new(
        shared: &Arc<Shared>,
        engine: &Arc<Engine>,
        stopped: &watch::Receiver<bool>,
        pod: &Object,
    ) -> Self {
        Self {
            shared: Arc::clone(shared),
            engine: Arc::clone(engine),
            stopped: stopped.clone(),
            uid: pod.uid.clone(),
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            pod: pod.value(),
            started: Timestamp::now(),
        }
    }

    pub async fn run(self) {
        let reason = match self.bring_up().await {
            Ok(()) => {
                tokio::select! {
                    () = self.engine.wait(&self.uid) => StopReason::Ended,
                    reason = self.stop_reason() => reason,
                }
            }
            Err(reason) => reason,
        };
        match reason {
            StopReason::Ended => self.report_end(None).await,
            StopReason::NeverStarted => {}
            StopReason::Deleted(grace) => {
                self.emit_event("Killing", &format!("Stopping container {}", self.container_name()));
                self.engine.stop(&self.uid, grace).await;
                self.report_end(None).await;
                self.forget();
            }
            StopReason::Deadline => {
                self.engine.stop(&self.uid, self.grace()).await;
                let message = "Pod was active on the node longer than the specified deadline";
                self.report_end(Some(("DeadlineExceeded", message))).await;
            }
            StopReason::Disrupted(NodeDisruption::Evicted(message)) => {
                self.engine.stop(&self.uid, 0).await;
                self.update_status(|pod| {
                    set_condition(pod, "DisruptionTarget", true, "TerminationByKubelet", &message);
                });
                self.emit_warning("Evicted", &message);
                self.report_end(Some(("Evicted", &message))).await;
            }
            StopReason::Disrupted(NodeDisruption::NodeLost) => {
                // The container's exit status is lost with the node.
                self.engine.stop(&self.uid, 0).await;
                self.update_status(|pod| {
                    let message = "PodGC: node no longer exists";
                    set_condition(pod, "DisruptionTarget", true, "DeletionByPodGC", message);
                    pod["status"]["phase"] = json!("Failed");
                });
                self.forget();
            }
            StopReason::TestOver => return,
        }
        self.until_gone().await;
        self.engine.remove(&self.uid, &self.pod["spec"]).await;
        // Wake tests that wait for the container's removal.
        self.shared.announce();
    }

    /// Pulls the image, and creates and starts the container.
    async fn bring_up(&self) -> Result<(), StopReason> {
        self.update_status(|pod| {
            pod["status"]["startTime"] = json!(text(self.started));
            pod["status"]["hostIP"] = json!("10.0.0.1");
            pod["status"]["hostIPs"] = json!([{"ip": "10.0.0.1"}]);
            set_condition(pod, "PodReadyToStartContainers", false, "", "");
            set_condition(pod, "Initialized", true, "", "");
            waiting(pod, "ContainerCreating", "");
        });
        self.update_status(|pod| set_condition(pod, "PodReadyToStartContainers", true, "", ""));
        tokio::select! {
            () = self.fetch() => {}
            reason = self.stop_reason() => return Err(reason),
        }
        if self.may_not_run_as_root().await {
            let name = self.container_name();
            let why = format!(
                "container has runAsNonRoot and image will run as root (pod: \"{}_{}({})\", container: {name})",
                self.name, self.namespace, self.uid
            );
            return Err(self.stay_waiting("CreateContainerConfigError", &why).await);
        }
        if let Err(why) = self.engine.create(&self.pod).await {
            return Err(self.stay_waiting("CreateContainerError", &why).await);
        }
        self.emit_event("Created", "Container created");
        if let Err(why) = self.engine.start(&self.uid).await {
            self.write_terminated(&json!({
                "exitCode": 128, "reason": "StartError", "message": format!("failed to create containerd task: {why}"),
                "startedAt": "1970-01-01T00:00:00Z", "finishedAt": text(Timestamp::now()),
            }), None);
            return Err(StopReason::NeverStarted);
        }
        self.emit_event("Started", "Container started");
        let started = text(Timestamp::now());
        self.update_status(|pod| {
            pod["status"]["phase"] = json!("Running");
            set_condition(pod, "Ready", true, "", "");
            set_condition(pod, "ContainersReady", true, "", "");
            let container = container_status(pod);
            container["ready"] = json!(true);
            container["started"] = json!(true);
            container["imageID"] = container["image"].clone();
            container["containerID"] = json!(format!("docker://{}", self.engine.container(&self.uid)));
            container["state"] = json!({"running": {"startedAt": started}});
        });
        Ok(())
    }

    /// Pulls the image, with retries until success.
    async fn fetch(&self) {
        let container = &self.pod["spec"]["containers"][0];
        let image = container["image"].as_str().unwrap_or_default();
        let policy = container["imagePullPolicy"].as_str().unwrap_or("IfNotPresent");
        // A real kubelet's first backoff is ten seconds.
        let mut pause = Duration::from_secs(1);
        loop {
            let begun = Timestamp::now();
            let why = match self.engine.pull(image, policy).await {
                Ok(false) => {
                    let message = format!(
                        "Container image \"{image}\" already present on machine and can be accessed by the pod"
                    );
                    return self.emit_event("Pulled", &message);
                }
                Ok(true) => {
                    let took = Timestamp::now().duration_since(begun).as_millis();
                    let message = format!(
                        "Successfully pulled image \"{image}\" in {took}ms ({took}ms including waiting)."
                    );
                    return self.emit_event("Pulled", &message);
                }
                Err(why) => in_containerd_words(image, &why),
            };
            self.emit_warning("Failed", &format!("Failed to pull image \"{image}\": {why}"));
            self.emit_warning("Failed", "Error: ErrImagePull");
            self.update_status(|pod| waiting(pod, "ErrImagePull", &why));
            tokio::time::sleep(pause / 5).await;
            self.emit_event("BackOff", &format!("Back-off pulling image \"{image}\""));
            let backed_off = format!("Back-off pulling image \"{image}\": ErrImagePull: {why}");
            self.update_status(|pod| waiting(pod, "ImagePullBackOff", &backed_off));
            tokio::time::sleep(pause).await;
            pause *= 2;
        }
    }

    async fn may_not_run_as_root(&self) -> bool {
        let spec = &self.pod["spec"];
        let container = &spec["containers"][0];
        let of = |field: &str| security_of(spec, container, field);
        let as_root = match of("runAsUser").as_u64() {
            Some(user) => user == 0,
            None => self.engine.runs_as_root(container["image"].as_str().unwrap_or_default()).await,
        };
        *of("runAsNonRoot") == true && as_root
    }

    /// Reports the container as waiting until it must be stopped.
    async fn stay_waiting(&self, reason: &str, why: &str) -> StopReason {
        self.update_status(|pod| waiting(pod, reason, why));
        self.emit_warning("Failed", &format!("Error: {why}"));
        self.stop_reason().await
    }

    /// Waits until the container must be stopped.
    async fn stop_reason(&self) -> StopReason {
        let deadline = self.pod["spec"]["activeDeadlineSeconds"].as_u64().map(Duration::from_secs);
        let overdue = async {
            match deadline {
                Some(deadline) => tokio::time::sleep(deadline).await,
                None => std::future::pending().await,
            }
        };
        let requested = async {
            let mut changed = self.shared.changed.subscribe();
            loop {
                if let Some(reason) = self.requested_stop() {
                    return reason;
                }
                let _ = changed.changed().await;
            }
        };
        let mut stopped = self.stopped.clone();
        tokio::select! {
            _ = stopped.wait_for(|stopped| *stopped) => StopReason::TestOver,
            reason = requested => reason,
            () = overdue => StopReason::Deadline,
        }
    }

    /// Returns the deletion or disruption of the pod.
    fn requested_stop(&self) -> Option<StopReason> {
        let state = self.shared.state.lock().unwrap();
        if let Some(disruption) = state.jobs.as_ref().and_then(|jobs| jobs.disrupted.get(&self.uid)) {
            return Some(StopReason::Disrupted(disruption.clone()));
        }
        let Some(pod) = self.present(&state) else { return Some(StopReason::Deleted(0)) };
        let metadata = &pod.value()["metadata"];
        (!metadata["deletionTimestamp"].is_null())
            .then(|| StopReason::Deleted(metadata["deletionGracePeriodSeconds"].as_u64().unwrap_or(0)))
    }

    /// Reports the end of the container, if there was one, and of the pod, with the pod's own reason and message.
    async fn report_end(&self, pod_reason: Option<(&str, &str)>) {
        let End { exit_code, killed_for_memory, started, finished } = self.engine.end(&self.uid).await;
        let reason = match exit_code {
            _ if killed_for_memory => "OOMKilled",
            0 => "Completed",
            _ => "Error",
        };
        let mut terminated = json!({
            "containerID": format!("docker://{}", self.engine.container(&self.uid)), "exitCode": exit_code,
            "reason": reason, "startedAt": started, "finishedAt": finished,
        });
        let policy = &self.pod["spec"]["containers"][0]["terminationMessagePolicy"];
        if *policy == "FallbackToLogsOnError" && exit_code != 0 {
            terminated["message"] = json!(self.engine.last_words(&self.uid).await);
        }
        self.write_terminated(&terminated, pod_reason);
    }

    fn write_terminated(&self, terminated: &Value, pod_reason: Option<(&str, &str)>) {
        let good = terminated["exitCode"] == 0 && pod_reason.is_none();
        let why = if good { "PodCompleted" } else { "PodFailed" };
        self.update_status(|pod| {
            if good {
                set_condition(pod, "Initialized", true, why, "");
            }
            set_condition(pod, "Ready", false, why, "");
            set_condition(pod, "ContainersReady", false, why, "");
            let container = container_status(pod);
            container["ready"] = json!(false);
            container["started"] = json!(false);
            container["state"] = json!({"terminated": terminated});
        });
        // A kubelet reports the container's end before the pod's end.
        self.update_status(|pod| {
            set_condition(pod, "PodReadyToStartContainers", false, "", "");
            pod["status"]["phase"] = json!(if good { "Succeeded" } else { "Failed" });
            if let Some((reason, message)) = pod_reason {
                pod["status"]["reason"] = json!(reason);
                pod["status"]["message"] = json!(message);
            }
        });
    }

    /// Waits until the pod is deleted or the test is over.
    async fn until_gone(&self) {
        let mut changed = self.shared.changed.subscribe();
        let mut stopped = self.stopped.clone();
        while self.is_there() && !*stopped.borrow() {
            tokio::select! {
                _ = changed.changed() => {}
                _ = stopped.changed() => {}
            }
        }
    }

    fn is_there(&self) -> bool {
        self.present(&self.shared.state.lock().unwrap()).is_some()
    }

    /// Returns the pod's object, unless the pod is gone or has been replaced.
    fn present(&self, state: &State) -> Option<Arc<Object>> {
        let found = state.get(&state.resource("pods"), &self.namespace, &self.name);
        found.filter(|pod| pod.uid == self.uid)
    }

    /// Removes the pod object after everything in the pod has ended.
    fn forget(&self) {
        {
            let mut state = self.shared.state.lock().unwrap();
            if let Some(pod) = self.present(&state) {
                let kind = state.resource("pods");
                state.remove(&kind, &pod);
            }
        }
        self.shared.announce();
    }

    fn grace(&self) -> u64 {
        self.pod["spec"]["terminationGracePeriodSeconds"].as_u64().unwrap_or(30)
    }

    fn container_name(&self) -> &str {
        self.pod["spec"]["containers"][0]["name"].as_str().unwrap_or_default()
    }

    fn emit_event(&self, reason: &str, message: &str) {
        let event = EventText { by: "kubelet", reason, message };
        self.shared.state.lock().unwrap().tell("Pod", &self.pod, event);
        self.shared.announce();
    }

    fn emit_warning(&self, reason: &str, message: &str) {
        let event = EventText { by: "kubelet", reason, message };
        self.shared.state.lock().unwrap().warn("Pod", &self.pod, event);
        self.shared.announce();
    }

    /// Writes the status, unless the pod is gone or has ended.
    fn update_status(&self, change: impl FnOnce(&mut Value)) {
        {
            let mut state = self.shared.state.lock().unwrap();
            let Some(object) = self.present(&state) else { return };
            let before = object.value();
            let mut pod = before.clone();
            change(&mut pod);
            if pod == before || has_ended(&before) {
                return;
            }
            let kind = state.resource("pods");
            state.replace(&kind, &object, pod);
        }
        self.shared.announce();
    }
}

/// Translates docker's message for a missing image to containerd's.
fn in_containerd_words(image: &str, why: &str) -> String {
    let lower = why.to_lowercase();
    if lower.contains("not found") || lower.contains("manifest unknown") {
        return format!(
            "rpc error: code = NotFound desc = failed to pull and unpack image \"{image}\": failed to resolve image: \
             {image}: not found"
        );
    }
    format!("rpc error: code = Unknown desc = failed to pull and unpack image \"{image}\": {why}")
}
