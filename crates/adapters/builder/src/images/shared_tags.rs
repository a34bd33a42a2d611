//! Tags that name an image for each architecture.

use std::collections::BTreeMap;

use farrier_core::{
    facts::media_type,
    image::{Digest, ImageName, ImageReference, Version},
    kernel::Architecture,
    plan::Published,
};
use farrier_store::registry::{MAX_TRIES, StoredManifest, pause_before};
use oci::{Descriptor, ImageIndex, Platform};

use super::signatures::StoredImage;
use crate::services::{BuildError, BuildServices, Result};

/// Points a tag at the image for one architecture. If the tag already names images for other architectures, pushes an
/// index of all of them. A different image for the same architecture is an error, unless `overwrite` is set. `name` is the
/// driver image that the signature of an index names.
///
/// The registry protocol has no locks, so this function reads the tag again after each write. If a concurrent writer
/// drops the image later, the next plan finds the tag missing.
pub(crate) async fn tag_for_architecture(
    services: &BuildServices,
    name: &ImageName,
    arch: Architecture,
    reference: &ImageReference,
    image: &StoredManifest,
    overwrite: bool,
) -> Result<()> {
    let ImageReference { repository, version } = reference;
    for attempt in 0..=MAX_TRIES {
        let existing = services.look_up(reference).await?;
        match existing.as_ref().and_then(|existing| existing.for_architecture(arch)) {
            Some(current) if current.digest == image.digest => return Ok(()),
            Some(_) if !overwrite => return Err(BuildError::tag_conflict(reference)),
            // The last attempt only reads what the last write left.
            _ if attempt == MAX_TRIES => break,
            _ => {}
        }
        pause_before(attempt).await;
        let mut others = existing.map(|existing| existing.platforms).unwrap_or_default();
        others.remove(&arch);
        services.process.ensure_may_write()?;
        if others.is_empty() {
            let StoredManifest { media_type, bytes, .. } = image;
            services.images.registry.push_manifest(repository, version, media_type, bytes).await?;
        } else {
            push_index(services, name, arch, reference, others, image).await?;
        }
    }
    let message = format!(
        "{reference} lacks the image for {arch} after {MAX_TRIES} writes: other writers replace the tag"
    );
    Err(BuildError::unmet(message, "run again; existing content is kept"))
}

/// Pushes an index of an image and the images for other architectures under a tag. If the site signs images, the others
/// must be signed as well: a signature of the index covers everything that the index references.
async fn push_index(
    services: &BuildServices,
    name: &ImageName,
    arch: Architecture,
    reference: &ImageReference,
    others: BTreeMap<Architecture, Published>,
    image: &StoredManifest,
) -> Result<()> {
    let ImageReference { repository, version } = reference;
    let mut entries = BTreeMap::from([(arch, image.clone())]);
    for (architecture, Published { digest, .. }) in others {
        let subject = format!("the image for {architecture} under {reference},");
        let other = StoredImage { services, repository, digest: &digest };
        other.ensure_trusted(&subject).await?;
        entries.insert(architecture, other.manifest().await?);
    }
    let mut index = ImageIndex::empty();
    index.manifests = entries
        .iter()
        .map(|(architecture, StoredManifest { media_type, bytes, .. })| Descriptor {
            platform: Some(Platform::linux(architecture.as_str())),
            ..Descriptor::of(media_type, bytes)
        })
        .collect();
    let (bytes, kind, registry) = (index.to_bytes()?, media_type::OCI_INDEX, &services.images.registry);
    let digest = Digest::of(&bytes);
    registry.push_manifest(repository, &Version::Digest(digest.clone()), kind, &bytes).await?;
    StoredImage { services, repository, digest: &digest }.sign(name.as_str(), &[]).await?;
    services.process.ensure_may_write()?;
    registry.push_manifest(repository, version, kind, &bytes).await?;
    Ok(())
}
