//! Pure: what a cell is compiled against: found as published, waited for, or lacking.

use std::{collections::HashMap, sync::Arc};

use super::{
    Cell, CellInputs, CellNeed, NeedReason, SkipReason,
    cell::{cell_with, family_for},
};
use crate::{
    image::{DriverImage, ImageName, Need},
    kernel::KernelTarget,
    template::Templates,
};

/// What became of an image for a target.
pub(super) enum Outcome {
    Cell(Arc<Cell>),
    Waiting,
    Skipped(SkipReason),
}

/// What became of images that stand before the one in question.
pub(super) type Outcomes<'a> = HashMap<(&'a ImageName, &'a KernelTarget), Outcome>;

/// The needs of one image for one target.
pub(super) enum NeedsFound {
    /// All there.
    All(Vec<CellNeed>),
    /// These are not there yet.
    Missing(Vec<ImageName>),
}

/// Looks for everything that an image is compiled against.
pub(super) fn find(
    inputs: &CellInputs<'_>,
    outcomes: &Outcomes<'_>,
    image: &DriverImage,
    target: &KernelTarget,
) -> Result<NeedsFound, SkipReason> {
    // Of an image that is not meant for the kernel this is the reason, not what it needs.
    if !image.spec.needs.is_empty() {
        family_for(inputs.definitions, image, target)?;
    }
    let mut found = Vec::with_capacity(image.spec.needs.len());
    let mut missing = Vec::new();
    for need in &image.spec.needs {
        let found_need = match need {
            Need::Tree { name, .. } => tree(inputs, image, name, target).map(Some),
            Need::Image(name) => match outcomes.get(&(name, target)) {
                Some(Outcome::Cell(cell)) => exposed_by(inputs, cell),
                Some(Outcome::Waiting) => Ok(None),
                Some(Outcome::Skipped(why)) => Err(NeedReason::Skipped { why: Box::new(why.clone()) }),
                None if inputs.definitions.images.contains_key(name) => Err(NeedReason::Circle),
                None => Err(NeedReason::Undefined),
            },
        };
        match found_need.map_err(|why| lacks(need.name(), why))? {
            Some(found_need) => found.push(found_need),
            None => missing.push(need.name().clone()),
        }
    }
    Ok(if missing.is_empty() { NeedsFound::All(found) } else { NeedsFound::Missing(missing) })
}

/// The needs of an image that is asked for by itself, `above` it the images that asked for it as their need.
pub(super) fn alone<'a>(
    inputs: &CellInputs<'a>,
    templates: &mut Templates,
    image: &'a DriverImage,
    target: &KernelTarget,
    above: &mut Vec<&'a ImageName>,
) -> Result<Vec<CellNeed>, SkipReason> {
    above.push(&image.metadata.name);
    let mut found = Vec::with_capacity(image.spec.needs.len());
    for need in &image.spec.needs {
        let name = need.name();
        let found_need = match need {
            Need::Tree { .. } => tree(inputs, image, name, target).map_err(|why| lacks(name, why))?,
            Need::Image(_) if above.contains(&name) => return Err(lacks(name, NeedReason::Circle)),
            Need::Image(_) => {
                let needed = inputs.definitions.images.get(name);
                let needed = needed.ok_or_else(|| lacks(name, NeedReason::Undefined))?;
                let skipped = |why| lacks(name, NeedReason::Skipped { why: Box::new(why) });
                let cell = alone(inputs, templates, needed, target, above)
                    .and_then(|needs| cell_with(inputs, templates, needed, target, needs))
                    .map_err(skipped)?;
                let exposed = exposed_by(inputs, &cell).map_err(|why| lacks(name, why))?;
                let not_published = NeedReason::NotPublished { reference: cell.reference.clone() };
                exposed.ok_or_else(|| lacks(name, not_published))?
            }
        };
        found.push(found_need);
    }
    above.pop();
    Ok(found)
}

fn lacks(need: &ImageName, why: NeedReason) -> SkipReason {
    SkipReason::Need { need: need.clone(), why }
}

/// What a cell's image exposes, once it is published with these very inputs.
fn exposed_by(inputs: &CellInputs<'_>, cell: &Cell) -> Result<Option<CellNeed>, NeedReason> {
    let Some(found) = inputs.published.get(&cell.reference) else { return Ok(None) };
    if found.input_hash != Some(cell.input_hash) {
        return Ok(None);
    }
    let Some(exposed) = &found.exposed else {
        return Err(NeedReason::NothingExposed { reference: found.pinned(&cell.reference) });
    };
    let image = Some(found.pinned(&cell.reference));
    let (name, version, exposed) = (cell.image.clone(), cell.version.clone(), exposed.clone());
    Ok(Some(CellNeed { name, version, exposed, image }))
}

fn tree(
    inputs: &CellInputs<'_>,
    image: &DriverImage,
    need: &ImageName,
    target: &KernelTarget,
) -> Result<CellNeed, NeedReason> {
    let key = (image.metadata.name.clone(), need.clone(), target.clone());
    match inputs.trees.get(&key) {
        Some(Ok(exposed)) => {
            let (name, exposed) = (need.clone(), exposed.clone());
            // What a host has says no version.
            let version = exposed.hex().chars().take(12).collect();
            Ok(CellNeed { name, version, exposed, image: None })
        }
        Some(Err(detail)) => Err(NeedReason::Tree { detail: detail.clone() }),
        None => Err(NeedReason::Tree { detail: "its tree was not looked up".to_owned() }),
    }
}
