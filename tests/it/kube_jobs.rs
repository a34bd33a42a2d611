//! Jobs on the fake API server run in real containers and end as they do in a real cluster.

use std::time::Duration;

use crate::support::{
    kube_api::{FakeApi, cluster::Disruption},
    registry_process::{RegistryProcess, Wants},
    tiny_image,
};
use futures::FutureExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api,
    api::{AttachParams, DeleteParams, DynamicObject, PropagationPolicy},
    core::{ApiResource, GroupVersionKind},
};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tokio::io::AsyncReadExt as _;

/// A cluster that runs Jobs, and the registry with its only image.
struct Bench {
    api: FakeApi,
    _registry: RegistryProcess,
    image: String,
}

impl Bench {
    async fn new() -> Self {
        let registry = RegistryProcess::start(Wants::default());
        let image = tiny_image::push(&registry.host, "builds/tiny").await;
        let api = FakeApi::start();
        api.create(json!({
            "apiVersion": "v1", "kind": "Namespace",
            "metadata": {"name": "builds", "labels": {"pod-security.kubernetes.io/enforce": "restricted"}},
        }));
        api.run_jobs();
        Self { api, _registry: registry, image }
    }

    /// Creates an unprivileged Job like the engine's.
    fn run(&self, name: &str, script: &str, change: impl FnOnce(&mut Value)) {
        let mut job = json!({
            "apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name, "namespace": "builds"},
            "spec": {"backoffLimit": 0, "template": {"spec": {
                "restartPolicy": "Never", "automountServiceAccountToken": false,
                "terminationGracePeriodSeconds": 1,
                "securityContext": {
                    "runAsNonRoot": true, "runAsUser": 65532, "runAsGroup": 65532,
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "volumes": [{"name": "work", "emptyDir": {}}],
                "containers": [{
                    "name": "build", "image": self.image, "command": ["/bin/sh", "-c", script],
                    "resources": {"limits": {"memory": "32Mi", "cpu": "1"}},
                    "volumeMounts": [{"name": "work", "mountPath": "/work"}],
                    "securityContext": {
                        "allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true,
                        "capabilities": {"drop": ["ALL"]},
                    },
                }],
            }}},
        });
        change(&mut job);
        self.api.create(job);
    }

    fn pod(&self, job: &str) -> Option<Value> {
        let pods = self.api.list("pods");
        pods.into_iter().find(|pod| pod["metadata"]["labels"]["job-name"] == job)
    }

    fn name_of_pod(&self, job: &str) -> String {
        self.pod(job).unwrap()["metadata"]["name"].as_str().unwrap().to_owned()
    }

    /// Waits until the pod of a Job is in this state: `running`, `ImagePullBackOff`, `OOMKilled`, ...
    async fn until(&self, job: &str, state: &str) -> Value {
        let in_state = || self.pod(job).is_some_and(|pod| states(&pod).any(|found| found == state));
        self.api.until(&format!("{job} is {state}"), |_| in_state()).await;
        self.pod(job).unwrap()
    }

    async fn until_job(&self, job: &str, condition: &str) -> Value {
        let get = || self.api.get("jobs.batch", "builds", job).unwrap();
        let reason = || {
            let job = get();
            let all = job["status"]["conditions"].as_array().cloned().unwrap_or_default();
            all.into_iter().find(|given| given["type"] == condition && given["status"] == "True")
        };
        self.api.until(&format!("{job} is {condition}"), |_| reason().is_some()).await;
        reason().unwrap()
    }

    /// Returns the output of a program in a Job's pod, and its status unless the connection was cut. After a cut, kube's reader
    /// does not end; the absence of a status ends the loop.
    async fn exec(&self, job: &str, command: &[&str]) -> (Vec<u8>, Option<Value>) {
        let pods: Api<Pod> = Api::namespaced(self.api.client(), "builds");
        let params = AttachParams { stdout: true, stderr: false, ..AttachParams::default() };
        let mut process = pods.exec(&self.name_of_pod(job), command.to_vec(), &params).await.unwrap();
        let (mut printed, status) = (Vec::new(), process.take_status().unwrap());
        let mut stdout = process.stdout().unwrap();
        tokio::pin!(status);
        let status = loop {
            tokio::select! {
                biased;
                length = stdout.read_buf(&mut printed) => if length.unwrap() == 0 { break status.await },
                status = &mut status => break status,
            }
        };
        while let Some(Ok(1..)) = stdout.read_buf(&mut printed).now_or_never() {}
        (printed, status.map(|status| serde_json::to_value(status).unwrap()))
    }

    fn messages(&self, about: &str, reason: &str) -> Vec<String> {
        let told = self.api.list("events").into_iter().filter(|event| {
            let name = event["involvedObject"]["name"].as_str().unwrap();
            event["reason"] == reason && name.starts_with(about)
        });
        told.map(|event| event["message"].as_str().unwrap().to_owned()).collect()
    }
}

/// Returns the state names that [`Bench::until`] can wait for.
fn states(pod: &Value) -> impl Iterator<Item = String> {
    let state = &pod["status"]["containerStatuses"][0]["state"];
    let names = state
        .as_object()
        .into_iter()
        .flatten()
        .flat_map(|(name, given)| [Some(name.clone()), given["reason"].as_str().map(str::to_owned)]);
    let own = [&pod["status"]["phase"], &pod["status"]["reason"]];
    names
        .flatten()
        .chain(own.into_iter().filter_map(|word| word.as_str().map(str::to_owned)))
        .collect::<Vec<_>>()
        .into_iter()
}

fn condition<'a>(object: &'a Value, kind: &str) -> &'a Value {
    let conditions = object["status"]["conditions"].as_array().unwrap();
    conditions.iter().find(|given| given["type"] == kind).unwrap_or(&Value::Null)
}

fn sha256(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_job_leaves_is_fetched_over_cut_connections_and_its_container_goes_with_it() {
    let bench = Bench::new().await;
    let script = "for i in 1 2 3 4; do cat /bin/busybox; done > /work/out; : > /work/done; exec sleep 600";
    bench.run("build", script, |_| {});
    let pod = bench.until("build", "running").await;
    assert_eq!(pod["status"]["phase"], "Running");
    assert_eq!(pod["metadata"]["ownerReferences"][0]["name"], "build");
    while bench.exec("build", &["test", "-e", "/work/done"]).await.1.unwrap()["status"] != "Success" {}
    let (told, status) = bench.exec("build", &["sha256sum", "/work/out"]).await;
    assert_eq!(status.unwrap()["status"], "Success");
    let wanted = String::from_utf8(told).unwrap().split(' ').next().unwrap().to_owned();

    let (all, status) = bench.exec("build", &["cat", "/work/out"]).await;
    assert!(all.len() > 2_000_000, "{}", all.len());
    assert_eq!((sha256(&all), status.unwrap()["status"].as_str()), (wanted.clone(), Some("Success")));

    bench.api.cut_execs(&[500_000, 1_000_000, 1]);
    let (mut got, mut attempts) = (Vec::new(), 0);
    loop {
        attempts += 1;
        let from = format!("+{}", got.len() + 1);
        let (piece, status) = bench.exec("build", &["tail", "-c", &from, "/work/out"]).await;
        got.extend(piece);
        if status.is_some() {
            break;
        }
        let cut_at = [500_000, 1_500_000, 1_500_001][attempts - 1];
        assert_eq!(got.len(), cut_at, "the connection carries exactly the ordered bytes before the cut");
    }
    assert_eq!((attempts, bench.api.cuts_left()), (4, 0));
    assert_eq!(sha256(&got), wanted);

    assert_eq!(bench.api.containers().len(), 1);
    let kind = ApiResource::from_gvk(&GroupVersionKind::gvk("batch", "v1", "Job"));
    let jobs: Api<DynamicObject> = Api::namespaced_with(bench.api.client(), "builds", &kind);
    let background =
        DeleteParams { propagation_policy: Some(PropagationPolicy::Background), ..DeleteParams::default() };
    jobs.delete("build", &background).await.unwrap();
    bench.api.until("its pod is gone", |api| api.list("pods").is_empty()).await;
    bench.api.until("its container is gone", |api| api.containers().is_empty()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_ends_as_its_container_ends() {
    let bench = Bench::new().await;
    bench.run("good", "exit 0", |_| {});
    bench.run("bad", "exit 3", |_| {});
    bench.run("hungry", "exec dd if=/dev/zero of=/dev/null bs=64M count=2", |_| {});
    bench.run("absent", "", |job| {
        job["spec"]["template"]["spec"]["containers"][0]["command"] = json!(["/bin/absent"]);
    });
    bench.run("loud", "echo no such header; exit 2", |job| {
        job["spec"]["template"]["spec"]["containers"][0]["terminationMessagePolicy"] =
            json!("FallbackToLogsOnError");
    });
    assert_eq!(bench.until_job("good", "Complete").await["reason"], "CompletionsReached");
    let good = bench.api.get("jobs.batch", "builds", "good").unwrap();
    assert_eq!((&good["status"]["succeeded"], &good["status"]["active"]), (&json!(1), &Value::Null));
    assert_eq!(bench.pod("good").unwrap()["status"]["phase"], "Succeeded");
    for (job, reason, code) in
        [("bad", "Error", 3), ("hungry", "OOMKilled", 137), ("absent", "StartError", 128)]
    {
        assert_eq!(bench.until_job(job, "Failed").await["reason"], "BackoffLimitExceeded");
        let pod = bench.pod(job).unwrap();
        let terminated = &pod["status"]["containerStatuses"][0]["state"]["terminated"];
        assert_eq!((&terminated["reason"], &terminated["exitCode"]), (&json!(reason), &json!(code)));
        assert_eq!(pod["status"]["phase"], "Failed");
    }
    bench.until_job("loud", "Failed").await;
    let loud = bench.pod("loud").unwrap();
    assert_eq!(loud["status"]["containerStatuses"][0]["state"]["terminated"]["message"], "no such header\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restricted_pod_has_no_network_and_no_rights() {
    let bench = Bench::new().await;
    bench.run("build", "exec sleep 600", |_| {});
    bench.until("build", "running").await;
    let look =
        "id -u; ls /sys/class/net; cat /proc/self/status; echo x > /work/x && echo written; echo x > /x";
    let (seen, status) = bench.exec("build", &["sh", "-c", look]).await;
    let seen = String::from_utf8(seen).unwrap();
    let mut lines = seen.lines();
    assert_eq!((lines.next(), lines.next()), (Some("65532"), Some("lo")), "{seen}");
    for line in
        ["CapEff:\t0000000000000000", "CapBnd:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2", "written"]
    {
        assert!(seen.lines().any(|given| given == line), "{line}: {seen}");
    }
    let status = status.unwrap();
    assert_eq!(status["status"], "Failure", "the root file system is writable");
    assert_eq!(status["details"]["causes"][0], json!({"reason": "ExitCode", "message": "1"}));
    assert_eq!(status["reason"], "NonZeroExitCode");
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_that_are_not_admitted_or_have_no_place_wait() {
    let bench = Bench::new().await;
    let quota = bench.api.limit_pods("builds", 0);
    let place = bench.api.unschedulable("0/3 nodes are available: 3 Insufficient memory.");
    bench.run("build", "exec sleep 600", |_| {});
    bench.api.until("the Event", |_| !bench.messages("build", "FailedCreate").is_empty()).await;
    let told = bench.messages("build", "FailedCreate").remove(0);
    assert!(told.starts_with("Error creating: pods \"build-"), "{told}");
    let words = "is forbidden: exceeded quota: builds, requested: pods=1, used: pods=0, limited: pods=0";
    assert!(told.ends_with(words), "{told}");
    assert!(bench.pod("build").is_none());

    bench.api.take_back(quota);
    bench.api.until("it has a pod", |_| bench.pod("build").is_some()).await;
    bench.api.until("the Event", |_| !bench.messages("build", "FailedScheduling").is_empty()).await;
    let pod = bench.pod("build").unwrap();
    let scheduled = condition(&pod, "PodScheduled");
    assert_eq!((&scheduled["status"], &scheduled["reason"]), (&json!("False"), &json!("Unschedulable")));
    assert_eq!(scheduled["message"], "0/3 nodes are available: 3 Insufficient memory.");
    assert_eq!(pod["status"]["phase"], "Pending");
    bench.api.take_back(place);
    bench.until("build", "running").await;

    bench.run("bold", "exec sleep 600", |job| {
        job["spec"]["template"]["spec"]["containers"][0]["securityContext"] = json!({});
    });
    bench.api.until("the Event", |_| !bench.messages("bold", "FailedCreate").is_empty()).await;
    let told = bench.messages("bold", "FailedCreate").remove(0);
    let words = "is forbidden: violates PodSecurity \"restricted:latest\": allowPrivilegeEscalation != false (container \
                 \"build\" must set securityContext.allowPrivilegeEscalation=false), unrestricted capabilities (container \
                 \"build\" must set securityContext.capabilities.drop=[\"ALL\"])";
    assert!(told.ends_with(words), "{told}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_suspended_job_has_no_pod() {
    let bench = Bench::new().await;
    bench.run("build", "exec sleep 600", |job| job["spec"]["suspend"] = json!(true));
    bench.until_job("build", "Suspended").await;
    assert!(bench.pod("build").is_none());
    let suspend = |suspend: bool| {
        let patch = json!({"spec": {"suspend": suspend}});
        bench.api.patch_as("kueue", "jobs.batch", "builds", "build", &patch);
    };
    suspend(false);
    bench.until("build", "running").await;
    suspend(true);
    bench.api.until("its pod is gone", |_| bench.pod("build").is_none()).await;
    let status = bench.api.get("jobs.batch", "builds", "build").unwrap()["status"].take();
    assert_eq!(status["failed"], Value::Null, "{status}");
    suspend(false);
    bench.until("build", "running").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn images_that_are_not_there_and_deadlines() {
    let bench = Bench::new().await;
    let absent = format!("{}@sha256:{}", bench.image.split('@').next().unwrap(), "0".repeat(64));
    bench.run("lost", "", |job| job["spec"]["template"]["spec"]["containers"][0]["image"] = json!(absent));
    bench.run("slow", "exec sleep 600", |job| {
        job["spec"]["template"]["spec"]["activeDeadlineSeconds"] = json!(1);
    });
    bench.run("late", "exec sleep 600", |job| job["spec"]["activeDeadlineSeconds"] = json!(1));
    let pod = bench.until("lost", "ImagePullBackOff").await;
    let waiting = &pod["status"]["containerStatuses"][0]["state"]["waiting"];
    let message = waiting["message"].as_str().unwrap();
    assert!(message.ends_with(&format!("failed to resolve image: {absent}: not found")), "{message}");
    assert_eq!(pod["status"]["phase"], "Pending");

    let pod = bench.until("slow", "Failed").await;
    assert_eq!(pod["status"]["reason"], "DeadlineExceeded");
    assert_eq!(bench.until_job("slow", "Failed").await["reason"], "BackoffLimitExceeded");
    assert_eq!(bench.until_job("late", "Failed").await["reason"], "DeadlineExceeded");
    assert!(bench.pod("late").is_none(), "the controller deletes the pod");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_ends_a_pod_can_be_told_apart() {
    let bench = Bench::new().await;
    let evicted = "The node was low on resource: memory.";
    let ways = [
        ("evicted", Some(Disruption::Evicted(evicted.to_owned())), "TerminationByKubelet"),
        ("lost", Some(Disruption::NodeLost), "DeletionByPodGC"),
        ("preempted", Some(Disruption::Preempted), "PreemptionByScheduler"),
        ("drained", Some(Disruption::Drained), "EvictionByEvictionAPI"),
        ("deleted", None, ""),
    ];
    for (job, ..) in &ways {
        bench.run(job, "exec sleep 600", |_| {});
    }
    for (job, how, reason) in ways {
        let pod = bench.until(job, "running").await;
        let name = bench.name_of_pod(job);
        let version = pod["metadata"]["resourceVersion"].as_str().unwrap();
        let query = format!("fieldSelector=metadata.name%3D{name}&resourceVersion={version}&watch=1");
        let mut watch =
            reqwest::get(format!("{}/api/v1/namespaces/builds/pods?{query}", bench.api.url())).await.unwrap();
        let goes = how != Some(Disruption::Evicted(evicted.to_owned()));
        match how {
            Some(how) => bench.api.disrupt("builds", &name, how),
            None => bench.api.delete("pods", "builds", &name),
        }
        let (mut text, mut seen) = (String::new(), Vec::<Value>::new());
        let over = |event: &Value| {
            if goes { event["type"] == "DELETED" } else { event["object"]["status"]["phase"] == "Failed" }
        };
        while !seen.last().is_some_and(over) {
            let chunk = tokio::time::timeout(Duration::from_mins(1), watch.chunk()).await.unwrap();
            text.push_str(std::str::from_utf8(&chunk.unwrap().unwrap()).unwrap());
            seen = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        }
        let last = &seen.last().unwrap()["object"];
        assert_eq!(last["status"]["phase"], "Failed", "{job}");
        let state = &last["status"]["containerStatuses"][0]["state"];
        if job == "lost" {
            assert!(state["running"].is_object(), "no exit status is reported: {state}");
        } else {
            assert_eq!(state["terminated"]["exitCode"], 137, "{job}");
        }
        if !reason.is_empty() {
            assert_eq!(condition(last, "DisruptionTarget")["reason"], reason, "{job}");
        }
        if !goes {
            assert_eq!(
                (&last["status"]["reason"], &last["status"]["message"]),
                (&json!("Evicted"), &json!(evicted))
            );
        }
        assert_eq!(bench.until_job(job, "Failed").await["reason"], "BackoffLimitExceeded");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_exec_that_cannot_be_is_refused_in_the_servers_words() {
    let bench = Bench::new().await;
    bench.run("build", "exec sleep 600", |_| {});
    bench.run("short", "exit 0", |_| {});
    bench.until("build", "running").await;
    bench.until("short", "Succeeded").await;
    let ask = async |pod: &str, query: &str, upgrade: bool| {
        let url = format!("{}/api/v1/namespaces/builds/pods/{pod}/exec?{query}", bench.api.url());
        let mut request = reqwest::Client::new().get(url);
        if upgrade {
            request = request
                .header("connection", "upgrade")
                .header("upgrade", "websocket")
                .header("sec-websocket-version", "13")
                .header("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ==")
                .header("sec-websocket-protocol", "v5.channel.k8s.io, v4.channel.k8s.io");
        }
        let answer = request.send().await.unwrap();
        (answer.status().as_u16(), answer.text().await.unwrap())
    };
    let (running, ended) = (bench.name_of_pod("build"), bench.name_of_pod("short"));
    let query = "stdout=true&command=true";
    assert_eq!(ask(&ended, query, true).await, (500, "container not found (\"build\")".to_owned()));
    let message = |(code, body): (u16, String)| {
        let status: Value = serde_json::from_str(&body).unwrap();
        (code, status["message"].as_str().unwrap().to_owned())
    };
    assert_eq!(message(ask("gone", query, true).await), (404, "pods \"gone\" not found".to_owned()));
    assert_eq!(message(ask(&running, query, false).await), (400, "Upgrade request required".to_owned()));
    let other = format!("{query}&container=other");
    let told = format!("container other is not valid for pod {running}");
    assert_eq!(message(ask(&running, &other, true).await), (400, told));
    bench.api.deny("create", "pods/exec");
    assert_eq!(
        message(ask(&running, query, true).await),
        (403, format!("pods \"{running}\" is forbidden: "))
    );
    bench.api.allow("create", "pods/exec");
    let (_, status) = bench.exec("build", &["nothere"]).await;
    let status = status.unwrap();
    assert_eq!(status["reason"], "InternalError");
    let why = status["message"].as_str().unwrap();
    assert!(why.contains("exec: \"nothere\": executable file not found in $PATH"), "{why}");
}
