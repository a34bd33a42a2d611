//! Adapter: blobs on their way: from a reader to a registry, from a registry to a file.

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

/// Read at once.
pub(super) const CHUNK: usize = 256 << 10;

/// The source's bytes, read away from the asynchronous threads. A source that fails ends the stream with its error.
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

/// Writes a blob into a file, which appears whole and with the content that its digest says, or not at all.
pub(super) async fn save(
    stream: BlobStream,
    (digest, most): (&Digest, u64),
    to: &Path,
    action: String,
) -> Result<()> {
    // Only for a stated size can room be looked for.
    let stated = Some(most).filter(|most| *most < u64::MAX);
    let room = Room::for_download(directory_of(to), stated, most).map_err(|error| named(&error, to))?;
    let inner = SyncIoBridge::new(StreamReader::new(stream.map_err(io::Error::other)));
    let (digest, to) = (digest.clone(), to.to_owned());
    blocking(move || write_verified(Bounded { inner, room }, &digest, &to, &action).map(drop)).await
}

/// The same from a reader. Returns how many bytes there are.
pub(super) fn write_verified(from: impl Read, digest: &Digest, to: &Path, action: &str) -> Result<u64> {
    let copied = copy_verified(from, temporary_beside(to)?, digest, action);
    let (temporary, size) = copied.map_err(|error| match error {
        RegistryError::Io(error) => named(&error, to).into(),
        error => error,
    })?;
    persist(temporary, to)?;
    Ok(size)
}

/// Copies content that must have the digest. Returns what it was written to, and how many bytes there are.
pub(super) fn copy_verified<W: Write>(
    mut from: impl Read,
    to: W,
    digest: &Digest,
    action: &str,
) -> Result<(W, u64)> {
    let mut to = BufWriter::with_capacity(CHUNK, Hashing::new(to));
    io::copy(&mut from, &mut to).map_err(|error| match error.downcast::<RegistryError>() {
        // What a stream from a registry failed with.
        Ok(error) => error,
        Err(error) => error.into(),
    })?;
    let (to, found, size) = to.into_inner().map_err(io::IntoInnerError::into_error)?.into_parts();
    if found == *digest {
        return Ok((to, size));
    }
    Err(RegistryError::Digest { action: action.to_owned(), wanted: digest.clone(), found })
}

/// The digest of the bytes, which is the one that is wanted.
pub(super) fn digest_of(bytes: &[u8], wanted: Option<&Digest>, action: &str) -> Result<Digest> {
    let found = Digest::of(bytes);
    match wanted {
        Some(wanted) if *wanted != found => {
            Err(RegistryError::Digest { action: action.to_owned(), wanted: wanted.clone(), found })
        }
        _ => Ok(found),
    }
}

/// Writes a file anew, whole or not at all.
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
        // A layout is handed on to other users; tempfile's own default is for its owner only.
        .permissions(Permissions::from_mode(0o644))
        .tempfile_in(directory_of(place))
}

fn persist(temporary: NamedTempFile, place: &Path) -> Result<()> {
    temporary.persist(place).map(drop).map_err(|error| named(&error.error, place).into())
}

fn named(error: &io::Error, place: &Path) -> io::Error {
    io::Error::new(error.kind(), format!("write {}: {error}", place.display()))
}

/// Work on files, away from the asynchronous threads.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|stopped| Err(io::Error::from(stopped).into()))
}
