//! Root file systems made from packages, published as one-layer images. They are the runtime bases of payloads and the
//! toolchains of builds.

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
/// Annotation on a root file system's manifest: whether `/lib` is a symbolic link. Without the annotation, the layers must be
/// read to find out.
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

/// Returns the runtime base `base` of a cell. `sources` are the sources of the cell's image.
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

/// Returns the packages that make up a runtime base for a driver version; `None` for a base that is not made from packages.
pub async fn base_root(
    services: &BuildServices,
    base: &RuntimeBase,
    sources: &[SourceSpec],
    version: &str,
) -> Result<Option<PackageRoot>> {
    let look = || services.fetcher.root_fs().packages_of_base(base, sources, version);
    services.process.retry("look up runtime base", look).await
}

/// Returns the digest and the file of the toolchain's layer. Builds and publishes the root file system if the registry
/// lacks it.
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

/// Returns the cache key of a root file system: a hash of the specification, and of the package for a minimal root file
/// system.
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
struct PublishedRootFs {
    /// Reference by digest.
    reference: ImageReference,
    /// Digest of the content, unless a trusted key signed the image or this machine built the same content.
    unverified: Option<Digest>,
}

/// Returns the digest of the root file system that a build would take from the registry, if the content is unverified:
/// the site has no keys, and this machine did not build the content.
pub(super) async fn unverified_root_fs(
    services: &BuildServices,
    spec: RootFsSpec<'_>,
    arch: Architecture,
) -> Result<Option<Digest>> {
    let key = key_of(services, spec, arch).await?;
    if let Some(root_fs) = published(services, &key, arch).await? {
        return Ok(root_fs.unverified);
    }
    if services.fetcher.root_fs().built_locally(&key)?.is_some() {
        return Ok(None);
    }
    let stored = services.fetcher.root_fs().in_store(&key).await?;
    Ok(stored.filter(|stored| !stored.is_signed).map(|stored| stored.layer.digest))
}

/// Returns the published image of a root file system, by digest. The second value is the digest of the content, if the
/// content is unverified.
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
    let root_file_systems = services.fetcher.root_fs();
    let Some(error) = root_file_systems.can_make(root, arch).err().filter(|error| !error.is_transient())
    else {
        return Ok(None);
    };
    let key = root.key(arch);
    let ImageReference { repository, version } = reference_of_key(&services.images, &key)?;
    let exists = root_file_systems.built_locally(&key)?.is_some()
        || services.images.registry.manifest(&repository, &version).await?.is_some()
        || root_file_systems.in_store(&key).await?.is_some();
    Ok((!exists).then(|| error.into()))
}

/// Looks up the published image of a root file system. Fails if the site has keys, and neither a key nor this machine
/// verifies the content.
async fn published(
    services: &BuildServices,
    key: &str,
    arch: Architecture,
) -> Result<Option<PublishedRootFs>> {
    let ImageReference { repository, version } = reference_of_key(&services.images, key)?;
    let Some(found) = services.images.registry.manifest(&repository, &version).await? else {
        return Ok(None);
    };
    let stored = StoredImage { services, repository: &repository, digest: &found.digest };
    let unverified = match stored.signature_status().await? {
        SignatureStatus::Signed => {
            let identity = ImageManifest::parse(&found.bytes)?.annotations.remove(annotations::IDENTITY);
            // Someone may have copied another signed image, with its signature, to this tag.
            if identity.as_deref() != Some(key) {
                return Err(wrong_identity(&repository, &version));
            }
            None
        }
        status @ (SignatureStatus::NoKeys | SignatureStatus::Refused(_)) => {
            let content = content_digest(&services.images, &repository, &found.bytes, arch).await?;
            let local = services.fetcher.root_fs().built_locally(key)?;
            let is_local = local.is_some_and(|local| local.layer.digest == content);
            if !is_local && status != SignatureStatus::NoKeys {
                stored.ensure_trusted("root file system").await?;
            }
            (!is_local).then_some(content)
        }
    };
    let reference = ImageReference { repository, version: Version::Digest(found.digest) };
    Ok(Some(PublishedRootFs { reference, unverified }))
}

fn wrong_identity(repository: &Repository, version: &Version) -> BuildError {
    BuildError::unmet(
        format!("{repository}{version} is signed, but its annotations name another root file system"),
        "delete the tag: farrier then builds and publishes the root file system again",
    )
}

/// Returns the digest that identifies a root file system's content. If farrier would write the same manifest and
/// configuration for the layer, the layer's digest is enough. Otherwise returns the manifest's digest, because build steps
/// and containers may read the fields that differ.
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
) -> Result<PublishedRootFs> {
    let action = "make root file system";
    let (made, title) = match spec {
        RootFsSpec::Packages(root) => {
            let made =
                services.process.retry(action, || services.fetcher.root_fs().bootstrap(root, arch)).await?;
            (made, format!("{} root file system", root.package_source(arch)))
        }
        RootFsSpec::Minimal(spec) => {
            let made =
                services.process.retry(action, || services.fetcher.root_fs().minimal(spec, arch)).await?;
            (made, format!("{} base", spec.package))
        }
    };
    let file = made.file.clone();
    let usr_merged = blocking(move || payload::is_usr_merged(&[file])).await?;
    let layer = made.layer;
    let annotations = BTreeMap::from([
        (annotations::TITLE.to_owned(), title.clone()),
        (annotations::IDENTITY.to_owned(), key.to_owned()),
        (USR_MERGED.to_owned(), usr_merged.to_string()),
    ]);
    let image = root_fs_image(&layer, &annotations, arch)?;
    let (ImageReference { repository, version }, registry) =
        (reference_of_key(&services.images, key)?, &services.images.registry);
    registry.push_blob(&repository, &layer.digest, &made.file).await?;
    registry.push_bytes(&repository, &image.config).await?;
    let by_digest = Version::Digest(image.digest.clone());
    // Sign before the tag exists, so that an image found by its tag is always signed.
    for version in [&by_digest, &version] {
        registry.push_manifest(&repository, version, media_type::OCI_MANIFEST, &image.manifest).await?;
        StoredImage { services, repository: &repository, digest: &image.digest }.sign(&title, &[]).await?;
    }
    // The content comes from the store or was built on this machine. With keys, the store only returns signed content.
    let is_verified =
        has_keys(&services.definitions) || services.fetcher.root_fs().built_locally(key)?.is_some();
    let reference = ImageReference { repository, version: by_digest };
    Ok(PublishedRootFs { reference, unverified: (!is_verified).then_some(layer.digest) })
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

/// Reads an image like [`base_image`], and returns the manifest's annotations as well. Does not read the layers, so
/// `usr_merged` is always false.
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

/// Unpacks a cell's toolchain into a tree in the cache. Also returns the image, whose configuration has the settings that a
/// `FROM` inherits.
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

/// Returns the files of a base's layers in the cache, lowest first. Fetches files that the cache lacks.
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
