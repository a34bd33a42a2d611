//! The real program in clusters as they are: nodes that lose their labels, tainted and dead nodes, and several rollouts of one
//! DaemonSet.
use serde_json::{Value, json};

use crate::support::{
    kube_api::{
        Fate,
        objects::{daemon_set, node},
    },
    live::{DRIVER, Live, NAMESPACE, OLD_IMAGE},
};

const A: &str = "6.1.0-901-amd64";
const B: &str = "6.1.0-902-amd64";

/// Removes all labels of a node that NFD writes.
fn unlabel(live: &Live, name: &str) {
    let node = live.api.get("nodes", "", name).unwrap();
    let labels = node["metadata"]["labels"].as_object().unwrap().keys();
    let gone: serde_json::Map<String, Value> = labels
        .filter(|key| key.starts_with("feature.node.kubernetes.io/"))
        .map(|key| (key.clone(), Value::Null))
        .collect();
    live.api.patch_as("nfd-master", "nodes", "", name, &json!({"metadata": {"labels": gone}}));
}

fn reason(live: &Live) -> String {
    live.plan()["rollouts"][0]["reason"].as_str().unwrap_or_default().to_owned()
}

fn after_a_reconcile(live: &Live) {
    let before = live.reconciles();
    live.until("a reconcile", |live| live.reconciles() > before);
}

/// Returns the images of both containers of a DaemonSet.
fn images(object: &Value) -> [String; 2] {
    let containers = &object["spec"]["template"]["spec"]["containers"];
    [0, 1].map(|place| containers[place]["image"].as_str().unwrap().to_owned())
}

#[test]
fn a_node_that_loses_its_labels_does_not_leave_the_daemon_set_to_the_other_kernel() {
    let mut live = Live::new([node("n0", A), node("n1", B)], "image");
    live.publish();
    live.start(&["--interval", "1"]);
    live.until("a reconcile", |live| live.reconciles() > 0);
    assert_eq!(reason(&live), "mixed-kernels");
    unlabel(&live, "n0");
    for _ in 0..3 {
        after_a_reconcile(&live);
    }
    assert_eq!((live.image(DRIVER).as_str(), reason(&live).as_str()), (OLD_IMAGE, "unlabeled"));
    // The cluster is the only state: a new farrier and a single run decide alike.
    live.kill();
    let once = live.command(&["run", "--once"]).output().unwrap();
    let said = String::from_utf8_lossy(&once.stdout);
    assert!(said.contains("node n0 has no label"), "{said}");
    assert_eq!(live.image(DRIVER), OLD_IMAGE);
    assert_eq!(live.writes_to("daemonsets.apps"), 0);
}

#[test]
fn a_tainted_control_plane_without_a_toleration_holds_nothing() {
    let mut control_plane = node("cp", B);
    control_plane["spec"]["taints"] =
        json!([{"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}]);
    let mut live = Live::new([node("n0", A), control_plane], "image");
    let published = live.publish();
    live.start(&[]);
    live.until("the image", |live| live.image(DRIVER) == published[A]);
    let why = live.command(&["why", "node/cp"]).output().unwrap();
    let said = String::from_utf8_lossy(&why.stdout);
    let taint = "its taint node-role.kubernetes.io/control-plane:NoSchedule is not tolerated";
    assert!(said.contains(taint), "{said}");
}

#[test]
fn a_dead_node_is_named_and_ignored_where_the_site_says_so() {
    let mut dead = node("dead", B);
    dead["status"]["conditions"] =
        json!([{"type": "Ready", "status": "Unknown", "lastTransitionTime": "2026-01-02T03:04:05Z"}]);
    let live = Live::new([node("n0", A), dead], "image");
    let published = live.publish();
    let once = |live: &Live| {
        let output = live.command(&["run", "--once"]).output().unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let said = once(&live);
    assert!(said.contains("node dead is not ready since 2026-01-02T03:04:05Z"), "{said}");
    assert_eq!(live.image(DRIVER), OLD_IMAGE);
    live.site.define(
        "site.yaml",
        "apiVersion: farrier.dev/v1alpha1\nkind: Site\nmetadata: {name: site}\n\
         spec: {ignoreNodes: [{notReadyFor: 1h}]}\n",
    );
    let said = once(&live);
    assert_eq!(live.image(DRIVER), published[A], "{said}");
    assert_eq!(live.plan()["skippedNodes"], json!([]));
    let preflight = live.command(&["preflight", "--kernel", B, "--node", "dead"]).output().unwrap();
    let said = String::from_utf8_lossy(&preflight.stderr);
    assert!(said.contains("ignoreNodes[0] in site.yaml ignores node"), "{said}");
}

/// Adds a second container to the DaemonSet, with an image of its own that `strategy` rolls out.
fn with_second_image(live: &Live, strategy: &str) {
    let mut object = daemon_set(NAMESPACE, DRIVER, OLD_IMAGE);
    let containers = object.pointer_mut("/spec/template/spec/containers").unwrap();
    containers.as_array_mut().unwrap().push(json!({"name": "side", "image": OLD_IMAGE}));
    live.api.patch_as("kubectl", "daemonsets.apps", NAMESPACE, DRIVER, &json!({"spec": object["spec"]}));
    let definition = std::fs::read_to_string(live.site.definitions().join("images/driver.yaml")).unwrap();
    assert!(definition.contains(strategy));
    let second = definition.replace("metadata: {name: driver}", "metadata: {name: second}");
    live.site.define("images/second.yaml", &second.replace("container: driver", "container: side"));
}

#[test]
fn two_images_of_one_daemon_set_are_set_by_one_write() {
    let mut live = Live::new([node("n0", A)], "image");
    with_second_image(&live, "image");
    live.publish();
    live.api.clear_log();
    live.start(&["--interval", "1"]);
    live.until("both images", |live| {
        let object = live.api.get("daemonsets.apps", NAMESPACE, DRIVER).unwrap();
        let [driver, side] = images(&object);
        driver.contains("/driver@") && side.contains("/second@")
    });
    for _ in 0..3 {
        after_a_reconcile(&live);
    }
    assert_eq!(live.writes_to("daemonsets.apps"), 1, "{}", live.log());
    assert!(!live.log().contains("another writer"), "{}", live.log());
}

#[test]
fn the_copies_of_one_daemon_set_get_the_images_of_all_rollouts() {
    let mut live = Live::new([node("n0", A), node("n1", B)], "per-kernel");
    live.api.run_daemon_sets(true, |_| Fate::Ready);
    with_second_image(&live, "per-kernel");
    live.publish();
    live.start(&["--interval", "1"]);
    let copies = |live: &Live| -> Vec<[String; 2]> {
        let all = live.api.list("daemonsets.apps");
        let copies = all.iter().filter(|object| object["metadata"]["name"] != DRIVER);
        copies.map(images).collect()
    };
    live.until("each node runs a copy with both images", |live| {
        let pods = live.api.list("pods");
        let image = |pod: &Value, place: usize| pod["spec"]["containers"][place]["image"].to_string();
        let of_both = |pod: &&Value| image(pod, 0).contains("/driver@") && image(pod, 1).contains("/second@");
        pods.len() == 2 && pods.iter().filter(of_both).count() == 2
    });
    assert_eq!(copies(&live).len(), 2);
    live.api.clear_log();
    for _ in 0..3 {
        after_a_reconcile(&live);
    }
    assert!(
        live.writes_to("daemonsets.apps") <= 2,
        "only the outcome of each copy is recorded\n{}",
        live.log()
    );
}
