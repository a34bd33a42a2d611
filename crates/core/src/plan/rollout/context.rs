//! The inputs that all strategies decide from, and their decisions.

use serde::{Serialize, Serializer};

use super::{
    super::{
        HoldReason, Observed, PlanInputs, Published, node::NodeGroup, outcome::CellLookup,
        skip_reason::serialize_reason,
    },
    Change, RequestedRollout, RolloutTarget, RolloutWarning,
};
use crate::{
    image::{ImageName, ImageReference, RolloutSpec},
    kernel::KernelTarget,
    plan::{
        Cell, ClusterSnapshot, PlannedCell, PlannedUpgrade,
        guarantee::{RequiredKernels, admissible_image},
        operator_resources::OperatorResources,
    },
};

/// Decision about one rollout target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "decision")]
pub enum RolloutDecision {
    /// The target's image is set, always by digest.
    Rewrite { from: String, to: ImageReference },
    /// The target is changed in other ways, step by step; each step waits until the cluster shows the previous one.
    /// `now` describes the current steps.
    Steps { now: Vec<String> },
    /// The image is set once it has been built, checked and published.
    Pending { on: ImageReference },
    /// The target has the desired image.
    AlreadySet { image: ImageReference },
    /// The target is up to date, and there is no single image to name. `how` describes its state.
    Settled { how: String },
    /// The target stays as it is.
    #[serde(serialize_with = "serialize_hold")]
    Hold(HoldReason),
}

/// Serializes the reason of a hold with its text and its hint.
fn serialize_hold<S: Serializer>(why: &HoldReason, serializer: S) -> Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    struct Hold<'a> {
        #[serde(flatten, serialize_with = "serialize_reason")]
        why: &'a HoldReason,
        #[serde(skip_serializing_if = "Option::is_none")]
        hint: Option<&'static str>,
    }
    Hold { why, hint: why.hint() }.serialize(serializer)
}

impl RolloutDecision {
    /// Whether the target is changed now.
    pub(in crate::plan) fn is_change(&self) -> bool {
        matches!(self, Self::Rewrite { .. } | Self::Steps { .. })
    }

    /// Whether the decision gives the target an image that it does not have yet.
    pub(in crate::plan) fn advances(&self) -> bool {
        self.is_change() || matches!(self, Self::Pending { .. })
    }
}

/// One rollout target of the definitions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PlannedRollout {
    /// Driver image of the rollout.
    pub image: ImageName,
    /// Target of the rollout.
    pub target: RolloutTarget,
    /// Decision about the target.
    #[serde(flatten)]
    pub decision: RolloutDecision,
    /// Changes for an adapter to make, in this order. In addition to a rewrite they can restart pods or update the
    /// record.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub changes: Vec<Change>,
    /// Upgrade of the target's nodes, where the definition asks for one (`upgrade`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upgrade: Option<PlannedUpgrade>,
    /// Warnings about the first write of the target.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<RolloutWarning>,
    /// Image in the target's field, where farrier can read it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub current_image: Option<String>,
}

impl PlannedRollout {
    /// Returns the reason of a hold as text, with the image that stays in the field.
    pub fn hold_text(&self) -> Option<String> {
        let RolloutDecision::Hold(why) = &self.decision else { return None };
        // Changes during a hold restore the previous image, so the current one does not stay.
        let stays = self.current_image.as_ref().filter(|_| self.changes.is_empty());
        let stays = stays.map(|image| format!("; its image stays {image}")).unwrap_or_default();
        Some(format!("{why}{stays}"))
    }

    /// Holds the rollout for a reason that appears only when its changes are made.
    pub fn hold(&mut self, why: HoldReason) {
        self.changes.clear();
        self.decision = RolloutDecision::Hold(why);
    }

    /// Whether changes count toward the rate limit of the target: they may restart pods. The changes of a hold restore the previous
    /// image, or set none.
    pub fn is_rewrite(&self, snapshot: &ClusterSnapshot) -> bool {
        !matches!(self.decision, RolloutDecision::Hold(_))
            && self.changes.iter().any(|change| change.is_rewrite(snapshot))
    }

    /// Holds the changes that count toward the rate limit. The others are still made: nodes may wait for their labels.
    pub fn hold_rewrites(&mut self, snapshot: &ClusterSnapshot) {
        self.changes.retain(|change| !change.is_rewrite(snapshot));
        self.decision = RolloutDecision::Hold(HoldReason::TooOften);
    }

    /// Whether changes set fields of DaemonSets. The changes of a hold restore the previous image, or set none.
    pub fn has_applies(&self) -> bool {
        !matches!(self.decision, RolloutDecision::Hold(_)) && self.changes.iter().any(Change::is_apply)
    }

    /// Holds the changes that set fields of DaemonSets. The others are still made: nodes may wait for their labels.
    pub fn hold_applies(&mut self, why: HoldReason) {
        self.changes.retain(|change| !change.is_apply());
        self.decision = RolloutDecision::Hold(why);
    }
}

/// Decision of a strategy, and the changes that implement it.
///
/// A strategy returns a hold in one of two forms. [`RolloutDecision::Hold`] is the decision about the field and its record
/// (`field::decide`), with the changes that restore the previous value or update the record, if any. `Err(HoldReason)` is every
/// other hold: it has no changes, an image that does not work can still be restored, and a chain's hold replaces the reason.
#[derive(Clone, Debug)]
pub(super) struct Decided {
    pub(super) decision: RolloutDecision,
    pub(super) changes: Vec<Change>,
}

impl From<RolloutDecision> for Decided {
    fn from(decision: RolloutDecision) -> Self {
        Self { decision, changes: Vec::new() }
    }
}

/// Inputs that every strategy decides from.
#[derive(Clone, Copy)]
pub(super) struct Context<'a> {
    /// Inputs of the plan.
    pub(super) inputs: &'a PlanInputs<'a>,
    /// Answers to the lookups.
    pub(super) observed: &'a Observed,
    /// State of the images.
    pub(super) cells: CellLookup<'a>,
    /// Nodes, grouped by equal labels.
    pub(super) groups: &'a [NodeGroup<'a>],
    /// Driver image of the rollout.
    pub(super) image: &'a ImageName,
    /// Rollout section of the definition.
    pub(super) spec: &'a RolloutSpec,
    /// All rollouts to the same DaemonSet of the cluster, including this one.
    pub(super) peers: &'a [&'a RequestedRollout<'a>],
}

impl<'a> Context<'a> {
    /// Whether this rollout plans the upgrade of its DaemonSet: the first rollout with `upgrade` does.
    pub(super) fn carries_upgrade(&self, target: &RolloutTarget) -> bool {
        let mut upgrading = self.peers.iter().filter(|peer| peer.spec.upgrade().is_some());
        upgrading.next().is_some_and(|first| first.target == *target)
    }

    /// Returns the containers that an upgrade of the rollout's nodes brings up to date.
    pub(super) fn upgraded_containers(&self) -> impl Iterator<Item = &'a str> {
        let upgrading = self.peers.iter().filter(|peer| peer.spec.upgrade().is_some());
        upgrading.filter_map(|peer| Some(peer.spec.daemon_set()?.container.as_str()))
    }

    /// Returns the image's cells for announced kernels that no node runs.
    pub(super) fn announced(&self) -> impl Iterator<Item = &'a PlannedCell> {
        self.cells.of(self.image).filter(|cell| cell.nodes == 0 && !cell.announced_by.is_empty())
    }

    /// Returns the operators' resources of the cluster and of the rollout's manifests.
    pub(super) fn resources(&self) -> OperatorResources<'a> {
        OperatorResources::for_rollout(self.inputs, self.spec)
    }

    /// Returns a cell's published image by digest, if guarantee 1 holds for the cell's kernel.
    pub(super) fn admissible_image(
        &self,
        cell: &Cell,
        published: &Published,
    ) -> Result<ImageReference, HoldReason> {
        admissible_image(
            self.inputs,
            self.observed,
            self.image,
            published,
            &cell.reference,
            RequiredKernels::Kernel(&cell.target),
        )
    }
}

/// Returns the hold for a kernel without an image.
pub(super) fn no_image(kernel: &KernelTarget, detail: String) -> HoldReason {
    HoldReason::NoImage { kernel: kernel.to_string(), detail }
}
