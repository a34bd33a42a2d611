//! Pure: what farrier writes to a node that it upgrades.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::plan::{
    Change, NodeChange, NodeFacts, NodeSeen, UPGRADE,
    labels::operator_at_work,
    rollout::{HANDED_OVER, short_hash},
};

/// Where a node's upgrade stands: the value of the label `farrier.dev/upgrade`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum UpgradeState {
    /// No new pods come; those that must leave are asked to.
    Cordoned,
    /// They have left; the driver's pod ends.
    Drained,
    /// The new pod is there, and shows what it does.
    DriverRestarted,
    /// All that is waited for holds.
    Checked,
    /// The node is as it was before, with its new driver.
    Uncordoned,
    /// It is as it was before, with its old driver: pods did not leave it. It is tried again.
    NotDrained,
    /// It is as it was before, but for its new driver, which does not work.
    Failed,
}

impl UpgradeState {
    /// The label's value.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// Is farrier at the node?
    pub fn is_under_way(self) -> bool {
        match self {
            Self::Cordoned | Self::Drained | Self::DriverRestarted | Self::Checked => true,
            Self::Uncordoned | Self::NotDrained | Self::Failed => false,
        }
    }

    /// Does another driver of the node wait for the end of it?
    pub(super) fn is_open(self) -> bool {
        self.is_under_way() || self == Self::Failed
    }
}

/// What a Job on a node under way is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, strum::IntoStaticStr)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum JobKind {
    /// Would the old driver go? (`forecast`)
    Forecast,
    /// Does the new one work? (`waitFor`)
    Check,
}

/// The annotation `farrier.dev/upgrade`: all that farrier knows of a node's upgrade.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct UpgradeNote {
    /// Which farrier is at it, where a cluster has several: [`crate::plan::Instance`] in words.
    #[serde(default)]
    pub by: String,
    /// The DaemonSet, as `namespace/name`.
    pub rollout: String,
    /// Where it stands.
    pub state: UpgradeState,
    /// Since when.
    pub since: Timestamp,
    /// When the node was begun.
    pub began: Timestamp,
    /// The image that it gets, or got.
    pub to: String,
    /// Is its cordon farrier's? A cordon by someone else stays.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cordoned: bool,
    /// Did it fail because its check could not be made? That says nothing against the image.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unchecked: bool,
    /// Why it failed, was not drained, or is left alone while it is under way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

impl UpgradeNote {
    /// That of a node. One that cannot be read says nothing: the node's cordon is then someone else's.
    pub fn of(node: &NodeFacts) -> Option<Self> {
        node.annotations.get(UPGRADE).and_then(|text| serde_json::from_str(text).ok())
    }

    /// That of a node whose upgrade is under way.
    pub fn under_way(node: &NodeFacts) -> Option<Self> {
        Self::of(node).filter(|note| note.state.is_under_way())
    }

    /// Is it said that this image does not work?
    pub(in crate::plan) fn is_failure_of(&self, image: &str) -> bool {
        self.state == UpgradeState::Failed && self.to == image
    }

    /// Do the pods of its node decide what comes next?
    pub fn needs_workloads(&self) -> bool {
        matches!(self.state, UpgradeState::Cordoned | UpgradeState::Drained)
    }

    /// The name of a Job of this upgrade: another one for each time.
    pub fn job_name(&self, kind: JobKind, node: &str) -> String {
        let (kind, began): (&str, _) = (kind.into(), self.began.to_string());
        format!("farrier-{kind}-{}", short_hash(&[&self.rollout, node, &self.to, &began]))
    }
}

/// A node's new note, with the label beside it; without a note, both are removed. Note and cordon are one write, so that there is
/// no moment between them in which farrier could be killed.
pub(super) fn mark(node: &NodeFacts, note: Option<&UpgradeNote>, cordon: Option<bool>) -> Change {
    let text = note.and_then(|note| serde_json::to_string(note).ok());
    let state = note.map(|note| note.state.as_str().to_owned());
    Change::Node(NodeChange {
        name: node.name.clone(),
        labels: [(UPGRADE.to_owned(), state)].into(),
        annotations: [(UPGRADE.to_owned(), text)].into(),
        cordon,
        seen: Some(NodeSeen::of(node)),
    })
}

/// The node is handed over to the DaemonSet that its kernel has for itself.
pub(super) fn hand_over(node: &NodeFacts, label: &str) -> Change {
    Change::Node(NodeChange {
        name: node.name.clone(),
        labels: [(label.to_owned(), Some(HANDED_OVER.to_owned()))].into(),
        seen: Some(NodeSeen::of(node)),
        ..NodeChange::default()
    })
}

/// The node is as it was before, and gets this note.
pub(super) fn give_back(node: &NodeFacts, before: &UpgradeNote, note: Option<&UpgradeNote>) -> Change {
    mark(node, note, (before.cordoned && node.unschedulable).then_some(false))
}

/// Gives back the nodes under way that no upgrade is about (any more): the DaemonSet is gone or does not reach them, or the
/// definition has no `upgrade`. Those that an operator upgrades meanwhile, when it has done that. A failure that no upgrade is about
/// is forgotten, because other drivers wait for it.
pub fn abandoned<'a>(
    nodes: impl IntoIterator<Item = &'a NodeFacts>,
    is_served: impl Fn(&NodeFacts, &UpgradeNote) -> bool,
) -> Vec<Change> {
    let given_back = |node: &'a NodeFacts| {
        let note = UpgradeNote::of(node).filter(|note| note.state.is_open())?;
        let is_left = is_served(node, &note) || operator_at_work(&node.labels).is_some();
        (!is_left).then(|| give_back(node, &note, None))
    };
    nodes.into_iter().filter_map(given_back).collect()
}

/// Forgets that the new driver did not work on nodes, so that an upgrade that stopped for it goes on.
pub fn forgiven<'a>(nodes: impl IntoIterator<Item = &'a NodeFacts>, rollout: &str) -> Vec<Change> {
    let is_failure = |note: &UpgradeNote| note.state == UpgradeState::Failed && note.rollout == rollout;
    let failed = nodes.into_iter().filter(|node| UpgradeNote::of(node).as_ref().is_some_and(is_failure));
    failed.map(|node| mark(node, None, None)).collect()
}
