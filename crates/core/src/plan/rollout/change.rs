//! Pure: writes to a cluster, as data.
//!
//! Every change names the state that it was decided from, where there is one; an adapter makes it or says that the
//! object is another by now ([`crate::plan`] then decides anew). Changes of DaemonSets and resources are server-side
//! applies with the field manager `farrier`: what a change does not name and farrier set before is given up.

use std::{collections::BTreeMap, sync::Arc};

use serde::Serialize;

use super::{
    super::{ClusterSnapshot, NodeAffinity, NodeFacts, ObjectVersion, UPGRADE, labels::operator_at_work},
    copy::gives_image,
};
use crate::image::{ImageReference, OperatorResource};

/// One write.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase", tag = "change")]
pub enum Change {
    /// Fields of a DaemonSet that farrier did not make.
    DaemonSet(DaemonSetChange),
    /// A DaemonSet for one kernel, made or brought up to date.
    Copy(DaemonSetCopy),
    /// A DaemonSet for one kernel, deleted.
    Retire(DaemonSetRetirement),
    /// A pod, evicted so that its DaemonSet makes a new one.
    Restart(PodRestart),
    /// Labels and annotations of a node.
    Node(NodeChange),
    /// Fields of an operator's resource.
    Resource(ResourceChange),
    /// A Job that looks at a node before its old driver ends, or with its new one.
    Check(NodeCheck),
}

/// All that is farrier's in a DaemonSet that farrier did not make.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DaemonSetChange {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// What the plan saw; `None` in a directory of manifests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<ObjectVersion>,
    /// The images that the plan saw, by container: anything else is a conflict.
    pub expected: BTreeMap<String, String>,
    /// Images by container; those of init containers are found by their names.
    pub images: BTreeMap<String, String>,
    /// The whole required node affinity, where farrier has set it.
    #[serde(skip)]
    pub affinity: Option<NodeAffinity>,
    /// farrier's annotations.
    pub annotations: BTreeMap<String, String>,
    /// Images that must be in the registry at the moment of the write (guarantee 1).
    pub proof: Vec<ImageReference>,
}

/// A DaemonSet for one kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DaemonSetCopy {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// What the plan saw; `None` where there was none of this name, and there must be none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<ObjectVersion>,
    /// The whole object, as applied.
    pub manifest: Arc<serde_json::Value>,
    /// Images that must be in the registry at the moment of the write (guarantee 1).
    pub proof: Vec<ImageReference>,
}

/// The end of a DaemonSet for one kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DaemonSetRetirement {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// What the plan saw.
    pub version: ObjectVersion,
}

/// The eviction of one pod, which PodDisruptionBudgets can refuse.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PodRestart {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its uid.
    pub uid: String,
    /// Why, for people.
    pub why: String,
    /// Does it make room for another driver on its node? It may then be in any namespace.
    #[serde(skip)]
    pub drained: bool,
    /// How long it may take to end; as it says itself when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grace_seconds: Option<u32>,
}

/// Labels and annotations of a node, all of them `farrier.dev/...`, and its cordon. What is not named stays: several parts of
/// a plan write to one node, so this is a merge patch and no apply.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeChange {
    /// The node.
    pub name: String,
    /// Labels to set; `None` removes one.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, Option<String>>,
    /// Annotations to set; `None` removes one.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, Option<String>>,
    /// `spec.unschedulable`, where it changes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cordon: Option<bool>,
    /// What the plan saw of the node; a change is refused where it is another by now.
    #[serde(skip)]
    pub seen: Option<NodeSeen>,
}

/// What decides about a node's upgrade: a cordon that someone else set meanwhile would else become farrier's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeSeen {
    /// The annotation `farrier.dev/upgrade`.
    pub note: Option<String>,
    /// Was it cordoned?
    pub unschedulable: bool,
    /// Did an operator upgrade it?
    pub operated: bool,
}

impl NodeSeen {
    /// Of a node.
    pub fn of(node: &NodeFacts) -> Self {
        Self {
            note: node.annotations.get(UPGRADE).cloned(),
            unschedulable: node.unschedulable,
            operated: operator_at_work(&node.labels).is_some(),
        }
    }
}

/// A Job on one node, made from a CronJob.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeCheck {
    /// The node.
    pub node: String,
    /// The namespace of the CronJob and of the Job.
    pub namespace: String,
    /// The CronJob.
    pub template: String,
    /// The Job's name: that of this node's upgrade and no other. One that is there already is left as it is.
    pub name: String,
    /// The uid of the old driver's pod, which a forecast takes away from what holds the driver.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub driver_pod: Option<String>,
}

/// Fields of an operator's resource.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResourceChange {
    /// Its kind.
    pub kind: OperatorResource,
    /// Its name.
    pub name: String,
    /// What the plan saw.
    pub version: ObjectVersion,
    /// The applied `spec`, with nothing but farrier's fields.
    pub spec: serde_json::Value,
    /// farrier's annotations.
    pub annotations: BTreeMap<String, String>,
    /// Images that must be in the registry at the moment of the write (guarantee 1).
    pub proof: Vec<ImageReference>,
}

/// One container's image in a directory of manifests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageChange {
    /// The DaemonSet's namespace.
    pub namespace: String,
    /// The DaemonSet's name.
    pub daemon_set: String,
    /// The container's name.
    pub container: String,
    /// What the plan saw in the field; anything else is a conflict.
    pub expected: String,
    /// What it gets.
    pub to: String,
}

impl Change {
    /// Images that must be in the registry at the moment of the write.
    pub fn proof(&self) -> &[ImageReference] {
        match self {
            Self::DaemonSet(DaemonSetChange { proof, .. })
            | Self::Copy(DaemonSetCopy { proof, .. })
            | Self::Resource(ResourceChange { proof, .. }) => proof,
            Self::Retire(_) | Self::Restart(_) | Self::Node(_) | Self::Check(_) => &[],
        }
    }

    /// Does it give something another image than the snapshot has? Notes, restarts and labels do not. An image that is put back
    /// needs no proof.
    pub fn sets_image(&self, seen: &ClusterSnapshot) -> bool {
        let puts_back = match self {
            Self::DaemonSet(change) => !change.image_changes().is_empty(),
            Self::Copy(DaemonSetCopy { namespace, name, manifest, .. }) => {
                let mut found = seen.daemon_sets.iter();
                let found = found.find(|found| found.namespace == *namespace && found.name == *name);
                found.is_some_and(|found| gives_image(manifest, found))
            }
            _ => false,
        };
        puts_back || !self.proof().is_empty()
    }

    /// For messages: `DaemonSet kube-system/driver`.
    pub fn object(&self) -> String {
        match self {
            Self::DaemonSet(DaemonSetChange { namespace, name, .. })
            | Self::Copy(DaemonSetCopy { namespace, name, .. })
            | Self::Retire(DaemonSetRetirement { namespace, name, .. }) => {
                format!("DaemonSet {namespace}/{name}")
            }
            Self::Restart(PodRestart { namespace, name, .. }) => format!("pod {namespace}/{name}"),
            Self::Node(NodeChange { name, .. }) => format!("node {name}"),
            Self::Resource(ResourceChange { kind, name, .. }) => format!("{kind} {name}"),
            Self::Check(NodeCheck { namespace, name, .. }) => format!("Job {namespace}/{name}"),
        }
    }
}

impl DaemonSetChange {
    /// The images that differ from what the plan saw, one by one.
    pub fn image_changes(&self) -> Vec<ImageChange> {
        let Self { namespace, name, version: _, expected, images, affinity: _, annotations: _, proof: _ } =
            self;
        let differs = |(container, to): &(&String, &String)| expected.get(*container) != Some(*to);
        images
            .iter()
            .filter(differs)
            .map(|(container, to)| ImageChange {
                namespace: namespace.clone(),
                daemon_set: name.clone(),
                container: container.clone(),
                expected: expected.get(container).cloned().unwrap_or_default(),
                to: to.clone(),
            })
            .collect()
    }
}
