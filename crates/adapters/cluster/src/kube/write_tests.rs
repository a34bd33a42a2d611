//! Tests of write bodies, and of the checks that prevent a write.

use std::sync::Arc;

use farrier_core::{
    image::OperatorResource,
    plan::{DaemonSetFacts, LiveDaemonSet, Operator, Requirement, SelectorTerm},
};
use serde_json::json;

use super::*;

fn stored_daemon_set() -> StoredObject {
    let object = serde_json::from_value(json!({
        "metadata": {"name": "driver", "namespace": "gpu", "uid": "u1", "resourceVersion": "5"},
        "spec": {"selector": {"matchLabels": {"app": "d"}}, "template": {"spec": {
            "initContainers": [{"name": "prepare", "image": "p:1"}],
            "containers": [{"name": "driver", "image": "d:1"}, {"name": "probe", "image": "q:1"}],
        }}},
    }));
    StoredObject::new(facts::daemon_set(object.unwrap(), "farrier").unwrap())
}

fn live() -> LiveDaemonSet {
    match stored_daemon_set().object.facts {
        ObjectFacts::DaemonSet(facts) => DaemonSetFacts::clone(&facts).live.unwrap(),
        _ => panic!("no DaemonSet"),
    }
}

fn version(uid: &str, resource_version: &str) -> ObjectVersion {
    ObjectVersion { uid: uid.to_owned(), resource_version: resource_version.to_owned() }
}

fn strings<const N: usize>(entries: [(&str, &str); N]) -> BTreeMap<String, String> {
    entries.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

fn change(images: BTreeMap<String, String>) -> DaemonSetChange {
    DaemonSetChange {
        namespace: "gpu".to_owned(),
        name: "driver".to_owned(),
        version: Some(version("u1", "5")),
        expected: strings([("driver", "d:1")]),
        images,
        affinity: None,
        annotations: strings([("farrier.dev/record", "{}")]),
        required_images: Vec::new(),
    }
}

#[test]
fn an_apply_contains_only_farriers_fields() {
    let live = live();
    let mut change = change(strings([("driver", "d@sha256:1"), ("prepare", "p@sha256:2")]));
    assert_eq!(
        bodies::daemon_set(&change, &live).unwrap(),
        json!({
            "apiVersion": "apps/v1", "kind": "DaemonSet",
            "metadata": {"name": "driver", "namespace": "gpu", "uid": "u1", "resourceVersion": "5",
                         "annotations": {"farrier.dev/record": "{}"}},
            "spec": {"template": {"spec": {
                "initContainers": [{"name": "prepare", "image": "p@sha256:2"}],
                "containers": [{"name": "driver", "image": "d@sha256:1"}],
            }}},
        })
    );
    let requirement =
        Requirement { key: "kernel".to_owned(), operator: Operator::NotIn, values: vec!["k".to_owned()] };
    change.affinity =
        Some(NodeAffinity::Terms(vec![SelectorTerm { expressions: vec![requirement], fields: Vec::new() }]));
    assert_eq!(
        bodies::daemon_set(&change, &live).unwrap()["spec"]["template"]["spec"]["affinity"],
        json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
            {"matchExpressions": [{"key": "kernel", "operator": "NotIn", "values": ["k"]}]}]}}})
    );
}

#[test]
fn an_unwritable_field_fails_the_whole_body() {
    let live = live();
    let unknown = change(strings([("driver", "d:2"), ("nope", "x")]));
    assert_eq!(
        bodies::daemon_set(&unknown, &live).unwrap_err(),
        "the pod template has no container \"nope\""
    );
    let mut odd = change(strings([("driver", "d:2")]));
    odd.affinity = Some(NodeAffinity::Unsupported("x".to_owned()));
    assert!(bodies::daemon_set(&odd, &live).is_err());
}

#[test]
fn bodies_of_nodes_resources_and_evictions() {
    let node = NodeChange {
        name: "n".to_owned(),
        labels: [("farrier.dev/ready-for".to_owned(), Some("k".to_owned()))].into(),
        annotations: [("farrier.dev/next-kernel".to_owned(), None)].into(),
        ..NodeChange::default()
    };
    assert_eq!(
        bodies::node(&node, None),
        json!({"metadata": {"labels": {"farrier.dev/ready-for": "k"}, "annotations": {"farrier.dev/next-kernel": null}}})
    );
    let cordon = NodeChange { name: "n".to_owned(), cordon: Some(true), ..NodeChange::default() };
    assert_eq!(
        bodies::node(&cordon, Some(&version("u", "3"))),
        json!({"metadata": {"uid": "u", "resourceVersion": "3"}, "spec": {"unschedulable": true}})
    );
    let resource = ResourceChange {
        kind: OperatorResource::NicClusterPolicy,
        name: "nic-cluster-policy".to_owned(),
        version: Some(version("u", "1")),
        expected: None,
        spec: json!({"ofedDriver": {"version": "v"}}),
        annotations: strings([("farrier.dev/record", "{}")]),
        required_images: Vec::new(),
    };
    assert_eq!(
        bodies::resource(&resource, &version("u", "2")),
        json!({
            "apiVersion": "mellanox.com/v1alpha1", "kind": "NicClusterPolicy",
            "metadata": {"name": "nic-cluster-policy", "uid": "u", "resourceVersion": "2",
                         "annotations": {"farrier.dev/record": "{}"}},
            "spec": {"ofedDriver": {"version": "v"}},
        })
    );
    let restart = PodRestart {
        namespace: "s".to_owned(),
        name: "p".to_owned(),
        uid: "u".to_owned(),
        why: "w".to_owned(),
        drained: true,
        grace_seconds: Some(30),
    };
    assert_eq!(
        serde_json::to_value(bodies::eviction(&restart)).unwrap(),
        json!({
            "apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "p", "namespace": "s"},
            "deleteOptions": {"gracePeriodSeconds": 30, "preconditions": {"uid": "u"}},
        })
    );
}

#[test]
fn a_new_copy_has_no_preconditions() {
    let copy = DaemonSetCopy {
        namespace: "gpu".to_owned(),
        name: "driver-k".to_owned(),
        version: None,
        manifest: Arc::new(json!({"metadata": {"labels": {"a": "b"}}, "spec": {}})),
        required_images: Vec::new(),
    };
    let body = bodies::copy(&copy, None);
    assert_eq!(body["metadata"], json!({"name": "driver-k", "namespace": "gpu", "labels": {"a": "b"}}));
    assert_eq!(bodies::copy(&copy, Some(&version("u", "3")))["metadata"]["resourceVersion"], "3");
}

#[test]
fn a_write_that_a_webhook_changed_is_an_error() {
    let after = |image: &str, annotations: &Value| {
        let object = serde_json::from_value(json!({
            "metadata": {"name": "driver", "namespace": "gpu", "uid": "u1", "resourceVersion": "6",
                         "annotations": annotations},
            "spec": {"selector": {"matchLabels": {"app": "d"}}, "template": {"spec": {
                "containers": [{"name": "driver", "image": image}],
            }}},
        }));
        facts::daemon_set(object.unwrap(), "farrier").unwrap().facts
    };
    let change = change(strings([("driver", "r.test/d@sha256:1")]));
    let annotations = json!({"farrier.dev/record": "{}", "farrier.dev/applied": "1",
        "farrier.dev/rollout": r#"{"image":"r.test/d@sha256:1","at":"1970-01-01T00:00:00Z"}"#});
    let copy = DaemonSetCopy {
        namespace: "gpu".to_owned(),
        name: "driver".to_owned(),
        version: None,
        manifest: Arc::new(json!({"metadata": {"annotations": annotations}})),
        required_images: Vec::new(),
    };
    let lost = |image: &str, annotations: &Value| {
        let after = after(image, annotations);
        let outcomes = [
            check_kept(&after, |after| change.lost_field(after)),
            check_kept(&after, |after| copy.lost_field(after)),
        ];
        outcomes.map(|outcome| outcome.err().map(|error| error.to_string()))
    };
    assert_eq!(lost("r.test/d@sha256:1", &annotations), [None, None]);
    assert_eq!(lost("mirror.test/d@sha256:1", &annotations), [None, None]);
    let restored = self::change(strings([("driver", "r.test/d:1")]));
    let kept = check_kept(&after("mirror.test/d:1", &annotations), |after| restored.lost_field(after));
    assert!(kept.is_ok(), "a restored tag: {kept:?}");
    let sentence = |field: &str| {
        let field = format!("{field} of DaemonSet driver");
        Some(format!("the API server did not keep the {field}: an admission webhook changes it"))
    };
    assert_eq!(
        lost("mirror.test/d:1", &annotations),
        [sentence("image of container driver"), sentence("image")]
    );
    assert_eq!(
        lost("r.test/d@sha256:1", &json!({})),
        [sentence("annotation farrier.dev/record"), sentence("annotation farrier.dev/applied")]
    );
}

#[test]
fn a_stale_plan_is_a_conflict() {
    let stored = stored_daemon_set();
    let check = |version: ObjectVersion, image: &str| {
        check_images(&stored, &strings([("driver", image)]))
            .and_then(|()| check_state(&stored, Some(&version)))
    };
    check(version("u1", "5"), "d:1").unwrap();
    for (uid, state, image) in [("u2", "5", "d:1"), ("u1", "4", "d:1"), ("u1", "5", "d:0")] {
        let error = check(version(uid, state), image).unwrap_err();
        let error = ClusterError::Api { action: "write it".to_owned(), error };
        assert!(error.is_conflict() && !error.is_transient(), "{error}");
    }
    let gone = ClusterError::Api { action: "write it".to_owned(), error: ApiError::Gone };
    assert!(gone.is_conflict());
}

#[test]
fn names_with_url_characters_are_rejected() {
    assert!(check_names(["a-b.c", "x1"]).is_ok());
    for name in ["", "a/b", "..", "a?x", "a%2fb", "a b", "ä"] {
        assert!(check_names([name]).is_err(), "{name:?}");
    }
}
