//! Adapter: blobs that go through without a file: from a registry's answer to a reader, from a reader to a registry.

use std::{
    io::{self, Read},
    pin::Pin,
    sync::Arc,
};

use bytes::Bytes;
use futures::{Stream, TryStreamExt as _};

use super::{RegistryError, RemoteRegistry, http::Call, name::RemoteName};
use crate::image::{Digest, Repository};

/// A blob's bytes as they come. They are not verified: whoever takes them compares their digest.
pub type BlobStream = Pin<Box<dyn Stream<Item = Result<Bytes, RegistryError>> + Send>>;

/// Read at once.
const CHUNK: usize = 256 << 10;
/// Portions that wait for the network, at most.
const WAITING: usize = 4;

/// A blob that is read from its start as often as it is asked for: an upload may have to begin again.
pub trait BlobSource: Send + Sync {
    /// Its bytes.
    fn size(&self) -> u64;
    /// A reader at its start.
    fn open(&self) -> io::Result<Box<dyn Read + Send>>;
}

/// The source's bytes, read away from the asynchronous threads.
pub(super) fn read_source(
    source: Arc<dyn BlobSource>,
) -> impl Stream<Item = io::Result<Bytes>> + Send + 'static {
    let (sender, receiver) = tokio::sync::mpsc::channel(WAITING);
    tokio::task::spawn_blocking(move || {
        let mut reader = match source.open() {
            Ok(reader) => reader,
            // Nobody waits any more when nothing can be sent.
            Err(error) => return drop(sender.blocking_send(Err(error))),
        };
        loop {
            let mut chunk = Vec::with_capacity(CHUNK);
            let part = match reader.by_ref().take(CHUNK as u64).read_to_end(&mut chunk) {
                Ok(0) => return,
                Ok(_) => Ok(Bytes::from(chunk)),
                Err(error) => Err(error),
            };
            let broken = part.is_err();
            if sender.blocking_send(part).is_err() || broken {
                return;
            }
        }
    });
    futures::stream::unfold(receiver, |mut receiver| async move { Some((receiver.recv().await?, receiver)) })
}

impl RemoteRegistry {
    /// Asks for a blob, and gives its bytes as they come.
    pub(super) async fn stream_blob(
        &self,
        repository: &Repository,
        digest: &Digest,
    ) -> Result<BlobStream, RegistryError> {
        let name = RemoteName::of(repository);
        let action = format!("fetch blob {digest} of {}", name.path);
        let url = self.http.url(&name, &format!("blobs/{digest}"), &action).await?;
        let call = Call::get(&name, &action, url);
        let response = self.http.send(&call).await?;
        if response.status().as_u16() != 200 {
            return Err(self.http.unexpected(&call, response).await);
        }
        let host = name.host;
        Ok(Box::pin(futures::stream::try_unfold(response, move |mut response| {
            let (host, action) = (host.clone(), action.clone());
            async move {
                let chunk = super::http::next_chunk(&mut response, &host, &action).await?;
                Ok(chunk.map(|chunk| (chunk, response)))
            }
        })))
    }
}

/// A file's bytes.
pub(super) fn stream_file(file: tokio::fs::File, action: String) -> BlobStream {
    let stream = tokio_util::io::ReaderStream::with_capacity(file, CHUNK);
    Box::pin(stream.map_err(move |source| RegistryError::Io { action: action.clone(), source }))
}
