//! The plan: the outcome of every cell, every image field, and every node that is to boot another kernel.

use std::sync::Arc;

use serde::{Serialize, Serializer};

use super::{
    Cell, HostDrivers, Outcome, OwnDriver, Phase, PlannedCell, PlannedNode, PlannedRollout, PlannedSignature,
    PlannedUnion, RolloutDecision, SkippedNode, UnusedAnnouncement, UnusedImage,
};
use crate::image::{Digest, ImageReference};

/// Actions that farrier takes and declines, with the reasons. The JSON form is stable: field and reason names keep
/// their meaning within one `apiVersion` of the definitions; new ones may be added.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Plan {
    /// Every driver image that is called for on a kernel. Chain by chain: needs before their dependents, all kernels of
    /// an image together.
    #[serde(flatten, serialize_with = "by_outcome")]
    pub cells: Vec<PlannedCell>,
    /// Published images without the site's signature.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub signatures: Vec<PlannedSignature>,
    /// Nodes without a known kernel target.
    pub skipped_nodes: Vec<SkippedNode>,
    /// Images that no node matches.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unused_images: Vec<UnusedImage>,
    /// Nodes that an image skips because they bring their own driver.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub own_drivers: Vec<OwnDriver>,
    /// Nodes whose hosts load drivers from system extensions.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub host_drivers: Vec<HostDrivers>,
    /// Images with the payloads of several kernels to assemble and publish.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unions: Vec<PlannedUnion>,
    /// Nodes whose announcement of a kernel is not used.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unused_announcements: Vec<UnusedAnnouncement>,
    /// Image fields, with the decision for each.
    pub rollouts: Vec<PlannedRollout>,
    /// Nodes that are to boot another kernel, each with whether the node may boot it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<PlannedNode>,
}

impl Plan {
    /// Whether something waits for a person: a tag conflict, a failed build, an image that cannot be built, a skipped node or a
    /// held rollout.
    pub fn needs_attention(&self) -> bool {
        self.has_blocked_builds() || self.held_rollouts().next().is_some()
    }

    /// Whether an image cannot be built without a person, or the kernel of a node is unknown.
    pub fn has_blocked_builds(&self) -> bool {
        self.has_stuck_cells() || !self.skipped_nodes.is_empty()
    }

    /// Returns the rollouts on hold.
    pub fn held_rollouts(&self) -> impl Iterator<Item = &PlannedRollout> {
        self.rollouts.iter().filter(|rollout| matches!(rollout.decision, RolloutDecision::Hold(_)))
    }

    /// Whether a list of builds ([`ci_matrix`](super::ci_matrix())) omits a problem: a cell that cannot be built, a skipped node,
    /// or a plan without cells.
    pub fn matrix_hides_reasons(&self) -> bool {
        self.cells.is_empty() || self.has_blocked_builds()
    }

    fn has_stuck_cells(&self) -> bool {
        self.cells.iter().any(|cell| {
            cell.outcome.is_unbuildable()
                || matches!(cell.outcome.phase(), Phase::Conflict | Phase::Failed | Phase::Unknown)
        })
    }

    /// Returns the cells in a phase, without regard to running builds.
    pub(crate) fn cells_in(&self, phase: Phase) -> impl Iterator<Item = &PlannedCell> {
        self.cells.iter().filter(move |cell| cell.outcome.phase() == phase)
    }

    /// Returns the number of cells in a phase.
    pub fn count(&self, phase: Phase) -> usize {
        self.cells_in(phase).count()
    }

    /// Returns the cells to build now. None of them is compiled against another.
    pub fn builds(&self) -> impl Iterator<Item = &Arc<Cell>> {
        self.cells_in(Phase::Missing).filter_map(|planned| planned.outcome.cell())
    }

    /// Whether there is nothing to do.
    pub fn is_idle(&self) -> bool {
        let has_changes = |rollout: &PlannedRollout| {
            !rollout.changes.is_empty()
                || rollout.upgrade.as_ref().is_some_and(|upgrade| upgrade.changes().next().is_some())
                || matches!(
                    rollout.decision,
                    RolloutDecision::Rewrite { .. } | RolloutDecision::Pending { .. }
                )
        };
        // A waiting cell needs no check: the builds that it waits for are not idle, or the registry does not answer.
        let is_idle = |cell: &PlannedCell| match &cell.outcome {
            Outcome::Build { .. } => false,
            Outcome::UpToDate { missing_tags, .. } => missing_tags.is_empty(),
            _ => true,
        };
        self.cells.iter().all(is_idle)
            && self.unions.is_empty()
            && self.signatures.is_empty()
            && !self.rollouts.iter().any(has_changes)
            && self.nodes.iter().all(|node| node.change.is_none())
    }

    /// Whether a target needs an image or a rewrite and will not get it. Holds because of the cluster's state (mixed
    /// kernels, no nodes) are not failures, and neither are kernels that no definition is meant for.
    pub fn has_failures(&self) -> bool {
        let is_failure = |cell: &PlannedCell| match &cell.outcome {
            Outcome::Build { .. } | Outcome::Waiting { .. } => false,
            Outcome::UpToDate { denied, .. } => *denied,
            Outcome::Conflict { .. } | Outcome::Failed { .. } | Outcome::Unknown { .. } => true,
            Outcome::Skipped { why } => !why.is_not_applicable(),
        };
        let has_failed = |rollout: &PlannedRollout| {
            rollout.upgrade.as_ref().is_some_and(|upgrade| upgrade.failure().is_some())
                || matches!(&rollout.decision, RolloutDecision::Hold(why) if why.is_failure())
        };
        self.cells.iter().any(is_failure) || self.rollouts.iter().any(has_failed)
    }
}

/// Serializes the cells as one list per outcome.
fn by_outcome<S: Serializer>(cells: &[PlannedCell], serializer: S) -> Result<S::Ok, S::Error> {
    let in_phase = |phase| cells.iter().filter(move |cell| cell.outcome.phase() == phase);
    let outcomes = |phase| in_phase(phase).map(|cell| &cell.outcome).collect();
    let mut skipped: Vec<&PlannedCell> = in_phase(Phase::Skipped).collect();
    skipped.sort_by_key(|cell| cell.key());
    CellsByOutcome {
        builds: outcomes(Phase::Missing),
        waiting: in_phase(Phase::Waiting).collect(),
        tags: cells.iter().filter_map(Tags::of).collect(),
        up_to_date: outcomes(Phase::Published),
        conflicts: outcomes(Phase::Conflict),
        failed: outcomes(Phase::Failed),
        unknown: outcomes(Phase::Unknown),
        skipped,
    }
    .serialize(serializer)
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct CellsByOutcome<'a> {
    builds: Vec<&'a Outcome>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    waiting: Vec<&'a PlannedCell>,
    tags: Vec<Tags<'a>>,
    up_to_date: Vec<&'a Outcome>,
    conflicts: Vec<&'a Outcome>,
    failed: Vec<&'a Outcome>,
    unknown: Vec<&'a Outcome>,
    skipped: Vec<&'a PlannedCell>,
}

/// Published image that lacks some of its names.
#[derive(Serialize)]
struct Tags<'a> {
    cell: &'a Cell,
    digest: &'a Digest,
    references: &'a [ImageReference],
}

impl<'a> Tags<'a> {
    fn of(planned: &'a PlannedCell) -> Option<Self> {
        let Outcome::UpToDate { cell, published, missing_tags, .. } = &planned.outcome else { return None };
        let tags = Self { cell, digest: &published.digest, references: missing_tags };
        (!missing_tags.is_empty()).then_some(tags)
    }
}

#[cfg(test)]
mod tests;
