//! The note that farrier writes to a node under upgrade.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::plan::{
    Change, NodeChange, NodeFacts, NodePrecondition, UPGRADE,
    labels::operator_upgrade_in_progress,
    rollout::{HANDED_OVER, is_same_image, short_hash},
};

/// State of a node's upgrade: the value of the label `farrier.dev/upgrade`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum UpgradeState {
    /// The node accepts no new pods; the pods that must leave are being evicted.
    Cordoned,
    /// The pods have left; the driver pod is being replaced.
    Drained,
    /// The new driver pod exists, and is being observed.
    DriverRestarted,
    /// All conditions of `waitFor` hold.
    Checked,
    /// The node has its new driver and is otherwise as before the upgrade.
    Uncordoned,
    /// Pods did not leave the node in time. The node has its old driver, is otherwise as before, and will be retried.
    NotDrained,
    /// The new driver does not work. The node is otherwise as before the upgrade.
    Failed,
}

impl UpgradeState {
    /// Returns the label's value.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// Whether the node is being upgraded.
    pub(crate) fn is_in_progress(self) -> bool {
        match self {
            Self::Cordoned | Self::Drained | Self::DriverRestarted | Self::Checked => true,
            Self::Uncordoned | Self::NotDrained | Self::Failed => false,
        }
    }

    /// Whether upgrades of the node's other drivers have to wait.
    pub(super) fn blocks_other_upgrades(self) -> bool {
        self.is_in_progress() || self == Self::Failed
    }
}

/// Purpose of a Job on a node in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, strum::IntoStaticStr)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum JobKind {
    /// Forecast whether the old driver can be unloaded (`forecast`).
    Forecast,
    /// Check whether the new driver works (`waitFor`).
    Check,
}

/// Annotation `farrier.dev/upgrade`: the whole state of a node's upgrade.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct UpgradeNote {
    /// Farrier that upgrades the node, where a cluster has several: the text of [`crate::plan::Instance`].
    #[serde(default)]
    pub by: String,
    /// DaemonSet, as `namespace/name`.
    pub rollout: String,
    /// State of the upgrade.
    pub state: UpgradeState,
    /// Time of the last change of the state.
    pub since: Timestamp,
    /// Time at which the node's upgrade started.
    pub began: Timestamp,
    /// Image that the node gets or got.
    pub to: String,
    /// Whether farrier set the node's cordon. A cordon set by another actor stays.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cordoned: bool,
    /// Whether the upgrade failed because its check could not be run. Such a failure does not count against the image.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unchecked: bool,
    /// Reason why the driver failed, why the node was not drained, or why farrier waits for an operator.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// Last notes of the upgrades of the node's other drivers. They have ended.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<UpgradeNote>,
}

impl UpgradeNote {
    /// Reads the note of a node. A note that cannot be parsed counts as none, and the node's cordon as another actor's.
    pub fn of(node: &NodeFacts) -> Option<Self> {
        node.annotations.get(UPGRADE).and_then(|text| serde_json::from_str(text).ok())
    }

    /// Reads the last note of each driver's upgrade, the current one last.
    pub(in crate::plan) fn all(node: &NodeFacts) -> Vec<Self> {
        let Some(mut note) = Self::of(node) else { return Vec::new() };
        let mut notes = std::mem::take(&mut note.others);
        notes.push(note);
        notes
    }

    /// Reads the note of a node whose upgrade is in progress.
    pub fn in_progress(node: &NodeFacts) -> Option<Self> {
        Self::of(node).filter(|note| note.state.is_in_progress())
    }

    /// Whether the note records a failure of this image.
    pub(in crate::plan) fn is_failure_of(&self, image: &str) -> bool {
        self.state == UpgradeState::Failed && is_same_image(&self.to, image)
    }

    /// Whether the next step depends on the pods of the node.
    pub fn needs_workloads(&self) -> bool {
        matches!(self.state, UpgradeState::Cordoned | UpgradeState::Drained)
    }

    /// Returns the name of a Job of this upgrade. Each start of a node's upgrade has its own names.
    pub fn job_name(&self, kind: JobKind, node: &str) -> String {
        let (kind, began): (&str, _) = (kind.into(), self.began.to_string());
        format!("farrier-{kind}-{}", short_hash(&[&self.rollout, node, &self.to, &began]))
    }
}

/// Returns the change that sets a node's note and the matching label. Without a note, the note of another driver's upgrade takes its
/// place, or both are removed. A single write sets note and cordon, so that farrier cannot be killed between them.
pub(super) fn set_note(node: &NodeFacts, note: Option<&UpgradeNote>, cordon: Option<bool>) -> Change {
    let of_other = || {
        let mut others = UpgradeNote::of(node)?.others;
        let last = others.pop()?;
        Some(UpgradeNote { others, ..last })
    };
    let note = note.cloned().or_else(of_other);
    let text = note.as_ref().and_then(|note| serde_json::to_string(note).ok());
    let state = note.map(|note| note.state.as_str().to_owned());
    Change::Node(NodeChange {
        name: node.name.clone(),
        labels: [(UPGRADE.to_owned(), state)].into(),
        annotations: [(UPGRADE.to_owned(), text)].into(),
        cordon,
        untaint: None,
        precondition: Some(NodePrecondition::of(node)),
    })
}

/// Returns the change that hands a node over to the DaemonSet of its kernel.
pub(super) fn hand_over(node: &NodeFacts, label: &str) -> Change {
    Change::Node(NodeChange {
        name: node.name.clone(),
        labels: [(label.to_owned(), Some(HANDED_OVER.to_owned()))].into(),
        precondition: Some(NodePrecondition::of(node)),
        ..NodeChange::default()
    })
}

/// Returns the change that uncordons a node, if the cordon is farrier's, and sets a new note.
pub(super) fn uncordon(node: &NodeFacts, before: &UpgradeNote, note: Option<&UpgradeNote>) -> Change {
    set_note(node, note, (before.cordoned && node.unschedulable).then_some(false))
}

/// Returns the changes that uncordon nodes in progress that no upgrade covers any more: the DaemonSet is gone or does not
/// reach them, or the definition has no `upgrade`. A node that an operator is upgrading follows once the operator is done.
/// The note of a failure that no upgrade covers is removed, because the upgrades of other drivers wait for it.
pub fn release_uncovered<'a>(
    nodes: impl IntoIterator<Item = &'a NodeFacts>,
    is_covered: impl Fn(&NodeFacts, &UpgradeNote) -> bool,
) -> Vec<Change> {
    let release = |node: &'a NodeFacts| {
        let note = UpgradeNote::of(node).filter(|note| note.state.blocks_other_upgrades())?;
        let is_kept = is_covered(node, &note) || operator_upgrade_in_progress(&node.labels).is_some();
        (!is_kept).then(|| uncordon(node, &note, None))
    };
    nodes.into_iter().filter_map(release).collect()
}

/// Returns the changes that clear a rollout's failures on its nodes. A stopped upgrade then continues.
pub fn clear_failures<'a>(nodes: impl IntoIterator<Item = &'a NodeFacts>, rollout: &str) -> Vec<Change> {
    let is_failure = |note: &UpgradeNote| note.state == UpgradeState::Failed && note.rollout == rollout;
    let failed = nodes.into_iter().filter(|node| UpgradeNote::of(node).as_ref().is_some_and(is_failure));
    failed.map(|node| set_note(node, None, None)).collect()
}
