//! Access to images in registries: the registry that farrier publishes to, and the registries of base images.

use std::{path::PathBuf, sync::Arc};

use farrier_core::image::{Digest, ImageReference, Repository, Version, mirror_name};
use farrier_local::cache::{BLOBS, Cache};
use farrier_store::registry::{Keyring, Registry, RegistryError, RegistryLocation, StoredManifest};
use oci::{Descriptor, ImageError, MAX_MANIFEST};
use tokio::io::AsyncReadExt as _;

use super::error::{BuildError, Result};

/// Size limit for documents, in bytes. A report of 500 modules with findings has less than 1 MiB, and a bill of
/// materials with 600 packages has 400 KiB.
pub(crate) const MAX_DOCUMENT: u64 = 16 << 20;

/// Registry in which needed images are looked up, and to which farrier never writes.
#[derive(Clone)]
pub struct NeedsRegistry {
    /// Location as the user named it.
    pub location: RegistryLocation,
    /// Client for that location.
    pub registry: Arc<dyn Registry>,
}

/// Registries that images are published to and read from, and the cache of their blobs. Clones share them.
#[derive(Clone)]
pub struct ImageAccess {
    /// Registry that images are published to, as the user named it.
    pub location: RegistryLocation,
    /// Client for `location`.
    pub registry: Arc<dyn Registry>,
    /// Registry for looking up needed images instead of `registry`. Set for builds that publish nothing.
    pub needs_from: Option<NeedsRegistry>,
    /// Client of the distribution protocol, for base images in other registries.
    pub remote: Arc<dyn Registry>,
    /// Credentials for the engine when it pulls a toolchain.
    pub credentials: Keyring,
    /// Cache of blobs.
    pub cache: Cache,
}

impl ImageAccess {
    /// Returns the client for a repository: the configured registry if farrier publishes to the repository, otherwise a
    /// client of the distribution protocol.
    pub(crate) fn registry_of(&self, repository: &Repository) -> &dyn Registry {
        if self.location.can_address(repository) { self.registry.as_ref() } else { self.remote.as_ref() }
    }

    /// Returns the registry in which needed images of a repository are looked up.
    pub(crate) fn registry_of_needs(&self, repository: &Repository) -> &dyn Registry {
        match &self.needs_from {
            Some(from) => from.registry.as_ref(),
            None => self.registry_of(repository),
        }
    }

    /// Returns the manifest of a reference, if it exists.
    pub async fn manifest(&self, reference: &ImageReference) -> Result<Option<StoredManifest>> {
        let ImageReference { repository, version } = reference;
        Ok(self.registry_of(repository).manifest(repository, version).await?)
    }

    /// Returns the manifest of a reference. Fails if the reference does not exist.
    pub async fn existing_manifest(&self, reference: &ImageReference) -> Result<StoredManifest> {
        self.manifest(reference).await?.ok_or_else(|| BuildError::no_such_image(reference))
    }

    /// Returns the repository of an image's mirror copy; `None` for an image that is already below the registry's
    /// prefix.
    pub fn mirror_repository(&self, reference: &ImageReference) -> Result<Option<Repository>> {
        let location = match &self.needs_from {
            // A layout directory provides images to compile against, and has no mirror copies.
            Some(NeedsRegistry { location: RegistryLocation::Layout(_), .. }) => return Ok(None),
            Some(NeedsRegistry { location, .. }) => location,
            None => &self.location,
        };
        if location.name_of(&reference.repository).is_some() {
            return Ok(None);
        }
        Ok(Some(location.repository(&mirror_name(&reference.repository))?))
    }

    /// Returns the digest of an image's mirror copy, if there is one.
    pub(super) async fn copy_of(&self, reference: &ImageReference) -> Result<Option<(Repository, Digest)>> {
        let Some(mirror) = self.mirror_repository(reference)? else { return Ok(None) };
        let copy = self.registry_of_needs(&mirror).manifest(&mirror, &reference.version).await?;
        Ok(copy.map(|copy| (mirror, copy.digest)))
    }

    /// Returns the reference to fetch an image from: its mirror copy, if there is one, pinned by digest.
    pub(crate) async fn mirrored_reference(&self, reference: ImageReference) -> Result<ImageReference> {
        Ok(match self.copy_of(&reference).await? {
            Some((repository, digest)) => ImageReference { repository, version: Version::Digest(digest) },
            None => reference,
        })
    }

    /// Returns a blob as a file in the cache, fetching it if necessary.
    pub(crate) async fn blob_file(&self, repository: &Repository, blob: &Descriptor) -> Result<PathBuf> {
        let registry = self.registry_of(repository);
        let fetch = |to: PathBuf| async move {
            Ok(registry.fetch_blob(repository, &blob.digest, blob.size, &to).await?)
        };
        self.cache.get_or_make_file(BLOBS, blob.digest.hex(), fetch).await
    }

    /// Reads an image's configuration, of at most [`MAX_MANIFEST`] bytes.
    pub async fn configuration(&self, repository: &Repository, blob: &Descriptor) -> Result<Vec<u8>> {
        if blob.size > MAX_MANIFEST as u64 {
            let bytes = usize::try_from(blob.size).unwrap_or(usize::MAX);
            return Err(ImageError::TooLarge("image configuration", bytes).into());
        }
        let file = fs_err::tokio::File::open(self.blob_file(repository, blob).await?).await?;
        let mut bytes = Vec::new();
        // The cache identifies the blob by digest only, so the descriptor's size may be wrong.
        file.take(blob.size).read_to_end(&mut bytes).await?;
        Ok(bytes)
    }

    /// Reads a small blob into memory.
    pub async fn small_blob(
        &self,
        repository: &Repository,
        blob: &Descriptor,
        name: &str,
    ) -> Result<Vec<u8>> {
        fetch_small(&self.cache, self.registry_of(repository), repository, blob, name).await
    }
}

/// Reads a small blob into memory. `name` describes the blob in errors.
pub(super) async fn fetch_small(
    cache: &Cache,
    registry: &dyn Registry,
    repository: &Repository,
    blob: &Descriptor,
    name: &str,
) -> Result<Vec<u8>> {
    if blob.size > MAX_DOCUMENT {
        let action = format!("fetch {name} {repository}@{}", blob.digest);
        let reason = format!("it has {} bytes, more than the limit of {MAX_DOCUMENT} bytes", blob.size);
        return Err(RegistryError::protocol(registry.describe(), action, reason).into());
    }
    let work = cache.scratch()?;
    let file = work.path().join("blob");
    registry.fetch_blob(repository, &blob.digest, blob.size, &file).await?;
    let mut bytes = Vec::new();
    fs_err::tokio::File::open(&file).await?.take(MAX_DOCUMENT).read_to_end(&mut bytes).await?;
    Ok(bytes)
}
