//! Adapter: streams blobs from a reader to a registry, and from a registry to a file.

use std::{
    fs::Permissions,
    io::{self, BufWriter, Read, Write},
    os::unix::fs::PermissionsExt as _,
    path::Path,
    sync::Arc,
};

use bytes::Bytes;
use futures::{Stream, StreamExt as _, TryStreamExt as _};
use tempfile::NamedTempFile;
use tokio_util::io::{ReaderStream, StreamReader, SyncIoBridge};

use super::{
    error::{RegistryError, Result},
    registry::{BlobSource, BlobStream},
    room::{Bounded, Room},
};
use crate::{Digest, layer::Hashing};

/// Bytes read at a time.
pub(super) const CHUNK: usize = 256 << 10;

/// Streams a source's bytes; a blocking thread reads them. A failing source ends the stream with its error.
pub(super) fn read_source(
    source: Arc<dyn BlobSource>,
) -> impl Stream<Item = io::Result<Bytes>> + Send + 'static {
    let (to, from) = tokio::io::duplex(4 * CHUNK);
    let reading = tokio::task::spawn_blocking(move || {
        let mut to = BufWriter::with_capacity(CHUNK, SyncIoBridge::new(to));
        io::copy(&mut source.open()?, &mut to)?;
        to.flush()
    });
    let end = async move { reading.await.unwrap_or_else(|stopped| Err(stopped.into())).err().map(Err) };
    ReaderStream::with_capacity(from, CHUNK).chain(futures::stream::once(end).filter_map(std::future::ready))
}

/// Writes a blob to a file, which appears whole and with verified content, or not at all.
pub(super) async fn save(
    stream: BlobStream,
    (digest, most): (&Digest, u64),
    to: &Path,
    action: String,
) -> Result<()> {
    // Only a stated size can be checked against the free space.
    let stated = Some(most).filter(|most| *most < u64::MAX);
    let room = Room::for_download(directory_of(to), stated, most).map_err(|error| named(&error, to))?;
    let inner = SyncIoBridge::new(StreamReader::new(stream.map_err(io::Error::other)));
    let (digest, to) = (digest.clone(), to.to_owned());
    blocking(move || write_verified(Bounded { inner, room }, &digest, &to, &action).map(drop)).await
}

/// Writes a reader's content to a file like [`save`]. Returns the number of bytes.
pub(super) fn write_verified(from: impl Read, digest: &Digest, to: &Path, action: &str) -> Result<u64> {
    let copied = copy_verified(from, temporary_beside(to)?, digest, action);
    let (temporary, size) = copied.map_err(|error| match error {
        RegistryError::Io(error) => named(&error, to).into(),
        error => error,
    })?;
    persist(temporary, to)?;
    Ok(size)
}

/// Copies content and verifies its digest. Returns the writer and the number of bytes.
pub(super) fn copy_verified<W: Write>(
    mut from: impl Read,
    to: W,
    digest: &Digest,
    action: &str,
) -> Result<(W, u64)> {
    let mut to = BufWriter::with_capacity(CHUNK, Hashing::new(to));
    io::copy(&mut from, &mut to).map_err(|error| match error.downcast::<RegistryError>() {
        // The error of a registry's stream.
        Ok(error) => error,
        Err(error) => error.into(),
    })?;
    let (to, found, size) = to.into_inner().map_err(io::IntoInnerError::into_error)?.into_parts();
    if found == *digest {
        return Ok((to, size));
    }
    Err(RegistryError::Digest { action: action.to_owned(), wanted: digest.clone(), found })
}

/// Digest of the bytes; fails if it differs from `wanted`.
pub(super) fn digest_of(bytes: &[u8], wanted: Option<&Digest>, action: &str) -> Result<Digest> {
    let found = Digest::of(bytes);
    match wanted {
        Some(wanted) if *wanted != found => {
            Err(RegistryError::Digest { action: action.to_owned(), wanted: wanted.clone(), found })
        }
        _ => Ok(found),
    }
}

/// Replaces a file atomically.
pub(super) fn replace(place: &Path, content: &[u8]) -> Result<()> {
    let mut temporary = temporary_beside(place)?;
    temporary.write_all(content).map_err(|error| named(&error, place))?;
    persist(temporary, place)
}

fn directory_of(place: &Path) -> &Path {
    place.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn temporary_beside(place: &Path) -> io::Result<NamedTempFile> {
    tempfile::Builder::new()
        .prefix(".farrier-")
        // A layout is shared with other users, but tempfile's default mode is owner-only.
        .permissions(Permissions::from_mode(0o644))
        .tempfile_in(directory_of(place))
}

fn persist(temporary: NamedTempFile, place: &Path) -> Result<()> {
    temporary.persist(place).map(drop).map_err(|error| named(&error.error, place).into())
}

fn named(error: &io::Error, place: &Path) -> io::Error {
    io::Error::new(error.kind(), format!("write {}: {error}", place.display()))
}

/// Runs file I/O outside the async worker threads.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|stopped| Err(io::Error::from(stopped).into()))
}
