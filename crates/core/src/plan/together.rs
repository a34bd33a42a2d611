//! Pure: what goes out together: the images of a chain, on each kernel.
//!
//! Drivers that are compiled against one another have to be replaced together: a new OFED beside the old peer memory
//! refuses its symbols. So an image counts as there, for rollouts and for nodes that are to boot a kernel, only when all
//! of its chain that is called for on the kernel is.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::{
    Conflict, HeldBack, Matrix, NeedReason, Plan, PlanInputs, SkipReason, Skipped, Waiting,
    decide::{CellState, CellStates},
    rollout::passes,
};
use crate::{
    image::{ImageName, Need, connected},
    kernel::KernelTarget,
};

type Key<'a> = (&'a ImageName, &'a KernelTarget);

/// The matrix without waiting for what will not come: who waits for an image that is in conflict or failed is skipped.
/// `None` where nobody does.
pub(super) fn without_vain_hope(matrix: &Matrix, plan: &Plan) -> Option<Matrix> {
    let conflict = |Conflict { cell, reference, theirs, remedy: _ }: &Conflict| {
        let why = NeedReason::Conflict { reference: reference.clone(), theirs: *theirs };
        ((cell.image.clone(), cell.target.clone()), why)
    };
    let failure = |HeldBack { cell, at: _, message }: &HeldBack| {
        ((cell.image.clone(), cell.target.clone()), NeedReason::Failed { detail: message.clone() })
    };
    if matrix.waiting.is_empty() {
        return None;
    }
    let mut lost: HashMap<(ImageName, KernelTarget), NeedReason> =
        plan.conflicts.iter().map(conflict).chain(plan.held_back.iter().map(failure)).collect();
    let mut refined = Matrix { waiting: Vec::new(), ..matrix.clone() };
    // They stand in dependency order, so that a reason reaches the end of the chain.
    for waiting in &matrix.waiting {
        let in_vain = waiting.needs.iter().find_map(|need| {
            let why = lost.get(&(need.clone(), waiting.target.clone()))?;
            Some(SkipReason::Need { need: need.clone(), why: why.clone() })
        });
        let Some(why) = in_vain else {
            refined.waiting.push(waiting.clone());
            continue;
        };
        let Waiting { image, target, needs: _, nodes, announced_by } = waiting.clone();
        lost.insert((image.clone(), target.clone()), NeedReason::Skipped { why: Box::new(why.clone()) });
        refined.skipped.push(Skipped { image, target, why, nodes, announced_by });
    }
    refined.skipped.sort_by(|a, b| (&a.image, &a.target).cmp(&(&b.image, &b.target)));
    Some(refined)
}

/// What an image lacks to be complete on a kernel.
struct Lack {
    why: String,
    /// Is it only that the registry gave no answer?
    unknown: bool,
}

/// How the chains stand.
#[derive(Default)]
pub(super) struct Together<'a> {
    /// Published images whose chain is not complete, with the reason.
    incomplete: HashMap<Key<'a>, String>,
    /// Those, and waiting ones, about whose chain the registry gave no answer.
    pub(super) unknown: HashSet<Key<'a>>,
    /// The chain of each image that has one: its first image by name.
    chains: BTreeMap<&'a ImageName, &'a ImageName>,
}

impl<'a> Together<'a> {
    /// Looks at every chain on every kernel.
    pub(super) fn of(inputs: &PlanInputs<'a>, states: &CellStates<'a>, plan: &Plan) -> Self {
        let images = &inputs.definitions.images;
        if images.values().all(|image| image.spec.needs.is_empty()) {
            return Self::default();
        }
        let unknown: HashSet<Key<'_>> =
            plan.unknown.iter().map(|found| (&found.cell.image, &found.cell.target)).collect();
        let mut this = Self::default();
        let mut edges = Vec::new();
        for (target, members) in members(inputs, states, &unknown) {
            let needs = members.keys().filter_map(|name| Some((*name, images.get(*name)?)));
            let here: Vec<(&ImageName, &ImageName)> = needs
                .flat_map(|(name, image)| {
                    let needs = image.spec.needs.iter().filter_map(Need::image);
                    needs.map(move |need| (name, need))
                })
                .filter(|(_, need)| members.contains_key(need))
                .collect();
            let chains = connected(members.keys().copied(), here.iter().copied());
            for (name, chain) in &chains {
                let of_chain = || members.iter().filter(|(other, _)| chains.get(*other) == Some(chain));
                let lacking = || of_chain().filter_map(|(other, lack)| Some((*other, lack.as_ref()?)));
                let Some((_, first)) = lacking().find(|(_, lack)| !lack.unknown).or_else(|| lacking().next())
                else {
                    continue;
                };
                if first.unknown {
                    this.unknown.insert((*name, target));
                }
                if matches!(members.get(name), Some(None)) {
                    let why = format!("its chain is not complete: {}", first.why);
                    this.incomplete.insert((*name, target), why);
                }
            }
            edges.extend(here);
        }
        let linked: HashSet<&ImageName> = edges.iter().flat_map(|(a, b)| [*a, *b]).collect();
        this.chains = connected(linked, edges.iter().copied());
        this
    }

    /// The states as rollouts and nodes see them; `None` where that is no difference.
    pub(super) fn seen(&self, states: &CellStates<'a>) -> Option<CellStates<'a>> {
        if self.incomplete.is_empty() {
            return None;
        }
        let mut seen = states.clone();
        for (key, why) in &self.incomplete {
            if let Some((_, state)) = seen.get_mut(key) {
                *state = CellState::Absent(why.clone());
            }
        }
        Some(seen)
    }

    /// Are these two of one chain?
    pub(super) fn are_linked(&self, a: &ImageName, b: &ImageName) -> bool {
        self.chains.get(a).is_some_and(|chain| self.chains.get(b) == Some(chain))
    }
}

/// The images that are called for on each kernel and are meant for it, with what they lack.
fn members<'a>(
    inputs: &PlanInputs<'a>,
    states: &CellStates<'a>,
    unknown: &HashSet<Key<'_>>,
) -> BTreeMap<&'a KernelTarget, BTreeMap<&'a ImageName, Option<Lack>>> {
    let mut members: BTreeMap<&KernelTarget, BTreeMap<&ImageName, Option<Lack>>> = BTreeMap::new();
    let mut add =
        |(image, target): Key<'a>, lack| drop(members.entry(target).or_default().insert(image, lack));
    for (key, (cell, state)) in states {
        let lack = match state {
            CellState::Published(found) => {
                let fit = passes(inputs, key.0, found, &found.pinned(&cell.reference), key.1);
                fit.err().map(|why| Lack { why: format!("{}: {why}", cell.subject()), unknown: false })
            }
            CellState::Building => {
                Some(Lack { why: format!("{} is to be built", cell.subject()), unknown: false })
            }
            CellState::Absent(why) => {
                Some(Lack { why: format!("{}: {why}", cell.subject()), unknown: unknown.contains(key) })
            }
        };
        add(*key, lack);
    }
    for skipped in inputs.matrix.skipped.iter().filter(|skipped| !skipped.why.is_finding()) {
        let Skipped { image, target, why, .. } = skipped;
        let lack = Lack { why: format!("{image} for {}: {why}", target.release), unknown: false };
        add((image, target), Some(lack));
    }
    // Who waits for nothing but the registry's answer lacks no more than that. Needs stand before dependents.
    let mut silent: HashSet<Key<'_>> = HashSet::new();
    for waiting in &inputs.matrix.waiting {
        let Waiting { image, target, needs, .. } = waiting;
        let is_silent =
            |need: &ImageName| unknown.contains(&(need, target)) || silent.contains(&(need, target));
        let unknown = needs.iter().all(is_silent);
        if unknown {
            silent.insert((image, target));
        }
        let lack = Lack { why: format!("{image} for {} {}", target.release, waiting.why()), unknown };
        add((image, target), Some(lack));
    }
    members
}

#[cfg(test)]
mod tests;
