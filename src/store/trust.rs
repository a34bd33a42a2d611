//! Whether what stands in the store counts: where the site has keys, one of them must have signed it.

use async_trait::async_trait;

use crate::image::{Digest, Repository};

/// What a site's keys say of something in its registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// One of them signed it: it is what its annotations say.
    Signed,
    /// The site has no keys. Its annotations are whatever the last writer to the registry made them.
    NoKeys,
    /// None of them signed it, and why that is so.
    Refused(String),
}

/// Why it could not be found out, or why nothing could be signed.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct TrustFault {
    /// What failed, with its causes.
    pub message: String,
    /// What to do.
    pub hint: Option<String>,
    /// May it work in a moment without any change?
    pub is_transient: bool,
}

/// The keys of a site, for what it keeps in its store.
#[async_trait]
pub trait Trust: Send + Sync {
    /// What the keys say of a manifest.
    async fn standing(&self, repository: &Repository, digest: &Digest) -> Result<Standing, TrustFault>;

    /// Signs a manifest whose content comes from this machine; says whether the site has a key to sign with.
    async fn sign(&self, repository: &Repository, digest: &Digest, name: &str) -> Result<bool, TrustFault>;
}
