//! Adapter: root file systems made from packages, kept in the registry as one-layer images, and the
//! bases that payloads are put on.

use std::{collections::BTreeMap, path::PathBuf};

use crate::{
    blocking::blocking,
    image::{ImageReference, MinimalSpec, Repository, RuntimeBase, Tag, Version},
    inputs::PackageRoot,
    kernel::{Architecture, Toolchain},
    oci::{self, AnyManifest, Assembly, Base, ImageManifest, Layer, annotations, media_type},
    parts::{Parts, TargetError},
    payload,
    plan::Cell,
};

/// Where root file systems are published, below the registry's prefix.
const ROOT_FS: &str = "farrier-rootfs";
/// Says on a root file system's manifest whether `/lib` is a link, so that its layers need not be read.
const USR_MERGED: &str = "farrier.dev/usr-merged";
/// Debian's default for containers' processes.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The image below a payload.
pub(crate) struct BaseImage {
    /// Configuration and layers.
    pub(crate) image: Base,
    /// Where its blobs are.
    pub(crate) repository: Repository,
    /// Is `/lib` a link to `/usr/lib` in it?
    pub(crate) usr_merged: bool,
}

/// What a root file system is made of.
#[derive(Clone, Copy)]
enum RootFsSpec<'a> {
    Packages(&'a PackageRoot),
    Minimal(&'a MinimalSpec),
}

/// The repository's name and the tag under which a root file system is published.
pub(crate) fn root_fs_tag(key: &str) -> Result<(&'static str, Tag), TargetError> {
    Ok((ROOT_FS, key[..32].parse()?))
}

/// The runtime base of a cell's definition.
pub(crate) async fn runtime_base(
    parts: &Parts,
    base: &RuntimeBase,
    cell: &Cell,
) -> Result<BaseImage, TargetError> {
    let arch = cell.target.arch;
    let reference = match base {
        RuntimeBase::Need(name) => {
            let need = cell.needs.iter().find(|need| need.name == *name);
            let image = need.and_then(|need| need.image.clone());
            image.ok_or_else(|| TargetError::no_such_image(name))?
        }
        RuntimeBase::Bootstrap(spec) => {
            let root = PackageRoot::RuntimeBase(spec.for_version(&cell.version));
            ensure_published(parts, RootFsSpec::Packages(&root), arch).await?
        }
        RuntimeBase::Minimal(spec) => ensure_published(parts, RootFsSpec::Minimal(spec), arch).await?,
        RuntimeBase::Image(text) => {
            // The digest that the input hash has, whatever the tag names by now.
            let planned = cell.fetched.base.as_deref().unwrap_or(text);
            parts.nearest(parts.resolve_reference(planned).await?).await?
        }
    };
    base_image(parts, &reference, arch).await
}

/// The layer file of a root file system of packages: from the registry, else made now and published.
pub(crate) async fn root_fs_layer(
    parts: &Parts,
    root: &PackageRoot,
    arch: Architecture,
) -> Result<PathBuf, TargetError> {
    let reference = ensure_published(parts, RootFsSpec::Packages(root), arch).await?;
    let base = base_image(parts, &reference, arch).await?;
    let layer = base.image.layers.first().ok_or_else(|| TargetError::no_such_image(&reference))?;
    parts.blob_file(&base.repository, layer).await
}

/// Where a root file system of packages is published.
pub(crate) fn root_fs_reference(
    parts: &Parts,
    root: &PackageRoot,
    arch: Architecture,
) -> Result<ImageReference, TargetError> {
    reference_of_key(parts, &root.key(arch))
}

fn reference_of_key(parts: &Parts, key: &str) -> Result<ImageReference, TargetError> {
    let (name, tag) = root_fs_tag(key)?;
    Ok(ImageReference { repository: parts.location.repository(name)?, version: Version::Tag(tag) })
}

/// Makes sure that the registry has the root file system.
async fn ensure_published(
    parts: &Parts,
    spec: RootFsSpec<'_>,
    arch: Architecture,
) -> Result<ImageReference, TargetError> {
    let reference = match spec {
        RootFsSpec::Packages(root) => root_fs_reference(parts, root, arch)?,
        RootFsSpec::Minimal(spec) => {
            let key =
                parts.retry("look up busybox", || parts.fetcher.root_fs().minimal_key(spec, arch)).await?;
            reference_of_key(parts, &key)?
        }
    };
    if parts.registry.manifest(&reference.repository, &reference.version).await?.is_none() {
        publish(parts, spec, arch, &reference).await?;
    }
    Ok(reference)
}

async fn publish(
    parts: &Parts,
    spec: RootFsSpec<'_>,
    arch: Architecture,
    reference: &ImageReference,
) -> Result<(), TargetError> {
    let action = "make root file system";
    let (made, title) = match spec {
        RootFsSpec::Packages(root) => {
            let made = parts.retry(action, || parts.fetcher.root_fs().bootstrap(root, arch)).await?;
            (made, format!("{} root file system", root.spec().suite))
        }
        RootFsSpec::Minimal(spec) => {
            let made = parts.retry(action, || parts.fetcher.root_fs().minimal(spec, arch)).await?;
            (made, format!("{} base", spec.package))
        }
    };
    let file = made.layer.clone();
    let usr_merged = blocking(move || payload::is_usr_merged(&[file])).await?;
    let layer = Layer {
        digest: made.digest,
        diff_id: made.diff_id,
        size: made.size,
        media_type: media_type::OCI_LAYER_GZIP,
    };
    let notes = BTreeMap::from([
        (annotations::TITLE.to_owned(), title),
        (USR_MERGED.to_owned(), usr_merged.to_string()),
    ]);
    let image = oci::assemble(&Assembly {
        base: None,
        entrypoint_layer: None,
        layers: std::slice::from_ref(&layer),
        entrypoint: &[],
        env: &BTreeMap::from([("PATH".to_owned(), DEFAULT_PATH.to_owned())]),
        labels: &BTreeMap::new(),
        annotations: &notes,
        architecture: arch.as_str(),
    })?;
    let (ImageReference { repository, version }, registry) = (reference, &parts.registry);
    registry.push_blob(repository, &layer.digest, &made.layer).await?;
    registry.push_bytes(repository, &image.config).await?;
    registry.push_manifest(repository, version, media_type::OCI_MANIFEST, &image.manifest).await?;
    Ok(())
}

/// Reads an image's manifest and configuration, picking the architecture out of an index.
pub(crate) async fn base_image(
    parts: &Parts,
    reference: &ImageReference,
    arch: Architecture,
) -> Result<BaseImage, TargetError> {
    let (mut base, annotations) = read_image(parts, reference, arch).await?;
    base.usr_merged = if let Some(value) = annotations.get(USR_MERGED) {
        value == "true"
    } else {
        let layers = layer_files(parts, &base).await?;
        blocking(move || payload::is_usr_merged(&layers)).await?
    };
    Ok(base)
}

/// The same without a look into the layers, and with the manifest's annotations.
async fn read_image(
    parts: &Parts,
    reference: &ImageReference,
    arch: Architecture,
) -> Result<(BaseImage, BTreeMap<String, String>), TargetError> {
    let repository = &reference.repository;
    let mut stored = parts.existing_manifest(reference).await?;
    if let AnyManifest::Index(index) = AnyManifest::parse(&stored.bytes)? {
        let version = Version::Digest(index.for_architecture(arch.as_str())?.digest.clone());
        let found = parts.registry_of(repository).manifest(repository, &version).await?;
        stored = found.ok_or_else(|| TargetError::no_such_image(reference))?;
    }
    let manifest = ImageManifest::parse(&stored.bytes)?;
    let config = fs_err::tokio::read(parts.blob_file(repository, &manifest.config).await?).await?;
    let image = Base::parse(&stored.bytes, &config, arch.as_str())?;
    let base = BaseImage { image, repository: repository.clone(), usr_merged: false };
    Ok((base, manifest.annotations))
}

/// A toolchain as a tree in the cache, with the image that it is: its configuration says what a `FROM` of it brings along.
/// `pinned` is what the input hash has of a toolchain that is an image: with its digest, whatever the tag names by now.
pub(crate) async fn toolchain_tree(
    parts: &Parts,
    toolchain: &Toolchain,
    pinned: &str,
    arch: Architecture,
) -> Result<(PathBuf, Base), TargetError> {
    let reference = match toolchain {
        Toolchain::Bootstrap(spec) => {
            let root = PackageRoot::Toolchain(spec.clone());
            ensure_published(parts, RootFsSpec::Packages(&root), arch).await?
        }
        Toolchain::Image(_) => parts.nearest(pinned.parse()?).await?,
    };
    let (base, _) = read_image(parts, &reference, arch).await?;
    let files = layer_files(parts, &base).await?;
    let layers = base.image.layers.iter().map(|layer| layer.digest.clone()).zip(files).collect();
    let tree = parts.fetcher.root_fs().tree(layers, format!("toolchain {reference}")).await?;
    Ok((tree, base.image))
}

/// A base's layers as files in the cache, the lowest first.
pub(crate) async fn layer_files(parts: &Parts, base: &BaseImage) -> Result<Vec<PathBuf>, TargetError> {
    let mut files = Vec::new();
    for layer in &base.image.layers {
        files.push(parts.blob_file(&base.repository, layer).await?);
    }
    Ok(files)
}

#[cfg(test)]
#[path = "root_fs_tests.rs"]
mod tests;
