//! The publish stage pushes an image, blobs first and tags last.

use farrier_core::{
    facts::media_type,
    image::{Digest, ImageReference, OnConflict, Repository, Version},
    plan::Cell,
};
use farrier_store::registry::StoredManifest;
use oci::{Descriptor, error_chain};

use super::{
    assemble::Image,
    cell::plan_cell,
    cell_build::{CellBuild, ensure_planned},
};
use crate::{
    images::{BaseImage, Documents, StoredImage, tag_for_architecture},
    services::{BuildError, BuildServices, ImageAccess, Result, Stage},
};

/// Waits until this process may write, and then publishes. A leader that temporarily cannot reach the API server thus
/// loses no build. Fails if the inputs have changed since planning. Returns the number of bytes sent.
pub(super) async fn publish(build: &CellBuild<'_>, image: &Image, documents: &Documents) -> Result<u64> {
    build.stage(Stage::Publish);
    loop {
        build.services.process.wait_until_writable().await?;
        ensure_current(build).await?;
        match push(build, image, documents).await {
            // Try again. Blobs that are already in the registry are not sent again.
            Err(BuildError::Fenced(_)) => {}
            outcome => return outcome,
        }
    }
}

/// Fails if the inputs of the cell have changed since planning: the next plan would otherwise treat the published image
/// as a conflict. If the inputs cannot be looked up, the build is treated as current.
async fn ensure_current(build: &CellBuild<'_>) -> Result<()> {
    match plan_cell(build.services, &build.cell.image, &build.cell.target).await {
        Ok(current) => current.changed_since(build.cell).map_or(Ok(()), |input| ensure_planned(false, input)),
        Err(BuildError::Canceled) => Err(BuildError::Canceled),
        Err(error) => {
            let (subject, error) = (build.cell.subject(), error_chain(&error));
            tracing::info!(subject, error, "inputs cannot be looked up again before publishing");
            Ok(())
        }
    }
}

/// Pushes missing blobs, the manifest by digest, its documents and signatures, then the manifest under every tag. No
/// tag ever exists without its report.
async fn push(build: &CellBuild<'_>, image: &Image, documents: &Documents) -> Result<u64> {
    let (services, registry) = (build.services, &build.services.images.registry);
    services.process.ensure_may_write()?;
    let repository = &build.cell.reference.repository;
    let mut sent = 0;
    if let Some(base) = &image.base {
        for layer in &base.image.layers {
            sent += push_base_layer(&services.images, repository, base, layer).await?;
        }
    }
    for (file, layer) in &image.layers {
        sent += registry.push_blob(repository, &layer.digest, file).await?.bytes();
    }
    let assembled = &image.assembled;
    sent += registry.push_bytes(repository, &assembled.config).await?.bytes();
    let stored = StoredManifest {
        digest: assembled.digest.clone(),
        media_type: media_type::OCI_MANIFEST.to_owned(),
        bytes: assembled.manifest.clone(),
    };
    let by_digest = Version::Digest(stored.digest.clone());
    registry.push_manifest(repository, &by_digest, &stored.media_type, &stored.bytes).await?;
    let image = StoredImage { services, repository, digest: &stored.digest };
    for artifact in &documents.artifacts {
        sent += image.push_document(artifact).await?;
    }
    sent += image.sign(build.cell.image.as_str(), &documents.claims).await?;
    sent += image.publish_outputs(build.image, build.family).await?;
    for reference in build.cell.references() {
        tag(services, build.cell, reference, &stored).await?;
    }
    Ok(sent)
}

/// Adds tags to a published image.
pub async fn add_tags(
    services: &BuildServices,
    cell: &Cell,
    digest: &Digest,
    references: &[ImageReference],
) -> Result<()> {
    let repository = &cell.reference.repository;
    let stored = StoredImage { services, repository, digest }.manifest().await?;
    for reference in references {
        tag(services, cell, reference, &stored).await?;
    }
    Ok(())
}

/// Points a tag at an image. If architectures share tags, adds the image to the tag's index. A tag that has received
/// other content for this architecture since planning is kept (guarantee 3), unless the definition allows overwriting.
async fn tag(
    services: &BuildServices,
    cell: &Cell,
    reference: &ImageReference,
    image: &StoredManifest,
) -> Result<()> {
    let ImageReference { repository, version } = reference;
    let (definition, arch) = (services.definitions.images.get(&cell.image), cell.target.arch);
    let overwrite = definition.is_some_and(|image| image.spec.on_conflict == OnConflict::Overwrite);
    if !overwrite && let Some(found) = services.look_up_for(reference, arch).await? {
        return if found.is_of(cell) { Ok(()) } else { Err(BuildError::tag_conflict(reference)) };
    }
    if services.shares_tags(repository) {
        return tag_for_architecture(services, &cell.image, arch, reference, image, overwrite).await;
    }
    // Check the fence again: pushing the layers may have taken minutes.
    services.process.ensure_may_write()?;
    services.images.registry.push_manifest(repository, version, &image.media_type, &image.bytes).await?;
    Ok(())
}

/// Mounts or pushes one base layer, if the target repository lacks it.
async fn push_base_layer(
    access: &ImageAccess,
    repository: &Repository,
    base: &BaseImage,
    layer: &Descriptor,
) -> Result<u64> {
    let registry = &access.registry;
    if registry.has_blob(repository, &layer.digest).await?
        || registry.mount_blob(repository, &layer.digest, &base.repository).await?
    {
        return Ok(0);
    }
    let file = access.blob_file(&base.repository, layer).await?;
    Ok(registry.push_blob(repository, &layer.digest, &file).await?.bytes())
}
