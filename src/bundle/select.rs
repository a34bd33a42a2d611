//! Resolves the arguments of an export to contents of the registry.

use std::collections::BTreeSet;

use farrier_builder::{
    images::StoredImage,
    services::{BuildServices, ImageAccess},
};
use farrier_bundle::{
    BundleError, Content, ContentKind, FoundInputs, License, contents::sort_contents, needed,
};
use farrier_bundle::{MissingInput, Selection, ensure_exportable, find_inputs, licenses};
use farrier_core::{
    facts::ImageFacts,
    image::{Digest, ImageName, ImageReference, Repository, Tag, Version},
    kernel::KernelTarget,
};
use farrier_store::{SignatureStatus, registry::RegistryLocation};
use oci::{AnyManifest, Descriptor, ImageManifest, MIRROR_PREFIX, is_referrers_tag};
use serde_json::Value;

use super::BundleExportArgs;
use crate::{CliError, Result, mirror::selection, output, session::Session, settings};

/// Returns the contents that the site needs, with their licenses. Returns `None` after a message if something is missing.
pub(super) async fn contents(
    session: &Session,
    services: &BuildServices,
    args: &BundleExportArgs,
) -> Result<Option<(Vec<Content>, BTreeSet<License>)>> {
    let (mut contents, mut licensed) = (Vec::new(), BTreeSet::new());
    for reference in &args.reference {
        let found = resolve_reference(&services.images, reference).await?;
        // The last one is what the reference names, and the others are the images of an index.
        if let Some(named) = found.last()
            && let Some(reason) = missing_signature(services, named).await?
        {
            output::message(&format!("warning: {reason}; the bundle's signature covers it"));
        }
        contents.extend(found);
    }
    if !args.selection.kernel.is_empty() || args.selection.cluster.is_some() {
        let selection = selection(session, &args.selection, services).await?;
        let (images, mut missing) = published(services, &selection).await?;
        let nothing_selected = || {
            let reason = match &args.selection.cluster {
                Some(cluster) if selection.kernels.is_empty() => {
                    format!("no node of {cluster} calls for a driver image")
                }
                _ => {
                    let releases = selection.kernels.iter().map(|kernel| kernel.release.as_str());
                    let releases: Vec<&str> = releases.collect();
                    format!("{} has no image for {}", services.images.location, releases.join(", "))
                }
            };
            Err(BundleError::Nothing(reason).into())
        };
        if images.is_empty() && !args.incomplete {
            return nothing_selected();
        }
        let FoundInputs { contents: inputs, licenses, missing: missing_inputs } =
            find_inputs(services, &selection).await;
        licensed.extend(licenses);
        missing.extend(missing_inputs);
        missing.iter().for_each(print_missing);
        if !missing.is_empty() && !args.incomplete {
            output::message(
                "error: nothing was written, because the contents listed above are missing\n\
                 hint: put them into the registry (`farrier mirror`, `farrier headers import`, `farrier build --push`), select images \
                 with --image, or pass --incomplete",
            );
            return Ok(None);
        }
        contents.extend(images);
        contents.extend(inputs);
        if contents.is_empty() {
            return nothing_selected();
        }
    }
    licensed.extend(licenses(services, &contents).await?);
    ensure_exportable(&licensed, &services.definitions.site.policy)?;
    Ok(Some((sort_contents(contents), licensed)))
}

fn print_missing(MissingInput { what, error, hint, unreachable: _ }: &MissingInput) {
    let hint = hint.as_ref().map(|hint| format!(" ({hint})")).unwrap_or_default();
    output::message(&format!("missing: {what}: {error}{hint}"));
}

/// Returns why no key of the site counts for an image, if the site has keys for images: the bundle's signature covers the image.
async fn missing_signature(services: &BuildServices, image: &Content) -> Result<Option<String>> {
    let Content { kind: _, repository: name, tag, digest } = image;
    // Copies have the signatures of their publishers.
    if name.starts_with(MIRROR_PREFIX) {
        return Ok(None);
    }
    let repository = repository(&services.images.location, name)?;
    let stored = StoredImage { services, repository: &repository, digest };
    let SignatureStatus::Refused(error) = stored.signature_status().await? else { return Ok(None) };
    let version = tag.as_ref().map_or_else(|| format!("@{digest}"), |tag| format!(":{tag}"));
    Ok(Some(format!("{name}{version}: {error}")))
}

/// Returns a repository below the registry's prefix.
pub(super) fn repository(location: &RegistryLocation, name: &str) -> Result<Repository> {
    location.repository(name).map_err(|error| CliError::usage(error.to_string()))
}

/// Finds the published images for the kernels, including the images that they need. Also returns the
/// missing ones.
async fn published(
    services: &BuildServices,
    selection: &Selection,
) -> Result<(Vec<Content>, Vec<MissingInput>)> {
    let needed = needed(&services.definitions, selection);
    let (mut contents, mut missing) = (Vec::new(), Vec::new());
    for image in &needed.images {
        let name = &image.metadata.name;
        let kernels: Vec<&KernelTarget> = needed.kernels_of(image).collect();
        let (images, covered) = published_image(services, name, &kernels).await?;
        let absent = kernels.into_iter().filter(|kernel| !covered.contains(kernel));
        missing.extend(absent.map(|kernel| not_published(name, kernel)));
        contents.extend(images);
    }
    Ok((contents, missing))
}

fn not_published(name: &ImageName, kernel: &KernelTarget) -> MissingInput {
    let KernelTarget { os, os_version, release, arch } = kernel;
    let hint = format!(
        "run farrier build {name} --kernel {release} --os {os} --os-version {os_version} --arch {arch} --push"
    );
    MissingInput::absent(format!("{name} for {kernel}"), hint)
}

/// Returns the image's tags whose manifests are for one of the kernels, and the kernels that have an image. Leaves out what no key of
/// the site signed.
async fn published_image<'k>(
    services: &BuildServices,
    image: &ImageName,
    kernels: &[&'k KernelTarget],
) -> Result<(Vec<Content>, BTreeSet<&'k KernelTarget>)> {
    let access = &services.images;
    let repository = repository(&access.location, image.as_str())?;
    let (mut contents, mut covered) = (Vec::new(), BTreeSet::new());
    let tags = access.registry.tags(&repository).await?.into_iter();
    for tag in tags.filter(|tag| !is_referrers_tag(tag)) {
        let manifest = access.registry.manifest(&repository, &Version::Tag(tag.clone())).await?;
        let Some(manifest) = manifest else { continue };
        let images = images_of(access, &repository, manifest.digest.clone(), &manifest.bytes).await?;
        let mut matching = BTreeSet::new();
        for image in &images {
            matching.extend(image.kernels(access, &repository, kernels).await?);
        }
        if matching.is_empty() {
            continue;
        }
        let found = with_members(image.as_str(), Some(tag), &manifest.digest, images);
        // The images of an index have no tag, and the index's signature covers them.
        if let Some(tagged) = found.iter().find(|content| content.tag.is_some())
            && let Some(reason) = missing_signature(services, tagged).await?
        {
            output::message(&format!(
                "left out: {reason} (sign the image with `farrier build --push --force`, or delete its tag)"
            ));
            continue;
        }
        contents.extend(found);
        covered.extend(matching);
    }
    Ok((contents, covered))
}

/// A published image.
struct Published {
    digest: Digest,
    facts: ImageFacts,
    config: Descriptor,
}

impl Published {
    /// Returns the kernels that the image is for. Its configuration, which names the architecture, is read only if the
    /// rest matches.
    async fn kernels<'k>(
        &self,
        access: &ImageAccess,
        repository: &Repository,
        kernels: &[&'k KernelTarget],
    ) -> Result<Vec<&'k KernelTarget>> {
        let Self { digest: _, facts, config } = self;
        let matches = |kernel: &KernelTarget| {
            let KernelTarget { os, os_version, release, arch: _ } = kernel;
            let system = format!("{os} {os_version}");
            (facts.kernel_release.as_ref() == Some(release) || facts.members.contains_key(release))
                && facts.os.as_ref().is_none_or(|os| *os == system)
        };
        let mut matching: Vec<_> = kernels.iter().copied().filter(|kernel| matches(kernel)).collect();
        if !matching.is_empty() {
            let config = access.small_blob(repository, config, "image configuration").await?;
            let config: Value = serde_json::from_slice(&config).unwrap_or_default();
            let architecture = config["architecture"].as_str();
            matching.retain(|kernel| architecture.is_none_or(|arch| arch == kernel.arch.as_str()));
        }
        Ok(matching)
    }
}

/// Returns the image of a manifest, or the images of an index. A manifest without farrier's annotations is not an image of
/// farrier's.
async fn images_of(
    access: &ImageAccess,
    repository: &Repository,
    digest: Digest,
    bytes: &[u8],
) -> Result<Vec<Published>> {
    let published = |digest, manifest: ImageManifest| {
        let facts = ImageFacts::from_annotations(&manifest.annotations).ok()?;
        Some(Published { digest, facts, config: manifest.config })
    };
    let mut images = Vec::new();
    match AnyManifest::parse(bytes) {
        Ok(AnyManifest::Image(manifest)) => images.extend(published(digest, *manifest)),
        Ok(AnyManifest::Index(index)) => {
            for entry in index.manifests {
                let version = Version::Digest(entry.digest.clone());
                let stored = access.registry.manifest(repository, &version).await?;
                let manifest = stored.and_then(|stored| ImageManifest::parse(&stored.bytes).ok());
                images.extend(manifest.and_then(|manifest| published(entry.digest, manifest)));
            }
        }
        Err(_) => {}
    }
    Ok(images)
}

/// Returns the content under a name below the registry's prefix, with the images of an index.
async fn resolve_reference(access: &ImageAccess, text: &str) -> Result<Vec<Content>> {
    let ImageReference { repository: name, version } = settings::parse("--reference", text)?;
    let repository = repository(&access.location, name.as_str())?;
    let manifest = access.registry.manifest(&repository, &version).await?;
    let manifest = manifest.ok_or_else(|| BundleError::Absent(format!("{repository}{version}")))?;
    let images = images_of(access, &repository, manifest.digest.clone(), &manifest.bytes).await?;
    Ok(with_members(name.as_str(), version.tag().cloned(), &manifest.digest, images))
}

/// Returns a manifest and, if it is an index, its images, so that the referrers of all are exported.
fn with_members(name: &str, tag: Option<Tag>, digest: &Digest, images: Vec<Published>) -> Vec<Content> {
    let (kind, repository) = (ContentKind::Image, name.to_owned());
    let content = Content { kind, repository, tag, digest: digest.clone() };
    let members = images.into_iter().filter(|image| image.digest != *digest);
    let members = members.map(|image| Content { tag: None, digest: image.digest, ..content.clone() });
    members.chain([content.clone()]).collect()
}
