//! Pure: what was observed in a cluster, raw and untrusted.

use std::collections::BTreeMap;

use super::NodeAffinity;

/// A node, as it describes itself. Nothing in it is checked yet; [`super::node_target`] does that.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeFacts {
    /// `metadata.name`.
    pub name: String,
    /// `metadata.labels`.
    pub labels: BTreeMap<String, String>,
    /// `status.nodeInfo.kernelVersion`.
    pub kernel_version: String,
    /// `status.nodeInfo.architecture`.
    pub architecture: String,
    /// `status.nodeInfo.osImage`, for people.
    pub os_image: String,
}

/// A container or init container of a pod template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Container {
    /// Its name.
    pub name: String,
    /// Its image; empty where the manifest gives none.
    pub image: String,
    /// Why its image cannot be set, where it cannot (a value that other places share).
    pub fixed: Option<String>,
}

/// The controller that owns an object (`metadata.ownerReferences` with `controller: true`).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
pub struct Owner {
    /// Such as `NicClusterPolicy`.
    pub kind: String,
    /// The owner's name.
    pub name: String,
}

/// A DaemonSet: where its pods run and with which images.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DaemonSetFacts {
    /// `metadata.namespace`; `default` where the manifest gives none.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
    /// Containers and init containers.
    pub containers: Vec<Container>,
    /// `spec.template.spec.nodeSelector`.
    pub node_selector: BTreeMap<String, String>,
    /// The required part of `spec.template.spec.affinity.nodeAffinity`.
    pub affinity: NodeAffinity,
    /// The controller that owns it, if any.
    pub owner: Option<Owner>,
}

/// Everything that a plan needs to know about a cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterSnapshot {
    /// Nodes.
    pub nodes: Vec<NodeFacts>,
    /// DaemonSets.
    pub daemon_sets: Vec<DaemonSetFacts>,
}

impl DaemonSetFacts {
    /// May its pods run on this node? Taints are left out of account: the answer is a superset of the
    /// nodes that it runs on, so that a rewrite is held too often rather than too seldom. `None` where
    /// its affinity is not understood.
    pub fn reaches(&self, node: &NodeFacts) -> Option<bool> {
        let selected = self.node_selector.iter().all(|(key, value)| node.labels.get(key) == Some(value));
        self.affinity.admits(node).map(|admitted| admitted && selected)
    }

    /// The label keys that decide which nodes it reaches.
    pub fn label_keys(&self) -> impl Iterator<Item = &str> {
        self.node_selector.keys().map(String::as_str).chain(self.affinity.label_keys())
    }
}
