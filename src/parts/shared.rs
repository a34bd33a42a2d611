//! Adapter: the parts themselves: which registry holds a repository, what stands there, and may this process write.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use jiff::Timestamp;
use tokio::io::AsyncReadExt as _;
use tokio_util::sync::CancellationToken;

use super::{
    boot::BootChecker,
    error::{Result, TargetError},
    lazy::{LazyEngine, LazyEntrypoint},
    report::Reporter,
    retry::with_retry,
};
use crate::{
    blocking::blocking,
    cache::{BLOBS, Cache},
    cluster::Fence,
    error_chain,
    image::{Definitions, Digest, ImageReference, Repository, Version, mirror_name, share_tags},
    inputs::{Fetcher, key_ends},
    kernel::Architecture,
    oci::{
        self, AnyManifest, Descriptor, ImageError, ImageFacts, ImageIndex, MAX_MANIFEST, Platform,
        annotations,
    },
    plan::{Budget, ImageLocation, Instance, Published},
    registry::{Keyring, Registry, RegistryError, RegistryLocation, StoredManifest},
    signing::ModuleSigner,
};

/// Requests to a registry at a time, where several are independent of each other.
pub(crate) const AT_ONCE: usize = 16;

/// How often a process that may not write looks whether it may.
const FENCE_LOOKS: Duration = Duration::from_millis(500);

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

/// How much may be built at once.
#[derive(Clone, Copy, Debug)]
pub struct BuildLimits {
    /// Builds, whatever they take.
    pub at_once: usize,
    /// What they may take together.
    pub budget: Budget,
}

/// Everything that builds and operations on images work with. A clone shares engine, registry and cache.
#[derive(Clone)]
pub struct Parts {
    /// What is to be built.
    pub definitions: Definitions,
    /// Fetches headers, sources and root file systems.
    pub fetcher: Fetcher,
    /// Header sets, logs, failures.
    pub cache: Cache,
    /// Where images go, as the user named it.
    pub location: RegistryLocation,
    /// The same, connected.
    pub registry: Arc<dyn Registry>,
    /// Where needed images are looked up, when that is not where images go: a build that publishes nothing.
    pub needs_from: Option<NeedsFrom>,
    /// The distribution protocol, for base images of other registries.
    pub remote: Arc<dyn Registry>,
    /// Credentials for the engine when it pulls a toolchain.
    pub credentials: Keyring,
    /// What compiles; connected when the first build needs it, so that a pass with nothing to do
    /// needs no engine.
    pub engine: LazyEngine,
    /// The binary that is put into images that start with it.
    pub entrypoint: LazyEntrypoint,
    /// How much may be built at once.
    pub limits: BuildLimits,
    /// Signs modules, where the site has them signed.
    pub module_signer: Option<Arc<ModuleSigner>>,
    /// Boots kernels for definitions with `check.boot: true`; without one, those fail.
    pub boot_checker: Option<Arc<dyn BootChecker>>,
    /// Receives what happens.
    pub reporter: Arc<dyn Reporter>,
    /// Which farrier this is, where a cluster has several.
    pub instance: Instance,
    /// Says whether this process may still write; `None` where no other process could be the writer.
    pub fence: Option<Arc<dyn Fence>>,
    /// Stops the work; nothing half-done is left behind.
    pub cancel: CancellationToken,
}

/// A registry as a plan needs it: what names start with, and whether nodes can pull from there.
pub(crate) fn image_location(location: &RegistryLocation) -> ImageLocation {
    match location {
        RegistryLocation::Remote { .. } => ImageLocation { prefix: location.to_string(), pullable: true },
        RegistryLocation::Layout(_) => ImageLocation { prefix: String::new(), pullable: false },
    }
}

impl Parts {
    /// The same, for one piece of work: what it takes out of the cache is in use until it is dropped, and no longer.
    pub(crate) fn in_use(&self) -> Self {
        let fetcher = self.fetcher.in_use();
        Self { cache: fetcher.cache().clone(), fetcher, ..self.clone() }
    }

    /// Takes away what killed farriers left in the cache, and what is too much in it. That it cannot costs room, and no work.
    pub(crate) async fn make_room(&self) {
        let (cache, quotas) = (self.cache.clone(), self.definitions.site.storage);
        if let Err(error) = blocking(move || cache.make_room(&quotas)).await {
            tracing::warn!(error = %error_chain(&error), "the cache was not tidied up");
        }
    }

    /// When each certificate that farrier shows, trusts and signs modules with ends, as read at the start, and each file of OpenPGP
    /// keys that definitions name.
    pub(crate) fn certificate_ends(&self) -> Vec<(String, Timestamp)> {
        let signer = self.module_signer.iter();
        let signer = signer.map(|signer| ("moduleSigning".to_owned(), signer.certificate().not_after));
        let keys = key_ends(&self.definitions);
        self.fetcher.net().certificate_ends().into_iter().chain(signer).chain(keys).collect()
    }

    /// Fails where this process may not write (any more). Asked before each write to a registry or cluster.
    pub(crate) fn may_write(&self) -> Result<()> {
        match self.fence.as_ref().and_then(|fence| fence.closed()) {
            Some(why) => Err(TargetError::Fenced(why)),
            None => Ok(()),
        }
    }

    /// Waits until this process may write, or is to stop.
    pub(crate) async fn until_writable(&self) -> Result<()> {
        while let Err(fenced) = self.may_write() {
            tracing::debug!(%fenced, "waits to publish");
            let wait = tokio::time::sleep(FENCE_LOOKS);
            self.cancel.run_until_cancelled(wait).await.ok_or(TargetError::Cancelled)?;
        }
        Ok(())
    }

    /// Runs `action` until it succeeds, fails for good, or the retry policy gives up. Registries retry by themselves.
    pub(crate) async fn retry<T, E, F>(&self, what: &str, action: impl FnMut() -> F) -> Result<T>
    where
        F: Future<Output = Result<T, E>>,
        E: Into<TargetError>,
    {
        with_retry(what, &self.cancel, action).await
    }

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
    pub(crate) async fn manifest(&self, reference: &ImageReference) -> Result<Option<StoredManifest>> {
        let ImageReference { repository, version } = reference;
        Ok(self.registry_of(repository).manifest(repository, version).await?)
    }

    /// The same for one that must be there.
    pub(crate) async fn existing_manifest(&self, reference: &ImageReference) -> Result<StoredManifest> {
        self.manifest(reference).await?.ok_or_else(|| TargetError::no_such_image(reference))
    }

    /// What the registry holds under a name of images that farrier published, or of needed ones.
    pub(crate) async fn look_up(&self, reference: &ImageReference) -> Result<Option<Published>> {
        let ImageReference { repository, version } = reference;
        let registry = self.registry_of_needs(repository);
        let Some(stored) = registry.manifest(repository, version).await? else { return Ok(None) };
        let mut found = published(&stored);
        found.platforms = match AnyManifest::parse(&stored.bytes) {
            Ok(AnyManifest::Index(index)) => {
                let entries = entries(registry, repository, &index, &stored.bytes).await?.into_iter();
                entries.map(|(architecture, stored)| (architecture, published(&stored))).collect()
            }
            // One of several kernels shares its tag whatever the pattern of the others is.
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

    /// The image for an architecture under such a name.
    pub(crate) async fn look_up_for(
        &self,
        reference: &ImageReference,
        architecture: Architecture,
    ) -> Result<Option<Published>> {
        let found = self.look_up(reference).await?;
        Ok(found.and_then(|found| found.for_architecture(architecture).cloned()))
    }

    /// May tags of a repository be those of images for several architectures?
    pub(crate) fn shares_tags(&self, repository: &Repository) -> bool {
        let name = self.location.name_of(repository);
        name.and_then(|name| self.definitions.images.get(name))
            .is_some_and(|image| share_tags(&image.spec.tags))
    }

    /// Where the copy of an image stands, or would; `None` for what lies below the registry's prefix itself.
    pub(crate) fn place_of_copy(&self, reference: &ImageReference) -> Result<Option<Repository>> {
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
    async fn copy_of(&self, reference: &ImageReference) -> Result<Option<(Repository, Digest)>> {
        let Some(place) = self.place_of_copy(reference)? else { return Ok(None) };
        let found = self.registry_of_needs(&place).manifest(&place, &reference.version).await?;
        Ok(found.map(|found| (place, found.digest)))
    }

    /// Where an image is fetched from: its copy, if the registry has one, since one digest has one content.
    pub(crate) async fn nearest(&self, reference: ImageReference) -> Result<ImageReference> {
        Ok(match self.copy_of(&reference).await? {
            Some((repository, digest)) => ImageReference { repository, version: Version::Digest(digest) },
            None => reference,
        })
    }

    /// A reference of a definition with its tag replaced by the digest it has now.
    pub(crate) async fn resolve_reference(&self, text: &str) -> Result<ImageReference> {
        self.pinned(text.parse()?).await?.ok_or_else(|| TargetError::no_such_image(text))
    }

    /// The same; nothing where its tag is not there.
    pub(crate) async fn pinned(&self, reference: ImageReference) -> Result<Option<ImageReference>> {
        if matches!(reference.version, Version::Digest(_)) {
            return Ok(Some(reference));
        }
        // What a tag names may have changed upstream; where that is not asked, what was copied last counts.
        let copy = if self.fetcher.is_offline() { self.copy_of(&reference).await? } else { None };
        let digest = match copy {
            Some((_, digest)) => Some(digest),
            None => self.manifest(&reference).await?.map(|found| found.digest),
        };
        let repository = reference.repository;
        Ok(digest.map(|digest| ImageReference { repository, version: Version::Digest(digest) }))
    }

    /// A blob as a file in the cache, fetched when it is not there.
    pub(crate) async fn blob_file(&self, repository: &Repository, blob: &Descriptor) -> Result<PathBuf> {
        let registry = self.registry_of(repository);
        let fetch = |to: PathBuf| async move {
            Ok(registry.fetch_blob(repository, &blob.digest, blob.size, &to).await?)
        };
        self.cache.get_or_make_file(BLOBS, blob.digest.hex(), fetch).await
    }

    /// An image's configuration, of at most [`MAX_MANIFEST`] bytes.
    pub(crate) async fn configuration(&self, repository: &Repository, blob: &Descriptor) -> Result<Vec<u8>> {
        if blob.size > MAX_MANIFEST as u64 {
            let bytes = usize::try_from(blob.size).unwrap_or(usize::MAX);
            return Err(ImageError::TooLarge("image configuration", bytes).into());
        }
        let file = fs_err::tokio::File::open(self.blob_file(repository, blob).await?).await?;
        let mut bytes = Vec::new();
        // What is in the cache under this digest may have come with another size.
        file.take(blob.size).read_to_end(&mut bytes).await?;
        Ok(bytes)
    }

    /// A small blob in memory.
    pub(crate) async fn small_blob(
        &self,
        repository: &Repository,
        blob: &Descriptor,
        what: &str,
    ) -> Result<Vec<u8>> {
        fetch_small(&self.cache, self.registry_of(repository), repository, blob, what).await
    }
}

async fn fetch_small(
    cache: &Cache,
    registry: &dyn Registry,
    repository: &Repository,
    blob: &Descriptor,
    what: &str,
) -> Result<Vec<u8>> {
    if blob.size > MAX_DOCUMENT {
        return Err(TargetError::Registry(RegistryError::Protocol {
            host: registry.describe(),
            action: format!("fetch {what} {repository}@{}", blob.digest),
            reason: format!("it has {} bytes, at most {MAX_DOCUMENT} are read", blob.size),
        }));
    }
    let work = cache.scratch()?;
    let file = work.path().join("blob");
    registry.fetch_blob(repository, &blob.digest, blob.size, &file).await?;
    let mut bytes = Vec::new();
    fs_err::tokio::File::open(&file).await?.take(MAX_DOCUMENT).read_to_end(&mut bytes).await?;
    Ok(bytes)
}

/// What a manifest says. One that is not ours, or not even one, has no input hash: the plan reports a conflict.
fn published(stored: &StoredManifest) -> Published {
    let facts = ImageFacts::from_manifest(&stored.bytes).unwrap_or_default();
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

/// The images of an index, each for its architecture; none where something is in it that farrier did not publish, or the bytes are
/// not as farrier writes an index: runtimes get the whole of it, and must find these images in it and no others.
pub(crate) async fn entries(
    registry: &dyn Registry,
    repository: &Repository,
    index: &ImageIndex,
    bytes: &[u8],
) -> Result<BTreeMap<Architecture, StoredManifest>> {
    let (mut images, mut named) = (BTreeMap::new(), BTreeSet::new());
    if !index.is_written_as(bytes) {
        return Ok(images);
    }
    for entry in &index.manifests {
        let linux = |arch: &Architecture| entry.platform == Some(Platform::linux(arch.as_str()));
        let architecture = entry.platform.as_ref().and_then(|platform| platform.architecture.parse().ok());
        let Some(architecture) = architecture.filter(linux).filter(|found| named.insert(*found)) else {
            return Ok(BTreeMap::new());
        };
        // One that has gone is published again.
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
