//! Adapter: tags that lead to an image for each architecture.

use std::collections::BTreeMap;

use super::signatures::StoredImage;
use crate::{
    image::{Digest, ImageName, ImageReference, Version},
    kernel::Architecture,
    oci::{Descriptor, ImageIndex, Platform, media_type},
    parts::{Parts, Result, TargetError},
    plan::Published,
    registry::{MAX_TRIES, StoredManifest, pause_before},
};

/// Points a tag at an image of `title`. Where it leads to images for other architectures, it leads to an index of all of them
/// then. Another image for the same architecture stays, and is an error, unless the definition lets it be overwritten. The
/// protocol has no way to make other writers wait: it is looked whether the image is in what stands there at the end, and what
/// another writer loses at the same moment is a missing tag in the next plan.
pub(crate) async fn tag_beside_others(
    parts: &Parts,
    title: &ImageName,
    arch: Architecture,
    reference: &ImageReference,
    image: &StoredManifest,
    overwrite: bool,
) -> Result<()> {
    let ImageReference { repository, version } = reference;
    for attempt in 0..=MAX_TRIES {
        let there = parts.look_up(reference).await?;
        let held = there.as_ref().and_then(|there| there.for_architecture(arch));
        match held {
            Some(held) if held.digest == image.digest => return Ok(()),
            Some(_) if !overwrite => return Err(TargetError::overtaken(reference)),
            _ => {}
        }
        pause_before(attempt).await;
        let mut others = there.map(|there| there.platforms).unwrap_or_default();
        others.remove(&arch);
        parts.may_write()?;
        if others.is_empty() {
            parts.registry.push_manifest(repository, version, &image.media_type, &image.bytes).await?;
        } else {
            push_index(parts, title, arch, reference, others, image).await?;
        }
    }
    let message = format!("{reference} lacks the image for {arch}, {MAX_TRIES} times: others write it, too");
    Err(TargetError::unmet(message, "run again; what is there is kept"))
}

/// Puts an index of an image and those for other architectures under a tag, signed where the site signs: then the others must be
/// signed as well, because a signature of the index is taken for one of all that it leads to.
async fn push_index(
    parts: &Parts,
    title: &ImageName,
    arch: Architecture,
    reference: &ImageReference,
    others: BTreeMap<Architecture, Published>,
    image: &StoredManifest,
) -> Result<()> {
    let ImageReference { repository, version } = reference;
    let mut entries = BTreeMap::from([(arch, image.clone())]);
    for (architecture, Published { digest, .. }) in others {
        let what = format!("the image for {architecture} under {reference},");
        StoredImage { parts, repository, digest: &digest }.ensure_trusted(&what).await?;
        let version = Version::Digest(digest);
        let other = ImageReference { repository: repository.clone(), version };
        entries.insert(architecture, parts.existing_manifest(&other).await?);
    }
    let mut index = ImageIndex::empty();
    index.manifests = entries
        .iter()
        .map(|(architecture, StoredManifest { media_type, bytes, .. })| Descriptor {
            platform: Some(Platform::linux(architecture.as_str())),
            ..Descriptor::of(media_type, bytes)
        })
        .collect();
    let (bytes, kind) = (index.to_bytes()?, media_type::OCI_INDEX);
    let digest = Digest::of(&bytes);
    parts.registry.push_manifest(repository, &Version::Digest(digest.clone()), kind, &bytes).await?;
    StoredImage { parts, repository, digest: &digest }.sign(title.as_str(), &[]).await?;
    parts.may_write()?;
    parts.registry.push_manifest(repository, version, kind, &bytes).await?;
    Ok(())
}
