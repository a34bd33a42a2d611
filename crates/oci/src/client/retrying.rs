//! Adapter: a registry whose transient faults are waited out, by the delays of [`retry_delay`].

use std::{path::Path, sync::Arc};

use tokio_util::sync::CancellationToken;

use super::{
    error::{RegistryError, Result, chain},
    registry::{BlobSource, BlobStream, Registry, StoredManifest, Upload},
    retry::retry_delay,
};
use crate::{Descriptor, Digest, Repository, Tag, Version};

/// Repeats each call to a registry until it succeeds, fails permanently, or the retry policy gives up. Of
/// [`Registry::open_blob`] only the request is repeated: what was read of the stream cannot be taken back.
pub struct Retrying {
    inner: Arc<dyn Registry>,
    cancel: CancellationToken,
}

impl Retrying {
    /// `cancel` ends waits and calls with [`RegistryError::Cancelled`].
    pub fn new(inner: Arc<dyn Registry>, cancel: CancellationToken) -> Self {
        Self { inner, cancel }
    }

    async fn retry<T, F>(&self, mut call: impl FnMut() -> F + Send) -> Result<T>
    where
        F: Future<Output = Result<T>> + Send,
    {
        let mut attempt = 0;
        loop {
            let outcome = tokio::select! {
                biased;
                () = self.cancel.cancelled() => return Err(RegistryError::Cancelled),
                outcome = call() => outcome,
            };
            let Err(error) = outcome else { return outcome };
            let delay = if error.is_transient() { retry_delay(attempt) } else { None };
            let Some(delay) = delay else { return Err(error) };
            attempt += 1;
            tracing::warn!(attempt, ?delay, error = %chain(&error), "transient fault of a registry, trying again");
            tokio::select! {
                () = self.cancel.cancelled() => return Err(RegistryError::Cancelled),
                () = tokio::time::sleep(delay) => {}
            }
        }
    }
}

#[async_trait::async_trait]
impl Registry for Retrying {
    fn describe(&self) -> String {
        self.inner.describe()
    }

    async fn manifest(&self, repository: &Repository, version: &Version) -> Result<Option<StoredManifest>> {
        self.retry(|| self.inner.manifest(repository, version)).await
    }

    async fn tags(&self, repository: &Repository) -> Result<Vec<Tag>> {
        self.retry(|| self.inner.tags(repository)).await
    }

    async fn has_blob(&self, repository: &Repository, digest: &Digest) -> Result<bool> {
        self.retry(|| self.inner.has_blob(repository, digest)).await
    }

    async fn push_blob(&self, repository: &Repository, digest: &Digest, file: &Path) -> Result<Upload> {
        self.retry(|| self.inner.push_blob(repository, digest, file)).await
    }

    async fn push_blob_from(
        &self,
        repository: &Repository,
        digest: &Digest,
        source: Arc<dyn BlobSource>,
    ) -> Result<Upload> {
        self.retry(|| self.inner.push_blob_from(repository, digest, Arc::clone(&source))).await
    }

    async fn mount_blob(&self, repository: &Repository, digest: &Digest, from: &Repository) -> Result<bool> {
        self.retry(|| self.inner.mount_blob(repository, digest, from)).await
    }

    async fn push_bytes(&self, repository: &Repository, bytes: &[u8]) -> Result<Upload> {
        self.retry(|| self.inner.push_bytes(repository, bytes)).await
    }

    async fn fetch_blob(&self, repository: &Repository, digest: &Digest, to: &Path) -> Result<()> {
        self.retry(|| self.inner.fetch_blob(repository, digest, to)).await
    }

    async fn open_blob(&self, repository: &Repository, digest: &Digest) -> Result<BlobStream> {
        self.retry(|| self.inner.open_blob(repository, digest)).await
    }

    async fn push_manifest(
        &self,
        repository: &Repository,
        version: &Version,
        media_type: &str,
        bytes: &[u8],
    ) -> Result<Digest> {
        self.retry(|| self.inner.push_manifest(repository, version, media_type, bytes)).await
    }

    async fn push_referrer(&self, repository: &Repository, bytes: &[u8]) -> Result<Digest> {
        self.retry(|| self.inner.push_referrer(repository, bytes)).await
    }

    async fn referrers(
        &self,
        repository: &Repository,
        subject: &Digest,
        artifact_type: Option<&str>,
    ) -> Result<Vec<Descriptor>> {
        self.retry(|| self.inner.referrers(repository, subject, artifact_type)).await
    }

    async fn delete_manifest(&self, repository: &Repository, digest: &Digest) -> Result<bool> {
        self.retry(|| self.inner.delete_manifest(repository, digest)).await
    }
}
