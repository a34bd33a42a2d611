//! The operators' resources that together determine the placement of a driver.

use super::{
    ClusterSnapshot, ManifestLocation, Placement, PlanInputs, ResourceFacts,
    reach::{DRIVER_OWNER, DriverOwnership},
};
use crate::image::{OperatorResource, RolloutSpec};

/// Resources in a rollout's manifests, and resources of the cluster. A manifest takes precedence over the resource of the
/// same kind and name.
#[derive(Clone, Copy)]
pub(super) struct OperatorResources<'a> {
    snapshot: &'a ClusterSnapshot,
    manifests: &'a [ResourceFacts],
}

impl<'a> OperatorResources<'a> {
    /// Returns the resources of the cluster.
    pub(super) fn live(snapshot: &'a ClusterSnapshot) -> Self {
        Self { snapshot, manifests: &[] }
    }

    /// Returns the resources of the cluster and of a rollout's manifests.
    pub(super) fn for_rollout(inputs: &PlanInputs<'a>, rollout: &RolloutSpec) -> Self {
        let location = ManifestLocation::of(rollout);
        let manifests = location.and_then(|location| inputs.manifests.get(&location)?.as_ref().ok());
        let manifests = manifests.map(|manifests| manifests.resources.as_slice()).unwrap_or_default();
        Self { snapshot: inputs.snapshot, manifests }
    }

    /// Returns the resources of a kind.
    pub(super) fn of(self, kind: OperatorResource) -> impl Iterator<Item = &'a ResourceFacts> {
        let is_in_manifests = move |resource: &&ResourceFacts| {
            self.manifests.iter().any(|other| (other.kind, &other.name) == (resource.kind, &resource.name))
        };
        let live = self.snapshot.resources.iter().filter(move |resource| !is_in_manifests(resource));
        live.chain(self.manifests).filter(move |resource| resource.kind == kind)
    }

    /// Returns the ClusterPolicy that the GPU Operator uses: the oldest one (`getSingletonClusterPolicy` in
    /// `controllers/clusterpolicy_controller.go`, since 26.7; earlier versions use the one that they see first).
    pub(super) fn cluster_policy(self) -> Option<&'a ResourceFacts> {
        // A manifest without a live object counts as younger than all live objects.
        fn age(policy: &ResourceFacts) -> impl Ord + '_ {
            (policy.created.is_none(), policy.created, &policy.name)
        }
        self.of(OperatorResource::ClusterPolicy).min_by_key(|policy| age(policy))
    }

    /// Whether the GPU Operator assigns nodes to NVIDIADriver resources, as it does since version 26.7, the first with a
    /// GPUCluster.
    pub(super) fn has_driver_owners(self) -> bool {
        self.of(OperatorResource::GpuCluster).next().is_some()
            || self.snapshot.nodes.iter().any(|node| node.labels.contains_key(DRIVER_OWNER))
    }

    /// Returns the rules of the DaemonSet that the operator creates from one of the resources.
    pub(super) fn placement_of(self, resource: &ResourceFacts) -> Placement {
        let placement = resource.placement();
        let ownership = placement.ownership.is_some().then(|| DriverOwnership::among(&resource.name, self));
        Placement { ownership, ..placement }
    }
}
