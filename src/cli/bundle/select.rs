//! What the arguments of an export ask for, found in the registry.

use std::collections::BTreeSet;

use crate::{
    bundle::{BundleError, Content, ContentKind, contents::in_order},
    cli::{
        CliError,
        args::{BundleExportArgs, TargetArgs},
        printer, settings,
    },
    controller::{Carrying, Controller, Lacking},
    image::{ImageName, Tag, Version},
    kernel::KernelTarget,
    oci::{ImageFacts, is_referrers_tag},
};

/// Published images for the kernels, and what the store has for them.
pub(super) async fn contents(
    controller: &Controller,
    args: &BundleExportArgs,
) -> Result<Vec<Content>, CliError> {
    let kernels = kernels(args)?;
    let mut found = Vec::new();
    let images = images(controller, args)?;
    for image in &images {
        found.extend(published(controller, image, &kernels).await?);
    }
    if found.is_empty() {
        let kernels: Vec<&str> = kernels.iter().map(|kernel| kernel.release.as_str()).collect();
        let reason = format!("{} has no image for {}", controller.location, kernels.join(", "));
        return Err(BundleError::Nothing(reason).into());
    }
    let (made_from, lacking) = controller.made_from(&Carrying { images, kernels }).await;
    for Lacking { what, error, hint, unreachable: _ } in &lacking {
        let hint = hint.as_ref().map(|hint| format!(" ({hint})")).unwrap_or_default();
        printer::message(&format!("not in the bundle: {what}: {error}{hint}"));
    }
    found.extend(made_from);
    Ok(in_order(found))
}

fn kernels(args: &BundleExportArgs) -> Result<BTreeSet<KernelTarget>, CliError> {
    let BundleExportArgs { kernel, os, os_version, arch, .. } = args;
    let target = |kernel: &String| {
        settings::target(&TargetArgs {
            kernel: kernel.clone(),
            os: os.clone(),
            os_version: os_version.clone(),
            arch: arch.clone(),
        })
    };
    kernel.iter().map(target).collect()
}

fn images(controller: &Controller, args: &BundleExportArgs) -> Result<BTreeSet<ImageName>, CliError> {
    let known = &controller.definitions.images;
    let mut images = BTreeSet::new();
    for name in &args.image {
        let name: ImageName = settings::parse("--image", name)?;
        if !known.contains_key(&name) {
            let known = known.keys().map(ToString::to_string).collect();
            return Err(crate::controller::TargetError::NoImage { name: name.to_string(), known }.into());
        }
        images.insert(name);
    }
    if images.is_empty() {
        images.extend(known.keys().cloned());
    }
    Ok(images)
}

async fn tags(controller: &Controller, name: &str) -> Result<Vec<Tag>, CliError> {
    let repository = settings::parse(
        "--registry",
        controller.location.repository(name).as_ref().map_or(name, |r| r.as_str()),
    )?;
    Ok(controller.registry.tags(&repository).await?)
}

/// The image's tags whose manifests say that they are for one of the kernels.
async fn published(
    controller: &Controller,
    image: &ImageName,
    kernels: &BTreeSet<KernelTarget>,
) -> Result<Vec<Content>, CliError> {
    let mut found = Vec::new();
    for tag in tags(controller, image.as_str()).await? {
        if is_referrers_tag(&tag) {
            continue;
        }
        let one = tagged(controller, ContentKind::Image, image.as_str(), [tag]).await?;
        for content in one {
            let repository = settings::parse(
                "--registry",
                controller
                    .location
                    .repository(image.as_str())
                    .as_ref()
                    .map_or(image.as_str(), |r| r.as_str()),
            )?;
            let version = Version::Digest(content.digest.clone());
            let manifest = controller.registry.manifest(&repository, &version).await?;
            let facts = manifest.and_then(|manifest| ImageFacts::from_manifest(&manifest.bytes).ok());
            let is_for = |facts: &ImageFacts| {
                kernels.iter().any(|kernel| {
                    facts.kernel_release.as_ref() == Some(&kernel.release)
                        || facts.members.contains_key(&kernel.release)
                })
            };
            if facts.as_ref().is_some_and(is_for) {
                found.push(content);
            }
        }
    }
    Ok(found)
}

async fn tagged(
    controller: &Controller,
    kind: ContentKind,
    name: &str,
    tags: impl IntoIterator<Item = Tag>,
) -> Result<Vec<Content>, CliError> {
    let repository = settings::parse(
        "--registry",
        controller.location.repository(name).as_ref().map_or(name, |r| r.as_str()),
    )?;
    let mut found = Vec::new();
    for tag in tags {
        if let Some(stored) = controller.registry.manifest(&repository, &Version::Tag(tag.clone())).await? {
            let (repository, digest) = (name.to_owned(), stored.digest);
            found.push(Content { kind, repository, tag: Some(tag), digest });
        }
    }
    Ok(found)
}
