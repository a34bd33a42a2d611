//! Settings for builds in a cluster (`--engine kubernetes`).

use std::{collections::BTreeMap, num::NonZeroU32};

use schemars::{JsonSchema, Schema, json_schema};
use serde::{Deserialize, Deserializer, Serialize, de::Error as _};
use serde_json::{Map, Value, json};

use crate::definition::{
    Period,
    checked::{DnsLabel, LabelKey, LabelValue},
    is_default,
};

/// Settings for builds in a cluster. Each build is a Job in a namespace reserved for builds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Builds {
    /// Namespace of the Jobs. Default: `farrier-builds`. It must contain nothing else, because farrier may run commands in all its
    /// pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<DnsLabel>,
    /// Maximum number of concurrent Jobs. Jobs that do not fit wait in the cluster.
    pub at_once: NonZeroU32,
    /// Labels of Jobs and pods, such as Kueue's `kueue.x-k8s.io/queue-name`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<LabelKey, LabelValue>,
    /// Create Jobs suspended, so that another controller, such as Kueue, decides when they start.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub suspend: bool,
    /// How long a build may wait for its pod to run, except while the Job is suspended. After that, farrier deletes the Job and
    /// retries the build later.
    pub wait_at_most: Period,
    /// Lowest Landlock ABI that must confine a build, in a sandbox and in a pod. `0` also allows kernels without Landlock. Docker
    /// builds have no Landlock.
    #[serde(skip_serializing_if = "is_default")]
    pub landlock: u32,
    /// Additional fields of the pods' specification that decide where they run.
    #[serde(skip_serializing_if = "is_default")]
    pub pod: PodAdditions,
}

impl Default for Builds {
    fn default() -> Self {
        Self {
            namespace: None,
            at_once: NonZeroU32::new(20).unwrap_or(NonZeroU32::MIN),
            labels: BTreeMap::new(),
            suspend: false,
            wait_at_most: Period::seconds(6 * 60 * 60),
            landlock: 0,
            pod: PodAdditions::default(),
        }
    }
}

impl Builds {
    /// Returns the namespace of the Jobs.
    pub fn namespace(&self) -> &str {
        self.namespace.as_deref().unwrap_or("farrier-builds")
    }
}

/// Fields of a pod's specification that decide where and when it runs. None of them gives the pod more rights.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct PodAdditions(Map<String, Value>);

/// The allowed fields.
const ADDITIONS: [&str; 8] = [
    "affinity",
    "imagePullSecrets",
    "nodeSelector",
    "priorityClassName",
    "runtimeClassName",
    "schedulerName",
    "tolerations",
    "topologySpreadConstraints",
];

impl PodAdditions {
    /// Returns the fields in Kubernetes' own form.
    pub fn fields(&self) -> &Map<String, Value> {
        &self.0
    }
}

impl<'de> Deserialize<'de> for PodAdditions {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let fields = Map::deserialize(deserializer)?;
        match fields.keys().find(|key| !ADDITIONS.contains(&key.as_str())) {
            None => Ok(Self(fields)),
            Some(key) => {
                let known = ADDITIONS.join(", ");
                Err(D::Error::custom(format!(
                    "{key:?} cannot be set for the pods of builds; these can: {known}"
                )))
            }
        }
    }
}

impl JsonSchema for PodAdditions {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "PodAdditions".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> Schema {
        let property =
            |name: &str| (name.to_owned(), json!({"description": format!("A pod's `spec.{name}`.")}));
        let properties: Map<String, Value> = ADDITIONS.map(property).into_iter().collect();
        json_schema!({
            "type": "object", "additionalProperties": false, "properties": properties,
            "description": "Fields of a pod's specification, in Kubernetes' own form, that decide where and when it runs.",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::definition::is_default;

    #[test]
    fn a_pod_gets_no_rights_by_additions() {
        let read = |text: &str| serde_json::from_str::<Builds>(text);
        let builds = read(r#"{"pod": {"nodeSelector": {"pool": "builds"}}, "atOnce": 50}"#).unwrap();
        assert_eq!(builds.pod.fields()["nodeSelector"]["pool"], "builds");
        assert_eq!((builds.at_once.get(), builds.namespace()), (50, "farrier-builds"));
        assert!(!is_default(&builds) && is_default(&read("{}").unwrap()));
        for field in ["hostNetwork", "serviceAccountName", "volumes", "containers", "securityContext"] {
            let refused = read(&format!(r#"{{"pod": {{"{field}": true}}}}"#)).unwrap_err().to_string();
            assert!(refused.contains(field) && refused.contains("nodeSelector"), "{refused}");
        }
        assert!(read(r#"{"atOnce": 0}"#).is_err());
    }
}
