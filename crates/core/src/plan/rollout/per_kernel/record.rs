//! The records of a `per-kernel` rollout: one in the original DaemonSet, and one in each copy of it.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::{
    super::{
        copy::{CopyRecord, FailedImage, LiveCopy},
        watch::{Limits, Progress, is_same_image, progress},
    },
    Context, Fleet,
    fleet::ReadyImage,
};
use crate::{
    image::{OnFailure, Watch},
    plan::{LiveDaemonSet, PER_KERNEL_ANNOTATION, PlannedUpgrade, PodFacts, UpgradeStage},
};

/// Record in the original DaemonSet. The record does not contain the DaemonSet's own node affinity, because removing the
/// fence (see [`super`]) restores that affinity exactly.
#[serde_with::skip_serializing_none]
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(in super::super) struct OriginalRecord {
    /// Time at which the fence was added. The fence keeps the original off handed-over nodes.
    pub(super) fenced_at: Option<Timestamp>,
    /// Number of times that another writer removed the fence.
    pub(super) undone: u32,
    /// Time at which a person rolled back the rollout.
    pub(super) rolled_back: Option<Timestamp>,
}

impl OriginalRecord {
    /// Reads the record of an original; a record that cannot be parsed counts as none.
    pub(in super::super) fn read(live: &LiveDaemonSet) -> Self {
        live.annotations
            .get(PER_KERNEL_ANNOTATION)
            .and_then(|text| serde_json::from_str(text).ok())
            .unwrap_or_default()
    }

    /// Whether a person rolled back the rollout.
    pub(in super::super) fn is_rolled_back(&self) -> bool {
        self.rolled_back.is_some()
    }

    pub(super) fn to_text(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// Returns the new record of a copy: the state of its image, and the next image. `None` if there is neither a copy nor an
/// image to create a copy with.
pub(super) fn next_record(
    context: &Context<'_>,
    fleet: &Fleet<'_>,
    copy: Option<&LiveCopy<'_>>,
    image: Option<&ReadyImage>,
    watched: Watch,
    upgrade: Option<&PlannedUpgrade>,
) -> Option<CopyRecord> {
    let (now, by) = (context.inputs.now, context.inputs.instance);
    let desired = image.map(|image| image.text.clone());
    let Some(copy) = copy else {
        return desired.map(|image| CopyRecord::new(image, None, now, by));
    };
    let mut record = match &copy.record {
        Some(record) => record.clone(),
        None => CopyRecord::new(copy.image(&fleet.containers)?, None, now, by),
    };
    if !record.good {
        record_outcome(context, fleet, copy, &mut record, watched, upgrade);
    }
    let has_failed = |image: &String| record.failed.as_ref().is_some_and(|failed| failed.image == *image);
    match desired {
        Some(image) if image != record.image && !has_failed(&image) => {
            let previous = if record.good { Some(record.image) } else { record.previous };
            Some(CopyRecord::new(image, previous, now, by))
        }
        _ => Some(record),
    }
}

/// Updates the record of an image that is not known to be good yet. The image is good as soon as one of its pods has stayed
/// ready, whatever the state of the other pods. If the rollout upgrades nodes in order, all nodes of the upgrade must also
/// have the image. If the image has failed, the copy gets the previous image.
fn record_outcome(
    context: &Context<'_>,
    fleet: &Fleet<'_>,
    copy: &LiveCopy<'_>,
    record: &mut CopyRecord,
    watched: Watch,
    upgrade: Option<&PlannedUpgrade>,
) {
    let (limits, now) = (Limits::of(watched, copy.live), context.inputs.now);
    let pods = fleet.pods_of(&copy.live.version.uid);
    let pods: Vec<&PodFacts> = pods.filter(|pod| fleet.runs(pod, &record.image)).collect();
    let is_stable = pods.iter().any(|pod| pod.is_stable(limits.stable_for, now) && !pod.deleting);
    if is_stable && is_upgraded(context, upgrade, &record.image) {
        record.good = true;
        record.failed = record.failed.take().filter(|failed| failed.image != record.image);
        return;
    }
    if record.is_failed() {
        return;
    }
    let Some(why) = failure(context, &pods, record, watched, limits, upgrade) else { return };
    record.failed = Some(FailedImage { image: record.image.clone(), why });
    record.at = now;
    if let Some(previous) = record.previous.take() {
        record.image = previous;
        record.good = true;
    }
}

/// Whether the upgrade has given the image to all its nodes, and the image failed on none of them. Also true for a rollout that
/// does not upgrade nodes in order.
fn is_upgraded(context: &Context<'_>, upgrade: Option<&PlannedUpgrade>, image: &str) -> bool {
    let Some(plan) = upgrade else { return context.spec.upgrade().is_none() };
    plan.nodes.iter().all(|node| {
        let is_done = matches!(node.stage, UpgradeStage::Done | UpgradeStage::Skipped);
        // A failed image is no longer the target of any node, but the note of the node on which the image failed still names it.
        let has_failed = node.note.as_ref().is_some_and(|note| note.is_failure_of(image));
        (is_done || !is_same_image(&node.to, image)) && !has_failed
    })
}

/// Returns the reason why the record's image does not work, if it has failed. `pods` are the pods with the image. Restarts
/// their time while the registry does not answer.
fn failure(
    context: &Context<'_>,
    pods: &[&PodFacts],
    record: &mut CopyRecord,
    watched: Watch,
    limits: Limits,
    upgrade: Option<&PlannedUpgrade>,
) -> Option<String> {
    if context.spec.upgrade().is_some_and(|spec| spec.on_failure == OnFailure::Stop) {
        return None;
    }
    let nodes_to_image = || {
        upgrade.into_iter().flat_map(|plan| &plan.nodes).filter(|node| is_same_image(&node.to, &record.image))
    };
    if let Some(node) = nodes_to_image().find(|node| node.is_faulty()) {
        let why = node.note.as_ref().and_then(|note| note.why.as_deref()).unwrap_or_default();
        return Some(format!("on node {} {why}", node.node));
    }
    // The upgrade checks the pods of the nodes that it upgrades. Other nodes get the image when they boot the kernel.
    let is_being_upgraded =
        |name: &str| nodes_to_image().any(|node| node.node == name && node.stage == UpgradeStage::UnderWay);
    let pods = pods.iter().copied().filter(|pod| !is_being_upgraded(&pod.node));
    let (is_registry_down, now) = (context.observed.is_registry_down, context.inputs.now);
    let (node, messages) = match progress(pods, record.at, limits, is_registry_down, now) {
        Progress::Failed { node, messages } => (node, messages),
        Progress::Stalled => {
            record.at = now;
            return None;
        }
        Progress::Waiting | Progress::Good => return None,
    };
    let detail = if messages.is_empty() { String::new() } else { format!(": {}", messages.join("; ")) };
    Some(format!("the pod on node {node} was not ready within {}{detail}", watched.deadline))
}
