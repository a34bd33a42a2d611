//! Plans the cell of one image and one kernel that a command names.

use std::collections::{BTreeMap, BTreeSet};

use farrier_core::{
    image::{Chains, Definitions, DriverImage, ImageName},
    kernel::KernelTarget,
    plan::{self, Cell, CellInputs, Resolved, SkipReason},
    template::Templates,
};

use crate::{
    images::{look_up_root_fs, look_up_sources},
    resolve::resolve,
    services::{BuildError, BuildServices, Result, image_location},
};

/// Returns the cell of one image for one kernel. Its needs must be published.
pub async fn plan_cell(services: &BuildServices, name: &ImageName, target: &KernelTarget) -> Result<Cell> {
    let images = in_build_order(&services.definitions, find_image(&services.definitions, name)?);
    let resolved = resolve_target(services, &images, target).await;
    let location = image_location(
        services.images.needs_from.as_ref().map_or(&services.images.location, |from| &from.location),
    );
    let (mut published, mut templates) = (BTreeMap::new(), Templates::default());
    let subject = || format!("{name} for {target}");
    for image in images {
        let inputs =
            CellInputs { definitions: &services.definitions, resolved: &resolved, location: &location };
        match plan::cell_for(&inputs, &published, &mut templates, image, target) {
            Ok(cell) if image.metadata.name == *name => return Ok(cell),
            Ok(needed) => {
                if let Some(found) = services.look_up(&needed.reference).await? {
                    published.insert(needed.reference, found);
                }
            }
            Err(reason) if image.metadata.name == *name => {
                return Err(not_planned(subject(), reason, &resolved));
            }
            // The image that needs this image reports the reason.
            Err(_) => {}
        }
    }
    Err(BuildError::definition_gone(&subject()))
}

/// Returns the Dockerfile of one image for one kernel. Needs may be unpublished.
pub async fn dockerfile(services: &BuildServices, name: &ImageName, target: &KernelTarget) -> Result<String> {
    let image = find_image(&services.definitions, name)?;
    let resolved = resolve_target(services, &[image], target).await;
    let location = image_location(&services.images.location);
    let inputs = CellInputs { definitions: &services.definitions, resolved: &resolved, location: &location };
    plan::dockerfile_for(&inputs, image, target)
        .map_err(|reason| not_planned(format!("{name} for {target}"), reason, &resolved))
}

/// Error for a cell that cannot be built: `Unresolved` if an unreachable system may be the cause, so that a retry can help.
fn not_planned(subject: String, reason: SkipReason, resolved: &Resolved) -> BuildError {
    if resolved.unreachable && !reason.is_not_applicable() {
        BuildError::Unresolved(subject, reason)
    } else {
        BuildError::Skipped(subject, reason)
    }
}

async fn resolve_target(
    services: &BuildServices,
    images: &[&DriverImage],
    target: &KernelTarget,
) -> Resolved {
    let targets = BTreeSet::from([target.clone()]);
    let mut resolved = resolve(services, images, &targets).await;
    look_up_sources(services, images, &targets, &mut resolved).await;
    look_up_root_fs(services, images, &targets, &mut resolved).await;
    resolved
}

pub(super) fn find_image<'a>(definitions: &'a Definitions, name: &ImageName) -> Result<&'a DriverImage> {
    definitions.images.get(name).ok_or_else(|| BuildError::no_image(name, definitions))
}

/// Returns the images that an image needs, directly or indirectly, in build order, followed by the image itself.
pub(super) fn in_build_order<'a>(
    definitions: &'a Definitions,
    image: &'a DriverImage,
) -> Vec<&'a DriverImage> {
    let mut images = vec![image];
    add_needs(definitions, &mut images);
    let chains = Chains::of(&definitions.images);
    images.sort_by_key(|image| chains.order().iter().position(|name| *name == image.metadata.name));
    images.retain(|needed| needed.metadata.name != image.metadata.name);
    images.push(image);
    images
}

/// Adds the images that the given ones need, directly or indirectly.
pub fn add_needs<'a>(definitions: &'a Definitions, images: &mut Vec<&'a DriverImage>) {
    let mut next = 0;
    while let Some(image) = images.get(next) {
        next += 1;
        let needs = image.spec.needs.iter().filter_map(|need| definitions.images.get(need.image()?));
        let new: Vec<&DriverImage> = needs
            .filter(|need| images.iter().all(|image| image.metadata.name != need.metadata.name))
            .collect();
        images.extend(new);
    }
}

#[cfg(test)]
#[path = "stored_inputs_tests.rs"]
mod tests;
