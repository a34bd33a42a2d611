//! Pure: Events, from the difference between one pass and the next.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};

use super::{desired::printable, name_of};
use crate::controller::live::PassView;
use crate::{
    image::OperatorResource,
    plan::{
        Change, HoldReason, NodeReason, Phase, PlannedRollout, RolloutDecision, RolloutObject, UpgradeNote,
        UpgradeState, status_entries,
    },
};

/// The same reason is given about the same object once in so long: a node that flaps between two kernels has its story
/// told once, not a hundred times.
const QUIET: SignedDuration = SignedDuration::from_mins(5);

/// Events of one pass. When a third of a fleet reboots at once, more of them do not help, and cost the API server a lot.
const MOST: usize = 50;

/// A note's bytes; the API takes 1024.
const NOTE: usize = 1000;

/// An Event's reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, strum::Display)]
pub enum EventReason {
    /// A rollout target was rewritten.
    Rewritten,
    /// A rollout target could not be rewritten.
    RewriteFailed,
    /// Another writer changes a rollout target back.
    RolloutConflict,
    /// The pods did not get ready, and the image before was put back.
    RolloutPutBack,
    /// A rollout target stays as it is, for a reason that a person has to see to.
    RolloutHeld,
    /// A build began.
    BuildStarted,
    /// A build failed.
    BuildFailed,
    /// An image that is called for cannot be built: no headers, no compiler, no source.
    NotBuildable,
    /// An image was published.
    Published,
    /// A published image is not there any more.
    PublicationLost,
    /// A node may boot its next kernel.
    ReadyForKernel,
    /// A node may not boot the kernel any more for which it was ready.
    NotReadyForKernel,
    /// A node waits, because what it says of its kernel is contradictory.
    NodeWaits,
    /// A node announces a kernel that is not used.
    AnnouncementNotUsed,
    /// A node has got another driver, in order.
    Upgraded,
    /// A node did not get another driver, or the new one does not work.
    UpgradeFailed,
    /// A node names more kernels than a node does, or a kernel that is one too many.
    NodeNotBelieved,
}

impl EventReason {
    /// What farrier did or tried, and whether it is something to see to.
    pub fn action(self) -> (&'static str, bool) {
        match self {
            Self::Rewritten => ("RollOut", false),
            Self::RewriteFailed | Self::RolloutConflict | Self::RolloutPutBack | Self::RolloutHeld => {
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
            Self::NodeWaits => ("Observe", false),
            Self::AnnouncementNotUsed | Self::NodeNotBelieved => ("Observe", true),
        }
    }
}

/// The object that an event is about.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, derive_more::Display)]
#[expect(missing_docs, reason = "the words say what the fields are")]
pub enum Regarding {
    /// A DriverBuild of farrier's namespace.
    #[display("DriverBuild {_0}")]
    DriverBuild(String),
    /// A node.
    #[display("node {_0}")]
    Node(String),
    /// A DaemonSet.
    #[display("DaemonSet {namespace}/{name}")]
    DaemonSet { namespace: String, name: String },
    /// An operator's resource.
    #[display("{resource} {name}")]
    Resource { resource: OperatorResource, name: String },
}

/// One event.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct StatusEvent {
    /// Why. The order of the reasons is that of their weight.
    pub reason: EventReason,
    /// About what.
    pub regarding: Regarding,
    /// For people.
    pub note: String,
}

/// How everything stood after the last pass, and which events were written lately: what is new is told from that.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EventHistory {
    /// Phase, digest and attempts of each DriverBuild.
    builds: BTreeMap<String, (Phase, Option<String>, u32)>,
    /// What is true of nodes: kernels that they are ready for, why they wait, why their announcement is not used.
    nodes: BTreeMap<(EventReason, String), String>,
    /// Why rollout targets are held, or their rewrite failed.
    held: BTreeMap<Regarding, (EventReason, String)>,
    /// When what was told last.
    last: BTreeMap<(Regarding, EventReason), Timestamp>,
}

/// What is new in a view, and how many more events there would have been. The first view after a start tells of what the
/// pass did and of nothing that only is as it was.
pub fn events(before: Option<&EventHistory>, view: &PassView) -> (Vec<StatusEvent>, usize, EventHistory) {
    let mut told = EventHistory {
        last: before.map(|told| told.last.clone()).unwrap_or_default(),
        ..EventHistory::default()
    };
    told.last.retain(|_, at| (view.now.duration_since(*at)).abs() < QUIET);
    let mut found = BTreeSet::new();
    rewrites(view, &mut found);
    states(view, &mut told);
    if let Some(before) = before {
        of_builds(before, &told, view, &mut found);
        of_nodes(before, &told, &mut found);
        let held = told.held.iter().filter(|(regarding, held)| before.held.get(*regarding) != Some(*held));
        found.extend(held.map(|(regarding, (reason, note))| event(*reason, regarding.clone(), note)));
    }
    let last = &told.last;
    let fresh = |event: &StatusEvent| !last.contains_key(&(event.regarding.clone(), event.reason));
    let mut found: Vec<StatusEvent> = found.into_iter().filter(fresh).collect();
    let more = found.len().saturating_sub(MOST);
    found.truncate(MOST);
    for event in &found {
        told.last.insert((event.regarding.clone(), event.reason), view.now);
    }
    (found, more, told)
}

fn event(reason: EventReason, regarding: Regarding, note: &str) -> StatusEvent {
    // A character that is not ASCII may take four bytes.
    let most = if note.is_ascii() { NOTE } else { NOTE / 4 };
    StatusEvent { reason, regarding, note: printable(note, most) }
}

/// What the pass wrote to rollout targets.
fn rewrites(view: &PassView, found: &mut BTreeSet<StatusEvent>) {
    for report in view.rollouts.iter().filter(|report| !report.planned.changes.is_empty()) {
        let Some(regarding) = target(&report.planned) else { continue };
        let image = &report.planned.image;
        let (reason, what) = match (&report.error, &report.planned.decision) {
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
        found.insert(event(reason, regarding, &format!("{image}: {what}")));
    }
}

/// How everything stands now.
fn states(view: &PassView, told: &mut EventHistory) {
    for entry in status_entries(&view.plan, &view.activity) {
        let digest = entry.row.digest.as_ref().map(ToString::to_string);
        let attempts = entry.activity.map_or(0, |activity| activity.attempts);
        told.builds.insert(name_of(entry.image, entry.target), (entry.row.phase, digest, attempts));
    }
    for node in &view.plan.nodes {
        if let (Some(next), true) = (&node.next, node.ready) {
            told.nodes.insert((EventReason::ReadyForKernel, node.node.clone()), next.kernel.to_string());
        }
    }
    for left in &view.plan.left_alone {
        let contradicts = matches!(
            left.why,
            NodeReason::KernelLabelDiffers { .. } | NodeReason::ArchitectureLabelDiffers { .. }
        );
        let distrust = left.why.is_distrust().then_some(EventReason::NodeNotBelieved);
        if let Some(reason) = distrust.or(contradicts.then_some(EventReason::NodeWaits)) {
            told.nodes.insert((reason, left.node.clone()), left.why.to_string());
        }
    }
    for unused in &view.plan.unused_announcements {
        told.nodes.insert((EventReason::AnnouncementNotUsed, unused.node.clone()), unused.why.to_string());
    }
    for upgrade in view.plan.rollouts.iter().filter_map(|rollout| rollout.upgrade.as_ref()) {
        for (node, note) in upgrade.nodes.iter().filter_map(|turn| Some((&turn.node, turn.note.as_ref()?))) {
            let UpgradeNote { rollout, state, to, why, .. } = note;
            let reason = match state {
                UpgradeState::Uncordoned => EventReason::Upgraded,
                UpgradeState::NotDrained | UpgradeState::Failed => EventReason::UpgradeFailed,
                _ => continue,
            };
            let why = why.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
            told.nodes.insert((reason, node.clone()), format!("{rollout}, {to}{why}"));
        }
    }
    for rollout in &view.plan.rollouts {
        let RolloutDecision::Hold(why) = &rollout.decision else { continue };
        // A fleet that reboots holds its rollouts all the time; its nodes tell of that.
        if matches!(why, HoldReason::UnknownNode { .. } | HoldReason::NoNodes) {
            continue;
        }
        if let Some(regarding) = target(rollout) {
            told.held.insert(regarding, (held(why), format!("{}: {why}", rollout.image)));
        }
    }
}

/// What kind of hold it is.
fn held(why: &HoldReason) -> EventReason {
    match why {
        HoldReason::ChangedBack { .. } | HoldReason::FenceUndone { .. } => EventReason::RolloutConflict,
        HoldReason::RolloutFailed { .. } | HoldReason::CopyFailed { .. } => EventReason::RolloutPutBack,
        _ => EventReason::RolloutHeld,
    }
}

fn of_builds(before: &EventHistory, now: &EventHistory, view: &PassView, found: &mut BTreeSet<StatusEvent>) {
    for entry in status_entries(&view.plan, &view.activity) {
        let name = name_of(entry.image, entry.target);
        let Some((phase, digest, attempts)) = now.builds.get(&name) else { continue };
        let (was, known, tried) = before.builds.get(&name).cloned().unwrap_or((Phase::Missing, None, 0));
        let about = Regarding::DriverBuild(name);
        let failed = |phase| matches!(phase, Phase::Failed | Phase::Retrying);
        // That a definition is not meant for a kernel is no news.
        let reason = match *phase {
            Phase::Published if was != Phase::Published || known != *digest => EventReason::Published,
            Phase::Building if was != Phase::Building => EventReason::BuildStarted,
            phase if failed(phase) && (!failed(was) || *attempts != tried) => EventReason::BuildFailed,
            Phase::Missing | Phase::Queued if was == Phase::Published => EventReason::PublicationLost,
            Phase::Skipped if was != Phase::Skipped && entry.outcome.is_unbuildable() => {
                EventReason::NotBuildable
            }
            _ => continue,
        };
        let row = &entry.row;
        let note = match (reason, &row.digest) {
            (EventReason::Published, Some(digest)) => format!("{} is {digest}", row.reference),
            (EventReason::PublicationLost, _) => {
                format!("{} is not in the registry any more, or its inputs changed", row.reference)
            }
            _ => format!("{} for {}: {}", row.image, row.kernel, row.reason),
        };
        found.insert(event(reason, about, &note));
    }
}

fn of_nodes(before: &EventHistory, now: &EventHistory, found: &mut BTreeSet<StatusEvent>) {
    let mut tell = |reason, node: &String, note: &str| {
        found.insert(event(reason, Regarding::Node(node.clone()), note));
    };
    for (key, what) in now.nodes.iter().filter(|(key, what)| before.nodes.get(*key) != Some(*what)) {
        let (reason, node) = key;
        match reason {
            EventReason::ReadyForKernel => {
                tell(*reason, node, &format!("every image that it will need for {what} is published"));
            }
            EventReason::NodeWaits => tell(*reason, node, &format!("left alone until they agree: {what}")),
            _ => tell(*reason, node, what),
        }
    }
    for (key, kernel) in before.nodes.iter().filter(|(key, _)| !now.nodes.contains_key(*key)) {
        if let (EventReason::ReadyForKernel, node) = key {
            let note = "an image that it would need for";
            let note =
                format!("{note} {kernel} is missing, none is called for, or the kernel is not announced");
            tell(EventReason::NotReadyForKernel, node, &note);
        }
    }
}

/// The object of a cluster that a rollout is about; files and tags have no events.
fn target(rollout: &PlannedRollout) -> Option<Regarding> {
    match (&rollout.target.place, &rollout.target.object) {
        (Some(_), _) | (None, RolloutObject::Nothing {}) => None,
        (None, RolloutObject::DaemonSet(found)) => Some(Regarding::DaemonSet {
            namespace: found.namespace.to_string(),
            name: found.daemon_set.to_string(),
        }),
        (None, RolloutObject::Resource { resource, name }) => {
            Some(Regarding::Resource { resource: *resource, name: name.clone() })
        }
    }
}

#[cfg(test)]
mod tests;
