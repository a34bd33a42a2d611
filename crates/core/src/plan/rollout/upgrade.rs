//! The upgrade of a rollout's DaemonSet: collects its nodes and the facts about them.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    Context, DaemonSetFacts, HoldReason, RecordState, RewriteRecord, RolloutTarget,
    daemon_set::{LiveTarget, live_target},
    watch::{Limits, Progress, is_same_image},
};
use crate::{
    image::{Drain, ImageName, OnFailure, RolloutSpec, UpgradeSpec},
    kernel::KernelTarget,
    plan::{
        Change, ClusterSnapshot, DriverPod, Exclusion, Holder, ImageContents, Instance, JOB_NAME, JobKind,
        LiveDaemonSet, NodeFacts, NodeReach, ObservedKind, PlannedRollout, PlannedUpgrade, PodFacts,
        ReachingObject, UpdateStrategy, Upgrade, UpgradeNode, UpgradeNote, UpgradeStage, UpgradeState,
        WorkloadFacts, labels::has_pause_annotation, reach::Reach, release_uncovered,
    },
};

/// Image that the DaemonSet will get, and does not have yet.
pub(super) struct NextImage {
    pub(super) image: String,
    pub(super) contents: ImageContents,
}

/// Plans the upgrade of a DaemonSet.
pub(super) fn planned(
    context: &Context<'_>,
    target: &RolloutTarget,
    next: Option<&NextImage>,
) -> Option<PlannedUpgrade> {
    plan_of(context, live_target(context, target).ok()?, next)
}

/// Returns the reason why the nodes of a DaemonSet cannot be upgraded in order. The DaemonSet then gets no other image.
pub(super) fn obstacle(context: &Context<'_>, target: &RolloutTarget) -> Option<HoldReason> {
    let spec = context.spec.upgrade()?;
    let LiveTarget { daemon_set, live, .. } = match live_target(context, target) {
        Ok(target) => target,
        Err(HoldReason::OnlyLive) => return Some(HoldReason::OnlyLive),
        // The strategy returns the reason.
        Err(_) => return None,
    };
    if live.update != UpdateStrategy::OnDelete {
        return Some(HoldReason::NotOnDelete);
    }
    let images = images_with_upgrade(context, daemon_set);
    if images.len() > 1 {
        return Some(HoldReason::OrderedTwice { images });
    }
    let snapshot = context.inputs.snapshot;
    let mut kinds =
        [ObservedKind::Pods].into_iter().chain(spec.creates_jobs().then_some(ObservedKind::Checks));
    kinds.find_map(|kind| {
        let detail = snapshot.why_unseen(kind, &daemon_set.namespace)?.clone();
        Some(HoldReason::Unseen { what: kind, detail })
    })
}

/// Returns the images whose rollouts upgrade a DaemonSet. If there were several, each would mistake the notes of
/// the others for its own.
fn images_with_upgrade(context: &Context<'_>, daemon_set: &DaemonSetFacts) -> Vec<ImageName> {
    let has_upgrade = |spec: &&RolloutSpec| {
        spec.upgrade().is_some() && spec.daemon_set().is_some_and(|target| daemon_set.is_named(target))
    };
    let mut upgrades: Vec<(&ImageName, &RolloutSpec)> = Vec::new();
    for (name, image) in &context.inputs.definitions().images {
        for spec in image.spec.rollout.iter().filter(has_upgrade) {
            // Several containers with one image are upgraded together.
            let is_same = |(other, known): &(&ImageName, &RolloutSpec)| {
                *other == name && (known.strategy(), known.upgrade()) == (spec.strategy(), spec.upgrade())
            };
            if !upgrades.iter().any(is_same) {
                upgrades.push((name, spec));
            }
        }
    }
    upgrades.into_iter().map(|(name, _)| name.clone()).collect()
}

/// Plans the upgrade of a DaemonSet whose nodes all get its current or next image. Nodes in progress continue with the
/// current image.
fn plan_of(
    context: &Context<'_>,
    LiveTarget { daemon_set, live, container }: LiveTarget<'_>,
    next: Option<&NextImage>,
) -> Option<PlannedUpgrade> {
    let contents = &context.observed.contents;
    let current = daemon_set.image_of(container)?;
    let pods = pods_by_node(context.inputs.snapshot);
    let rollout = format!("{}/{}", daemon_set.namespace, daemon_set.name);
    let is_unfinished =
        |note: &UpgradeNote| note.rollout == rollout && note.state != UpgradeState::Uncordoned;
    let mut nodes = Vec::new();
    let object = ReachingObject::daemon_set(daemon_set, context.inputs.snapshot);
    for group in context.groups {
        let Reach { reached, undetermined } = object.reach_of_equal_nodes(&group.nodes);
        let reached = reached.into_iter().map(|node| (node, group.target.as_ref().ok()));
        let noted = undetermined.into_iter().filter(|node| UpgradeNote::of(node).is_some());
        // A node in progress, or with a failure, stays in the upgrade when it gets a taint and loses its pod.
        let is_tainted = |node: &&NodeFacts| {
            !node.taints.is_empty()
                && matches!(object.reach(node), NodeReach::Excluded(Exclusion::Taint(_)))
                && UpgradeNote::all(node).iter().any(is_unfinished)
        };
        let tainted = group.nodes.iter().copied().filter(is_tainted);
        let tainted = tainted.map(|node| (node, group.target.as_ref().ok()));
        for (node, kernel) in reached.chain(noted.map(|node| (node, None))).chain(tainted) {
            let next = next.filter(|_| UpgradeNote::in_progress(node).is_none());
            let (target, target_contents) = match next {
                Some(next) => (next.image.as_str(), Some(&next.contents)),
                None => (current, contents.get(current)),
            };
            let fits = match target_contents {
                Some(contents) => kernel.map(|kernel| contents.has(kernel.arch, kernel.release.as_str())),
                None => is_restored(live, container, target).then_some(true),
            };
            let driver = pods.get(&(live.version.uid.as_str(), node.name.as_str())).copied().map(|pod| {
                let is_current = |image: &str| {
                    let has_same_modules =
                        |kernel| have_same_modules(kernel, contents.get(image), target_contents);
                    is_same_image(image, target) || kernel.is_some_and(has_same_modules)
                };
                let lacks = |image: &str| lacks_modules(kernel, contents.get(image));
                DriverPod::of(pod, context.upgraded_containers(), is_current, lacks)
            });
            let is_target_pending = next.is_some();
            let taint = daemon_set.placement.excluding_taint(node);
            nodes.push(UpgradeNode {
                target,
                is_target_pending,
                taint,
                fits,
                ..UpgradeNode::of(node, driver)
            });
        }
    }
    plan_upgrade(context, daemon_set, live, live.desired, nodes)
}

/// Returns the pods of DaemonSets, by the DaemonSet's UID and the node. A terminating pod can share its node with its
/// successor; the successor takes precedence.
pub(super) fn pods_by_node(snapshot: &ClusterSnapshot) -> BTreeMap<(&str, &str), &PodFacts> {
    let mut pods: BTreeMap<(&str, &str), &PodFacts> = BTreeMap::new();
    for pod in &snapshot.pods {
        let chosen = pods.entry((&pod.daemon_set, &pod.node)).or_insert(pod);
        if chosen.deleting {
            *chosen = pod;
        }
    }
    pods
}

/// Plans the upgrade of these nodes, after adding the workloads on each. `desired` is the number of nodes that should
/// have a driver pod.
pub(super) fn plan_upgrade(
    context: &Context<'_>,
    daemon_set: &DaemonSetFacts,
    live: &LiveDaemonSet,
    desired: usize,
    nodes: Vec<UpgradeNode<'_>>,
) -> Option<PlannedUpgrade> {
    let spec = context.spec.upgrade()?;
    let snapshot = context.inputs.snapshot;
    let mut workloads = Workloads::of(snapshot, &daemon_set.namespace);
    let mut nodes = nodes;
    for node in &mut nodes {
        let note = UpgradeNote::of(node.facts);
        let job = |kind| snapshot.checks.get(&note.as_ref()?.job_name(kind, &node.facts.name)).cloned();
        (node.unload_forecast, node.check) = (job(JobKind::Forecast), job(JobKind::Check));
        (node.users, node.holders) = workloads.on(node.facts, note.as_ref(), spec);
    }
    let cannot_list_pods =
        snapshot.unseen.get(&ObservedKind::Workloads).filter(|_| spec.drain != Drain::None);
    let Limits { deadline, stable_for } = Limits::of(context.spec.watch()?, live);
    let by = context.inputs.instance.to_string();
    // The DaemonSet's status does not count nodes with such a taint, even if they have a pod.
    let is_desired = |node: &&UpgradeNode<'_>| node.driver.is_some() && node.taint.is_none();
    let upgrade = Upgrade {
        by: &by,
        namespace: &daemon_set.namespace,
        daemon_set: &daemon_set.name,
        spec,
        deadline,
        stable_for,
        missing: desired.saturating_sub(nodes.iter().filter(is_desired).count()),
        paused: has_pause_annotation(&live.annotations),
        is_registry_down: context.observed.is_registry_down,
        cannot_list_pods: cannot_list_pods.map(String::as_str),
        now: context.inputs.now,
        nodes,
    };
    Some(upgrade.plan())
}

/// Whether `image` was restored after a failure or a rollback. Such an image need not be farrier's, and its contents
/// are then unknown.
fn is_restored(live: &LiveDaemonSet, container: &str, image: &str) -> bool {
    let record = RewriteRecord::of(&live.annotations).unwrap_or_default().0.remove(container);
    record.is_some_and(|record| {
        let was_reverted = matches!(record.state, RecordState::Failed | RecordState::RolledBack);
        was_reverted && record.replaced.as_str().is_some_and(|replaced| is_same_image(replaced, image))
    })
}

/// Whether two images have the same modules for a kernel, so that a node need not get the newer image.
pub(super) fn have_same_modules(
    kernel: &KernelTarget,
    old: Option<&ImageContents>,
    new: Option<&ImageContents>,
) -> bool {
    let member = |contents: Option<&ImageContents>| {
        contents?.for_architecture(kernel.arch)?.members.get(kernel.release.as_str()).cloned()
    };
    member(old).is_some_and(|old| member(new) == Some(old))
}

/// Whether an image is known to have no modules for a kernel.
pub(super) fn lacks_modules(kernel: Option<&KernelTarget>, contents: Option<&ImageContents>) -> bool {
    let known = kernel.zip(contents);
    known.is_some_and(|(kernel, contents)| !contents.has(kernel.arch, kernel.release.as_str()))
}

/// Pods of drained nodes, by node.
struct Workloads<'a> {
    by_node: BTreeMap<&'a str, Vec<&'a WorkloadFacts>>,
    /// Namespace of the driver, and of the check and forecast Jobs.
    namespace: &'a str,
}

impl<'a> Workloads<'a> {
    fn of(snapshot: &'a ClusterSnapshot, namespace: &'a str) -> Self {
        let mut by_node: BTreeMap<&str, Vec<&WorkloadFacts>> = BTreeMap::new();
        for pod in &snapshot.workloads {
            by_node.entry(&pod.node).or_default().push(pod);
        }
        Self { by_node, namespace }
    }

    /// Returns the pods that must leave the node before the driver is unloaded, and the holders in the node's latest forecast.
    fn on(
        &mut self,
        node: &NodeFacts,
        noted: Option<&UpgradeNote>,
        spec: &UpgradeSpec,
    ) -> (Vec<&'a WorkloadFacts>, &'a [Holder]) {
        let mut pods = self.by_node.remove(node.name.as_str()).unwrap_or_default();
        let is_pod_of = |pod: &WorkloadFacts, job: &str| {
            pod.namespace == self.namespace && pod.labels.get(JOB_NAME).is_some_and(|name| name == job)
        };
        let job = |kind| noted.map(|note| note.job_name(kind, &node.name)).unwrap_or_default();
        let (forecast, check) = (job(JobKind::Forecast), job(JobKind::Check));
        // Only the forecast's own pod may influence which pods are evicted.
        let forecast_pod = pods.iter().copied().find(|pod| is_pod_of(pod, &forecast));
        let holders = forecast_pod.map(|pod| pod.holders.as_slice()).unwrap_or_default();
        pods.retain(|pod| {
            let selected = spec.pod_selector.as_ref().is_none_or(|selector| selector.matches(&pod.labels));
            let is_holder = || holders.iter().any(|holder| holder.pod.as_ref() == Some(&pod.uid));
            let leaves = match spec.drain {
                Drain::None => false,
                Drain::DeviceUsers => spec.uses_device(&pod.requests) || is_holder(),
                Drain::Node => !is_pod_of(pod, &forecast) && !is_pod_of(pod, &check),
            };
            selected && leaves && !pod.stays
        });
        (pods, holders)
    }
}

/// Returns the progress of an image that an upgrade rolls out. The image is good when the upgrade is over. The image has
/// failed when the upgrade has failed and the definition has `onFailure: restore`.
pub(super) fn progress(context: &Context<'_>, target: LiveTarget<'_>) -> Option<Progress> {
    let spec = context.spec.upgrade()?;
    let Some(plan) = plan_of(context, target, None) else {
        return Some(Progress::Waiting);
    };
    Some(match plan.fault() {
        Some((node, why)) if spec.on_failure == OnFailure::Restore => {
            Progress::Failed { node: node.to_owned(), messages: vec![why.to_owned()] }
        }
        None if plan.forecast.is_over() => Progress::Good,
        _ => Progress::Waiting,
    })
}

/// Returns the changes that uncordon nodes whose upgrade this farrier started and no planned upgrade covers any more. Skips
/// nodes while the DaemonSets, pods or Jobs of their rollout cannot be observed.
pub fn uncordoned(
    snapshot: &ClusterSnapshot,
    rollouts: &[PlannedRollout],
    instance: &Instance,
) -> Vec<Change> {
    if snapshot.unseen.contains_key(&ObservedKind::DaemonSets) || snapshot.read_only_nodes {
        return Vec::new();
    }
    let is_unseen = |rollout: &str| {
        let namespace = rollout.split('/').next().unwrap_or_default();
        [ObservedKind::Pods, ObservedKind::Checks]
            .iter()
            .any(|kind| snapshot.why_unseen(*kind, namespace).is_some())
    };
    let upgrades = rollouts.iter().filter_map(|rollout| rollout.upgrade.as_ref());
    let mut covered: BTreeSet<(&str, &str)> = BTreeSet::new();
    for upgrade in upgrades {
        // A failure noted on a node that is done concerns an image that the node no longer has.
        let unfinished = upgrade.nodes.iter().filter(|planned| planned.stage != UpgradeStage::Done);
        covered.extend(unfinished.map(|planned| (upgrade.rollout.as_str(), planned.node.as_str())));
    }
    let nodes = snapshot.nodes.iter().map(|node| &**node);
    let by = instance.to_string();
    release_uncovered(nodes, |node, note| {
        note.by != by
            || covered.contains(&(note.rollout.as_str(), node.name.as_str()))
            || is_unseen(&note.rollout)
    })
}

#[cfg(test)]
mod tests;
