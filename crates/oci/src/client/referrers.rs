//! Referrers of a manifest at a registry. Either the registry lists them (distribution-spec 1.1, "Listing Referrers"), or clients
//! maintain the list under a fallback tag ("Referrers Tag Schema").

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use futures::{StreamExt as _, TryStreamExt as _, stream};
use reqwest::{Method, header::ACCEPT};

use super::{
    auth::Scope,
    error::{RegistryError, Result},
    registry::StoredManifest,
    remote::RemoteRegistry,
    retry::{MAX_TRIES, pause_before},
    transport::RemoteName,
};
use crate::{
    Descriptor, Digest, ImageIndex, ImageManifest, Repository, Version, is_referrers_tag, keep_tag,
    media_type, referrers_tag,
};

/// Maximum number of manifests that are looked up at the same time.
const MAX_CONCURRENT_LOOKUPS: usize = 8;

/// Maximum number of listed manifests that are looked up. Anyone who may push can extend a list.
const MAX_CANDIDATES: usize = 1000;

/// Maximum size in bytes of a manifest whose annotations a list keeps. Those that farrier reads have about one kibibyte. With larger
/// ones, [`MAX_CANDIDATES`] manifests of [`crate::MAX_MANIFEST`] bytes would take 4 GiB of memory.
const MAX_ANNOTATED: usize = 16 << 10;

/// Maximum length of a media type (RFC 6838, section 4.2).
const MAX_MEDIA_TYPE: usize = 255;

/// Statuses of registries without a referrers API. The specification has 404; Artifactory answers 406
/// (go-containerregistry issue 1962), others 400 or 405.
const NO_API: [u16; 4] = [400, 404, 405, 406];

impl RemoteRegistry {
    /// Pushes a manifest with a subject. If the registry does not list referrers, adds the manifest to the list under the subject's
    /// fallback tag. Also gives the manifest its own tag, because the garbage collection of such a registry ignores the list.
    pub(super) async fn push_with_subject(&self, repository: &Repository, bytes: &[u8]) -> Result<Digest> {
        let unusable = |reason: String| {
            let host = RemoteName::of(repository).host;
            RegistryError::protocol(host, format!("push referrer to {repository}"), reason)
        };
        let manifest = ImageManifest::parse(bytes).map_err(|error| unusable(error.to_string()))?;
        let no_subject = || unusable("the manifest has no subject".to_owned());
        let subject = manifest.subject.as_ref().ok_or_else(no_subject)?;
        let version = Version::Digest(Digest::of(bytes));
        let (digest, listed) =
            self.put_manifest(repository, &version, media_type::OCI_MANIFEST, bytes).await?;
        if listed.as_ref() != Some(&subject.digest) {
            self.push_under_keep_tag(repository, &subject.digest, (media_type::OCI_MANIFEST, bytes)).await?;
            if !self.has_immutable_tags(repository) {
                self.add_to_tag(repository, &subject.digest, &manifest.as_referrer(bytes)).await?;
            }
        }
        Ok(digest)
    }

    /// Pushes a manifest under its [`keep_tag`].
    async fn push_under_keep_tag(
        &self,
        repository: &Repository,
        subject: &Digest,
        manifest: (&str, &[u8]),
    ) -> Result<()> {
        let (media_type, bytes) = manifest;
        let Some(tag) = keep_tag(subject, &Digest::of(bytes)) else { return Ok(()) };
        let version = Version::Tag(tag);
        if !self.has_manifest(repository, &version).await? {
            self.put_manifest(repository, &version, media_type, bytes).await?;
        }
        Ok(())
    }

    /// Tags the images of an index that was pushed under a tag, unless the registry has a referrers API. Such registries keep the
    /// images without tags.
    pub(super) async fn tag_images_of(&self, repository: &Repository, index: &ImageIndex) -> Result<()> {
        let Some(Descriptor { digest, .. }) = index.manifests.first() else { return Ok(()) };
        if self.listed_by_registry(repository, digest, None).await?.is_some() {
            return Ok(());
        }
        for Descriptor { digest, .. } in &index.manifests {
            let image = self.manifest_at(repository, &Version::Digest(digest.clone())).await?;
            if let Some(image) = image {
                self.push_under_keep_tag(repository, digest, (&*image.media_type, &image.bytes[..])).await?;
            }
        }
        Ok(())
    }

    /// Removes the entries of a fallback list whose manifests the registry has deleted, with a warning. A registry may reject a list
    /// with such an entry.
    async fn without_deleted(
        &self,
        repository: &Repository,
        subject: &Digest,
        entries: Vec<Descriptor>,
    ) -> Result<Vec<Descriptor>> {
        let check = |entry: Descriptor| async move {
            let version = Version::Digest(entry.digest.clone());
            if self.has_manifest(repository, &version).await? {
                return Ok::<_, RegistryError>(Some(entry));
            }
            tracing::warn!(
                "skipping referrer {repository}{version} of {subject}: it is listed, but the registry has deleted it"
            );
            Ok(None)
        };
        let found: Vec<_> =
            stream::iter(entries).map(check).buffered(MAX_CONCURRENT_LOOKUPS).try_collect().await?;
        Ok(found.into_iter().flatten().collect())
    }

    /// Adds a referrer to the list under the fallback tag: reads the list, writes it with the new entry, and repeats until a read
    /// shows the entry. Restores entries that this process added recently in the same way.
    ///
    /// Writers of this process wait for each other. The protocol has no lock for other processes: a writer that has read the old list
    /// can overwrite the new one after the last check. While docker-registry 2.8 writes a list, readers may find none. Farriers that
    /// build the same image add the same documents, so that the list of the last writer is complete.
    async fn add_to_tag(
        &self,
        repository: &Repository,
        subject: &Digest,
        referrer: &Descriptor,
    ) -> Result<()> {
        let Some(tag) = referrers_tag(subject) else { return Ok(()) };
        let version = Version::Tag(tag);
        let mut recent_entries = self.recent_entries.lock().await;
        let recent = RecentEntries::with(recent_entries.take(), repository, subject, referrer);
        let recent = recent_entries.insert(recent);
        for attempt in 0..MAX_TRIES {
            pause_before(attempt).await;
            let FallbackList { mut index, is_complete: true } =
                self.fallback_list(repository, subject).await?
            else {
                // The keep tag of the referrer is sufficient.
                return Ok(());
            };
            let missing = recent.missing_in(&index);
            if missing.is_empty() {
                return Ok(());
            }
            index.manifests = self.without_deleted(repository, subject, index.manifests).await?;
            index.manifests.extend(missing);
            let bytes =
                index.to_bytes().map_err(|error| unusable(repository, &version, &error.to_string()))?;
            self.put_manifest(repository, &version, media_type::OCI_INDEX, &bytes).await?;
            let written = self.fallback_list(repository, subject).await?;
            if !written.is_complete || recent.missing_in(&written.index).is_empty() {
                return Ok(());
            }
        }
        let reason = format!("other writers removed the added entries {MAX_TRIES} times");
        Err(unusable(repository, &version, &reason))
    }

    /// Returns the list under the fallback tag of a manifest; empty if the tag does not exist or has other content: anyone who may
    /// push can write the tag, and GitLab resolves it to the subject itself (oras-go issue 1396).
    async fn fallback_list(&self, repository: &Repository, subject: &Digest) -> Result<FallbackList> {
        let Some(tag) = referrers_tag(subject) else { return Ok(FallbackList::empty()) };
        let Some(stored) = self.manifest_at(repository, &Version::Tag(tag)).await? else {
            return Ok(FallbackList::empty());
        };
        let list = ImageIndex::parse_referrers(&stored.bytes).ok();
        let list = list.filter(|_| stored.digest != *subject);
        Ok(FallbackList {
            is_complete: list.is_some() && ImageIndex::parse(&stored.bytes).is_ok(),
            index: list.unwrap_or_else(ImageIndex::empty),
        })
    }

    /// Returns the [`keep_tag`]s of the subject's referrers, for a registry without a referrers API and without a list.
    async fn keep_tags(&self, repository: &Repository, subject: &Digest) -> Result<Vec<Version>> {
        let prefix = format!("sha256-{}-", subject.hex());
        let own = keep_tag(subject, subject);
        let mut tags = self.tags_at(repository).await?;
        tags.retain(|tag| {
            is_referrers_tag(tag) && tag.as_str().starts_with(&prefix) && Some(tag) != own.as_ref()
        });
        Ok(tags.into_iter().map(Version::Tag).collect())
    }

    /// Returns descriptors of those manifests that refer to the subject. Each descriptor is made from the manifest itself, because
    /// anyone who may push can write a list.
    async fn referrers_among(
        &self,
        repository: &Repository,
        subject: &Digest,
        versions: Vec<Version>,
    ) -> Result<Vec<Descriptor>> {
        let (skipped, versions) = last_candidates(versions);
        if skipped > 0 {
            tracing::warn!(
                "skipping {skipped} referrers of {repository}@{subject}: only {MAX_CANDIDATES} are read"
            );
        }
        let look_up = |version: Version| async move {
            let reason = match self.manifest_at(repository, &version).await {
                Ok(None) => "it is listed, but the registry has deleted it".to_owned(),
                Ok(Some(stored)) => match referrer_of(subject, &stored) {
                    Some(referrer) => return Ok(Some(referrer)),
                    None => "it is listed, but does not refer to the subject".to_owned(),
                },
                // Some registries store other content than manifests.
                Err(RegistryError::Protocol { reason, .. }) => reason,
                Err(error) => return Err(error),
            };
            tracing::warn!("skipping referrer {repository}{version} of {subject}: {reason}");
            Ok(None)
        };
        let found: Vec<Option<Descriptor>> =
            stream::iter(versions).map(look_up).buffered(MAX_CONCURRENT_LOOKUPS).try_collect().await?;
        let mut digests = BTreeSet::new();
        Ok(found.into_iter().flatten().filter(|referrer| digests.insert(referrer.digest.clone())).collect())
    }

    /// Returns the referrers that the registry's API lists. If the API lists none, uses the fallback tag, which may have been written
    /// before the API was enabled. Omits entries whose manifests were deleted or do not refer to the subject.
    pub(super) async fn list_referrers(
        &self,
        repository: &Repository,
        subject: &Digest,
        artifact_type: Option<&str>,
    ) -> Result<Vec<Descriptor>> {
        let listed = self.listed_by_registry(repository, subject, artifact_type).await?.unwrap_or_default();
        let versions = versions_of(listed, artifact_type);
        let mut referrers = self.referrers_among(repository, subject, versions).await?;
        if referrers.is_empty() {
            let list = self.fallback_list(repository, subject).await?;
            let mut versions = versions_of(list.index.manifests, artifact_type);
            if !list.is_complete || self.has_immutable_tags(repository) {
                versions.extend(self.keep_tags(repository, subject).await?);
            }
            referrers = self.referrers_among(repository, subject, versions).await?;
        }
        referrers.retain(|referrer| has_type(referrer, artifact_type));
        Ok(referrers)
    }

    /// Returns the referrers from the registry's API. Returns `None` if the registry has no referrers API.
    async fn listed_by_registry(
        &self,
        repository: &Repository,
        subject: &Digest,
        artifact_type: Option<&str>,
    ) -> Result<Option<Vec<Descriptor>>> {
        let name = &RemoteName::of(repository);
        let action = format!("list referrers of {}@{subject}", name.path);
        let path = format!("referrers/{subject}");
        let mut call = self.http.call(Method::GET, name, Scope::Pull, &path, &action).await?;
        if let Some(kind) = artifact_type {
            call.url.query_pairs_mut().append_pair("artifactType", kind);
        }
        let mut referrers = Vec::new();
        let parse_page = |page: &[u8]| {
            referrers.extend(ImageIndex::parse_referrers(page).map_err(|error| error.to_string())?.manifests);
            Ok(())
        };
        let exists = self.http.pages(call.with(ACCEPT, media_type::OCI_INDEX), &NO_API, parse_page).await?;
        Ok(exists.then_some(referrers))
    }
}

/// List of referrers under a fallback tag.
struct FallbackList {
    /// The entries that can be parsed.
    index: ImageIndex,
    /// Whether the tag has no other content, such as entries with a digest of another algorithm.
    is_complete: bool,
}

impl FallbackList {
    /// The list before the first entry is added.
    fn empty() -> Self {
        Self { index: ImageIndex::empty(), is_complete: true }
    }
}

/// Returns the last versions without repetitions, at most [`MAX_CANDIDATES`], after the number of others.
fn last_candidates(mut versions: Vec<Version>) -> (usize, Vec<Version>) {
    let mut listed = BTreeSet::new();
    versions.retain(|version| listed.insert(version.clone()));
    let skipped = versions.len().saturating_sub(MAX_CANDIDATES);
    (skipped, versions.split_off(skipped))
}

/// Returns the digests of the entries of one type.
fn versions_of(mut listed: Vec<Descriptor>, artifact_type: Option<&str>) -> Vec<Version> {
    listed.retain(|entry| has_type(entry, artifact_type));
    listed.into_iter().map(|entry| Version::Digest(entry.digest)).collect()
}

fn has_type(referrer: &Descriptor, artifact_type: Option<&str>) -> bool {
    artifact_type.is_none_or(|kind| referrer.artifact_type.as_deref() == Some(kind))
}

/// Returns the descriptor of a manifest that refers to the subject; `None` for other manifests. Omits what is too large for a list:
/// annotations and an overlong type.
fn referrer_of(subject: &Digest, stored: &StoredManifest) -> Option<Descriptor> {
    let manifest = ImageManifest::parse(&stored.bytes).ok()?;
    manifest.subject.as_ref().filter(|found| found.digest == *subject)?;
    let mut referrer = manifest.as_referrer(&stored.bytes);
    referrer.artifact_type = referrer.artifact_type.filter(|kind| kind.len() <= MAX_MEDIA_TYPE);
    if stored.bytes.len() > MAX_ANNOTATED {
        referrer.annotations.clear();
    }
    Some(referrer)
}

fn unusable(repository: &Repository, version: &Version, reason: &str) -> RegistryError {
    let RemoteName { host, path, .. } = RemoteName::of(repository);
    RegistryError::protocol(host, format!("list referrers in {path}{version}"), reason)
}

/// How long entries are restored after another writer dropped them, which is the time to publish one image. Later an entry may be
/// missing because it was deleted.
const RESTORE_PERIOD: Duration = Duration::from_mins(1);

/// Entries that this process recently added to one list.
pub(super) struct RecentEntries {
    repository: Repository,
    subject: Digest,
    referrers: Vec<Descriptor>,
    last: Instant,
}

impl RecentEntries {
    /// Adds an entry to the recent entries, if they belong to the same list. Otherwise starts anew with this list.
    pub(super) fn with(
        previous: Option<Self>,
        repository: &Repository,
        subject: &Digest,
        referrer: &Descriptor,
    ) -> Self {
        let is_same_list = |recent: &Self| {
            recent.repository == *repository
                && recent.subject == *subject
                && recent.last.elapsed() < RESTORE_PERIOD
        };
        let mut referrers = previous.filter(is_same_list).map(|recent| recent.referrers).unwrap_or_default();
        referrers.retain(|known| known.digest != referrer.digest);
        referrers.push(referrer.clone());
        Self { repository: repository.clone(), subject: subject.clone(), referrers, last: Instant::now() }
    }

    /// Returns the recent entries that the list lacks.
    pub(super) fn missing_in(&self, index: &ImageIndex) -> Vec<Descriptor> {
        let is_listed =
            |recent: &&Descriptor| index.manifests.iter().any(|known| known.digest == recent.digest);
        self.referrers.iter().filter(|recent| !is_listed(recent)).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Anyone who may push can attach a thousand manifests of four mebibytes.
    #[test]
    fn a_list_keeps_little_of_large_referrers() {
        let subject = Digest::of(b"image");
        let listed = |kind: &str, annotation: String| {
            let manifest = ImageManifest {
                subject: Some(Descriptor::new(media_type::OCI_MANIFEST, subject.clone(), 5)),
                ..ImageManifest::artifact(kind, Vec::new(), [("a", annotation)])
            };
            let bytes = manifest.to_bytes().unwrap();
            let media_type = media_type::OCI_MANIFEST.to_owned();
            referrer_of(&subject, &StoredManifest { digest: Digest::of(&bytes), media_type, bytes }).unwrap()
        };
        let small = listed("application/x", "1".to_owned());
        assert_eq!(small.annotations.get("a").map(String::as_str), Some("1"));
        let large = listed("application/x", "x".repeat(MAX_ANNOTATED));
        assert_eq!((large.artifact_type.as_deref(), large.annotations.len()), (Some("application/x"), 0));
        assert_eq!(listed(&"x".repeat(MAX_MEDIA_TYPE + 1), String::new()).artifact_type, None);
    }

    #[test]
    fn the_last_candidates_are_looked_up_once() {
        let versions: Vec<Version> = (0..MAX_CANDIDATES + 2)
            .map(|number| Version::Digest(Digest::of(number.to_string().as_bytes())))
            .collect();
        let (skipped, candidates) = last_candidates([&versions[..], &versions[..]].concat());
        assert_eq!((skipped, &candidates[..]), (2, &versions[2..]));
    }
}
