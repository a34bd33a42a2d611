//! Adapter: documents beside an image: stored before the image's tags are, and found again.

use std::{fs::File, io::Read};

use super::{Controller, TargetError};
use crate::{
    blocking::blocking,
    image::{Digest, ImageReference, Repository, Version},
    oci::{Artifact, Descriptor, ImageManifest, annotations, media_type},
    provenance::SLSA_PREDICATE,
    registry::{Registry, RegistryError, Upload},
};

/// Largest document that is read; a report of 500 modules with findings has less than 1 MiB, a bill of 600 packages 400 KiB.
const MAX_DOCUMENT: u64 = 16 << 20;

/// A kind of document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Kind {
    /// For messages.
    pub(super) name: &'static str,
    /// Of the artifact and of its layer.
    pub(super) media_type: &'static str,
    /// Of statements, which others put beside images too: what they claim.
    predicate_type: Option<&'static str>,
}

/// What the kernel's loader says about the modules.
pub(super) const CHECK_REPORT: Kind =
    Kind { name: "check report", media_type: media_type::CHECK_REPORT, predicate_type: None };
/// What is in it.
pub(super) const BILL: Kind =
    Kind { name: "bill of materials", media_type: media_type::CYCLONEDX, predicate_type: None };
/// How it was built.
pub(super) const PROVENANCE: Kind =
    Kind { name: "provenance", media_type: media_type::IN_TOTO, predicate_type: Some(SLSA_PREDICATE) };

/// A document that a registry holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Document {
    /// The artifact's digest.
    pub(super) digest: Digest,
    /// Its bytes.
    pub(super) content: Vec<u8>,
}

impl Controller {
    /// Pushes a document with what it names. Returns the bytes sent.
    pub(super) async fn push_document(
        &self,
        repository: &Repository,
        artifact: &Artifact,
    ) -> Result<u64, TargetError> {
        let mut sent = 0;
        for bytes in [artifact.config, &artifact.content] {
            let upload = self.registry.push_bytes(repository, bytes).await?;
            if let Upload::Sent(bytes) = upload {
                sent += bytes;
            }
        }
        self.registry.push_referrer(repository, &artifact.manifest).await?;
        Ok(sent)
    }

    /// The document of one kind about an image; `None` where there is none beside it. Of several, the one that was
    /// stored last, as far as the registry tells.
    pub(super) async fn document(
        &self,
        repository: &Repository,
        subject: &Digest,
        kind: &Kind,
    ) -> Result<Option<Document>, TargetError> {
        let referrers =
            self.registry_of(repository).referrers(repository, subject, Some(kind.media_type)).await?;
        for referrer in referrers.into_iter().rev() {
            if let Some(found) = self.read_document(repository, subject, &referrer.digest, kind).await? {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// The digest that a reference names now.
    pub(super) async fn manifest_digest(
        &self,
        reference: &ImageReference,
    ) -> Result<Option<Digest>, TargetError> {
        if let Version::Digest(digest) = &reference.version {
            return Ok(Some(digest.clone()));
        }
        let repository = &reference.repository;
        let found = self.registry_of(repository).manifest(repository, &reference.version).await?;
        Ok(found.map(|manifest| manifest.digest))
    }

    /// `None` for a list's entry that is gone, or that is about something else: lists are kept by clients.
    async fn read_document(
        &self,
        repository: &Repository,
        subject: &Digest,
        digest: &Digest,
        kind: &Kind,
    ) -> Result<Option<Document>, TargetError> {
        let registry = self.registry_of(repository);
        let version = Version::Digest(digest.clone());
        let stored = registry.manifest(repository, &version).await?;
        let Some(stored) = stored else { return Ok(None) };
        let manifest = ImageManifest::parse(&stored.bytes)?;
        let about = manifest.subject.as_ref().map(|subject| &subject.digest);
        let claims = manifest.annotations.get(annotations::PREDICATE_TYPE).map(String::as_str);
        if kind.predicate_type.is_some() && claims != kind.predicate_type {
            return Ok(None);
        }
        let is_it = |layer: &&Descriptor| layer.media_type == kind.media_type;
        let Some(layer) = manifest.layers.iter().find(is_it).filter(|_| about == Some(subject)) else {
            return Ok(None);
        };
        let content = self.small_blob(repository, layer, kind.name).await?;
        Ok(Some(Document { digest: stored.digest, content }))
    }

    /// A blob in memory.
    pub(super) async fn small_blob(
        &self,
        repository: &Repository,
        blob: &Descriptor,
        what: &str,
    ) -> Result<Vec<u8>, TargetError> {
        let registry: &dyn Registry = self.registry_of(repository);
        if blob.size > MAX_DOCUMENT {
            return Err(TargetError::Registry(RegistryError::Protocol {
                host: registry.describe(),
                action: format!("fetch {what} {repository}@{}", blob.digest),
                reason: format!("it has {} bytes, at most {MAX_DOCUMENT} are read", blob.size),
            }));
        }
        let work = self.cache.scratch()?;
        let file = work.path().join("document");
        registry.fetch_blob(repository, &blob.digest, &file).await?;
        blocking(move || {
            let mut bytes = Vec::new();
            let read = File::open(&file).and_then(|open| open.take(MAX_DOCUMENT).read_to_end(&mut bytes));
            read.map_err(|source| TargetError::Input { path: file, source })?;
            Ok(bytes)
        })
        .await
    }
}
