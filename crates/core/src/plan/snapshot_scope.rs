//! The parts of a cluster that the definitions need. Nothing else is kept in memory.

use std::collections::BTreeSet;

use super::{
    NEXT_KERNEL_LABEL, UPGRADE_STATE_LABELS,
    host_drivers::host_driver_label,
    labels::{GPU_LABELS, TARGET_LABELS},
    rollout::skip_labels,
};
use crate::{
    definition::checked::ImageStream,
    image::{Canary, Definitions, Drain, OperatorResource, ResourceName, RolloutSpec},
    kernel::{OSTREE_VERSION_LABEL, RHEL_VERSION_LABEL},
};

/// Parts of a cluster that the definitions need.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SnapshotScope {
    /// Labels of nodes. Labels that the named DaemonSets and operators' resources select by are added once those
    /// objects are seen. farrier's own labels are always kept.
    pub labels: BTreeSet<String>,
    /// Namespace and name of the DaemonSets that rollouts name.
    pub daemon_sets: BTreeSet<(String, String)>,
    /// Operators' resources that rollouts name.
    pub resources: BTreeSet<OperatorResource>,
    /// ImageStreams that kernel families name.
    pub image_streams: BTreeSet<ImageStream>,
    /// Whether an upgrade drains nodes. All pods of a node are then needed while it is drained.
    pub drains: bool,
    /// Namespaces in which an upgrade creates check or forecast Jobs.
    pub checks: BTreeSet<String>,
    /// Whether the snapshot is for a rollback. It then needs every DaemonSet with a farrier record, even one that no
    /// rollout names, and no pods.
    pub rollback: bool,
}

impl SnapshotScope {
    /// Selects the objects with a farrier record, and the DaemonSets with these namespaces and names.
    pub fn for_rollback(daemon_sets: impl IntoIterator<Item = (String, String)>) -> Self {
        Self {
            daemon_sets: daemon_sets.into_iter().collect(),
            resources: OperatorResource::TARGETS.into(),
            rollback: true,
            ..Self::default()
        }
    }

    /// Returns the parts that these definitions need.
    pub fn of(definitions: &Definitions) -> Self {
        let system_labels = [OSTREE_VERSION_LABEL, RHEL_VERSION_LABEL, NEXT_KERNEL_LABEL];
        let labels = TARGET_LABELS.into_iter().chain(GPU_LABELS).chain(UPGRADE_STATE_LABELS);
        let labels = labels.chain(system_labels);
        let streams = definitions.families.iter().filter_map(|family| family.spec.image_stream.clone());
        let mut scope = Self {
            labels: labels.map(str::to_owned).collect(),
            image_streams: streams.collect(),
            ..Self::default()
        };
        let ignored = definitions.site.ignore_nodes.iter().flat_map(|rule| rule.labels.keys());
        scope.labels.extend(ignored.map(ToString::to_string));
        for image in definitions.images.values() {
            scope.labels.extend(image.spec.nodes.keys().map(str::to_owned));
            scope.labels.insert(host_driver_label(&image.metadata.name));
            for rollout in &image.spec.rollout {
                if let Some(target) = rollout.daemon_set() {
                    let name = (target.namespace.to_string(), target.daemon_set.to_string());
                    scope.daemon_sets.insert(name);
                }
                if let (Some(upgrade), Some(target)) = (rollout.upgrade(), rollout.daemon_set()) {
                    if let Some(Canary::Labels(first)) = &upgrade.canary {
                        scope.labels.extend(first.match_labels.keys().map(ToString::to_string));
                    }
                    scope.drains |= upgrade.drain != Drain::None;
                    scope.checks.extend(upgrade.creates_jobs().then(|| target.namespace.to_string()));
                }
                if let Some(ResourceName { resource, .. }) = rollout.resource() {
                    scope.resources.insert(*resource);
                    scope.labels.extend(resource.node_label().map(str::to_owned));
                    scope.labels.extend(skip_labels(*resource).map(str::to_owned));
                }
                if let RolloutSpec::PublishOnly { resource } = rollout {
                    scope.resources.extend(*resource);
                }
            }
        }
        // Both kinds determine whether the GPU Operator uses a resource, and on which nodes.
        if scope.resources.iter().any(|kind| kind.is_of_gpu_operator()) {
            scope.resources.extend([OperatorResource::ClusterPolicy, OperatorResource::GpuCluster]);
        }
        scope
    }
}
