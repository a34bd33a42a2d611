//! Pure: the upgrade of a rollout's DaemonSet: its nodes, with what is known of them.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    Context, DaemonSetFacts, HoldReason, Record, RecordState, RolloutTarget,
    daemon_set::original,
    elsewhere,
    pause::says_paused,
    reached::reached,
    watch::{Limits, Progress},
};
use crate::{
    image::{Drain, OnFailure, UpgradeSpec, WaitFor},
    plan::{
        Change, ClusterSnapshot, DeviceUser, DriverPod, ImageContents, Instance, LiveDaemonSet,
        PlannedRollout, PlannedUpgrade, PodFacts, Seen, UpdateStrategy, Upgrade, UpgradeNode, UpgradeNote,
        abandoned,
    },
};

/// The plan of its upgrade, where the definition asks for one and its DaemonSet is farrier's to change. What is under way goes on
/// whatever is decided of the image.
pub(super) fn planned(context: &Context<'_>, target: &RolloutTarget) -> Option<PlannedUpgrade> {
    let spec = context.spec.upgrade()?;
    let (found, live, container) = original(context, target).ok()?;
    if elsewhere(context).is_some() || obstacle(context, target).is_some() {
        return None;
    }
    plan_of(context, spec, found, live, container)
}

/// Why the nodes of a DaemonSet cannot be upgraded in order, so that it gets no other image.
pub(super) fn obstacle(context: &Context<'_>, target: &RolloutTarget) -> Option<HoldReason> {
    let spec = context.spec.upgrade()?;
    let (_, live, _) = original(context, target).ok()?;
    if live.update != UpdateStrategy::OnDelete {
        return Some(HoldReason::NotOnDelete);
    }
    let snapshot = context.inputs.snapshot;
    let needs_checks = matches!(spec.wait_for, WaitFor::Job(_));
    let mut needed = [Seen::Pods].into_iter().chain(needs_checks.then_some(Seen::Checks));
    needed.find_map(|what| Some(HoldReason::Unseen { detail: snapshot.unseen.get(&what)?.clone(), what }))
}

fn plan_of(
    context: &Context<'_>,
    spec: &UpgradeSpec,
    found: &DaemonSetFacts,
    live: &LiveDaemonSet,
    container: &str,
) -> Option<PlannedUpgrade> {
    let snapshot = context.inputs.snapshot;
    let contents = &context.inputs.observed.contents;
    let image = found.image_of(container)?;
    let new = contents.get(image);
    let own = snapshot.pods.iter().filter(|pod| pod.daemon_set == live.version.uid);
    let mut pods: BTreeMap<&str, &PodFacts> = BTreeMap::new();
    for pod in own {
        // Beside one that ends there can be the next one already.
        let kept = pods.entry(&pod.node).or_insert(pod);
        if kept.deleting {
            *kept = pod;
        }
    }
    let mut users = users(spec, snapshot);
    let mut nodes = Vec::new();
    for group in context.groups {
        let kernel = group.target.as_ref().ok().map(|kernel| kernel.release.as_str());
        let fits = match new {
            Some(new) => kernel.map(|kernel| new.kernels.contains(kernel)),
            None => is_put_back(live, container, image).then_some(true),
        };
        for node in reached(found, group).ok()? {
            let driver = pods.get(node.name.as_str()).map(|pod| {
                let held = pod.images.get(container).map_or("", String::as_str);
                let alike = kernel.is_some_and(|kernel| has_same(kernel, contents.get(held), new));
                DriverPod { pod, is_current: held == image || alike }
            });
            let job = UpgradeNote::of(node)
                .and_then(|note| snapshot.checks.get(&note.job_name(&node.name)).cloned());
            let users = users.remove(node.name.as_str()).unwrap_or_default();
            nodes.push(UpgradeNode { facts: node, driver, fits, users, job });
        }
    }
    let unseen = snapshot.unseen.get(&Seen::Workloads).filter(|_| spec.drain != Drain::None);
    let Limits { deadline, stable_for } = Limits::of(context.spec.watch()?, live);
    let by = context.inputs.instance.to_string();
    let upgrade = Upgrade {
        by: &by,
        namespace: &found.namespace,
        daemon_set: &found.name,
        spec,
        target: image,
        deadline,
        stable_for,
        paused: says_paused(&live.annotations),
        unseen: unseen.map(String::as_str),
        now: context.inputs.now,
        nodes,
    };
    Some(upgrade.plan())
}

/// Was the image from before farrier's put back? It need not be farrier's, and then its content is not known.
fn is_put_back(live: &LiveDaemonSet, container: &str, image: &str) -> bool {
    let record = Record::of(&live.annotations).unwrap_or_default().0.remove(container);
    record.is_some_and(|record| {
        let was_taken_back = matches!(record.state, RecordState::Failed | RecordState::RolledBack);
        was_taken_back && record.replaced.as_str() == Some(image)
    })
}

/// Have two images the same modules for a kernel? Then a node has nothing of the newer one.
fn has_same(kernel: &str, old: Option<&ImageContents>, new: Option<&ImageContents>) -> bool {
    let member = |contents: Option<&ImageContents>| contents?.members.get(kernel).cloned();
    member(old).is_some_and(|old| member(new) == Some(old))
}

/// The pods that leave their node before its driver does, by node.
fn users<'a>(spec: &UpgradeSpec, snapshot: &'a ClusterSnapshot) -> BTreeMap<&'a str, Vec<DeviceUser>> {
    let mut users: BTreeMap<&str, Vec<DeviceUser>> = BTreeMap::new();
    let all = snapshot.workloads.iter().filter(|pod| {
        let selected = spec.pod_selector.as_ref().is_none_or(|selector| selector.matches(&pod.labels));
        let leaves = match spec.drain {
            Drain::None => false,
            Drain::DeviceUsers => spec.is_user(&pod.requests),
            Drain::Node => true,
        };
        selected && leaves && !pod.stays
    });
    for pod in all {
        users.entry(&pod.node).or_default().push(DeviceUser {
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            uid: pod.uid.clone(),
            leaving: pod.deleting,
        });
    }
    users
}

/// How an image does that nodes get in order: it is good when the upgrade is over, and has failed where the upgrade has and the
/// definition puts images back then.
pub(super) fn progress(
    context: &Context<'_>,
    found: &DaemonSetFacts,
    live: &LiveDaemonSet,
    container: &str,
) -> Option<Progress> {
    let spec = context.spec.upgrade()?;
    let Some(plan) = plan_of(context, spec, found, live, container) else { return Some(Progress::Waiting) };
    Some(match plan.failure() {
        Some((node, why)) if spec.on_failure == OnFailure::PutBack => {
            Progress::Failed { node: node.to_owned(), messages: vec![why.to_owned()] }
        }
        None if plan.forecast.is_over() => Progress::Good,
        _ => Progress::Waiting,
    })
}

/// This farrier's nodes under way that no planned upgrade is about (any more), given back. Where the cluster cannot be seen, they stay.
pub fn given_back(
    snapshot: &ClusterSnapshot,
    rollouts: &[PlannedRollout],
    instance: &Instance,
) -> Vec<Change> {
    let is_unseen = [Seen::DaemonSets, Seen::Pods].iter().any(|what| snapshot.unseen.contains_key(what));
    if is_unseen || snapshot.read_only_nodes {
        return Vec::new();
    }
    let upgrades = rollouts.iter().filter_map(|rollout| rollout.upgrade.as_ref());
    let served: BTreeSet<(&str, &str)> = upgrades
        .flat_map(|upgrade| upgrade.nodes.iter().map(|turn| (upgrade.rollout.as_str(), turn.node.as_str())))
        .collect();
    let nodes = snapshot.nodes.iter().map(|node| &**node);
    let by = instance.to_string();
    abandoned(nodes, |node, note| {
        note.by != by || served.contains(&(note.rollout.as_str(), node.name.as_str()))
    })
}

#[cfg(test)]
mod tests;
