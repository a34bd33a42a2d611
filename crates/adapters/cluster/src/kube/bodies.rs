//! Request bodies of writes. The body of an apply contains only farrier's fields, so that other fields keep their managers.

use driver_entrypoint::holders::DRIVER_POD;
use farrier_core::plan::{
    DaemonSetChange, DaemonSetCopy, LiveDaemonSet, NodeAffinity, NodeChange, NodeCheck, ObjectVersion,
    PodRestart, ResourceChange, Untaint,
};
use k8s_openapi::{
    api::{
        batch::v1::{CronJob, Job},
        core::v1::EnvVar,
        policy::v1::Eviction,
    },
    apimachinery::pkg::apis::meta::v1::{DeleteOptions, ObjectMeta, Preconditions},
};
use kube::api::DynamicObject;
use serde_json::{Value, json};

use super::facts::version;

/// Adds preconditions to a write: the API server rejects the write if the object was replaced or has changed.
fn add_preconditions(metadata: &mut Value, version: &ObjectVersion) {
    metadata["uid"] = json!(version.uid);
    metadata["resourceVersion"] = json!(version.resource_version);
}

/// Returns the apply body for a DaemonSet's fields. `Err` is the reason why a field cannot be written.
pub(super) fn daemon_set(change: &DaemonSetChange, live: &LiveDaemonSet) -> Result<Value, String> {
    let DaemonSetChange {
        namespace,
        name,
        images,
        affinity,
        annotations,
        version: _,
        expected: _,
        required_images: _,
    } = change;
    let mut pod = json!({});
    let mut missing: Vec<&String> = images.keys().collect();
    for key in ["initContainers", "containers"] {
        let containers =
            live.manifest.pointer(&format!("/spec/template/spec/{key}")).and_then(Value::as_array);
        let names = containers.into_iter().flatten().filter_map(|container| container["name"].as_str());
        let changed: Vec<&str> = names.filter(|name| images.contains_key(*name)).collect();
        if !changed.is_empty() {
            missing.retain(|name| !changed.contains(&name.as_str()));
            let fields = changed.iter().map(|name| json!({"name": name, "image": images[*name]}));
            pod[key] = fields.collect();
        }
    }
    if let Some(missing) = missing.first() {
        return Err(format!("the pod template has no container {missing:?}"));
    }
    match affinity {
        None | Some(NodeAffinity::Any) => {}
        Some(NodeAffinity::Terms(terms)) => {
            pod["affinity"] = json!({"nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}});
        }
        Some(NodeAffinity::Unsupported(_)) => {
            return Err("farrier does not support its node affinity".to_owned());
        }
    }
    let mut metadata = json!({"name": name, "namespace": namespace, "annotations": annotations});
    add_preconditions(&mut metadata, &live.version);
    Ok(json!({
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": metadata,
        "spec": {"template": {"spec": pod}},
    }))
}

/// Returns the merge patch that removes the required node affinity of a DaemonSet.
pub(super) fn without_affinity(version: &ObjectVersion) -> Value {
    let mut metadata = json!({});
    add_preconditions(&mut metadata, version);
    let affinity = json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": null}});
    json!({"metadata": metadata, "spec": {"template": {"spec": {"affinity": affinity}}}})
}

/// Returns the apply body for a whole DaemonSet. Without a version, the apply may also create the DaemonSet.
pub(super) fn copy(change: &DaemonSetCopy, version: Option<&ObjectVersion>) -> Value {
    let DaemonSetCopy { namespace, name, manifest, version: _, required_images: _ } = change;
    let mut body = manifest.as_ref().clone();
    body["apiVersion"] = json!("apps/v1");
    body["kind"] = json!("DaemonSet");
    body["metadata"]["name"] = json!(name);
    body["metadata"]["namespace"] = json!(namespace);
    if let Some(version) = version {
        add_preconditions(&mut body["metadata"], version);
    }
    body
}

/// Returns the eviction of exactly this pod: a precondition excludes its successor with the same name. kube's
/// [`kube::Api::evict`] writes the options as `delete_options`. The API server ignores that field, and with it the precondition.
pub(super) fn eviction(restart: &PodRestart) -> Eviction {
    let PodRestart { namespace, name, uid, why: _, drained: _, grace_seconds } = restart;
    let preconditions = Preconditions { uid: Some(uid.clone()), ..Preconditions::default() };
    Eviction {
        metadata: ObjectMeta {
            name: Some(name.clone()),
            namespace: Some(namespace.clone()),
            ..ObjectMeta::default()
        },
        delete_options: Some(DeleteOptions {
            preconditions: Some(preconditions),
            grace_period_seconds: grace_seconds.map(i64::from),
            ..DeleteOptions::default()
        }),
    }
}

/// Returns the merge patch for a node, with preconditions if a version is given. `null` removes a key.
pub(super) fn node(change: &NodeChange, version: Option<&ObjectVersion>) -> Value {
    let NodeChange { name: _, labels, annotations, cordon, untaint: _, precondition: _ } = change;
    let mut metadata = json!({});
    for (key, entries) in [("labels", labels), ("annotations", annotations)] {
        if !entries.is_empty() {
            metadata[key] = json!(entries);
        }
    }
    if let Some(version) = version {
        add_preconditions(&mut metadata, version);
    }
    let mut body = json!({"metadata": metadata});
    if let Some(cordon) = cordon {
        body["spec"] = json!({"unschedulable": cordon});
    }
    body
}

/// Returns the merge patch that removes a taint from a node, for the node's current state; `None` without such a taint.
pub(super) fn untaint(node: &DynamicObject, untaint: &Untaint) -> Option<Value> {
    let mut taints = node.data["spec"]["taints"].as_array()?.clone();
    let before = taints.len();
    taints.retain(|taint| taint["key"] != untaint.key.as_str());
    let mut metadata = json!({});
    add_preconditions(&mut metadata, &version(&node.metadata));
    (taints.len() < before).then(|| json!({"metadata": metadata, "spec": {"taints": taints}}))
}

/// Label that identifies Jobs that check a node.
pub(super) const CHECK_LABEL: &str = "farrier.dev/upgrade-check";
/// Seconds that a completed check Job is kept, if its CronJob sets no time.
const CHECK_TTL_SECONDS: i32 = 24 * 3600;

/// Returns the Job of a check, bound to its node; `None` if the CronJob has no pod specification.
pub(super) fn check(check: &NodeCheck, template: CronJob) -> Option<Job> {
    let NodeCheck { node, namespace, template: _, name, driver_pod } = check;
    let template = template.spec.job_template;
    let (mut metadata, mut spec) = (template.metadata.unwrap_or_default(), template.spec?);
    let pod = spec.template.spec.as_mut()?;
    // Bypass the scheduler, which places no pods on a cordoned node.
    pod.node_name = Some(node.clone());
    // Most checks need no API token. The CronJob can request one explicitly.
    pod.automount_service_account_token.get_or_insert(false);
    if let Some(uid) = driver_pod {
        let variable = EnvVar { name: DRIVER_POD.to_owned(), value: Some(uid.clone()), ..EnvVar::default() };
        for container in &mut pod.containers {
            container.env.get_or_insert_default().push(variable.clone());
        }
    }
    spec.ttl_seconds_after_finished.get_or_insert(CHECK_TTL_SECONDS);
    (metadata.name, metadata.namespace) = (Some(name.clone()), Some(namespace.clone()));
    metadata.labels.get_or_insert_default().insert(CHECK_LABEL.to_owned(), String::new());
    Some(Job { metadata, spec: Some(spec), ..Job::default() })
}

/// Returns the apply body for an operator's resource.
pub(super) fn resource(change: &ResourceChange, version: &ObjectVersion) -> Value {
    let ResourceChange { kind, name, spec, annotations, version: _, expected: _, required_images: _ } =
        change;
    let (namespace, name) = name.rsplit_once('/').unwrap_or(("", name));
    let mut metadata = json!({"name": name, "annotations": annotations});
    if !namespace.is_empty() {
        metadata["namespace"] = namespace.into();
    }
    add_preconditions(&mut metadata, version);
    json!({
        "apiVersion": format!("{}/{}", kind.group(), kind.version()),
        "kind": kind.kind(),
        "metadata": metadata,
        "spec": spec,
    })
}
