//! Collects the contents of a bundle from a registry: all manifests, and the source of each blob.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    sync::Arc,
};

use farrier_core::{
    facts::ImageFacts,
    image::{Digest, Repository, Version},
};
use farrier_store::{
    InputKind,
    registry::{Registry, StoredManifest},
};
use oci::{AnyManifest, Descriptor, media_type};

use super::{
    BundleError, Content, Result,
    index::{Base, Blob, BundleIndex, FORMAT, Listed, manifests_problem},
    previous::PreviousBundle,
    verify::Manifest,
};

/// Maximum nesting of indexes.
pub(super) const MAX_DEPTH: usize = 4;

/// Content to put into a bundle, and its source.
#[derive(Clone)]
pub struct ContentRequest {
    /// The content as listed in the bundle.
    pub content: Content,
    /// Source repository.
    pub repository: Repository,
    /// Registry of the source repository.
    pub registry: Arc<dyn Registry>,
}

/// Index, manifests and blob sources of a bundle to write.
pub struct Collection {
    pub index: BundleIndex,
    pub(super) manifests: BTreeMap<Digest, Manifest>,
    /// A request for each blob, whose repository has the blob.
    pub(super) sources: BTreeMap<Digest, ContentRequest>,
}

#[derive(Default)]
struct Collector {
    manifests: BTreeMap<Digest, Manifest>,
    /// Size of all manifests in bytes.
    manifest_bytes: u64,
    blobs: BTreeMap<Digest, Blob>,
    sources: BTreeMap<Digest, ContentRequest>,
}

/// Looks up all contents. `from` describes their origin; `since` is the bundle that the site already has.
pub async fn collect(
    requests: &[ContentRequest],
    from: &str,
    since: Option<&PreviousBundle>,
) -> Result<Collection> {
    let mut collector = Collector::default();
    let mut contents = BTreeMap::new();
    for request in requests {
        contents.insert(request.content.clone(), collector.add_content(request).await?);
    }
    let Collector { manifests, mut blobs, sources, .. } = collector;
    if let Some(since) = since {
        let known = since.index.known();
        // An import unpacks the definitions from the bundle.
        let definitions = InputKind::Definitions.repository();
        let may_omit = |blob: &&mut Blob| blob.manifest.is_none() && !blob.repositories.contains(definitions);
        for blob in blobs.values_mut().filter(may_omit) {
            blob.base = known.get(&blob.digest).copied().cloned().unwrap_or_default();
        }
    }
    let mut blobs: Vec<Blob> = blobs.into_values().collect();
    // The sort is stable: manifests and other blobs stay sorted by digest.
    blobs.sort_by_key(|blob| blob.manifest.is_none());
    let index = BundleIndex {
        format_version: FORMAT,
        made_by: concat!("farrier ", env!("CARGO_PKG_VERSION")).to_owned(),
        from: from.to_owned(),
        order: None,
        signer: None,
        base: since.map(|since| Base { id: since.id.clone(), from: since.index.from.clone() }),
        licenses: BTreeSet::new(),
        contents: contents.into_values().collect(),
        blobs,
    };
    if let Some(reason) = index.find_problem() {
        return Err(BundleError::Nothing(reason));
    }
    Ok(Collection { index, manifests, sources })
}

impl ContentRequest {
    /// Fetches a manifest of the repository.
    async fn manifest(&self, digest: &Digest) -> Result<Manifest> {
        let Self { repository, registry, .. } = self;
        let name = || format!("{repository}@{digest}");
        let stored = registry.manifest(repository, &Version::Digest(digest.clone())).await?;
        let StoredManifest { bytes, media_type, .. } = stored.ok_or_else(|| BundleError::Absent(name()))?;
        let parsed = AnyManifest::parse(&bytes).map_err(|source| BundleError::Manifest(name(), source))?;
        Ok(Manifest { bytes, media_type, parsed })
    }
}

impl Collector {
    /// Adds a content with all manifests and blobs that it names.
    async fn add_content(&mut self, request: &ContentRequest) -> Result<Listed> {
        let content = &request.content;
        let mut sizes = BTreeMap::new();
        let mut queue = vec![(content.digest.clone(), 0)];
        while let Some((digest, depth)) = queue.pop() {
            let manifest = match self.manifests.entry(digest.clone()) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(new) => {
                    let manifest = request.manifest(&digest).await?;
                    self.manifest_bytes += manifest.bytes.len() as u64;
                    if let Some(reason) = manifests_problem(self.manifest_bytes) {
                        return Err(BundleError::Nothing(reason));
                    }
                    new.insert(manifest)
                }
            };
            let mut add_blob = |digest: &Digest, size: u64, manifest: Option<&String>| {
                let blob = self.blobs.entry(digest.clone()).or_insert_with(|| Blob {
                    digest: digest.clone(),
                    size,
                    manifest: manifest.cloned(),
                    repositories: BTreeSet::new(),
                    base: BTreeSet::new(),
                });
                blob.repositories.insert(content.repository.clone());
                sizes.insert(digest.clone(), size);
            };
            add_blob(&digest, manifest.bytes.len() as u64, Some(&manifest.media_type));
            for blob in blobs_of(&manifest.parsed) {
                add_blob(&blob.digest, blob.size, None);
                self.sources.entry(blob.digest.clone()).or_insert_with(|| request.clone());
            }
            for child in manifest.parsed.children() {
                if depth < MAX_DEPTH && !sizes.contains_key(&child.digest) {
                    queue.push((child.digest.clone(), depth + 1));
                }
            }
        }
        let (artifact_type, facts) = match self.manifests.get(&content.digest).map(|entry| &entry.parsed) {
            Some(AnyManifest::Image(image)) => {
                (image.artifact_type.clone(), ImageFacts::from_annotations(&image.annotations).ok())
            }
            _ => (None, None),
        };
        Ok(Listed {
            content: content.clone(),
            artifact_type,
            kernel: facts.and_then(|facts| facts.kernel_release),
            size: sizes.values().sum(),
        })
    }
}

/// Blobs that a manifest names. Excludes foreign layers.
pub(super) fn blobs_of(manifest: &AnyManifest) -> impl Iterator<Item = &Descriptor> {
    manifest.blobs().filter(|blob| !media_type::is_foreign_layer(&blob.media_type))
}
