//! The live cluster adapter against an API server with injected faults.

mod rights;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use farrier_cluster::{ApiError, Cluster as _, ClusterError, Fence, KubeCluster, KubeOptions};
use farrier_core::{
    image::OperatorResource,
    plan::{
        Change, ClusterSnapshot, DaemonSetChange, DaemonSetFacts, NodeChange, NodeCheck, ObservedKind,
        PodRestart, SnapshotScope, Untaint,
    },
};

use crate::support::kube_api::{ApiFailure, FakeApi, Fate, Kind, Requests, objects};
use serde_json::json;
use tokio_util::sync::CancellationToken;

const OLD: &str = "example.test/ofed:1";
const NEW: &str = "example.test/ofed:2";

/// Starts a server with two nodes and a DaemonSet whose pods run.
fn cluster() -> FakeApi {
    let api = FakeApi::start();
    api.create(objects::node("a", "6.1.0-1-amd64"));
    api.create(objects::node("b", "6.1.0-1-amd64"));
    api.create_as("owner", objects::daemon_set("drivers", "ofed", OLD));
    api.run_daemon_sets(true, |_| Fate::Ready);
    api
}

fn scope() -> SnapshotScope {
    SnapshotScope {
        labels: [objects::KERNEL_LABEL.to_owned()].into(),
        daemon_sets: [("drivers".to_owned(), "ofed".to_owned())].into(),
        resources: [OperatorResource::NicClusterPolicy].into(),
        ..SnapshotScope::default()
    }
}

async fn connect(api: &FakeApi) -> Arc<KubeCluster> {
    let directory = tempfile::tempdir().unwrap();
    let options = KubeOptions {
        kubeconfig: Some(api.kubeconfig(directory.path())),
        discovery_interval: Some(Duration::from_millis(20)),
        ..KubeOptions::default()
    };
    KubeCluster::connect(options, scope(), CancellationToken::new()).await.unwrap()
}

/// Takes snapshots until one satisfies the condition.
async fn until(
    cluster: &KubeCluster,
    what: &str,
    condition: impl Fn(&ClusterSnapshot) -> bool,
) -> ClusterSnapshot {
    let wait = async {
        loop {
            let snapshot = cluster.snapshot().await.unwrap();
            if condition(&snapshot) {
                return snapshot;
            }
            cluster.changed().await;
        }
    };
    let waited = tokio::time::timeout(Duration::from_secs(90), wait).await;
    waited.unwrap_or_else(|_| panic!("waited a minute and a half for {what}"))
}

fn kernel_of<'a>(snapshot: &'a ClusterSnapshot, node: &str) -> &'a str {
    snapshot.nodes.iter().find(|facts| facts.name == node).map_or("", |facts| &facts.kernel_version)
}

fn ofed(snapshot: &ClusterSnapshot) -> &DaemonSetFacts {
    snapshot.daemon_sets.iter().find(|facts| facts.name == "ofed").unwrap()
}

/// Returns the rewrite of the only image, based on this snapshot.
fn rewrite(snapshot: &ClusterSnapshot) -> Change {
    let of = |image: &str| BTreeMap::from([("driver".to_owned(), image.to_owned())]);
    Change::DaemonSet(DaemonSetChange {
        namespace: "drivers".to_owned(),
        name: "ofed".to_owned(),
        version: ofed(snapshot).live.as_ref().map(|live| live.version.clone()),
        expected: of(OLD),
        images: of(NEW),
        affinity: None,
        annotations: BTreeMap::from([("farrier.dev/record".to_owned(), "{}".to_owned())]),
        required_images: Vec::new(),
    })
}

fn image_in(api: &FakeApi) -> String {
    let daemon_set = api.get("daemonsets.apps", "drivers", "ofed").unwrap();
    daemon_set["spec"]["template"]["spec"]["containers"][0]["image"].as_str().unwrap().to_owned()
}

fn patches() -> Requests {
    Requests::verb("patch").resource("daemonsets.apps")
}

/// Waits until nodes, DaemonSets and pods are listed and watched, so that a watch delivers the next change.
async fn watched(api: &FakeApi, cluster: &KubeCluster) -> ClusterSnapshot {
    let snapshot = until(cluster, "all pods are seen", |snapshot| snapshot.pods.len() == 2).await;
    api.until("everything is watched", |api| {
        ["nodes", "daemonsets.apps", "pods"].iter().all(|resource| api.open_watches(resource) == 1)
    })
    .await;
    snapshot
}

#[tokio::test]
async fn a_rewrite_takes_the_image_and_nothing_else_and_is_in_the_next_snapshot() {
    let api = cluster();
    let kube = connect(&api).await;
    let snapshot = watched(&api, &kube).await;
    assert_eq!(snapshot.pods.len(), 2);
    kube.apply(&rewrite(&snapshot)).await.unwrap();
    assert_eq!(image_in(&api), NEW);
    let next = kube.snapshot().await.unwrap();
    assert_eq!(ofed(&next).containers[0].image, NEW);
    let managed = api.get("daemonsets.apps", "drivers", "ofed").unwrap()["metadata"]["managedFields"].take();
    let ours: Vec<_> =
        managed.as_array().unwrap().iter().filter(|entry| entry["manager"] == "farrier").collect();
    assert_eq!(ours.len(), 1);
    assert_eq!(ours[0]["operation"], "Apply");
    let fields = json!({
        "f:metadata": {"f:annotations": {"f:farrier.dev/record": {}}},
        "f:spec": {"f:template": {"f:spec": {"f:containers": {
            "k:{\"name\":\"driver\"}": {".": {}, "f:image": {}, "f:name": {}},
        }}}},
    });
    assert_eq!(ours[0]["fieldsV1"], fields);
}

#[tokio::test]
async fn the_api_server_goes_away_and_comes_back() {
    let api = cluster();
    let kube = connect(&api).await;
    watched(&api, &kube).await;
    api.go_away();
    api.set_kernel("a", "6.1.0-2-amd64");
    let meanwhile = kube.snapshot().await.unwrap();
    assert_eq!(kernel_of(&meanwhile, "a"), "6.1.0-1-amd64", "the last known state is lost");
    api.come_back();
    until(&kube, "the change is seen", |snapshot| kernel_of(snapshot, "a") == "6.1.0-2-amd64").await;
    assert_eq!(
        api.count(&Requests::verb("list").resource("nodes")),
        1,
        "the watch did not resume from its last version"
    );
}

#[tokio::test]
async fn a_write_waits_for_the_server_to_come_back() {
    let api = cluster();
    let kube = connect(&api).await;
    let snapshot = watched(&api, &kube).await;
    api.fail(patches(), ApiFailure::Drop, 1);
    api.fail(patches(), ApiFailure::Unavailable, 1);
    api.fail(patches(), ApiFailure::Internal, 1);
    kube.apply(&rewrite(&snapshot)).await.unwrap();
    assert_eq!(image_in(&api), NEW);
    assert_eq!(api.count(&patches()), 4);
}

#[tokio::test]
async fn a_write_to_a_server_that_stays_away_is_a_transient_fault() {
    let api = cluster();
    let kube = connect(&api).await;
    let snapshot = watched(&api, &kube).await;
    api.go_away();
    let error = kube.apply(&rewrite(&snapshot)).await.unwrap_err();
    assert!(
        error.is_transient() && matches!(error, ClusterError::Api { error: ApiError::Unavailable(_), .. }),
        "{error}"
    );
    assert!(error.to_string().starts_with("cannot write DaemonSet drivers/ofed: "), "{error}");
    assert_eq!(image_in(&api), OLD);
}

#[tokio::test]
async fn a_busy_server_is_asked_again_after_its_retry_after() {
    let api = cluster();
    api.fail(Requests::verb("list").resource("nodes"), ApiFailure::TooManyRequests(1), 1);
    let kube = connect(&api).await;
    let snapshot = watched(&api, &kube).await;
    assert_eq!(snapshot.nodes.len(), 2);
    api.fail(patches(), ApiFailure::TooManyRequests(1), 1);
    kube.apply(&rewrite(&snapshot)).await.unwrap();
    assert_eq!(api.count(&patches()), 2);
}

#[tokio::test]
async fn after_410_everything_is_listed_again_and_nothing_is_missed() {
    let api = cluster();
    let kube = connect(&api).await;
    watched(&api, &kube).await;
    api.hold_watches("nodes");
    api.set_kernel("a", "6.1.0-2-amd64");
    api.delete("nodes", "", "b");
    api.compact();
    api.release_watches("nodes");
    until(&kube, "the missed change is seen", |snapshot| {
        snapshot.nodes.len() == 1 && kernel_of(snapshot, "a") == "6.1.0-2-amd64"
    })
    .await;
    assert_eq!(api.count(&Requests::verb("list").resource("nodes")), 2);
}

#[tokio::test]
async fn a_list_whose_token_expires_begins_anew() {
    let api = cluster();
    api.load((0..600).map(|number| objects::node(&format!("n{number:03}"), "6.1.0-1-amd64")));
    api.fail(Requests::verb("list").resource("nodes").query("continue="), ApiFailure::Gone, 1);
    let kube = connect(&api).await;
    let snapshot = until(&kube, "all nodes", |snapshot| snapshot.nodes.len() == 602).await;
    let names: std::collections::BTreeSet<&str> =
        snapshot.nodes.iter().map(|node| node.name.as_str()).collect();
    assert_eq!(names.len(), 602);
}

#[tokio::test]
async fn errors_of_lists_and_watches_pass() {
    let api = cluster();
    for resource in ["nodes", "daemonsets.apps", "pods"] {
        api.fail(Requests::verb("list").resource(resource), ApiFailure::Internal, 1);
        api.fail(Requests::verb("watch").resource(resource), ApiFailure::Drop, 1);
    }
    let kube = connect(&api).await;
    watched(&api, &kube).await;
    api.set_kernel("b", "6.1.0-2-amd64");
    until(&kube, "a change is seen", |snapshot| kernel_of(snapshot, "b") == "6.1.0-2-amd64").await;
}

#[tokio::test]
async fn a_slow_watch_delays_and_a_write_from_what_is_stale_is_refused() {
    let api = cluster();
    let kube = connect(&api).await;
    let snapshot = watched(&api, &kube).await;
    api.hold_watches("daemonsets.apps");
    let patch = json!({"spec": {"template": {"spec": {"containers": [
        {"name": "driver", "image": "example.test/other:3"},
    ]}}}});
    api.patch_as("somebody", "daemonsets.apps", "drivers", "ofed", &patch);
    assert_eq!(ofed(&kube.snapshot().await.unwrap()).containers[0].image, OLD);
    let error = kube.apply(&rewrite(&snapshot)).await.unwrap_err();
    assert!(error.is_conflict(), "{error}");
    assert_eq!(image_in(&api), "example.test/other:3");
    api.release_watches("daemonsets.apps");
    until(&kube, "the other image is seen", |snapshot| {
        ofed(snapshot).containers[0].image == "example.test/other:3"
    })
    .await;
}

#[tokio::test]
async fn a_daemon_set_that_was_deleted_is_not_made_anew() {
    let api = cluster();
    let kube = connect(&api).await;
    let snapshot = watched(&api, &kube).await;
    api.hold_watches("daemonsets.apps");
    api.delete("daemonsets.apps", "drivers", "ofed");
    kube.apply(&rewrite(&snapshot)).await.unwrap_err();
    assert!(api.get("daemonsets.apps", "drivers", "ofed").is_none());
    // A new DaemonSet of the same name is not written either.
    api.create_as("owner", objects::daemon_set("drivers", "ofed", OLD));
    kube.apply(&rewrite(&snapshot)).await.unwrap_err();
    assert_eq!(image_in(&api), OLD);
    api.release_watches("daemonsets.apps");
    let next = until(&kube, "the new DaemonSet is seen", |snapshot| {
        let uid = api.get("daemonsets.apps", "drivers", "ofed").unwrap()["metadata"]["uid"].take();
        snapshot
            .daemon_sets
            .iter()
            .any(|facts| facts.live.as_ref().is_some_and(|live| uid == live.version.uid.as_str()))
    })
    .await;
    kube.apply(&rewrite(&next)).await.unwrap();
    assert_eq!(image_in(&api), NEW);
}

#[tokio::test]
async fn a_write_whose_answer_is_lost_is_made_once() {
    let api = cluster();
    let kube = connect(&api).await;
    let snapshot = watched(&api, &kube).await;
    api.fail(patches(), ApiFailure::LoseAnswer, 1);
    // After a retry farrier cannot tell its own write from another writer's, so a conflict is acceptable. The next plan sees
    // the result.
    if let Err(error) = kube.apply(&rewrite(&snapshot)).await {
        assert!(error.is_conflict(), "{error}");
    }
    assert_eq!(image_in(&api), NEW);
    assert_eq!(api.get("daemonsets.apps", "drivers", "ofed").unwrap()["metadata"]["generation"], 2);
    until(&kube, "the new image is seen", |snapshot| ofed(snapshot).containers[0].image == NEW).await;
}

#[tokio::test]
async fn one_taint_of_a_node_is_removed_and_the_others_stay_as_they_are() {
    let api = cluster();
    let mut node = objects::node("new", "6.1.0-1-amd64");
    let first =
        json!({"key": "x/a", "value": "v", "effect": "NoExecute", "timeAdded": "2026-01-02T03:04:05Z"});
    let last = json!({"key": "x/b", "effect": "NoSchedule"});
    node["spec"]["taints"] =
        json!([first, {"key": "farrier.dev/driver-not-ready", "effect": "NoSchedule"}, last]);
    api.load([node]);
    let kube = connect(&api).await;
    let snapshot = until(&kube, "the node", |snapshot| snapshot.nodes.len() == 3).await;
    let facts = snapshot.nodes.iter().find(|facts| facts.name == "new").unwrap();
    assert!(facts.created.is_some());
    let untaint = |created| {
        let untaint = Some(Untaint { key: "farrier.dev/driver-not-ready".to_owned(), created });
        Change::Node(NodeChange { name: "new".to_owned(), untaint, ..NodeChange::default() })
    };
    // The node was deleted, and another machine registered under its name.
    let error = kube.apply(&untaint(Some("2020-01-01T00:00:00Z".parse().unwrap()))).await.unwrap_err();
    assert!(error.is_conflict(), "{error}");
    // Another writer adds a taint between farrier's read and its write.
    let change = untaint(facts.created);
    api.fail(Requests::verb("patch").resource("nodes"), ApiFailure::Conflict, 1);
    assert!(kube.apply(&change).await.unwrap_err().is_conflict());
    kube.apply(&change).await.unwrap();
    let written = api.get("nodes", "", "new").unwrap();
    assert_eq!(written["spec"]["taints"], json!([first, last]));
    let next = kube.snapshot().await.unwrap();
    let facts = next.nodes.iter().find(|facts| facts.name == "new").unwrap();
    assert_eq!(facts.taints.len(), 2, "the next snapshot has the write");
    let writes = api.writes().len();
    kube.apply(&change).await.unwrap();
    assert_eq!(api.writes().len(), writes, "without the taint there is nothing to write");
}

#[tokio::test]
async fn hostile_labels_and_annotations_are_facts_like_others() {
    let api = cluster();
    let hostile = ["$(reboot)", "a\nb: c", "\u{202e}\u{0}", "' or 1=1 --", "../../etc/passwd"].join("");
    let mut node = objects::node("hostile", "6.1.0-1-amd64");
    node["metadata"]["labels"][objects::KERNEL_LABEL] = json!(hostile.repeat(100));
    node["metadata"]["annotations"] =
        json!({"farrier.dev/next-kernel": hostile, "other": "x".repeat(200_000)});
    let mut empty = objects::node("empty", "");
    empty["metadata"]["labels"] = json!({});
    empty["status"] = json!({});
    api.load([node, empty]);
    let kube = connect(&api).await;
    let snapshot = until(&kube, "all nodes", |snapshot| snapshot.nodes.len() == 4).await;
    let facts = snapshot.nodes.iter().find(|facts| facts.name == "hostile").unwrap();
    assert_eq!(facts.annotations, BTreeMap::from([("farrier.dev/next-kernel".to_owned(), hostile.clone())]));
    let change = NodeChange {
        name: "hostile".to_owned(),
        annotations: BTreeMap::from([("farrier.dev/told".to_owned(), Some(hostile.clone()))]),
        ..NodeChange::default()
    };
    // The server rejects the invalid label value, and farrier reports an error instead of panicking.
    let error = kube.apply(&Change::Node(change)).await.unwrap_err();
    assert!(matches!(error, ClusterError::Api { error: ApiError::Rejected(_), .. }), "{error}");
}

#[tokio::test]
async fn an_operators_kind_may_appear_later_and_go_again() {
    let api = cluster();
    let kube = connect(&api).await;
    let snapshot = until(&kube, "a snapshot without the resource", |_| true).await;
    assert!(snapshot.resources.is_empty() && snapshot.unseen.is_empty(), "{:?}", snapshot.unseen);
    api.install(Kind::nic_cluster_policy());
    let spec = json!({"ofedDriver": {"version": "1"}});
    api.create(objects::resource("mellanox.com/v1alpha1", "NicClusterPolicy", "nic-cluster-policy", &spec));
    let snapshot = until(&kube, "the resource is seen", |snapshot| !snapshot.resources.is_empty()).await;
    assert_eq!(*snapshot.resources[0].spec, spec);
    api.uninstall("nicclusterpolicies.mellanox.com");
    until(&kube, "the resource is gone", |snapshot| snapshot.resources.is_empty()).await;
}

#[tokio::test]
async fn bookmarks_keep_quiet_watches_from_listing_again_and_nothing_is_written() {
    let api = cluster();
    let kube = connect(&api).await;
    watched(&api, &kube).await;
    for round in 0..3 {
        api.create(json!({
            "apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {"name": format!("noise-{round}"), "namespace": "elsewhere"},
        }));
        api.bookmark();
        // An event after the bookmark proves that farrier has read the bookmark.
        let kernel = format!("6.1.0-{}-amd64", round + 2);
        api.set_kernel("a", &kernel);
        until(&kube, "a change is seen", |snapshot| kernel_of(snapshot, "a") == kernel).await;
        api.patch_as(
            "me",
            "daemonsets.apps",
            "drivers",
            "ofed",
            &json!({"metadata": {"labels": {"round": kernel}}}),
        );
        api.bookmark();
        let seen = |snapshot: &ClusterSnapshot| {
            ofed(snapshot).live.as_ref().is_some_and(|live| live.labels.get("round") == Some(&kernel))
        };
        until(&kube, "the DaemonSet's label is seen", seen).await;
        let watches = api.count(&Requests::verb("watch").resource("nodes"));
        api.go_away();
        api.come_back();
        api.until("the nodes are watched again", |api| {
            api.count(&Requests::verb("watch").resource("nodes")) > watches && api.open_watches("nodes") == 1
        })
        .await;
    }
    for resource in ["nodes", "daemonsets.apps", "pods"] {
        assert_eq!(api.count(&Requests::verb("list").resource(resource)), 1, "{resource}");
    }
    assert!(api.writes().is_empty(), "{:?}", api.writes());
}

struct Closed;

impl Fence for Closed {
    fn closed_reason(&self) -> Option<String> {
        Some("another replica holds the lease".to_owned())
    }
}

#[tokio::test]
async fn behind_a_closed_fence_no_request_is_made() {
    let api = cluster();
    let kube = connect(&api).await;
    let snapshot = watched(&api, &kube).await;
    kube.set_fence(Arc::new(Closed));
    let error = kube.apply(&rewrite(&snapshot)).await.unwrap_err();
    assert!(error.to_string().contains("another replica holds the lease"), "{error}");
    assert!(api.writes().is_empty());
}

#[tokio::test]
async fn a_budget_refuses_an_eviction_in_the_servers_words() {
    let api = cluster();
    api.create(objects::budget("drivers", "keep", "ofed", 2));
    let kube = connect(&api).await;
    let snapshot = watched(&api, &kube).await;
    let pod = &snapshot.pods[0];
    let restart = |uid: &str| {
        Change::Restart(PodRestart {
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            uid: uid.to_owned(),
            why: "its node has another kernel".to_owned(),
            ..PodRestart::default()
        })
    };
    let error = kube.apply(&restart(&pod.version.uid)).await.unwrap_err();
    assert!(matches!(error, ClusterError::Api { error: ApiError::Disruption(_), .. }), "{error}");
    assert!(error.to_string().contains("disruption budget"), "{error}");
    assert_eq!(
        api.count(&Requests::verb("create").subresource("eviction")),
        1,
        "the eviction is not retried"
    );
    api.delete("poddisruptionbudgets.policy", "drivers", "keep");
    let evictions = Requests::verb("create").subresource("eviction");
    api.fail(evictions.clone(), ApiFailure::Internal, 1);
    let error = kube.apply(&restart(&pod.version.uid)).await.unwrap_err();
    assert!(error.is_unreachable(), "{error}");
    assert_eq!(api.count(&evictions), 2, "a webhook that does not answer is not asked again at once");
    kube.apply(&restart("of-another-pod")).await.unwrap_err();
    assert!(api.get("pods", &pod.namespace, &pod.name).is_some(), "a pod with another uid is not evicted");
    kube.apply(&restart(&pod.version.uid)).await.unwrap();
    assert!(api.get("pods", &pod.namespace, &pod.name).is_none());
}

/// A missing CronJob is not mistaken for a deleted object, which farrier would ignore.
#[tokio::test]
async fn a_check_without_its_cron_job_is_said() {
    let api = cluster();
    let kube = connect(&api).await;
    let check = NodeCheck {
        node: "a".to_owned(),
        namespace: "drivers".to_owned(),
        template: "smoke".to_owned(),
        name: "farrier-check-1".to_owned(),
        driver_pod: None,
    };
    let error = kube.apply(&Change::Check(check)).await.unwrap_err();
    assert!(
        !error.is_conflict() && error.to_string().contains("there is no CronJob smoke in drivers"),
        "{error}"
    );
}
