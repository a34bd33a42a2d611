//! [`BuildServices`], the services that builds share: selects the registry for a repository, looks up images, and checks
//! whether this process may write.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use farrier_cluster::Fence;
use farrier_core::{
    facts::{ImageFacts, annotations},
    image::{Definitions, Digest, ImageReference, Repository, Version, mirror_name, share_tags},
    kernel::Architecture,
    plan::{Budget, ImageLocation, Instance, Published},
};
use farrier_inputs::{Fetcher, key_ends};
use farrier_local::{
    blocking::blocking,
    cache::{BLOBS, Cache},
};
use farrier_signing::ModuleSigner;
use farrier_store::registry::{
    Keyring, Registry, RegistryError, RegistryLocation, RegistryOptions, StoredManifest, connect,
};
use jiff::Timestamp;
use oci::{
    self, AnyManifest, Descriptor, ImageError, ImageIndex, ImageManifest, MAX_MANIFEST, Platform, error_chain,
};
use tokio::io::AsyncReadExt as _;
use tokio_util::sync::CancellationToken;

use super::{
    boot::BootChecker,
    error::{BuildError, Result},
    lazy::{LazyEngine, LazyEntrypoint},
    outputs::OutputMaker,
    report::Reporter,
    retry::with_retry,
};

/// Maximum number of concurrent requests to a registry for independent lookups.
pub const MAX_CONCURRENT_REQUESTS: usize = 16;

/// Interval at which a process behind a closed fence checks the fence.
const FENCE_POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Size limit for documents, in bytes. A report of 500 modules with findings has less than 1 MiB, and a bill of
/// materials with 600 packages has 400 KiB.
const MAX_DOCUMENT: u64 = 16 << 20;

/// Registry in which needed images are looked up, and to which farrier never writes.
#[derive(Clone)]
pub struct NeedsRegistry {
    /// Location as the user named it.
    pub location: RegistryLocation,
    /// Client for that location.
    pub registry: Arc<dyn Registry>,
}

/// Limits on concurrent builds.
#[derive(Clone, Copy, Debug)]
pub struct BuildLimits {
    /// Maximum number of builds.
    pub at_once: usize,
    /// Resources that concurrent builds may use together.
    pub budget: Budget,
}

/// Services and settings that builds and image operations need. Clones share the engine, the registry and the cache.
#[derive(Clone)]
pub struct BuildServices {
    /// Definitions in use.
    pub definitions: Definitions,
    /// Fetches headers, sources and root file systems.
    pub fetcher: Fetcher,
    /// Cache of header sets, logs and failures.
    pub cache: Cache,
    /// Registry that images are published to, as the user named it.
    pub location: RegistryLocation,
    /// Client for `location`.
    pub registry: Arc<dyn Registry>,
    /// Registry for looking up needed images, if not `registry`; set for a build that publishes nothing.
    pub needs_from: Option<NeedsRegistry>,
    /// Client of the distribution protocol, for base images in other registries.
    pub remote: Arc<dyn Registry>,
    /// Credentials for the engine when it pulls a toolchain.
    pub credentials: Keyring,
    /// Engine that compiles. It is connected when the first build needs it, so that a reconcile with nothing to do
    /// needs no engine.
    pub engine: LazyEngine,
    /// The `driver-entrypoint` binary for images.
    pub entrypoint: LazyEntrypoint,
    /// Limits on concurrent builds.
    pub limits: BuildLimits,
    /// Signs modules, if the site signs modules.
    pub module_signer: Option<Arc<ModuleSigner>>,
    /// Boots kernels for definitions with `check.boot: true`. Without a boot checker, their builds fail.
    pub boot_checker: Option<Arc<dyn BootChecker>>,
    /// Makes the outputs that definitions ask for in addition to the image. Without a maker, their builds fail.
    pub output_maker: Option<Arc<dyn OutputMaker>>,
    /// Receives progress reports.
    pub reporter: Arc<dyn Reporter>,
    /// Name of this farrier, if a cluster has several.
    pub instance: Instance,
    /// Tells whether this process may still write; `None` if no other process can be the writer.
    pub fence: Option<Arc<dyn Fence>>,
    /// Cancels all work. Nothing incomplete is left behind.
    pub cancel: CancellationToken,
}

/// Returns the registry as the planner needs it: the prefix of image names, and whether nodes can pull from there.
pub fn image_location(location: &RegistryLocation) -> ImageLocation {
    match location {
        RegistryLocation::Remote { .. } => ImageLocation { prefix: location.to_string(), pullable: true },
        RegistryLocation::Layout(_) => ImageLocation { prefix: String::new(), pullable: false },
    }
}

impl BuildServices {
    /// Returns a clone for one piece of work. Cache entries that it uses are protected from eviction until the clone is
    /// dropped.
    #[must_use]
    pub fn in_use(&self) -> Self {
        let fetcher = self.fetcher.in_use();
        Self { cache: fetcher.cache().clone(), fetcher, ..self.clone() }
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
    pub fn certificate_ends(&self) -> Vec<(String, Timestamp)> {
        let signer = self.module_signer.iter();
        let signer = signer.map(|signer| ("moduleSigning".to_owned(), signer.certificate().not_after));
        let keys = key_ends(&self.definitions);
        self.fetcher.net().certificate_ends().into_iter().chain(signer).chain(keys).collect()
    }

    /// Fails if this process may not write, for example after it has lost the lease. Called before each write to a
    /// registry or cluster.
    pub fn may_write(&self) -> Result<()> {
        match self.fence.as_ref().and_then(|fence| fence.closed_reason()) {
            Some(why) => Err(BuildError::Fenced(why)),
            None => Ok(()),
        }
    }

    /// Waits until this process may write. Fails on cancellation.
    pub(crate) async fn until_writable(&self) -> Result<()> {
        while let Err(fenced) = self.may_write() {
            tracing::debug!(%fenced, "waiting to publish");
            let wait = tokio::time::sleep(FENCE_POLL_INTERVAL);
            self.cancel.run_until_cancelled(wait).await.ok_or(BuildError::Canceled)?;
        }
        Ok(())
    }

    /// Runs `action` until it succeeds, fails permanently, or exhausts the retries. Registry clients retry on their
    /// own.
    pub async fn retry<T, E, F>(&self, name: &str, action: impl FnMut() -> F) -> Result<T>
    where
        F: Future<Output = Result<T, E>>,
        E: Into<BuildError>,
    {
        with_retry(name, &self.cancel, action).await
    }

    /// Whether the registry refuses an image to clients without credentials; false if the registry does not answer.
    pub async fn refuses_anonymous(&self, image: &ImageReference) -> bool {
        let options = RegistryOptions { net: self.fetcher.net().clone(), ..RegistryOptions::default() };
        let anonymous = connect(&self.location, &options);
        let outcome = anonymous.manifest(&image.repository, &image.version).await;
        matches!(outcome, Err(RegistryError::Denied { .. }))
    }

    /// Returns the client for a repository: the configured registry if farrier publishes to the repository, otherwise a
    /// client of the distribution protocol.
    pub(crate) fn registry_of(&self, repository: &Repository) -> &dyn Registry {
        if self.location.contains(repository) { self.registry.as_ref() } else { self.remote.as_ref() }
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

    /// Returns the manifest of a reference. Fails if it does not exist.
    pub async fn existing_manifest(&self, reference: &ImageReference) -> Result<StoredManifest> {
        self.manifest(reference).await?.ok_or_else(|| BuildError::no_such_image(reference))
    }

    /// Looks up an image that farrier published, or a needed image.
    pub async fn look_up(&self, reference: &ImageReference) -> Result<Option<Published>> {
        let ImageReference { repository, version } = reference;
        let registry = self.registry_of_needs(repository);
        let Some(stored) = registry.manifest(repository, version).await? else { return Ok(None) };
        let mut found = published(&stored);
        found.platforms = match AnyManifest::parse(&stored.bytes) {
            Ok(AnyManifest::Index(index)) => {
                let entries = entries(registry, repository, &index, &stored.bytes).await?.into_iter();
                entries.map(|(architecture, stored)| (architecture, published(&stored))).collect()
            }
            // Tags of union images are shared between architectures, whatever the tag patterns of other images are.
            Ok(AnyManifest::Image(image))
                if self.shares_tags(repository) || image.annotations.contains_key(annotations::MEMBERS) =>
            {
                match fetch_small(&self.cache, registry, repository, &image.config, "configuration").await {
                    Err(error) if error.is_unreachable() => return Err(error),
                    config => {
                        let name = config.ok().and_then(|config| oci::architecture_of(&config));
                        let architecture = name.and_then(|name| name.parse().ok());
                        architecture.map(|architecture| (architecture, found.clone())).into_iter().collect()
                    }
                }
            }
            _ => BTreeMap::new(),
        };
        Ok(Some(found))
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
        let name = self.location.name_of(repository);
        name.and_then(|name| self.definitions.images.get(name))
            .is_some_and(|image| share_tags(&image.spec.tags))
    }

    /// Returns the repository of an image's mirror copy; `None` for an image that is already below the registry's
    /// prefix.
    pub fn mirror_repository(&self, reference: &ImageReference) -> Result<Option<Repository>> {
        let location = match &self.needs_from {
            // A layout directory only provides images to compile against.
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
    async fn copy_of(&self, reference: &ImageReference) -> Result<Option<(Repository, Digest)>> {
        let Some(mirror) = self.mirror_repository(reference)? else { return Ok(None) };
        let copy = self.registry_of_needs(&mirror).manifest(&mirror, &reference.version).await?;
        Ok(copy.map(|copy| (mirror, copy.digest)))
    }

    /// Returns the reference to fetch an image from: its mirror copy, if there is one, pinned by digest.
    pub async fn mirrored_reference(&self, reference: ImageReference) -> Result<ImageReference> {
        Ok(match self.copy_of(&reference).await? {
            Some((repository, digest)) => ImageReference { repository, version: Version::Digest(digest) },
            None => reference,
        })
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
        // Its own registry is authoritative, because the tag may have moved there. Offline, use the latest copy.
        let copy = if self.fetcher.is_offline() { self.copy_of(&reference).await? } else { None };
        let digest = match copy {
            Some((_, digest)) => Some(digest),
            None => self.manifest(&reference).await?.map(|stored| stored.digest),
        };
        let repository = reference.repository;
        Ok(digest.map(|digest| ImageReference { repository, version: Version::Digest(digest) }))
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
        // The cached blob of this digest may have another size than this descriptor states.
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

async fn fetch_small(
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

/// Returns the images of an index by architecture. Returns none if farrier did not publish an entry, or if the bytes
/// are not in the form that farrier writes. Container runtimes parse the whole index, and must find these images in it
/// and no others.
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
