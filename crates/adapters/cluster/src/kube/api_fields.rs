//! The fields that farrier reads from nodes, pods, Jobs and DaemonSets. The parser skips all other fields, so that lists of large
//! nodes need little memory. farrier also compiles faster without the types of a complete pod.
//!
//! As in the API's own types, a missing or null list is empty.

use std::collections::BTreeMap;

use farrier_core::plan::Taint;
use jiff::Timestamp;
use k8s_openapi::{
    api::{
        apps::v1::DaemonSetUpdateStrategy,
        core::v1::{ContainerState, NodeSelector, PodCondition},
    },
    apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta},
};
use kube::core::object;
use serde::{Deserialize, de::IgnoredAny};
use serde_json::Value;

pub(super) type NodeObject = object::Object<Option<NodeSpec>, NodeStatus>;

#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct NodeSpec {
    pub(super) unschedulable: Option<bool>,
    pub(super) taints: Option<Vec<Taint>>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct NodeStatus {
    pub(super) node_info: Option<NodeInfo>,
    pub(super) conditions: Option<Vec<Condition>>,
}

/// A condition of a node or a Job.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Condition {
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) status: String,
    #[serde(default)]
    pub(super) message: String,
    pub(super) last_transition_time: Option<Timestamp>,
}

/// The parsed fields of a Job.
pub(super) type JobObject = object::Object<IgnoredAny, JobStatus>;

#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct JobStatus {
    pub(super) conditions: Option<Vec<Condition>>,
    /// Number of pods that have not ended.
    pub(super) active: Option<i32>,
    pub(super) failed: Option<i32>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct NodeInfo {
    pub(super) kernel_version: String,
    pub(super) architecture: String,
    pub(super) os_image: String,
    pub(super) operating_system: String,
}

/// The parsed fields of a DaemonSet's manifest.
#[derive(Debug, Deserialize)]
pub(super) struct DaemonSet {
    pub(super) metadata: ObjectMeta,
    pub(super) spec: DaemonSetSpec,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct DaemonSetSpec {
    pub(super) selector: LabelSelector,
    pub(super) template: PodTemplate,
    pub(super) update_strategy: Option<DaemonSetUpdateStrategy>,
}

#[derive(Debug, Deserialize)]
pub(super) struct PodTemplate {
    pub(super) spec: Option<PodSpec>,
}

pub(super) type PodObject = object::Object<PodSpec, PodStatus>;

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PodSpec {
    pub(super) node_name: Option<String>,
    pub(super) image_pull_secrets: Option<Vec<IgnoredAny>>,
    affinity: Option<Affinity>,
    init_containers: Option<Vec<Container>>,
    containers: Option<Vec<Container>>,
}

impl PodSpec {
    /// Returns all containers, the init containers first.
    pub(super) fn all_containers(&self) -> impl Iterator<Item = &Container> {
        self.init_containers.iter().chain(&self.containers).flatten()
    }

    /// Returns the containers whose success a ready pod proves: containers with a readiness or startup probe, and init containers
    /// that run to completion.
    pub(super) fn probed_containers(&self) -> impl Iterator<Item = &Container> {
        let init = self.init_containers.iter().flatten();
        let init = init.filter(|container| {
            container.has_probe() || container.restart_policy.as_deref() != Some("Always")
        });
        init.chain(self.containers.iter().flatten().filter(|container| container.has_probe()))
    }

    /// Returns the nodes allowed by the pod's required node affinity, if it has one.
    pub(super) fn required_nodes(&self) -> Option<&NodeSelector> {
        self.affinity.as_ref()?.node_affinity.as_ref()?.required.as_ref()
    }
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Affinity {
    node_affinity: Option<NodeAffinity>,
}

#[derive(Clone, Debug, Deserialize)]
struct NodeAffinity {
    #[serde(rename = "requiredDuringSchedulingIgnoredDuringExecution")]
    required: Option<NodeSelector>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Container {
    pub(super) name: String,
    pub(super) image: Option<String>,
    restart_policy: Option<String>,
    readiness_probe: Option<IgnoredAny>,
    startup_probe: Option<IgnoredAny>,
    resources: Option<Resources>,
}

impl Container {
    fn has_probe(&self) -> bool {
        self.readiness_probe.is_some() || self.startup_probe.is_some()
    }

    /// Returns the names of the requested resources.
    pub(super) fn requests(&self) -> impl Iterator<Item = &String> {
        self.resources.iter().filter_map(|resources| resources.requests.as_ref()).flat_map(BTreeMap::keys)
    }
}

#[derive(Clone, Debug, Deserialize)]
struct Resources {
    requests: Option<BTreeMap<String, Value>>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PodStatus {
    pub(super) message: Option<String>,
    pub(super) conditions: Option<Vec<PodCondition>>,
    pub(super) init_container_statuses: Option<Vec<ContainerStatus>>,
    pub(super) container_statuses: Option<Vec<ContainerStatus>>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ContainerStatus {
    pub(super) name: String,
    #[serde(default)]
    pub(super) restart_count: i32,
    pub(super) state: Option<ContainerState>,
    pub(super) last_state: Option<ContainerState>,
}
