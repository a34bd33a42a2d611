//! The kubelet of Jobs' pods: one task per pod, which runs the pod from the image pull to the end in a real container. States,
//! conditions and their order were compared with a kubelet of Kubernetes 1.36.
//!
//! Simplifications: one container, no init containers, no probes, no variables from other objects and no network. `emptyDir` is
//! the only volume, without a size limit. A termination message requires `FallbackToLogsOnError`.

use std::{sync::Arc, time::Duration};

use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::{
    Shared,
    containers::{End, Engine, security_of},
    events::EventText,
    jobs::{NodeDisruption, has_ended},
    kubelet::text,
    scheduler::{container_status, set_condition, waiting},
    store::Object,
};

/// Reason to stop waiting for a container.
enum Call {
    /// The container ended.
    Ended,
    /// The container failed to start, which was already reported.
    NeverBegun,
    /// The pod was deleted, with this grace period in seconds.
    Deleted(u64),
    Deadline,
    Disrupted(NodeDisruption),
    /// The test is over.
    Stop,
}

/// One pod and its node.
pub struct Kubelet {
    shared: Arc<Shared>,
    engine: Arc<Engine>,
    stopped: watch::Receiver<bool>,
    uid: String,
    namespace: String,
    name: String,
    pod: Value,
    since: Timestamp,
}

impl Kubelet {
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
            since: Timestamp::now(),
        }
    }

    pub async fn run(self) {
        let call = match self.bring_up().await {
            Ok(()) => {
                tokio::select! {
                    () = self.engine.wait(&self.uid) => Call::Ended,
                    call = self.called() => call,
                }
            }
            Err(call) => call,
        };
        match call {
            Call::Ended => {
                self.ended(self.engine.end(&self.uid).await, None).await;
            }
            Call::NeverBegun => {}
            Call::Deleted(grace) => {
                self.tell("Killing", &format!("Stopping container {}", self.container_name()));
                self.engine.stop(&self.uid, grace).await;
                self.ended(self.engine.end(&self.uid).await, None).await;
                self.forget();
            }
            Call::Deadline => {
                self.engine.stop(&self.uid, self.grace()).await;
                let message = "Pod was active on the node longer than the specified deadline";
                let end = self.engine.end(&self.uid).await;
                self.ended(end, Some(("DeadlineExceeded", message))).await;
            }
            Call::Disrupted(NodeDisruption::Evicted(message)) => {
                self.engine.stop(&self.uid, 0).await;
                self.report(|pod| {
                    set_condition(pod, "DisruptionTarget", true, "TerminationByKubelet", &message);
                });
                self.warn("Evicted", &message);
                self.ended(self.engine.end(&self.uid).await, Some(("Evicted", &message))).await;
            }
            Call::Disrupted(NodeDisruption::NodeLost) => {
                // The container's exit status is lost with the node.
                self.engine.stop(&self.uid, 0).await;
                self.report(|pod| {
                    let message = "PodGC: node no longer exists";
                    set_condition(pod, "DisruptionTarget", true, "DeletionByPodGC", message);
                    pod["status"]["phase"] = json!("Failed");
                });
                self.forget();
            }
            Call::Stop => return,
        }
        self.until_gone().await;
        self.engine.remove(&self.uid, &self.pod["spec"]).await;
        // Wake tests that wait for the container's removal.
        self.shared.announce();
    }

    /// Pulls the image, and creates and starts the container.
    async fn bring_up(&self) -> Result<(), Call> {
        self.report(|pod| {
            pod["status"]["startTime"] = json!(text(self.since));
            let (host, hosts) = (json!("10.0.0.1"), json!([{"ip": "10.0.0.1"}]));
            (pod["status"]["hostIP"], pod["status"]["hostIPs"]) = (host, hosts);
            set_condition(pod, "PodReadyToStartContainers", false, "", "");
            set_condition(pod, "Initialized", true, "", "");
            waiting(pod, "ContainerCreating", "");
        });
        self.report(|pod| set_condition(pod, "PodReadyToStartContainers", true, "", ""));
        tokio::select! {
            () = self.fetch() => {}
            call = self.called() => return Err(call),
        }
        if self.may_not_run_as_root().await {
            let name = self.container_name();
            let why = format!(
                "container has runAsNonRoot and image will run as root (pod: \"{}_{}({})\", container: {name})",
                self.name, self.namespace, self.uid
            );
            return self.stay_waiting("CreateContainerConfigError", &why).await;
        }
        if let Err(why) = self.engine.create(&self.pod).await {
            return self.stay_waiting("CreateContainerError", &why).await;
        }
        self.tell("Created", "Container created");
        if let Err(why) = self.engine.start(&self.uid).await {
            self.finish(&json!({
                "exitCode": 128, "reason": "StartError", "message": format!("failed to create containerd task: {why}"),
                "startedAt": "1970-01-01T00:00:00Z", "finishedAt": text(Timestamp::now()),
            }), None);
            return Err(Call::NeverBegun);
        }
        self.tell("Started", "Container started");
        let started = text(Timestamp::now());
        self.report(|pod| {
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
                    return self.tell("Pulled", &message);
                }
                Ok(true) => {
                    let took = Timestamp::now().duration_since(begun).as_millis();
                    let message = format!(
                        "Successfully pulled image \"{image}\" in {took}ms ({took}ms including waiting)."
                    );
                    return self.tell("Pulled", &message);
                }
                Err(why) => in_containerd_words(image, &why),
            };
            self.warn("Failed", &format!("Failed to pull image \"{image}\": {why}"));
            self.warn("Failed", "Error: ErrImagePull");
            self.report(|pod| waiting(pod, "ErrImagePull", &why));
            tokio::time::sleep(pause / 5).await;
            self.tell("BackOff", &format!("Back-off pulling image \"{image}\""));
            let backed_off = format!("Back-off pulling image \"{image}\": ErrImagePull: {why}");
            self.report(|pod| waiting(pod, "ImagePullBackOff", &backed_off));
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

    async fn stay_waiting(&self, reason: &str, why: &str) -> Result<(), Call> {
        self.report(|pod| waiting(pod, reason, why));
        self.warn("Failed", &format!("Error: {why}"));
        Err(self.called().await)
    }

    /// Waits until the container ends or must be stopped.
    async fn called(&self) -> Call {
        let deadline = self.pod["spec"]["activeDeadlineSeconds"].as_u64().map(Duration::from_secs);
        let overdue = async {
            match deadline {
                Some(deadline) => tokio::time::sleep(deadline).await,
                None => std::future::pending().await,
            }
        };
        let wanted = async {
            let mut changed = self.shared.changed.subscribe();
            loop {
                if let Some(call) = self.wanted() {
                    return call;
                }
                let _ = changed.changed().await;
            }
        };
        let mut stopped = self.stopped.clone();
        tokio::select! {
            _ = stopped.wait_for(|stopped| *stopped) => Call::Stop,
            call = wanted => call,
            () = overdue => Call::Deadline,
        }
    }

    fn wanted(&self) -> Option<Call> {
        let state = self.shared.state.lock().unwrap();
        if let Some(disruption) = state.jobs.as_ref().and_then(|jobs| jobs.disrupted.get(&self.uid)) {
            return Some(Call::Disrupted(disruption.clone()));
        }
        let kind = state.resource("pods");
        let present = state.get(&kind, &self.namespace, &self.name).filter(|pod| pod.uid == self.uid);
        let Some(pod) = present else { return Some(Call::Deleted(0)) };
        let metadata = &pod.value()["metadata"];
        (!metadata["deletionTimestamp"].is_null())
            .then(|| Call::Deleted(metadata["deletionGracePeriodSeconds"].as_u64().unwrap_or(0)))
    }

    /// Reports the end of the container, if there was one.
    async fn ended(&self, end: End, of_pod: Option<(&str, &str)>) {
        let End { exit_code, killed_for_memory, started, finished } = end;
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
        self.finish(&terminated, of_pod);
    }

    fn finish(&self, terminated: &Value, of_pod: Option<(&str, &str)>) {
        let good = terminated["exitCode"] == 0 && of_pod.is_none();
        let why = if good { "PodCompleted" } else { "PodFailed" };
        self.report(|pod| {
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
        self.report(|pod| {
            set_condition(pod, "PodReadyToStartContainers", false, "", "");
            pod["status"]["phase"] = json!(if good { "Succeeded" } else { "Failed" });
            if let Some((reason, message)) = of_pod {
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
        let state = self.shared.state.lock().unwrap();
        let kind = state.resource("pods");
        state.get(&kind, &self.namespace, &self.name).is_some_and(|pod| pod.uid == self.uid)
    }

    /// Removes the pod object after everything in the pod has ended.
    fn forget(&self) {
        {
            let mut state = self.shared.state.lock().unwrap();
            let kind = state.resource("pods");
            let present = state.get(&kind, &self.namespace, &self.name);
            if let Some(pod) = present.filter(|pod| pod.uid == self.uid) {
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

    fn tell(&self, reason: &str, message: &str) {
        let told = EventText { by: "kubelet", reason, message };
        self.shared.state.lock().unwrap().tell("Pod", &self.pod, told);
        self.shared.announce();
    }

    fn warn(&self, reason: &str, message: &str) {
        let told = EventText { by: "kubelet", reason, message };
        self.shared.state.lock().unwrap().warn("Pod", &self.pod, told);
        self.shared.announce();
    }

    /// Writes the status, unless the pod is gone or has ended.
    fn report(&self, change: impl FnOnce(&mut Value)) {
        {
            let mut state = self.shared.state.lock().unwrap();
            let kind = state.resource("pods");
            let present = state.get(&kind, &self.namespace, &self.name);
            let Some(object) = present.filter(|pod| pod.uid == self.uid) else { return };
            let before = object.value();
            let mut pod = before.clone();
            change(&mut pod);
            if pod == before || has_ended(&before) {
                return;
            }
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
