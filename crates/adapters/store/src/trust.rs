//! Trust in stored inputs: if the site has keys, one of them must have signed an input.

use async_trait::async_trait;
use farrier_core::image::{Digest, Repository};

/// Relation of an artifact in the registry to the site's keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
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
    /// Returns how a manifest relates to the keys.
    async fn standing(&self, repository: &Repository, digest: &Digest) -> Result<Standing, TrustFault>;

    /// Signs a manifest whose content comes from this machine, or that a trusted key signed, unless the own key did. Returns
    /// whether the site has a signing key.
    async fn sign(&self, repository: &Repository, digest: &Digest, name: &str) -> Result<bool, TrustFault>;
}
