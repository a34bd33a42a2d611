//! Adapter: where images are kept: a registry (OCI distribution protocol) or a layout directory.

mod auth;
mod challenge;
pub(crate) mod contention;
mod credentials;
mod delete;
mod error;
mod http;
mod keyring;
mod layout;
mod layout_sweep;
mod location;
mod mirrored;
mod name;
mod pages;
mod referrers;
mod remote;
mod retrying;
mod stream;
mod upload;

use std::{path::Path, sync::Arc};

pub use self::{
    credentials::CredentialFile,
    error::RegistryError,
    keyring::Keyring,
    layout::LayoutRegistry,
    location::{LocationError, RegistryLocation, RegistryOptions, connect},
    remote::RemoteRegistry,
    retrying::Retrying,
    stream::{BlobSource, BlobStream},
};
use crate::{
    image::{Digest, Repository, Tag, Version},
    oci::Descriptor,
};

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

impl Upload {
    /// The bytes that were sent.
    pub fn bytes(self) -> u64 {
        match self {
            Self::Sent(bytes) => bytes,
            Self::Present => 0,
        }
    }
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

    /// The same for a blob that is no file of its own. `digest` is the source's.
    async fn push_blob_from(
        &self,
        repository: &Repository,
        digest: &Digest,
        source: Arc<dyn BlobSource>,
    ) -> Result<Upload, RegistryError>;

    /// Makes a blob of another repository of the same registry known in this one, without sending it.
    /// `false` where the registry does not do that; then it must be pushed.
    async fn mount_blob(
        &self,
        repository: &Repository,
        digest: &Digest,
        from: &Repository,
    ) -> Result<bool, RegistryError> {
        let _ = (digest, from);
        tracing::debug!(%repository, "blobs are not mounted here");
        Ok(false)
    }

    /// The same for bytes in memory (configurations).
    async fn push_bytes(&self, repository: &Repository, bytes: &[u8]) -> Result<Upload, RegistryError>;

    /// Streams a blob into a file, which appears whole or not at all.
    async fn fetch_blob(
        &self,
        repository: &Repository,
        digest: &Digest,
        to: &Path,
    ) -> Result<(), RegistryError>;

    /// A blob's bytes as they come, which whoever takes them has to verify.
    async fn open_blob(&self, repository: &Repository, digest: &Digest) -> Result<BlobStream, RegistryError>;

    /// Puts a manifest under a tag or its digest.
    async fn push_manifest(
        &self,
        repository: &Repository,
        version: &Version,
        media_type: &str,
        bytes: &[u8],
    ) -> Result<Digest, RegistryError>;

    /// Puts an OCI manifest with a `subject` under its digest, so that [`Registry::referrers`] of the subject
    /// finds it. The subject need not be there yet; what the manifest names must be.
    async fn push_referrer(&self, repository: &Repository, bytes: &[u8]) -> Result<Digest, RegistryError>;

    /// The manifests of one kind, or of all, that refer to `subject`, in no order; none where the registry lists none.
    async fn referrers(
        &self,
        repository: &Repository,
        subject: &Digest,
        artifact_type: Option<&str>,
    ) -> Result<Vec<Descriptor>, RegistryError>;

    /// Deletes a manifest with all its tags. `false` where there was none. A registry frees the space of what nothing
    /// names any more when it likes; a layout directory does it at once.
    async fn delete_manifest(&self, repository: &Repository, digest: &Digest) -> Result<bool, RegistryError>;
}
