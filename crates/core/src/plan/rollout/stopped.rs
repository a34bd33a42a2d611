//! Rollouts that give a node no image for its next kernel until a person intervenes, or until there is another image.

use std::collections::{BTreeSet, HashMap};

use super::{
    ClusterSnapshot, DaemonSetFacts, HoldReason, ImageContents, NodeGroup, Observed, PlanInputs,
    PlannedRollout, PlannedUpgrade, ReachingObject, RolloutDecision, RolloutObject, RolloutTarget,
    named_daemon_set, pause::is_paused, per_kernel::Original, reached::reached_nodes, single::single,
};
use crate::{
    image::{ImageName, ResourceName, Strategy},
    kernel::KernelTarget,
    plan::{NodeFacts, PodFacts, ResourceFacts, UpdateStrategy, UpgradeWait},
};

/// Rollout that sets no other image, or whose image failed for a kernel.
pub(in crate::plan) struct StoppedRollout<'a> {
    pub(in crate::plan) image: &'a ImageName,
    target: &'a RolloutTarget,
    /// Names of the nodes that the rollout reaches.
    nodes: BTreeSet<&'a str>,
    /// Reason why the rollout sets no other image.
    stop: Option<String>,
    /// Contents of the DaemonSet's image, where known.
    contents: Option<&'a ImageContents>,
    /// Contents of the images of the DaemonSet's pods, by node, where a pod keeps its image until farrier replaces the pod.
    contents_of_pods: HashMap<&'a str, Option<&'a ImageContents>>,
    /// DaemonSet with its copies, where the strategy is `per-kernel`.
    original: Option<Original<'a>>,
}

impl<'a> StoppedRollout<'a> {
    /// Examines a rollout; `None` where it gives all nodes their images.
    pub(super) fn of(
        inputs: &PlanInputs<'a>,
        observed: &'a Observed,
        groups: &'a [NodeGroup<'a>],
        rollout: &'a PlannedRollout,
    ) -> Option<Self> {
        let PlannedRollout { image, target, decision, current_image, upgrade, .. } = rollout;
        if let RolloutObject::Resource(name) = &target.object {
            return Self::of_resource(inputs, groups, rollout, name);
        }
        let daemon_set = named_daemon_set(inputs, target)?;
        let original = match &daemon_set.live {
            Some(live) if target.strategy == Strategy::PerKernel => {
                Some(Original::observe(inputs.snapshot, daemon_set, live))
            }
            _ => None,
        };
        let stop = match decision {
            _ if original.as_ref().is_some_and(Original::is_rolled_back) => {
                Some(HoldReason::CopiesRolledBack.to_string())
            }
            _ if is_paused(inputs, target) => Some(HoldReason::Paused.to_string()),
            RolloutDecision::Hold(why) if leaves_new_kernels(target.strategy, why) => Some(why.to_string()),
            _ => {
                let failure = upgrade.as_ref().and_then(PlannedUpgrade::failure);
                failure.map(|(node, _)| UpgradeWait::Stopped { node: node.to_owned() }.to_string())
            }
        };
        if stop.is_none() && !original.as_ref().is_some_and(Original::has_failed_copies) {
            return None;
        }
        let nodes = match &original {
            Some(original) => reached_nodes(&original.reaching_object(inputs.snapshot), groups),
            None => reached_nodes(&ReachingObject::daemon_set(daemon_set, inputs.snapshot), groups),
        };
        let contents = current_image.as_ref().and_then(|image| observed.contents.get(image));
        let contents_of_pods = contents_of_pods(inputs.snapshot, observed, daemon_set, target);
        Some(Self { image, target, nodes, stop, contents, contents_of_pods, original })
    }

    /// Examines a rollout to an operator's resource. A hold with one of these reasons means that the resource names another
    /// version than that of the images.
    fn of_resource(
        inputs: &PlanInputs<'a>,
        groups: &'a [NodeGroup<'a>],
        PlannedRollout { image, target, decision, .. }: &'a PlannedRollout,
        name: &ResourceName,
    ) -> Option<Self> {
        let RolloutDecision::Hold(why) = decision else { return None };
        let stop = Some(why.clone()).filter(|why| why.is_given_up() || *why == HoldReason::Paused)?;
        let resource = single::<ResourceFacts>(inputs, target, name).ok()?;
        let placement = resource.placement_in(inputs.snapshot);
        let nodes = reached_nodes(&ReachingObject::new(&placement, inputs.snapshot, []), groups);
        Some(Self {
            image,
            target,
            nodes,
            stop: Some(stop.to_string()),
            contents: None,
            contents_of_pods: HashMap::new(),
            original: None,
        })
    }

    /// Returns the reason why a node that boots a kernel would get no driver.
    pub(in crate::plan) fn obstacle(&self, node: &NodeFacts, kernel: &KernelTarget) -> Option<String> {
        if !self.nodes.contains(node.name.as_str()) {
            return None;
        }
        let contents = self.contents_of_pods.get(node.name.as_str()).copied().unwrap_or(self.contents);
        let has_modules = contents.is_some_and(|contents| contents.has(kernel.arch, kernel.release.as_str()));
        let why = match &self.original {
            Some(original) => original.obstacle(node, kernel, self.stop.as_deref())?,
            None => self.stop.clone().filter(|_| !has_modules)?,
        };
        Some(format!("{}: {why}", self.target))
    }
}

/// Whether a rollout on hold sets no image for another kernel.
fn leaves_new_kernels(strategy: Strategy, why: &HoldReason) -> bool {
    match strategy {
        // Without a cluster, farrier does not know what the nodes have.
        _ if *why == HoldReason::OnlyLive => false,
        Strategy::Union => true,
        // The rollout continues for all kernels but one.
        Strategy::PerKernel => !matches!(
            why,
            HoldReason::NoImage { .. }
                | HoldReason::NotPassed { .. }
                | HoldReason::UnknownDenied { .. }
                | HoldReason::OtherKernel { .. }
                | HoldReason::NotSigned { .. }
                | HoldReason::CopyFailed { .. }
                | HoldReason::UnknownNode { .. }
        ),
        // The rollout sets a new image for each kernel, unless the hold does not depend on the image.
        Strategy::Image => matches!(
            why,
            HoldReason::NotOnDelete
                | HoldReason::OrderedTwice { .. }
                | HoldReason::ClaimedTwice { .. }
                | HoldReason::Owned { .. }
                | HoldReason::Fixed { .. }
                | HoldReason::NoContainer { .. }
                | HoldReason::Affinity { .. }
                | HoldReason::BadRecord { .. }
                | HoldReason::OtherInstance { .. }
                | HoldReason::NotWritable { .. }
                | HoldReason::Unseen { .. }
        ),
        _ => false,
    }
}

/// Returns the contents of the images of an `OnDelete` DaemonSet's pods, by node.
fn contents_of_pods<'a>(
    snapshot: &'a ClusterSnapshot,
    observed: &'a Observed,
    daemon_set: &DaemonSetFacts,
    target: &RolloutTarget,
) -> HashMap<&'a str, Option<&'a ImageContents>> {
    let live = daemon_set.live.as_ref().filter(|live| live.update == UpdateStrategy::OnDelete);
    let (Some(live), RolloutObject::DaemonSet(name)) = (live, &target.object) else { return HashMap::new() };
    let pods = snapshot.pods.iter().filter(|pod| pod.daemon_set == live.version.uid && !pod.deleting);
    let contents = |pod: &'a PodFacts| observed.contents.get(pod.images.get(name.container.as_str())?);
    pods.map(|pod| (pod.node.as_str(), contents(pod))).collect()
}
