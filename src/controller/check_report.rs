//! Adapter: the check report beside an image: stored before the image's tags are, and found again.

use std::{fs::File, io::Read};

use serde_json::Value;

use super::{Controller, TargetError, build::blocking, retry::with_retry};
use crate::{
    image::{Digest, ImageReference, Repository, Version},
    oci::{Artifact, Descriptor, ImageError, ImageManifest, media_type},
    registry::{RegistryError, Upload},
};

/// Largest report that is read; one of 500 modules with findings has less than 1 MiB.
const MAX_REPORT: u64 = 16 << 20;

/// A check report that a registry holds.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredReport {
    /// The artifact's digest.
    pub digest: Digest,
    /// `{"report": ..., "reusedFrom": ...}`; the report as `farrier check -o json` writes it.
    pub document: Value,
}

impl Controller {
    /// Pushes a report with what it names. Returns the bytes sent.
    pub(super) async fn push_check_report(
        &self,
        repository: &Repository,
        artifact: &Artifact,
    ) -> Result<u64, TargetError> {
        let mut sent = 0;
        for bytes in [artifact.config, &artifact.content] {
            let upload =
                with_retry("push check report", &self.cancel, || self.registry.push_bytes(repository, bytes))
                    .await?;
            if let Upload::Sent(bytes) = upload {
                sent += bytes;
            }
        }
        with_retry("push check report", &self.cancel, || {
            self.registry.push_referrer(repository, &artifact.manifest)
        })
        .await?;
        Ok(sent)
    }

    /// The check report of a published image; `None` where there is no such image, or none beside it. Of
    /// several, the one that was stored last, as far as the registry tells.
    pub async fn check_report(
        &self,
        reference: &ImageReference,
    ) -> Result<Option<StoredReport>, TargetError> {
        let repository = &reference.repository;
        let Some(subject) = self.manifest_digest(reference).await? else { return Ok(None) };
        let referrers = with_retry("list referrers", &self.cancel, || {
            self.registry_of(repository).referrers(repository, &subject, media_type::CHECK_REPORT)
        })
        .await?;
        for referrer in referrers.into_iter().rev() {
            if let Some(report) = self.read_check_report(repository, &subject, &referrer.digest).await? {
                return Ok(Some(report));
            }
        }
        Ok(None)
    }

    async fn manifest_digest(&self, reference: &ImageReference) -> Result<Option<Digest>, TargetError> {
        if let Version::Digest(digest) = &reference.version {
            return Ok(Some(digest.clone()));
        }
        let repository = &reference.repository;
        let found = with_retry("look up image", &self.cancel, || {
            self.registry_of(repository).manifest(repository, &reference.version)
        })
        .await?;
        Ok(found.map(|manifest| manifest.digest))
    }

    /// `None` for a list's entry that is gone, or that is about something else: lists are kept by clients.
    async fn read_check_report(
        &self,
        repository: &Repository,
        subject: &Digest,
        digest: &Digest,
    ) -> Result<Option<StoredReport>, TargetError> {
        let registry = self.registry_of(repository);
        let version = Version::Digest(digest.clone());
        let stored =
            with_retry("fetch check report", &self.cancel, || registry.manifest(repository, &version))
                .await?;
        let Some(stored) = stored else { return Ok(None) };
        let manifest = ImageManifest::parse(&stored.bytes)?;
        let about = manifest.subject.as_ref().map(|subject| &subject.digest);
        let is_report = |layer: &&Descriptor| layer.media_type == media_type::CHECK_REPORT;
        let Some(layer) = manifest.layers.iter().find(is_report).filter(|_| about == Some(subject)) else {
            return Ok(None);
        };
        let unusable = |reason: String| {
            TargetError::Registry(RegistryError::Protocol {
                host: registry.describe(),
                action: format!("fetch check report {repository}{version}"),
                reason,
            })
        };
        if layer.size > MAX_REPORT {
            return Err(unusable(format!("it has {} bytes, at most {MAX_REPORT} are read", layer.size)));
        }
        let work = self.cache.scratch()?;
        let file = work.path().join("report.json");
        with_retry("fetch check report", &self.cancel, || {
            registry.fetch_blob(repository, &layer.digest, &file)
        })
        .await?;
        let bytes = blocking(move || {
            let mut bytes = Vec::new();
            let read = File::open(&file).and_then(|open| open.take(MAX_REPORT).read_to_end(&mut bytes));
            read.map_err(|source| TargetError::Input { path: file, source })?;
            Ok(bytes)
        })
        .await?;
        let document = serde_json::from_slice(&bytes)
            .map_err(|source| ImageError::Json { what: "check report", source })?;
        Ok(Some(StoredReport { digest: stored.digest, document }))
    }
}
