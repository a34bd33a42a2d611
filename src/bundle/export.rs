//! Adapter: writes a bundle: one thread fetches, another compares digests, packs and writes.

use std::{io, path::Path, sync::Arc};

use bytes::Bytes;
use futures::TryStreamExt as _;
use tokio::sync::mpsc;

use super::{BundleError, Collection, Meter, Phase, Result, write::Writer};
use crate::{
    blocking::blocking,
    image::Digest,
    registry::{BlobStream, RegistryError},
};

/// Portions that wait to be written, at most: a few megabytes.
const WAITING: usize = 16;

/// What was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exported {
    /// The bundle's identity: the digest of its index.
    pub id: Digest,
    /// The file's bytes.
    pub length: u64,
    /// Blobs that an earlier run had written.
    pub kept: usize,
}

/// What goes to the writing thread: bytes of the current blob, or its end.
type Message = Result<Option<Bytes>, RegistryError>;

/// Writes the bundle to `to`, by way of `<to>.partial`, which an interrupted run leaves and the next one goes on with.
pub async fn export(collection: Collection, to: &Path, meter: Arc<dyn Meter>) -> Result<Exported> {
    let collection = Arc::new(collection);
    let (path, index) = (to.to_owned(), Arc::clone(&collection));
    let of_writer = Arc::clone(&meter);
    let writer = blocking(move || Writer::open(&path, &index.index, of_writer.as_ref())).await?;
    let kept = writer.kept();
    let (sender, receiver) = mpsc::channel(WAITING);
    let index = Arc::clone(&collection);
    let writing = tokio::spawn(blocking(move || write(writer, &index, receiver)));
    meter.begin(Phase::Export, collection.index.bytes().0);
    meter.advance(collection.index.carried().take(kept).map(|blob| blob.size).sum());
    let fetched = fetch(&collection, kept, &sender, meter.as_ref()).await;
    drop(sender);
    let written = writing.await.map_err(io::Error::from)?;
    // The one that failed first stopped the other: a writer that is gone is no error of fetching, and one that
    // waits in vain has been told why.
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
