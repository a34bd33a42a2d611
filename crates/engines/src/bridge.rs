//! Connects asynchronous streams with blocking code that reads and writes tar.

use std::{
    future::ready,
    io::{self, BufWriter, Write as _},
    path::Path,
    pin::pin,
};

use bytes::Bytes;
use farrier_local::archive::{self, Limits, UnpackError};
use futures::{Stream, StreamExt as _, stream};
use tempfile::NamedTempFile;
use tokio::{
    fs::File,
    io::{AsyncWriteExt as _, DuplexStream},
    runtime::Handle,
    sync::oneshot,
    task::JoinHandle,
};
use tokio_util::{
    io::{ReaderStream, SyncIoBridge},
    sync::CancellationToken,
};

use super::{EngineError, Result};

/// Size of a chunk in bytes.
const CHUNK: usize = 256 * 1024;
/// Capacity of the pipe between the two sides, in bytes.
const PIPE_CAPACITY: usize = 2 << 20;

/// Writing half of a byte stream that blocking code fills.
pub(super) type StreamWriter = BufWriter<PipeWriter>;

/// Writes to a pipe until `abandoned` is canceled.
pub(super) struct PipeWriter {
    pipe: DuplexStream,
    abandoned: CancellationToken,
    runtime: Handle,
}

impl io::Write for PipeWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.runtime.block_on(async {
            tokio::select! {
                biased;
                () = self.abandoned.cancelled() => Err(io::ErrorKind::BrokenPipe.into()),
                written = self.pipe.write(bytes) => written,
            }
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Runs a blocking writer on a separate thread and returns its output as a stream. If the writer fails, the stream ends with
/// an error, so that a reader notices the truncation. A reader that may keep the stream without reading it cancels `abandoned`.
pub(super) fn stream_from_writer<E: Send + 'static>(
    abandoned: CancellationToken,
    write: impl FnOnce(&mut StreamWriter) -> Result<(), E> + Send + 'static,
) -> (impl Stream<Item = io::Result<Bytes>> + Send + 'static, JoinHandle<Result<(), E>>) {
    let (write_end, read_end) = tokio::io::duplex(PIPE_CAPACITY);
    let (completed, completion) = oneshot::channel();
    let pipe = PipeWriter { pipe: write_end, abandoned, runtime: Handle::current() };
    let writer = tokio::task::spawn_blocking(move || {
        let mut writer = BufWriter::with_capacity(CHUNK, pipe);
        let result = write(&mut writer);
        if result.is_ok() && writer.flush().is_ok() {
            let _ = completed.send(());
        }
        result
    });
    // A failed writer drops the sender. The stream then ends with this error.
    let failure = stream::once(completion).filter_map(|completed| {
        ready(completed.is_err().then(|| Err(io::Error::other("the build context could not be read"))))
    });
    (ReaderStream::with_capacity(read_end, CHUNK).chain(failure), writer)
}

/// Unpacks a tar stream that contains `out/...` into the empty directory `dest`. It unpacks into a sibling directory first,
/// so that `dest` receives everything or nothing. `failed` converts an error of the stream.
pub(super) async fn unpack_out<E>(
    stream: impl Stream<Item = Result<Bytes, E>>,
    dest: &Path,
    cancel: &CancellationToken,
    failed: impl FnOnce(E) -> EngineError,
) -> Result<()> {
    let (mut write_end, read_end) = tokio::io::duplex(PIPE_CAPACITY);
    let temporary = tempfile::Builder::new().prefix(".unpack-").tempdir_in(directory_of(dest))?;
    let unpack_dir = temporary.path().to_owned();
    let unpacker = tokio::task::spawn_blocking(move || {
        let mut reader = SyncIoBridge::new(read_end);
        archive::unpack_tar(&mut reader, &unpack_dir, &Limits::default())?;
        // The padding follows the end of the archive: read it too, or the writer would get EPIPE.
        io::copy(&mut reader, &mut io::sink()).map_err(UnpackError::Damaged)?;
        Ok::<_, UnpackError>(())
    });
    let forward = async {
        let mut stream = pin!(stream);
        while let Some(chunk) = stream.next().await {
            // A reader that stopped early reports the reason itself.
            if write_end.write_all(&chunk?).await.is_err() {
                break;
            }
        }
        Ok(())
    };
    let forwarded = tokio::select! {
        biased;
        () = cancel.cancelled() => Err(EngineError::Canceled),
        result = forward => result.map_err(failed),
    };
    drop(write_end);
    let outcome = unpacker.await.map_err(io::Error::from)?;
    // The stream's own error is the cause of a truncated archive, so it takes precedence.
    forwarded?;
    outcome?;
    let out = temporary.path().join("out");
    match out.symlink_metadata() {
        Ok(metadata) if metadata.is_dir() => Ok(fs_err::rename(&out, dest)?),
        Ok(_) => Err(EngineError::Step("the modules stage's /out is not a directory".to_owned())),
        Err(_) => Err(EngineError::no_out()),
    }
}

/// Writes a stream to a file atomically.
pub(super) async fn save<E>(
    stream: impl Stream<Item = Result<Bytes, E>>,
    dest: &Path,
    cancel: &CancellationToken,
    failed: impl FnOnce(E) -> EngineError,
) -> Result<()> {
    let temporary = NamedTempFile::new_in(directory_of(dest))?;
    let mut file = File::from_std(temporary.reopen()?);
    let wrap =
        |error: io::Error| io::Error::new(error.kind(), format!("cannot write {}: {error}", dest.display()));
    let write = async {
        let mut stream = pin!(stream);
        while let Some(chunk) = stream.next().await {
            match chunk {
                Ok(chunk) => file.write_all(&chunk).await.map_err(wrap)?,
                Err(error) => return Err(failed(error)),
            }
        }
        Ok(file.flush().await.map_err(wrap)?)
    };
    tokio::select! {
        biased;
        () = cancel.cancelled() => return Err(EngineError::Canceled),
        written = write => written?,
    }
    temporary.persist(dest).map_err(|error| wrap(error.error))?;
    Ok(())
}

fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nothing(error: io::Error) -> EngineError {
        error.into()
    }

    #[tokio::test]
    async fn a_writer_becomes_a_stream() {
        let (stream, writer) =
            stream_from_writer(CancellationToken::new(), |out| out.write_all(&vec![7; 3 * CHUNK + 1]));
        let total: usize =
            stream.map(|chunk| chunk.unwrap().len()).fold(0, |sum, len| async move { sum + len }).await;
        assert_eq!(total, 3 * CHUNK + 1);
        writer.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_failed_writer_fails_the_stream() {
        let (stream, writer) = stream_from_writer(CancellationToken::new(), |out| {
            out.write_all(b"part")?;
            Err(io::Error::other("gone"))
        });
        assert!(stream.collect::<Vec<_>>().await.last().unwrap().is_err());
        assert!(writer.await.unwrap().is_err());
    }

    #[tokio::test]
    async fn a_broken_stream_leaves_no_file() {
        let dir = tempfile::tempdir().unwrap();
        let dest = dir.path().join("image.tar");
        let cancel = CancellationToken::new();
        let broken = stream::iter([Ok(Bytes::from_static(b"x")), Err(io::Error::other("reset"))]);
        assert!(save(broken, &dest, &cancel, nothing).await.is_err());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        save(stream::iter([Ok::<_, io::Error>(Bytes::from_static(b"x"))]), &dest, &cancel, nothing)
            .await
            .unwrap();
        assert_eq!(std::fs::read(&dest).unwrap(), b"x");
    }

    #[tokio::test]
    async fn a_cancelled_save_leaves_no_file() {
        let dir = tempfile::tempdir().unwrap();
        let cancel = CancellationToken::new();
        cancel.cancel();
        let result =
            save(stream::pending::<io::Result<Bytes>>(), &dir.path().join("a"), &cancel, nothing).await;
        assert!(matches!(result, Err(EngineError::Canceled)));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[tokio::test]
    async fn a_broken_stream_leaves_no_payload() {
        let dir = tempfile::tempdir().unwrap();
        let dest = dir.path().join("payload");
        std::fs::create_dir(&dest).unwrap();
        let mut tar = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_gnu();
        header.set_size(1);
        header.set_mode(0o644);
        tar.append_data(&mut header, "out/x", &b"x"[..]).unwrap();
        let whole = Bytes::from(tar.into_inner().unwrap());
        let cancel = CancellationToken::new();
        let broken = stream::iter([Ok(whole.clone()), Err(io::Error::other("reset"))]);
        let error = unpack_out(broken, &dest, &cancel, nothing).await.unwrap_err();
        assert_eq!(error.to_string(), "reset");
        assert_eq!(std::fs::read_dir(&dest).unwrap().count(), 0);
        unpack_out(stream::iter([Ok::<_, io::Error>(whole)]), &dest, &cancel, nothing).await.unwrap();
        assert_eq!(std::fs::read(dest.join("x")).unwrap(), b"x");
    }
}
