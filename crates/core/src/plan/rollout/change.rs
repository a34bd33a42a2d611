//! Writes to a cluster, as data.
//!
//! A change that depends on the state that the plan saw contains that state. An adapter either makes the change or
//! reports a conflict because the object has changed; [`crate::plan`] then decides again. Changes of DaemonSets and
//! resources are server-side applies with the field manager `farrier`: if a change omits a field that farrier set
//! before, farrier gives up the field.

use std::{collections::BTreeMap, sync::Arc};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::{
    super::{
        ClusterSnapshot, DaemonSetFacts, NodeAffinity, NodeFacts, ObjectVersion, UPGRADE,
        labels::operator_upgrade_in_progress,
    },
    copy::changes_image,
    watch::is_same_image,
};
use crate::image::{ImageReference, OperatorResource};

/// One write to the cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase", tag = "change")]
pub enum Change {
    /// Applies fields of a DaemonSet that farrier did not create.
    DaemonSet(DaemonSetChange),
    /// Creates or updates a DaemonSet for one kernel.
    Copy(DaemonSetCopy),
    /// Deletes a DaemonSet for one kernel.
    Retire(DaemonSetRetirement),
    /// Evicts a pod, so that its DaemonSet creates a new one.
    Restart(PodRestart),
    /// Sets labels and annotations of a node.
    Node(NodeChange),
    /// Applies fields of an operator's resource.
    Resource(ResourceChange),
    /// Creates a Job that forecasts whether a node's driver can be unloaded, or checks the node's new driver.
    Check(NodeCheck),
}

/// All fields that farrier owns in a DaemonSet that it did not create.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DaemonSetChange {
    /// Namespace of the DaemonSet.
    pub namespace: String,
    /// Name of the DaemonSet.
    pub name: String,
    /// Version that the plan saw; `None` in a directory of manifests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<ObjectVersion>,
    /// Images that the plan saw, by container. Any other image is a conflict.
    pub expected: BTreeMap<String, String>,
    /// Images to set, by container; init containers are included by their names.
    pub images: BTreeMap<String, String>,
    /// Whole required node affinity, where farrier sets or owns it. [`NodeAffinity::Any`] removes the affinity, also that of another
    /// field manager.
    #[serde(skip)]
    pub affinity: Option<NodeAffinity>,
    /// farrier's annotations.
    pub annotations: BTreeMap<String, String>,
    /// Images that must be in the registry at the time of the write (guarantee 1).
    #[serde(rename = "proof")]
    pub required_images: Vec<ImageReference>,
}

/// DaemonSet for one kernel, to create or update.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DaemonSetCopy {
    /// Namespace of the copy.
    pub namespace: String,
    /// Name of the copy.
    pub name: String,
    /// Version that the plan saw; `None` where there was no such DaemonSet, and there must not be one at the time of
    /// the write.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<ObjectVersion>,
    /// Whole object, as applied.
    pub manifest: Arc<serde_json::Value>,
    /// Images that must be in the registry at the time of the write (guarantee 1).
    #[serde(rename = "proof")]
    pub required_images: Vec<ImageReference>,
}

/// Deletion of a DaemonSet for one kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DaemonSetRetirement {
    /// Namespace of the copy.
    pub namespace: String,
    /// Name of the copy.
    pub name: String,
    /// Version that the plan saw.
    pub version: ObjectVersion,
}

/// Eviction of one pod, which PodDisruptionBudgets can refuse.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PodRestart {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub name: String,
    /// UID of the pod.
    pub uid: String,
    /// Reason for messages.
    pub why: String,
    /// Whether the eviction drains the node for another driver. The pod may then be in any namespace.
    #[serde(skip)]
    pub drained: bool,
    /// Grace period of the pod; the pod's own grace period when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grace_seconds: Option<u32>,
}

/// Labels, annotations and cordon of a node; all keys begin with `farrier.dev/`. Labels and annotations that are not
/// named stay: several parts of a plan write to one node, so this is a merge patch instead of an apply.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeChange {
    /// Name of the node.
    pub name: String,
    /// Labels to set; `None` removes a label.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, Option<String>>,
    /// Annotations to set; `None` removes an annotation.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, Option<String>>,
    /// New value of `spec.unschedulable`, where it changes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cordon: Option<bool>,
    /// Taint to remove.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub untaint: Option<Untaint>,
    /// State of the node that the plan saw. The change is refused if the state differs at the time of the write.
    #[serde(skip)]
    pub precondition: Option<NodePrecondition>,
}

/// Removal of a taint. The change is refused if another node has taken the name since the plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Untaint {
    /// Key of the taint.
    pub key: String,
    /// Creation time of the node that the plan saw.
    #[serde(skip)]
    pub created: Option<Timestamp>,
}

/// Facts that decide about a node's upgrade. Without this precondition, farrier could mistake a cordon that another actor
/// set in the meantime for its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodePrecondition {
    /// Value of the annotation `farrier.dev/upgrade`.
    pub upgrade_note: Option<String>,
    /// Whether the node was cordoned.
    pub unschedulable: bool,
    /// Whether an operator was upgrading the node.
    pub operator_upgrading: bool,
}

impl NodePrecondition {
    /// Returns the current facts of a node.
    pub fn of(node: &NodeFacts) -> Self {
        Self {
            upgrade_note: node.annotations.get(UPGRADE).cloned(),
            unschedulable: node.unschedulable,
            operator_upgrading: operator_upgrade_in_progress(&node.labels).is_some(),
        }
    }
}

/// Job on one node, created from a CronJob.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeCheck {
    /// Name of the node.
    pub node: String,
    /// Namespace of the CronJob and of the Job.
    pub namespace: String,
    /// Name of the CronJob.
    pub template: String,
    /// Name of the Job, unique to this upgrade of the node. An existing Job of this name is left as it is.
    pub name: String,
    /// UID of the old driver's pod, which a forecast excludes from the holders of the driver.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub driver_pod: Option<String>,
}

/// Fields of an operator's resource.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResourceChange {
    /// Kind of the resource.
    pub kind: OperatorResource,
    /// Name of the resource, after its namespace if there is one: `kmm/acme`.
    pub name: String,
    /// Version that the plan saw; `None` in a directory of manifests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<ObjectVersion>,
    /// In a directory of manifests: values of the fields that the plan saw. Any other value is a conflict.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expected: Option<serde_json::Value>,
    /// `spec` to apply, with farrier's fields only.
    pub spec: serde_json::Value,
    /// farrier's annotations.
    pub annotations: BTreeMap<String, String>,
    /// Images that must be in the registry at the time of the write (guarantee 1).
    #[serde(rename = "proof")]
    pub required_images: Vec<ImageReference>,
}

/// Image change of one container in a directory of manifests.
#[derive(Clone, Debug, PartialEq, Eq, derive_more::Display)]
#[display("DaemonSet {namespace}/{daemon_set}, container {container}")]
pub struct ImageChange {
    /// Namespace of the DaemonSet.
    pub namespace: String,
    /// Name of the DaemonSet.
    pub daemon_set: String,
    /// Name of the container.
    pub container: String,
    /// Value that the plan saw in the field. Any other value is a conflict.
    pub expected: String,
    /// Value to set.
    pub to: String,
}

impl Change {
    /// Returns the images that must be in the registry at the time of the write.
    pub fn required_images(&self) -> &[ImageReference] {
        match self {
            Self::DaemonSet(DaemonSetChange { required_images, .. })
            | Self::Copy(DaemonSetCopy { required_images, .. })
            | Self::Resource(ResourceChange { required_images, .. }) => required_images,
            Self::Retire(_) | Self::Restart(_) | Self::Node(_) | Self::Check(_) => &[],
        }
    }

    /// Whether the change sets an image that differs from the snapshot's. Changes of records and labels, and
    /// restarts, set no image. Restoring an image counts, although a restored image is not in `required_images`.
    pub fn sets_image(&self, snapshot: &ClusterSnapshot) -> bool {
        let differs_from_snapshot = match self {
            Self::DaemonSet(change) => !change.image_changes().is_empty(),
            Self::Copy(DaemonSetCopy { namespace, name, manifest, .. }) => {
                snapshot.daemon_set(namespace, name).is_some_and(|copy| changes_image(manifest, copy))
            }
            _ => false,
        };
        differs_from_snapshot || !self.required_images().is_empty()
    }

    /// Whether the change may restart pods because it sets an image, a node affinity or an operator's driver. Changes of records
    /// and labels restart none, and evictions have a separate limit.
    pub(super) fn is_rewrite(&self, snapshot: &ClusterSnapshot) -> bool {
        match self {
            Self::DaemonSet(change) => {
                let DaemonSetChange { namespace, name, affinity, .. } = change;
                let before = snapshot.daemon_set(namespace, name).map(|found| &found.placement.affinity);
                !change.image_changes().is_empty() || (affinity.is_some() && affinity.as_ref() != before)
            }
            Self::Resource(_) => true,
            _ => self.sets_image(snapshot),
        }
    }

    /// Whether the change sets fields of a DaemonSet.
    pub(super) fn is_apply(&self) -> bool {
        matches!(self, Self::DaemonSet(_) | Self::Copy(_))
    }

    /// Returns the object's name for messages: `DaemonSet kube-system/driver`.
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

    /// Describes the change for a report of the steps of a run: `created DaemonSet kube-system/driver-6-1`.
    pub fn step(&self) -> String {
        let verb = match self {
            Self::Copy(DaemonSetCopy { version: None, .. }) | Self::Check(_) => "created",
            Self::DaemonSet(_) | Self::Copy(_) | Self::Resource(_) => "updated",
            Self::Retire(_) => "deleted",
            Self::Restart(_) => "evicted",
            Self::Node(NodeChange { cordon: Some(true), .. }) => "cordoned",
            Self::Node(NodeChange { cordon: Some(false), .. }) => "uncordoned",
            Self::Node(NodeChange { untaint: Some(_), .. }) => "untainted",
            Self::Node(_) => "labeled",
        };
        format!("{verb} {}", self.object())
    }
}

/// Returns the annotation that a DaemonSet lacks directly after it was applied.
fn lost_annotation(applied: &BTreeMap<String, String>, after: &DaemonSetFacts) -> Option<String> {
    let kept = &after.live.as_ref()?.annotations;
    let (key, _) = applied.iter().find(|(key, value)| kept.get(*key) != Some(*value))?;
    Some(format!("annotation {key} of DaemonSet {}", after.name))
}

impl DaemonSetCopy {
    /// Returns the field that the API server's answer to this change lacks: an admission webhook changed or removed it.
    pub fn lost_field(&self, after: &DaemonSetFacts) -> Option<String> {
        if changes_image(&self.manifest, after) {
            return Some(format!("image of DaemonSet {}", after.name));
        }
        lost_annotation(&BTreeMap::deserialize(&self.manifest["metadata"]["annotations"]).ok()?, after)
    }
}

impl DaemonSetChange {
    /// Returns the field that the API server's answer to this change lacks: an admission webhook changed or removed it.
    pub fn lost_field(&self, after: &DaemonSetFacts) -> Option<String> {
        // A webhook may change the tag of a restored image, for example to a digest.
        let is_lost = |(container, image): &(&String, &String)| {
            image.contains('@')
                && after.image_of(container).is_none_or(|current| !is_same_image(current, image))
        };
        if let Some((container, _)) = self.images.iter().find(is_lost) {
            return Some(format!("image of container {container} of DaemonSet {}", after.name));
        }
        lost_annotation(&self.annotations, after)
    }

    /// Returns the images that differ from the images that the plan saw.
    pub fn image_changes(&self) -> Vec<ImageChange> {
        let Self { namespace, name, expected, images, .. } = self;
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
