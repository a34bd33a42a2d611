//! Sources of driver images for a kernel: common sources, packages for the kernel or its architecture, and modules from
//! third-party images.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use farrier_core::{
    image::{
        Digest, DriverImage, ImageReference, SourceImage, SourceOrigin, SourceSpec, Version, VersionSpec,
    },
    kernel::KernelTarget,
    plan::{Resolved, TreeKey},
};
use farrier_inputs::{FetchedSource, SourceIdentity};
use farrier_local::{archive::links, machine::native};
use futures::{StreamExt as _, stream};

use super::{
    keys::signers,
    root_fs::{image_tree, read_image},
    signatures::StoredImage,
};
use crate::{
    parts::{MAX_CONCURRENT_REQUESTS, Parts, Result, TargetError},
    resolve::with_hint,
};

/// Looks up sources that differ by kernel, and packages for other architectures than this machine's. A missing source
/// is a reason not to build. Returns the keys of prebuilt images that the registry answered for but that are unusable.
pub async fn look_up_sources(
    parts: &Parts,
    images: &[&DriverImage],
    targets: &BTreeSet<KernelTarget>,
    resolved: &mut Resolved,
) -> Vec<TreeKey> {
    let mut lookups = Vec::new();
    for image in images {
        for source in &image.spec.sources {
            let is_package = matches!(source.from, SourceOrigin::Apt(_));
            let is_image = matches!(source.from, SourceOrigin::Image(_));
            let key =
                |target: &KernelTarget| (image.metadata.name.clone(), source.name.clone(), target.clone());
            let needs_lookup = |target: &&KernelTarget| {
                (source.differs_by_kernel() || is_package && target.arch != native())
                    && image.spec.range_excluding(target).is_none()
                    && !resolved.kernel_sources.contains_key(&key(target))
            };
            let pending: Vec<&KernelTarget> = targets.iter().filter(needs_lookup).collect();
            // There is only one other architecture, and its kernels share the package.
            let per_lookup = if source.differs_by_kernel() { 1 } else { pending.len().max(1) };
            for kernels in pending.chunks(per_lookup) {
                let keys: Vec<TreeKey> = kernels.iter().map(|target| key(target)).collect();
                let version = version_from(image, source, resolved);
                lookups.extend(kernels.first().copied().map(|target| async move {
                    (keys, is_image, identity(parts, source, target, version.as_deref()).await)
                }));
            }
        }
    }
    let mut refused = Vec::new();
    for (keys, is_image, outcome) in
        stream::iter(lookups).buffered(MAX_CONCURRENT_REQUESTS).collect::<Vec<_>>().await
    {
        resolved.unreachable |= outcome.as_ref().is_err_and(TargetError::is_unreachable);
        if is_image && matches!(outcome, Err(TargetError::Finding(_))) {
            refused.extend(keys.iter().cloned());
        }
        let outcome = outcome.map_err(|error| with_hint(&error));
        resolved.kernel_sources.extend(keys.into_iter().map(|key| (key, outcome.clone())));
    }
    refused
}

/// The image's version, if the version is taken from this source.
fn version_from(image: &DriverImage, source: &SourceSpec, resolved: &Resolved) -> Option<String> {
    match &image.spec.version {
        VersionSpec::FromSource { source: name } if source.name.as_str() == name => {
            Some(resolved.images.get(&image.metadata.name)?.as_ref().ok()?.version.clone())
        }
        _ => None,
    }
}

async fn identity(
    parts: &Parts,
    source: &SourceSpec,
    target: &KernelTarget,
    required_version: Option<&str>,
) -> Result<String> {
    if let SourceOrigin::Image(image) = &source.from {
        return Ok(PrebuiltImage::find(parts, image, target).await?.identity());
    }
    let source = source.for_kernel(target).map_err(no_source)?;
    let look = || parts.fetcher.sources().identity(&source);
    let SourceIdentity { identity, version } = parts.retry("look up source", look).await?;
    match (required_version, version.as_deref()) {
        (Some(required), Some(version)) if version != required => {
            let (arch, own) = (target.arch, native());
            let message = format!("the package has version {version} for {arch}, and {required} for {own}");
            let hint = "wait until the archive has the same version for both, or pin a version in the \
                definition (`version` of the source)";
            Err(TargetError::unmet(message, hint))
        }
        _ => Ok(identity),
    }
}

/// Fetches a source of a cell's image for the target kernel.
pub(crate) async fn fetch_source(
    parts: &Parts,
    source: &SourceSpec,
    target: &KernelTarget,
) -> Result<FetchedSource> {
    if let SourceOrigin::Image(image) = &source.from {
        return PrebuiltImage::find(parts, image, target).await?.fetch(parts, target).await;
    }
    let source = source.for_kernel(target).map_err(no_source)?;
    parts.retry("fetch source", || parts.fetcher.sources().fetch(&source)).await
}

/// Returns the part of a conflict's remedy about changed sources that contain products of a build; empty if there are none.
pub fn products_remedy(parts: &Parts, image: &DriverImage, changed: &[String]) -> String {
    let is_changed = |source: &&SourceSpec| {
        changed.iter().any(|change| change.starts_with(&format!("source {} changed", source.name)))
    };
    let mut changed_sources = image.spec.sources.iter().filter(is_changed);
    let product =
        changed_sources.find_map(|source| Some((&source.name, parts.fetcher.sources().product(source)?)));
    product.map_or_else(String::new, |(name, product)| {
        format!(
            "source {name} contains products of a build, such as {}: run `make clean` there; ",
            product.display()
        )
    })
}

fn no_source(why: String) -> TargetError {
    TargetError::unmet(
        why,
        "exclude this kernel with `kernels` and `release` of the image, or name another source",
    )
}

/// A prebuilt image that exists and is usable.
struct PrebuiltImage {
    /// Reference in the definition, by digest.
    image: ImageReference,
    /// Reference to fetch from.
    nearest: ImageReference,
    /// Directory in the image.
    path: Option<String>,
}

impl PrebuiltImage {
    async fn find(parts: &Parts, source: &SourceImage, target: &KernelTarget) -> Result<Self> {
        let (wanted, path) =
            source.for_kernel(target).map_err(|missing| no_source(format!("there is no {missing}")))?;
        let absent = || {
            let hint =
                "publish it for this kernel, or exclude the kernel with `kernels` and `release` of the image";
            TargetError::unmet(format!("no prebuilt image {wanted}"), hint)
        };
        let image = parts.pinned(wanted.clone()).await?.ok_or_else(absent)?;
        let nearest = parts.mirrored_reference(image.clone()).await?;
        if parts.manifest(&nearest).await?.is_none() {
            return Err(absent());
        }
        if let (false, Version::Digest(digest)) = (source.signed_by.is_empty(), &nearest.version) {
            let named = (&*parts.definitions.root, &source.signed_by[..]);
            let required = signers(&parts.definitions, "signedBy", named, 1).await?;
            let stored = StoredImage { parts, repository: &nearest.repository, digest };
            stored.signed_by(&required).await?.map_err(|why| {
                let message = format!(
                    "prebuilt image {wanted} ({digest}) is not signed with a key of `signedBy`: {why}"
                );
                TargetError::unmet(
                    message,
                    "it was not used: contact its publisher, or name the key that signs it",
                )
            })?;
        }
        // Read the image only after the signature check: its author controls the size of the configuration.
        let read = read_image(parts, &nearest, target.arch).await;
        read.map_err(|error| match error {
            TargetError::Image(why) => {
                let hint = "name the image for this architecture ({{arch}} in `reference`), or publish an \
                    index with both architectures";
                TargetError::unmet(
                    format!("prebuilt image {wanted} is not for linux/{}: {why}", target.arch),
                    hint,
                )
            }
            error => error,
        })?;
        Ok(Self { image, nearest, path })
    }

    /// `repository sha256:...`, followed by the directory.
    fn identity(&self) -> String {
        let Self { image: ImageReference { repository, version }, nearest: _, path } = self;
        let digest = version.digest().map(Digest::as_str).unwrap_or_default();
        let path = path.as_ref().map(|path| format!(" path={path}")).unwrap_or_default();
        format!("{repository} {digest}{path}")
    }

    async fn fetch(&self, parts: &Parts, target: &KernelTarget) -> Result<FetchedSource> {
        let (tree, _) = image_tree(parts, &self.nearest, target.arch, "prebuilt image").await?;
        let root = match &self.path {
            Some(path) => self.directory(&tree, path)?,
            None => tree,
        };
        Ok(FetchedSource { root, origin: self.identity() })
    }

    fn directory(&self, tree: &Path, path: &str) -> Result<PathBuf> {
        let directory = links::resolve(tree, Path::new(path))?.map(|path| tree.join(path));
        directory.filter(|directory| directory.is_dir()).ok_or_else(|| {
            let message = format!("prebuilt image {} has no directory {path}", self.image);
            TargetError::unmet(
                message,
                "the image is for another kernel, or has its modules in another directory: correct `path` \
                 of the source",
            )
        })
    }
}
