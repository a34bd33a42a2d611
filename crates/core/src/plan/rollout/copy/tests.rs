use super::*;
use crate::plan::{Container, Instance, ObjectVersion, OwnedFields, Placement, PodCount, UpdateStrategy};

fn original(name: &str, spec: &Value) -> DaemonSetFacts {
    let manifest = json!({
        "metadata": {
            "namespace": "kube-system", "name": name, "uid": "u1", "labels": {"helm.sh/chart": "theirs"},
        },
        "spec": spec,
    });
    DaemonSetFacts {
        namespace: "kube-system".to_owned(),
        name: name.to_owned(),
        containers: vec![Container {
            name: "driver".to_owned(),
            image: "old:1".to_owned(),
            why_not_editable: None,
            tagged: false,
        }],
        placement: Placement::default(),
        owner: None,
        paused: false,
        live: Some(LiveDaemonSet {
            version: ObjectVersion { uid: "u1".to_owned(), resource_version: "7".to_owned() },
            annotations: std::collections::BTreeMap::new(),
            labels: std::collections::BTreeMap::new(),
            match_labels: [("app".to_owned(), "mft".to_owned())].into(),
            update: UpdateStrategy::RollingUpdate,
            max_unavailable: PodCount::Number(1),
            desired: 0,
            deleting: false,
            owned: OwnedFields::default(),
            manifest: Arc::new(manifest),
        }),
    }
}

fn target(release: &str) -> KernelTarget {
    KernelTarget {
        os: "debian".parse().unwrap(),
        os_version: "12".parse().unwrap(),
        release: release.parse().unwrap(),
        arch: "amd64".parse().unwrap(),
    }
}

fn made(original: &DaemonSetFacts) -> Option<Arc<Value>> {
    manifest(&DesiredCopy {
        original,
        containers: &["driver"],
        handover: "farrier.dev/driver.00000000",
        name: "copy",
        target: &target("6.1.192-acme+"),
        record: &CopyRecord::new(
            "registry.test/mft:1".to_owned(),
            None,
            Timestamp::UNIX_EPOCH,
            &Instance::default(),
        ),
        unused_since: None,
    })
}

fn spec() -> Value {
    let fence = json!({"key": "farrier.dev/driver.00000000", "operator": "DoesNotExist"});
    let zone = json!({"key": "zone", "operator": "In", "values": ["a"]});
    json!({
        "selector": {"matchLabels": {"app": "mft"}},
        "revisionHistoryLimit": 10,
        "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": "10%"}},
        "template": {
            "metadata": {"creationTimestamp": null, "labels": {"app": "mft", "more": "x"}},
            "spec": {
                "hostPID": true,
                "initContainers": [{"name": "prepare", "image": "prepare:1"}],
                "containers": [{"name": "driver", "image": "old:1"}, {"name": "side", "image": "side:1"}],
                "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{"matchExpressions": [zone, fence]}],
                }}},
            },
        },
    })
}

#[test]
fn a_copy_is_its_original_with_another_image_and_other_nodes() {
    let mut manifest = (*made(&original("mft", &spec())).unwrap()).clone();
    manifest.sort_all_objects();
    insta::assert_snapshot!(serde_json::to_string_pretty(&manifest).unwrap());
}

#[test]
fn nothing_but_a_fence_is_no_affinity() {
    let mut spec = spec();
    let terms = &mut spec["template"]["spec"]["affinity"]["nodeAffinity"];
    let terms = &mut terms["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"];
    terms[0]["matchExpressions"].as_array_mut().unwrap().remove(0);
    let with = made(&original("mft", &spec)).unwrap();
    assert!(with.pointer("/spec/template/spec/affinity/nodeAffinity").is_none());
    spec["template"]["spec"].as_object_mut().unwrap().remove("affinity");
    assert_eq!(with, made(&original("mft", &spec)).unwrap(), "the fence changes no copy");
}

/// An empty selector in the anti-affinity would keep the copies off every node with any pod of the namespace.
#[test]
fn copies_keep_apart_from_the_pods_of_their_original_alone() {
    let expressions = json!([{"key": "app", "operator": "In", "values": ["mft"]}]);
    let apart = |selector: &Value| {
        let mut spec = spec();
        spec["selector"] = selector.clone();
        let copy = made(&original("mft", &spec)).unwrap();
        assert_eq!(copy["spec"]["selector"]["matchLabels"][COPY_OF_LABEL], "mft");
        let pods = &copy["spec"]["template"]["spec"]["affinity"]["podAntiAffinity"];
        pods["requiredDuringSchedulingIgnoredDuringExecution"][0]["labelSelector"].clone()
    };
    for selector in [
        json!({"matchExpressions": expressions}),
        json!({"matchLabels": {"app": "mft"}, "matchExpressions": expressions}),
        json!({"matchLabels": {"app": "mft"}}),
    ] {
        assert_eq!(apart(&selector), selector);
    }
}

#[test]
fn objects_that_are_no_daemon_set_have_no_copy() {
    for spec in [json!(null), json!({"selector": 1}), json!({"template": {"spec": []}})] {
        assert!(made(&original("mft", &spec)).is_none());
    }
}

#[test]
fn names_stay_within_limits_and_apart() {
    let long = original(&format!("a.{}", "b".repeat(250)), &json!({}));
    let names: Vec<String> =
        ["6.1.192-acme+", &format!("6.1.0-{}", "x".repeat(57)), &format!("6.1.0-{}y", "x".repeat(56))]
            .iter()
            .map(|release| copy_name(&long, &target(release)).unwrap())
            .collect();
    for name in &names {
        assert!(name.len() <= 63 && name.starts_with("a-b") && !name.contains(['.', '_', '+']), "{name}");
    }
    assert!(names[0] != names[1] && names[1] != names[2]);
    assert_eq!(
        copy_name(&long, &target(&format!("6.1.0-{}", "x".repeat(58)))),
        None,
        "the release has no label"
    );
    let mark = copy_of_value(&long);
    assert!(mark.len() <= 63 && mark.starts_with("a.bbb"));
    let mut copy = long.clone();
    copy.live.as_mut().unwrap().labels.insert(COPY_OF_LABEL.to_owned(), mark.clone());
    assert!(copy.is_copy_of(&long));
    assert_ne!(mark, copy_of_value(&original(&format!("a.{}", "b".repeat(249)), &json!({}))));
    let [plus, tilde, other] = ["6.1.0+acme", "6.1.0~acme", "6.1.0-2"].map(target);
    assert!(name_parts(&plus) == name_parts(&tilde));
    assert!(name_parts(&plus) != name_parts(&other));
}
