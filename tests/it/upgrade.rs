//! Ordered upgrades by the real program: users of a device are evicted within their budgets, a killed farrier resumes, and
//! users can intervene. `ci/e2e upgrade` runs the same scenarios on a real API server with real controllers.
use std::{
    fs,
    net::TcpListener,
    path::Path,
    process::{Child, Command, Stdio},
};

use serde_json::{Value, json};

use crate::support::{
    kube_api::{
        Fate,
        objects::{budget, node},
    },
    live::{DRIVER, Live, NAMESPACE, OLD_IMAGE},
    packages::unpacked,
};

const KERNEL: &str = "6.1.0-901-amd64";
const NOTE: &str = "farrier.dev/upgrade";

/// Creates three nodes with a ready pod of the old image, and publishes the new image.
fn fleet(upgrade: &str) -> (Live, String) {
    let live = Live::new((0..3).map(|number| node(&format!("n{number}"), KERNEL)), "image");
    let file = live.site.definitions().join("images/driver.yaml");
    let with = format!("container: driver, stableFor: 1s, deadline: 1m, upgrade: {upgrade}}}");
    let definition = fs::read_to_string(&file).unwrap().replace("container: driver}", &with);
    fs::write(file, definition).unwrap();
    let on_delete = json!({"spec": {"updateStrategy": {"type": "OnDelete", "rollingUpdate": null}}});
    live.api.patch_as("kubectl", "daemonsets.apps", NAMESPACE, DRIVER, &on_delete);
    live.api.run_daemon_sets(true, |_| Fate::Ready);
    let image = live.publish()[KERNEL].clone();
    (live, image)
}

/// Returns a ready pod in a namespace that farrier does not write to.
fn workload(name: &str, node: &str, resource: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": "apps", "labels": {"app": name}},
        "spec": {"nodeName": node, "containers": [
            {"name": "c", "image": "i:1", "resources": {"requests": {resource: "1"}, "limits": {resource: "1"}}}]},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
    })
}

fn is_there(live: &Live, pod: &str) -> bool {
    live.api.get("pods", "apps", pod).is_some()
}

/// Returns the image of the driver's pod on a node.
fn driver_on(live: &Live, node: &str) -> String {
    let pods = live.api.list("pods");
    let mut here = pods
        .iter()
        .filter(|pod| pod["spec"]["nodeName"] == node && pod["spec"]["containers"][0]["name"] == "driver");
    let image = here.next().map(|pod| pod["spec"]["containers"][0]["image"].as_str().unwrap().to_owned());
    assert!(here.next().is_none(), "two driver pods on {node}");
    image.unwrap_or_default()
}

/// Creates the CronJob whose template upgrades use for their Jobs.
fn cron_job(live: &Live, name: &str) {
    live.api.create(json!({
        "apiVersion": "batch/v1", "kind": "CronJob", "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"schedule": "0 0 1 1 *", "suspend": true, "jobTemplate": {"spec": {"backoffLimit": 0, "template": {
            "spec": {"restartPolicy": "Never", "containers": [{"name": name, "image": "smoke:1"}]}}}}},
    }));
}

/// Returns the Job on a node.
fn job_on(live: &Live, node: &str) -> Value {
    let is_here = |job: &Value| job["spec"]["template"]["spec"]["nodeName"] == node;
    live.until("a Job on the node", |live| live.api.list("jobs.batch").iter().any(is_here));
    live.api.list("jobs.batch").into_iter().find(is_here).unwrap()
}

fn end_job(live: &Live, node: &str, condition: &str) {
    let conditions = json!([{"type": condition, "status": "True", "message": "no device"}]);
    let job = job_on(live, node);
    let name = job["metadata"]["name"].as_str().unwrap();
    live.api.patch_status("jobs.batch", NAMESPACE, name, &json!({"conditions": conditions}));
}

/// Returns the node's upgrade label, and whether the node is cordoned.
fn state(live: &Live, node: &str) -> (String, bool) {
    let node = live.api.get("nodes", "", node).unwrap();
    let label = node["metadata"]["labels"][NOTE].as_str().unwrap_or_default().to_owned();
    (label, node["spec"]["unschedulable"] == true)
}

fn has(live: &Live, node: &str, label: &str, cordoned: bool) -> bool {
    state(live, node) == (label.to_owned(), cordoned)
}

/// Runs a user's command and returns its JSON result.
fn said(live: &Live, words: &[&str]) -> Value {
    let output = live.command(&[words, &["-o", "json"]].concat()).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words:?}: {stderr}");
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{words:?}: {error}: {stderr}"))
}

/// Returns the plan's message about what a node waits for.
fn waits(live: &Live, node: &str) -> String {
    let plan = said(live, &["upgrade", "plan"]);
    let nodes = plan[0]["nodes"].as_array().unwrap();
    let turn = nodes.iter().find(|turn| turn["node"] == node).unwrap();
    turn["waits"]["message"].as_str().unwrap_or_default().to_owned()
}

#[test]
fn users_of_a_device_leave_within_their_budgets_and_nodes_are_given_back() {
    let (mut live, image) =
        fleet(r"{canary: 1, drain: device-users, deviceResources: [example.org/*], graceSeconds: 7}");
    live.api.create(workload("user", "n0", "example.org/device"));
    live.api.create(workload("other", "n0", "example.net/device"));
    live.api.create(budget("apps", "keep", "user", 1));
    live.api.patch_as("kubectl", "nodes", "", "n2", &json!({"spec": {"unschedulable": true}}));
    live.start(&[]);
    live.until("a refusal", |live| live.log().contains("a pod may not be evicted now"));
    assert_eq!(state(&live, "n0"), ("cordoned".to_owned(), true));
    assert_eq!((driver_on(&live, "n0").as_str(), is_there(&live, "user")), (OLD_IMAGE, true));
    assert_eq!(waits(&live, "n0"), "pods that must leave first: 1");
    assert_eq!(waits(&live, "n1"), "waits for the canary nodes");
    let why = said(&live, &["why", "node/n1"]).to_string();
    assert!(why.contains("waits: waits for the canary nodes"), "{why}");
    let asked = live.api.requests().into_iter().filter(|asked| asked.path.ends_with("/user/eviction"));
    let asked: Vec<Value> =
        asked.map(|asked| asked.body["deleteOptions"]["gracePeriodSeconds"].clone()).collect();
    assert!(asked.len() <= 2 && asked.iter().all(|grace| *grace == 7), "{asked:?}");

    live.api.delete("poddisruptionbudgets.policy", "apps", "keep");
    live.until("both nodes are uncordoned with their driver", |live| {
        ["n0", "n1"].iter().all(|node| driver_on(live, node) == image && has(live, node, "uncordoned", false))
    });
    assert!(!is_there(&live, "user") && is_there(&live, "other"));
    assert_eq!((driver_on(&live, "n2").as_str(), state(&live, "n2")), (OLD_IMAGE, (String::new(), true)));
    assert_eq!(waits(&live, "n2"), "another actor cordoned the node");
    live.until("all unneeded watches have ended", |live| live.api.open_watches("pods") == 1);
}

#[test]
fn a_farrier_that_is_killed_between_two_steps_leaves_no_node_behind() {
    let (mut live, image) = fleet("{drain: node}");
    for node in ["n0", "n1", "n2"] {
        live.api.create(workload(&format!("on-{node}"), node, "cpu"));
    }
    let is_done = |live: &Live| {
        ["n0", "n1", "n2"]
            .iter()
            .all(|node| driver_on(live, node) == image && has(live, node, "uncordoned", false))
    };
    let steps = |live: &Live| {
        let writes = live.api.writes();
        writes
            .iter()
            .filter(|write| !write.path.contains("driverbuilds") && !write.path.contains("events"))
            .count()
    };
    for round in 0.. {
        assert!(round < 200, "no progress\n{}", live.log());
        let before = steps(&live);
        live.start(&[]);
        live.until("a step or the final state", |live| steps(live) > before || is_done(live));
        live.kill();
        let taken = ["n0", "n1", "n2"].into_iter().filter(|node| state(&live, node).1);
        let taken: Vec<&str> = taken.collect();
        assert!(taken.len() <= 1, "{taken:?} at once");
        for node in taken {
            let found = live.api.get("nodes", "", node).unwrap();
            let note: Value =
                serde_json::from_str(found["metadata"]["annotations"][NOTE].as_str().unwrap()).unwrap();
            assert_eq!(note["cordoned"], true, "{node} records the owner of its cordon: {note}");
        }
        if is_done(&live) {
            return;
        }
    }
}

#[test]
fn a_person_pauses_an_upgrade_goes_on_and_gives_it_up() {
    let (mut live, image) = fleet("{maxParallel: 3}");
    let object = format!("{NAMESPACE}/{DRIVER}");
    assert_eq!(said(&live, &["upgrade", "pause", &object])["paused"], true);
    live.start(&["--interval", "1"]);
    live.until("some reconciles", |live| live.reconciles() > 2);
    let plan = live.command(&["plan"]).output().unwrap().stdout;
    let plan = String::from_utf8(plan).unwrap();
    assert!(plan.contains("it is paused; to resume, remove"), "{plan}");
    assert_eq!((live.image(DRIVER), driver_on(&live, "n1")), (OLD_IMAGE.to_owned(), OLD_IMAGE.to_owned()));
    said(&live, &["upgrade", "resume", &object]);
    let all =
        |live: &Live, wanted: &str| ["n0", "n1", "n2"].iter().all(|node| driver_on(live, node) == wanted);
    live.until("all nodes have the new driver", |live| all(live, &image));
    let taken = said(&live, &["upgrade", "abort", &object]);
    assert_eq!(taken[0]["fields"]["driver"]["outcome"], "restored", "{taken}");
    live.until("all nodes have the old driver again", |live| all(live, OLD_IMAGE));
    assert_eq!(live.image(DRIVER), OLD_IMAGE);
    let past = said(&live, &["upgrade", "history"]);
    let [past] = past.as_array().unwrap().as_slice() else { panic!("{past}") };
    assert_eq!((&past["object"], &past["outcome"]), (&json!(object), &json!("rolled-back")));
    assert_eq!(past["from"], OLD_IMAGE);
    let shown = live.command(&["upgrade", "history", &object]).output().unwrap();
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.contains("rolled back"), "{shown}");

    let unknown = live.command(&["upgrade", "pause", "drivers/none"]).output().unwrap();
    let stderr = String::from_utf8_lossy(&unknown.stderr);
    assert!(unknown.status.code() == Some(2) && stderr.contains("there is no such DaemonSet"), "{stderr}");
}

#[test]
fn a_job_says_whether_a_node_does_well() {
    let (mut live, image) = fleet("{waitFor: {job: smoke}, onFailure: stop, drain: node}");
    cron_job(&live, "smoke");
    live.start(&[]);
    let pod = job_on(&live, "n0")["spec"]["template"]["spec"].clone();
    assert_eq!(pod["automountServiceAccountToken"], false, "{pod}");
    end_job(&live, "n0", "Failed");
    live.until("the node has failed and is uncordoned", |live| has(live, "n0", "failed", false));
    assert_eq!(waits(&live, "n1"), "stopped, because node n0 failed");
    let shown = live.command(&["upgrade", "plan"]).output().unwrap();
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(shown.contains("its check failed: no device"), "{shown}");
    assert_eq!(live.api.list("jobs.batch").len(), 1);

    live.until("an Event of the node", |live| {
        let events = live.api.list("events.events.k8s.io");
        events.iter().any(|event| event["reason"] == "UpgradeFailed" && event["regarding"]["name"] == "n0")
    });

    let told = said(&live, &["upgrade", "resume", &format!("{NAMESPACE}/{DRIVER}")]);
    assert_eq!(told["forgiven"], json!(["n0"]));
    for node in ["n1", "n2"] {
        end_job(&live, node, "Complete");
        live.until("the node is done", |live| has(live, node, "uncordoned", false));
    }
    assert!(["n0", "n1", "n2"].iter().all(|node| driver_on(&live, node) == image));
    live.until("the upgrade is over", |live| said(live, &["upgrade", "history"])[0]["outcome"] == "good");
    // n0 already runs the driver, and its failure is cleared, so its upgrade does not start again.
    assert_eq!(said(&live, &["upgrade", "history"])[0]["nodes"], json!({"uncordoned": 2}));
}

#[test]
fn a_driver_goes_when_a_forecast_has_found_that_nothing_holds_it() {
    let (mut live, image) = fleet("{drain: device-users, forecast: forecast}");
    cron_job(&live, "forecast");
    for user in ["user", "other"] {
        live.api.create(workload(user, "n0", "cpu"));
    }
    let uid = |pod: &Value| pod["metadata"]["uid"].as_str().unwrap().to_owned();
    let pods = live.api.list("pods");
    let driver =
        pods.iter().find(|pod| pod["spec"]["nodeName"] == "n0" && pod["metadata"]["namespace"] == NAMESPACE);
    live.start(&[]);
    let job = job_on(&live, "n0");
    let variable = json!([{"name": "FARRIER_DRIVER_POD", "value": uid(driver.unwrap())}]);
    assert_eq!(job["spec"]["template"]["spec"]["containers"][0]["env"], variable);

    // The status that a kubelet reports for a restarted container.
    let holder = uid(&live.api.get("pods", "apps", "user").unwrap());
    let mut forecast = workload("forecast-of-n0", "n0", "cpu");
    forecast["metadata"]["namespace"] = NAMESPACE.into();
    forecast["metadata"]["labels"] = json!({"batch.kubernetes.io/job-name": job["metadata"]["name"]});
    let message = format!("{holder} acme: used by process 12 (train) with /dev/acme0 open\n");
    forecast["status"]["containerStatuses"] = json!([{
        "name": "forecast", "image": "i", "imageID": "", "ready": false, "restartCount": 1,
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        "lastState": {"terminated": {"exitCode": 1, "reason": "Error", "message": message}},
    }]);
    live.api.create(forecast);
    live.until("the pod with the open device is gone", |live| !is_there(live, "user"));
    assert!(is_there(&live, "other") && driver_on(&live, "n0") == OLD_IMAGE);
    end_job(&live, "n0", "Complete");
    live.until("the node has its driver", |live| {
        driver_on(live, "n0") == image && has(live, "n0", "uncordoned", false)
    });

    end_job(&live, "n1", "Failed");
    live.until("the next node keeps its pod", |live| has(live, "n1", "not-drained", false));
    assert_eq!(driver_on(&live, "n1"), OLD_IMAGE);
    let why = waits(&live, "n1");
    assert!(why.ends_with("its driver cannot be unloaded: no device"), "{why}");
}

/// A real Prometheus with the alerts of `deploy/`, which scrapes one farrier; stopped on drop.
struct Prometheus {
    process: Child,
    address: String,
}

impl Prometheus {
    fn start(directory: &Path, farrier: &str) -> Self {
        let alerts = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("deploy/kustomize/components/alerts/prometheus-rule.yaml");
        let alerts: Value = serde_saphyr::from_str(&fs::read_to_string(alerts).unwrap()).unwrap();
        fs::write(directory.join("rules.yaml"), alerts["spec"].to_string()).unwrap();
        let configuration = json!({
            "global": {"scrape_interval": "200ms", "scrape_timeout": "200ms", "evaluation_interval": "200ms"},
            "rule_files": ["rules.yaml"],
            "scrape_configs": [{"job_name": "farrier", "static_configs": [{"targets": [farrier]}]}],
        });
        let file = directory.join("prometheus.yaml");
        fs::write(&file, configuration.to_string()).unwrap();
        let address = free_address();
        let process = Command::new(unpacked("prometheus").join("usr/bin/prometheus"))
            .arg(format!("--config.file={}", file.display()))
            .arg(format!("--storage.tsdb.path={}", directory.join("figures").display()))
            .arg(format!("--web.listen-address={address}"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Self { process, address }
    }

    /// Returns whether kured would block a reboot. Its rule (`pkg/blockers/prometheus.go`): each active alert blocks, here with
    /// the options `--alert-filter-regexp=^FarrierUpgradeUnderWay$ --alert-filter-match-only --alert-firing-only`. `None`
    /// without an answer.
    fn blocks_reboots(&self) -> Option<bool> {
        let query = format!("http://{}/api/v1/query?query=ALERTS", self.address);
        let output = Command::new("curl").args(["-sS", &query]).output().expect("run curl");
        let answer: Value = serde_json::from_slice(&output.stdout).ok()?;
        let blocks = |sample: &Value| {
            sample["metric"]["alertname"] == "FarrierUpgradeUnderWay"
                && sample["metric"]["alertstate"] == "firing"
                && sample["value"][1] != "0"
        };
        Some(answer["data"]["result"].as_array()?.iter().any(blocks))
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn free_address() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

#[test]
fn kured_reboots_no_node_while_one_gets_another_driver() {
    let (mut live, image) = fleet("{drain: node}");
    live.api.create(workload("user", "n0", "cpu"));
    live.api.create(budget("apps", "keep", "user", 1));
    let farrier = free_address();
    let directory = live.site.path("prometheus");
    fs::create_dir(&directory).unwrap();
    let prometheus = Prometheus::start(&directory, &farrier);
    live.until("an answer", |_| prometheus.blocks_reboots().is_some());
    assert_eq!(prometheus.blocks_reboots(), Some(false));
    live.start_at(&farrier, &[]);
    live.until("kured waits", |_| prometheus.blocks_reboots() == Some(true));
    live.until("the node is held by a budget", |live| has(live, "n0", "cordoned", true));
    live.api.delete("poddisruptionbudgets.policy", "apps", "keep");
    live.until("all nodes have the driver", |live| {
        ["n0", "n1", "n2"].iter().all(|node| driver_on(live, node) == image)
    });
    live.until("kured continues", |_| prometheus.blocks_reboots() == Some(false));
    assert!(["n0", "n1", "n2"].iter().all(|node| has(&live, node, "uncordoned", false)));
}
