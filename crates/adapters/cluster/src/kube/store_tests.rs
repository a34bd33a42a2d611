//! Tests of the store: the objects that it keeps, the lists that it waits for, and the changes that it reports.

use std::collections::HashMap;

use farrier_core::{
    image::OperatorResource,
    plan::{
        JobState, KERNEL_LABEL, NodeFacts, ObjectVersion, PodFacts, ResourceFacts, UPGRADE, UpdateStrategy,
        WorkloadFacts,
    },
};
use serde_json::json;

use super::{
    super::{super::error::PermissionScope, facts},
    *,
};

fn scope(names: &[&str]) -> SnapshotScope {
    SnapshotScope {
        labels: [KERNEL_LABEL.to_owned()].into(),
        daemon_sets: names.iter().map(|name| ("s".to_owned(), (*name).to_owned())).collect(),
        resources: [OperatorResource::ClusterPolicy].into(),
        ..SnapshotScope::default()
    }
}

fn daemon_set(name: &str, version: u64, image: &str, labels: &[(&str, &str)]) -> Object {
    let labels: BTreeMap<_, _> = labels.iter().copied().collect();
    let object = serde_json::from_value(json!({
        "metadata": {"name": name, "namespace": "s", "uid": format!("uid-{name}"), "labels": labels,
                     "resourceVersion": version.to_string()},
        "spec": {
            "selector": {"matchLabels": {"app": name}},
            "template": {"spec": {"nodeSelector": {"pci": "yes"}, "containers": [{"name": "c", "image": image}]}},
        },
        "status": {"numberReady": version},
    }));
    facts::daemon_set(object.unwrap(), "farrier").unwrap()
}

fn node(name: &str, version: &str, labels: &[(&str, &str)]) -> Object {
    let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    let facts = NodeFacts { name: name.to_owned(), labels, ..NodeFacts::default() };
    let version = ObjectVersion { uid: name.to_owned(), resource_version: version.to_owned() };
    Object { version, facts: ObjectFacts::Node(facts.into()) }
}

fn pod(name: &str, version: &str, ready: bool) -> Object {
    let version = ObjectVersion { uid: name.to_owned(), resource_version: version.to_owned() };
    let facts = PodFacts {
        namespace: "s".to_owned(),
        name: name.to_owned(),
        version: version.clone(),
        daemon_set: "uid-driver".to_owned(),
        node: "n".to_owned(),
        bound: true,
        probed: Vec::new(),
        pull_secrets: 0,
        images: BTreeMap::new(),
        ready,
        stable_since: None,
        created: None,
        deleting: false,
        messages: Vec::new(),
        pull_failure: None,
    };
    Object { version, facts: ObjectFacts::Pod(Box::new(facts)) }
}

fn permission() -> MissingPermission {
    MissingPermission {
        user: None,
        verb: "list",
        group: String::new(),
        resource: "pods".to_owned(),
        scope: PermissionScope::Namespace("s".to_owned()),
        verbs: &["list"],
    }
}

fn list(store: &mut Store, target: &WatchTarget, epoch: u64, objects: Vec<Object>) {
    store.event(target, epoch, Event::Init);
    for object in objects {
        store.event(target, epoch, Event::InitApply(object));
    }
    store.event(target, epoch, Event::InitDone);
}

fn is_equivalent_version(store: &Store, version: &ObjectVersion) -> bool {
    let key = ("s".to_owned(), "driver".to_owned());
    store.get(&WatchTarget::DaemonSets, &key).unwrap().is_equivalent_version(version)
}

fn pods() -> WatchTarget {
    WatchTarget::Pods {
        namespace: "s".to_owned(),
        daemon_set: "driver".to_owned(),
        uid: "uid-driver".to_owned(),
    }
}

fn epoch(started: &[(WatchTarget, WatchScope, u64)], target: &WatchTarget) -> u64 {
    started.iter().find(|(started, ..)| started == target).unwrap().2
}

/// A store that knows DaemonSet `driver` and node `n`, with the epochs of its watches.
fn synced() -> (Store, HashMap<WatchTarget, u64>) {
    let mut store = Store::new(scope(&["driver"]));
    let (first, _) = store.reconcile();
    let resources = WatchTarget::Resources(OperatorResource::ClusterPolicy);
    list(
        &mut store,
        &WatchTarget::DaemonSets,
        epoch(&first, &WatchTarget::DaemonSets),
        vec![daemon_set("driver", 10, "i:1", &[]), daemon_set("stranger", 11, "i:1", &[])],
    );
    store.record_failure(&resources, epoch(&first, &resources), WatchFailure::NotServed);
    let (second, stopped) = store.reconcile();
    assert!(stopped.is_empty());
    let labels = [(KERNEL_LABEL, "k"), ("pci", "yes"), ("other", "x")];
    list(&mut store, &WatchTarget::Nodes, epoch(&second, &WatchTarget::Nodes), vec![node("n", "5", &labels)]);
    assert!(matches!(store.readiness(), Readiness::Waiting));
    list(&mut store, &pods(), epoch(&second, &pods()), vec![pod("p", "7", false)]);
    assert!(matches!(store.readiness(), Readiness::Ready));
    let epochs = first.into_iter().chain(second).map(|(target, _, epoch)| (target, epoch)).collect();
    (store, epochs)
}

#[test]
fn workloads_are_watched_while_their_node_is_drained() {
    let (mut store, epochs) = synced();
    let in_state = |state: &str, version: &str| {
        let mut object = node("n", version, &[(KERNEL_LABEL, "k"), ("pci", "yes")]);
        let ObjectFacts::Node(facts) = &mut object.facts else { panic!("no node") };
        let at = "2026-01-01T00:00:00Z";
        let note = json!({"rollout": "s/driver", "state": state, "since": at, "began": at, "to": "i:2"});
        facts.annotations.insert(UPGRADE.to_owned(), note.to_string());
        Event::Apply(object)
    };
    let nodes = epochs[&WatchTarget::Nodes];
    store.event(&WatchTarget::Nodes, nodes, in_state("cordoned", "6"));
    assert!(store.reconcile().0.is_empty(), "no upgrade drains a node");
    store.set_snapshot_scope(SnapshotScope {
        drains: true,
        checks: ["s".to_owned()].into(),
        ..scope(&["driver"])
    });
    assert!(matches!(store.readiness(), Readiness::Waiting), "an incomplete list is not an empty one");
    let (started, _) = store.reconcile();
    let (checks, workloads) =
        (WatchTarget::Checks { namespace: "s".to_owned() }, WatchTarget::Workloads { node: "n".to_owned() });
    let fields = "spec.nodeName=n,status.phase!=Succeeded,status.phase!=Failed";
    assert_eq!(started[1].1, WatchScope::Fields(fields.to_owned()));
    let job = ObjectFacts::Check(("s".to_owned(), "job".to_owned()), JobState::Succeeded);
    let version = |uid: &str| ObjectVersion { uid: uid.to_owned(), resource_version: "1".to_owned() };
    list(&mut store, &checks, epoch(&started, &checks), vec![Object { version: version("j"), facts: job }]);
    let user = WorkloadFacts { name: "u".to_owned(), uid: "u".to_owned(), ..WorkloadFacts::default() };
    let user = Object { version: version("u"), facts: ObjectFacts::Workload(Box::new(user)) };
    list(&mut store, &workloads, epoch(&started, &workloads), vec![user]);
    assert!(matches!(store.readiness(), Readiness::Ready) && !store.pod_has_ended("u"));
    let snapshot = store.snapshot();
    assert_eq!((snapshot.workloads.len(), &snapshot.checks["job"]), (1, &JobState::Succeeded));

    store.event(&WatchTarget::Nodes, nodes, in_state("driver-restarted", "7"));
    assert_eq!(store.reconcile().1, std::slice::from_ref(&workloads));
    store.event(&WatchTarget::Nodes, nodes, in_state("drained", "8"));
    let (started, _) = store.reconcile();
    store.record_failure(&workloads, epoch(&started, &workloads), WatchFailure::Forbidden(permission()));
    assert!(matches!(store.readiness(), Readiness::Ready));
    assert!(store.snapshot().unseen[&ObservedKind::Workloads].contains("farrier may not list pods"));
}

#[test]
fn a_forbidden_namespace_of_checks_does_not_hide_other_namespaces() {
    let (mut store, _) = synced();
    store.set_snapshot_scope(SnapshotScope {
        checks: ["s".to_owned(), "other".to_owned()].into(),
        ..scope(&["driver"])
    });
    let (started, _) = store.reconcile();
    let [hidden, seen] = ["other", "s"].map(|name| WatchTarget::Checks { namespace: name.to_owned() });
    let job = ObjectFacts::Check(("s".to_owned(), "job".to_owned()), JobState::Succeeded);
    let version = ObjectVersion { uid: "j".to_owned(), resource_version: "1".to_owned() };
    list(&mut store, &seen, epoch(&started, &seen), vec![Object { version, facts: job }]);
    store.record_failure(&hidden, epoch(&started, &hidden), WatchFailure::Forbidden(permission()));
    assert!(matches!(store.readiness(), Readiness::Ready));
    let snapshot = store.snapshot();
    assert_eq!(snapshot.checks["job"], JobState::Succeeded);
    assert_eq!(snapshot.why_unseen(ObservedKind::Checks, "s"), None);
    let why = snapshot.why_unseen(ObservedKind::Checks, "other");
    assert!(why.is_some_and(|why| why.contains("farrier may not list pods")), "{why:?}");
    assert_eq!((snapshot.unseen.len(), snapshot.all_unseen().count()), (0, 1));
}

#[test]
fn only_objects_and_labels_in_scope_are_kept() {
    let (store, _) = synced();
    let snapshot = store.snapshot();
    assert_eq!(snapshot.daemon_sets.iter().map(|facts| facts.name.as_str()).collect::<Vec<_>>(), ["driver"]);
    assert_eq!(snapshot.daemon_sets[0].live.as_ref().unwrap().update, UpdateStrategy::RollingUpdate);
    let labels: Vec<_> = snapshot.nodes[0].labels.keys().map(String::as_str).collect();
    assert_eq!(labels, [KERNEL_LABEL, "pci"], "labels of interest, and labels that a DaemonSet selects");
    assert_eq!((snapshot.pods.len(), snapshot.resources.len()), (1, 0));
    assert!(snapshot.unseen.is_empty());
}

#[test]
fn nodes_are_listed_after_the_objects_that_select_them() {
    let mut store = Store::new(scope(&["driver"]));
    let (first, _) = store.reconcile();
    let targets: Vec<_> = first.iter().map(|(target, ..)| target.clone()).collect();
    assert_eq!(targets, [WatchTarget::DaemonSets, WatchTarget::Resources(OperatorResource::ClusterPolicy)]);
    assert!(matches!(store.readiness(), Readiness::Waiting));
}

#[test]
fn a_new_selector_label_relists_the_nodes() {
    let (mut store, epochs) = synced();
    let object = serde_json::from_value(json!({
        "metadata": {"name": "driver", "namespace": "s", "uid": "uid-driver", "resourceVersion": "12"},
        "spec": {"selector": {"matchLabels": {"app": "driver"}}, "template": {"spec": {
            "nodeSelector": {"zone": "a"}, "containers": []}}},
    }));
    let update = facts::daemon_set(object.unwrap(), "farrier").unwrap();
    assert!(store.event(&WatchTarget::DaemonSets, epochs[&WatchTarget::DaemonSets], Event::Apply(update)));
    assert!(matches!(store.readiness(), Readiness::Waiting), "the labels have not arrived yet");
    let (started, stopped) = store.reconcile();
    assert_eq!((started.len(), &started[0].0, stopped.len()), (1, &WatchTarget::Nodes, 0));
    let late = store.event(&WatchTarget::Nodes, epochs[&WatchTarget::Nodes], Event::InitDone);
    assert!(
        !late && matches!(store.readiness(), Readiness::Waiting),
        "events of the replaced watch are ignored"
    );
    list(&mut store, &WatchTarget::Nodes, started[0].2, vec![node("n", "5", &[("zone", "a")])]);
    assert!(matches!(store.readiness(), Readiness::Ready));
    assert_eq!(store.snapshot().nodes[0].labels["zone"], "a");
}

/// Regression test: a policy for some nodes matched no node, because the store did not keep its label.
#[test]
fn labels_that_an_operator_resource_selects_are_kept() {
    let selects = [OperatorResource::NicNodePolicy, OperatorResource::NvidiaDriver];
    let mut store = Store::new(SnapshotScope { resources: selects.into(), ..scope(&["driver"]) });
    let (first, _) = store.reconcile();
    let daemon_sets = epoch(&first, &WatchTarget::DaemonSets);
    list(&mut store, &WatchTarget::DaemonSets, daemon_sets, vec![daemon_set("driver", 10, "i:1", &[])]);
    assert!(store.reconcile().0.is_empty(), "nodes are listed after all objects that select them");
    for (kind, key) in selects.into_iter().zip(["rack", "gpu"]) {
        let target = WatchTarget::Resources(kind);
        let facts = ResourceFacts {
            kind,
            name: key.to_owned(),
            version: Some(ObjectVersion { uid: key.to_owned(), resource_version: "11".to_owned() }),
            why_not_editable: BTreeMap::new(),
            annotations: BTreeMap::new(),
            owned: BTreeSet::new(),
            created: None,
            operator_error: None,
            spec: json!({"nodeSelector": {key: "a"}}).into(),
        };
        let object =
            Object { version: facts.version.clone().unwrap(), facts: ObjectFacts::Resource(Box::new(facts)) };
        list(&mut store, &target, epoch(&first, &target), vec![object]);
    }
    let (second, _) = store.reconcile();
    let labels = [("rack", "a"), ("gpu", "a"), ("other", "x")];
    list(&mut store, &WatchTarget::Nodes, epoch(&second, &WatchTarget::Nodes), vec![node("n", "5", &labels)]);
    list(&mut store, &pods(), epoch(&second, &pods()), Vec::new());
    assert!(matches!(store.readiness(), Readiness::Ready));
    let kept: Vec<_> = store.snapshot().nodes[0].labels.keys().cloned().collect();
    assert_eq!(kept, ["gpu", "rack"]);
}

/// Regression test: a rollback missed objects whose rollouts are not, or no longer, in the definitions.
#[test]
fn a_rollback_keeps_daemon_sets_with_a_record() {
    let recorded = |name: &str, annotation: &str| {
        let object = serde_json::from_value(json!({
            "metadata": {"name": name, "namespace": "s", "uid": name, "resourceVersion": "9",
                         "annotations": {annotation: "{}"}},
            "spec": {"selector": {"matchLabels": {"app": name}}, "template": {"spec": {"containers": []}}},
        }));
        facts::daemon_set(object.unwrap(), "farrier").unwrap()
    };
    let all = || {
        let copy = daemon_set("copy", 9, "i:1", &[(COPY_OF_LABEL, "original")]);
        let (set, original) =
            (recorded("set", RECORD_ANNOTATION), recorded("original", PER_KERNEL_ANNOTATION));
        vec![set, original, copy, daemon_set("named", 9, "i:1", &[]), recorded("other", "farrier.dev/x")]
    };
    let kept = |scope: SnapshotScope| {
        let mut store = Store::new(scope);
        let (first, _) = store.reconcile();
        list(&mut store, &WatchTarget::DaemonSets, epoch(&first, &WatchTarget::DaemonSets), all());
        for (target, _, epoch) in first.iter().filter(|(target, ..)| *target != WatchTarget::DaemonSets) {
            store.record_failure(target, *epoch, WatchFailure::NotServed);
        }
        let (second, _) = store.reconcile();
        let names: Vec<String> = store.daemon_sets().map(|facts| facts.name.clone()).collect();
        (names.join(" "), first.len(), second.len())
    };
    let named = [("s".to_owned(), "named".to_owned())];
    assert_eq!(kept(SnapshotScope::for_rollback(named)), ("copy named original set".to_owned(), 6, 1));
    // The reconcile loop keeps only objects that rollouts name, and watches their pods.
    assert_eq!(kept(scope(&["named"])), ("copy named".to_owned(), 2, 3));
}

#[test]
fn heartbeats_and_status_updates_are_not_changes() {
    let (mut store, epochs) = synced();
    let before = store.generation();
    let labels = [(KERNEL_LABEL, "k"), ("pci", "yes"), ("other", "y")];
    for (target, update) in [
        (WatchTarget::Nodes, node("n", "6", &labels)),
        (WatchTarget::DaemonSets, daemon_set("driver", 20, "i:1", &[])),
        (pods(), pod("p", "8", false)),
    ] {
        assert!(!store.event(&target, epochs[&target], Event::Apply(update)), "{target:?}");
    }
    assert_eq!(store.generation(), before);
    let version =
        |version: &str| ObjectVersion { uid: "uid-driver".to_owned(), resource_version: version.to_owned() };
    for (number, same) in [("10", true), ("20", true), ("15", false)] {
        assert_eq!(is_equivalent_version(&store, &version(number)), same, "{number}");
    }
    let snapshot = store.snapshot();
    assert_eq!(snapshot.daemon_sets[0].live.as_ref().unwrap().version, version("20"));
    assert!(store.event(&pods(), epochs[&pods()], Event::Apply(pod("p", "9", true))));
    let update = daemon_set("driver", 21, "i:2", &[]);
    assert!(store.event(&WatchTarget::DaemonSets, epochs[&WatchTarget::DaemonSets], Event::Apply(update)));
    assert!(!is_equivalent_version(&store, &version("20")));
}

#[test]
fn a_stale_event_does_not_replace_a_write_response() {
    let (mut store, epochs) = synced();
    let ds = epochs[&WatchTarget::DaemonSets];
    store.put(&WatchTarget::DaemonSets, daemon_set("driver", 30, "i:9", &[]));
    store.event(&WatchTarget::DaemonSets, ds, Event::Apply(daemon_set("driver", 25, "i:1", &[])));
    assert_eq!(store.snapshot().daemon_sets[0].containers[0].image, "i:9");
    list(&mut store, &WatchTarget::DaemonSets, ds, vec![daemon_set("driver", 3, "i:3", &[])]);
    assert_eq!(
        store.snapshot().daemon_sets[0].containers[0].image,
        "i:3",
        "a list replaces newer states, as after a restore of the cluster"
    );
}

#[test]
fn copies_are_kept_and_their_pods_are_watched_until_deletion() {
    let (mut store, epochs) = synced();
    let ds = epochs[&WatchTarget::DaemonSets];
    let copy = daemon_set("driver-k", 40, "i:1", &[(farrier_core::plan::COPY_OF_LABEL, "driver")]);
    assert!(store.event(&WatchTarget::DaemonSets, ds, Event::Apply(copy.clone())));
    let (started, _) = store.reconcile();
    assert!(matches!(&started[0].0, WatchTarget::Pods { daemon_set, .. } if daemon_set == "driver-k"));
    assert!(store.event(&WatchTarget::DaemonSets, ds, Event::Delete(copy)));
    let (_, stopped) = store.reconcile();
    assert_eq!(stopped, [started[0].0.clone()]);
    assert_eq!(store.snapshot().daemon_sets.len(), 1);
}

#[test]
fn a_list_removes_objects_that_it_does_not_contain() {
    let (mut store, epochs) = synced();
    list(&mut store, &WatchTarget::Nodes, epochs[&WatchTarget::Nodes], vec![node("m", "9", &[])]);
    list(&mut store, &pods(), epochs[&pods()], Vec::new());
    let snapshot = store.snapshot();
    assert_eq!(snapshot.nodes.iter().map(|node| node.name.as_str()).collect::<Vec<_>>(), ["m"]);
    assert!(snapshot.pods.is_empty());
    list(&mut store, &WatchTarget::DaemonSets, epochs[&WatchTarget::DaemonSets], Vec::new());
    assert!(store.snapshot().daemon_sets.is_empty());
}

#[test]
fn deleting_a_predecessor_keeps_the_pod_of_the_same_name() {
    let (mut store, epochs) = synced();
    let mut old = pod("p", "1", false);
    old.version.uid = "another".to_owned();
    assert!(!store.event(&pods(), epochs[&pods()], Event::Delete(old)));
    assert!(!store.pod_has_ended("p"));
    assert!(store.event(&pods(), epochs[&pods()], Event::Delete(pod("p", "9", false))));
    assert!(store.pod_has_ended("p"));
}

#[test]
fn a_missing_permission_is_reported_until_it_is_granted() {
    let (mut store, epochs) = synced();
    assert!(store.record_failure(&pods(), epochs[&pods()], WatchFailure::Forbidden(permission())));
    assert!(
        !store.record_failure(&pods(), epochs[&pods()], WatchFailure::Forbidden(permission())),
        "reported once"
    );
    let snapshot = store.snapshot();
    assert!(snapshot.pods.is_empty() && matches!(store.readiness(), Readiness::Ready));
    assert_eq!(
        snapshot.unseen_in[&(ObservedKind::Pods, "s".to_owned())],
        "farrier may not list pods in namespace s: kubectl create role farrier-list-pods --namespace s --verb list --resource pods && \
         kubectl create rolebinding farrier-list-pods --namespace s --role farrier-list-pods --user NAME"
    );
    list(&mut store, &pods(), epochs[&pods()], vec![pod("p", "7", false)]);
    assert_eq!(store.snapshot().all_unseen().count(), 0);
    let forbidden = WatchFailure::Forbidden(permission());
    store.record_failure(&WatchTarget::Nodes, epochs[&WatchTarget::Nodes], forbidden);
    assert!(
        matches!(store.readiness(), Readiness::Failed(ApiError::Forbidden(_))),
        "without nodes there is no plan"
    );
}

#[test]
fn only_a_failing_first_list_fails_the_snapshot() {
    let failing =
        |attempts| WatchFailure::Failing { attempts, error: ApiError::Unavailable("refused".to_owned()) };
    let mut store = Store::new(scope(&[]));
    let (first, _) = store.reconcile();
    let ds = epoch(&first, &WatchTarget::DaemonSets);
    store.record_failure(&WatchTarget::DaemonSets, ds, failing(MAX_FIRST_LIST_ATTEMPTS - 1));
    assert!(matches!(store.readiness(), Readiness::Waiting));
    store.record_failure(&WatchTarget::DaemonSets, ds, failing(MAX_FIRST_LIST_ATTEMPTS));
    assert!(matches!(store.readiness(), Readiness::Failed(ApiError::Unavailable(_))));
    let (mut store, epochs) = synced();
    store.record_failure(&WatchTarget::Nodes, epochs[&WatchTarget::Nodes], failing(99));
    assert!(matches!(store.readiness(), Readiness::Ready), "known objects remain");
    assert_eq!(store.snapshot().nodes.len(), 1);
}

#[test]
fn an_unavailable_server_does_not_clear_a_missing_permission() {
    let (mut store, epochs) = synced();
    let target = WatchTarget::Resources(OperatorResource::ClusterPolicy);
    let away = WatchFailure::Failing { attempts: 1, error: ApiError::Unavailable("refused".to_owned()) };
    store.record_failure(&target, epochs[&target], WatchFailure::Forbidden(permission()));
    store.record_failure(&target, epochs[&target], away);
    assert!(matches!(store.readiness(), Readiness::Ready), "independent watches are not affected");
    assert!(store.snapshot().unseen.contains_key(&ObservedKind::Resources));
}

#[test]
fn a_kind_that_is_no_longer_served_loses_its_objects() {
    let (mut store, epochs) = synced();
    let target = WatchTarget::Resources(OperatorResource::ClusterPolicy);
    let object = json!({"metadata": {"name": "p", "uid": "u", "resourceVersion": "1"}, "spec": {}});
    let object =
        facts::resource(OperatorResource::ClusterPolicy, serde_json::from_value(object).unwrap(), "farrier");
    list(&mut store, &target, epochs[&target], vec![object]);
    assert_eq!(store.snapshot().resources.len(), 1);
    assert!(store.record_failure(&target, epochs[&target], WatchFailure::NotServed));
    assert!(store.snapshot().resources.is_empty() && matches!(store.readiness(), Readiness::Ready));
}

#[test]
fn new_definitions_change_the_watched_daemon_sets() {
    let (mut store, _) = synced();
    store.set_snapshot_scope(scope(&["stranger"]));
    assert!(matches!(store.readiness(), Readiness::Waiting));
    let (started, stopped) = store.reconcile();
    assert_eq!((started[0].0.clone(), started.len(), stopped.len()), (WatchTarget::DaemonSets, 1, 0));
    list(
        &mut store,
        &WatchTarget::DaemonSets,
        started[0].2,
        vec![daemon_set("driver", 10, "i:1", &[]), daemon_set("stranger", 11, "i:1", &[])],
    );
    let (started, stopped) = store.reconcile();
    assert_eq!(stopped, [pods()]);
    assert!(matches!(&started[..], [(WatchTarget::Pods { daemon_set, .. }, ..)] if daemon_set == "stranger"));
    assert_eq!(store.snapshot().daemon_sets[0].name, "stranger");
}
