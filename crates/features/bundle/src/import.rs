//! Imports a verified bundle into a registry. Pushes what the registry lacks, and never replaces the content of a fixed
//! tag.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    sync::Arc,
};

use farrier_builder::services::MAX_CONCURRENT_REQUESTS;
use farrier_core::image::{Digest, Repository, Version};
use farrier_store::registry::{BlobContent, BlobSource, Joined, Registry, RegistryLocation, Upload, join};
use futures::{StreamExt as _, TryStreamExt as _};
use oci::AnyManifest;
use serde::Serialize;

use super::{
    BundleError, Content, Listed, Meter, Phase, Result, Verified,
    collect::{MAX_DEPTH, blobs_of},
    index::Blob,
    referrers::repository,
    verify::Manifest,
};

/// Maximum number of concurrent uploads: one blob is unpacked while another waits for the registry.
const MAX_CONCURRENT_UPLOADS: usize = 3;

/// Outcome of importing one content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "outcome")]
pub enum ImportOutcome {
    /// The content was pushed.
    Pushed,
    /// The registry already had the content.
    Present,
    /// The tag held other content and was updated. It is a moving tag, or a tag with signatures, which now has the
    /// signatures of both.
    Moved {
        /// Digest of the previous content.
        #[serde(rename = "holds")]
        previous: Digest,
    },
    /// The tag holds other content, which is not replaced.
    Conflict {
        /// Digest of the existing content.
        holds: Digest,
    },
}

/// A content, and the outcome of its import.
#[derive(Clone, Debug, Serialize)]
pub struct Imported {
    #[serde(flatten)]
    pub content: Content,
    #[serde(flatten)]
    pub outcome: ImportOutcome,
}

impl Imported {
    /// Whether the import still has to push the content or move its tag.
    fn is_pending(&self) -> bool {
        matches!(self.outcome, ImportOutcome::Pushed | ImportOutcome::Moved { .. })
    }

    /// Whether the registry must have the blobs of the content. A registry can lose blobs of a manifest that it keeps, in a garbage
    /// collection during a push or on a broken disk. An existing tag with signatures may have another manifest.
    fn needs_blobs(&self) -> bool {
        self.is_pending() || (self.outcome == ImportOutcome::Present && !self.content.is_joined())
    }
}

/// Result of an import.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ImportSummary {
    /// The contents, in the bundle's order.
    pub contents: Vec<Imported>,
    pub sent_blobs: usize,
    pub sent_bytes: u64,
}

impl ImportSummary {
    /// Whether no tag had a conflict.
    pub fn is_complete(&self) -> bool {
        !self.contents.iter().any(|imported| matches!(imported.outcome, ImportOutcome::Conflict { .. }))
    }
}

/// Destination of an import.
pub struct Target {
    /// Location, which determines the names of repositories.
    pub location: RegistryLocation,
    /// The registry at this location.
    pub registry: Arc<dyn Registry>,
}

/// Digests of the referrers that the registry lists, by repository and subject.
pub(super) type ListedReferrers = BTreeMap<(Repository, Digest), BTreeSet<Digest>>;

/// A blob and the repositories that must have it.
struct BlobPush<'a> {
    blob: &'a Blob,
    /// Names below the registry's prefix.
    repositories: BTreeSet<&'a str>,
}

/// Imports the bundle. The import is idempotent: existing content is not sent again. `allow_older` lets tags move back although
/// the site accepted a newer bundle of the same exporter.
pub async fn import(
    verified: &Verified,
    target: &Target,
    allow_older: bool,
    meter: &dyn Meter,
) -> Result<ImportSummary> {
    let index = verified.bundle.index();
    let (mut contents, mut listed) = (Vec::new(), ListedReferrers::default());
    for Listed { content, .. } in &index.contents {
        let outcome = target.outcome(verified, content, &mut listed).await?;
        contents.push(Imported { content: content.clone(), outcome });
    }
    let selected: Vec<&Content> =
        contents.iter().filter(|new| new.needs_blobs()).map(|new| &new.content).collect();
    let blobs = blobs_to_push(verified, &selected);
    target.check_base(verified, &blobs).await?;
    target.check_moving_tags(&contents).await?;

    let carried = || blobs.iter().filter(|push| push.blob.is_carried());
    meter.begin(Phase::Push, carried().map(|push| push.blob.size).sum());
    // Collected first, because a stream that borrows from a closure's argument is not `Send` for all lifetimes.
    let pushes: Vec<_> = blobs.iter().map(|push| target.push_blob(verified, push, meter)).collect();
    let sent: Vec<u64> =
        futures::stream::iter(pushes).buffer_unordered(MAX_CONCURRENT_UPLOADS).try_collect().await?;
    // Before the first tag moves, so that even an interrupted import rules out older bundles.
    target.accept(verified).await?;
    // Push images before their referrers: `farrier gc` may delete referrers without an image at any time.
    for Imported { content, .. } in contents.iter().filter(|new| new.is_pending() && new.content.is_image()) {
        target.push_manifests(verified, content).await?;
    }
    // The site may have accepted a newer bundle during the uploads.
    target.check_order(verified, allow_older).await?;
    // Push referrers before the tag of their image, so that a tag never exists without its report. Check the tags
    // again, because the uploads may have taken hours.
    for new in contents.iter_mut().rev().filter(|new| new.is_pending()) {
        if new.content.tag.is_some() {
            new.outcome = target.outcome(verified, &new.content, &mut listed).await?;
        }
        if !new.is_pending() {
            continue;
        }
        if new.content.has_moving_tag() {
            target.check_order(verified, allow_older).await?;
        }
        let moves = matches!(new.outcome, ImportOutcome::Moved { .. });
        match target.push_content(verified, &new.content, moves).await {
            Ok(true) => {}
            Ok(false) => new.outcome = target.outcome(verified, &new.content, &mut listed).await?,
            Err(error) => {
                let repository = target.repository(&new.content.repository)?;
                return Err(target.explain_refusal(&repository, error).await);
            }
        }
    }
    meter.end();
    let sent_blobs = sent.iter().filter(|bytes| **bytes > 0).count();
    Ok(ImportSummary { contents, sent_blobs, sent_bytes: sent.iter().sum() })
}

/// Blobs of these contents, each with the repositories that need it.
fn blobs_to_push<'a>(verified: &'a Verified, contents: &[&'a Content]) -> Vec<BlobPush<'a>> {
    let mut needed: BTreeMap<&Digest, BTreeSet<&str>> = BTreeMap::new();
    for content in contents {
        for digest in manifests_of(verified, &content.digest) {
            let Some(manifest) = verified.manifests.get(digest) else { continue };
            for blob in blobs_of(&manifest.parsed) {
                needed.entry(&blob.digest).or_default().insert(&content.repository);
            }
        }
    }
    let blobs = verified.bundle.index().blobs.iter().filter(|blob| blob.manifest.is_none());
    blobs.filter_map(|blob| Some(BlobPush { blob, repositories: needed.remove(&blob.digest)? })).collect()
}

/// A manifest and the manifests below it; children come before their parents.
pub(super) fn manifests_of<'a>(verified: &'a Verified, digest: &'a Digest) -> Vec<&'a Digest> {
    let mut order = Vec::new();
    let mut level = BTreeSet::from([digest]);
    for _ in 0..=MAX_DEPTH {
        let children: BTreeSet<&Digest> = level
            .iter()
            .filter_map(|digest| verified.manifests.get(digest))
            .flat_map(|manifest| manifest.parsed.children())
            .map(|child| &child.digest)
            .collect();
        order.extend(level);
        level = children;
    }
    order.reverse();
    order
}

impl Target {
    pub(super) fn repository(&self, name: &str) -> Result<Repository> {
        repository(&self.location, name)
    }

    /// Determines the outcome of importing one content now.
    pub(super) async fn outcome(
        &self,
        verified: &Verified,
        content: &Content,
        listed: &mut ListedReferrers,
    ) -> Result<ImportOutcome> {
        let Content { repository, tag, digest, .. } = content;
        let repository = &self.repository(repository)?;
        let Some(tag) = tag else {
            let is_present = self.has_untagged(verified, repository, digest, listed).await?;
            return Ok(if is_present { ImportOutcome::Present } else { ImportOutcome::Pushed });
        };
        let current = self.registry.manifest(repository, &Version::Tag(tag.clone())).await?;
        let Some(current) = current else { return Ok(ImportOutcome::Pushed) };
        if current.digest == *digest {
            return Ok(ImportOutcome::Present);
        }
        if content.has_moving_tag() {
            return Ok(ImportOutcome::Moved { previous: current.digest });
        }
        let new = verified.manifests.get(digest).filter(|_| content.is_joined());
        Ok(match new.map_or(Joined::Incompatible, |new| Joined::of(&current.bytes, &new.bytes)) {
            Joined::Unchanged => ImportOutcome::Present,
            Joined::New | Joined::Both(_) => ImportOutcome::Moved { previous: current.digest },
            Joined::Incompatible => ImportOutcome::Conflict { holds: current.digest },
        })
    }

    /// Whether the registry has a manifest. A referrer counts only if the registry lists it.
    async fn has_untagged(
        &self,
        verified: &Verified,
        repository: &Repository,
        digest: &Digest,
        listed: &mut ListedReferrers,
    ) -> Result<bool> {
        let subject = match verified.manifests.get(digest).map(|manifest| &manifest.parsed) {
            Some(AnyManifest::Image(image)) => image.subject.as_ref(),
            _ => None,
        };
        let Some(subject) = subject else {
            let version = Version::Digest(digest.clone());
            return Ok(self.registry.manifest(repository, &version).await?.is_some());
        };
        let referrers = match listed.entry((repository.clone(), subject.digest.clone())) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => {
                let referrers = self.registry.referrers(repository, &subject.digest, None).await?;
                new.insert(referrers.into_iter().map(|referrer| referrer.digest).collect())
            }
        };
        Ok(referrers.contains(digest))
    }

    /// Checks that the registry has the blobs that the bundle omits because its base has them.
    async fn check_base(&self, verified: &Verified, blobs: &[BlobPush<'_>]) -> Result<()> {
        let omitted: Vec<&BlobPush<'_>> = blobs.iter().filter(|push| !push.blob.is_carried()).collect();
        // Collected first, as in `import`. A delta omits most blobs of the registry.
        let lookups: Vec<_> = omitted.iter().map(|push| self.find_source(push)).collect();
        let sources: Vec<Option<Repository>> =
            futures::stream::iter(lookups).buffered(MAX_CONCURRENT_REQUESTS).try_collect().await?;
        let missing: Vec<&Digest> = omitted
            .iter()
            .zip(&sources)
            .filter(|(_, source)| source.is_none())
            .map(|(push, _)| &push.blob.digest)
            .collect();
        let (Some(first), Some(base)) = (missing.first(), &verified.bundle.index().base) else {
            return Ok(());
        };
        Err(BundleError::BaseMissing {
            count: missing.len(),
            first: (*first).clone(),
            registry: self.location.to_string(),
            base: base.id.clone(),
            from: base.from.clone(),
        })
    }

    /// Finds a repository that has the blob: one that needs it, or one of the base.
    async fn find_source(&self, push: &BlobPush<'_>) -> Result<Option<Repository>> {
        let BlobPush { blob, repositories } = push;
        let names = repositories.iter().copied().chain(blob.base.iter().map(String::as_str));
        self.find(&blob.digest, names).await
    }

    /// Finds the first of the repositories that has the blob.
    async fn find<'a>(
        &self,
        digest: &Digest,
        names: impl Iterator<Item = &'a str>,
    ) -> Result<Option<Repository>> {
        for name in names {
            let repository = self.repository(name)?;
            if self.registry.has_blob(&repository, digest).await? {
                return Ok(Some(repository));
            }
        }
        Ok(None)
    }

    /// Ensures that every repository has the blob. Returns the number of bytes sent.
    async fn push_blob(&self, verified: &Verified, push: &BlobPush<'_>, meter: &dyn Meter) -> Result<u64> {
        let BlobPush { blob, repositories } = push;
        let mut source = self.find_source(push).await?;
        let mut sent = 0;
        for name in repositories {
            let repository = self.repository(name)?;
            if source.as_ref() == Some(&repository)
                || self.registry.has_blob(&repository, &blob.digest).await?
            {
                source.get_or_insert(repository);
                continue;
            }
            if let Some(from) = &source
                && self.registry.mount_blob(&repository, &blob.digest, from).await?
            {
                continue;
            }
            let upload = match (verified.frames.get(&blob.digest), &source) {
                (Some(frame), _) => {
                    let content: Arc<dyn BlobSource> = Arc::new(verified.bundle.source(*frame, blob));
                    self.registry.push(&repository, &blob.digest, BlobContent::Source(&content)).await?
                }
                (None, Some(from)) => self.copy_blob(&blob.digest, blob.size, from, &repository).await?,
                (None, None) => return Err(BundleError::Absent(format!("blob {}", blob.digest))),
            };
            sent += upload.bytes();
            source.get_or_insert(repository);
        }
        if blob.is_carried() {
            meter.advance(blob.size);
        }
        Ok(sent)
    }

    /// Copies a blob between repositories, for registries that do not mount blobs.
    async fn copy_blob(
        &self,
        digest: &Digest,
        size: u64,
        from: &Repository,
        to: &Repository,
    ) -> Result<Upload> {
        let directory = tempfile::tempdir()?;
        let file = directory.path().join("blob");
        self.registry.fetch_blob(from, digest, size, &file).await?;
        Ok(self.registry.push_blob(to, digest, &file).await?)
    }

    /// Pushes the manifests, then the tag; the manifests of images were pushed before. Returns `false` if the tag keeps
    /// its content.
    async fn push_content(&self, verified: &Verified, content: &Content, moves: bool) -> Result<bool> {
        let Content { kind: _, repository, tag, digest } = content;
        let (repository, manifest) = (self.repository(repository)?, verified.manifests.get(digest));
        if moves
            && content.is_joined()
            && let (Some(tag), Some(new)) = (tag, manifest)
        {
            let new = (&*new.media_type, &new.bytes[..]);
            return Ok(join(self.registry.as_ref(), &repository, tag, new).await?);
        }
        if !content.is_image() {
            self.push_manifests(verified, content).await?;
        }
        if let (Some(tag), Some(Manifest { bytes, media_type, .. })) = (tag, manifest) {
            let version = Version::Tag(tag.clone());
            self.registry.push_manifest(&repository, &version, media_type, bytes).await?;
        }
        Ok(true)
    }

    /// Pushes the manifests by digest.
    async fn push_manifests(&self, verified: &Verified, content: &Content) -> Result<()> {
        let repository = self.repository(&content.repository)?;
        for digest in manifests_of(verified, &content.digest) {
            let Some(Manifest { bytes, media_type, parsed }) = verified.manifests.get(digest) else {
                continue;
            };
            if matches!(parsed, AnyManifest::Image(image) if image.subject.is_some()) {
                self.registry.push_referrer(&repository, bytes).await?;
            } else {
                let version = Version::Digest(digest.clone());
                self.registry.push_manifest(&repository, &version, media_type, bytes).await?;
            }
        }
        Ok(())
    }
}
