//! Adapter: the check report beside an image: stored before the image's tags are, and found again.

use serde_json::Value;

use super::{Controller, TargetError, documents::CHECK_REPORT};
use crate::{
    image::{Digest, ImageReference},
    oci::ImageError,
};

/// A check report that a registry holds.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredReport {
    /// The artifact's digest.
    pub digest: Digest,
    /// `{"report": ..., "reusedFrom": ...}`; the report as `farrier check -o json` writes it.
    pub document: Value,
}

impl Controller {
    /// The check report of a published image; `None` where there is no such image, or none beside it. Of
    /// several, the one that was stored last, as far as the registry tells.
    pub async fn check_report(
        &self,
        reference: &ImageReference,
    ) -> Result<Option<StoredReport>, TargetError> {
        let repository = &reference.repository;
        let Some(subject) = self.manifest_digest(reference).await? else { return Ok(None) };
        let Some(found) = self.document(repository, &subject, &CHECK_REPORT).await? else { return Ok(None) };
        let document = serde_json::from_slice(&found.content)
            .map_err(|source| ImageError::Json { what: "check report", source })?;
        Ok(Some(StoredReport { digest: found.digest, document }))
    }
}
