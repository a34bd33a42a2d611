//! Pure: the objects of a live cluster, parsed to no more than what farrier keeps.
//!
//! The rest of an object (a node's images and conditions, managed fields) is skipped while it is parsed, so that a
//! list of large objects costs little memory.

use std::{borrow::Cow, collections::BTreeMap, fmt};

use jiff::Timestamp;
use kube::{
    Resource,
    api::{ApiResource, ObjectMeta},
    core::{ClusterResourceScope, DynamicResourceScope, NamespaceResourceScope},
};
use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, MapAccess, Visitor},
};
use serde_json::Value;

use super::{store::Update, words};
use crate::plan::{NodeFacts, ObjectVersion, PodFacts};

/// What annotations and labels of farrier's begin with.
pub(super) const PREFIX: &str = "farrier.dev/";

/// A Node.
#[derive(Clone, Debug, Deserialize)]
#[serde(from = "RawNode")]
pub(super) struct NodeObject {
    metadata: ObjectMeta,
    /// With all of its labels; the store keeps those of interest.
    pub(super) facts: NodeFacts,
}

/// A Pod.
#[derive(Clone, Debug, Deserialize)]
#[serde(from = "RawPod")]
pub(super) struct PodObject {
    metadata: ObjectMeta,
    /// `daemon_set` is empty where no DaemonSet controls it.
    pub(super) facts: PodFacts,
}

/// Any object, whole but for `metadata.managedFields`, `metadata.resourceVersion` and `status`.
///
/// The resource version is in [`WholeObject::version`]: without it, two states of an object that differ in nothing
/// that matters here are equal.
#[derive(Clone, Debug)]
pub(super) struct WholeObject {
    metadata: ObjectMeta,
    pub(super) version: ObjectVersion,
    pub(super) value: Value,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct Meta {
    name: Option<String>,
    namespace: Option<String>,
    uid: Option<String>,
    resource_version: Option<String>,
    labels: Option<BTreeMap<String, String>>,
    #[serde(deserialize_with = "own_entries")]
    annotations: BTreeMap<String, String>,
    creation_timestamp: Option<String>,
    deletion_timestamp: Option<String>,
    owner_references: Option<Vec<OwnerReference>>,
}

#[derive(Deserialize)]
struct OwnerReference {
    kind: String,
    uid: String,
    #[serde(default)]
    controller: Option<bool>,
}

#[derive(Deserialize)]
struct RawNode {
    metadata: Meta,
    #[serde(default)]
    spec: Option<NodeSpec>,
    #[serde(default)]
    status: Option<NodeStatus>,
}

#[derive(Deserialize, Default)]
struct NodeSpec {
    #[serde(default)]
    unschedulable: Option<bool>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase")]
struct NodeStatus {
    #[serde(default)]
    node_info: Option<NodeInfo>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct NodeInfo {
    kernel_version: String,
    architecture: String,
    os_image: String,
}

#[derive(Deserialize)]
struct RawPod {
    metadata: Meta,
    #[serde(default)]
    spec: Option<PodSpec>,
    #[serde(default)]
    status: Option<PodStatus>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct PodSpec {
    node_name: Option<String>,
    containers: Option<Vec<PodContainer>>,
    init_containers: Option<Vec<PodContainer>>,
    affinity: Option<Value>,
}

#[derive(Deserialize)]
struct PodContainer {
    name: String,
    #[serde(default)]
    image: String,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct PodStatus {
    message: Option<String>,
    conditions: Option<Vec<Condition>>,
    container_statuses: Option<Vec<ContainerStatus>>,
    init_container_statuses: Option<Vec<ContainerStatus>>,
}

#[derive(Deserialize)]
struct Condition {
    r#type: String,
    status: String,
    #[serde(default)]
    message: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ContainerStatus {
    name: String,
    #[serde(default)]
    state: Option<ContainerState>,
    #[serde(default)]
    last_state: Option<ContainerState>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct ContainerState {
    waiting: Option<Ended>,
    terminated: Option<Ended>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct Ended {
    reason: Option<String>,
    message: Option<String>,
    exit_code: Option<i64>,
}

impl Meta {
    /// The part that the watch needs to know where it stands.
    fn object_meta(&self) -> ObjectMeta {
        ObjectMeta {
            name: self.name.clone(),
            namespace: self.namespace.clone(),
            uid: self.uid.clone(),
            resource_version: self.resource_version.clone(),
            ..ObjectMeta::default()
        }
    }

    fn version(&self) -> ObjectVersion {
        ObjectVersion {
            uid: self.uid.clone().unwrap_or_default(),
            resource_version: self.resource_version.clone().unwrap_or_default(),
        }
    }
}

impl From<RawNode> for NodeObject {
    fn from(raw: RawNode) -> Self {
        let RawNode { metadata, spec, status } = raw;
        let object_meta = metadata.object_meta();
        let NodeInfo { kernel_version, architecture, os_image } =
            status.and_then(|status| status.node_info).unwrap_or_default();
        let facts = NodeFacts {
            name: metadata.name.unwrap_or_default(),
            labels: metadata.labels.unwrap_or_default(),
            annotations: metadata.annotations,
            kernel_version,
            architecture,
            os_image,
            unschedulable: spec.and_then(|spec| spec.unschedulable).unwrap_or_default(),
        };
        Self { metadata: object_meta, facts }
    }
}

impl From<RawPod> for PodObject {
    fn from(raw: RawPod) -> Self {
        let RawPod { metadata, spec, status } = raw;
        let (spec, status) = (spec.unwrap_or_default(), status.unwrap_or_default());
        let object_meta = metadata.object_meta();
        let version = metadata.version();
        let controller =
            |owner: &&OwnerReference| owner.controller == Some(true) && owner.kind == "DaemonSet";
        let owner = metadata.owner_references.iter().flatten().find(controller);
        let bound = spec.node_name.as_ref().is_some_and(|name| !name.is_empty());
        let node = if bound { spec.node_name.clone() } else { spec.meant_for() };
        let ready = |condition: &Condition| condition.r#type == "Ready" && condition.status == "True";
        let facts = PodFacts {
            version,
            daemon_set: owner.map(|owner| owner.uid.clone()).unwrap_or_default(),
            node: node.unwrap_or_default(),
            bound,
            images: spec.images(),
            ready: status.conditions.iter().flatten().any(ready),
            created: metadata.creation_timestamp.and_then(|text| text.parse::<Timestamp>().ok()),
            deleting: metadata.deletion_timestamp.is_some(),
            messages: status.messages(),
            namespace: metadata.namespace.unwrap_or_default(),
            name: metadata.name.unwrap_or_default(),
        };
        Self { metadata: object_meta, facts }
    }
}

impl PodSpec {
    fn images(&self) -> BTreeMap<String, String> {
        let all = self.init_containers.iter().flatten().chain(self.containers.iter().flatten());
        all.map(|container| (container.name.clone(), container.image.clone())).collect()
    }

    /// The node that the DaemonSet controller made it for: it names it in the pod's node affinity.
    fn meant_for(&self) -> Option<String> {
        let terms = self
            .affinity
            .as_ref()?
            .pointer("/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms")?
            .as_array()?;
        let mut fields = terms.iter().filter_map(|term| term.get("matchFields")?.as_array()).flatten();
        let named = |field: &Value| {
            let by_name = field["key"] == "metadata.name" && field["operator"] == "In";
            by_name.then(|| field["values"].get(0)?.as_str().map(str::to_owned)).flatten()
        };
        fields.find_map(named)
    }
}

impl PodStatus {
    /// Why its containers do not run.
    fn messages(&self) -> Vec<String> {
        let containers = self
            .init_container_statuses
            .iter()
            .flatten()
            .chain(self.container_statuses.iter().flatten())
            .flat_map(ContainerStatus::messages);
        let unscheduled =
            |condition: &&Condition| condition.r#type == "PodScheduled" && condition.status == "False";
        let unscheduled = self.conditions.iter().flatten().find(unscheduled);
        let unscheduled = unscheduled.and_then(|condition| condition.message.as_deref());
        let unscheduled = unscheduled.map(|message| format!("not scheduled: {message}"));
        let pod = self.message.clone().filter(|message| !message.is_empty());
        let all = containers.chain(unscheduled).chain(pod);
        all.map(|message| words::one_line(&message)).collect()
    }
}

impl ContainerStatus {
    fn messages(&self) -> Vec<String> {
        let of = |state: &Option<ContainerState>, ended: fn(&ContainerState) -> Option<&Ended>| {
            state.as_ref().and_then(ended).map(|ended| ended.describe(&self.name))
        };
        let waiting = of(&self.state, |state| state.waiting.as_ref());
        let ended = of(&self.state, |state| state.terminated.as_ref());
        let ended = ended.or_else(|| of(&self.last_state, |state| state.terminated.as_ref()));
        waiting.into_iter().chain(ended).flatten().collect()
    }
}

impl Ended {
    /// `None` for what is no trouble: a container that is being made, or that ended well.
    fn describe(&self, container: &str) -> Option<String> {
        let Self { reason, message, exit_code } = self;
        let reason = reason.as_deref().unwrap_or_default();
        if *exit_code == Some(0) || ["ContainerCreating", "PodInitializing", "Completed"].contains(&reason) {
            return None;
        }
        let mut text = container.to_owned();
        let code = exit_code.map(|code| format!("exit code {code}"));
        let parts = [Some(reason), code.as_deref(), message.as_deref()].into_iter().flatten();
        for part in parts.filter(|part| !part.is_empty()) {
            text.push_str(": ");
            text.push_str(part);
        }
        (text != container).then_some(text)
    }
}

impl<'de> Deserialize<'de> for WholeObject {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Self::new(Value::deserialize(deserializer)?))
    }
}

impl WholeObject {
    /// From an object as the API server gave it.
    pub(super) fn new(mut value: Value) -> Self {
        let text = |value: &Value, key: &str| value["metadata"][key].as_str().map(str::to_owned);
        let metadata = ObjectMeta {
            name: text(&value, "name"),
            namespace: text(&value, "namespace"),
            uid: text(&value, "uid"),
            resource_version: text(&value, "resourceVersion"),
            ..ObjectMeta::default()
        };
        if let Some(object) = value.as_object_mut() {
            object.remove("status");
        }
        if let Some(meta) = value.get_mut("metadata").and_then(Value::as_object_mut) {
            meta.remove("managedFields");
            meta.remove("resourceVersion");
        }
        let version = ObjectVersion {
            uid: metadata.uid.clone().unwrap_or_default(),
            resource_version: metadata.resource_version.clone().unwrap_or_default(),
        };
        Self { metadata, version, value }
    }

    pub(super) fn name(&self) -> &str {
        self.metadata.name.as_deref().unwrap_or_default()
    }
}

impl NodeObject {
    pub(super) fn into_update(self) -> Update {
        Update::Node(self.facts, self.metadata.resource_version.unwrap_or_default())
    }
}

/// Entries whose key is one of farrier's; the values of others are never copied.
fn own_entries<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, String>, D::Error> {
    struct Own;

    impl<'de> Visitor<'de> for Own {
        type Value = BTreeMap<String, String>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a mapping of strings")
        }

        fn visit_unit<E>(self) -> Result<Self::Value, E> {
            Ok(BTreeMap::new())
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut own = BTreeMap::new();
            while let Some(key) = map.next_key::<Cow<'de, str>>()? {
                if key.starts_with(PREFIX) {
                    own.insert(key.into_owned(), map.next_value()?);
                } else {
                    map.next_value::<IgnoredAny>()?;
                }
            }
            Ok(own)
        }
    }

    deserializer.deserialize_any(Own)
}

macro_rules! resource {
    ($object:ty, $kind:literal, $plural:literal, $scope:ty) => {
        impl Resource for $object {
            type DynamicType = ();
            type Scope = $scope;

            fn kind((): &()) -> Cow<'_, str> {
                $kind.into()
            }

            fn group((): &()) -> Cow<'_, str> {
                "".into()
            }

            fn version((): &()) -> Cow<'_, str> {
                "v1".into()
            }

            fn plural((): &()) -> Cow<'_, str> {
                $plural.into()
            }

            fn meta(&self) -> &ObjectMeta {
                &self.metadata
            }

            fn meta_mut(&mut self) -> &mut ObjectMeta {
                &mut self.metadata
            }
        }
    };
}

resource!(NodeObject, "Node", "nodes", ClusterResourceScope);
resource!(PodObject, "Pod", "pods", NamespaceResourceScope);

impl Resource for WholeObject {
    type DynamicType = ApiResource;
    type Scope = DynamicResourceScope;

    fn kind(resource: &ApiResource) -> Cow<'_, str> {
        resource.kind.as_str().into()
    }

    fn group(resource: &ApiResource) -> Cow<'_, str> {
        resource.group.as_str().into()
    }

    fn version(resource: &ApiResource) -> Cow<'_, str> {
        resource.version.as_str().into()
    }

    fn plural(resource: &ApiResource) -> Cow<'_, str> {
        resource.plural.as_str().into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

#[cfg(test)]
#[path = "objects_tests.rs"]
mod tests;
