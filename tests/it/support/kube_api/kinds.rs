//! Resources of the server by group, version and plural.

use std::sync::Arc;

use serde_json::{Value, json};

/// One resource of the API.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, clippy::struct_field_names, reason = "the API's own terms")]
pub struct Kind {
    /// Empty for the core group.
    pub group: String,
    pub version: String,
    pub plural: String,
    pub kind: String,
    pub namespaced: bool,
    /// Whether the resource has a `status` subresource.
    pub status: bool,
    /// Whether a CustomResourceDefinition defines the resource.
    pub custom: bool,
    /// Whether `metadata.generation` increases when the spec changes.
    pub generation: bool,
    pub short: Vec<String>,
    /// Columns of tables after the name: the heading and a JSON pointer.
    pub columns: Vec<(String, String)>,
}

impl Kind {
    fn built_in(group: &str, plural: &str, kind: &str, namespaced: bool) -> Self {
        Self {
            group: group.to_owned(),
            version: "v1".to_owned(),
            plural: plural.to_owned(),
            kind: kind.to_owned(),
            namespaced,
            status: matches!(
                kind,
                "Node" | "Pod" | "Namespace" | "DaemonSet" | "Deployment" | "Job" | "PodDisruptionBudget"
            ) || kind == "CustomResourceDefinition",
            custom: false,
            generation: matches!(
                kind,
                "DaemonSet" | "Deployment" | "Job" | "PodDisruptionBudget" | "CustomResourceDefinition"
            ),
            short: Vec::new(),
            // One of the real server's ten columns.
            columns: if kind == "Node" {
                vec![("Kernel-Version".to_owned(), "/status/nodeInfo/kernelVersion".to_owned())]
            } else {
                Vec::new()
            },
        }
    }

    /// Returns a cluster-scoped custom resource with a status.
    pub fn custom(group: &str, version: &str, plural: &str, kind: &str) -> Self {
        Self {
            group: group.to_owned(),
            version: version.to_owned(),
            plural: plural.to_owned(),
            kind: kind.to_owned(),
            namespaced: false,
            status: true,
            custom: true,
            generation: true,
            short: Vec::new(),
            columns: Vec::new(),
        }
    }

    pub fn nic_cluster_policy() -> Self {
        Self::custom("mellanox.com", "v1alpha1", "nicclusterpolicies", "NicClusterPolicy")
    }

    pub fn nic_node_policy() -> Self {
        Self::custom("mellanox.com", "v1alpha1", "nicnodepolicies", "NicNodePolicy")
    }

    pub fn cluster_policy() -> Self {
        Self::custom("nvidia.com", "v1", "clusterpolicies", "ClusterPolicy")
    }

    pub fn nvidia_driver() -> Self {
        Self::custom("nvidia.com", "v1alpha1", "nvidiadrivers", "NVIDIADriver")
    }

    /// Returns the stored version of a CustomResourceDefinition.
    pub fn defined_by(definition: &Value) -> Option<Self> {
        let spec = &definition["spec"];
        let versions = spec["versions"].as_array()?;
        let version = versions.iter().find(|version| version["storage"] == true)?;
        let names = &spec["names"];
        let short = names["shortNames"].as_array().into_iter().flatten();
        let columns = version["additionalPrinterColumns"].as_array().into_iter().flatten();
        let column = |column: &Value| {
            Some((column["name"].as_str()?.to_owned(), column["jsonPath"].as_str()?.replace('.', "/")))
        };
        Some(Self {
            group: spec["group"].as_str()?.to_owned(),
            version: version["name"].as_str()?.to_owned(),
            plural: names["plural"].as_str()?.to_owned(),
            kind: names["kind"].as_str()?.to_owned(),
            namespaced: spec["scope"] == "Namespaced",
            status: version["subresources"]["status"].is_object(),
            custom: true,
            generation: true,
            short: short.filter_map(|name| name.as_str().map(str::to_owned)).collect(),
            columns: columns.filter_map(column).collect(),
        })
    }

    /// Returns `daemonsets.apps`, or `nodes` in the core group.
    pub fn resource(&self) -> String {
        if self.group.is_empty() { self.plural.clone() } else { format!("{}.{}", self.plural, self.group) }
    }

    /// Returns `DaemonSet.apps`, or `Node` in the core group.
    pub fn qualified(&self) -> String {
        if self.group.is_empty() { self.kind.clone() } else { format!("{}.{}", self.kind, self.group) }
    }

    /// Returns `apps/v1`, or `v1` in the core group.
    pub fn api_version(&self) -> String {
        if self.group.is_empty() { self.version.clone() } else { format!("{}/{}", self.group, self.version) }
    }

    /// Returns the first bytes of each object; the fields are sorted.
    pub fn prefix(&self) -> String {
        format!(r#"{{"apiVersion":"{}","kind":"{}","#, self.api_version(), self.kind)
    }

    /// Returns a bookmark's object. Typed kinds include their zero values, which clients must be able to parse.
    pub fn bookmark(&self, revision: u64, initial_events_end: bool) -> Value {
        let mut object = json!({
            "kind": self.kind,
            "apiVersion": self.api_version(),
            "metadata": {"resourceVersion": revision.to_string()},
        });
        if initial_events_end {
            object["metadata"]["annotations"] = json!({"k8s.io/initial-events-end": "true"});
        }
        match self.kind.as_str() {
            "Node" => {
                object["spec"] = json!({});
                object["status"] = json!({
                    "daemonEndpoints": {"kubeletEndpoint": {"Port": 0}},
                    "nodeInfo": {
                        "machineID": "", "systemUUID": "", "bootID": "", "kernelVersion": "", "osImage": "",
                        "containerRuntimeVersion": "", "kubeletVersion": "", "kubeProxyVersion": "",
                        "operatingSystem": "", "architecture": "",
                    },
                });
            }
            "Job" => {
                object["spec"] = json!({"template": {"metadata": {}, "spec": {"containers": null}}});
                object["status"] = json!({});
            }
            "Pod" => {
                object["spec"] = json!({"containers": null});
                object["status"] = json!({});
            }
            "DaemonSet" => {
                object["spec"] = json!({
                    "selector": null,
                    "template": {"metadata": {}, "spec": {"containers": null}},
                    "updateStrategy": {},
                });
                object["status"] = json!({
                    "currentNumberScheduled": 0, "numberMisscheduled": 0, "desiredNumberScheduled": 0,
                    "numberReady": 0,
                });
            }
            _ => {}
        }
        object
    }
}

/// Returns the resources that every server has.
pub fn built_in() -> Vec<Arc<Kind>> {
    [
        ("", "namespaces", "Namespace", false),
        ("", "limitranges", "LimitRange", true),
        ("", "nodes", "Node", false),
        ("", "pods", "Pod", true),
        ("", "events", "Event", true),
        ("", "resourcequotas", "ResourceQuota", true),
        ("", "configmaps", "ConfigMap", true),
        ("", "secrets", "Secret", true),
        ("", "serviceaccounts", "ServiceAccount", true),
        ("", "services", "Service", true),
        ("admissionregistration.k8s.io", "validatingadmissionpolicies", "ValidatingAdmissionPolicy", false),
        (
            "admissionregistration.k8s.io",
            "validatingadmissionpolicybindings",
            "ValidatingAdmissionPolicyBinding",
            false,
        ),
        ("apps", "daemonsets", "DaemonSet", true),
        ("apps", "deployments", "Deployment", true),
        ("batch", "jobs", "Job", true),
        ("batch", "cronjobs", "CronJob", true),
        ("coordination.k8s.io", "leases", "Lease", true),
        ("events.k8s.io", "events", "Event", true),
        ("networking.k8s.io", "networkpolicies", "NetworkPolicy", true),
        ("policy", "poddisruptionbudgets", "PodDisruptionBudget", true),
        ("rbac.authorization.k8s.io", "clusterroles", "ClusterRole", false),
        ("rbac.authorization.k8s.io", "clusterrolebindings", "ClusterRoleBinding", false),
        ("rbac.authorization.k8s.io", "roles", "Role", true),
        ("rbac.authorization.k8s.io", "rolebindings", "RoleBinding", true),
        ("apiextensions.k8s.io", "customresourcedefinitions", "CustomResourceDefinition", false),
    ]
    .into_iter()
    .map(|(group, plural, kind, namespaced)| Arc::new(Kind::built_in(group, plural, kind, namespaced)))
    .collect()
}

const VERBS: [&str; 8] = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"];

fn resources_of(kind: &Kind) -> Vec<Value> {
    let mut found = vec![json!({
        "name": kind.plural, "singularName": kind.kind.to_lowercase(), "namespaced": kind.namespaced,
        "kind": kind.kind, "verbs": VERBS, "shortNames": kind.short,
    })];
    if kind.status {
        found.push(json!({
            "name": format!("{}/status", kind.plural), "singularName": "", "namespaced": kind.namespaced,
            "kind": kind.kind, "verbs": ["get", "patch", "update"],
        }));
    }
    if kind.kind == "Pod" {
        found.push(json!({
            "name": "pods/eviction", "singularName": "", "namespaced": true, "group": "policy",
            "version": "v1", "kind": "Eviction", "verbs": ["create"],
        }));
        found.push(json!({
            "name": "pods/exec", "singularName": "", "namespaced": true, "kind": "PodExecOptions",
            "verbs": ["create", "get"],
        }));
    }
    found
}

/// Answers a discovery request: `/api`, `/apis`, `/api/v1`, `/apis/<group>`, `/apis/<group>/<version>`.
pub fn discovery(kinds: &[Arc<Kind>], path: &[&str]) -> Option<Value> {
    match path {
        ["version"] => Some(json!({"major": "1", "minor": "36", "gitVersion": "v1.36.0"})),
        ["api"] => Some(json!({"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []})),
        ["apis"] => {
            let mut groups: Vec<&str> = kinds.iter().map(|kind| kind.group.as_str()).collect();
            groups.sort_unstable();
            groups.dedup();
            let groups: Vec<Value> = groups.iter().filter_map(|name| group(kinds, name)).collect();
            Some(json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}))
        }
        ["api", version] => resource_list(kinds, "", version),
        ["apis", name] => {
            let mut found = group(kinds, name)?;
            found["kind"] = json!("APIGroup");
            found["apiVersion"] = json!("v1");
            Some(found)
        }
        ["apis", group, version] => resource_list(kinds, group, version),
        _ => None,
    }
}

fn group(kinds: &[Arc<Kind>], name: &str) -> Option<Value> {
    let mut versions: Vec<&str> =
        kinds.iter().filter(|kind| kind.group == name).map(|kind| kind.version.as_str()).collect();
    versions.sort_unstable();
    versions.dedup();
    let entry = |version: &&str| json!({"groupVersion": format!("{name}/{version}"), "version": version});
    let preferred = entry(versions.first().filter(|_| !name.is_empty())?);
    let versions: Vec<Value> = versions.iter().map(entry).collect();
    Some(json!({"name": name, "versions": versions, "preferredVersion": preferred}))
}

fn resource_list(kinds: &[Arc<Kind>], group: &str, version: &str) -> Option<Value> {
    let served: Vec<&Arc<Kind>> =
        kinds.iter().filter(|kind| kind.group == group && kind.version == version).collect();
    let resources: Vec<Value> = served.iter().flat_map(|kind| resources_of(kind)).collect();
    Some(json!({
        "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": served.first()?.api_version(),
        "resources": resources,
    }))
}

/// Answers requests below `/openapi/v3`. The documents announce server-side field validation, which kubectl checks before it
/// sends an object.
pub fn openapi(kinds: &[Arc<Kind>], path: &[&str]) -> Option<Value> {
    let place = |kind: &Kind| match kind.group.as_str() {
        "" => format!("api/{}", kind.version),
        group => format!("apis/{group}/{}", kind.version),
    };
    if path.is_empty() {
        let url = |kind: &Arc<Kind>| {
            (place(kind), json!({"serverRelativeURL": format!("/openapi/v3/{}", place(kind))}))
        };
        return Some(json!({"paths": kinds.iter().map(url).collect::<serde_json::Map<_, _>>()}));
    }
    let wanted = path.join("/");
    let operation = |kind: &Arc<Kind>| {
        let patching = json!({
            "parameters": [{"name": "fieldValidation", "in": "query"}],
            "responses": {},
            "x-kubernetes-group-version-kind":
                {"group": kind.group, "version": kind.version, "kind": kind.kind},
        });
        (format!("/{wanted}/{}/{{name}}", kind.plural), json!({"patch": patching}))
    };
    let served = kinds.iter().filter(|kind| place(kind) == wanted).map(operation);
    let paths: serde_json::Map<_, _> = served.collect();
    (!paths.is_empty())
        .then(|| json!({"openapi": "3.0.0", "info": {"title": "fake", "version": "1"}, "paths": paths}))
}
