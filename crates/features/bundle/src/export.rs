//! Exports a bundle: one task fetches blobs, and a thread verifies, packs and writes them.

use std::{
    io::{self, Read},
    path::Path,
    sync::Arc,
};

use bytes::{Buf as _, Bytes};
use farrier_core::image::Digest;
use farrier_local::blocking::blocking;
use farrier_store::registry::BlobStream;
use fs_err as fs;
use futures::TryStreamExt as _;
use tokio::sync::mpsc;

use super::{
    Bundle, BundleError, BundleIndex, Collection, Meter, Order, Phase, Result,
    read::find_index,
    volume::{Volume, part, with_suffix},
    write::Writer,
};

/// Maximum number of chunks in the queue to the writer. A full queue holds a few megabytes.
const MAX_QUEUED_CHUNKS: usize = 16;

/// Result of an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exported {
    /// ID of the bundle: the digest of its index.
    pub id: Digest,
    /// Size of the file in bytes.
    pub length: u64,
    /// Number of blobs that an earlier, interrupted run had written.
    pub resumed_blobs: usize,
}

/// Fetched content of one blob, for the writing thread.
struct BlobReader<'a> {
    from: &'a mut mpsc::Receiver<Option<Bytes>>,
    /// Rest of the last chunk; `None` after the blob's end.
    chunk: Option<Bytes>,
}

impl Read for BlobReader<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let closed = || io::Error::new(io::ErrorKind::BrokenPipe, "fetching the bundle's blobs stopped");
        while self.chunk.as_ref().is_some_and(Bytes::is_empty) {
            self.chunk = self.from.blocking_recv().ok_or_else(closed)?;
        }
        let Some(chunk) = &mut self.chunk else { return Ok(0) };
        let count = chunk.len().min(to.len());
        chunk.copy_to_slice(&mut to[..count]);
        Ok(count)
    }
}

/// Whether an export has written everything: the bundle's checksums come last.
pub fn is_complete(to: &Path) -> bool {
    fs::metadata(with_suffix(to, ".sha256")).is_ok_and(|checksums| checksums.len() > 0)
}

/// Returns the bundle with this index if an interrupted run wrote all of it, but not its signature or checksums.
pub fn find_finished(index: &BundleIndex, to: &Path) -> Option<Bundle> {
    // A named pipe would block.
    if !to.is_file() && !part(to, Some(1)).is_file() {
        return None;
    }
    let bundle = Bundle::open(to).ok()?;
    let id = Digest::of(&index.to_bytes().ok()?);
    (*bundle.id() == id && !is_complete(to)).then_some(bundle)
}

/// Returns the order of an interrupted export of the same contents to the same file, if it is not newer than the index's own. An export
/// whose registry records no order would otherwise get another order, and write everything again.
pub fn earlier_order(index: &BundleIndex, to: &Path) -> Option<Order> {
    let partial = with_suffix(to, ".partial");
    let candidates = [part(&partial, None), part(&partial, Some(1)), part(to, None), part(to, Some(1))];
    let file = candidates.into_iter().find(|path| path.is_file())?;
    let volume = Arc::new(Volume::open(&[file]).ok()?);
    let (bytes, _) = find_index(to, &volume, volume.length).ok()?;
    let mut earlier: BundleIndex = serde_json::from_slice(&bytes).ok()?;
    let (order, own) = (std::mem::replace(&mut earlier.order, index.order.clone())?, index.order.as_ref()?);
    (earlier == *index && order.origin == own.origin && order.counter <= own.counter).then_some(order)
}

/// Writes the bundle to `to`, or in parts of `split` bytes to `<to>.001`, `<to>.002` and so on. The data goes to `<to>.partial`
/// first; an interrupted run leaves this file, and the next run resumes from it.
pub async fn export(
    collection: Collection,
    to: &Path,
    split: Option<u64>,
    meter: Arc<dyn Meter>,
) -> Result<Exported> {
    let collection = Arc::new(collection);
    let (path, shared) = (to.to_owned(), Arc::clone(&collection));
    let writer_meter = Arc::clone(&meter);
    let writer = blocking(move || Writer::open(&path, split, &shared.index, writer_meter.as_ref())).await?;
    let resumed_blobs = writer.resumed_blobs();
    let (sender, receiver) = mpsc::channel(MAX_QUEUED_CHUNKS);
    let shared = Arc::clone(&collection);
    let writing = tokio::spawn(blocking(move || write(writer, &shared, receiver)));
    meter.begin(Phase::Export, collection.index.bytes().0);
    meter.advance(collection.index.carried().take(resumed_blobs).map(|blob| blob.size).sum());
    let fetched = fetch(&collection, resumed_blobs, &sender, meter.as_ref()).await;
    drop(sender);
    let written = writing.await.map_err(io::Error::from)?;
    // The side that failed first has stopped the other side. If the writer failed, `fetched` has no error. If fetching
    // failed, its error is the cause, so return it first.
    fetched?;
    let (length, id) = written?;
    meter.end();
    Ok(Exported { id, length, resumed_blobs })
}

async fn fetch(
    collection: &Collection,
    resumed_blobs: usize,
    to: &mpsc::Sender<Option<Bytes>>,
    meter: &dyn Meter,
) -> Result<()> {
    for blob in collection.index.carried().skip(resumed_blobs) {
        let mut stream: BlobStream = if let Some(manifest) = collection.manifests.get(&blob.digest) {
            Box::pin(futures::stream::iter([Ok(Bytes::copy_from_slice(&manifest.bytes))]))
        } else {
            let source = collection.sources.get(&blob.digest);
            let source = source.ok_or_else(|| BundleError::Absent(blob.digest.to_string()))?;
            source.registry.open_blob(&source.repository, &blob.digest).await?
        };
        while let Some(chunk) = stream.try_next().await? {
            meter.advance(chunk.len() as u64);
            if to.send(Some(chunk)).await.is_err() {
                return Ok(());
            }
        }
        if to.send(None).await.is_err() {
            return Ok(());
        }
    }
    Ok(())
}

fn write(
    mut writer: Writer,
    collection: &Collection,
    mut from: mpsc::Receiver<Option<Bytes>>,
) -> Result<(u64, Digest)> {
    for blob in collection.index.carried().skip(writer.resumed_blobs()) {
        writer.blob(blob, BlobReader { from: &mut from, chunk: Some(Bytes::new()) })?;
    }
    writer.finish()
}
