//! Adapter: what refers to a manifest, at a registry: listed by the registry itself (distribution-spec 1.1), or
//! by the tag that clients keep where it does not ("Referrers Tag Schema").

use super::{
    RegistryError, RemoteRegistry,
    contention::{MAX_TRIES, pause_before},
    http::Call,
    name::RemoteName,
    pages::next_page,
};
use crate::{
    image::{Digest, Repository, Version},
    oci::{AnyManifest, Descriptor, ImageIndex, ImageManifest, MAX_MANIFEST, media_type, referrers_tag},
};

/// Pages of referrers; a registry that gives more goes in circles.
const MAX_PAGES: usize = 100;

impl RemoteRegistry {
    /// Puts a manifest with a subject; where the registry does not list it, adds it to the subject's tag.
    pub(super) async fn push_with_subject(
        &self,
        repository: &Repository,
        bytes: &[u8],
    ) -> Result<Digest, RegistryError> {
        let action = format!("push referrer to {repository}");
        let protocol = |reason: String| RegistryError::Protocol {
            host: RemoteName::of(repository).host,
            action: action.clone(),
            reason,
        };
        let manifest = ImageManifest::parse(bytes).map_err(|error| protocol(error.to_string()))?;
        let subject =
            manifest.subject.as_ref().ok_or_else(|| protocol("the manifest has no subject".to_owned()))?;
        let version = Version::Digest(Digest::of(bytes));
        let (digest, listed) =
            self.put_manifest(repository, &version, media_type::OCI_MANIFEST, bytes).await?;
        if listed.as_ref() != Some(&subject.digest) {
            self.add_to_tag(repository, &subject.digest, &manifest.as_referrer(bytes)).await?;
        }
        Ok(digest)
    }

    /// Reads the list, adds to it and writes it, then reads it again until the new entry is in it. Writers of this
    /// process wait for each other. The protocol has no way to make those of others wait: one that read the list
    /// before this one wrote it can still write it without the entry, after this one has looked. Farriers that
    /// build the same image do no harm then, because they add the same report.
    async fn add_to_tag(
        &self,
        repository: &Repository,
        subject: &Digest,
        referrer: &Descriptor,
    ) -> Result<(), RegistryError> {
        let Some(tag) = referrers_tag(subject) else { return Ok(()) };
        let version = Version::Tag(tag);
        let _listing = self.listing.lock().await;
        let mut last = None;
        for attempt in 0..MAX_TRIES {
            pause_before(attempt).await;
            let mut index = self.listed_by_tag(repository, subject).await?;
            if index.manifests.iter().any(|known| known.digest == referrer.digest) {
                return Ok(());
            }
            index.manifests.push(referrer.clone());
            let bytes =
                index.to_bytes().map_err(|error| unusable(repository, &version, &error.to_string()))?;
            match self.put_manifest(repository, &version, media_type::OCI_INDEX, &bytes).await {
                // docker-registry 2.8 writes manifests in place: while another client puts the same referrer, it
                // reads a part of it, and answers 400 to a list that names it.
                Err(error @ RegistryError::Protocol { .. }) => last = Some(error),
                Err(error) => return Err(error),
                Ok(_) if self.is_listed(repository, subject, referrer).await? => return Ok(()),
                Ok(_) => last = None,
            }
        }
        let gone =
            || unusable(repository, &version, &format!("what is added is gone again, {MAX_TRIES} times"));
        Err(last.unwrap_or_else(gone))
    }

    async fn is_listed(
        &self,
        repository: &Repository,
        subject: &Digest,
        referrer: &Descriptor,
    ) -> Result<bool, RegistryError> {
        let index = self.listed_by_tag(repository, subject).await?;
        Ok(index.manifests.iter().any(|known| known.digest == referrer.digest))
    }

    /// The list that clients keep; an empty one where there is none.
    async fn listed_by_tag(
        &self,
        repository: &Repository,
        subject: &Digest,
    ) -> Result<ImageIndex, RegistryError> {
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
    ) -> Result<Vec<Descriptor>, RegistryError> {
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
    ) -> Result<Vec<Descriptor>, RegistryError> {
        let name = &RemoteName::of(repository);
        let action = format!("list referrers of {}@{subject}", name.path);
        let protocol = |reason: String| RegistryError::Protocol {
            host: name.host.clone(),
            action: action.clone(),
            reason,
        };
        let mut first = self.http.url(name, &format!("referrers/{subject}"), &action).await?;
        if let Some(kind) = artifact_type {
            first.query_pairs_mut().append_pair("artifactType", kind);
        }
        let mut next = Some(first);
        let mut found = Vec::new();
        for _ in 0..MAX_PAGES {
            let Some(url) = next.take() else { return Ok(found) };
            let call = Call::get(name, &action, url).accepting(media_type::OCI_INDEX);
            let mut response = self.http.send(&call).await?;
            match response.status().as_u16() {
                200 => {}
                404 => return Ok(found),
                _ => return Err(self.http.unexpected(&call, response).await),
            }
            next = next_page(&response);
            let body = self.http.body(&call, &mut response, MAX_MANIFEST).await?;
            let index = ImageIndex::parse(&body).map_err(|error| protocol(error.to_string()))?;
            found.extend(index.manifests);
        }
        Err(protocol(format!("more than {MAX_PAGES} pages")))
    }
}

fn unusable(repository: &Repository, version: &Version, reason: &str) -> RegistryError {
    let name = RemoteName::of(repository);
    RegistryError::Protocol {
        host: name.host,
        action: format!("list referrers in {}{version}", name.path),
        reason: reason.to_owned(),
    }
}
