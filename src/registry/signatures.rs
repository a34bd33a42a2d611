//! Adapter: the tags of `cosign` with signatures and attestations. Everybody adds layers to what stands there: what comes from
//! elsewhere is joined with it.

use super::{MAX_TRIES, Registry, RegistryError, pause_before};
use crate::{
    image::{Repository, Tag, Version},
    oci::{ImageManifest, media_type},
    provenance::{self, Layered},
};

/// What a manifest that comes from elsewhere would change under the tag.
pub(crate) enum Joined {
    /// Nothing: all its layers are there.
    Whole,
    /// The tag gets the manifest as it is, which has all layers that are there.
    New,
    /// The tag gets the layers of both.
    Both(Layered),
    /// The two cannot be joined.
    Foreign,
}

/// Is it a tag to which layers are added?
pub(crate) fn is_joined(tag: &Tag) -> bool {
    provenance::is_cosign_tag(tag) && [".sig", ".att"].iter().any(|end| tag.as_str().ends_with(end))
}

impl Joined {
    /// For the bytes of the manifest that the tag holds, and of the one that comes.
    pub(crate) fn of(held: &[u8], new: &[u8]) -> Self {
        let (Ok(before), Ok(after)) = (ImageManifest::parse(held), ImageManifest::parse(new)) else {
            return Self::Foreign;
        };
        let has = |one: &ImageManifest, other: &ImageManifest| {
            other.layers.iter().all(|layer| one.layers.contains(layer))
        };
        if has(&before, &after) {
            Self::Whole
        } else if has(&after, &before) {
            Self::New
        } else {
            provenance::layered(Some(&before), &after.layers).map_or(Self::Foreign, Self::Both)
        }
    }
}

/// Adds the layers of a manifest, whose blobs are there, to what the tag holds, and looks whether they are in it: who read the tag
/// before may write it without them. `false` where the tag holds something else, and keeps it.
pub(crate) async fn join(
    registry: &dyn Registry,
    repository: &Repository,
    tag: &Tag,
    (media_type, new): (&str, &[u8]),
) -> Result<bool, RegistryError> {
    let version = Version::Tag(tag.clone());
    for attempt in 0..=MAX_TRIES {
        let held = registry.manifest(repository, &version).await?;
        let joined = held.map_or(Joined::New, |held| Joined::of(&held.bytes, new));
        let (kind, bytes) = match &joined {
            Joined::Whole => return Ok(true),
            Joined::Foreign => return Ok(false),
            Joined::New => (media_type, new),
            Joined::Both(Layered { config, manifest }) => {
                registry.push_bytes(repository, config).await?;
                (media_type::OCI_MANIFEST, &manifest[..])
            }
        };
        pause_before(attempt).await;
        registry.push_manifest(repository, &version, kind, bytes).await?;
    }
    let reason = format!("what is added is gone again, {MAX_TRIES} times: others write it, too");
    Err(RegistryError::protocol(registry.describe(), format!("add signatures to {repository}:{tag}"), reason))
}
