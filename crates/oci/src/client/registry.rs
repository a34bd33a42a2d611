//! The traits [`Registry`], which the users of registries call, and [`Access`], through which a registry client uses its
//! environment.

use std::{
    io::{self, Read},
    path::Path,
    pin::Pin,
    sync::Arc,
};

use bytes::Bytes;
use futures::Stream;
use jiff::Timestamp;
use url::Url;

use super::error::Result;
use crate::{AnyManifest, Descriptor, Digest, Repository, Tag, Version};

/// A manifest as stored.
#[derive(Clone, Debug)]
pub struct StoredManifest {
    /// SHA-256 of `bytes`.
    pub digest: Digest,
    /// Media type.
    pub media_type: String,
    /// The manifest's exact bytes.
    pub bytes: Vec<u8>,
}

/// Outcome of a push.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Upload {
    /// Number of bytes sent.
    Sent(u64),
    /// The registry already had the blob.
    Present,
}

impl Upload {
    /// Number of bytes sent.
    pub fn bytes(self) -> u64 {
        match self {
            Self::Sent(bytes) => bytes,
            Self::Present => 0,
        }
    }
}

/// Stream of a blob's unverified bytes. The receiver must compare the digest.
pub type BlobStream = Pin<Box<dyn Stream<Item = Result<Bytes>> + Send>>;

/// A blob that can be opened several times, because an upload may have to start over.
pub trait BlobSource: Send + Sync {
    /// Number of bytes.
    fn size(&self) -> u64;
    /// Opens a reader at the start of the blob.
    fn open(&self) -> io::Result<Box<dyn Read + Send>>;
}

/// Content of a blob to push.
#[derive(Clone, Copy)]
pub enum BlobContent<'a> {
    /// A file's content.
    File(&'a Path),
    /// Generated content that is not a file.
    Source(&'a Arc<dyn BlobSource>),
    /// Bytes in memory.
    Bytes(&'a [u8]),
}

/// A registry or layout directory. All content is verified by digest, unless stated otherwise.
#[async_trait::async_trait]
pub trait Registry: Send + Sync {
    /// One-line description for messages.
    fn describe(&self) -> String;

    /// Fetches a manifest, or `None` if it does not exist.
    async fn manifest(&self, repository: &Repository, version: &Version) -> Result<Option<StoredManifest>>;

    /// Fetches the image for Linux on an architecture (Go's spelling): the manifest itself, or the matching entry of an index.
    async fn image(
        &self,
        repository: &Repository,
        version: &Version,
        arch: &str,
    ) -> Result<Option<StoredManifest>> {
        let Some(stored) = self.manifest(repository, version).await? else { return Ok(None) };
        match AnyManifest::image_for_arch(&stored.bytes, arch)? {
            None => Ok(Some(stored)),
            Some(Descriptor { digest, .. }) => self.manifest(repository, &Version::Digest(digest)).await,
        }
    }

    /// Lists all tags. The list is empty if the repository does not exist.
    async fn tags(&self, repository: &Repository) -> Result<Vec<Tag>>;

    /// Whether the repository has the blob.
    async fn has_blob(&self, repository: &Repository, digest: &Digest) -> Result<bool>;

    /// Pushes a blob, unless the registry already has it. `digest` is the digest of the content.
    async fn push(
        &self,
        repository: &Repository,
        digest: &Digest,
        content: BlobContent<'_>,
    ) -> Result<Upload>;

    /// Pushes a file as a blob, like [`Registry::push`].
    async fn push_blob(&self, repository: &Repository, digest: &Digest, file: &Path) -> Result<Upload> {
        self.push(repository, digest, BlobContent::File(file)).await
    }

    /// Pushes bytes in memory as a blob, such as a configuration.
    async fn push_bytes(&self, repository: &Repository, bytes: &[u8]) -> Result<Upload> {
        self.push(repository, &Digest::of(bytes), BlobContent::Bytes(bytes)).await
    }

    /// Mounts a blob from another repository of the same registry, without sending the blob. Returns `false` if the registry does
    /// not support this. The blob must then be pushed.
    async fn mount_blob(&self, repository: &Repository, digest: &Digest, from: &Repository) -> Result<bool>;

    /// Streams a blob into a file, which appears atomically. Fails if the blob has more than `max_size` bytes, the size in its
    /// descriptor.
    async fn fetch_blob(
        &self,
        repository: &Repository,
        digest: &Digest,
        max_size: u64,
        to: &Path,
    ) -> Result<()>;

    /// Streams a blob. The caller verifies the bytes.
    async fn open_blob(&self, repository: &Repository, digest: &Digest) -> Result<BlobStream>;

    /// Pushes a manifest under a tag or its digest.
    async fn push_manifest(
        &self,
        repository: &Repository,
        version: &Version,
        media_type: &str,
        bytes: &[u8],
    ) -> Result<Digest>;

    /// Pushes an OCI manifest with a `subject` under its digest, so that [`Registry::referrers`] of the subject returns it. The
    /// subject need not exist yet, but everything else that the manifest names must exist.
    async fn push_referrer(&self, repository: &Repository, bytes: &[u8]) -> Result<Digest>;

    /// Lists the manifests that refer to `subject`, in no particular order. If `artifact_type` is given, only those of this type.
    /// Omits manifests that the registry lists but has deleted, and those that do not refer to `subject`.
    async fn referrers(
        &self,
        repository: &Repository,
        subject: &Digest,
        artifact_type: Option<&str>,
    ) -> Result<Vec<Descriptor>>;

    /// Returns the time of the registry's clock, or `None` if the registry does not state it. A layout directory has no clock.
    async fn clock(&self, _repository: &Repository) -> Result<Option<Timestamp>> {
        Ok(None)
    }

    /// Deletes a manifest with all its tags. Returns `false` if the manifest does not exist. A layout directory deletes unreferenced
    /// blobs at once, a registry when it garbage-collects.
    async fn delete_manifest(&self, repository: &Repository, digest: &Digest) -> Result<bool>;
}

/// A credential for a registry.
#[derive(Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "the doc comments of the variants explain the fields")]
pub enum Credential {
    /// User name with a password or access token, for basic authentication or the token server.
    Password { user: String, password: String },
    /// A refresh token for the token server.
    IdentityToken(String),
}

/// Network access and credentials that a registry client gets from its environment.
#[async_trait::async_trait]
pub trait Access: Send + Sync {
    /// Sends a request and follows redirects, without a time limit. `action` describes the request and `host` is the
    /// registry's. `redirected_by` is the host that named the request's address, if the address is not the registry's own.
    ///
    /// # Errors
    ///
    /// [`RegistryError::Unreachable`](super::RegistryError::Unreachable) if there is no response; otherwise the reason
    /// that nothing was sent.
    async fn execute(
        &self,
        request: reqwest::Request,
        action: &str,
        host: &str,
        redirected_by: Option<&str>,
    ) -> Result<reqwest::Response>;

    /// Whether a registry that does not speak TLS may be used without it. `authority` is `host[:port]`.
    fn may_be_plain(&self, authority: &str) -> bool;

    /// Whether a request to this address, which a registry named, may be sent without TLS.
    fn allows_plain(&self, url: &Url) -> bool;

    /// Whether the configuration trusts a token server at this address with the credentials of a registry (`host[:port]`).
    fn trusts_token_server(&self, authority: &str, realm: &Url) -> bool;

    /// Returns the repositories to read from, in order: the mirrors, then the repository itself unless access to it is forbidden.
    fn candidates(&self, repository: &Repository) -> Vec<Repository>;

    /// Returns the credential for a repository, if there is one. The error is the reason why the credential is unusable.
    async fn credential(&self, host: &str, path: &str) -> Result<Option<Credential>, String>;

    /// Names the source of the credentials, for messages.
    fn credentials_from(&self) -> String;
}
