//! Converts objects from the API server to facts.

use std::{collections::BTreeMap, sync::Arc};

use farrier_core::{
    image::OperatorResource,
    plan::{
        Container, DaemonSetFacts, LiveDaemonSet, NodeFacts, ObjectVersion, OwnedFields, Owner, Placement,
        PodCount, RejectedClaims, ResourceFacts, UpdateStrategy, is_hardware_label,
    },
};
use k8s_openapi::{
    api::apps::v1::DaemonSetUpdateStrategy,
    apimachinery::pkg::{
        apis::meta::v1::{LabelSelector, ObjectMeta},
        util::intstr::IntOrString,
    },
};
use kube::{
    api::{DynamicObject, TypeMeta},
    core::Selector,
};
use serde::Deserialize;
use serde_json::Value;

use super::{
    api_fields::{self, DaemonSet, DaemonSetSpec, NodeObject, NodeStatus, PodSpec},
    object::{Object, ObjectFacts},
    operator_status::operator_error,
};

/// Prefix of the annotations and labels that farrier owns.
pub(super) const PREFIX: &str = "farrier.dev/";

/// Returns a node's facts with all its labels. The store keeps only the labels of interest.
pub(super) fn node(node: NodeObject) -> Object {
    let NodeObject { types: _, metadata, spec, status } = node;
    let NodeStatus { node_info, conditions } = status.unwrap_or_default();
    let info = node_info.unwrap_or_default();
    let ready = conditions.into_iter().flatten().find(|condition| condition.kind == "Ready");
    let (unschedulable, taints) = spec.map(|spec| (spec.unschedulable, spec.taints)).unwrap_or_default();
    let version = version(&metadata);
    let labels = metadata.labels.unwrap_or_default();
    let facts = NodeFacts {
        created: metadata.creation_timestamp.map(|time| time.0),
        name: metadata.name.unwrap_or_default(),
        has_hardware_labels: labels.keys().any(|label| is_hardware_label(label)),
        labels,
        annotations: farrier_annotations(metadata.annotations),
        kernel_version: info.kernel_version,
        architecture: info.architecture,
        os_image: info.os_image,
        operating_system: info.operating_system,
        unschedulable: unschedulable.unwrap_or_default(),
        taints: taints.unwrap_or_default(),
        not_ready: ready.as_ref().is_some_and(|condition| condition.status != "True"),
        ready_changed: ready.and_then(|condition| condition.last_transition_time),
        ignored_by: None,
        rejected_claims: RejectedClaims::default(),
    };
    Object { version, facts: ObjectFacts::Node(facts.into()) }
}

/// Returns a DaemonSet's facts; `Err` if the object does not match the API's schema. `manager` is this farrier's field
/// manager.
pub(super) fn daemon_set(mut object: DynamicObject, manager: &str) -> Result<Object, String> {
    // The items of a list do not contain their kind.
    object.types = Some(TypeMeta { api_version: "apps/v1".to_owned(), kind: "DaemonSet".to_owned() });
    let version = version(&object.metadata);
    let desired = object.data.pointer("/status/desiredNumberScheduled").and_then(Value::as_u64);
    let applied = applied_fields(&mut object.metadata, manager);
    // Remove fields that plans ignore, so that states which differ only in these fields are equal.
    object.metadata.resource_version = None;
    if let Some(fields) = object.data.as_object_mut() {
        fields.remove("status");
    }
    // Keep the whole manifest, because per-kernel copies of a DaemonSet also need the fields that the types here do not know.
    let manifest = serde_json::to_value(object).map_err(|error| error.to_string())?;
    let DaemonSet { metadata, spec } =
        DaemonSet::deserialize(&manifest).map_err(|error| error.to_string())?;
    let DaemonSetSpec { selector, template, update_strategy } = spec;
    let pod = template.spec.unwrap_or_default();
    let owner = owner(&metadata);
    let ObjectMeta { name, namespace, labels, annotations, deletion_timestamp, .. } = metadata;
    let (update, max_unavailable) = self::update_strategy(update_strategy.unwrap_or_default());
    let facts = DaemonSetFacts {
        namespace: namespace.unwrap_or_default(),
        name: name.unwrap_or_default(),
        containers: containers(&pod),
        placement: Placement::of_pod(&manifest["spec"]["template"]["spec"]),
        owner,
        paused: false,
        live: Some(LiveDaemonSet {
            version: version.clone(),
            annotations: farrier_annotations(annotations),
            labels: labels.unwrap_or_default(),
            match_labels: selector.match_labels.unwrap_or_default(),
            update,
            max_unavailable,
            desired: desired.and_then(|desired| desired.try_into().ok()).unwrap_or_default(),
            deleting: deletion_timestamp.is_some(),
            owned: owned_fields(&applied),
            manifest: Arc::new(manifest),
        }),
    };
    Ok(Object { version, facts: ObjectFacts::DaemonSet(Box::new(facts)) })
}

/// Returns an operator resource's facts. `manager` is this farrier's field manager.
pub(super) fn resource(kind: OperatorResource, object: DynamicObject, manager: &str) -> Object {
    let DynamicObject { types: _, mut metadata, mut data } = object;
    let version = version(&metadata);
    let applied = applied_fields(&mut metadata, manager);
    let path = kind.driver_path().iter();
    let section = path.fold(&applied["f:spec"], |fields, key| &fields[format!("f:{key}")]);
    let fields = section.as_object().into_iter().flatten();
    let owned = fields.filter_map(|(key, _)| key.strip_prefix("f:")).map(str::to_owned).collect();
    let namespace = metadata.namespace.map(|namespace| format!("{namespace}/")).unwrap_or_default();
    let facts = ResourceFacts {
        kind,
        name: namespace + &metadata.name.unwrap_or_default(),
        version: Some(version.clone()),
        why_not_editable: BTreeMap::new(),
        annotations: farrier_annotations(metadata.annotations),
        owned,
        created: metadata.creation_timestamp.map(|time| time.0),
        operator_error: operator_error(kind, &data["status"]),
        spec: Arc::new(data.get_mut("spec").map(Value::take).unwrap_or_default()),
    };
    Object { version, facts: ObjectFacts::Resource(Box::new(facts)) }
}

/// Returns the selector of a DaemonSet's pods as a list query; `None` if it selects all pods or is missing.
pub(super) fn pod_selector(manifest: &Value) -> Option<String> {
    let selector = LabelSelector::deserialize(manifest.pointer("/spec/selector")?).ok()?;
    let selector = Selector::try_from(selector).ok()?;
    (!selector.selects_all()).then(|| selector.to_string())
}

pub(super) fn version(metadata: &ObjectMeta) -> ObjectVersion {
    ObjectVersion {
        uid: metadata.uid.clone().unwrap_or_default(),
        resource_version: metadata.resource_version.clone().unwrap_or_default(),
    }
}

fn farrier_annotations(annotations: Option<BTreeMap<String, String>>) -> BTreeMap<String, String> {
    let mut annotations = annotations.unwrap_or_default();
    annotations.retain(|key, _| key.starts_with(PREFIX));
    annotations
}

/// Takes `managedFields` from an object's metadata. Returns the fields that the manager owns by its applies, in the form
/// `fieldsV1`.
fn applied_fields(metadata: &mut ObjectMeta, manager: &str) -> Value {
    let entries = metadata.managed_fields.take().unwrap_or_default();
    let apply = entries.into_iter().find(|entry| {
        entry.manager.as_deref() == Some(manager)
            && entry.operation.as_deref() == Some("Apply")
            && entry.subresource.is_none()
    });
    apply.and_then(|entry| entry.fields_v1).map(|fields| fields.0).unwrap_or_default()
}

/// Reads the fields of a DaemonSet in the form `fieldsV1`.
fn owned_fields(fields: &Value) -> OwnedFields {
    let pod = &fields["f:spec"]["f:template"]["f:spec"];
    let lists = ["f:initContainers", "f:containers"].into_iter().filter_map(|list| pod[list].as_object());
    let containers = lists.flatten().filter(|(_, fields)| fields.get("f:image").is_some());
    let required = "f:requiredDuringSchedulingIgnoredDuringExecution";
    OwnedFields {
        images: containers.filter_map(|(key, _)| container_name(key)).collect(),
        affinity: pod["f:affinity"]["f:nodeAffinity"].get(required).is_some(),
    }
}

/// Returns the name in the key of a container: `k:{"name":"driver"}`.
fn container_name(key: &str) -> Option<String> {
    let key: Value = serde_json::from_str(key.strip_prefix("k:")?).ok()?;
    key["name"].as_str().map(str::to_owned)
}

fn owner(metadata: &ObjectMeta) -> Option<Owner> {
    let owners = metadata.owner_references.iter().flatten();
    let mut owners = owners.filter(|owner| owner.controller == Some(true));
    owners.next().map(|owner| Owner { kind: owner.kind.clone(), name: owner.name.clone() })
}

fn containers(pod: &PodSpec) -> Vec<Container> {
    let container = |container: &api_fields::Container| {
        let image = container.image.clone().unwrap_or_default();
        let why_not_editable = image.is_empty().then(|| "the container has no image field".to_owned());
        Container { name: container.name.clone(), image, why_not_editable, tagged: false }
    };
    pod.all_containers().map(container).collect()
}

fn update_strategy(strategy: DaemonSetUpdateStrategy) -> (UpdateStrategy, PodCount) {
    let update = match strategy.type_.as_deref() {
        Some("OnDelete") => UpdateStrategy::OnDelete,
        _ => UpdateStrategy::RollingUpdate,
    };
    let one = PodCount::Number(1);
    let max_unavailable = match strategy.rolling_update.and_then(|rolling| rolling.max_unavailable) {
        Some(IntOrString::Int(number)) => usize::try_from(number).map_or(one, PodCount::Number),
        Some(IntOrString::String(text)) => {
            text.strip_suffix('%').and_then(|share| share.parse().ok()).map_or(one, PodCount::Percent)
        }
        None => one,
    };
    (update, max_unavailable)
}

#[cfg(test)]
mod tests {
    use farrier_core::plan::NodeAffinity;
    use serde_json::json;

    use super::*;

    fn facts_of(value: Value) -> DaemonSetFacts {
        let object = daemon_set(serde_json::from_value(value).unwrap(), "farrier").unwrap();
        let ObjectFacts::DaemonSet(facts) = object.facts else { panic!("no DaemonSet") };
        *facts
    }

    fn node_facts(value: Value) -> (ObjectVersion, NodeFacts) {
        let Object { version, facts } = node(serde_json::from_value(value).unwrap());
        let ObjectFacts::Node(facts) = facts else { panic!("no Node") };
        (version, NodeFacts::clone(&facts))
    }

    #[test]
    fn a_node_is_reduced_to_its_facts() {
        let (version, facts) = node_facts(json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {
                "name": "n1", "uid": "u", "resourceVersion": "7", "creationTimestamp": "2026-06-30T12:00:00Z",
                "labels": {"a": "1"},
                "annotations": {"farrier.dev/next-kernel": "6.1.0", "other": "x".repeat(9)},
                "managedFields": [{"manager": "kubelet"}],
            },
            "spec": {"unschedulable": true, "podCIDR": "10.0.0.0/24",
                     "taints": [{"key": "gpu", "effect": "NoSchedule", "timeAdded": "2026-07-01T12:00:00Z"}]},
            "status": {
                "images": [{"names": ["a"], "sizeBytes": 1}],
                "conditions": [{"type": "DiskPressure", "status": "False"}, {"type": "Ready", "status": "Unknown",
                    "lastTransitionTime": "2026-07-01T12:00:00Z"}],
                "nodeInfo": {"kernelVersion": "6.1.0", "architecture": "amd64", "osImage": "Debian", "bootID": "b",
                    "operatingSystem": "linux"},
            },
        }));
        assert_eq!((version.uid.as_str(), version.resource_version.as_str()), ("u", "7"));
        let NodeFacts {
            name,
            created,
            labels,
            annotations,
            kernel_version,
            architecture,
            os_image,
            unschedulable,
            not_ready,
            ready_changed,
            taints,
            operating_system,
            has_hardware_labels,
            rejected_claims: _,
            ignored_by: _,
        } = facts;
        assert_eq!((taints[0].to_string().as_str(), operating_system.as_str()), ("gpu:NoSchedule", "linux"));
        assert_eq!(created, Some("2026-06-30T12:00:00Z".parse().unwrap()));
        assert_eq!(ready_changed, Some("2026-07-01T12:00:00Z".parse().unwrap()));
        assert_eq!((name.as_str(), kernel_version.as_str()), ("n1", "6.1.0"));
        assert_eq!((architecture.as_str(), os_image.as_str()), ("amd64", "Debian"));
        assert_eq!(labels, [("a".to_owned(), "1".to_owned())].into());
        assert_eq!(annotations, [("farrier.dev/next-kernel".to_owned(), "6.1.0".to_owned())].into());
        assert!(unschedulable && not_ready && !has_hardware_labels);
    }

    #[test]
    fn a_ready_node_says_since_when() {
        let ready = json!({"type": "Ready", "status": "True", "lastTransitionTime": "2026-07-01T12:00:00Z"});
        let (_, facts) = node_facts(json!({"metadata": {"name": "n1"}, "status": {"conditions": [ready]}}));
        assert!(!facts.not_ready);
        assert_eq!(facts.ready_changed, Some("2026-07-01T12:00:00Z".parse().unwrap()));
    }

    #[test]
    fn hardware_labels_set_a_flag() {
        for (label, is_hardware) in [
            ("feature.node.kubernetes.io/pci-0200_15b3.present", true),
            ("feature.node.kubernetes.io/cpu-hardware_multithreading", true),
            ("feature.node.kubernetes.io/kernel-version.full", false),
            ("pci-15b3.present", false),
        ] {
            let (_, facts) = node_facts(json!({"metadata": {"name": "n", "labels": {label: "true"}}}));
            assert_eq!(facts.has_hardware_labels, is_hardware, "{label}");
        }
    }

    #[test]
    fn missing_and_null_fields_of_a_node_are_empty() {
        for value in [
            json!({"metadata": {"name": "n"}}),
            json!({"metadata": {"name": "n", "labels": null, "annotations": null}, "spec": null,
                   "status": {"nodeInfo": null}}),
        ] {
            let (_, facts) = node_facts(value);
            assert_eq!(facts, NodeFacts { name: "n".to_owned(), ..NodeFacts::default() });
        }
    }

    #[test]
    fn manifests_that_differ_only_in_status_are_equal() {
        let object = |version: &str, ready: u64| {
            facts_of(json!({
                "metadata": {"name": "d", "uid": "u", "resourceVersion": version,
                             "managedFields": [{"manager": ready.to_string()}]},
                "spec": {"selector": {}, "template": {}, "a": 1}, "status": {"numberReady": ready},
            }))
        };
        let (old, new) = (object("1", 0).live.unwrap(), object("2", 5).live.unwrap());
        assert_eq!(old.manifest, new.manifest);
        assert_eq!(old.manifest["spec"]["a"], 1, "fields unknown to the types are kept");
        assert_ne!(old.version, new.version);
    }

    #[test]
    fn only_farriers_own_apply_makes_it_an_owner() {
        let entry = |manager: &str, operation: &str, spec: Value| {
            let fields = json!({"f:spec": spec});
            json!({"manager": manager, "operation": operation, "fieldsV1": fields})
        };
        let image = |name: &str| json!({format!(r#"k:{{"name":"{name}"}}"#): {"f:image": {}, "f:name": {}}});
        let pod = |spec: Value| json!({"f:template": {"f:spec": spec}});
        let affinity = json!({"f:nodeAffinity": {"f:requiredDuringSchedulingIgnoredDuringExecution": {}}});
        let owned = |entries: Value| {
            let metadata = json!({"name": "d", "managedFields": entries});
            let facts = facts_of(json!({"metadata": metadata, "spec": {"selector": {}, "template": {}}}));
            facts.live.unwrap().owned
        };
        let ours = pod(json!({
            "f:initContainers": image("prepare"), "f:containers": image("driver"), "f:affinity": affinity,
        }));
        let images = ["driver", "prepare"].map(str::to_owned).into();
        assert_eq!(
            owned(json!([
                entry("helm", "Apply", pod(json!({"f:containers": image("other")}))),
                entry("farrier", "Update", pod(json!({"f:containers": image("patched")}))),
                entry("farrier", "Apply", ours),
            ])),
            OwnedFields { images, affinity: true }
        );
        assert_eq!(owned(json!([{}])), OwnedFields::default(), "kubectl can remove the list");
        let policy = json!({
            "metadata": {"name": "p", "managedFields": [
                entry("farrier", "Apply", json!({"f:driver": {"f:version": {}, "f:image": {}}, "f:dcgm": {}}))]},
            "spec": {},
        });
        let policy = serde_json::from_value(policy).unwrap();
        let ObjectFacts::Resource(facts) = resource(OperatorResource::ClusterPolicy, policy, "farrier").facts
        else {
            panic!("no resource")
        };
        assert_eq!(facts.owned, ["image", "version"].map(str::to_owned).into());
    }

    fn manifest() -> Value {
        json!({
            "metadata": {
                "name": "driver", "namespace": "gpu", "uid": "u1", "resourceVersion": "5",
                "labels": {"app": "driver"},
                "annotations": {"farrier.dev/record": "{}", "deprecated.daemonset.template.generation": "1"},
                "ownerReferences": [{"apiVersion": "nvidia.com/v1", "kind": "ClusterPolicy", "name": "p",
                                     "uid": "x", "controller": true}],
            },
            "spec": {
                "selector": {"matchLabels": {"app": "driver"}, "matchExpressions": [
                    {"key": "tier", "operator": "NotIn", "values": ["a", "b"]}, {"key": "x", "operator": "Exists"}]},
                "updateStrategy": {"type": "OnDelete", "rollingUpdate": {"maxUnavailable": "10%"}},
                "template": {"metadata": {"labels": {"app": "driver"}}, "spec": {
                    "nodeSelector": {"pci": "yes"},
                    "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
                        "nodeSelectorTerms": [{"matchExpressions": [
                            {"key": "zone", "operator": "In", "values": ["z"]},
                            {"key": "gone", "operator": "DoesNotExist"}]}]}}},
                    "initContainers": [{"name": "prepare", "image": "p:1"}],
                    "containers": [{"name": "driver", "image": "d:1"}, {"name": "none"}],
                }},
            },
            "status": {"numberReady": 1, "desiredNumberScheduled": 7},
        })
    }

    #[test]
    fn a_daemon_set_is_reduced_to_its_facts() {
        let facts = facts_of(manifest());
        assert_eq!((facts.namespace.as_str(), facts.name.as_str()), ("gpu", "driver"));
        let containers: Vec<_> =
            facts.containers.iter().map(|c| (c.name.as_str(), c.image.as_str())).collect();
        assert_eq!(containers, [("prepare", "p:1"), ("driver", "d:1"), ("none", "")]);
        assert!(facts.containers[2].why_not_editable.is_some());
        assert_eq!(facts.placement.label_keys().collect::<Vec<_>>(), ["pci", "zone", "gone"]);
        assert_eq!(facts.owner.unwrap().kind, "ClusterPolicy");
        let live = facts.live.unwrap();
        assert_eq!((live.version.uid.as_str(), live.version.resource_version.as_str()), ("u1", "5"));
        assert_eq!(live.annotations.keys().collect::<Vec<_>>(), ["farrier.dev/record"]);
        assert_eq!((live.update, live.max_unavailable), (UpdateStrategy::OnDelete, PodCount::Percent(10)));
        assert_eq!(live.desired, 7);
        assert!(live.manifest.get("status").is_none() && live.manifest["kind"] == "DaemonSet");
        assert_eq!(pod_selector(&live.manifest).unwrap(), "app=driver,tier notin (a,b),x");
        let required =
            "/spec/template/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution";
        let NodeAffinity::Terms(terms) = facts.placement.affinity else { panic!("no terms") };
        assert_eq!(Some(&json!({"nodeSelectorTerms": terms})), live.manifest.pointer(required));
    }

    #[test]
    fn missing_fields_of_a_daemon_set_have_the_defaults_of_the_api() {
        let facts = facts_of(json!({
            "metadata": {"name": "d"}, "spec": {"selector": {}, "template": {}},
        }));
        let live = facts.live.unwrap();
        assert_eq!(
            (facts.placement.affinity, live.update, live.max_unavailable),
            (NodeAffinity::Any, UpdateStrategy::RollingUpdate, PodCount::Number(1))
        );
        assert_eq!(pod_selector(&live.manifest), None);
    }

    #[test]
    fn an_unknown_selector_operator_makes_the_affinity_unsupported() {
        let mut value = manifest();
        let path = "/spec/template/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution";
        value.pointer_mut(path).unwrap()["nodeSelectorTerms"][0]["matchExpressions"][0]["operator"] =
            json!("Near");
        let facts = facts_of(value);
        assert!(matches!(facts.placement.affinity, NodeAffinity::Unsupported(why) if why.contains("Near")));
    }

    #[test]
    fn a_resource_is_reduced_to_its_spec_and_farriers_annotations() {
        let object = serde_json::from_value(json!({
            "metadata": {"name": "p", "uid": "u", "resourceVersion": "3",
                         "annotations": {"farrier.dev/record": "r", "x": "y"}},
            "spec": {"driver": {"version": "1"}},
            "status": {"state": "notReady", "conditions": [
                {"type": "Error", "status": "True", "reason": "ReconcileFailed", "message": "no driver"}]},
        }))
        .unwrap();
        let ObjectFacts::Resource(facts) = resource(OperatorResource::ClusterPolicy, object, "farrier").facts
        else {
            panic!("no resource")
        };
        assert_eq!((facts.name.as_str(), facts.version.unwrap().resource_version.as_str()), ("p", "3"));
        assert_eq!(facts.annotations, [("farrier.dev/record".to_owned(), "r".to_owned())].into());
        assert_eq!(*facts.spec, json!({"driver": {"version": "1"}}));
        assert_eq!(facts.operator_error.as_deref(), Some("no driver"));
        let object = serde_json::from_value(json!({"metadata": {"name": "m", "namespace": "kmm"}})).unwrap();
        let module = resource(OperatorResource::Module, object, "farrier");
        assert_eq!(module.key(), ("kmm".to_owned(), "m".to_owned()));
    }
}
