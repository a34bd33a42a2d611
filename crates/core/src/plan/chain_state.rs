//! The chains of each kernel, and whether they are complete.
//!
//! Drivers that are compiled against each other have to be replaced together: a new OFED refuses the symbols of the old
//! peer memory driver. Rollouts and kernel boots therefore treat an image as available only if all images of its chain that
//! the kernel calls for are available.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::{
    Observed, Outcome, PlanInputs, PlannedCell,
    guarantee::{RequiredKernels, admissible_image},
    outcome::{Key, waits_for},
};
use crate::{
    image::{ImageName, connected_components, need_edges},
    kernel::KernelTarget,
};

/// Reason why an image is unavailable for a kernel.
struct UnavailableReason {
    why: String,
    /// Whether the only reason is that the registry did not answer.
    unknown: bool,
}

/// State of all chains.
#[derive(Default)]
pub(super) struct ChainStates<'a> {
    /// Published images in an incomplete chain, with the reason.
    pub(super) incomplete: HashMap<Key<'a>, String>,
    /// Published or waiting images whose chain is unknown because the registry did not answer.
    pub(super) unknown: HashSet<Key<'a>>,
    /// Chain of each image that has one, named by the chain's first image in name order.
    chains: BTreeMap<&'a ImageName, &'a ImageName>,
}

impl<'a> ChainStates<'a> {
    /// Examines every chain on every kernel.
    pub(super) fn of(inputs: &PlanInputs<'a>, observed: &Observed, cells: &'a [PlannedCell]) -> Self {
        let images = &inputs.cells.definitions.images;
        if images.values().all(|image| image.spec.needs.is_empty()) {
            return Self::default();
        }
        let mut this = Self::default();
        let mut edges = Vec::new();
        for (target, members) in members(inputs, observed, cells) {
            let are_members = |(name, need): &(&ImageName, &ImageName)| {
                members.contains_key(name) && members.contains_key(need)
            };
            let member_edges: Vec<(&ImageName, &ImageName)> =
                need_edges(images).filter(are_members).collect();
            let chains = connected_components(members.keys().copied(), member_edges.iter().copied());
            for (name, chain) in &chains {
                let chain_members = members.iter().filter(|(other, _)| chains.get(*other) == Some(chain));
                let reasons = chain_members.filter_map(|(_, reason)| reason.as_ref());
                // A known reason takes precedence over a missing answer: `false` sorts first, and ties keep their order.
                let Some(reason) = reasons.min_by_key(|reason| reason.unknown) else { continue };
                if reason.unknown {
                    this.unknown.insert((*name, target));
                }
                let is_available = matches!(members.get(name), Some(None));
                if is_available {
                    let why = format!("its chain is incomplete: {}", reason.why);
                    this.incomplete.insert((*name, target), why);
                }
            }
            edges.extend(member_edges);
        }
        let linked: HashSet<&ImageName> = edges.iter().flat_map(|(a, b)| [*a, *b]).collect();
        this.chains = connected_components(linked, edges.iter().copied());
        this
    }

    /// Whether the image belongs to a chain.
    pub(super) fn has(&self, image: &ImageName) -> bool {
        self.chains.contains_key(image)
    }

    /// Whether both images belong to one chain.
    pub(super) fn are_linked(&self, a: &ImageName, b: &ImageName) -> bool {
        self.chains.get(a).is_some_and(|chain| self.chains.get(b) == Some(chain))
    }
}

/// Returns the images that each kernel calls for, except for images that are not meant for the kernel. Each image has the
/// reason why it is unavailable, if any.
fn members<'a>(
    inputs: &PlanInputs<'_>,
    observed: &Observed,
    cells: &'a [PlannedCell],
) -> BTreeMap<&'a KernelTarget, BTreeMap<&'a ImageName, Option<UnavailableReason>>> {
    let mut members: BTreeMap<&KernelTarget, BTreeMap<&ImageName, Option<UnavailableReason>>> =
        BTreeMap::new();
    // Cells that are unavailable only because the registry did not answer. Needs come before their dependents in `cells`.
    let mut unanswered: HashSet<Key<'_>> = HashSet::new();
    for planned in cells {
        let PlannedCell { image, target, outcome, .. } = planned;
        let subject = planned.subject();
        let unavailable = |why, unknown| Some(UnavailableReason { why, unknown });
        let reason = match outcome {
            Outcome::UpToDate { cell, published, .. } => {
                let admissible = admissible_image(
                    inputs,
                    observed,
                    image,
                    published,
                    &cell.reference,
                    RequiredKernels::Kernel(target),
                );
                admissible.err().and_then(|why| unavailable(format!("{subject}: {why}"), false))
            }
            Outcome::Build { .. } => unavailable(format!("{subject} is to be built"), false),
            Outcome::Skipped { why } if why.is_not_applicable() => continue,
            // If all needs are unanswered, the missing answer is the only reason for this cell too.
            Outcome::Waiting { needs } => unavailable(
                format!("{subject} {}", waits_for(needs)),
                needs.iter().all(|need| unanswered.contains(&(need, target))),
            ),
            Outcome::Unknown { .. } => unavailable(format!("{subject}: {}", outcome.absence_reason()), true),
            Outcome::Conflict { .. } | Outcome::Failed { .. } | Outcome::Skipped { .. } => {
                unavailable(format!("{subject}: {}", outcome.absence_reason()), false)
            }
        };
        if reason.as_ref().is_some_and(|reason| reason.unknown) {
            unanswered.insert((image, target));
        }
        members.entry(target).or_default().insert(image, reason);
    }
    members
}

#[cfg(test)]
mod tests;
