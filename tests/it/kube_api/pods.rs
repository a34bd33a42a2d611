//! Pods of DaemonSets follow their template, are bound to nodes, and are evicted like on a real server.

use super::*;

#[tokio::test]
async fn a_rolling_update_stops_at_a_pod_that_does_not_get_ready() {
    let api = with_daemon_set();
    for name in ["a", "b", "c"] {
        api.create(objects::node(name, "6.1.0-1-amd64"));
    }
    api.run_daemon_sets(true, |start| {
        if start.images[0].ends_with(":1") {
            Fate::Ready
        } else {
            Fate::NotReady("CrashLoopBackOff".to_owned(), "modprobe failed".to_owned())
        }
    });
    let status = || api.get("daemonsets.apps", "drivers", "ofed").unwrap()["status"].clone();
    assert_eq!(status()["numberReady"], 3);
    let image = json!({"containers": [{"name": "driver", "image": "example.test/ofed:2"}]});
    apply(&api, true, config(json!({"name": "ofed"}), image)).await.unwrap();
    assert_eq!((&status()["numberReady"], &status()["updatedNumberScheduled"]), (&json!(2), &json!(1)));
    let pods = api.list("pods");
    let waiting = |pod: &&Value| pod["status"]["containerStatuses"][0]["state"]["waiting"].is_object();
    let failed: Vec<&Value> = pods.iter().filter(waiting).collect();
    assert_eq!(failed.len(), 1);
    assert_eq!(failed[0]["status"]["containerStatuses"][0]["state"]["waiting"]["message"], "modprobe failed");
}

#[tokio::test]
async fn anti_affinity_leaves_a_pod_unbound_until_its_neighbour_is_gone() {
    let api = FakeApi::start();
    api.create(objects::node("a", "6.1.0-1-amd64"));
    api.run_daemon_sets(true, |_| Fate::Ready);
    api.create(objects::daemon_set("drivers", "old", "example.test/ofed:1"));
    let mut new = objects::daemon_set("drivers", "new", "example.test/ofed:2");
    new["spec"]["template"]["spec"]["affinity"]["podAntiAffinity"] = json!({
        "requiredDuringSchedulingIgnoredDuringExecution": [
            {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"app": "old"}}},
        ],
    });
    api.create(new);
    let node_of = |app: &str| {
        let pods = api.list("pods");
        let pod = pods.iter().find(|pod| pod["metadata"]["labels"]["app"] == app).unwrap();
        pod["spec"]["nodeName"].as_str().map(str::to_owned)
    };
    assert_eq!(node_of("old").as_deref(), Some("a"));
    assert_eq!(node_of("new"), None);
    api.delete("daemonsets.apps", "drivers", "old");
    assert_eq!(node_of("new").as_deref(), Some("a"));
}

#[tokio::test]
async fn an_eviction_asks_the_budgets() {
    let api = with_daemon_set();
    api.create(objects::node("a", "6.1.0-1-amd64"));
    api.run_daemon_sets(true, |_| Fate::Ready);
    api.create(objects::budget("drivers", "keep", "ofed", 1));
    let pod = api.list("pods").remove(0)["metadata"].take();
    // kube's client would retry a 429 for minutes, so send the request directly.
    let url =
        format!("{}/api/v1/namespaces/drivers/pods/{}/eviction", api.url(), pod["name"].as_str().unwrap());
    let evict = async || {
        let eviction =
            json!({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod["name"]}});
        let request = reqwest::Client::new().post(&url).body(eviction.to_string());
        let answer = request.send().await.unwrap();
        (answer.status().as_u16(), serde_json::from_slice::<Value>(&answer.bytes().await.unwrap()).unwrap())
    };
    let (code, refused) = evict().await;
    assert_eq!(code, 429);
    assert_eq!(refused["message"], "Cannot evict pod as it would violate the pod's disruption budget.");
    let why = "The disruption budget keep needs 1 healthy pods and has 1 currently";
    assert_eq!(refused["details"]["causes"][0]["message"], why);
    api.delete("poddisruptionbudgets.policy", "drivers", "keep");
    assert_eq!(evict().await.0, 201);
    assert_ne!(
        api.list("pods")[0]["metadata"]["uid"],
        pod["uid"],
        "its DaemonSet has not created another pod"
    );
}
