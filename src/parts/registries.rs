//! Adapter: which registry holds a repository, and what stands there.

use std::{path::PathBuf, sync::Arc};

use tokio::io::AsyncReadExt as _;

use super::{Parts, TargetError};
use crate::{
    image::{Digest, ImageReference, Repository, Version, mirror_name},
    oci::{Descriptor, ImageFacts},
    plan::{ImageLocation, Published},
    registry::{Registry, RegistryError, RegistryLocation, StoredManifest},
};

/// Largest document that is read; a report of 500 modules with findings has less than 1 MiB, a bill of 600 packages 400 KiB.
const MAX_DOCUMENT: u64 = 16 << 20;

/// A registry that is only read.
#[derive(Clone)]
pub struct NeedsFrom {
    /// As the user named it.
    pub location: RegistryLocation,
    /// The same, connected.
    pub registry: Arc<dyn Registry>,
}

/// A registry as a plan needs it: what names start with, and whether nodes can pull from there.
pub(crate) fn image_location(location: &RegistryLocation) -> ImageLocation {
    match location {
        RegistryLocation::Remote { .. } => ImageLocation { prefix: location.to_string(), pullable: true },
        RegistryLocation::Layout(_) => ImageLocation { prefix: String::new(), pullable: false },
    }
}

impl Parts {
    /// The registry that holds a repository: the layout directory for what farrier publishes there, the
    /// distribution protocol for everything else.
    pub(crate) fn registry_of(&self, repository: &Repository) -> &dyn Registry {
        if self.location.holds(repository) { self.registry.as_ref() } else { self.remote.as_ref() }
    }

    /// The registry in which needed images of a repository are looked up.
    pub(crate) fn registry_of_needs(&self, repository: &Repository) -> &dyn Registry {
        match &self.needs_from {
            Some(from) => from.registry.as_ref(),
            None => self.registry_of(repository),
        }
    }

    /// The manifest that a reference names, in the registry that holds it.
    pub(crate) async fn manifest(
        &self,
        reference: &ImageReference,
    ) -> Result<Option<StoredManifest>, TargetError> {
        let ImageReference { repository, version } = reference;
        Ok(self.registry_of(repository).manifest(repository, version).await?)
    }

    /// The same for one that must be there.
    pub(crate) async fn existing_manifest(
        &self,
        reference: &ImageReference,
    ) -> Result<StoredManifest, TargetError> {
        self.manifest(reference).await?.ok_or_else(|| TargetError::no_such_image(reference))
    }

    /// The digest that a reference names now.
    pub(crate) async fn digest_of(&self, reference: &ImageReference) -> Result<Option<Digest>, TargetError> {
        match &reference.version {
            Version::Digest(digest) => Ok(Some(digest.clone())),
            Version::Tag(_) => Ok(self.manifest(reference).await?.map(|manifest| manifest.digest)),
        }
    }

    /// What the registry holds of an image that farrier published, or of a needed one.
    pub(crate) async fn look_up(&self, reference: &ImageReference) -> Result<Option<Published>, TargetError> {
        let ImageReference { repository, version } = reference;
        let manifest = self.registry_of_needs(repository).manifest(repository, version).await?;
        Ok(manifest.map(|manifest| {
            // A manifest that is not ours, or not even one, has no input hash: the plan reports a conflict.
            let facts = ImageFacts::from_manifest(&manifest.bytes).unwrap_or_default();
            Published {
                digest: manifest.digest,
                input_hash: facts.input_hash,
                exposed: facts.exposed_digest,
                verdict: facts.verdict,
                kernel_release: facts.kernel_release.map(|release| release.to_string()),
            }
        }))
    }

    /// Where the copy of an image stands, or would; `None` for what lies below the registry's prefix itself.
    pub(crate) fn place_of_copy(
        &self,
        reference: &ImageReference,
    ) -> Result<Option<Repository>, TargetError> {
        let location = match &self.needs_from {
            // It holds images to compile against; nothing else is read from it.
            Some(NeedsFrom { location: RegistryLocation::Layout(_), .. }) => return Ok(None),
            Some(NeedsFrom { location, .. }) => location,
            None => &self.location,
        };
        if location.name_of(&reference.repository).is_some() {
            return Ok(None);
        }
        Ok(Some(location.repository(&mirror_name(&reference.repository))?))
    }

    /// The digest of an image's copy, where there is a copy.
    async fn copy_of(&self, reference: &ImageReference) -> Result<Option<(Repository, Digest)>, TargetError> {
        let Some(place) = self.place_of_copy(reference)? else { return Ok(None) };
        let found = self.registry_of_needs(&place).manifest(&place, &reference.version).await?;
        Ok(found.map(|found| (place, found.digest)))
    }

    /// Where an image is fetched from: its copy, if the registry has one, since one digest has one content.
    pub(crate) async fn nearest(&self, reference: ImageReference) -> Result<ImageReference, TargetError> {
        Ok(match self.copy_of(&reference).await? {
            Some((repository, digest)) => ImageReference { repository, version: Version::Digest(digest) },
            None => reference,
        })
    }

    /// A reference of a definition with its tag replaced by the digest it has now.
    pub(crate) async fn resolve_reference(&self, text: &str) -> Result<ImageReference, TargetError> {
        let reference: ImageReference = text.parse()?;
        if matches!(reference.version, Version::Digest(_)) {
            return Ok(reference);
        }
        // What a tag names may have changed upstream; where that is not asked, what was copied last counts.
        let copy = if self.fetcher.is_offline() { self.copy_of(&reference).await? } else { None };
        let digest = match copy {
            Some((_, digest)) => digest,
            None => {
                let found = self.manifest(&reference).await?;
                found.ok_or_else(|| TargetError::no_such_image(text))?.digest
            }
        };
        Ok(ImageReference { repository: reference.repository, version: Version::Digest(digest) })
    }

    /// A blob as a file in the cache, fetched when it is not there.
    pub(crate) async fn blob_file(
        &self,
        repository: &Repository,
        blob: &Descriptor,
    ) -> Result<PathBuf, TargetError> {
        let directory = self.cache.blobs();
        let path = directory.join(blob.digest.hex());
        if !path.is_file() {
            fs_err::tokio::create_dir_all(&directory).await?;
            self.registry_of(repository).fetch_blob(repository, &blob.digest, &path).await?;
        }
        Ok(path)
    }

    /// A small blob in memory.
    pub(crate) async fn small_blob(
        &self,
        repository: &Repository,
        blob: &Descriptor,
        what: &str,
    ) -> Result<Vec<u8>, TargetError> {
        let registry = self.registry_of(repository);
        if blob.size > MAX_DOCUMENT {
            return Err(TargetError::Registry(RegistryError::Protocol {
                host: registry.describe(),
                action: format!("fetch {what} {repository}@{}", blob.digest),
                reason: format!("it has {} bytes, at most {MAX_DOCUMENT} are read", blob.size),
            }));
        }
        let work = self.cache.scratch()?;
        let file = work.path().join("blob");
        registry.fetch_blob(repository, &blob.digest, &file).await?;
        let mut bytes = Vec::new();
        fs_err::tokio::File::open(&file).await?.take(MAX_DOCUMENT).read_to_end(&mut bytes).await?;
        Ok(bytes)
    }
}
