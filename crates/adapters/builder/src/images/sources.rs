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
    plan::{BuildProducts, Resolved, TreeKey},
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
    resolve::with_hint,
    services::{BuildError, BuildServices, MAX_CONCURRENT_REQUESTS, Result},
};

/// Looks up sources that differ by kernel, and packages for other architectures than this machine's. A missing source
/// is a reason not to build. Returns the keys of prebuilt images that are missing or unusable although the registry answered.
pub async fn look_up_sources(
    services: &BuildServices,
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
                let version = version_of_image(image, source, resolved);
                lookups.extend(kernels.first().copied().map(|target| async move {
                    (keys, is_image, source_identity(services, source, target, version.as_deref()).await)
                }));
            }
        }
    }
    let mut unusable = Vec::new();
    for (keys, is_image, outcome) in
        stream::iter(lookups).buffered(MAX_CONCURRENT_REQUESTS).collect::<Vec<_>>().await
    {
        resolved.unreachable |= outcome.as_ref().is_err_and(BuildError::is_unreachable);
        if is_image && matches!(outcome, Err(BuildError::Problem(_))) {
            unusable.extend(keys.iter().cloned());
        }
        let outcome = outcome.map_err(|error| with_hint(&error));
        resolved.kernel_sources.extend(keys.into_iter().map(|key| (key, outcome.clone())));
    }
    unusable
}

/// The image's version, if the version is taken from this source.
fn version_of_image(image: &DriverImage, source: &SourceSpec, resolved: &Resolved) -> Option<String> {
    match &image.spec.version {
        VersionSpec::FromSource { source: name } if source.name.as_str() == name => {
            Some(resolved.images.get(&image.metadata.name)?.as_ref().ok()?.version.clone())
        }
        _ => None,
    }
}

async fn source_identity(
    services: &BuildServices,
    source: &SourceSpec,
    target: &KernelTarget,
    required_version: Option<&str>,
) -> Result<String> {
    if let SourceOrigin::Image(image) = &source.from {
        return Ok(PrebuiltImage::find(services, image, target).await?.identity());
    }
    let source = source.for_kernel(target).map_err(no_source)?;
    let look = || services.fetcher.sources().identity(&source);
    let SourceIdentity { identity, version } = services.process.retry("look up source", look).await?;
    match (required_version, version.as_deref()) {
        (Some(required), Some(version)) if version != required => {
            let (arch, own) = (target.arch, native());
            let message = format!("the package has version {version} for {arch}, and {required} for {own}");
            let hint = "wait until the archive has the same version for both, or pin a version in the \
                definition (`version` of the source)";
            Err(BuildError::unmet(message, hint))
        }
        _ => Ok(identity),
    }
}

/// Fetches a source of a cell's image for the target kernel.
pub(crate) async fn fetch_source(
    services: &BuildServices,
    source: &SourceSpec,
    target: &KernelTarget,
) -> Result<FetchedSource> {
    if let SourceOrigin::Image(image) = &source.from {
        return PrebuiltImage::find(services, image, target).await?.fetch(services, target).await;
    }
    let source = source.for_kernel(target).map_err(no_source)?;
    services.process.retry("fetch source", || services.fetcher.sources().fetch(&source)).await
}

/// Returns the first build product in each local source of the image that contains build products.
pub fn build_products(services: &BuildServices, image: &DriverImage) -> BuildProducts {
    let product = |source: &SourceSpec| {
        let product = services.fetcher.sources().product(source)?;
        Some((source.name.to_string(), product.display().to_string()))
    };
    image.spec.sources.iter().filter_map(product).collect()
}

fn no_source(why: String) -> BuildError {
    BuildError::unmet(
        why,
        "exclude this kernel with `kernels` and `release` of the image, or name another source",
    )
}

/// A prebuilt image that exists and is usable.
struct PrebuiltImage {
    /// Reference in the definition, by digest.
    image: ImageReference,
    /// Reference to fetch from: the mirror copy, if there is one.
    nearest: ImageReference,
    /// Directory in the image.
    path: Option<String>,
}

impl PrebuiltImage {
    async fn find(services: &BuildServices, source: &SourceImage, target: &KernelTarget) -> Result<Self> {
        let (wanted, path) =
            source.for_kernel(target).map_err(|missing| no_source(format!("there is no {missing}")))?;
        let absent = || {
            let hint =
                "publish it for this kernel, or exclude the kernel with `kernels` and `release` of the image";
            BuildError::unmet(format!("no prebuilt image {wanted}"), hint)
        };
        let image = services.pinned(wanted.clone()).await?.ok_or_else(absent)?;
        let nearest = services.images.mirrored_reference(image.clone()).await?;
        if services.images.manifest(&nearest).await?.is_none() {
            return Err(absent());
        }
        if let (false, Version::Digest(digest)) = (source.signed_by.is_empty(), &nearest.version) {
            let named = (&*services.definitions.root, &source.signed_by[..]);
            let required = signers(&services.definitions, "signedBy", named, 1).await?;
            let stored = StoredImage { services, repository: &nearest.repository, digest };
            stored.check_signed_by(&required).await?.map_err(|why| {
                let message = format!(
                    "prebuilt image {wanted} ({digest}) is not signed with a key of `signedBy`: {why}"
                );
                BuildError::unmet(
                    message,
                    "contact the publisher of the image, or add the key that signs the image to `signedBy`",
                )
            })?;
        }
        // Read the image only after the signature check: its author controls the size of the configuration.
        let read = read_image(&services.images, &nearest, target.arch).await;
        read.map_err(|error| match error {
            BuildError::Image(why) => {
                let hint = "name the image for this architecture ({{arch}} in `reference`), or publish an \
                    index with both architectures";
                BuildError::unmet(
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

    async fn fetch(&self, services: &BuildServices, target: &KernelTarget) -> Result<FetchedSource> {
        let (tree, _) = image_tree(services, &self.nearest, target.arch, "prebuilt image").await?;
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
            BuildError::unmet(
                message,
                "the image is for another kernel, or has its modules in another directory: correct `path` \
                 of the source",
            )
        })
    }
}
