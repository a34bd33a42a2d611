//! Trust in stored inputs: if the site has keys, one of them must have signed an input.

use async_trait::async_trait;
use farrier_core::image::{Digest, Repository};

/// Whether a trusted key signed an artifact in the registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SignatureStatus {
    /// A trusted key signed the artifact, so its annotations are trusted.
    Signed,
    /// The site has no keys. The annotations are untrusted: anyone with write access to the registry can set them.
    NoKeys,
    /// No trusted key signed the artifact, for this reason.
    Refused(String),
}

/// Reason why a signature could not be looked up or made.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct TrustFault {
    /// Failure with its causes.
    pub message: String,
    /// Remedy.
    pub hint: Option<String>,
    /// Whether a retry may succeed with nothing changed.
    pub is_transient: bool,
}

/// The keys of a site, used for its store.
#[async_trait]
pub trait Trust: Send + Sync {
    /// Returns whether one of the keys signed a manifest.
    async fn signature_status(
        &self,
        repository: &Repository,
        digest: &Digest,
    ) -> Result<SignatureStatus, TrustFault>;

    /// Signs a manifest with the site's signing key, unless that key has already signed the manifest. The content must come from
    /// this machine or be signed by a trusted key. Returns whether the site has a signing key.
    async fn sign(&self, repository: &Repository, digest: &Digest, name: &str) -> Result<bool, TrustFault>;
}
