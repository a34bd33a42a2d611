//! Adapter: takes a verified bundle over into a registry: what that lacks, and never another content for a tag.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use futures::{StreamExt as _, TryStreamExt as _};
use serde::Serialize;

use super::{
    BundleError, Content, Meter, Phase, Result, Verified,
    collect::{blobs_of, children},
    index::Blob,
    referrers::repository,
    verify::Manifest,
};
use crate::{
    image::{Digest, Repository, Version},
    oci::AnyManifest,
    registry::{BlobContent, BlobSource, Joined, Registry, RegistryLocation, Upload, join},
};

/// Uploads at the same time: one is packed out while another waits for the registry.
const AT_ONCE: usize = 3;
/// How deep indexes of indexes go.
const MAX_DEPTH: usize = 4;

/// What became of one of the contents.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "outcome")]
pub enum Taken {
    /// It was pushed.
    Pushed,
    /// The registry had it.
    Present,
    /// The tag held something else before: it is one of those that name what was kept last, or one with signatures, and then it has
    /// those of both now.
    Moved {
        /// What it held.
        #[serde(rename = "holds")]
        held: Digest,
    },
    /// The tag holds something else, and keeps it.
    Conflict {
        /// What it holds.
        holds: Digest,
    },
}

/// What an import came to.
#[derive(Clone, Debug)]
pub struct Imported {
    /// Each of the contents, in the bundle's order.
    pub contents: Vec<(Content, Taken)>,
    /// Bytes of blobs that were sent.
    pub sent: u64,
    /// Blobs that were sent.
    pub blobs: usize,
}

impl Imported {
    /// Did every tag take its content?
    pub fn is_complete(&self) -> bool {
        !self.contents.iter().any(|(_, taken)| matches!(taken, Taken::Conflict { .. }))
    }
}

/// Where a bundle goes.
pub struct Target {
    /// The location, for the names of repositories.
    pub location: RegistryLocation,
    /// The registry there.
    pub registry: Arc<dyn Registry>,
}

/// A blob that a repository is to have.
struct Wanted<'a> {
    blob: &'a Blob,
    /// Without the prefix.
    repositories: BTreeSet<&'a str>,
}

/// Takes the bundle over. It can be repeated at any time: what is there is not sent again.
pub async fn import(verified: &Verified, target: &Target, meter: &dyn Meter) -> Result<Imported> {
    let index = verified.bundle.index();
    let mut contents = Vec::new();
    for listed in &index.contents {
        contents.push((listed.content.clone(), target.state(verified, &listed.content).await?));
    }
    let is_pending = |taken: &Taken| matches!(taken, Taken::Pushed | Taken::Moved { .. });
    let pending: Vec<&Content> =
        contents.iter().filter(|(_, taken)| is_pending(taken)).map(|(content, _)| content).collect();
    let blobs = wanted_blobs(verified, &pending);
    target.check_base(verified, &blobs).await?;

    let carried = || blobs.iter().filter(|wanted| wanted.blob.is_carried());
    meter.begin(Phase::Push, carried().map(|wanted| wanted.blob.size).sum());
    // Collected first: a stream that borrows from a closure's argument is not `Send` for all lifetimes.
    let pushes: Vec<_> = blobs.iter().map(|wanted| target.push_blob(verified, wanted, meter)).collect();
    let sent: Vec<u64> = futures::stream::iter(pushes).buffer_unordered(AT_ONCE).try_collect().await?;
    // The images themselves go before what refers to them: what refers to no image may be deleted by `farrier gc` at any time.
    for (content, _) in contents.iter().filter(|(content, taken)| content.is_image() && is_pending(taken)) {
        target.push_manifests(verified, content).await?;
    }
    // What refers to an image goes before its tag: no tag is ever there without its report. The uploads may have taken hours, in
    // which a tag may have been given to something else.
    for (content, taken) in contents.iter_mut().rev().filter(|(_, taken)| is_pending(taken)) {
        *taken = target.state(verified, content).await?;
        if is_pending(taken) && !target.push_content(verified, content, taken).await? {
            *taken = target.state(verified, content).await?;
        }
    }
    meter.end();
    Ok(Imported { contents, sent: sent.iter().sum(), blobs: sent.iter().filter(|bytes| **bytes > 0).count() })
}

/// The blobs of these contents, each with the repositories that need it for them.
fn wanted_blobs<'a>(verified: &'a Verified, contents: &[&'a Content]) -> Vec<Wanted<'a>> {
    let mut needed: BTreeMap<&Digest, BTreeSet<&str>> = BTreeMap::new();
    for content in contents {
        for digest in manifests_of(verified, &content.digest) {
            let Some(manifest) = verified.manifests.get(digest) else { continue };
            for blob in blobs_of(&manifest.parsed) {
                needed.entry(&blob.digest).or_default().insert(&content.repository);
            }
        }
    }
    let with_repositories =
        |blob: &'a Blob| Some(Wanted { blob, repositories: needed.remove(&blob.digest)? });
    verified
        .bundle
        .index()
        .blobs
        .iter()
        .filter(|blob| blob.manifest.is_none())
        .filter_map(with_repositories)
        .collect()
}

/// A manifest and those below it, those first that others name.
fn manifests_of<'a>(verified: &'a Verified, digest: &'a Digest) -> Vec<&'a Digest> {
    let mut order = Vec::new();
    let mut level = vec![digest];
    for _ in 0..=MAX_DEPTH {
        let below: Vec<&Digest> = level
            .iter()
            .filter_map(|digest| verified.manifests.get(digest))
            .flat_map(|manifest| children(&manifest.parsed))
            .map(|child| &child.digest)
            .collect();
        order.extend(level);
        level = below;
    }
    order.reverse();
    order
}

impl Target {
    fn repository(&self, name: &str) -> Result<Repository> {
        repository(&self.location, name)
    }

    /// Is there anything to do about it? What is under its tag already is whole: registries see to that.
    async fn state(&self, verified: &Verified, content: &Content) -> Result<Taken> {
        let Content { repository, tag, digest, .. } = content;
        // Whether a referrer is listed is asked where it is pushed.
        let Some(tag) = tag else { return Ok(Taken::Pushed) };
        let found = self.registry.manifest(&self.repository(repository)?, &Version::Tag(tag.clone())).await?;
        let Some(found) = found else { return Ok(Taken::Pushed) };
        if found.digest == *digest {
            return Ok(Taken::Present);
        }
        if content.has_moving_tag() {
            return Ok(Taken::Moved { held: found.digest });
        }
        let new = verified.manifests.get(digest).filter(|_| content.is_joined());
        Ok(match new.map_or(Joined::Foreign, |new| Joined::of(&found.bytes, &new.bytes)) {
            Joined::Whole => Taken::Present,
            Joined::New | Joined::Both(_) => Taken::Moved { held: found.digest },
            Joined::Foreign => Taken::Conflict { holds: found.digest },
        })
    }

    /// What the bundle leaves to its base must be here.
    async fn check_base(&self, verified: &Verified, blobs: &[Wanted<'_>]) -> Result<()> {
        let mut missing = Vec::new();
        for Wanted { blob, repositories } in blobs.iter().filter(|wanted| !wanted.blob.is_carried()) {
            let places = repositories.iter().copied().chain(blob.base.iter().map(String::as_str));
            if self.find(&blob.digest, places).await?.is_none() {
                missing.push(&blob.digest);
            }
        }
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

    /// The first of the repositories that has the blob.
    async fn find<'a>(
        &self,
        digest: &Digest,
        places: impl Iterator<Item = &'a str>,
    ) -> Result<Option<Repository>> {
        for place in places {
            let repository = self.repository(place)?;
            if self.registry.has_blob(&repository, digest).await? {
                return Ok(Some(repository));
            }
        }
        Ok(None)
    }

    /// Sees to it that every repository has the blob; gives the bytes that were sent for that.
    async fn push_blob(&self, verified: &Verified, wanted: &Wanted<'_>, meter: &dyn Meter) -> Result<u64> {
        let Wanted { blob, repositories } = wanted;
        let places = repositories.iter().copied().chain(blob.base.iter().map(String::as_str));
        let mut holder = self.find(&blob.digest, places).await?;
        let mut sent = 0;
        for name in repositories {
            let repository = self.repository(name)?;
            if holder.as_ref() == Some(&repository)
                || self.registry.has_blob(&repository, &blob.digest).await?
            {
                holder.get_or_insert(repository);
                continue;
            }
            if let Some(from) = &holder
                && self.registry.mount_blob(&repository, &blob.digest, from).await?
            {
                continue;
            }
            let upload = match (verified.frames.get(&blob.digest), &holder) {
                (Some(frame), _) => {
                    let source: Arc<dyn BlobSource> = Arc::new(verified.bundle.source(*frame, blob));
                    self.registry.push(&repository, &blob.digest, BlobContent::Source(&source)).await?
                }
                (None, Some(from)) => self.copy_blob(&blob.digest, blob.size, from, &repository).await?,
                (None, None) => return Err(BundleError::Absent(format!("blob {}", blob.digest))),
            };
            sent += upload.bytes();
            holder.get_or_insert(repository);
        }
        if blob.is_carried() {
            meter.advance(blob.size);
        }
        Ok(sent)
    }

    /// From one repository to another, where the registry mounts nothing.
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

    /// Pushes the manifests, those of images aside, which are there by now, and the tag last. `false` where the tag keeps what it
    /// holds.
    async fn push_content(&self, verified: &Verified, content: &Content, taken: &Taken) -> Result<bool> {
        let Content { kind: _, repository, tag, digest } = content;
        if let (Taken::Moved { .. }, true, Some(tag), Some(new)) =
            (taken, content.is_joined(), tag, verified.manifests.get(digest))
        {
            let repository = self.repository(repository)?;
            let new = (&*new.media_type, &new.bytes[..]);
            return Ok(join(self.registry.as_ref(), &repository, tag, new).await?);
        }
        if !content.is_image() {
            self.push_manifests(verified, content).await?;
        }
        self.push_tag(verified, content).await?;
        Ok(true)
    }

    /// Pushes the manifests by their digests.
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

    /// Gives the tag, if there is one, to what it names.
    async fn push_tag(&self, verified: &Verified, content: &Content) -> Result<()> {
        let Content { kind: _, repository, tag, digest } = content;
        let (Some(tag), Some(manifest)) = (tag, verified.manifests.get(digest)) else { return Ok(()) };
        let Manifest { bytes, media_type, parsed: _ } = manifest;
        let version = Version::Tag(tag.clone());
        self.registry.push_manifest(&self.repository(repository)?, &version, media_type, bytes).await?;
        Ok(())
    }
}
