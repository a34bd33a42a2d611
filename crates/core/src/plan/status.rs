//! The status matrix of images and kernels.

use std::collections::BTreeSet;

use jiff::Timestamp;
use serde::Serialize;

use super::{
    Activity, BuildActivity, BuildTime, HostDrivers, Outcome, OwnDriver, Phase, Plan, PlannedCell,
    PlannedRollout, Stage,
};
use crate::{
    image::{Digest, ImageName, InputHash},
    kernel::KernelTarget,
    kmod::Verdict,
};

/// One row of the matrix.
#[serde_with::skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct StatusRow {
    /// The driver image.
    pub image: String,
    /// The kernel target.
    pub kernel: String,
    /// Number of nodes that run the kernel.
    pub nodes: usize,
    /// Phase of the image for the kernel.
    pub phase: Phase,
    /// Verdict of the check, if the image is published.
    pub verdict: Option<Verdict>,
    /// Reference by tag; empty where there is none.
    pub reference: String,
    /// Digest, if the image is published.
    pub digest: Option<Digest>,
    /// Reason why the image is not published.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// Elapsed and usual time of the build, if the image is not published.
    pub time: Option<BuildTime>,
    /// Needs of the image: `name@sha256:digits` of the exposed headers, or the names that it waits for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub needs: Vec<String>,
    /// Origins of the kernel's announcement.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub announced_by: Vec<String>,
}

/// One row, with image and kernel target as typed values.
#[derive(Clone, Debug)]
pub struct StatusEntry<'a> {
    /// The driver image.
    pub image: &'a ImageName,
    /// The kernel target.
    pub target: &'a KernelTarget,
    /// Outcome in the plan.
    pub outcome: &'a Outcome,
    /// Input hash; `None` where nothing can be built.
    pub input_hash: Option<InputHash>,
    /// Progress of the cell's build; `None` where this process has not built it.
    pub activity: Option<&'a BuildActivity>,
    /// Row of the matrix.
    pub row: StatusRow,
}

impl StatusEntry<'_> {
    /// Returns the reason for the state, and the remedy; either may be empty.
    pub fn reason_and_hint(&self) -> (String, String) {
        let Self { row, .. } = self;
        match (self.outcome, row.phase) {
            (Outcome::Conflict { remedy, .. }, _) => (self.outcome.absence_reason(), remedy.clone()),
            (Outcome::UpToDate { denied: true, .. }, _) => (
                "whether its modules load is unknown, which its definition does not accept".to_owned(),
                "see its check report for the missing information, or set check.unknown: allow".to_owned(),
            ),
            (_, Phase::Failed) => (
                row.reason.clone(),
                format!(
                    "it is rebuilt when an input changes; `farrier logs {} --kernel {}` prints the full log",
                    self.image, self.target.release
                ),
            ),
            (_, Phase::Retrying) => {
                let next = self.activity.and_then(|activity| activity.next_retry);
                let next = next.map(|at| format!("it is retried at {at:.0}")).unwrap_or_default();
                (row.reason.clone(), next)
            }
            (_, Phase::Unknown) => (row.reason.clone(), "check that the registry answers".to_owned()),
            _ => (row.reason.clone(), String::new()),
        }
    }
}

/// Row of the matrix, a rollout on hold, or nodes whose hosts load drivers.
#[derive(Serialize)]
#[serde(untagged)]
pub enum StatusItem<'a> {
    Image(&'a StatusRow),
    Hold(&'a PlannedRollout),
    HostDrivers(&'a HostDrivers),
}

impl<'a> StatusItem<'a> {
    /// Lists the rows of the matrix, then the rollouts on hold, then the nodes whose hosts load drivers.
    pub fn all(rows: &'a [StatusRow], plan: &'a Plan) -> Vec<Self> {
        let images = rows.iter().map(Self::Image);
        let on_hosts = plan.host_drivers.iter().map(Self::HostDrivers);
        images.chain(plan.held_rollouts().map(Self::Hold)).chain(on_hosts).collect()
    }
}

/// Returns the matrix in the order of [`status_entries`], without regard to running builds.
pub fn status(plan: &Plan) -> Vec<StatusRow> {
    status_at(plan, &Activity::new(), Timestamp::UNIX_EPOCH)
}

/// Returns the matrix with the current state of builds.
pub fn status_at(plan: &Plan, activity: &Activity, now: Timestamp) -> Vec<StatusRow> {
    let row = |entry: StatusEntry<'_>| StatusRow {
        time: entry.activity.and_then(|activity| activity.time(now)),
        ..entry.row
    };
    let mut rows: Vec<StatusRow> = status_entries(plan, activity).into_iter().map(row).collect();
    let with_row: BTreeSet<(String, String)> =
        rows.iter().map(|row| (row.image.clone(), row.kernel.clone())).collect();
    rows.extend(plan.own_drivers.iter().map(own_driver).filter(|row| {
        // If other nodes of that kernel do not bring a driver, the image's own row already covers the kernel.
        !with_row.contains(&(row.image.clone(), row.kernel.clone()))
    }));
    rows
}

fn own_driver(own: &OwnDriver) -> StatusRow {
    StatusRow {
        image: own.image.to_string(),
        kernel: own.target.to_string(),
        nodes: own.nodes.len(),
        phase: Phase::OwnDriver,
        verdict: None,
        reference: String::new(),
        digest: None,
        reason: own.to_string(),
        time: None,
        needs: Vec::new(),
        announced_by: Vec::new(),
    }
}

/// Returns the matrix with the progress of builds. Order: chain by chain, needs before their dependents, all kernels
/// of an image together.
pub fn status_entries<'a>(plan: &'a Plan, activity: &'a Activity) -> Vec<StatusEntry<'a>> {
    plan.cells.iter().map(|planned| entry(planned, activity)).collect()
}

fn entry<'a>(planned: &'a PlannedCell, activity: &'a Activity) -> StatusEntry<'a> {
    let PlannedCell { image, target, outcome, nodes, announced_by } = planned;
    let cell = outcome.cell();
    let activity = cell.and_then(|_| activity.get(&(image.clone(), target.clone())));
    let (phase, reason) = match (outcome, activity) {
        (Outcome::Build { why, .. }, Some(activity)) => build_phase(activity, why.to_string()),
        (Outcome::Build { why, .. }, None) => (Phase::Missing, why.to_string()),
        (Outcome::Conflict { remedy, .. }, _) => (Phase::Conflict, remedy.clone()),
        (Outcome::Failed { message, .. }, _) => (Phase::Failed, message.clone()),
        (other, _) => (other.phase(), other.absence_reason()),
    };
    let published = if let Outcome::UpToDate { published, .. } = outcome { Some(published) } else { None };
    let needs = match (outcome, cell) {
        (Outcome::Waiting { needs }, _) => needs.iter().map(ToString::to_string).collect(),
        (_, Some(cell)) => cell.needs.iter().map(ToString::to_string).collect(),
        (_, None) => Vec::new(),
    };
    let row = StatusRow {
        image: image.to_string(),
        kernel: target.to_string(),
        nodes: *nodes,
        phase,
        verdict: published.and_then(|published| published.verdict),
        reference: cell.map(|cell| cell.reference.to_string()).unwrap_or_default(),
        digest: published.map(|published| published.digest.clone()),
        reason,
        time: None,
        needs,
        announced_by: announced_by.iter().map(ToString::to_string).collect(),
    };
    StatusEntry { image, target, outcome, input_hash: cell.map(|cell| cell.input_hash), activity, row }
}

/// Returns the phase of an unpublished image, and its reason.
fn build_phase(activity: &BuildActivity, reason: String) -> (Phase, String) {
    let BuildActivity { stage, next_retry, error, .. } = activity;
    match (stage, error) {
        (Some(Stage::Queued), _) => (Phase::Queued, reason),
        (Some(stage @ Stage::Waiting), _) => (Phase::Queued, stage.to_string()),
        (Some(stage), _) => (Phase::Building, stage.to_string()),
        (None, Some(error)) if next_retry.is_some() => (Phase::Retrying, error.clone()),
        (None, Some(error)) => (Phase::Failed, error.clone()),
        (None, None) => (Phase::Missing, reason),
    }
}
