//! `cosign` tags with signatures and attestations. Every signer adds layers to the same tag, so a copied manifest is
//! merged with the existing one.

use farrier_core::{
    facts::media_type,
    image::{Repository, Tag, Version},
    provenance::{self, CosignManifest},
};
use oci::ImageManifest;

use super::{MAX_TRIES, Registry, RegistryError, pause_before};

/// Result of merging a new manifest into a tag.
pub enum Joined {
    /// No change: the tag already has all layers of the new manifest.
    Unchanged,
    /// The tag gets the new manifest, which includes all existing layers.
    New,
    /// The tag gets the layers of both.
    Both(CosignManifest),
    /// The manifests cannot be merged.
    Incompatible,
}

/// Whether signers add layers to this tag instead of replacing its manifest.
pub fn is_joined(tag: &Tag) -> bool {
    provenance::is_cosign_tag(tag) && [".sig", ".att"].iter().any(|end| tag.as_str().ends_with(end))
}

impl Joined {
    /// Merges the bytes of the tag's manifest and of the new one.
    pub fn of(existing: &[u8], new: &[u8]) -> Self {
        let (Ok(current), Ok(added)) = (ImageManifest::parse(existing), ImageManifest::parse(new)) else {
            return Self::Incompatible;
        };
        let contains_all = |manifest: &ImageManifest, other: &ImageManifest| {
            other.layers.iter().all(|layer| manifest.layers.contains(layer))
        };
        if contains_all(&current, &added) {
            Self::Unchanged
        } else if contains_all(&added, &current) {
            Self::New
        } else {
            provenance::add_layers(Some(&current), &added.layers).map_or(Self::Incompatible, Self::Both)
        }
    }
}

/// Merges a manifest, whose blobs are already in the repository, into a tag. Repeats the merge until the tag has all layers
/// of the manifest, because a concurrent writer may remove some. Returns `false` and changes nothing if the tag has
/// content that cannot be merged.
pub async fn join(
    registry: &dyn Registry,
    repository: &Repository,
    tag: &Tag,
    (media_type, new): (&str, &[u8]),
) -> Result<bool, RegistryError> {
    let version = Version::Tag(tag.clone());
    for attempt in 0..=MAX_TRIES {
        let existing = registry.manifest(repository, &version).await?;
        let result = existing.map_or(Joined::New, |existing| Joined::of(&existing.bytes, new));
        let (kind, bytes) = match &result {
            Joined::Unchanged => return Ok(true),
            Joined::Incompatible => return Ok(false),
            Joined::New => (media_type, new),
            Joined::Both(CosignManifest { config, manifest }) => {
                registry.push_bytes(repository, config).await?;
                (media_type::OCI_MANIFEST, &manifest[..])
            }
        };
        pause_before(attempt).await;
        registry.push_manifest(repository, &version, kind, bytes).await?;
    }
    let reason = format!("other writers removed the added entries {MAX_TRIES} times");
    Err(RegistryError::protocol(registry.describe(), format!("add signatures to {repository}:{tag}"), reason))
}
