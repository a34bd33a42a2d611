//! Exports a bundle: one task fetches blobs, and a thread verifies, packs and writes them.

use std::{io, path::Path, sync::Arc};

use bytes::Bytes;
use farrier_core::image::Digest;
use farrier_local::blocking::blocking;
use farrier_store::registry::{BlobStream, RegistryError};
use futures::TryStreamExt as _;
use tokio::sync::mpsc;

use super::{BundleError, Collection, Meter, Phase, Result, write::Writer};

/// Maximum number of chunks in the queue to the writer. A full queue holds a few megabytes.
const WAITING: usize = 16;

/// Result of an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exported {
    /// ID of the bundle: the digest of its index.
    pub id: Digest,
    /// Size of the file in bytes.
    pub length: u64,
    /// Number of blobs that an earlier, interrupted run had written.
    pub kept: usize,
}

/// Message to the writing thread: bytes of the current blob, or `None` at its end.
type Message = Result<Option<Bytes>, RegistryError>;

/// Writes the bundle to `to`, or in parts of `split` bytes to `<to>.001`, `<to>.002` and so on. The data goes to `<to>.partial`
/// first; an interrupted run leaves this file, and the next run resumes from it.
pub async fn export(
    collection: Collection,
    to: &Path,
    split: Option<u64>,
    meter: Arc<dyn Meter>,
) -> Result<Exported> {
    let collection = Arc::new(collection);
    let (path, index) = (to.to_owned(), Arc::clone(&collection));
    let of_writer = Arc::clone(&meter);
    let writer = blocking(move || Writer::open(&path, split, &index.index, of_writer.as_ref())).await?;
    let kept = writer.kept();
    let (sender, receiver) = mpsc::channel(WAITING);
    let index = Arc::clone(&collection);
    let writing = tokio::spawn(blocking(move || write(writer, &index, receiver)));
    meter.begin(Phase::Export, collection.index.bytes().0);
    meter.advance(collection.index.carried().take(kept).map(|blob| blob.size).sum());
    let fetched = fetch(&collection, kept, &sender, meter.as_ref()).await;
    drop(sender);
    let written = writing.await.map_err(io::Error::from)?;
    // The side that failed first has stopped the other one. If the writer failed, `fetched` has no error. If fetching
    // failed, its error is the cause, so return it first.
    fetched?;
    let (length, id) = written?;
    meter.end();
    Ok(Exported { id, length, kept })
}

async fn fetch(
    collection: &Collection,
    kept: usize,
    to: &mpsc::Sender<Message>,
    meter: &dyn Meter,
) -> Result<()> {
    for blob in collection.index.carried().skip(kept) {
        let opened = match (collection.manifests.get(&blob.digest), collection.sources.get(&blob.digest)) {
            (Some(bytes), _) => {
                let bytes = Bytes::copy_from_slice(bytes);
                Ok(Box::pin(futures::stream::once(async { Ok(bytes) })) as BlobStream)
            }
            (None, Some(source)) => source.registry.open_blob(&source.repository, &blob.digest).await,
            (None, None) => return Err(BundleError::Absent(blob.digest.to_string())),
        };
        let mut stream = opened?;
        while let Some(chunk) = stream.try_next().await? {
            meter.advance(chunk.len() as u64);
            if to.send(Ok(Some(chunk))).await.is_err() {
                return Ok(());
            }
        }
        if to.send(Ok(None)).await.is_err() {
            return Ok(());
        }
    }
    Ok(())
}

fn write(
    mut writer: Writer,
    collection: &Collection,
    mut from: mpsc::Receiver<Message>,
) -> Result<(u64, Digest)> {
    let stopped = || io::Error::new(io::ErrorKind::Interrupted, "fetching the bundle's blobs stopped");
    for blob in collection.index.carried().skip(writer.kept()) {
        writer.blob(blob, || Ok(from.blocking_recv().ok_or_else(stopped)??))?;
    }
    writer.finish()
}
