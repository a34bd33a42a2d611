//! Selects the pods to restart in a DaemonSet with the update strategy `OnDelete`.
//!
//! A pod that survives a reboot starts again with its old image. A pod is evicted only if its image is known to lack
//! modules for its node's kernel and the DaemonSet's image has them. All other pods are left running.

use std::collections::BTreeSet;

use super::{
    Change, Context, PodRestart,
    daemon_set::LiveTarget,
    handover::{is_in_maintenance, unavailable_limit},
    watch::is_same_image,
};
use crate::plan::{PodFacts, ReachingObject, UpdateStrategy, reach::Reach, reasons::and_more};

/// Returns the pods to evict now.
pub(super) fn restarts(
    context: &Context<'_>,
    LiveTarget { daemon_set, live, container }: LiveTarget<'_>,
) -> Vec<Change> {
    // An upgrade restarts pods itself.
    if live.update != UpdateStrategy::OnDelete || live.deleting || context.spec.upgrade().is_some() {
        return Vec::new();
    }
    let contents = &context.observed.contents;
    let Some(new) = daemon_set.image_of(container).and_then(|image| contents.get(image)) else {
        return Vec::new();
    };
    let pods = || context.inputs.snapshot.pods.iter().filter(|pod| pod.daemon_set == live.version.uid);

    let mut nodes = 0;
    let mut outdated: Vec<(&PodFacts, &str)> = Vec::new();
    let unavailable = pods().filter(|pod| pod.deleting || !pod.ready).count();
    let object = ReachingObject::daemon_set(daemon_set, context.inputs.snapshot);
    for group in context.groups {
        let Reach { reached, .. } = object.reach_of_equal_nodes(&group.nodes);
        nodes += reached.len();
        let Ok(kernel) = &group.target else { continue };
        let (arch, kernel) = (kernel.arch, kernel.release.as_str());
        if !new.has(arch, kernel) {
            continue;
        }
        let in_service = reached.iter().filter(|node| !is_in_maintenance(node));
        let nodes_in_service: BTreeSet<&str> = in_service.map(|node| node.name.as_str()).collect();
        let lacks = |pod: &&PodFacts| {
            let current = pod.images.get(container).and_then(|image| contents.get(image));
            !pod.deleting
                && nodes_in_service.contains(pod.node.as_str())
                && current.is_some_and(|current| !current.has(arch, kernel))
        };
        outdated.extend(pods().filter(lacks).map(|pod| (pod, kernel)));
    }
    // Evict pods that are not ready first, regardless of other unavailable pods, as the DaemonSet controller does.
    outdated.sort_by_key(|(pod, _)| (pod.ready, &pod.name));
    let not_ready = outdated.iter().filter(|(pod, _)| !pod.ready).count();
    let allowed = unavailable_limit(live.max_unavailable, nodes).saturating_sub(unavailable);
    outdated.iter().take(not_ready + allowed).map(|(pod, kernel)| restart(pod, kernel)).collect()
}

/// Describes the pods that still run another image, if `OnDelete` leaves the restart to the user and farrier does not know
/// the image's contents.
pub(super) fn unknown_images(
    context: &Context<'_>,
    LiveTarget { daemon_set, live, container }: LiveTarget<'_>,
) -> Option<String> {
    let image = daemon_set.image_of(container)?;
    let runs_other = |pod: &&PodFacts| {
        let other = pod.images.get(container).filter(|other| !is_same_image(other, image));
        !pod.deleting && other.is_some_and(|other| !context.observed.contents.contains_key(other))
    };
    let pods = context.inputs.snapshot.pods.iter().filter(|pod| pod.daemon_set == live.version.uid);
    let pods: Vec<&PodFacts> = pods.filter(runs_other).collect();
    let first =
        pods.iter().min_by_key(|pod| &pod.node).filter(|_| live.update == UpdateStrategy::OnDelete)?;
    let (name, node, more) = (&first.name, &first.node, and_more(pods.len()));
    Some(format!(
        "pod {name} of node {node}{more} still runs another image, and updateStrategy OnDelete does not restart the pod: delete the pod, or add `upgrade` to the rollout"
    ))
}

fn restart(pod: &PodFacts, kernel: &str) -> Change {
    Change::Restart(PodRestart {
        namespace: pod.namespace.clone(),
        name: pod.name.clone(),
        uid: pod.version.uid.clone(),
        why: format!("its image has no modules for kernel {kernel} of node {}", pod.node),
        ..PodRestart::default()
    })
}
