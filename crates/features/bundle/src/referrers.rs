//! Finds content about an image that the image's manifest does not name: reports, lists, statements and signatures.

use std::collections::{BTreeMap, BTreeSet, btree_map::Entry};

use farrier_core::image::{ReferenceError, Repository, Tag, Version};
use farrier_store::registry::{Registry, RegistryError, RegistryLocation};

use super::{Content, ContentKind, Result};

/// A repository below the registry's prefix.
pub(super) fn repository(location: &RegistryLocation, name: &str) -> Result<Repository> {
    let invalid_name = |error: ReferenceError| {
        RegistryError::Options(format!("repository {name}"), error.to_string()).into()
    };
    location.repository(name).map_err(invalid_name)
}

/// Adds everything that refers to the images and stored inputs among the contents, recursively: referrers that the
/// registry lists, and content under tags made from their digests (`sha256-<hex>.sig` and similar, cosign's "Signature
/// Storage").
pub async fn with_referrers(
    contents: Vec<Content>,
    location: &RegistryLocation,
    registry: &dyn Registry,
) -> Result<BTreeSet<Content>> {
    let mut all = BTreeSet::new();
    let mut queue = contents;
    let mut tags: BTreeMap<Repository, Vec<Tag>> = BTreeMap::new();
    let mut visited = BTreeSet::new();
    while let Some(content) = queue.pop() {
        let Content { kind: _, repository: name, tag: _, digest } = &content;
        if visited.insert((name.clone(), digest.clone())) {
            let repository = repository(location, name)?;
            for referrer in registry.referrers(&repository, digest, None).await? {
                let (kind, digest) = (ContentKind::Referrer, referrer.digest);
                queue.push(Content { kind, repository: name.clone(), tag: None, digest });
            }
            let listed = match tags.entry(repository.clone()) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(new) => new.insert(registry.tags(&repository).await?),
            };
            let prefix = format!("sha256-{}.", digest.hex());
            for tag in listed.iter().filter(|tag| tag.as_str().starts_with(&prefix)) {
                let version = Version::Tag(tag.clone());
                if let Some(stored) = registry.manifest(&repository, &version).await? {
                    let (kind, tag) = (ContentKind::Signature, Some(tag.clone()));
                    queue.push(Content { kind, repository: name.clone(), tag, digest: stored.digest });
                }
            }
        }
        all.insert(content);
    }
    Ok(all)
}
