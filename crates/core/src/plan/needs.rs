//! Finds the needs of a cell: published, still to be published, or unavailable.

use std::collections::BTreeMap;

use super::{
    Cell, CellInputs, CellNeed, NeedReason, Outcome, PlannedCell, Published, SkipReason,
    new_cell::{CellDraft, CellRequest, looked_up},
};
use crate::{
    image::{DriverImage, ImageName, ImageReference, Need},
    kernel::KernelTarget,
    template::Templates,
};

/// Images found in the registry.
type PublishedImages = BTreeMap<ImageReference, Published>;

/// Computes the cell of one image for one kernel target, without any nodes. `templates` caches the parsed templates.
/// Needed images must be among the `published` ones.
pub fn cell_for(
    inputs: &CellInputs<'_>,
    published: &PublishedImages,
    templates: &mut Templates,
    image: &DriverImage,
    target: &KernelTarget,
) -> Result<Cell, SkipReason> {
    let request = CellRequest { inputs: *inputs, image, target };
    let cell = request.cell_alone(published, templates, &mut Vec::new())?;
    match &cell.refused {
        Some(why @ (SkipReason::UnknownSystem { .. } | SkipReason::Unvouched { .. })) => Err(why.clone()),
        _ => Ok(cell),
    }
}

impl<'a> CellRequest<'a, '_> {
    /// Returns the version of each need. `drafted` returns the drafts, for the same target, of images that come earlier in
    /// the order. The error for a need without a draft is never shown: [`Self::needs`] fails first, with the actual reason.
    pub(super) fn need_versions<'d>(
        &self,
        drafted: impl Fn(&ImageName) -> Option<&'d CellDraft<'d>>,
    ) -> Result<BTreeMap<&'a str, String>, SkipReason> {
        let version = |need: &'a Need| {
            let name = need.name();
            let version = match need {
                Need::Tree { .. } => self.tree(name).map(|tree| tree.version),
                Need::Image(_) => {
                    drafted(name).map(|draft| draft.version().to_owned()).ok_or(NeedReason::Undefined)
                }
            };
            Ok((name.as_str(), version.map_err(|why| need_error(name, why))?))
        };
        self.image.spec.needs.iter().map(version).collect()
    }

    /// Returns all needs of the image, or the image's outcome if some of them are unavailable. `planned` returns the cells,
    /// for the same target, of images that come earlier in the order.
    pub(super) fn needs<'p>(
        &self,
        published: &PublishedImages,
        planned: impl Fn(&ImageName) -> Option<&'p PlannedCell>,
    ) -> Result<Vec<CellNeed>, Outcome> {
        let Self { inputs, image, .. } = self;
        // A kernel out of the image's range takes precedence over missing needs.
        if !image.spec.needs.is_empty() {
            self.family()?;
        }
        let mut needs = Vec::with_capacity(image.spec.needs.len());
        let (mut missing, mut failed) = (Vec::new(), None);
        for need in &image.spec.needs {
            let result = match need {
                Need::Tree { name, .. } => self.tree(name).map(Some),
                Need::Image(name) => match planned(name) {
                    Some(cell) => need_from(published, &cell.outcome),
                    None if inputs.definitions.images.contains_key(name) => Err(NeedReason::Circle),
                    None => Err(NeedReason::Undefined),
                },
            };
            match result {
                Ok(Some(need)) => needs.push(need),
                Ok(None) => missing.push(need.name().clone()),
                // Reasons from the definitions take precedence over failures of earlier builds.
                Err(why) if why.is_build_failure() => failed = failed.or(Some(need_error(need.name(), why))),
                Err(why) => return Err(need_error(need.name(), why).into()),
            }
        }
        match failed {
            Some(why) => Err(why.into()),
            None if missing.is_empty() => Ok(needs),
            None => Err(Outcome::Waiting { needs: missing }),
        }
    }

    /// Returns the cell of an image that is requested alone. `dependents` has the images that need it, directly or
    /// through other needs.
    fn cell_alone(
        &self,
        published: &PublishedImages,
        templates: &mut Templates,
        dependents: &mut Vec<&'a ImageName>,
    ) -> Result<Cell, SkipReason> {
        let Self { inputs, image, .. } = *self;
        dependents.push(&image.metadata.name);
        let mut needs = Vec::with_capacity(image.spec.needs.len());
        for need in &image.spec.needs {
            let name = need.name();
            let need_input = match need {
                Need::Tree { .. } => self.tree(name).map_err(|why| need_error(name, why))?,
                Need::Image(_) if dependents.contains(&name) => {
                    return Err(need_error(name, NeedReason::Circle));
                }
                Need::Image(_) => {
                    let image = inputs.definitions.images.get(name);
                    let image = image.ok_or_else(|| need_error(name, NeedReason::Undefined))?;
                    let skipped = |why| need_error(name, NeedReason::Skipped { why: Box::new(why) });
                    let request = Self { image, ..*self };
                    let cell = request.cell_alone(published, templates, dependents).map_err(skipped)?;
                    let exposed = exposed_by(published, &cell).map_err(|why| need_error(name, why))?;
                    let not_published = NeedReason::NotPublished { reference: cell.reference.clone() };
                    exposed.ok_or_else(|| need_error(name, not_published))?
                }
            };
            needs.push(need_input);
        }
        dependents.pop();
        let versions = needs.iter().map(|need| (need.name.as_str(), need.version.clone())).collect();
        let draft = self.draft(templates, &versions)?;
        self.cell(draft, needs)
    }

    fn tree(&self, need: &ImageName) -> Result<CellNeed, NeedReason> {
        let Self { inputs, image, target } = *self;
        let key = (image.metadata.name.clone(), need.clone(), target.clone());
        let exposed = looked_up(&inputs.resolved.trees, &key, "its tree was not looked up")
            .map_err(|detail| NeedReason::Tree { detail })?;
        // A tree from a host has no version: use its digest.
        let version = exposed.short().to_owned();
        Ok(CellNeed { name: need.clone(), version, exposed: exposed.clone(), image: None })
    }
}

/// Returns the need that an image with this outcome provides; `None` where the image will only be published later.
fn need_from(published: &PublishedImages, outcome: &Outcome) -> Result<Option<CellNeed>, NeedReason> {
    let exposed = outcome.cell().map(|cell| exposed_by(published, cell)).transpose()?.flatten();
    if exposed.is_some() {
        return Ok(exposed);
    }
    match outcome {
        Outcome::Skipped { why } => Err(NeedReason::Skipped { why: Box::new(why.clone()) }),
        // Do not wait for an image that will not be published.
        Outcome::Conflict { reference, theirs, .. } => {
            Err(NeedReason::Conflict { reference: reference.clone(), theirs: *theirs })
        }
        Outcome::Failed { message, .. } => Err(NeedReason::Failed { detail: message.clone() }),
        Outcome::Waiting { .. }
        | Outcome::Build { .. }
        | Outcome::UpToDate { .. }
        | Outcome::Unknown { .. } => Ok(None),
    }
}

fn need_error(need: &ImageName, why: NeedReason) -> SkipReason {
    SkipReason::Need { need: need.clone(), why }
}

/// Returns the need that a cell's image provides, if it is published with exactly these inputs.
fn exposed_by(published: &PublishedImages, cell: &Cell) -> Result<Option<CellNeed>, NeedReason> {
    let image = published.get(&cell.reference).and_then(|image| image.for_architecture(cell.target.arch));
    let Some(image) = image.filter(|image| image.is_of(cell)) else { return Ok(None) };
    let reference = image.pinned(&cell.reference);
    let Some(exposed) = image.exposed.clone() else { return Err(NeedReason::NothingExposed { reference }) };
    let (name, version) = (cell.image.clone(), cell.version.clone());
    Ok(Some(CellNeed { name, version, exposed, image: Some(reference) }))
}
