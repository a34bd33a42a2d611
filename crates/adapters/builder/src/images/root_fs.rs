//! Root file systems made from packages, which the registry keeps as one-layer images, and the runtime bases of
//! payloads.

use std::{collections::BTreeMap, path::PathBuf};

use farrier_core::{
    facts::{annotations, media_type},
    image::{Digest, ImageReference, MinimalSpec, Repository, RuntimeBase, SourceSpec, Tag, Version},
    kernel::{Architecture, Toolchain},
    plan::{Cell, FetchedInputs},
};
use farrier_inputs::PackageRoot;
use farrier_local::blocking::blocking;
use farrier_payload as payload;
use farrier_store::SignatureStatus;
use oci::{Assembled, Assembly, Base, ImageError, ImageManifest, Layer};

use super::{keys::has_keys, signatures::StoredImage};
use crate::services::{BuildError, BuildServices, ImageAccess, Result};

/// Repository of published root file systems, below the registry's prefix.
pub(super) const ROOT_FS: &str = "farrier-rootfs";
/// Annotation on a root file system's manifest: whether `/lib` is a symbolic link. It saves reading the layers.
const USR_MERGED: &str = "farrier.dev/usr-merged";
/// Debian's default `PATH` in containers.
pub(crate) const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The base image below a payload.
#[derive(Debug)]
pub(crate) struct BaseImage {
    /// Configuration and layers.
    pub image: Base,
    /// Repository of its blobs.
    pub repository: Repository,
    /// Whether `/lib` is a symbolic link to `/usr/lib`.
    pub usr_merged: bool,
}

/// Specification of a root file system.
#[derive(Clone, Copy)]
pub(super) enum RootFsSpec<'a> {
    Packages(&'a PackageRoot),
    Minimal(&'a MinimalSpec),
}

/// Repository name and tag of a published root file system.
pub fn root_fs_tag(key: &str) -> Result<(&'static str, Tag)> {
    Ok((ROOT_FS, key[..32].parse()?))
}

/// Returns the runtime base of a cell, for a definition with these sources.
pub(crate) async fn runtime_base(
    services: &BuildServices,
    base: &RuntimeBase,
    sources: &[SourceSpec],
    cell: &Cell,
) -> Result<BaseImage> {
    let arch = cell.target.arch;
    let reference = match base {
        RuntimeBase::Need(name) => {
            let need = cell.needs.iter().find(|need| need.name == *name);
            let image = need.and_then(|need| need.image.clone());
            image.ok_or_else(|| BuildError::no_such_image(name))?
        }
        RuntimeBase::Bootstrap(_) | RuntimeBase::Runfile(_) => {
            let root = base_root(services, base, sources, &cell.version).await?;
            let root = root.ok_or_else(|| BuildError::definition_gone(cell.image.as_str()))?;
            cell_root_fs(services, RootFsSpec::Packages(&root), cell, FetchedInputs::BASE).await?
        }
        RuntimeBase::Minimal(spec) => {
            cell_root_fs(services, RootFsSpec::Minimal(spec), cell, FetchedInputs::BASE).await?
        }
        RuntimeBase::Image(text) => {
            // Use the digest from the input hash, because the tag may have moved.
            let planned = cell.fetched.base.as_deref().unwrap_or(text);
            services.images.mirrored_reference(services.resolve_reference(planned).await?).await?
        }
    };
    base_image(&services.images, &reference, arch).await
}

/// Root file system of packages that serves as the base for a version of the driver; `None` for other bases.
pub async fn base_root(
    services: &BuildServices,
    base: &RuntimeBase,
    sources: &[SourceSpec],
    version: &str,
) -> Result<Option<PackageRoot>> {
    let look = || services.fetcher.root_fs().packages_of_base(base, sources, version);
    services.process.retry("look up runtime base", look).await
}

/// Returns the digest and the file of the toolchain's layer. The root file system is taken from the registry, or
/// created and published.
pub async fn root_fs_layer(
    services: &BuildServices,
    root: &PackageRoot,
    cell: &Cell,
) -> Result<(Digest, PathBuf)> {
    let reference =
        cell_root_fs(services, RootFsSpec::Packages(root), cell, FetchedInputs::TOOLCHAIN).await?;
    let base = base_image(&services.images, &reference, cell.target.arch).await?;
    let layer = base.image.layers.first().ok_or_else(|| BuildError::no_such_image(&reference))?;
    Ok((layer.digest.clone(), services.images.blob_file(&base.repository, layer).await?))
}

fn reference_of_key(access: &ImageAccess, key: &str) -> Result<ImageReference> {
    let (name, tag) = root_fs_tag(key)?;
    Ok(ImageReference { repository: access.location.repository(name)?, version: Version::Tag(tag) })
}

/// Key over the whole specification, and over the package that a minimal root file system is made from.
async fn key_of(services: &BuildServices, spec: RootFsSpec<'_>, arch: Architecture) -> Result<String> {
    match spec {
        RootFsSpec::Packages(root) => Ok(root.key(arch)),
        RootFsSpec::Minimal(spec) => {
            services
                .process
                .retry("look up busybox", || services.fetcher.root_fs().minimal_key(spec, arch))
                .await
        }
    }
}

/// A root file system in the registry.
struct Published {
    /// Reference by digest.
    reference: ImageReference,
    /// Digest of the content, if neither a trusted key nor this machine vouches for it.
    unverified: Option<Digest>,
}

/// Digest of the root file system that a build would take from the registry, if it is unverified: the site has no keys,
/// and this machine did not create it.
pub(super) async fn unverified_root_fs(
    services: &BuildServices,
    spec: RootFsSpec<'_>,
    arch: Architecture,
) -> Result<Option<Digest>> {
    let key = key_of(services, spec, arch).await?;
    if let Some(root_fs) = published(services, &key, arch).await? {
        return Ok(root_fs.unverified);
    }
    if services.fetcher.root_fs().made_here(&key, arch)?.is_some() {
        return Ok(None);
    }
    let stored = services.fetcher.root_fs().in_store(&key).await?;
    Ok(stored.filter(|stored| !stored.is_signed).map(|stored| stored.layer.digest))
}

/// Reference by digest of the image that a root file system of packages is published as. The second value is the digest
/// of its content if the content is unverified.
pub(crate) async fn published_root_fs(
    services: &BuildServices,
    root: &PackageRoot,
    arch: Architecture,
) -> Result<Option<(ImageReference, Option<Digest>)>> {
    let root_fs = published(services, &root.key(arch), arch).await?;
    Ok(root_fs.map(|root_fs| (root_fs.reference, root_fs.unverified)))
}

/// Returns the reason why this machine cannot create a root file system of packages; `None` if it can, or if the root
/// file system already exists.
pub(super) async fn unbuildable(
    services: &BuildServices,
    root: &PackageRoot,
    arch: Architecture,
) -> Result<Option<BuildError>> {
    let makes = services.fetcher.root_fs();
    let Some(error) = makes.can_make(root, arch).err().filter(|error| !error.is_transient()) else {
        return Ok(None);
    };
    let key = root.key(arch);
    let ImageReference { repository, version } = reference_of_key(&services.images, &key)?;
    let exists = makes.made_here(&key, arch)?.is_some()
        || services.images.registry.manifest(&repository, &version).await?.is_some()
        || makes.in_store(&key).await?.is_some();
    Ok((!exists).then(|| error.into()))
}

/// Looks up the image that a root file system is published as.
async fn published(services: &BuildServices, key: &str, arch: Architecture) -> Result<Option<Published>> {
    let ImageReference { repository, version } = reference_of_key(&services.images, key)?;
    let Some(found) = services.images.registry.manifest(&repository, &version).await? else {
        return Ok(None);
    };
    let stored = StoredImage { services, repository: &repository, digest: &found.digest };
    let signature_status = stored.signature_status().await?;
    let unverified = if signature_status == SignatureStatus::Signed {
        // Someone may have copied another signed image, with its signature, to this tag.
        let identity = ImageManifest::parse(&found.bytes)?.annotations.remove(annotations::IDENTITY);
        if identity.as_deref() != Some(key) {
            let message = format!(
                "{repository}:{version} is signed, but its annotations name another root file system"
            );
            return Err(BuildError::unmet(
                message,
                "delete the tag: farrier then builds and publishes the root file system again",
            ));
        }
        None
    } else {
        let content = content_digest(&services.images, &repository, &found.bytes, arch).await?;
        let made = services.fetcher.root_fs().made_here(key, arch)?.map(|made| made.digest);
        Some(content).filter(|content| made.as_ref() != Some(content))
    };
    if unverified.is_some() && signature_status != SignatureStatus::NoKeys {
        stored.ensure_trusted("root file system").await?;
    }
    let reference = ImageReference { repository, version: Version::Digest(found.digest) };
    Ok(Some(Published { reference, unverified }))
}

/// Digest of a root file system's content: the layer's digest, if farrier would write the same manifest and
/// configuration for the layer. Otherwise the manifest's digest, because build steps and containers may read other
/// fields of the manifest or the configuration.
async fn content_digest(
    access: &ImageAccess,
    repository: &Repository,
    manifest: &[u8],
    arch: Architecture,
) -> Result<Digest> {
    let parsed = ImageManifest::parse(manifest)?;
    let config = access.configuration(repository, &parsed.config).await?;
    let image = Base::parse(manifest, &config, arch.as_str())?;
    if let ([only], [diff_id]) = (&image.layers[..], &image.diff_ids[..])
        && let Ok(diff_id) = diff_id.parse()
    {
        let media_type = media_type::OCI_LAYER_GZIP;
        let layer = Layer { digest: only.digest.clone(), diff_id, size: only.size, media_type };
        let rebuilt = root_fs_image(&layer, &parsed.annotations, arch)?;
        if rebuilt.manifest == manifest && rebuilt.config == config {
            return Ok(layer.digest);
        }
    }
    Ok(image.digest)
}

/// Assembles the image of a root file system from its only layer.
fn root_fs_image(
    layer: &Layer,
    annotations: &BTreeMap<String, String>,
    arch: Architecture,
) -> Result<Assembled, ImageError> {
    oci::assemble(&Assembly {
        base: None,
        entrypoint_layer: None,
        layers: std::slice::from_ref(layer),
        entrypoint: &[],
        env: &BTreeMap::from([("PATH".to_owned(), DEFAULT_PATH.to_owned())]),
        labels: &BTreeMap::new(),
        annotations,
        architecture: arch.as_str(),
    })
}

/// Ensures that the registry has a cell's root file system, and returns its reference by digest. Fails if the content
/// differs from the content in the input hash, because someone may have replaced the image.
async fn cell_root_fs(
    services: &BuildServices,
    spec: RootFsSpec<'_>,
    cell: &Cell,
    input: &'static str,
) -> Result<ImageReference> {
    let arch = cell.target.arch;
    let key = key_of(services, spec, arch).await?;
    let root_fs = match published(services, &key, arch).await? {
        Some(root_fs) => root_fs,
        None => publish(services, spec, arch, &key).await?,
    };
    if root_fs.unverified.as_ref() != cell.fetched.unverified.get(input) {
        return Err(BuildError::Outdated(format!("the {input} in the registry")));
    }
    Ok(root_fs.reference)
}

async fn publish(
    services: &BuildServices,
    spec: RootFsSpec<'_>,
    arch: Architecture,
    key: &str,
) -> Result<Published> {
    let action = "make root file system";
    let (made, title) = match spec {
        RootFsSpec::Packages(root) => {
            let made =
                services.process.retry(action, || services.fetcher.root_fs().bootstrap(root, arch)).await?;
            (made, format!("{} root file system", root.name(arch)))
        }
        RootFsSpec::Minimal(spec) => {
            let made =
                services.process.retry(action, || services.fetcher.root_fs().minimal(spec, arch)).await?;
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
        (annotations::TITLE.to_owned(), title.clone()),
        (annotations::IDENTITY.to_owned(), key.to_owned()),
        (USR_MERGED.to_owned(), usr_merged.to_string()),
    ]);
    let image = root_fs_image(&layer, &notes, arch)?;
    let (ImageReference { repository, version }, registry) =
        (reference_of_key(&services.images, key)?, &services.images.registry);
    registry.push_blob(&repository, &layer.digest, &made.layer).await?;
    registry.push_bytes(&repository, &image.config).await?;
    let by_digest = Version::Digest(image.digest.clone());
    // Sign before the tag exists, so that an image found by its tag is always signed.
    for version in [&by_digest, &version] {
        registry.push_manifest(&repository, version, media_type::OCI_MANIFEST, &image.manifest).await?;
        StoredImage { services, repository: &repository, digest: &image.digest }.sign(&title, &[]).await?;
    }
    // If the site has keys, content from the store was verified by signature, and any other content was created on this
    // machine.
    let is_vouched_for =
        has_keys(&services.definitions) || services.fetcher.root_fs().made_here(key, arch)?.is_some();
    let reference = ImageReference { repository, version: by_digest };
    Ok(Published { reference, unverified: Some(layer.digest).filter(|_| !is_vouched_for) })
}

/// Reads an image's manifest and configuration, and selects the architecture from an index.
pub(crate) async fn base_image(
    access: &ImageAccess,
    reference: &ImageReference,
    arch: Architecture,
) -> Result<BaseImage> {
    let (mut base, annotations) = read_image(access, reference, arch).await?;
    base.usr_merged = if let Some(value) = annotations.get(USR_MERGED) {
        value == "true"
    } else {
        let layers = layer_files(access, &base).await?;
        blocking(move || payload::is_usr_merged(&layers)).await?
    };
    Ok(base)
}

/// Reads an image like [`base_image`], but not its layers, and returns the manifest's annotations with it.
pub(super) async fn read_image(
    access: &ImageAccess,
    reference: &ImageReference,
    arch: Architecture,
) -> Result<(BaseImage, BTreeMap<String, String>)> {
    let ImageReference { repository, version } = reference;
    let stored = access.registry_of(repository).image(repository, version, arch.as_str()).await?;
    let stored = stored.ok_or_else(|| BuildError::no_such_image(reference))?;
    let manifest = ImageManifest::parse(&stored.bytes)?;
    let config = access.configuration(repository, &manifest.config).await?;
    let image = Base::parse(&stored.bytes, &config, arch.as_str())?;
    let base = BaseImage { image, repository: repository.clone(), usr_merged: false };
    Ok((base, manifest.annotations))
}

/// A cell's toolchain as a tree in the cache, and its image. The image's configuration has the settings that a `FROM`
/// inherits.
pub(crate) async fn toolchain_tree(
    services: &BuildServices,
    toolchain: &Toolchain,
    cell: &Cell,
) -> Result<(PathBuf, BaseImage)> {
    let arch = cell.target.arch;
    let reference = match PackageRoot::of_toolchain(toolchain, &cell.target) {
        Some(root) => {
            cell_root_fs(services, RootFsSpec::Packages(&root), cell, FetchedInputs::TOOLCHAIN).await?
        }
        // `cell.toolchain` contains the digest from the input hash, because the tag may have moved.
        None => services.images.mirrored_reference(cell.toolchain.parse()?).await?,
    };
    image_tree(services, &reference, arch, "toolchain").await
}

/// Unpacks an image into a tree in the cache.
pub(super) async fn image_tree(
    services: &BuildServices,
    reference: &ImageReference,
    arch: Architecture,
    what: &str,
) -> Result<(PathBuf, BaseImage)> {
    let (base, _) = read_image(&services.images, reference, arch).await?;
    let files = layer_files(&services.images, &base).await?;
    let layers = base.image.layers.iter().map(|layer| layer.digest.clone()).zip(files).collect();
    let tree = services.fetcher.root_fs().tree(layers, format!("{what} {reference}")).await?;
    Ok((tree, base))
}

/// Files of a base's layers in the cache, lowest first.
pub(crate) async fn layer_files(access: &ImageAccess, base: &BaseImage) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for layer in &base.image.layers {
        files.push(access.blob_file(&base.repository, layer).await?);
    }
    Ok(files)
}

#[cfg(test)]
#[path = "root_fs_tests.rs"]
mod tests;
