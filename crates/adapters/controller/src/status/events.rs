//! Derives Events from the differences between two consecutive reconciles.

use std::collections::{BTreeMap, BTreeSet};

use farrier_core::{
    image::OperatorResource,
    plan::{
        Change, HoldReason, NodeReason, Phase, PlannedRollout, RolloutDecision, RolloutObject, UpgradeNote,
        UpgradeState, status_entries,
    },
};
use jiff::{SignedDuration, Timestamp};

use super::{desired::printable, name_of};
use crate::{RolloutReport, live::ReconcileView};

/// Minimum interval between two Events with the same reason and object, so that a node that flaps between two kernels gets one
/// Event and not a hundred.
const REPEAT_INTERVAL: SignedDuration = SignedDuration::from_mins(5);

/// Maximum number of Events per reconcile, which limits the load on the API server when many nodes reboot at once.
const MAX_EVENTS: usize = 50;

/// Maximum length of a note in bytes. The API allows 1024.
const MAX_NOTE_BYTES: usize = 1000;

/// Reason of an Event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, strum::Display)]
pub enum EventReason {
    /// A rollout target was rewritten.
    Rewritten,
    /// A rollout target could not be rewritten.
    RewriteFailed,
    /// Another writer reverted a rewrite of a rollout target.
    RolloutConflict,
    /// The pods did not become ready, so farrier restored the previous image.
    RolloutRestored,
    /// A rollout target is held, and a person has to resolve the reason.
    RolloutHeld,
    /// A build began.
    BuildStarted,
    /// A build ended without an image.
    BuildFailed,
    /// A required image cannot be built, because its headers, compiler or source is missing.
    NotBuildable,
    /// An image was published.
    Published,
    /// A published image disappeared from the registry, or its inputs changed.
    PublicationLost,
    /// A node may boot its next kernel, because all images for that kernel are published.
    ReadyForKernel,
    /// A node may no longer boot the kernel that it was ready for.
    NotReadyForKernel,
    /// A node's labels and its nodeInfo contradict each other about the kernel or the architecture.
    NodeLabelsContradict,
    /// A node announces a kernel that farrier does not use.
    AnnouncementNotUsed,
    /// The upgrade of a node's driver is complete.
    Upgraded,
    /// A node could not be drained for its new driver, or the new driver does not work.
    UpgradeFailed,
    /// A node's kernel or announcement exceeds a limit of `kernelLimits`, so farrier ignores it.
    NodeClaimRejected,
}

impl EventReason {
    /// Returns the action that farrier took or tried to take, and whether the Event is a warning.
    pub fn action(self) -> (&'static str, bool) {
        match self {
            Self::Rewritten => ("RollOut", false),
            Self::RewriteFailed | Self::RolloutConflict | Self::RolloutRestored | Self::RolloutHeld => {
                ("RollOut", true)
            }
            Self::Upgraded => ("UpgradeNode", false),
            Self::UpgradeFailed => ("UpgradeNode", true),
            Self::BuildStarted => ("Build", false),
            Self::BuildFailed | Self::NotBuildable => ("Build", true),
            Self::Published => ("Publish", false),
            Self::PublicationLost => ("Publish", true),
            Self::ReadyForKernel => ("MarkNode", false),
            Self::NotReadyForKernel => ("MarkNode", true),
            Self::NodeLabelsContradict => ("Observe", false),
            Self::AnnouncementNotUsed | Self::NodeClaimRejected => ("Observe", true),
        }
    }
}

/// The object that an Event is about.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, derive_more::Display)]
pub enum Regarding {
    /// A DriverBuild in farrier's namespace.
    #[display("DriverBuild {_0}")]
    DriverBuild(String),
    #[display("node {_0}")]
    Node(String),
    #[display("DaemonSet {namespace}/{name}")]
    DaemonSet { namespace: String, name: String },
    /// An operator's resource.
    #[display("{resource} {name}")]
    Resource { resource: OperatorResource, name: String },
}

/// An Event to write.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct StatusEvent {
    /// The reason. The order of its variants decides which Events are dropped above `MAX_EVENTS`.
    pub reason: EventReason,
    /// The object.
    pub regarding: Regarding,
    /// Human-readable text.
    pub note: String,
}

/// State after the last reconcile, and the recently written Events. New Events are derived from the differences to this history.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EventHistory {
    /// Phase, digest and attempts of each DriverBuild.
    builds: BTreeMap<String, (Phase, Option<String>, u32)>,
    /// States of nodes that Events report, by reason and node. The value depends on the reason: the kernel that the node is ready
    /// for, a contradiction, an unused announcement, or the end of an upgrade.
    nodes: BTreeMap<(EventReason, String), String>,
    /// Held rollout targets, with the Event's reason and note.
    held: BTreeMap<Regarding, (EventReason, String)>,
    /// Time of the last Event for each object and reason.
    last: BTreeMap<(Regarding, EventReason), Timestamp>,
}

/// Returns the new Events of a view, the number of Events above the limit, and the new history. Without an earlier history there
/// is nothing to compare with, so that only the rewrites of the view become Events.
pub fn events(
    before: Option<&EventHistory>,
    view: &ReconcileView,
) -> (Vec<StatusEvent>, usize, EventHistory) {
    let mut history = EventHistory {
        last: before.map(|history| history.last.clone()).unwrap_or_default(),
        ..EventHistory::default()
    };
    history.last.retain(|_, at| (view.now.duration_since(*at)).abs() < REPEAT_INTERVAL);
    let mut events = BTreeSet::new();
    rewrite_events(view, &mut events);
    record_states(view, &mut history);
    if let Some(before) = before {
        build_events(before, &history, view, &mut events);
        node_events(before, &history, &mut events);
        let held = history.held.iter().filter(|(regarding, held)| before.held.get(*regarding) != Some(*held));
        events.extend(held.map(|(regarding, (reason, note))| event(*reason, regarding.clone(), note)));
    }
    let last = &history.last;
    let is_repeated = |event: &StatusEvent| last.contains_key(&(event.regarding.clone(), event.reason));
    let mut events: Vec<StatusEvent> = events.into_iter().filter(|event| !is_repeated(event)).collect();
    let dropped = events.len().saturating_sub(MAX_EVENTS);
    events.truncate(MAX_EVENTS);
    for event in &events {
        history.last.insert((event.regarding.clone(), event.reason), view.now);
    }
    (events, dropped, history)
}

fn event(reason: EventReason, regarding: Regarding, note: &str) -> StatusEvent {
    // The limit of `printable` is in characters, and a non-ASCII character may take four bytes.
    let limit = if note.is_ascii() { MAX_NOTE_BYTES } else { MAX_NOTE_BYTES / 4 };
    StatusEvent { reason, regarding, note: printable(note, limit) }
}

/// Collects Events for the rewrites of rollout targets.
fn rewrite_events(view: &ReconcileView, events: &mut BTreeSet<StatusEvent>) {
    // A rewrite without changes is written with the changes of another rollout.
    let is_rewrite = |report: &&RolloutReport| {
        !report.planned.changes.is_empty()
            || matches!(report.planned.decision, RolloutDecision::Rewrite { .. })
    };
    for report in view.rollouts.iter().filter(is_rewrite) {
        let Some(regarding) = regarding_target(&report.planned) else { continue };
        let image = &report.planned.image;
        let (reason, detail) = match (&report.error, &report.planned.decision) {
            (Some(error), _) => (EventReason::RewriteFailed, error.clone()),
            (None, RolloutDecision::Rewrite { from, to }) => {
                (EventReason::Rewritten, format!("{from} -> {to}"))
            }
            (None, RolloutDecision::Steps { now }) => (EventReason::Rewritten, now.join("; ")),
            (None, _) => {
                let objects: BTreeSet<String> = report.planned.changes.iter().map(Change::object).collect();
                let objects: Vec<String> = objects.into_iter().collect();
                (EventReason::Rewritten, format!("changed {}", objects.join(", ")))
            }
        };
        events.insert(event(reason, regarding, &format!("{image}: {detail}")));
    }
}

/// Records the state of builds, nodes and rollouts in the history.
fn record_states(view: &ReconcileView, history: &mut EventHistory) {
    for entry in status_entries(&view.plan, &view.activity) {
        let digest = entry.row.digest.as_ref().map(ToString::to_string);
        let attempts = entry.activity.map_or(0, |activity| activity.attempts);
        history.builds.insert(name_of(entry.image, entry.target), (entry.row.phase, digest, attempts));
    }
    record_nodes(view, history);
    record_upgrades(view, history);
    for rollout in &view.plan.rollouts {
        let RolloutDecision::Hold(why) = &rollout.decision else { continue };
        // While nodes reboot, their rollouts are held all the time. The Events of the nodes report the cause.
        if matches!(why, HoldReason::UnknownNode { .. } | HoldReason::Unlabeled { .. } | HoldReason::NoNodes)
        {
            continue;
        }
        if let Some(regarding) = regarding_target(rollout) {
            let note = format!("{}: {}", rollout.image, rollout.hold_text().unwrap_or_default());
            history.held.insert(regarding, (hold_event_reason(why), note));
        }
    }
}

fn record_nodes(view: &ReconcileView, history: &mut EventHistory) {
    for node in &view.plan.nodes {
        if let (Some(next), true) = (&node.next, node.ready) {
            history.nodes.insert((EventReason::ReadyForKernel, node.node.clone()), next.kernel.to_string());
        }
    }
    for skipped in &view.plan.skipped_nodes {
        let contradicts = matches!(
            skipped.why,
            NodeReason::KernelLabelDiffers { .. } | NodeReason::ArchitectureLabelDiffers { .. }
        );
        let rejected = skipped.why.is_rejected_claim().then_some(EventReason::NodeClaimRejected);
        if let Some(reason) = rejected.or(contradicts.then_some(EventReason::NodeLabelsContradict)) {
            history.nodes.insert((reason, skipped.node.clone()), skipped.why.to_string());
        }
    }
    for unused in &view.plan.unused_announcements {
        history.nodes.insert((EventReason::AnnouncementNotUsed, unused.node.clone()), unused.why.to_string());
    }
}

/// Records the nodes whose upgrade is complete or has failed.
fn record_upgrades(view: &ReconcileView, history: &mut EventHistory) {
    let upgrades = view.plan.rollouts.iter().filter_map(|rollout| rollout.upgrade.as_ref());
    let mut notes: Vec<(&String, &UpgradeNote)> = upgrades
        .flat_map(|upgrade| &upgrade.nodes)
        .filter_map(|node| Some((&node.node, node.note.as_ref()?)))
        .collect();
    // A node with several drivers has a note for each. The newest is inserted last, and thus counts.
    notes.sort_by_key(|(_, note)| note.since);
    for (node, UpgradeNote { rollout, state, to, why, .. }) in notes {
        let reason = match state {
            UpgradeState::Uncordoned => EventReason::Upgraded,
            UpgradeState::NotDrained | UpgradeState::Failed => EventReason::UpgradeFailed,
            _ => continue,
        };
        let why = why.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
        history.nodes.insert((reason, node.clone()), format!("{rollout}, {to}{why}"));
    }
}

/// Returns the reason of the Event for a hold.
fn hold_event_reason(why: &HoldReason) -> EventReason {
    match why {
        HoldReason::ChangedBack { .. } | HoldReason::FenceUndone { .. } | HoldReason::NotKept { .. } => {
            EventReason::RolloutConflict
        }
        HoldReason::RolloutFailed { .. } | HoldReason::CopyFailed { .. } => EventReason::RolloutRestored,
        _ => EventReason::RolloutHeld,
    }
}

/// Collects Events for changes of builds.
fn build_events(
    before: &EventHistory,
    now: &EventHistory,
    view: &ReconcileView,
    events: &mut BTreeSet<StatusEvent>,
) {
    for entry in status_entries(&view.plan, &view.activity) {
        let name = name_of(entry.image, entry.target);
        let Some((phase, digest, attempts)) = now.builds.get(&name) else { continue };
        let (old_phase, old_digest, old_attempts) =
            before.builds.get(&name).cloned().unwrap_or((Phase::Missing, None, 0));
        let regarding = Regarding::DriverBuild(name);
        let has_failed = |phase| matches!(phase, Phase::Failed | Phase::Retrying);
        let reason = match *phase {
            Phase::Published if old_phase != Phase::Published || old_digest != *digest => {
                EventReason::Published
            }
            Phase::Building if old_phase != Phase::Building => EventReason::BuildStarted,
            phase if has_failed(phase) && (!has_failed(old_phase) || *attempts != old_attempts) => {
                EventReason::BuildFailed
            }
            Phase::Missing | Phase::Queued if old_phase == Phase::Published => EventReason::PublicationLost,
            // A definition that does not cover the kernel is also skipped, but is no failure.
            Phase::Skipped if old_phase != Phase::Skipped && entry.outcome.is_unbuildable() => {
                EventReason::NotBuildable
            }
            _ => continue,
        };
        let row = &entry.row;
        let note = match (reason, &row.digest) {
            (EventReason::Published, Some(digest)) => format!("{} is {digest}", row.reference),
            (EventReason::PublicationLost, _) => {
                format!("{} is no longer in the registry, or its inputs changed", row.reference)
            }
            _ => format!("{} for {}: {}", row.image, row.kernel, row.reason),
        };
        events.insert(event(reason, regarding, &note));
    }
}

/// Collects Events for changes of nodes.
fn node_events(before: &EventHistory, now: &EventHistory, events: &mut BTreeSet<StatusEvent>) {
    let mut add = |reason, node: &String, note: &str| {
        events.insert(event(reason, Regarding::Node(node.clone()), note));
    };
    for (key, state) in now.nodes.iter().filter(|(key, state)| before.nodes.get(*key) != Some(*state)) {
        let (reason, node) = key;
        match reason {
            EventReason::ReadyForKernel => {
                add(*reason, node, &format!("every image that the node needs for {state} is published"));
            }
            EventReason::NodeLabelsContradict => {
                add(*reason, node, &format!("node skipped until its labels and nodeInfo agree: {state}"));
            }
            _ => add(*reason, node, state),
        }
    }
    for (key, kernel) in before.nodes.iter().filter(|(key, _)| !now.nodes.contains_key(*key)) {
        if let (EventReason::ReadyForKernel, node) = key {
            let note = format!(
                "an image that the node needs for {kernel} is missing, no image is required, or the kernel is no longer \
                 announced"
            );
            add(EventReason::NotReadyForKernel, node, &note);
        }
    }
}

/// Returns the cluster object that a rollout writes. A rollout to files or tags has no object that Events can be about.
fn regarding_target(rollout: &PlannedRollout) -> Option<Regarding> {
    match (&rollout.target.location, &rollout.target.object) {
        (Some(_), _) | (None, RolloutObject::Nothing {}) => None,
        (None, RolloutObject::DaemonSet(target)) => Some(Regarding::DaemonSet {
            namespace: target.namespace.to_string(),
            name: target.daemon_set.to_string(),
        }),
        (None, RolloutObject::Resource(target)) => {
            Some(Regarding::Resource { resource: target.resource, name: target.full_name() })
        }
    }
}

#[cfg(test)]
mod tests;
