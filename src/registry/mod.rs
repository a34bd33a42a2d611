//! Adapter: where images are kept: a registry (OCI distribution protocol) or a layout directory.

use std::path::Path;

use crate::image::{Digest, Repository, Tag, Version};

/// A manifest as stored.
#[derive(Clone, Debug)]
pub struct StoredManifest {
    /// sha256 of `bytes`.
    pub digest: Digest,
    /// Media type.
    pub media_type: String,
    /// The manifest's exact bytes.
    pub bytes: Vec<u8>,
}

/// Did a push have to send anything?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Upload {
    /// Bytes were sent.
    Sent(u64),
    /// The registry had the blob.
    Present,
}

/// What a registry answered.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// No connection, or it broke. Transient.
    #[error("reach {host} to {action}")]
    Unreachable {
        /// Whom.
        host: String,
        /// For what.
        action: String,
        /// Why not.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// 5xx, 429. Transient.
    #[error("{host} answered {status} to {action}")]
    Server {
        /// Who.
        host: String,
        /// HTTP status.
        status: u16,
        /// To what.
        action: String,
    },
    /// 401, 403, or no credentials for a registry that wants some. Permanent.
    #[error("{host} refused to {action}: {reason}")]
    Denied {
        /// Who.
        host: String,
        /// What.
        action: String,
        /// Its words.
        reason: String,
    },
    /// Anything else that it answered. Permanent.
    #[error("{host} answered to {action}: {reason}")]
    Protocol {
        /// Who.
        host: String,
        /// What.
        action: String,
        /// Its words.
        reason: String,
    },
    /// Content that is not what its digest says. Transient once, then permanent.
    #[error("{action}: content is {found}, wanted {wanted}")]
    Digest {
        /// What was done.
        action: String,
        /// What was asked for.
        wanted: Digest,
        /// What came.
        found: Digest,
    },
    /// A file of this machine.
    #[error("{action}")]
    Io {
        /// What was done, to what.
        action: String,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
}

/// A place for images. Everything is checked by digest.
#[async_trait::async_trait]
pub trait Registry: Send + Sync {
    /// One line for people.
    fn describe(&self) -> String;

    /// The manifest, if there is one.
    async fn manifest(
        &self,
        repository: &Repository,
        version: &Version,
    ) -> Result<Option<StoredManifest>, RegistryError>;

    /// All tags; empty when the repository does not exist.
    async fn tags(&self, repository: &Repository) -> Result<Vec<Tag>, RegistryError>;

    /// Is the blob there?
    async fn has_blob(&self, repository: &Repository, digest: &Digest) -> Result<bool, RegistryError>;

    /// Streams a file up, unless the registry has it. `digest` is the file's.
    async fn push_blob(
        &self,
        repository: &Repository,
        digest: &Digest,
        file: &Path,
    ) -> Result<Upload, RegistryError>;

    /// The same for bytes in memory (configurations).
    async fn push_bytes(&self, repository: &Repository, bytes: &[u8]) -> Result<Upload, RegistryError>;

    /// Streams a blob into a file, which appears whole or not at all.
    async fn fetch_blob(
        &self,
        repository: &Repository,
        digest: &Digest,
        to: &Path,
    ) -> Result<(), RegistryError>;

    /// Puts a manifest under a tag or its digest.
    async fn push_manifest(
        &self,
        repository: &Repository,
        version: &Version,
        media_type: &str,
        bytes: &[u8],
    ) -> Result<Digest, RegistryError>;
}
