//! Objects as the API server writes them, and what is left of them.

use serde_json::json;

use super::*;

#[test]
fn a_node_is_its_facts_and_nothing_else() {
    let node: NodeObject = serde_json::from_value(json!({
        "metadata": {
            "name": "n1", "uid": "u", "resourceVersion": "7",
            "labels": {"a": "1"},
            "annotations": {"farrier.dev/next-kernel": "6.1.0", "other": "x".repeat(9)},
            "managedFields": [{"manager": "kubelet"}],
        },
        "spec": {"unschedulable": true, "podCIDR": "10.0.0.0/24"},
        "status": {
            "images": [{"names": ["a"], "sizeBytes": 1}],
            "nodeInfo": {"kernelVersion": "6.1.0", "architecture": "amd64", "osImage": "Debian", "bootID": "b"},
        },
    }))
    .unwrap();
    assert_eq!(node.meta().resource_version.as_deref(), Some("7"));
    let NodeFacts { name, labels, annotations, kernel_version, architecture, os_image, unschedulable } =
        node.facts;
    assert_eq!((name.as_str(), kernel_version.as_str()), ("n1", "6.1.0"));
    assert_eq!((architecture.as_str(), os_image.as_str()), ("amd64", "Debian"));
    assert_eq!(labels, [("a".to_owned(), "1".to_owned())].into());
    assert_eq!(annotations, [("farrier.dev/next-kernel".to_owned(), "6.1.0".to_owned())].into());
    assert!(unschedulable);
}

#[test]
fn a_node_without_anything_is_a_node() {
    for text in [
        r#"{"metadata":{"name":"n"}}"#,
        r#"{"metadata":{"name":"n","labels":null,"annotations":null},"spec":null,"status":{"nodeInfo":null}}"#,
    ] {
        let node: NodeObject = serde_json::from_str(text).unwrap();
        assert_eq!(node.facts, NodeFacts { name: "n".to_owned(), ..NodeFacts::default() });
    }
}

fn pod(spec: &Value, status: &Value) -> PodFacts {
    let pod: PodObject = serde_json::from_value(json!({
        "metadata": {
            "name": "p", "namespace": "s", "uid": "u", "resourceVersion": "1",
            "creationTimestamp": "2026-01-02T03:04:05Z",
            "ownerReferences": [
                {"kind": "Node", "name": "x", "uid": "no", "apiVersion": "v1"},
                {"kind": "DaemonSet", "name": "d", "uid": "ds", "apiVersion": "apps/v1", "controller": true},
            ],
        },
        "spec": spec, "status": status,
    }))
    .unwrap();
    pod.facts
}

#[test]
fn a_pod_says_where_it_runs_or_is_meant_to() {
    let containers = json!([{"name": "c", "image": "i:1"}]);
    let bound = pod(&json!({"nodeName": "n1", "containers": containers}), &json!({}));
    assert_eq!((bound.node.as_str(), bound.bound, bound.daemon_set.as_str()), ("n1", true, "ds"));
    assert_eq!(bound.images, [("c".to_owned(), "i:1".to_owned())].into());
    let affinity = json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
        "nodeSelectorTerms": [{"matchFields": [
            {"key": "metadata.name", "operator": "In", "values": ["n2"]}]}]}}});
    let pending = pod(&json!({"affinity": affinity, "containers": containers}), &json!({}));
    assert_eq!((pending.node.as_str(), pending.bound), ("n2", false));
}

#[test]
fn a_pod_says_why_it_does_not_run() {
    let status = json!({
        "conditions": [
            {"type": "Ready", "status": "False"},
            {"type": "PodScheduled", "status": "False", "message": "0/3 nodes fit"},
        ],
        "initContainerStatuses": [{"name": "i", "state": {"terminated": {"reason": "Completed", "exitCode": 0}}}],
        "containerStatuses": [
            {"name": "a", "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
             "lastState": {"terminated": {"reason": "Error", "exitCode": 3, "message": "no\ndevice\u{1b}[0m"}}},
            {"name": "b", "state": {"waiting": {"reason": "ContainerCreating"}}},
        ],
    });
    let facts = pod(&json!({}), &status);
    assert!(!facts.ready);
    assert_eq!(
        facts.messages,
        [
            "a: CrashLoopBackOff: back-off",
            "a: Error: exit code 3: no device [0m",
            "not scheduled: 0/3 nodes fit",
        ]
    );
    let ready = pod(&json!({}), &json!({"conditions": [{"type": "Ready", "status": "True"}]}));
    assert!(ready.ready && ready.messages.is_empty());
}

#[test]
fn states_that_differ_in_status_alone_are_one() {
    let object = |version: &str, ready: u64| {
        WholeObject::new(json!({
            "metadata": {"name": "d", "uid": "u", "resourceVersion": version, "managedFields": [ready]},
            "spec": {"a": 1}, "status": {"numberReady": ready},
        }))
    };
    let (old, new) = (object("1", 0), object("2", 5));
    assert_eq!(old.value, new.value);
    assert_ne!(old.version, new.version);
    assert_eq!(new.name(), "d");
}
