//! Chooses the version with which the operator finds an image for every kernel.

use std::{borrow::Cow, collections::BTreeMap};

use super::{
    super::{Context, HoldReason, no_image, operator::Versions, reached::NodesByKernel},
    is_published, operator, tag_form,
};
use crate::{
    image::{ImageReference, OperatorResource},
    plan::{
        Cell,
        outcome::{AbsentImage, CellState},
    },
};

/// Version to set in a resource.
pub(super) enum VersionChoice<'a> {
    /// The operator finds a published image for every kernel.
    Ready(CommonVersion<'a>),
    /// Reference that must be published before a version can be set.
    Pending(&'a ImageReference),
}

/// Version with which the operator finds an image for every kernel.
pub(super) struct CommonVersion<'a> {
    pub(super) version: Cow<'a, str>,
    /// Reference of the image for one of the kernels.
    pub(super) reference: &'a ImageReference,
    pub(super) required_images: Vec<ImageReference>,
}

/// Images of several kernels.
#[derive(Default)]
struct KernelImages<'a> {
    /// Cell of each kernel, with the versions that name its image.
    cells: Vec<(&'a Cell, Versions<'a>)>,
    /// Published images by digest.
    required_images: Vec<ImageReference>,
    /// Reference of the first image that is not built yet.
    pending: Option<&'a ImageReference>,
}

/// Chooses the version for these kernels. Prefers `current`, as `repository:version`, to other versions that all kernels
/// share.
pub(super) fn common_version<'a>(
    context: &Context<'a>,
    kind: OperatorResource,
    kernels: &NodesByKernel<'_>,
    current: Option<&str>,
) -> Result<VersionChoice<'a>, HoldReason> {
    let KernelImages { cells, mut required_images, pending } = kernel_images(context, kind, kernels)?;
    let Some((version, reference)) = shared_version(&cells, current) else {
        return Err(mixed_versions(&cells));
    };
    if let Some(on) = pending {
        return Ok(VersionChoice::Pending(on));
    }
    for (cell, versions) in &cells {
        let Some((_, name)) = versions.iter().find(|(other, _)| *other == version) else { continue };
        if !is_published(context, cell, name) {
            return Ok(VersionChoice::Pending(name));
        }
        required_images.push((*name).clone());
    }
    Ok(VersionChoice::Ready(CommonVersion { version, reference, required_images }))
}

fn kernel_images<'a>(
    context: &Context<'a>,
    kind: OperatorResource,
    kernels: &NodesByKernel<'_>,
) -> Result<KernelImages<'a>, HoldReason> {
    let resources = context.resources();
    let mut images = KernelImages::default();
    for kernel in kernels.keys() {
        let (cell, published) = match context.cells.state(context.image, kernel) {
            CellState::Published(cell, published) => (cell, Some(published)),
            CellState::ToBuild(cell) => (cell, None),
            CellState::Absent(AbsentImage { cell, why, unknown: _ }) => {
                let unusable = cell.filter(|cell| operator::versions(kind, cell, resources).is_empty());
                return Err(
                    unusable.map_or_else(|| no_image(kernel, why), |cell| tag_form(kind, cell, resources))
                );
            }
        };
        let versions = operator::versions(kind, cell, resources);
        let Some((_, reference)) = versions.first() else { return Err(tag_form(kind, cell, resources)) };
        match published {
            Some(published) => images.required_images.push(context.admissible_image(cell, published)?),
            None => images.pending = images.pending.or(Some(*reference)),
        }
        images.cells.push((cell, versions));
    }
    Ok(images)
}

/// Returns a version that every cell has, with its reference in the first cell.
fn shared_version<'a>(
    cells: &[(&'a Cell, Versions<'a>)],
    current: Option<&str>,
) -> Option<(Cow<'a, str>, &'a ImageReference)> {
    let (_, candidates) = cells.first()?;
    let is_shared =
        |version: &str| cells.iter().all(|(_, versions)| versions.iter().any(|(other, _)| *other == version));
    let shared: Vec<_> = candidates.iter().filter(|(version, _)| is_shared(version)).collect();
    let unchanged = shared
        .iter()
        .find(|(version, reference)| current == Some(&format!("{}:{version}", reference.repository)));
    unchanged.or(shared.first()).map(|(version, reference)| (version.clone(), *reference))
}

fn mixed_versions(cells: &[(&Cell, Versions<'_>)]) -> HoldReason {
    let mut versions: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (cell, own) in cells {
        let version = own.first().map_or("", |(version, _)| &**version);
        versions.entry(version.to_owned()).or_default().push(cell.target.to_string());
    }
    HoldReason::MixedVersions { versions }
}
