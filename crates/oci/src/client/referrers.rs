//! Adapter: what refers to a manifest, at a registry: listed by the registry itself (distribution-spec 1.1), or
//! by the tag that clients keep where it does not ("Referrers Tag Schema").

use std::time::{Duration, Instant};

use reqwest::{Method, header::ACCEPT};

use super::{
    auth::Scope,
    error::{RegistryError, Result},
    remote::RemoteRegistry,
    retry::{MAX_TRIES, pause_before},
    transport::RemoteName,
};
use crate::{
    AnyManifest, Descriptor, Digest, ImageIndex, ImageManifest, Repository, Version, media_type,
    referrers_tag,
};

impl RemoteRegistry {
    /// Puts a manifest with a subject; where the registry does not list it, adds it to the subject's tag.
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
            self.add_to_tag(repository, &subject.digest, &manifest.as_referrer(bytes)).await?;
        }
        Ok(digest)
    }

    /// Reads the list, adds to it and writes it, then reads it again until the new entry is in it, with those that were added just
    /// before. Writers of this process wait for each other. The protocol has no way to make those of others wait: one that read
    /// the list before this one wrote it can still write it without the entry, after this one has looked; and while
    /// docker-registry 2.8 writes a list, it may have none for whoever asks. Farriers that build the same image add the same
    /// documents, so that the last of them lists all.
    async fn add_to_tag(
        &self,
        repository: &Repository,
        subject: &Digest,
        referrer: &Descriptor,
    ) -> Result<()> {
        let Some(tag) = referrers_tag(subject) else { return Ok(()) };
        let version = Version::Tag(tag);
        let mut listing = self.listing.lock().await;
        let added = Added::with(listing.take(), repository, subject, referrer);
        let added = listing.insert(added);
        for attempt in 0..MAX_TRIES {
            pause_before(attempt).await;
            let mut index = self.listed_by_tag(repository, subject).await?;
            let missing = added.missing_in(&index);
            if missing.is_empty() {
                return Ok(());
            }
            index.manifests.extend(missing);
            let bytes =
                index.to_bytes().map_err(|error| unusable(repository, &version, &error.to_string()))?;
            self.put_manifest(repository, &version, media_type::OCI_INDEX, &bytes).await?;
            if added.missing_in(&self.listed_by_tag(repository, subject).await?).is_empty() {
                return Ok(());
            }
        }
        Err(unusable(repository, &version, &format!("what is added is gone again, {MAX_TRIES} times")))
    }

    /// The list that clients keep; an empty one where there is none.
    async fn listed_by_tag(&self, repository: &Repository, subject: &Digest) -> Result<ImageIndex> {
        let Some(tag) = referrers_tag(subject) else { return Ok(ImageIndex::empty()) };
        let version = Version::Tag(tag);
        let Some(stored) = self.manifest_at(repository, &version).await? else {
            return Ok(ImageIndex::empty());
        };
        match AnyManifest::parse(&stored.bytes) {
            Ok(AnyManifest::Index(index)) => Ok(index),
            Ok(AnyManifest::Image(_)) => {
                Err(unusable(repository, &version, "it names an image and should list referrers"))
            }
            Err(error) => Err(unusable(repository, &version, &error.to_string())),
        }
    }

    /// What the registry lists, then what the tag lists: the registry may have begun to list after the tag was
    /// written.
    pub(super) async fn list_referrers(
        &self,
        repository: &Repository,
        subject: &Digest,
        artifact_type: Option<&str>,
    ) -> Result<Vec<Descriptor>> {
        let wanted = |descriptor: &Descriptor| {
            artifact_type.is_none_or(|kind| descriptor.artifact_type.as_deref() == Some(kind))
        };
        let listed = self.listed_by_registry(repository, subject, artifact_type).await?;
        let mut found: Vec<Descriptor> = listed.into_iter().filter(wanted).collect();
        if found.is_empty() {
            found = self.listed_by_tag(repository, subject).await?.manifests;
            found.retain(wanted);
        }
        Ok(found)
    }

    /// Empty where the registry does not list referrers, which it says with 404.
    async fn listed_by_registry(
        &self,
        repository: &Repository,
        subject: &Digest,
        artifact_type: Option<&str>,
    ) -> Result<Vec<Descriptor>> {
        let name = &RemoteName::of(repository);
        let action = format!("list referrers of {}@{subject}", name.path);
        let rest = format!("referrers/{subject}");
        let mut call = self.http.call(Method::GET, name, Scope::Pull, &rest, &action).await?;
        if let Some(kind) = artifact_type {
            call.url.query_pairs_mut().append_pair("artifactType", kind);
        }
        let mut found = Vec::new();
        let read = |page: &[u8]| {
            found.extend(ImageIndex::parse(page).map_err(|error| error.to_string())?.manifests);
            Ok(())
        };
        self.http.pages(call.with(ACCEPT, media_type::OCI_INDEX), read).await?;
        Ok(found)
    }
}

fn unusable(repository: &Repository, version: &Version, reason: &str) -> RegistryError {
    let RemoteName { host, path, .. } = RemoteName::of(repository);
    RegistryError::protocol(host, format!("list referrers in {path}{version}"), reason)
}

/// How long what was added is put back when it is gone: as long as one image is published. Later it may have been deleted.
const REMEMBERED: Duration = Duration::from_mins(1);

/// What was added to one list just now.
pub(super) struct Added {
    repository: Repository,
    subject: Digest,
    referrers: Vec<Descriptor>,
    last: Instant,
}

impl Added {
    /// One entry more of the list that was added to last, or the first one of another.
    pub(super) fn with(
        before: Option<Self>,
        repository: &Repository,
        subject: &Digest,
        referrer: &Descriptor,
    ) -> Self {
        let same = |added: &Self| {
            added.repository == *repository && added.subject == *subject && added.last.elapsed() < REMEMBERED
        };
        let mut referrers = before.filter(same).map(|added| added.referrers).unwrap_or_default();
        referrers.retain(|known| known.digest != referrer.digest);
        referrers.push(referrer.clone());
        Self { repository: repository.clone(), subject: subject.clone(), referrers, last: Instant::now() }
    }

    /// Those that the list does not have.
    pub(super) fn missing_in(&self, index: &ImageIndex) -> Vec<Descriptor> {
        let is_listed =
            |added: &&Descriptor| index.manifests.iter().any(|known| known.digest == added.digest);
        self.referrers.iter().filter(|added| !is_listed(added)).cloned().collect()
    }
}
