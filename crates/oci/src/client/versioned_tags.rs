//! Tags that move, at a registry with immutable tags. The first content of such a tag gets the tag itself. Each later content gets
//! the tag with a version, such as `latest.0000000001`, and the highest version is the tag's content. So no tag moves, and two
//! writers cannot overwrite each other.

use std::collections::BTreeSet;

use super::{
    error::{RegistryError, Result},
    remote::RemoteRegistry,
    retry::{MAX_TRIES, pause_before},
    transport::RemoteName,
};
use crate::{Digest, Repository, Tag, Version};

/// Number of digits of a version in a tag. It is fixed, to distinguish versions from other tags that end in a dot and digits.
const DIGITS: usize = 10;
/// Highest version that has these digits.
const MAX_NUMBER: u64 = 9_999_999_999;
/// Largest step between two versions. Anyone who may push can write the highest version, which would leave no free one.
const MAX_STEP: u64 = 1_000_000;

/// Whether a tag moves, by the name of its repository below the publishing location.
pub type IsMovingTag = fn(name: &str, tag: &Tag) -> bool;

impl RemoteRegistry {
    /// Whether the registry that holds this repository refuses to move tags.
    pub(super) fn has_immutable_tags(&self, repository: &Repository) -> bool {
        self.moving_tags.is_some() && self.locations.name_below_prefix(repository).is_some()
    }

    fn is_versioned(&self, repository: &Repository, tag: &Tag) -> bool {
        let name = self.locations.name_below_prefix(repository);
        self.moving_tags.zip(name).is_some_and(|(is_moving, name)| is_moving(name, tag))
    }

    /// Returns the tag that has the newest content of `version`: the version itself, unless it is a moving tag.
    pub(super) async fn newest_version(&self, repository: &Repository, version: &Version) -> Result<Version> {
        match version {
            Version::Tag(tag) if self.is_versioned(repository, tag) => {
                let number = self.newest_number(repository, tag).await?.unwrap_or(0);
                Ok(Version::Tag(numbered(tag, number).unwrap_or_else(|| tag.clone())))
            }
            Version::Tag(_) | Version::Digest(_) => Ok(version.clone()),
        }
    }

    /// Explains the refusal of a registry that is known to have immutable tags.
    fn immutable(&self, repository: &Repository, error: RegistryError) -> RegistryError {
        match error {
            RegistryError::Denied { host, action, reason }
            | RegistryError::Protocol { host, action, reason }
                if self.has_immutable_tags(repository) && reason.contains("immutable") =>
            {
                RegistryError::protocol(host, action, "the tag exists, and no tag moves there")
            }
            error => error,
        }
    }

    /// Returns the newest version of a tag; 0 is the tag itself, and `None` means that the tag does not exist.
    async fn newest_number(&self, repository: &Repository, tag: &Tag) -> Result<Option<u64>> {
        let tags = self.tags_at(repository).await?;
        let numbers = tags.iter().filter_map(|candidate| match split(candidate) {
            Some((base, number)) if base == *tag => Some(number),
            _ => (candidate == tag).then_some(0),
        });
        Ok(newest(numbers.collect()))
    }

    /// Pushes a manifest under a tag or digest. A moving tag gets a new version, unless the newest one has this content.
    pub(super) async fn put_version(
        &self,
        repository: &Repository,
        version: &Version,
        media_type: &str,
        bytes: &[u8],
    ) -> Result<Digest> {
        let tag = match version {
            Version::Tag(tag) if self.is_versioned(repository, tag) => tag,
            Version::Tag(_) | Version::Digest(_) => {
                let pushed = self.put_manifest(repository, version, media_type, bytes).await;
                return pushed.map(|(digest, _)| digest).map_err(|error| self.immutable(repository, error));
            }
        };
        let mut refusal = None;
        for attempt in 0..MAX_TRIES {
            pause_before(attempt).await;
            let newest = self.newest_number(repository, tag).await?;
            if let Some(current) = newest.and_then(|number| numbered(tag, number))
                && let Some(current) = self.manifest_at(repository, &Version::Tag(current)).await?
                && current.digest == Digest::of(bytes)
            {
                return Ok(current.digest);
            }
            let Some(next) = numbered(tag, newest.map_or(0, |number| number + 1)) else { break };
            let next = Version::Tag(next);
            match self.put_manifest(repository, &next, media_type, bytes).await {
                Ok((digest, _)) => return Ok(digest),
                // Another writer took this version.
                Err(error) if self.has_manifest(repository, &next).await? => refusal = Some(error),
                Err(error) => return Err(error),
            }
        }
        Err(refusal.unwrap_or_else(|| {
            let RemoteName { host, path, .. } = RemoteName::of(repository);
            let action = format!("push manifest to {path}:{tag}");
            RegistryError::protocol(host, action, "the tag has no free version")
        }))
    }

    /// Replaces the versions of moving tags by these tags.
    pub(super) fn without_versions(&self, repository: &Repository, tags: Vec<Tag>) -> Vec<Tag> {
        if !self.has_immutable_tags(repository) {
            return tags;
        }
        let base = |tag: Tag| match split(&tag) {
            Some((base, _)) if self.is_versioned(repository, &base) => base,
            _ => tag,
        };
        let mut tags: Vec<Tag> = tags.into_iter().map(base).collect();
        tags.sort_unstable();
        tags.dedup();
        tags
    }
}

/// Returns the highest version that no step above [`MAX_STEP`] leads to.
fn newest(numbers: BTreeSet<u64>) -> Option<u64> {
    let mut newest = None;
    for number in numbers {
        if number - newest.unwrap_or(0) > MAX_STEP {
            break;
        }
        newest = Some(number);
    }
    newest
}

/// Returns the tag of a version; 0 is the tag itself. Returns `None` if no tag can have this number or length.
fn numbered(tag: &Tag, number: u64) -> Option<Tag> {
    match number {
        0 => Some(tag.clone()),
        1..=MAX_NUMBER => format!("{tag}.{number:0DIGITS$}").parse().ok(),
        _ => None,
    }
}

/// Splits the tag of a version into the moving tag and the version's number.
fn split(tag: &Tag) -> Option<(Tag, u64)> {
    let (base, digits) = tag.as_str().rsplit_once('.')?;
    let is_number = digits.len() == DIGITS && digits.bytes().all(|byte| byte.is_ascii_digit());
    let number = digits.parse().ok().filter(|number| is_number && *number > 0)?;
    Some((base.parse().ok()?, number))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tag(text: &str) -> Tag {
        text.parse().unwrap()
    }

    #[test]
    fn versions_of_tags() {
        let latest = tag("latest");
        assert_eq!(numbered(&latest, 0), Some(latest.clone()));
        assert_eq!(numbered(&latest, 12), Some(tag("latest.0000000012")));
        // A version above the highest one would not be read.
        assert_eq!(split(&tag("latest.9999999999")), Some((latest.clone(), MAX_NUMBER)));
        assert_eq!(numbered(&latest, MAX_NUMBER + 1), None);
        assert_eq!(split(&tag("latest.0000000012")), Some((latest, 12)));
        for plain in ["latest", "1.2", "latest.12", "latest.0000000000", "latest.+000000012"] {
            if let Ok(plain) = plain.parse() {
                assert_eq!(split(&plain), None, "{plain}");
            }
        }
        let longest = tag(&"a".repeat(128));
        assert_eq!(numbered(&longest, 1), None);
    }

    #[test]
    fn a_version_that_another_writer_pushed_far_above_the_others_does_not_count() {
        assert_eq!(newest([0, 1, 2, MAX_NUMBER].into()), Some(2));
        assert_eq!(newest([1, 1 + MAX_STEP, MAX_NUMBER].into()), Some(1 + MAX_STEP));
        assert_eq!(newest([MAX_NUMBER].into()), None);
        assert_eq!(newest(BTreeSet::new()), None);
    }
}
