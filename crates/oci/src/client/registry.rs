//! What a registry is to its users, and what a client of registries needs from its surroundings.

use std::{
    io::{self, Read},
    path::Path,
    pin::Pin,
    sync::Arc,
};

use bytes::Bytes;
use futures::Stream;
use url::Url;

use super::error::Result;
use crate::{AnyManifest, Descriptor, Digest, Repository, Tag, Version};

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
    /// How many bytes were sent.
    pub fn bytes(self) -> u64 {
        match self {
            Self::Sent(bytes) => bytes,
            Self::Present => 0,
        }
    }
}

/// A blob's bytes as they come. They are not verified: the receiver compares their digest.
pub type BlobStream = Pin<Box<dyn Stream<Item = Result<Bytes>> + Send>>;

/// A blob that is read from its start as often as it is asked for: an upload may have to begin again.
pub trait BlobSource: Send + Sync {
    /// Its bytes.
    fn size(&self) -> u64;
    /// A reader at its start.
    fn open(&self) -> io::Result<Box<dyn Read + Send>>;
}

/// A blob that is sent.
#[derive(Clone, Copy)]
pub enum BlobContent<'a> {
    /// A file's.
    File(&'a Path),
    /// One that is no file of its own.
    Source(&'a Arc<dyn BlobSource>),
    /// In memory.
    Bytes(&'a [u8]),
}

/// A place for images. Everything is checked by digest.
#[async_trait::async_trait]
pub trait Registry: Send + Sync {
    /// One line for people.
    fn describe(&self) -> String;

    /// The manifest, if there is one.
    async fn manifest(&self, repository: &Repository, version: &Version) -> Result<Option<StoredManifest>>;

    /// The image for Linux on an architecture (Go's spelling): what stands under a name, or what an index there leads to.
    async fn image(
        &self,
        repository: &Repository,
        version: &Version,
        arch: &str,
    ) -> Result<Option<StoredManifest>> {
        let Some(stored) = self.manifest(repository, version).await? else { return Ok(None) };
        match AnyManifest::leads_to(&stored.bytes, arch)? {
            None => Ok(Some(stored)),
            Some(Descriptor { digest, .. }) => self.manifest(repository, &Version::Digest(digest)).await,
        }
    }

    /// All tags; empty when the repository does not exist.
    async fn tags(&self, repository: &Repository) -> Result<Vec<Tag>>;

    /// Is the blob there?
    async fn has_blob(&self, repository: &Repository, digest: &Digest) -> Result<bool>;

    /// Sends a blob up, unless the registry has it. `digest` is the content's.
    async fn push(
        &self,
        repository: &Repository,
        digest: &Digest,
        content: BlobContent<'_>,
    ) -> Result<Upload>;

    /// The same for a file.
    async fn push_blob(&self, repository: &Repository, digest: &Digest, file: &Path) -> Result<Upload> {
        self.push(repository, digest, BlobContent::File(file)).await
    }

    /// The same for bytes in memory (configurations).
    async fn push_bytes(&self, repository: &Repository, bytes: &[u8]) -> Result<Upload> {
        self.push(repository, &Digest::of(bytes), BlobContent::Bytes(bytes)).await
    }

    /// Makes a blob of another repository of the same registry known in this one, without sending it.
    /// `false` where the registry does not do that; then it must be pushed.
    async fn mount_blob(&self, repository: &Repository, digest: &Digest, from: &Repository) -> Result<bool>;

    /// Streams a blob into a file, which appears whole or not at all. One of more than `most` bytes is cut off and refused:
    /// the size that its descriptor states.
    async fn fetch_blob(&self, repository: &Repository, digest: &Digest, most: u64, to: &Path) -> Result<()>;

    /// A blob's bytes as they come. The caller verifies them.
    async fn open_blob(&self, repository: &Repository, digest: &Digest) -> Result<BlobStream>;

    /// Puts a manifest under a tag or its digest.
    async fn push_manifest(
        &self,
        repository: &Repository,
        version: &Version,
        media_type: &str,
        bytes: &[u8],
    ) -> Result<Digest>;

    /// Puts an OCI manifest with a `subject` under its digest, so that [`Registry::referrers`] of the subject
    /// finds it. The subject need not be there yet; what the manifest names must be.
    async fn push_referrer(&self, repository: &Repository, bytes: &[u8]) -> Result<Digest>;

    /// The manifests of one kind, or of all, that refer to `subject`, in no order; none where the registry lists none.
    async fn referrers(
        &self,
        repository: &Repository,
        subject: &Digest,
        artifact_type: Option<&str>,
    ) -> Result<Vec<Descriptor>>;

    /// Deletes a manifest with all its tags. `false` where there was none. A registry frees the space of what nothing
    /// names any more when it likes; a layout directory does it at once.
    async fn delete_manifest(&self, repository: &Repository, digest: &Digest) -> Result<bool>;
}

/// A credential for a registry.
#[derive(Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "the variants say what their fields are")]
pub enum Credential {
    /// For basic authentication, or the token server: a user's name, with the password or an access token.
    Password { user: String, password: String },
    /// A refresh token for the token server.
    IdentityToken(String),
}

/// How a client reaches hosts, and with which credentials: what it does not know itself.
#[async_trait::async_trait]
pub trait Access: Send + Sync {
    /// Sends a request and follows redirects; sets no time limit. `action` is what it is for in words, `host` the
    /// registry's, `sent_by` the host that named the request's address, where that is not the registry's own. Where
    /// there is no answer, the error is [`RegistryError::Unreachable`](super::RegistryError::Unreachable), or says why nothing was sent.
    async fn execute(
        &self,
        request: reqwest::Request,
        action: &str,
        host: &str,
        sent_by: Option<&str>,
    ) -> Result<reqwest::Response>;

    /// May a registry be talked to without TLS, if it does not speak it? `authority` is `host[:port]`.
    fn may_be_plain(&self, authority: &str) -> bool;

    /// May this address, which a registry names, be asked without TLS?
    fn allows_plain(&self, url: &Url) -> bool;

    /// May a token server at this address get the credentials of a registry (`host[:port]`), because somebody has said so?
    fn trusts_token_server(&self, authority: &str, realm: &Url) -> bool;

    /// Where a repository is looked for, in order: mirrors, then itself unless it must not be asked.
    fn candidates(&self, repository: &Repository) -> Vec<Repository>;

    /// The credential for a repository, if there is one; else why what there is cannot be used.
    async fn credential(&self, host: &str, path: &str) -> Result<Option<Credential>, String>;

    /// Where credentials come from, for messages.
    fn credentials_from(&self) -> String;
}
