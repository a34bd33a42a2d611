//! Adapter: between asynchronous streams and code that blocks: tar in both directions.

use std::{
    io::{self, Read, Write},
    path::{Path, PathBuf},
};

use bytes::{Buf, Bytes, BytesMut};
use futures::{Stream, StreamExt, stream};
use tokio::{io::AsyncWriteExt, sync::mpsc, task::JoinHandle};
use tokio_util::sync::CancellationToken;

use super::EngineError;
use crate::archive::{self, Limits, UnpackError};

/// Bytes in one message: large enough that the hand-over costs nothing, small enough for memory.
const CHUNK: usize = 256 * 1024;
/// Messages under way, so at most 2 MiB.
const DEPTH: usize = 8;

/// The writing half of a byte stream that blocking code fills.
pub(super) struct ChannelWriter {
    sender: mpsc::Sender<io::Result<Bytes>>,
    buffer: BytesMut,
}

impl ChannelWriter {
    fn send(&mut self, message: io::Result<Bytes>) -> io::Result<()> {
        self.sender.blocking_send(message).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

impl Write for ChannelWriter {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.buffer.extend_from_slice(data);
        if self.buffer.len() >= CHUNK {
            let full = self.buffer.split().freeze();
            self.send(Ok(full))?;
        }
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        let rest = self.buffer.split().freeze();
        self.send(Ok(rest))
    }
}

/// Runs a blocking writer on its own thread and gives what it writes as a stream. A failed writer ends the
/// stream with an error, so that a reader never takes a part for the whole.
pub(super) fn stream_from_writer<E: Send + 'static>(
    write: impl FnOnce(&mut ChannelWriter) -> Result<(), E> + Send + 'static,
) -> (impl Stream<Item = io::Result<Bytes>> + Send + 'static, JoinHandle<Result<(), E>>) {
    let (sender, receiver) = mpsc::channel(DEPTH);
    let writer = tokio::task::spawn_blocking(move || {
        let mut writer = ChannelWriter { sender, buffer: BytesMut::with_capacity(CHUNK) };
        let result = write(&mut writer);
        if result.is_ok() {
            let _ = writer.flush();
        } else {
            let _ = writer.send(Err(io::Error::other("the build context could not be read")));
        }
        result
    });
    let stream = stream::unfold(receiver, |mut receiver| async move {
        let item = receiver.recv().await?;
        Some((item, receiver))
    });
    (stream, writer)
}

/// The reading half of a byte stream that asynchronous code fills. An empty message is its end; a channel
/// that closes before is a truncated stream.
struct ChannelReader {
    receiver: mpsc::Receiver<Bytes>,
    current: Bytes,
    ended: bool,
}

impl Read for ChannelReader {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.current.is_empty() {
            if self.ended {
                return Ok(0);
            }
            match self.receiver.blocking_recv() {
                Some(bytes) if bytes.is_empty() => self.ended = true,
                Some(bytes) => self.current = bytes,
                None => return Err(io::ErrorKind::UnexpectedEof.into()),
            }
        }
        let count = into.len().min(self.current.len());
        self.current.copy_to_slice(&mut into[..count]);
        Ok(count)
    }
}

/// Unpacks a tar stream that holds `out/...` into `dest`, which is an empty directory: in a neighbour of
/// it first, so that `dest` gets everything or nothing. `failed` makes a stream's fault into an error.
pub(super) async fn unpack_out<E>(
    stream: impl Stream<Item = Result<Bytes, E>>,
    dest: &Path,
    cancel: &CancellationToken,
    failed: impl FnOnce(E) -> EngineError,
) -> Result<(), EngineError> {
    let (sender, receiver) = mpsc::channel(DEPTH);
    let dest = dest.to_owned();
    let unpacker = tokio::task::spawn_blocking(move || {
        unpack_beside(ChannelReader { receiver, current: Bytes::new(), ended: false }, &dest)
    });
    let forwarded = tokio::select! {
        biased;
        () = cancel.cancelled() => Err(EngineError::Cancelled),
        result = forward(stream, &sender) => result.map_err(failed),
    };
    drop(sender);
    let outcome = unpacker
        .await
        .unwrap_or_else(|panic| Err(EngineError::io("unpack", "/out", io::Error::other(panic))));
    // A stream's own fault explains why the unpacker saw a truncated archive; not the other way round.
    forwarded.and(outcome)
}

async fn forward<E>(
    stream: impl Stream<Item = Result<Bytes, E>>,
    sender: &mpsc::Sender<Bytes>,
) -> Result<(), E> {
    let mut stream = std::pin::pin!(stream);
    while let Some(chunk) = stream.next().await {
        let chunk = chunk?;
        // A reader that is gone has its reason, which it reports itself.
        if !chunk.is_empty() && sender.send(chunk).await.is_err() {
            return Ok(());
        }
    }
    let _ = sender.send(Bytes::new()).await;
    Ok(())
}

fn unpack_beside(mut reader: ChannelReader, dest: &Path) -> Result<(), EngineError> {
    let parent = dest.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let fail = |action| move |source| EngineError::io(action, dest, source);
    let beside =
        tempfile::Builder::new().prefix(".unpack-").tempdir_in(parent).map_err(fail("unpack beside"))?;
    archive::unpack_tar(&mut reader, beside.path(), &Limits::default())?;
    // An archive ends before its padding does: whoever writes it must not meet a closed pipe.
    io::copy(&mut reader, &mut io::sink()).map_err(UnpackError::Damaged)?;
    let out = beside.path().join("out");
    match out.symlink_metadata() {
        Ok(metadata) if metadata.is_dir() => {}
        Ok(_) => {
            return Err(EngineError::Step {
                message: "the modules stage's /out is not a directory".to_owned(),
            });
        }
        Err(_) => return Err(EngineError::no_out()),
    }
    std::fs::rename(&out, dest).map_err(fail("move payload to"))
}

/// Writes a stream to a file, which appears whole or not at all.
pub(super) async fn save<E>(
    stream: impl Stream<Item = Result<Bytes, E>>,
    dest: &Path,
    cancel: &CancellationToken,
    failed: impl FnOnce(E) -> EngineError,
) -> Result<(), EngineError> {
    let fail = |source| EngineError::io("write", dest, source);
    let partial = Partial(dest.with_added_extension("part"));
    let mut file = tokio::fs::File::create(&partial.0).await.map_err(fail)?;
    let mut stream = std::pin::pin!(stream);
    loop {
        let next = tokio::select! {
            biased;
            () = cancel.cancelled() => return Err(EngineError::Cancelled),
            next = stream.next() => next,
        };
        match next {
            Some(Ok(chunk)) => file.write_all(&chunk).await.map_err(fail)?,
            Some(Err(error)) => return Err(failed(error)),
            None => break,
        }
    }
    file.flush().await.map_err(fail)?;
    std::fs::rename(&partial.0, dest).map_err(fail)
}

/// A file that is removed unless it was renamed.
struct Partial(PathBuf);

impl Drop for Partial {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nothing(error: io::Error) -> EngineError {
        EngineError::io("read", "stream", error)
    }

    #[tokio::test]
    async fn a_writer_becomes_a_stream() {
        let (stream, writer) = stream_from_writer(|out| out.write_all(&vec![7; 3 * CHUNK + 1]));
        let total: usize =
            stream.map(|chunk| chunk.unwrap().len()).fold(0, |sum, len| async move { sum + len }).await;
        assert_eq!(total, 3 * CHUNK + 1);
        writer.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_failed_writer_fails_the_stream() {
        let (stream, writer) = stream_from_writer(|out| {
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
        assert!(matches!(result, Err(EngineError::Cancelled)));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_channel_that_closes_early_is_truncated() {
        let (sender, receiver) = mpsc::channel(2);
        sender.blocking_send(Bytes::from_static(b"abc")).unwrap();
        drop(sender);
        let mut reader = ChannelReader { receiver, current: Bytes::new(), ended: false };
        let error = reader.read_to_end(&mut Vec::new()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }
}
