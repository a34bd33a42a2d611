//! Resolves the arguments of an export to contents of the registry.

use std::collections::BTreeSet;

use farrier_builder::parts::Parts;
use farrier_bundle::{BundleError, Content, ContentKind, FoundInputs, License, contents::in_order, needed};
use farrier_bundle::{MissingInput, Selection, ensure_exportable, find_inputs, licenses};
use farrier_core::{
    facts::ImageFacts,
    image::{Digest, ImageName, ImageReference, Repository, Version},
    kernel::KernelTarget,
};
use farrier_store::registry::RegistryLocation;
use oci::{AnyManifest, is_referrers_tag};

use super::BundleExportArgs;
use crate::{CliError, Result, mirror::selection, output, settings};

/// Returns the contents that the site needs, with their licenses. Returns `None` after a message if something is missing.
pub(super) async fn contents(
    parts: &Parts,
    args: &BundleExportArgs,
) -> Result<Option<(Vec<Content>, BTreeSet<License>)>> {
    let (mut found, mut licensed) = (Vec::new(), BTreeSet::new());
    for reference in &args.reference {
        found.extend(referred(parts, reference).await?);
    }
    if !args.carry.kernel.is_empty() {
        let selection = selection(&args.carry, parts)?;
        let (images, mut missing) = published(parts, &selection).await?;
        let nothing = || {
            let reason = format!("{} has no image for {}", parts.location, args.carry.kernel.join(", "));
            Err(BundleError::Nothing(reason).into())
        };
        if images.is_empty() && !args.incomplete {
            return nothing();
        }
        let FoundInputs { contents: made_from, licenses, missing: not_kept } =
            find_inputs(parts, &selection).await;
        licensed.extend(licenses);
        missing.extend(not_kept);
        missing.iter().for_each(tell);
        if !missing.is_empty() && !args.incomplete {
            output::message(
                "error: nothing was written, because the contents listed above are missing\n\
                 hint: put them into the registry (`farrier mirror`, `farrier headers import`, `farrier build --push`), select images \
                 with --image, or pass --incomplete",
            );
            return Ok(None);
        }
        found.extend(images);
        found.extend(made_from);
        if found.is_empty() {
            return nothing();
        }
    }
    licensed.extend(licenses(parts, &found).await?);
    ensure_exportable(&licensed, &parts.definitions.site.policy)?;
    Ok(Some((in_order(found), licensed)))
}

fn tell(MissingInput { what, error, hint, unreachable: _ }: &MissingInput) {
    let hint = hint.as_ref().map(|hint| format!(" ({hint})")).unwrap_or_default();
    output::message(&format!("missing: {what}: {error}{hint}"));
}

/// Returns a repository below the registry's prefix.
pub(super) fn repository(location: &RegistryLocation, name: &str) -> Result<Repository> {
    location.repository(name).map_err(|error| CliError::usage(error.to_string()))
}

/// Finds the published images for the kernels, including the images that they need. Also returns what is
/// missing.
async fn published(parts: &Parts, selection: &Selection) -> Result<(Vec<Content>, Vec<MissingInput>)> {
    let Selection { images, kernels } = selection;
    let needed = needed(&parts.definitions, images, kernels);
    let (mut found, mut missing) = (Vec::new(), Vec::new());
    for image in &needed.images {
        let name = &image.metadata.name;
        let published = published_image(parts, name, kernels).await?;
        let is_missing = |kernel: &&KernelTarget| !published.iter().any(|(facts, _)| is_for(facts, kernel));
        missing.extend(needed.kernels_of(image).filter(is_missing).map(|kernel| not_published(name, kernel)));
        found.extend(published.into_iter().map(|(_, content)| content));
    }
    Ok((found, missing))
}

fn not_published(name: &ImageName, kernel: &KernelTarget) -> MissingInput {
    let hint = format!("run farrier build {name} --kernel {} --push", kernel.release);
    MissingInput::absent(format!("{name} for {}", kernel.release), hint)
}

fn is_for(facts: &ImageFacts, kernel: &KernelTarget) -> bool {
    facts.kernel_release.as_ref() == Some(&kernel.release) || facts.members.contains_key(&kernel.release)
}

/// Returns the image's tags whose manifests name one of the kernels.
async fn published_image(
    parts: &Parts,
    image: &ImageName,
    kernels: &BTreeSet<KernelTarget>,
) -> Result<Vec<(ImageFacts, Content)>> {
    let repository = repository(&parts.location, image.as_str())?;
    let mut found = Vec::new();
    for tag in parts.registry.tags(&repository).await? {
        let version = Version::Tag(tag.clone());
        if is_referrers_tag(&tag) {
            continue;
        }
        let Some(manifest) = parts.registry.manifest(&repository, &version).await? else { continue };
        let content = |tag, digest| Content {
            kind: ContentKind::Image,
            repository: image.as_str().to_owned(),
            tag,
            digest,
        };
        let is_wanted = |facts: &ImageFacts| kernels.iter().any(|kernel| is_for(facts, kernel));
        let entries = entries(parts, &repository, &manifest.bytes).await?;
        if let Some((facts, _)) = entries.iter().find(|(facts, _)| is_wanted(facts)) {
            found.push((facts.clone(), content(Some(tag.clone()), manifest.digest.clone())));
            // Export the images of an index explicitly, so that their referrers are exported too.
            let contents = entries.into_iter().map(|(facts, digest)| (facts, content(None, digest)));
            found.extend(contents);
            continue;
        }
        // A manifest that names no kernel is not farrier's, or not an image.
        let Ok(facts) = ImageFacts::from_manifest(&manifest.bytes) else { continue };
        if is_wanted(&facts) {
            found.push((facts, content(Some(tag), manifest.digest)));
        }
    }
    Ok(found)
}

/// Returns the images of an index with their facts; empty for any other manifest.
async fn entries(parts: &Parts, repository: &Repository, bytes: &[u8]) -> Result<Vec<(ImageFacts, Digest)>> {
    let Ok(AnyManifest::Index(index)) = AnyManifest::parse(bytes) else { return Ok(Vec::new()) };
    let mut found = Vec::new();
    for entry in index.manifests {
        let stored = parts.registry.manifest(repository, &Version::Digest(entry.digest)).await?;
        let facts =
            stored.and_then(|stored| Some((ImageFacts::from_manifest(&stored.bytes).ok()?, stored.digest)));
        found.extend(facts);
    }
    Ok(found)
}

/// Returns the content under a name below the registry's prefix. For an index, also returns its images, so
/// that their referrers are exported too.
async fn referred(parts: &Parts, text: &str) -> Result<Vec<Content>> {
    let ImageReference { repository: name, version } = settings::parse("--reference", text)?;
    let place = repository(&parts.location, name.as_str())?;
    let found = parts.registry.manifest(&place, &version).await?;
    let found = found.ok_or_else(|| BundleError::Absent(format!("{place}{version}")))?;
    let content =
        |tag, digest| Content { kind: ContentKind::Image, repository: name.as_str().to_owned(), tag, digest };
    let entries = entries(parts, &place, &found.bytes).await?;
    let named = content(version.tag().cloned(), found.digest);
    Ok(std::iter::once(named).chain(entries.into_iter().map(|(_, digest)| content(None, digest))).collect())
}
