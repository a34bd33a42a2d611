//! Pure: the bodies of writes. An applied body has farrier's fields and no others, so that all others stay
//! whoever's they are.

use serde_json::{Value, json};

use super::facts;
use crate::plan::{
    DaemonSetChange, DaemonSetCopy, LiveDaemonSet, NodeChange, ObjectVersion, PodRestart, ResourceChange,
};

/// What a write is applied to: the API server refuses it for another object, and for another state of this one.
fn preconditions(metadata: &mut Value, version: &ObjectVersion) {
    metadata["uid"] = json!(version.uid);
    metadata["resourceVersion"] = json!(version.resource_version);
}

/// An apply of a DaemonSet's fields. `Err` names a container that the DaemonSet does not have.
pub(super) fn daemon_set(change: &DaemonSetChange, live: &LiveDaemonSet) -> Result<Value, String> {
    let DaemonSetChange { namespace, name, images, affinity, annotations, version: _, expected: _, proof: _ } =
        change;
    let list = |key: &str| {
        let list = live.manifest.pointer(&format!("/spec/template/spec/{key}")).and_then(Value::as_array);
        let names = list.into_iter().flatten().filter_map(|container| container["name"].as_str());
        names.filter_map(|name| Some(json!({"name": name, "image": images.get(name)?}))).collect::<Vec<_>>()
    };
    let (inits, containers) = (list("initContainers"), list("containers"));
    let mut pod = json!({});
    for (key, list) in [("initContainers", inits), ("containers", containers)] {
        if !list.is_empty() {
            pod[key] = json!(list);
        }
    }
    let found = |name: &String| {
        let has = |key: &str| {
            pod[key].as_array().into_iter().flatten().any(|container| container["name"] == **name)
        };
        has("initContainers") || has("containers")
    };
    if let Some(missing) = images.keys().find(|name| !found(name)) {
        return Err(format!("it has no container {missing:?}"));
    }
    if let Some(affinity) = affinity {
        let required =
            facts::affinity_json(affinity).ok_or("its node affinity is not one that can be written")?;
        pod["affinity"] =
            json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}});
    }
    let mut metadata = json!({"name": name, "namespace": namespace, "annotations": annotations});
    preconditions(&mut metadata, &live.version);
    Ok(json!({
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": metadata,
        "spec": {"template": {"spec": pod}},
    }))
}

/// An apply of a whole DaemonSet; without a version it can also be a creation.
pub(super) fn copy(change: &DaemonSetCopy, version: Option<&ObjectVersion>) -> Value {
    let DaemonSetCopy { namespace, name, manifest, version: _, proof: _ } = change;
    let mut body = manifest.as_ref().clone();
    body["apiVersion"] = json!("apps/v1");
    body["kind"] = json!("DaemonSet");
    body["metadata"]["name"] = json!(name);
    body["metadata"]["namespace"] = json!(namespace);
    if let Some(version) = version {
        preconditions(&mut body["metadata"], version);
    }
    body
}

/// The options of a DaemonSet's end. Its pods end with it, in the background.
pub(super) fn retirement(version: &ObjectVersion) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "DeleteOptions",
        "propagationPolicy": "Background",
        "preconditions": {"uid": version.uid, "resourceVersion": version.resource_version},
    })
}

/// An eviction of this very pod, not of its successor.
pub(super) fn eviction(restart: &PodRestart) -> Value {
    let PodRestart { namespace, name, uid, why: _ } = restart;
    json!({
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": name, "namespace": namespace},
        "deleteOptions": {"preconditions": {"uid": uid}},
    })
}

/// A merge patch of a node; `null` removes.
pub(super) fn node(change: &NodeChange) -> Value {
    let NodeChange { name: _, labels, annotations } = change;
    let mut metadata = json!({});
    for (key, entries) in [("labels", labels), ("annotations", annotations)] {
        if !entries.is_empty() {
            metadata[key] = json!(entries);
        }
    }
    json!({"metadata": metadata})
}

/// An apply of an operator's resource.
pub(super) fn resource(change: &ResourceChange, version: &ObjectVersion) -> Value {
    let ResourceChange { kind, name, spec, annotations, version: _, proof: _ } = change;
    let mut metadata = json!({"name": name, "annotations": annotations});
    preconditions(&mut metadata, version);
    json!({
        "apiVersion": format!("{}/{}", kind.group(), kind.version()),
        "kind": kind.kind(),
        "metadata": metadata,
        "spec": spec,
    })
}
