//! A decorator that retries calls to a registry after transient faults, with the delays of [`delay_after`].

use std::{path::Path, sync::Arc};

use jiff::Timestamp;
use tokio_util::sync::CancellationToken;

use super::{
    error::{RegistryError, Result},
    registry::{BlobContent, BlobStream, Registry, StoredManifest, Upload},
    retry::{delay_after, log_retry},
};
use crate::{Descriptor, Digest, Repository, Tag, Version};

/// Repeats each call to a registry until it succeeds, fails permanently, or the retry policy gives up. [`Registry::open_blob`] repeats
/// only the request: of a broken stream, the caller has already consumed a part.
pub struct Retrying {
    inner: Arc<dyn Registry>,
    cancel: CancellationToken,
}

impl Retrying {
    /// Wraps `inner`. `cancel` ends waits and calls with [`RegistryError::Canceled`].
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
                () = self.cancel.cancelled() => return Err(RegistryError::Canceled),
                outcome = call() => outcome,
            };
            let Err(error) = outcome else { return outcome };
            let Some(delay) = delay_after(&error, attempt) else { return Err(error) };
            attempt += 1;
            let (host, cause) = error.fault().unwrap_or_else(|| ("registry", error.to_string()));
            log_retry((host, &cause), "registry", attempt, &error);
            tokio::select! {
                () = self.cancel.cancelled() => return Err(RegistryError::Canceled),
                () = tokio::time::sleep(delay) => {}
            }
        }
    }
}

/// Implements [`Registry`] with retries. Only `delete_manifest` differs, because it runs even after cancellation.
macro_rules! retrying_registry {
    ($($call:ident($($argument:ident: $type:ty),*) -> $answer:ty;)*) => {
        #[async_trait::async_trait]
        impl Registry for Retrying {
            fn describe(&self) -> String {
                self.inner.describe()
            }

            $(async fn $call(&self, $($argument: $type),*) -> Result<$answer> {
                self.retry(|| self.inner.$call($($argument),*)).await
            })*

            // After cancellation, temporary content must still be deleted. The deletion is not retried.
            async fn delete_manifest(&self, repository: &Repository, digest: &Digest) -> Result<bool> {
                if self.cancel.is_cancelled() {
                    return self.inner.delete_manifest(repository, digest).await;
                }
                self.retry(|| self.inner.delete_manifest(repository, digest)).await
            }
        }
    };
}

retrying_registry! {
    manifest(repository: &Repository, version: &Version) -> Option<StoredManifest>;
    tags(repository: &Repository) -> Vec<Tag>;
    has_blob(repository: &Repository, digest: &Digest) -> bool;
    push(repository: &Repository, digest: &Digest, content: BlobContent<'_>) -> Upload;
    mount_blob(repository: &Repository, digest: &Digest, from: &Repository) -> bool;
    fetch_blob(repository: &Repository, digest: &Digest, max_size: u64, to: &Path) -> ();
    open_blob(repository: &Repository, digest: &Digest) -> BlobStream;
    push_manifest(repository: &Repository, version: &Version, media_type: &str, bytes: &[u8]) -> Digest;
    push_referrer(repository: &Repository, bytes: &[u8]) -> Digest;
    referrers(repository: &Repository, subject: &Digest, artifact_type: Option<&str>) -> Vec<Descriptor>;
    clock(repository: &Repository) -> Option<Timestamp>;
}
