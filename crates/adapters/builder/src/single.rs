//! Builds one image for one kernel by name, after the images that it needs.

use farrier_core::{
    image::{Digest, DriverImage, ImageName, OnConflict, UnknownPolicy},
    kernel::KernelTarget,
    plan::{self, Cell},
};
use kmod::Verdict;

use super::{
    cell::{find_image, in_build_order, plan_cell},
    cell_build::CellBuild,
    failures::{attempt, known_failures},
    pipeline::{BuildOptions, Built},
};
use crate::{
    images::{StoredImage, build_products},
    services::{BuildError, BuildServices, Result},
};

/// Result of [`build_one`].
#[derive(Debug)]
pub struct BuildOutcome {
    /// The image and kernel, with names and input hash.
    pub cell: Cell,
    /// The image's digest.
    pub digest: Digest,
    /// The build; `None` if an image with the same inputs is already published.
    pub built: Option<Built>,
}

/// Builds one image for one kernel and, with `push`, publishes it under its tags. With `push`, needed images that are
/// not published yet are built and published first; without, they must already be published.
///
/// With `force`, the image is compiled even if the same inputs are already published, failed before, or could reuse
/// another kernel's payload.
pub async fn build_one(
    services: &BuildServices,
    name: &ImageName,
    target: &KernelTarget,
    push: bool,
    force: bool,
) -> Result<BuildOutcome> {
    let image = find_image(&services.definitions, name)?;
    for need in in_build_order(&services.definitions, image) {
        if push && need.metadata.name != *name {
            build_image(services, need, target, push, false).await.map_err(|error| BuildError::Need {
                image: name.to_string(),
                need: need.metadata.name.to_string(),
                error: Box::new(error),
            })?;
        }
    }
    build_image(services, image, target, push, force).await
}

/// Builds the image without its needs.
async fn build_image(
    services: &BuildServices,
    image: &DriverImage,
    target: &KernelTarget,
    push: bool,
    force: bool,
) -> Result<BuildOutcome> {
    let name = &image.metadata.name;
    let cell = plan_cell(services, name, target).await?;
    // Find conflicts before compiling, even with `force`.
    if push
        && let Some(digest) = find_published(services, &cell, image).await?
        && !force
    {
        let stored = StoredImage { services, repository: &cell.reference.repository, digest: &digest };
        stored.sign_if_unsigned(name.as_str()).await?;
        stored.publish_outputs(image, CellBuild::of(services, &cell)?.family).await?;
        return Ok(BuildOutcome { cell, digest, built: None });
    }
    if !force
        && let Some(failure) =
            known_failures(&services.cache, [cell.input_hash])?.remove(&cell.input_hash).flatten()
        && failure.applies_to(&image.spec, &services.definitions.site)
    {
        let message = format!("the same inputs failed at {}: {}", failure.at, failure.message);
        return Err(BuildError::unmet(message, "change an input, or build with --force"));
    }
    let outcome = attempt(services, &cell, BuildOptions { push, compile: force }).await?;
    let how = match (&outcome, push) {
        (Err(_), _) if services.process.cancel.is_cancelled() => "interrupted",
        (Err(_), _) => "failed",
        (Ok(_), true) => "published",
        (Ok(_), false) => "built",
    };
    services.process.reporter.finished(&cell.subject(), how);
    let built = outcome?;
    Ok(BuildOutcome { cell, digest: built.digest.clone(), built: Some(built) })
}

/// Returns the digest under the cell's first tag if all of the cell's tags hold an image with its inputs. Other inputs
/// are a conflict (guarantee 3), unless the definition allows overwriting. A verdict that the definition denies is an
/// error too.
async fn find_published(
    services: &BuildServices,
    cell: &Cell,
    image: &DriverImage,
) -> Result<Option<Digest>> {
    let mut digest = None;
    for reference in cell.references() {
        let Some(found) = services.look_up_for(reference, cell.target.arch).await? else { return Ok(None) };
        if !found.is_of(cell) {
            if image.spec.on_conflict == OnConflict::Overwrite {
                return Ok(None);
            }
            let stored = StoredImage { services, repository: &reference.repository, digest: &found.digest };
            let inputs = stored.named_inputs().await.unwrap_or_default();
            let changed = plan::changed_inputs(&inputs, cell);
            let message = plan::conflict(reference, &changed);
            let remedy = plan::conflict_remedy(cell, &changed, &build_products(services, image));
            return Err(BuildError::unmet(message, &remedy));
        }
        if found.verdict == Some(Verdict::Unknown) && image.spec.check.unknown == UnknownPolicy::Deny {
            return Err(BuildError::unmet(
                format!("{reference} is published with the verdict unknown, and check.unknown is deny"),
                "settle what is unknown and raise the version, or accept it with check.unknown: allow",
            ));
        }
        digest.get_or_insert(found.digest);
    }
    Ok(digest)
}
