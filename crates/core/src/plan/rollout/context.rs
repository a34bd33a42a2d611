//! Pure: what every strategy decides from, and what it decides.

use serde::Serialize;

use super::{
    super::{HoldReason, PlanInputs, Published, node::NodeGroup, outcome::Cells, skip_reason::explained},
    Change, RolloutTarget,
};
use crate::{
    image::{ImageName, ImageReference, RolloutSpec},
    kernel::KernelTarget,
    plan::{
        Cell, PlannedCell, PlannedUpgrade,
        guarantee::{MadeFor, passing},
    },
};

/// What becomes of one rollout target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "decision")]
#[expect(missing_docs, reason = "the variants say what their fields are")]
pub enum RolloutDecision {
    /// Its image is set: always by digest.
    Rewrite { from: String, to: ImageReference },
    /// It is changed in other ways, one step after the other; each is made when the one before it is seen. In words: what is
    /// done now.
    Steps { now: Vec<String> },
    /// It is set when this image has been built, checked and published.
    Pending { on: ImageReference },
    /// It holds the right image.
    AlreadySet { image: ImageReference },
    /// Everything is as it should be where there is not one image to name. In words: how it stands.
    Settled { how: String },
    /// It stays as it is.
    #[serde(serialize_with = "explained")]
    Hold(HoldReason),
}

/// One rollout target of the definitions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PlannedRollout {
    /// The driver image.
    pub image: ImageName,
    /// The target.
    pub target: RolloutTarget,
    /// What becomes of it.
    #[serde(flatten)]
    pub decision: RolloutDecision,
    /// What an adapter does for that, in this order. Beside a rewrite there may be others: pods that are to be
    /// restarted, what is recorded.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub changes: Vec<Change>,
    /// How its nodes get the image in order, where the definition says so (`upgrade`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upgrade: Option<PlannedUpgrade>,
}

impl PlannedRollout {
    /// Nothing is done now, for a reason that only shows when it is made.
    pub fn hold(&mut self, why: HoldReason) {
        self.changes.clear();
        self.decision = RolloutDecision::Hold(why);
    }
}

/// A decision with the changes that carry it out.
#[derive(Clone, Debug)]
pub(super) struct Decided {
    pub(super) decision: RolloutDecision,
    pub(super) changes: Vec<Change>,
}

impl Decided {
    /// Does it bring an image to where it is not yet?
    pub(super) fn goes_further(&self) -> bool {
        match self.decision {
            RolloutDecision::Rewrite { .. }
            | RolloutDecision::Steps { .. }
            | RolloutDecision::Pending { .. } => true,
            RolloutDecision::AlreadySet { .. }
            | RolloutDecision::Settled { .. }
            | RolloutDecision::Hold(_) => false,
        }
    }
}

impl From<RolloutDecision> for Decided {
    fn from(decision: RolloutDecision) -> Self {
        Self { decision, changes: Vec::new() }
    }
}

/// What every strategy decides from.
#[derive(Clone, Copy)]
pub(super) struct Context<'a> {
    /// Everything that the plan is made from.
    pub(super) inputs: &'a PlanInputs<'a>,
    /// Where the images stand.
    pub(super) cells: Cells<'a>,
    /// The nodes, those that are alike together.
    pub(super) groups: &'a [NodeGroup<'a>],
    /// The driver image whose rollout this is.
    pub(super) image: &'a ImageName,
    /// The rollout as the definition says it.
    pub(super) spec: &'a RolloutSpec,
}

impl<'a> Context<'a> {
    /// The image's cells for kernels that are announced and that no node runs.
    pub(super) fn announced(&self) -> impl Iterator<Item = &'a PlannedCell> {
        self.cells.of(self.image).filter(|cell| cell.nodes == 0 && !cell.announced_by.is_empty())
    }

    /// Guarantee 1 for one kernel: the published image of a cell by digest, where it passes there.
    pub(super) fn passing(&self, cell: &Cell, published: &Published) -> Result<ImageReference, HoldReason> {
        passing(self.inputs, self.image, published, &cell.reference, MadeFor::Kernel(&cell.target))
    }
}

/// There will be no image for a kernel, for this reason.
pub(super) fn no_image(kernel: &KernelTarget, detail: String) -> HoldReason {
    HoldReason::NoImage { kernel: kernel.to_string(), detail }
}
