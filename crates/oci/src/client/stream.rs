//! Streams blobs from a reader to a registry, and from a registry to a file.

use std::{
    fs::{File, Permissions},
    io::{self, BufWriter, ErrorKind, Read, Write},
    os::unix::fs::PermissionsExt as _,
    path::Path,
    sync::Arc,
};

use bytes::Bytes;
use futures::{Stream, StreamExt as _, TryStreamExt as _};
use tempfile::NamedTempFile;
use tokio_util::io::{ReaderStream, StreamReader, SyncIoBridge};

use super::{
    disk_limit::{Bounded, DiskLimit},
    error::{RegistryError, Result},
    registry::{BlobSource, BlobStream},
};
use crate::{Digest, layer::Hashing};

/// Number of bytes to read at a time.
pub(super) const CHUNK: usize = 256 << 10;

/// Reads a source on a blocking thread and streams its bytes. If the source fails, its error ends the stream.
pub(super) fn read_source(
    source: Arc<dyn BlobSource>,
) -> impl Stream<Item = io::Result<Bytes>> + Send + 'static {
    let (writer, reader) = tokio::io::duplex(4 * CHUNK);
    let task = tokio::task::spawn_blocking(move || {
        let mut writer = BufWriter::with_capacity(CHUNK, SyncIoBridge::new(writer));
        io::copy(&mut source.open()?, &mut writer)?;
        writer.flush()
    });
    let error = async move { task.await.unwrap_or_else(|join_error| Err(join_error.into())).err().map(Err) };
    ReaderStream::with_capacity(reader, CHUNK)
        .chain(futures::stream::once(error).filter_map(std::future::ready))
}

/// Writes a blob to a file atomically: the file appears only after the whole content is verified.
pub(super) async fn save(
    stream: BlobStream,
    digest: &Digest,
    max_size: u64,
    to: &Path,
    action: String,
) -> Result<()> {
    // `u64::MAX` means that the size is unknown. Only a known size can be compared with the free space.
    let known_size = Some(max_size).filter(|size| *size < u64::MAX);
    let limit = DiskLimit::for_download(parent_directory(to), known_size, max_size)
        .map_err(|error| write_error(&error, to))?;
    let inner = SyncIoBridge::new(StreamReader::new(stream.map_err(io::Error::other)));
    let (digest, to) = (digest.clone(), to.to_owned());
    blocking(move || {
        let (temporary, _) = copy_beside(Bounded { inner, limit }, &digest, &to, &action)?;
        rename(temporary, &to).map_err(|error| write_error(&error, &to).into())
    })
    .await
}

/// Writes a reader's content to a file, like [`save`], and makes the file durable. Returns the number of bytes.
pub(super) fn write_verified(from: impl Read, digest: &Digest, to: &Path, action: &str) -> Result<u64> {
    let (temporary, size) = copy_beside(from, digest, to, action)?;
    persist(temporary, to)?;
    Ok(size)
}

/// Writes verified content to a temporary file in the same directory.
fn copy_beside(from: impl Read, digest: &Digest, to: &Path, action: &str) -> Result<(NamedTempFile, u64)> {
    copy_verified(from, temporary_beside(to)?, digest, action).map_err(|error| match error {
        RegistryError::Io(error) => write_error(&error, to).into(),
        error => error,
    })
}

/// Copies content and verifies its digest. Returns the writer and the number of bytes.
pub(super) fn copy_verified<W: Write>(
    mut from: impl Read,
    writer: W,
    digest: &Digest,
    action: &str,
) -> Result<(W, u64)> {
    let mut writer = BufWriter::with_capacity(CHUNK, Hashing::new(writer));
    io::copy(&mut from, &mut writer).map_err(|error| match error.downcast::<RegistryError>() {
        // A registry's stream wraps its own error in an `io::Error`.
        Ok(error) => error,
        Err(error) => error.into(),
    })?;
    let (writer, actual, size) = writer.into_inner().map_err(io::IntoInnerError::into_error)?.into_parts();
    if actual == *digest {
        return Ok((writer, size));
    }
    Err(RegistryError::Digest { action: action.to_owned(), expected: digest.clone(), actual })
}

/// Returns the digest of the bytes, or an error if it differs from `expected`.
pub(super) fn digest_of(bytes: &[u8], expected: Option<&Digest>, action: &str) -> Result<Digest> {
    let actual = Digest::of(bytes);
    match expected {
        Some(expected) if *expected != actual => {
            Err(RegistryError::Digest { action: action.to_owned(), expected: expected.clone(), actual })
        }
        _ => Ok(actual),
    }
}

/// Replaces a file atomically and durably.
pub(super) fn replace(path: &Path, content: &[u8]) -> Result<()> {
    let mut temporary = temporary_beside(path)?;
    temporary.write_all(content).map_err(|error| write_error(&error, path))?;
    persist(temporary, path)
}

fn parent_directory(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn temporary_beside(path: &Path) -> io::Result<NamedTempFile> {
    tempfile::Builder::new()
        .prefix(".farrier-")
        // Other users read image layouts too, but tempfile's default mode is owner-only.
        .permissions(Permissions::from_mode(0o644))
        .tempfile_in(parent_directory(path))
}

/// Renames a file so that the path has the whole content after a power failure, too.
fn persist(temporary: NamedTempFile, path: &Path) -> Result<()> {
    let synced = temporary.as_file().sync_all();
    let renamed = synced.and_then(|()| rename(temporary, path));
    let persisted = renamed.and_then(|()| sync_directory(parent_directory(path)));
    persisted.map_err(|error| write_error(&error, path).into())
}

fn rename(temporary: NamedTempFile, path: &Path) -> io::Result<()> {
    temporary.persist(path).map(drop).map_err(|error| error.error)
}

fn sync_directory(directory: &Path) -> io::Result<()> {
    match File::open(directory)?.sync_all() {
        // CIFS does not sync directories.
        Err(error) if error.kind() != ErrorKind::InvalidInput => Err(error),
        _ => Ok(()),
    }
}

fn write_error(error: &io::Error, path: &Path) -> io::Error {
    io::Error::new(error.kind(), format!("cannot write {}: {error}", path.display()))
}

/// Runs file I/O outside the async worker threads.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|join_error| Err(io::Error::from(join_error).into()))
}
