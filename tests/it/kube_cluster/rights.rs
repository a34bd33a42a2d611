//! farrier's permissions at an API server, and its name as a field manager.

use farrier_core::image::RolloutSpec;

use super::*;
use crate::support::logs::Logs;

#[tokio::test]
async fn a_kind_that_is_forbidden_is_named_with_its_rule_and_the_rest_goes_on() {
    let api = cluster();
    api.deny("list", "daemonsets.apps");
    let kube = connect(&api).await;
    let snapshot = until(&kube, "a snapshot", |_| true).await;
    assert_eq!(snapshot.nodes.len(), 2);
    let told = &snapshot.unseen[&ObservedKind::DaemonSets];
    for part in ["system:serviceaccount:farrier:farrier", "list", "daemonsets", "apps"] {
        assert!(told.contains(part), "{part} is not in: {told}");
    }
    assert!(api.writes().is_empty());
    api.allow("list", "daemonsets.apps");
    let snapshot =
        until(&kube, "the permission is granted", |snapshot| !snapshot.daemon_sets.is_empty()).await;
    assert!(!snapshot.unseen.contains_key(&ObservedKind::DaemonSets));
}

#[tokio::test]
async fn without_nodes_there_is_no_snapshot_until_they_may_be_read() {
    let api = cluster();
    api.deny("list", "nodes");
    let kube = connect(&api).await;
    let error = kube.snapshot().await.unwrap_err();
    assert!(matches!(error, ClusterError::Api { error: ApiError::Forbidden(_), .. }), "{error}");
    assert!(error.to_string().contains("nodes"), "{error}");
    api.allow("list", "nodes");
    let wait = async {
        while kube.snapshot().await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_mins(1), wait).await.unwrap();
}

#[tokio::test]
async fn a_forbidden_write_names_its_rule() {
    let api = cluster();
    let kube = connect(&api).await;
    let snapshot = watched(&api, &kube).await;
    api.deny("patch", "daemonsets.apps");
    let error = kube.apply(&rewrite(&snapshot)).await.unwrap_err();
    assert!(matches!(error, ClusterError::Api { error: ApiError::Forbidden(_), .. }), "{error}");
    let told = format!("{error}\n{}", error.hint().unwrap_or_default());
    assert!(told.contains("patch") && told.contains("daemonsets"), "{told}");
    assert_eq!(api.count(&patches()), 1, "a forbidden write is not retried");
}

#[tokio::test]
async fn the_rights_of_rollouts_are_asked_for_beforehand() {
    let api = cluster();
    let kube = connect(&api).await;
    let rollout = |spec| serde_json::from_value::<RolloutSpec>(spec).unwrap();
    let daemon_set = |namespace: &str| {
        rollout(
            json!({"strategy": "image", "namespace": namespace, "daemonSet": "driver", "container": "main"}),
        )
    };
    let rollouts = [
        daemon_set("gpu"),
        daemon_set("gpu"),
        daemon_set("net"),
        rollout(
            json!({"strategy": "custom-resource", "resource": "ClusterPolicy", "name": "cluster-policy"}),
        ),
    ];
    let upgrade = rollout(json!({
        "strategy": "image", "namespace": "gpu", "daemonSet": "driver", "container": "main",
        "upgrade": {"drain": "node", "waitFor": {"job": "smoke"}},
    }));
    assert!(kube.missing_permissions(rollouts.iter().chain([&upgrade])).await.unwrap().is_empty());
    for (verb, resource) in
        [("list", "pods"), ("create", "pods/eviction"), ("get", "cronjobs.batch"), ("create", "jobs.batch")]
    {
        api.deny(verb, resource);
    }
    assert!(
        kube.missing_permissions(&rollouts).await.unwrap().is_empty(),
        "only upgrades need these permissions"
    );
    let missing = kube.missing_permissions([&upgrade]).await.unwrap();
    let told: Vec<String> = missing.iter().map(ToString::to_string).collect();
    let told: Vec<&str> = told.iter().map(|text| text.split(" (as").next().unwrap()).collect();
    assert_eq!(
        told,
        [
            "cannot roll out: farrier may not create pods/eviction in namespace gpu",
            "cannot roll out: farrier may not list pods in all namespaces",
            "cannot roll out: farrier may not create pods/eviction in all namespaces",
            "cannot roll out: farrier may not get cronjobs.batch in namespace gpu",
            "cannot roll out: farrier may not create jobs.batch in namespace gpu",
        ]
    );
    let undrained = rollout(json!({
        "strategy": "image", "namespace": "gpu", "daemonSet": "driver", "container": "main", "upgrade": {},
    }));
    let missing = kube.missing_permissions([&undrained]).await.unwrap();
    assert_eq!(missing.len(), 1, "evicting the driver's own pod needs a permission: {missing:?}");
    api.deny("patch", "daemonsets.apps");
    api.deny("patch", "nodes");
    let missing = kube.missing_permissions(&rollouts).await.unwrap();
    let told: Vec<String> = missing.iter().map(ToString::to_string).collect();
    let told: Vec<&str> = told.iter().map(|text| text.split(" (as").next().unwrap()).collect();
    assert_eq!(
        told,
        [
            "cannot roll out: farrier may not patch nodes",
            "cannot roll out: farrier may not patch daemonsets.apps in namespace gpu",
            "cannot roll out: farrier may not patch daemonsets.apps in namespace net",
        ]
    );
    let hint = missing[1].hint().unwrap();
    assert!(hint.contains("kubectl create role farrier-patch-daemonsets --namespace gpu "), "{hint}");
}

#[tokio::test]
async fn the_rights_of_builds_in_the_cluster_are_asked_for_beforehand() {
    let api = cluster();
    let kube = connect(&api).await;
    assert!(kube.missing_build_permissions("farrier-builds").await.unwrap().is_empty());
    api.deny("create", "pods/exec");
    api.deny("delete", "jobs.batch");
    let missing = kube.missing_build_permissions("farrier-builds").await.unwrap();
    let told: Vec<String> = missing.iter().map(ToString::to_string).collect();
    let told: Vec<&str> = told.iter().map(|text| text.split(" (as").next().unwrap()).collect();
    assert_eq!(
        told,
        [
            "cannot build in the cluster: farrier may not delete jobs.batch in namespace farrier-builds",
            "cannot build in the cluster: farrier may not create pods/exec in namespace farrier-builds",
        ]
    );
    let hint = missing[1].hint().unwrap();
    assert!(hint.contains("--verb get,create --resource pods/exec"), "{hint}");
}

/// A restarted API server refuses requests until it has loaded its authorization data.
#[tokio::test]
async fn refusals_of_a_server_that_has_just_come_back_are_no_missing_rights() {
    let api = cluster();
    let kube = connect(&api).await;
    let snapshot = watched(&api, &kube).await;
    let logs = Logs::start();
    api.go_away();
    for resource in ["nodes", "daemonsets.apps", "pods"] {
        api.fail(Requests::verb("watch").resource(resource), ApiFailure::Forbidden, 2);
    }
    api.fail(patches(), ApiFailure::Forbidden, 1);
    let change = rewrite(&snapshot);
    let back = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        api.come_back();
    };
    let (written, ()) = tokio::join!(kube.apply(&change), back);
    written.unwrap();
    assert_eq!(image_in(&api), NEW);
    api.set_kernel("a", "6.1.0-2-amd64");
    until(&kube, "the change is seen", |snapshot| {
        assert!(snapshot.unseen.is_empty(), "{:?}", snapshot.unseen);
        kernel_of(snapshot, "a") == "6.1.0-2-amd64"
    })
    .await;
    assert_eq!(logs.with("was unavailable and still refuses requests").len(), 1, "{:?}", logs.with(""));
}

#[tokio::test]
async fn a_named_farrier_writes_under_its_name() {
    let api = cluster();
    let directory = tempfile::tempdir().unwrap();
    let options = KubeOptions {
        kubeconfig: Some(api.kubeconfig(directory.path())),
        discovery_interval: Some(Duration::from_millis(20)),
        instance: "gpu".parse().unwrap(),
        ..KubeOptions::default()
    };
    let kube = KubeCluster::connect(options, scope(), CancellationToken::new()).await.unwrap();
    let snapshot = watched(&api, &kube).await;
    kube.apply(&rewrite(&snapshot)).await.unwrap();
    let mark = BTreeMap::from([("farrier.dev/ready-for.gpu".to_owned(), Some("k".to_owned()))]);
    let change =
        NodeChange { name: "a".to_owned(), labels: mark.clone(), annotations: mark, ..NodeChange::default() };
    kube.apply(&Change::Node(change)).await.unwrap();
    for (resource, namespace, name) in [("daemonsets.apps", "drivers", "ofed"), ("nodes", "", "a")] {
        let object = api.get(resource, namespace, name).unwrap();
        let entries = object["metadata"]["managedFields"].as_array().unwrap();
        let is = |manager: &str| entries.iter().any(|entry| entry["manager"] == manager);
        assert!(is("farrier-gpu") && !is("farrier"), "{entries:?}");
    }
    // farrier still sees its own mark, although no definition selects that label.
    let next = kube.snapshot().await.unwrap();
    let marked = next.nodes.iter().find(|node| node.name == "a").unwrap();
    assert_eq!(marked.labels["farrier.dev/ready-for.gpu"], "k");
}

/// farrier neither writes nor reads pods in namespaces that the deployment does not name, whatever its permissions are.
#[tokio::test]
async fn nothing_is_written_in_a_namespace_that_is_not_named() {
    let api = cluster();
    let directory = tempfile::tempdir().unwrap();
    let options = KubeOptions {
        kubeconfig: Some(api.kubeconfig(directory.path())),
        writable: "gpu,net".parse().unwrap(),
        ..KubeOptions::default()
    };
    let kube = KubeCluster::connect(options, scope(), CancellationToken::new()).await.unwrap();
    let snapshot = kube.snapshot().await.unwrap();
    assert!(!snapshot.writable.contains("drivers") && snapshot.pods.is_empty());
    let (namespace, name) = ("drivers".to_owned(), "ofed-x".to_owned());
    let restart = PodRestart { namespace, name, uid: "u".to_owned(), ..PodRestart::default() };
    for change in [rewrite(&snapshot), Change::Restart(restart)] {
        let error = kube.apply(&change).await.unwrap_err().to_string();
        assert!(error.contains("farrier writes in gpu,net, but not in drivers"), "{error}");
    }
    assert!(api.writes().is_empty());
    assert_eq!(api.count(&Requests::verb("list").resource("pods")), 0);
}
