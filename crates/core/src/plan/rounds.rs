//! The rounds of lookups between the matrix and the plan.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use super::{
    Cell, Observed, Outcome, Plan, PlannedCell, PlannedSignature, PlannedUnion,
    chain_state::ChainStates,
    decide::{compare, decide_build},
    host_drivers::host_drivers,
    matrix::{FixedParts, find},
    new_cell::CellRequest,
    outcome::{CellLookup, Key},
    readiness,
    rollout::RequestedRollouts,
    signatures::{images_to_sign, signatures_to_look_up},
};
use crate::{
    image::{ImageName, ImageReference, InputHash},
    kernel::KernelTarget,
};

/// Matrix whose cells are compared with the registry. An [`Outcome::Build`] is provisional, and so is the outcome of each
/// dependent image.
pub struct ComparedMatrix<'a> {
    pub(super) fixed: FixedParts<'a>,
    pub(super) rows: Vec<Vec<PlannedCell>>,
}

impl<'a> ComparedMatrix<'a> {
    /// Round 2: lists the input hash of each cell to build. An earlier failure with the same inputs may prevent the build.
    pub fn failures_to_look_up(&self) -> BTreeSet<InputHash> {
        self.builds().map(|cell| cell.input_hash).collect()
    }

    /// Round 2: lists the published image of each conflict by digest. Its inputs explain the conflict.
    pub fn conflicts_to_look_up(&self, observed: &Observed) -> BTreeSet<ImageReference> {
        let conflicts = self.rows.iter().flatten().filter_map(|planned| match &planned.outcome {
            Outcome::Conflict { cell, reference, .. } => {
                Some(observed.image(reference, cell.target.arch)?.pinned(reference))
            }
            _ => None,
        });
        conflicts.collect()
    }

    /// Round 2: lists the images of conflicts. Products of a build in their sources explain a conflict.
    pub fn products_to_look_up(&self) -> BTreeSet<&ImageName> {
        let planned = self.rows.iter().flatten();
        let conflicts = planned.filter(|planned| matches!(planned.outcome, Outcome::Conflict { .. }));
        conflicts.map(|planned| &planned.image).collect()
    }

    /// Round 2: lists the kernel of each cell to build. Missing headers prevent the build.
    pub fn headers_to_look_up(&self) -> BTreeSet<KernelTarget> {
        self.builds().map(|cell| cell.target.clone()).collect()
    }

    /// Round 2: lists the published image of each cell by digest. Empty if the site's settings need no signatures.
    pub fn signatures_to_look_up(&self) -> BTreeSet<ImageReference> {
        signatures_to_look_up(&self.fixed.inputs, self.rows.iter().flatten().filter_map(published))
    }

    fn builds(&self) -> impl Iterator<Item = &Arc<Cell>> {
        self.rows.iter().flatten().filter_map(|planned| match &planned.outcome {
            Outcome::Build { cell, .. } => Some(cell),
            _ => None,
        })
    }

    /// Decides the outcome of each cell.
    pub fn decide(self, observed: &Observed) -> DecidedMatrix<'a> {
        let Self { fixed, rows } = self;
        let mut decided: Vec<Vec<PlannedCell>> = Vec::with_capacity(rows.len());
        for row in rows {
            let cell = |planned: PlannedCell| {
                let outcome = decide(&fixed, observed, &planned, &decided).unwrap_or(planned.outcome);
                PlannedCell { outcome, ..planned }
            };
            let row = row.into_iter().map(cell).collect();
            decided.push(row);
        }
        let cells = decided.into_iter().flatten().collect();
        let rollouts = RequestedRollouts::of(&fixed.inputs, &fixed.chains);
        let mut decided = DecidedMatrix { fixed, cells, rollouts, unions: Vec::new() };
        decided.unions = decided.possible_unions(observed);
        decided
    }
}

/// Returns the final outcome of a cell. `None` for an outcome that the answers of round 2 do not change.
/// `earlier` has the cells of the images that come earlier in the order.
fn decide(
    fixed: &FixedParts<'_>,
    observed: &Observed,
    planned: &PlannedCell,
    earlier: &[Vec<PlannedCell>],
) -> Option<Outcome> {
    let (inputs, target) = (&fixed.inputs, &planned.target);
    let image = inputs.definitions().images.get(&planned.image)?;
    match &planned.outcome {
        Outcome::Build { cell, why, .. } => {
            Some(decide_build(inputs, observed, image, Arc::clone(cell), why.clone()))
        }
        Outcome::Conflict { cell, .. } => Some(compare(observed, image, cell)),
        Outcome::Waiting { .. } | Outcome::Skipped { .. } => {
            let need = |need: &_| find(earlier, (need, target), PlannedCell::key);
            CellRequest { inputs: inputs.cells, image, target }.needs(&observed.published, need).err()
        }
        _ => None,
    }
}

/// Matrix whose cells have their final outcomes.
pub struct DecidedMatrix<'a> {
    fixed: FixedParts<'a>,
    cells: Vec<PlannedCell>,
    rollouts: RequestedRollouts<'a>,
    /// Union images that the rollouts may ask for.
    unions: Vec<PlannedUnion>,
}

impl DecidedMatrix<'_> {
    /// Round 3: lists all union images that rollouts may ask for. Their names follow from the outcomes of the cells.
    pub fn unions_to_look_up(&self) -> BTreeSet<ImageReference> {
        self.unions.iter().map(|union| union.reference.clone()).collect()
    }

    /// Round 4: lists each published union image by digest. Empty if the site's settings need no signatures.
    pub fn union_signatures_to_look_up(&self, observed: &Observed) -> BTreeSet<ImageReference> {
        signatures_to_look_up(
            &self.fixed.inputs,
            self.unions.iter().filter_map(|union| published_union(observed, union)),
        )
    }

    /// Makes the plan. It needs no further lookup.
    pub fn plan(self, observed: &Observed) -> Plan {
        let inputs = &self.fixed.inputs;
        let (rollouts, nodes, unions) = self.with_chains(observed, |cells, chain_states| {
            let (rollouts, unions) = self.rollouts.decide_all(inputs, observed, cells, chain_states);
            let cells = CellLookup { unavailable: Some(&chain_states.incomplete), ..cells };
            let nodes = readiness::nodes(inputs, observed, cells, &self.rollouts, &rollouts);
            (rollouts, nodes, unions)
        });
        let published_unions = unions.iter().filter_map(|union| published_union(observed, union));
        let signable = published_unions.chain(self.cells.iter().filter_map(published));
        let signatures = images_to_sign(inputs, observed, signable);
        let is_missing = |union: &PlannedUnion| {
            observed.lookup_error(&union.reference).is_none()
                && observed.image(&union.reference, union.architecture).is_none()
        };
        let unused_announcements = inputs.announced.unused.clone();
        let FixedParts { skipped_nodes, unused_images, own_drivers, .. } = self.fixed;
        Plan {
            signatures,
            skipped_nodes,
            unused_images,
            own_drivers,
            host_drivers: host_drivers(inputs.definitions(), &inputs.snapshot.nodes, &nodes),
            unions: unions.into_iter().filter(is_missing).collect(),
            unused_announcements,
            rollouts,
            nodes,
            cells: self.cells,
        }
    }

    fn possible_unions(&self, observed: &Observed) -> Vec<PlannedUnion> {
        self.with_chains(observed, |cells, chain_states| {
            self.rollouts.possible_unions(&self.fixed.inputs, observed, cells, chain_states)
        })
    }

    /// Calls a function with the cells and the state of their chains.
    fn with_chains<T>(
        &self,
        observed: &Observed,
        call: impl FnOnce(CellLookup<'_>, &ChainStates<'_>) -> T,
    ) -> T {
        let chain_states = ChainStates::of(&self.fixed.inputs, observed, &self.cells);
        let index: HashMap<Key<'_>, usize> =
            self.cells.iter().enumerate().map(|(position, cell)| (cell.key(), position)).collect();
        let (all, unknown) = (self.cells.as_slice(), &chain_states.unknown);
        call(CellLookup { all, index: &index, unavailable: None, unknown, held_image: None }, &chain_states)
    }
}

/// Returns the image of a cell by digest, if it is published.
fn published(planned: &PlannedCell) -> Option<PlannedSignature> {
    let Outcome::UpToDate { cell, published, .. } = &planned.outcome else { return None };
    Some(PlannedSignature { image: cell.image.clone(), reference: published.pinned(&cell.reference) })
}

/// Returns a union image by digest, if it is published with exactly these members.
fn published_union(observed: &Observed, union: &PlannedUnion) -> Option<PlannedSignature> {
    let published = observed.image(&union.reference, union.architecture)?;
    let reference = published.pinned(&union.reference);
    (published.input_hash == Some(union.input_hash))
        .then(|| PlannedSignature { image: union.image.clone(), reference })
}

#[cfg(test)]
mod tests;
