//! Pure: which image fields are rewritten, and why the others are not.
//!
//! Each strategy has a file of its own and decides one target; what is common to them is here. Decisions are data: an
//! adapter makes the [`Change`]s, in their order, and nothing else.

mod change;
mod copy;
mod daemon_set;
mod field;
mod handover;
mod image;
mod operator;
mod per_kernel;
mod publish_only;
mod record;
mod resource;
mod restart;
mod rollback;
mod target;
mod union;
mod watch;

use std::{
    collections::{BTreeMap, HashMap},
    path::PathBuf,
};

use serde::Serialize;

pub use change::{
    Change, DaemonSetChange, DaemonSetCopy, DaemonSetRetirement, ImageChange, NodeChange, PodRestart,
    ResourceChange,
};
pub use copy::{COPY_KERNEL_LABEL, COPY_OF_LABEL};
pub(super) use handover::HANDOVER_LABELS;
pub use handover::handover_label;
pub(super) use image::passes;
pub(super) use operator::switches;
pub use per_kernel::PER_KERNEL_ANNOTATION;
pub use record::{FieldRecord, RECORD_ANNOTATION, Record, RecordState};
pub use rollback::{RollbackOutcome, RollbackStep, rollback};
pub use target::{RolloutObject, RolloutTarget, Strategy};
pub(super) use union::left_kernels;

use super::{
    ClusterSnapshot, DaemonSetFacts, HoldReason, Matrix, Observed, PlanInputs, PlannedSignature, Seen,
    decide::{CellState, CellStates},
    matrix::{NodeGroup, group_nodes},
    signatures::asks_for_signatures,
    skip_reason::explained,
    together::Together,
    union::PlannedUnion,
};
use crate::{
    image::{Chains, Definitions, ImageName, ImageReference, RolloutSpec},
    kernel::KernelTarget,
};

/// DaemonSets of the directories that `file` rollouts name, by the path in the definition; or why a
/// directory could not be read.
pub type Manifests = BTreeMap<PathBuf, Result<Vec<DaemonSetFacts>, String>>;

/// What becomes of one rollout target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "decision")]
pub enum RolloutDecision {
    /// Its image is set.
    Rewrite {
        /// What it holds.
        from: String,
        /// What it gets: always by digest.
        to: ImageReference,
    },
    /// It is changed in other ways, one step after the other; each is made when the one before it is seen.
    Steps {
        /// What is done now, for people.
        now: Vec<String>,
    },
    /// It is set when this image has been built, checked and published.
    Pending {
        /// What is waited for.
        on: ImageReference,
    },
    /// It holds the right image.
    AlreadySet {
        /// That image.
        image: ImageReference,
    },
    /// Everything is as it should be where there is not one image to name.
    Settled {
        /// How it stands, for people.
        how: String,
    },
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
}

/// A decision with the changes that carry it out.
#[derive(Clone, Debug)]
pub(super) struct Decided {
    pub(super) decision: RolloutDecision,
    pub(super) changes: Vec<Change>,
}

impl Decided {
    /// Does it bring an image to where it is not yet?
    fn goes_further(&self) -> bool {
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

/// What was decided of all rollouts.
pub(super) struct Rollouts {
    /// What becomes of each.
    pub(super) planned: Vec<PlannedRollout>,
    /// Union images that they need and the registry lacks.
    pub(super) missing_unions: Vec<PlannedUnion>,
    /// Those that it has, where the site asks for signatures.
    pub(super) unions: Vec<PlannedSignature>,
}

/// What every strategy decides from.
#[derive(Clone, Copy)]
pub(super) struct Context<'a> {
    /// Everything that the plan is made from.
    pub(super) inputs: &'a PlanInputs<'a>,
    /// Where the images stand.
    pub(super) states: &'a CellStates<'a>,
    /// The nodes.
    pub(super) groups: &'a [NodeGroup<'a>],
    /// The driver image whose rollout this is.
    pub(super) image: &'a ImageName,
    /// The rollout as the definition says it.
    pub(super) spec: &'a RolloutSpec,
}

/// Decides every rollout of the definitions, those of needed images before those of their dependents.
pub(super) fn rollouts(
    inputs: &PlanInputs<'_>,
    states: &CellStates<'_>,
    differing: Option<&CellStates<'_>>,
    (chains, together): (&Chains, &Together<'_>),
) -> Rollouts {
    let images = &inputs.definitions.images;
    let wanted: Vec<(&ImageName, &RolloutSpec, RolloutTarget)> = chains
        .order()
        .iter()
        .filter_map(|name| images.get_key_value(name))
        .flat_map(|(name, image)| {
            image.spec.rollout.iter().map(move |spec| (name, spec, RolloutTarget::of(spec)))
        })
        .collect();
    let mut claims: HashMap<_, Vec<&ImageName>> = HashMap::new();
    for (image, _, target) in &wanted {
        if let Some(field) = target.field() {
            claims.entry(field).or_default().push(image);
        }
    }
    let labels = inputs.snapshot.daemon_sets.iter().chain(inputs.manifests.values().flatten().flatten());
    let labels = labels.flat_map(DaemonSetFacts::label_keys).chain(resource::label_keys(inputs));
    let groups = group_nodes(&inputs.snapshot.nodes, labels);

    let mut planned = Vec::new();
    let (mut missing_unions, mut unions) = (Vec::new(), Vec::new());
    let asks = asks_for_signatures(&inputs.definitions.site);
    for (image, spec, target) in &wanted {
        let mut context = Context { inputs, states, groups: &groups, image, spec };
        let claimed = target.field().and_then(|field| claims.get(&field));
        let mut decided = match claimed.filter(|images| images.len() > 1) {
            Some(images) => {
                Err(HoldReason::ClaimedTwice { images: images.iter().copied().cloned().collect() })
            }
            None => decide(&context, target),
        };
        // What is set already stays set while other images of its chain are built anew.
        let is_bound = !matches!(spec, RolloutSpec::PublishOnly { .. });
        if is_bound
            && let Some(seen) = differing
            && decided.as_ref().is_ok_and(Decided::goes_further)
        {
            context.states = seen;
            decided = decide(&context, target);
        }
        // A definition that neither a node nor a DaemonSet asks for, such as a built-in one, says nothing.
        if decided.as_ref().is_err_and(HoldReason::is_absence) && !inputs.matrix.calls_for(image) {
            continue;
        }
        missing_unions.extend(union::missing(&context, target));
        if asks {
            unions.extend(union::published(&context, target));
        }
        let Decided { decision, changes } = decided.unwrap_or_else(|hold| RolloutDecision::Hold(hold).into());
        planned.push(PlannedRollout { image: (*image).clone(), target: target.clone(), decision, changes });
    }
    let held = held_by_their_chain(&planned, together);
    for (index, why) in held {
        let Some(rollout) = planned.get_mut(index) else { continue };
        let named = |(image, _, target): &&(&ImageName, &RolloutSpec, RolloutTarget)| {
            **image == rollout.image && *target == rollout.target
        };
        let Some((image, spec, target)) = wanted.iter().find(named) else { continue };
        let none = without_images(differing.unwrap_or(states), image);
        let context = Context { inputs, states: &none, groups: &groups, image, spec };
        // A strategy in the middle of its steps knows best what it may leave as it is when there is no image.
        let Decided { decision, changes } = match decide(&context, target) {
            Ok(decided) => decided,
            Err(_) => RolloutDecision::Hold(why).into(),
        };
        (rollout.decision, rollout.changes) = (decision, changes);
    }
    Rollouts { planned, missing_unions, unions }
}

/// Rollouts that would change something while another of their chain is broken, by their place, with the reason.
fn held_by_their_chain(planned: &[PlannedRollout], together: &Together<'_>) -> Vec<(usize, HoldReason)> {
    let broken: Vec<(&PlannedRollout, &HoldReason)> = planned
        .iter()
        .filter(|rollout| rollout.target.strategy != Strategy::PublishOnly)
        .filter_map(|rollout| match &rollout.decision {
            RolloutDecision::Hold(why) if why.is_failure() => Some((rollout, why)),
            _ => None,
        })
        .collect();
    let held = |(index, rollout): (usize, &PlannedRollout)| {
        let changes =
            matches!(rollout.decision, RolloutDecision::Rewrite { .. } | RolloutDecision::Steps { .. });
        let (other, why) =
            broken.iter().find(|(other, _)| changes && together.are_linked(&other.image, &rollout.image))?;
        Some((index, HoldReason::Chain { image: other.image.clone(), why: why.to_string() }))
    };
    planned.iter().enumerate().filter_map(held).collect()
}

/// The states as if an image were not published for any kernel.
fn without_images<'a>(states: &CellStates<'a>, image: &ImageName) -> CellStates<'a> {
    let mut states = states.clone();
    for ((name, _), (_, state)) in &mut states {
        if *name == image && matches!(state, CellState::Published(_)) {
            *state = CellState::Absent("its chain is on hold".to_owned());
        }
    }
    states
}

/// The next steps that take a rollout by kernel back: the original DaemonSet is marked, gets its nodes back and then its
/// own node affinity, and the copies are deleted. Empty when all of that is done. A loop that runs meanwhile sees the
/// mark and does the same.
///
/// # Errors
/// Why it cannot be taken back: no such DaemonSet, or no such rollout in the definitions.
pub fn rollback_per_kernel(
    definitions: &Definitions,
    snapshot: &ClusterSnapshot,
    now: jiff::Timestamp,
    target: &RolloutTarget,
) -> Result<Vec<Change>, HoldReason> {
    let (matrix, observed, manifests) = (Matrix::default(), Observed::default(), Manifests::new());
    let inputs = PlanInputs {
        definitions,
        matrix: &matrix,
        observed: &observed,
        snapshot,
        manifests: &manifests,
        pullable: true,
        now,
    };
    let all = definitions.images.iter();
    let mut named = all.flat_map(|(name, image)| image.spec.rollout.iter().map(move |spec| (name, spec)));
    let (image, spec) =
        named.find(|(_, spec)| RolloutTarget::of(spec) == *target).ok_or(HoldReason::NotFound)?;
    let labels = snapshot.daemon_sets.iter().flat_map(DaemonSetFacts::label_keys);
    let groups = group_nodes(&snapshot.nodes, labels);
    let states = CellStates::new();
    per_kernel::rollback(&Context { inputs: &inputs, states: &states, groups: &groups, image, spec }, target)
}

fn decide(context: &Context<'_>, target: &RolloutTarget) -> Result<Decided, HoldReason> {
    match context.spec {
        RolloutSpec::Image { .. } => {
            image::decide(context, target).map(|decided| with_restarts(context, target, decided))
        }
        RolloutSpec::File { .. } => image::decide(context, target),
        RolloutSpec::PerKernel { .. } => per_kernel::decide(context, target),
        RolloutSpec::Union { .. } => union::decide(context, target),
        RolloutSpec::PublishOnly { resource } => publish_only::decide(context, *resource),
        RolloutSpec::CustomResource { resource, name } => resource::decide(context, *resource, name),
    }
}

/// Adds the pods that are to be restarted where the image is set and nothing else is to be done.
fn with_restarts(context: &Context<'_>, target: &RolloutTarget, mut decided: Decided) -> Decided {
    if matches!(decided.decision, RolloutDecision::AlreadySet { .. })
        && decided.changes.is_empty()
        && let Ok((found, live, container)) = daemon_set::original(context, target)
    {
        decided.changes = restart::restarts(context, found, live, container);
    }
    decided
}

#[cfg(test)]
mod tests;
