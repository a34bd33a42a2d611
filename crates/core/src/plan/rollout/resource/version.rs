//! Chooses the version with which the operator finds an image for every kernel.

use std::{borrow::Cow, collections::BTreeMap};

use super::{
    super::{Context, HoldReason, no_image, operator::TagVersion, reached::NodesByKernel},
    is_published, operator, tag_form,
};
use crate::{
    image::{ImageReference, OperatorResource},
    plan::{
        Cell,
        outcome::{AbsentImage, CellState},
    },
};

/// Result of [`common_version`].
pub(super) enum VersionChoice<'a> {
    /// The images of all kernels are published.
    Ready(CommonVersion<'a>),
    /// Reference that must be published before a version can be set.
    Pending(&'a ImageReference),
}

/// The version, and the images that it makes the operator use.
pub(super) struct CommonVersion<'a> {
    pub(super) version: Cow<'a, str>,
    /// Reference of the image for one of the kernels.
    pub(super) reference: &'a ImageReference,
    /// The images by digest, and the tags that the operator looks up.
    pub(super) required_images: Vec<ImageReference>,
}

/// The image for one kernel.
struct KernelImage<'a> {
    cell: &'a Cell,
    /// Versions that name the image; at least one.
    versions: Vec<TagVersion<'a>>,
    /// The image by digest, if it is published.
    digest: Option<ImageReference>,
}

/// Chooses the version for these kernels. Prefers `current`, as `repository:version`, to other versions that all kernels
/// share.
pub(super) fn common_version<'a>(
    context: &Context<'a>,
    kind: OperatorResource,
    kernels: &NodesByKernel<'_>,
    current: Option<&str>,
) -> Result<VersionChoice<'a>, HoldReason> {
    let images = kernel_images(context, kind, kernels)?;
    let Some(TagVersion { value: version, tag: reference }) = shared_version(&images, current) else {
        return Err(mixed_versions(&images));
    };
    let unpublished = images.iter().find(|image| image.digest.is_none());
    if let Some(first) = unpublished.and_then(|image| image.versions.first()) {
        return Ok(VersionChoice::Pending(first.tag));
    }
    let mut tags = Vec::new();
    for KernelImage { cell, versions, .. } in &images {
        let Some(TagVersion { tag, .. }) = versions.iter().find(|own| own.value == version) else { continue };
        if !is_published(context, cell, tag) {
            return Ok(VersionChoice::Pending(tag));
        }
        tags.push((*tag).clone());
    }
    let required_images = images.into_iter().filter_map(|image| image.digest).chain(tags).collect();
    Ok(VersionChoice::Ready(CommonVersion { version, reference, required_images }))
}

fn kernel_images<'a>(
    context: &Context<'a>,
    kind: OperatorResource,
    kernels: &NodesByKernel<'_>,
) -> Result<Vec<KernelImage<'a>>, HoldReason> {
    let resources = context.resources();
    let mut images = Vec::new();
    for kernel in kernels.keys() {
        let (cell, published) = match context.cells.state(context.image, kernel) {
            CellState::Published(cell, published) => (cell, Some(published)),
            CellState::ToBuild(cell) => (cell, None),
            CellState::Absent(AbsentImage { cell, why, unknown: _ }) => {
                return Err(match cell {
                    Some(cell) if operator::versions(kind, cell, resources).is_empty() => {
                        tag_form(kind, cell, resources)
                    }
                    _ => no_image(kernel, why),
                });
            }
        };
        let versions = operator::versions(kind, cell, resources);
        if versions.is_empty() {
            return Err(tag_form(kind, cell, resources));
        }
        let digest = published.map(|published| context.admissible_image(cell, published)).transpose()?;
        images.push(KernelImage { cell, versions, digest });
    }
    Ok(images)
}

/// Returns a version that every image has, with its tag of the first image.
fn shared_version<'a>(images: &[KernelImage<'a>], current: Option<&str>) -> Option<TagVersion<'a>> {
    let is_shared = |version: &&TagVersion<'_>| {
        images.iter().all(|image| image.versions.iter().any(|own| own.value == version.value))
    };
    let shared: Vec<_> = images.first()?.versions.iter().filter(is_shared).collect();
    let is_current = |TagVersion { value, tag }: &&&TagVersion<'_>| {
        current == Some(&format!("{}:{value}", tag.repository))
    };
    shared.iter().find(is_current).or(shared.first()).map(|version| (*version).clone())
}

fn mixed_versions(images: &[KernelImage<'_>]) -> HoldReason {
    let mut versions: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for image in images {
        let version = image.versions.first().map_or("", |version| &*version.value);
        versions.entry(version.to_owned()).or_default().push(image.cell.target.to_string());
    }
    HoldReason::MixedVersions { versions }
}
