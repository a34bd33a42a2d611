//! The real program removes the startup taint of nodes whose drivers are loaded, and warns before the first write of a DaemonSet.
use serde_json::{Value, json};

use crate::support::{
    kube_api::{Fate, objects::node},
    live::{DRIVER, Live, NAMESPACE},
};

const A: &str = "6.1.0-901-amd64";
const B: &str = "6.1.0-902-amd64";
const TAINT: &str = "farrier.dev/driver-not-ready";

/// Returns a node as an autoscaler creates it, with the startup taint among others.
fn new_node(name: &str, kernel: &str, key: &str) -> Value {
    let mut node = node(name, kernel);
    node["spec"]["taints"] = json!([
        {"key": "example.com/first", "value": "x", "effect": "NoExecute", "timeAdded": "2026-01-02T03:04:05Z"},
        {"key": key, "effect": "NoSchedule"},
        {"key": "example.com/last", "effect": "PreferNoSchedule"},
    ]);
    node
}

/// Returns the taints' keys.
fn taints(live: &Live, name: &str) -> Vec<String> {
    let node = live.api.get("nodes", "", name).unwrap();
    let taints = node["spec"]["taints"].as_array().unwrap().iter();
    taints.map(|taint| taint["key"].as_str().unwrap().to_owned()).collect()
}

/// Changes the pod template of the DaemonSet.
fn patch_template(live: &Live, spec: &Value) {
    let body = json!({"spec": {"template": {"spec": spec}}});
    live.api.patch_as("kubectl", "daemonsets.apps", NAMESPACE, DRIVER, &body);
}

/// Switches `startupTaint` on, and lets the DaemonSet tolerate all taints. Its container has a readiness probe.
fn enable(live: &Live, image: &str) {
    live.site.define(
        "site.yaml",
        "apiVersion: farrier.dev/v1alpha1\nkind: Site\nmetadata: {name: site}\nspec: {startupTaint: true}\n",
    );
    let probe = json!({"exec": {"command": ["cat", "/run/driver-entrypoint/ready"]}});
    patch_template(
        live,
        &json!({
            "tolerations": [{"operator": "Exists"}],
            "containers": [{"name": "driver", "image": image, "readinessProbe": probe}],
        }),
    );
}

#[test]
fn a_startup_taint_is_removed_once_the_driver_is_loaded() {
    let mut live = Live::new([new_node("n0", A, TAINT)], "image");
    enable(&live, "vendor.example/driver:1");
    let published = live.publish_for("n0", &[B]);
    live.api.run_daemon_sets(true, |_| Fate::NotReady("CrashLoopBackOff".to_owned(), "no device".to_owned()));
    live.start(&["--interval", "1"]);
    let image = published[A].clone();
    live.until("the reason", |live| {
        live.log().contains("drivers/driver-") && live.log().contains("is not ready")
    });
    assert_eq!(live.image(DRIVER), image);
    let all = ["example.com/first", TAINT, "example.com/last"];
    assert_eq!(taints(&live, "n0"), all, "{}", live.log());
    let writes = live.writes_to("nodes");
    live.api.run_daemon_sets(true, |_| Fate::Ready);
    patch_template(&live, &json!({"hostNetwork": true}));
    live.until("the taint is gone", |live| !taints(live, "n0").contains(&TAINT.to_owned()));
    let node = live.api.get("nodes", "", "n0").unwrap();
    let rest = json!([
        {"key": "example.com/first", "value": "x", "effect": "NoExecute", "timeAdded": "2026-01-02T03:04:05Z"},
        {"key": "example.com/last", "effect": "PreferNoSchedule"},
    ]);
    assert_eq!(node["spec"]["taints"], rest);
    // A kernel without an image, and Cluster Autoscaler's form of the taint.
    let scaled = "startup-taint.cluster-autoscaler.kubernetes.io/farrier-driver-not-ready";
    live.api.load([new_node("n1", A, scaled), new_node("n2", B, TAINT)]);
    live.until("the other form is gone", |live| !taints(live, "n1").contains(&scaled.to_owned()));
    live.until("the reason", |live| live.log().contains("not known to have the modules"));
    assert_eq!(taints(&live, "n2"), all);
    assert_eq!(live.writes_to("nodes"), writes + 2, "{}", live.log());
    let why = live.command(&["why", "node/n2"]).output().unwrap();
    let said = String::from_utf8_lossy(&why.stdout);
    assert!(
        said.contains("startup taint") && said.contains(&format!("{TAINT} stays: pod drivers/")),
        "{said}"
    );
}

#[test]
fn a_single_run_removes_the_taint_too_and_none_without_the_setting() {
    let live = Live::new([new_node("n0", A, TAINT)], "image");
    enable(&live, "vendor.example/driver:1");
    let published = live.publish();
    enable(&live, &published[A]);
    live.api.run_daemon_sets(true, |_| Fate::Ready);
    live.api.settle();
    let once = || live.command(&["run", "--once"]).output().unwrap();
    let site = std::fs::read_to_string(live.site.definitions().join("site.yaml")).unwrap();
    live.site.define("site.yaml", &site.replace("startupTaint: true", "startupTaint: false"));
    once();
    assert_eq!(live.writes_to("nodes"), 0);
    let why = live.command(&["why", "node/n0"]).output().unwrap();
    let said = String::from_utf8_lossy(&why.stdout);
    assert!(said.contains("set startupTaint: true in site.yaml"), "{said}");
    live.site.define("site.yaml", &site);
    let said = String::from_utf8_lossy(&once().stdout).into_owned();
    assert!(said.contains("untainted node n0"), "{said}");
    assert_eq!(taints(&live, "n0"), ["example.com/first", "example.com/last"]);
    assert!(String::from_utf8_lossy(&once().stdout).contains("nothing to do"));
}
