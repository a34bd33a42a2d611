//! Objects in manifests, which the strategies `file` and `git` change. If the cluster has the DaemonSet, the image is chosen
//! for the nodes that the live DaemonSet reaches.

use std::collections::BTreeSet;

use super::{
    Context, DaemonSetFacts, Decided, HoldReason, RolloutTarget,
    daemon_set::target_container,
    image,
    reached::{check_supported, reached_nodes},
    resource,
};
use crate::{
    plan::{Placement, ReachingObject},
    text::some_of,
};

pub(super) fn decide(context: &Context<'_>, target: &RolloutTarget) -> Result<Decided, HoldReason> {
    if let Some(name) = context.spec.resource() {
        return resource::decide(context, target, name);
    }
    let container = target_container(context.inputs, target)?;
    let manifest = container.daemon_set;
    let is_same =
        |other: &&DaemonSetFacts| (&other.namespace, &other.name) == (&manifest.namespace, &manifest.name);
    let mut live = context.inputs.snapshot.daemon_sets.iter().filter(|other| other.live.is_some());
    let live = live.find(is_same);
    // farrier cannot evaluate the manifest's node affinity, so use the nodes of the live DaemonSet.
    if let Some(live) = live.filter(|_| check_supported(&manifest.placement).is_err()) {
        return image::decide_for(context, container, live);
    }
    match live.and_then(|live| reach_difference(context, &live.placement, &manifest.placement)) {
        Some(why) => Err(why),
        None => image::decide_for(context, container, manifest),
    }
}

/// Returns the hold where the live object reaches other nodes than the manifest, for example because an overlay
/// changes the manifest. The image would be chosen for the wrong kernels.
pub(super) fn reach_difference(
    context: &Context<'_>,
    live: &Placement,
    manifest: &Placement,
) -> Option<HoldReason> {
    let [in_cluster, in_manifest] = [live, manifest].map(|placement| {
        let object = ReachingObject::new(placement, context.inputs.snapshot, []);
        reached_nodes(&object, context.groups)
    });
    let difference = |one: &BTreeSet<&str>, other: &BTreeSet<&str>| {
        let names: Vec<&str> = one.difference(other).copied().collect();
        if names.is_empty() { "no other nodes".to_owned() } else { some_of(&names, 3) }
    };
    (in_cluster != in_manifest).then(|| HoldReason::ReachDiffers {
        cluster: difference(&in_cluster, &in_manifest),
        manifest: difference(&in_manifest, &in_cluster),
    })
}
