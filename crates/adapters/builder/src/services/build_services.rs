//! [`BuildServices`]: the services that builds share, lookups of published images, and pinned references.

use std::collections::{BTreeMap, BTreeSet};

use farrier_core::{
    facts::{ImageFacts, annotations},
    image::{Definitions, ImageReference, Repository, Version, share_tags},
    kernel::Architecture,
    plan::{ImageLocation, Published},
};
use farrier_inputs::{Fetcher, key_expiries};
use farrier_local::{blocking::blocking, cache::Cache};
use farrier_store::registry::{
    Registry, RegistryError, RegistryLocation, RegistryOptions, StoredManifest, connect,
};
use jiff::Timestamp;
use oci::{self, AnyManifest, ImageIndex, ImageManifest, Platform, error_chain};

use super::{
    error::{BuildError, Result},
    image_access::{ImageAccess, fetch_small},
    process::ProcessControl,
    tools::BuildTools,
};

/// Maximum number of concurrent requests to a registry for independent lookups.
pub const MAX_CONCURRENT_REQUESTS: usize = 16;

/// Services and settings of builds and image operations, in groups. A function that needs only one group takes the group as
/// its parameter. Clones share the engine, the registries and the cache.
#[derive(Clone)]
pub struct BuildServices {
    /// Definitions in use.
    pub definitions: Definitions,
    /// Fetches headers, sources and root file systems.
    pub fetcher: Fetcher,
    /// Cache of header sets, logs and failures.
    pub cache: Cache,
    /// Registries that images are published to and read from, and the cache of their blobs.
    pub images: ImageAccess,
    /// Tools that compile, check and sign a build.
    pub tools: BuildTools,
    /// Progress reports, cancellation and the fence of this process.
    pub process: ProcessControl,
}

/// Returns the registry as the planner needs it: the prefix of image names, and whether nodes can pull from there.
pub fn image_location(location: &RegistryLocation) -> ImageLocation {
    match location {
        RegistryLocation::Remote { .. } => ImageLocation { prefix: location.to_string(), pullable: true },
        RegistryLocation::Layout(_) => ImageLocation { prefix: String::new(), pullable: false },
    }
}

impl BuildServices {
    /// Returns a clone for one piece of work. The cache entries that the work uses are protected from eviction until the
    /// clone is dropped.
    #[must_use]
    pub fn in_use(&self) -> Self {
        let fetcher = self.fetcher.in_use();
        let cache = fetcher.cache().clone();
        let images = ImageAccess { cache: cache.clone(), ..self.images.clone() };
        Self { fetcher, cache, images, ..self.clone() }
    }

    /// Removes leftovers of killed farrier processes from the cache, and evicts entries above the quotas. On failure
    /// only disk space is wasted.
    pub async fn make_room(&self) {
        let (cache, quotas) = (self.cache.clone(), self.definitions.site.storage);
        if let Err(error) = blocking(move || cache.make_room(&quotas)).await {
            tracing::warn!(error = %error_chain(&error), "the cache could not be cleaned up");
        }
    }

    /// Returns the expiry times, as read at startup, of the certificates that farrier presents, trusts or signs modules
    /// with, and of the OpenPGP key files that definitions name.
    pub fn certificate_expiries(&self) -> Vec<(String, Timestamp)> {
        let signer = self.tools.module_signer.iter();
        let signer = signer.map(|signer| ("moduleSigning".to_owned(), signer.certificate().not_after));
        let keys = key_expiries(&self.definitions);
        self.fetcher.net().certificate_expiries().into_iter().chain(signer).chain(keys).collect()
    }

    /// Whether the registry refuses an image to clients without credentials; false if the registry does not answer.
    pub async fn refuses_anonymous(&self, image: &ImageReference) -> bool {
        let options = RegistryOptions { net: self.fetcher.net().clone(), ..RegistryOptions::default() };
        let anonymous = connect(&self.images.location, &options);
        let outcome = anonymous.manifest(&image.repository, &image.version).await;
        matches!(outcome, Err(RegistryError::Denied { .. }))
    }

    /// Looks up a published image.
    pub async fn look_up(&self, reference: &ImageReference) -> Result<Option<Published>> {
        let ImageReference { repository, version } = reference;
        let registry = self.images.registry_of_needs(repository);
        let Some(stored) = registry.manifest(repository, version).await? else { return Ok(None) };
        let mut found = published(&stored);
        found.platforms = match AnyManifest::parse(&stored.bytes) {
            Ok(AnyManifest::Index(index)) => {
                let entries = entries(registry, repository, &index, &stored.bytes).await?.into_iter();
                entries.map(|(architecture, stored)| (architecture, published(&stored))).collect()
            }
            // Architectures may share this tag: the tag patterns do not contain the architecture, or the image is a union.
            Ok(AnyManifest::Image(image))
                if self.shares_tags(repository) || image.annotations.contains_key(annotations::MEMBERS) =>
            {
                let architecture = self.architecture_of(registry, repository, &image).await?;
                architecture.map(|architecture| (architecture, found.clone())).into_iter().collect()
            }
            _ => BTreeMap::new(),
        };
        Ok(Some(found))
    }

    /// Returns the architecture in an image's configuration; `None` if the configuration is missing or invalid.
    async fn architecture_of(
        &self,
        registry: &dyn Registry,
        repository: &Repository,
        image: &ImageManifest,
    ) -> Result<Option<Architecture>> {
        let config =
            fetch_small(&self.images.cache, registry, repository, &image.config, "configuration").await;
        match config {
            Ok(config) => Ok(oci::architecture_of(&config).and_then(|name| name.parse().ok())),
            Err(error) if error.is_unreachable() => Err(error),
            Err(_) => Ok(None),
        }
    }

    /// Looks up the image for one architecture.
    pub(crate) async fn look_up_for(
        &self,
        reference: &ImageReference,
        architecture: Architecture,
    ) -> Result<Option<Published>> {
        let found = self.look_up(reference).await?;
        Ok(found.and_then(|found| found.for_architecture(architecture).cloned()))
    }

    /// Whether images of several architectures share the tags of a repository.
    pub(crate) fn shares_tags(&self, repository: &Repository) -> bool {
        let name = self.images.location.name_of(repository);
        name.and_then(|name| self.definitions.images.get(name))
            .is_some_and(|image| share_tags(&image.spec.tags))
    }

    /// Parses a reference in a definition and pins its tag to the current digest.
    pub async fn resolve_reference(&self, text: &str) -> Result<ImageReference> {
        self.pinned(text.parse()?).await?.ok_or_else(|| BuildError::no_such_image(text))
    }

    /// Pins a reference to the current digest; `None` if the tag does not exist.
    pub async fn pinned(&self, reference: ImageReference) -> Result<Option<ImageReference>> {
        if matches!(reference.version, Version::Digest(_)) {
            return Ok(Some(reference));
        }
        // Ask the reference's own registry, because the tag may have moved there. Offline, use the mirror copy.
        let copy = if self.fetcher.is_offline() { self.images.copy_of(&reference).await? } else { None };
        let digest = match copy {
            Some((_, digest)) => Some(digest),
            None => self.images.manifest(&reference).await?.map(|stored| stored.digest),
        };
        let repository = reference.repository;
        Ok(digest.map(|digest| ImageReference { repository, version: Version::Digest(digest) }))
    }
}

/// Extracts the facts of a manifest. A manifest that farrier did not write, or that is invalid, has no input hash: the
/// plan reports a conflict.
fn published(stored: &StoredManifest) -> Published {
    let annotations = ImageManifest::parse(&stored.bytes).map(|manifest| manifest.annotations);
    let annotations = annotations.unwrap_or_default();
    let facts = ImageFacts::from_annotations(&annotations).unwrap_or_default();
    Published {
        digest: stored.digest.clone(),
        input_hash: facts.input_hash,
        declared_hash: facts.declared_hash,
        exposed: facts.exposed_digest,
        verdict: facts.verdict,
        kernel_release: facts.kernel_release.map(|release| release.to_string()),
        platforms: BTreeMap::new(),
    }
}

/// Returns the images of an index that farrier wrote, by architecture. Returns no images if the bytes are not in the form
/// that farrier writes, or if farrier did not publish one of the entries: a container runtime that parses the index must
/// find exactly the returned images.
pub async fn entries(
    registry: &dyn Registry,
    repository: &Repository,
    index: &ImageIndex,
    bytes: &[u8],
) -> Result<BTreeMap<Architecture, StoredManifest>> {
    let (mut images, mut seen) = (BTreeMap::new(), BTreeSet::new());
    if !index.is_canonical(bytes) {
        return Ok(images);
    }
    for entry in &index.manifests {
        let is_linux = |arch: &Architecture| entry.platform == Some(Platform::linux(arch.as_str()));
        let architecture = entry.platform.as_ref().and_then(|platform| platform.architecture.parse().ok());
        let Some(architecture) = architecture.filter(is_linux).filter(|arch| seen.insert(*arch)) else {
            return Ok(BTreeMap::new());
        };
        // Skip a missing image: the next reconcile publishes it.
        let Some(stored) = registry.manifest(repository, &Version::Digest(entry.digest.clone())).await?
        else {
            continue;
        };
        if published(&stored).input_hash.is_none() {
            return Ok(BTreeMap::new());
        }
        images.insert(architecture, stored);
    }
    Ok(images)
}
