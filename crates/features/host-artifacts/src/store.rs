//! Copies outputs with their signatures to a layout directory, from which a host verifies them without a network.

use farrier_builder::{
    images::{StoredImage, copy_artifact},
    services::{BuildServices, Result},
};
use farrier_core::{
    facts::ImageFacts,
    image::{Digest, Tag, Version},
    kernel::KernelLabel,
};

use super::payload::unmet;

/// Copies the output `artifact` of an image, and the output's signatures. The image is not copied: a tag for the kernel leads to
/// the output, and the output names the image.
pub async fn store(image: StoredImage<'_>, artifact: &Digest, to: &BuildServices) -> Result<()> {
    let StoredImage { services, repository, .. } = image;
    let found = services.images.registry.manifest(repository, &Version::Digest(artifact.clone())).await?;
    let found = found.ok_or_else(|| unmet(image, "has lost its output", "publish the output again"))?;
    let facts = ImageFacts::from_manifest(&found.bytes).ok();
    let label = facts.and_then(|facts| KernelLabel::of(&facts.kernel_release?));
    let tag: Option<Tag> = label.and_then(|label| label.as_str().parse().ok());
    let tag =
        tag.ok_or_else(|| unmet(image, "has an output without a kernel", "publish the output again"))?;
    let name = services.images.location.name_of(repository).or(repository.as_str().rsplit('/').next());
    let place = to.images.location.repository(name.unwrap_or_default())?;
    copy_artifact(to, services.images.registry.as_ref(), repository, &found, &place, tag).await
}
