//! Copies outputs with their signatures to a layout directory, from which a host verifies them without a network.

use farrier_builder::{
    images::{StoredImage, copy_referrers},
    parts::{Parts, Result},
};
use farrier_core::{
    facts::ImageFacts,
    image::{Digest, Tag, Version},
    kernel::KernelLabel,
};
use oci::ImageManifest;

use super::payload::unmet;

/// Copies an image's manifest, the image's referrers, and the signatures of its output `artifact`. The content of the image is
/// not copied, because [`crate::pull`] reads only its manifest.
pub async fn store(image: StoredImage<'_>, artifact: &Digest, to: &Parts) -> Result<()> {
    let StoredImage { parts, repository, digest } = image;
    let found = parts.registry.manifest(repository, &Version::Digest(digest.clone())).await?;
    let found = found.ok_or_else(|| unmet(image, "is not in the registry", "give a published image"))?;
    let facts = ImageFacts::from_annotations(&ImageManifest::parse(&found.bytes)?.annotations).ok();
    let label = facts.and_then(|facts| KernelLabel::of(&facts.kernel_release?));
    let tag: Option<Tag> = label.and_then(|label| label.as_str().parse().ok());
    let tag = tag.ok_or_else(|| unmet(image, "names no kernel", "give an image for one kernel"))?;
    let name = parts.location.name_of(repository).or(repository.as_str().rsplit('/').next());
    let place = to.location.repository(name.unwrap_or_default())?;
    to.registry.push_manifest(&place, &Version::Tag(tag), &found.media_type, &found.bytes).await?;
    for subject in [digest, artifact] {
        copy_referrers(to, parts.registry.as_ref(), repository, subject, &place).await?;
    }
    Ok(())
}
