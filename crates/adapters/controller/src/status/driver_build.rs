//! The custom resource DriverBuild, which represents one driver image for one kernel target in a cluster.
#![allow(clippy::duplicated_attributes, reason = "each printer column has its own type and priority")]

use k8s_openapi::{
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
    apimachinery::pkg::apis::meta::v1::{Condition, Time},
};
use kube::{CustomResource, CustomResourceExt};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

/// One driver image for one kernel target. farrier makes these objects and writes their status; its definitions and
/// the nodes decide what is built, not these objects.
#[derive(CustomResource, Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "farrier.dev",
    version = "v1alpha1",
    kind = "DriverBuild",
    plural = "driverbuilds",
    shortname = "dbuild",
    namespaced,
    status = "DriverBuildStatus",
    doc = "One driver image for one kernel target. farrier makes these objects and writes their status; its definitions and the nodes decide what is built, not these objects.",
    derive = "PartialEq",
    printcolumn(name = "Image", type_ = "string", json_path = ".spec.image"),
    printcolumn(name = "Kernel", type_ = "string", json_path = ".spec.release"),
    printcolumn(name = "Nodes", type_ = "integer", json_path = ".status.nodes"),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "Check", type_ = "string", json_path = ".status.verdict"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "OS", type_ = "string", json_path = ".spec.os", priority = "1"),
    printcolumn(name = "Version", type_ = "string", json_path = ".spec.osVersion", priority = "1"),
    printcolumn(name = "Arch", type_ = "string", json_path = ".spec.arch", priority = "1"),
    printcolumn(name = "Reference", type_ = "string", json_path = ".status.reference", priority = "1"),
    printcolumn(name = "Message", type_ = "string", json_path = ".status.message", priority = "1")
)]
#[serde(rename_all = "camelCase")]
pub struct DriverBuildSpec {
    /// The driver image's name in the definitions.
    pub image: String,
    /// Operating system id (`ID` of os-release).
    pub os: String,
    /// Operating system version (`VERSION_ID` of os-release).
    pub os_version: String,
    /// Exact kernel release (`uname -r`).
    pub release: String,
    /// Architecture: amd64 or arm64.
    pub arch: String,
}

/// State of the driver image.
#[serde_with::apply(Vec => #[serde(default, skip_serializing_if = "Vec::is_empty")])]
#[serde_with::skip_serializing_none]
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DriverBuildStatus {
    /// published, building, queued, retrying, missing, waiting, failed, conflict, unknown or skipped; the same words as in
    /// `farrier status`.
    pub phase: String,
    /// Published, Checked, ConfigurationCurrent.
    #[schemars(schema_with = "conditions")]
    pub conditions: Vec<Condition>,
    /// The image's name by tag.
    pub reference: Option<String>,
    /// The image's digest, once it is published.
    pub digest: Option<String>,
    /// Hash of everything that can change the image.
    pub input_hash: Option<String>,
    /// Verdict of the check: loads, refused or unknown.
    pub verdict: Option<String>,
    /// Number of nodes that run the kernel and require the image.
    #[schemars(range(min = 0))]
    pub nodes: i64,
    /// Origins of the kernel's announcement, besides nodes that run the kernel.
    pub announced_by: Vec<String>,
    /// Needed images: `name@sha256:digits` of the exposed headers, or the names of images that this one waits for.
    pub needs: Vec<String>,
    /// Attempts with the current inputs.
    #[schemars(range(min = 0))]
    pub attempts: Option<i64>,
    /// Time of the next retry after a transient fault.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "date_time")]
    pub next_retry: Option<Time>,
    /// Duration of the last attempt, for example `72s`.
    pub last_duration: Option<String>,
    /// The last lines of the last build's output.
    pub log_tail: Vec<String>,
    /// Reason for the phase, for people.
    pub message: Option<String>,
}

/// Returns the standard schema of `metav1.Condition`. It is written by hand, because k8s-openapi provides the schema only
/// together with the schemas of the whole API.
fn conditions(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "description": "Published, Checked, ConfigurationCurrent.",
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
        "items": {
            "type": "object",
            "required": ["type", "status", "lastTransitionTime", "reason", "message"],
            "properties": {
                "type": {"type": "string", "maxLength": 316},
                "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
                "observedGeneration": {"type": "integer", "format": "int64", "minimum": 0},
                "lastTransitionTime": {"type": "string", "format": "date-time"},
                "reason": {
                    "type": "string", "minLength": 1, "maxLength": 1024,
                    "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
                },
                "message": {"type": "string", "maxLength": 32768},
            },
        },
    })
}

fn date_time(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "string",
        "format": "date-time",
        "nullable": true,
        "description": "Time of the next retry after a transient fault.",
    })
}

/// Returns the CustomResourceDefinition.
pub fn crd() -> CustomResourceDefinition {
    DriverBuild::crd()
}

/// Returns the CustomResourceDefinition as YAML, for `farrier schema crd` and `deploy/crds/`. The detour through JSON gives the
/// keys a stable order.
pub fn crd_yaml() -> std::io::Result<String> {
    let json = serde_json::to_value(crd())?;
    serde_saphyr::to_string(&json).map_err(std::io::Error::other)
}
