//! Writes deterministic layers: the same entries give the same bytes on every machine.

use std::{
    io::{self, Read, Write},
    path::{Component, Path, PathBuf},
};

use flate2::{Compression, GzBuilder, write::GzEncoder};
use sha2::{Digest as _, Sha256};
use tar::{EntryType, Header};

use super::{Descriptor, Digest, Whiteout, media_type};

/// gzip's default level. Another level would change the digest of every layer.
const GZIP_LEVEL: u32 = 6;
/// "unknown" in RFC 1952, to keep the header independent of the machine.
const GZIP_OS_UNKNOWN: u8 = 255;

/// A finished layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layer {
    /// SHA-256 of the stored (compressed) blob.
    pub digest: Digest,
    /// SHA-256 of the tar stream inside.
    pub diff_id: Digest,
    /// Size of the stored blob in bytes.
    pub size: u64,
    /// Media type of the blob.
    pub media_type: &'static str,
}

impl Layer {
    /// Descriptor of the blob.
    pub fn descriptor(&self) -> Descriptor {
        Descriptor::new(self.media_type, self.digest.clone(), self.size)
    }
}

/// Type of an entry.
pub enum EntryKind<'a> {
    /// A directory.
    Directory,
    /// A regular file of exactly `size` bytes.
    File {
        /// Number of bytes that `content` yields.
        size: u64,
        /// The content.
        content: &'a mut dyn Read,
    },
    /// A symbolic link to this target, which is stored unaltered.
    Symlink(&'a Path),
}

/// Error of writing a layer.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages explain the fields")]
pub enum LayerError {
    /// The path is absolute, or contains `.` or `..`.
    #[error("entry {0:?} is not a plain relative path")]
    Path(PathBuf),
    /// Container runtimes treat the name as a deletion (OCI image spec, "whiteouts").
    #[error("entry {0:?} starts with .wh., which marks deletions in layers")]
    Whiteout(PathBuf),
    /// Entries are out of order, so the layer would depend on the order of a directory listing.
    #[error("entry {1:?} comes after {0:?}, but entries must be sorted and unique")]
    Order(PathBuf, PathBuf),
    /// The file grew or shrank during the read. `actual` exceeds `expected` by at most one byte.
    #[error("entry {path:?} has {actual} bytes, expected {expected}: the file changed during the read")]
    Changed { path: PathBuf, expected: u64, actual: u64 },
    /// Reading the content or writing the layer failed.
    #[error("cannot write layer entry {0:?}")]
    Entry(PathBuf, #[source] io::Error),
    /// Writing the end of the layer failed.
    #[error("cannot finish layer")]
    Finish(#[source] io::Error),
}

/// Reader or writer that hashes and counts the bytes that pass through.
pub struct Hashing<T> {
    inner: T,
    hash: Sha256,
    bytes: u64,
}

impl<T> Hashing<T> {
    /// Wraps a reader or writer.
    pub fn new(inner: T) -> Self {
        Self { inner, hash: Sha256::new(), bytes: 0 }
    }

    /// Returns the inner reader or writer, the SHA-256 of the bytes that passed through, and their number.
    pub fn into_parts(self) -> (T, Digest, u64) {
        (self.inner, Digest::from_sha256(&self.hash.finalize().into()), self.bytes)
    }
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.hash.update(&buffer[..count]);
        self.bytes += count as u64;
        Ok(count)
    }
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(buffer)?;
        self.hash.update(&buffer[..written]);
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

/// Writes a sorted tree as a tar stream. All metadata that could differ between machines has fixed values.
pub struct TreeWriter<W: Write> {
    tar: tar::Builder<Hashing<W>>,
    mtime: u64,
    last: Option<PathBuf>,
}

impl<W: Write> TreeWriter<W> {
    fn to(out: W, mtime: u64) -> Self {
        Self { tar: tar::Builder::new(Hashing::new(out)), mtime, last: None }
    }

    /// Adds an entry. Paths must be relative to the image's root, unique, and in the order of `Path`'s `Ord`. The owner of all
    /// entries is root.
    pub fn entry(&mut self, path: &Path, mode: u32, kind: EntryKind<'_>) -> Result<(), LayerError> {
        self.check_path(path)?;
        let failed = |source| LayerError::Entry(path.to_owned(), source);

        let mut header = Header::new_gnu();
        header.set_mtime(self.mtime);
        header.set_uid(0);
        header.set_gid(0);
        // Keep the permissions, and the sticky bit for `tmp`. A payload must not have set-ID bits.
        header.set_mode(mode & 0o1777);
        header.set_size(0);
        match kind {
            EntryKind::Directory => {
                header.set_entry_type(EntryType::Directory);
                // `join("")` adds the trailing slash that tar writes for directories.
                self.tar.append_data(&mut header, path.join(""), io::empty()).map_err(failed)?;
            }
            EntryKind::File { size, content } => {
                header.set_entry_type(EntryType::Regular);
                header.set_size(size);
                let mut exact = Exact { inner: content, remaining: size };
                let appended = self.tar.append_data(&mut header, path, &mut exact);
                let actual = exact.read_surplus().map(|more| size - exact.remaining + more);
                match (appended, actual) {
                    (Ok(()), Ok(actual)) if actual == size => {}
                    (Err(source), _) | (Ok(()), Err(source)) => return Err(failed(source)),
                    (Ok(()), Ok(actual)) => {
                        return Err(LayerError::Changed { path: path.to_owned(), expected: size, actual });
                    }
                }
            }
            EntryKind::Symlink(target) => {
                header.set_entry_type(EntryType::Symlink);
                header.set_mode(0o777);
                self.tar.append_link(&mut header, path, target).map_err(failed)?;
            }
        }
        self.last = Some(path.to_owned());
        Ok(())
    }

    fn check_path(&self, path: &Path) -> Result<(), LayerError> {
        let mut components = path.components().peekable();
        let is_plain = components.peek().is_some() && components.all(|c| matches!(c, Component::Normal(_)));
        if !is_plain {
            return Err(LayerError::Path(path.to_owned()));
        }
        if path.file_name().is_some_and(Whiteout::may_be) {
            return Err(LayerError::Whiteout(path.to_owned()));
        }
        match &self.last {
            // `Path` compares by component, so the content of a directory follows immediately after the directory.
            Some(last) if last.as_path() >= path => Err(LayerError::Order(last.clone(), path.to_owned())),
            _ => Ok(()),
        }
    }

    fn end(self) -> Result<(W, Digest), LayerError> {
        let (out, diff_id, _) = self.tar.into_inner().map_err(LayerError::Finish)?.into_parts();
        Ok((out, diff_id))
    }
}

/// Yields at most the announced number of bytes, so that a growing file cannot damage the archive.
struct Exact<'a> {
    inner: &'a mut dyn Read,
    remaining: u64,
}

impl Exact<'_> {
    /// Returns 1 if the file has more bytes than announced, else 0.
    fn read_surplus(&mut self) -> io::Result<u64> {
        io::copy(&mut (&mut self.inner).take(1), &mut io::sink())
    }
}

impl Read for Exact<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = (&mut self.inner).take(self.remaining).read(buffer)?;
        self.remaining -= count as u64;
        Ok(count)
    }
}

/// Compresses a stream into a layer, with fixed parameters. Compresses blocks of a fixed size, because deflate's output depends on
/// how the input is split, and a read can return any number of bytes.
pub struct Compressor<W: Write> {
    encoder: Encoder<W>,
    block: Vec<u8>,
}

enum Encoder<W: Write> {
    Gzip(GzEncoder<Hashing<W>>),
    Zstd(zstd::Encoder<'static, Hashing<W>>),
}

impl<W: Write> Compressor<W> {
    const BLOCK: usize = 64 << 10;

    fn new(encoder: Encoder<W>) -> Self {
        Self { encoder, block: Vec::with_capacity(Self::BLOCK) }
    }

    fn gzip(level: u32, out: W) -> Self {
        let builder = GzBuilder::new().mtime(0).operating_system(GZIP_OS_UNKNOWN);
        Self::new(Encoder::Gzip(builder.write(Hashing::new(out), Compression::new(level))))
    }

    fn compress_block(&mut self) -> io::Result<()> {
        match &mut self.encoder {
            Encoder::Gzip(encoder) => encoder.write_all(&self.block)?,
            Encoder::Zstd(encoder) => encoder.write_all(&self.block)?,
        }
        self.block.clear();
        Ok(())
    }

    fn finish(mut self, diff_id: Digest) -> io::Result<(Layer, W)> {
        self.compress_block()?;
        let (out, media_type) = match self.encoder {
            Encoder::Gzip(encoder) => (encoder.finish()?, media_type::OCI_LAYER_GZIP),
            Encoder::Zstd(encoder) => (encoder.finish()?, media_type::OCI_LAYER_ZSTD),
        };
        let (mut out, digest, size) = out.into_parts();
        out.flush()?;
        Ok((Layer { digest, diff_id, size, media_type }, out))
    }
}

impl<W: Write> Write for Compressor<W> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let accepted = buffer.len().min(Self::BLOCK - self.block.len());
        self.block.extend_from_slice(&buffer[..accepted]);
        if self.block.len() == Self::BLOCK {
            self.compress_block()?;
        }
        Ok(accepted)
    }

    /// Does nothing, because a flush would end a deflate block.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes one layer: a compressed tar stream.
pub type LayerWriter<W> = TreeWriter<Compressor<W>>;

/// zstd's default level. Another level would change no input hash, because artifacts are identified by their diff ID.
const ZSTD_LEVEL: i32 = 3;

impl<W: Write> LayerWriter<W> {
    /// Starts a layer that is compressed with gzip. `mtime` is the modification time of all entries, in seconds since the Unix epoch.
    pub fn new(out: W, mtime: u64) -> Self {
        Self::at(out, mtime, GZIP_LEVEL)
    }

    /// Starts a layer like [`LayerWriter::new`], with another gzip level.
    pub fn at(out: W, mtime: u64, level: u32) -> Self {
        Self::to(Compressor::gzip(level, out), mtime)
    }

    /// Starts the only layer of an artifact, compressed with Zstandard. Zstandard takes a fifth of gzip's time, and no container
    /// runtime has to read an artifact.
    pub fn artifact(out: W, mtime: u64) -> Result<Self, LayerError> {
        let encoder = zstd::Encoder::new(Hashing::new(out), ZSTD_LEVEL).map_err(LayerError::Finish)?;
        Ok(Self::to(Compressor::new(Encoder::Zstd(encoder)), mtime))
    }

    /// Writes the end of the layer. Returns the layer and the writer.
    pub fn finish(self) -> Result<(Layer, W), LayerError> {
        let (compressor, diff_id) = self.end()?;
        compressor.finish(diff_id).map_err(LayerError::Finish)
    }
}

/// Compresses an existing tar stream into a layer, with the parameters of [`LayerWriter`].
pub fn compress(tar: impl Read, out: impl Write) -> io::Result<Layer> {
    compress_at(GZIP_LEVEL, tar, out)
}

/// Compresses like [`compress`], with another gzip level.
pub fn compress_at(level: u32, mut tar: impl Read, out: impl Write) -> io::Result<Layer> {
    let mut stream = Hashing::new(Compressor::gzip(level, out));
    io::copy(&mut tar, &mut stream)?;
    let (compressor, diff_id, _) = stream.into_parts();
    Ok(compressor.finish(diff_id)?.0)
}

/// Computes the diff ID that a tree would have as a layer, without writing the layer.
pub type TreeDigester = TreeWriter<io::Sink>;

impl TreeDigester {
    /// See [`LayerWriter::new`].
    pub fn new(mtime: u64) -> Self {
        Self::to(io::sink(), mtime)
    }

    /// Returns the diff ID.
    pub fn finish(self) -> Result<Digest, LayerError> {
        self.end().map(|(_, diff_id)| diff_id)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn write(entries: &[(&str, Option<&[u8]>)]) -> Result<(Layer, Vec<u8>), LayerError> {
        let mut writer = LayerWriter::new(Vec::new(), 0);
        for (path, content) in entries {
            match content {
                None => writer.entry(Path::new(path), 0o755, EntryKind::Directory)?,
                Some(bytes) => {
                    let kind = EntryKind::File { size: bytes.len() as u64, content: &mut &bytes[..] };
                    writer.entry(Path::new(path), 0o644, kind)?;
                }
            }
        }
        writer.finish()
    }

    #[test]
    fn the_size_of_reads_does_not_change_a_layer() {
        struct Dribble<'a>(&'a [u8], usize);
        impl Read for Dribble<'_> {
            fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
                (&mut self.0).take(self.1 as u64).read(buffer)
            }
        }
        let bytes: Vec<u8> = (0..300_000_u32).map(|n| (n.wrapping_mul(n) >> 10).to_le_bytes()[0]).collect();
        let whole = compress(&bytes[..], io::sink()).unwrap();
        for portion in [1, 511, 100_000] {
            assert_eq!(compress(Dribble(&bytes, portion), io::sink()).unwrap(), whole);
        }
    }

    #[test]
    fn a_layer_has_the_digests_of_its_bytes() {
        let (layer, bytes) = write(&[("a", None), ("a/b", Some(b"content"))]).unwrap();
        let mut tar = Vec::new();
        flate2::read::GzDecoder::new(&bytes[..]).read_to_end(&mut tar).unwrap();
        assert_eq!(layer.digest, Digest::of(&bytes));
        assert_eq!(layer.diff_id, Digest::of(&tar));
        assert_eq!(layer.size, bytes.len() as u64);
        assert_eq!(compress(&tar[..], io::sink()).unwrap(), layer);
    }

    #[test]
    fn layers_never_change_between_versions_of_farrier() {
        let (layer, _) = write(&[("lib", None), ("lib/x.ko", Some(&[7; 5000]))]).unwrap();
        // If this value changes, every image of every user gets a new digest.
        insta::assert_snapshot!(layer.diff_id.as_str(), @"sha256:364882ff3f0679cbb32274ec8740bf42579f54f41cc16501849367679934e6ef");
    }

    #[test]
    fn the_content_of_a_directory_precedes_its_siblings() {
        // A string comparison would sort "a.b" before "a/b".
        assert!(write(&[("a", None), ("a/b", Some(b"")), ("a.b", Some(b""))]).is_ok());
        assert!(matches!(write(&[("b", None), ("a", None)]), Err(LayerError::Order(..))));
        assert!(matches!(write(&[("a", None), ("a", None)]), Err(LayerError::Order(..))));
    }

    #[test]
    fn hostile_paths_are_refused() {
        for path in ["/etc", "../etc", "a/../../etc", "", "."] {
            assert!(matches!(write(&[(path, None)]), Err(LayerError::Path(_))), "{path}");
        }
        assert!(matches!(write(&[(".wh.etc", Some(b""))]), Err(LayerError::Whiteout(_))));
    }

    #[test]
    fn a_file_that_changes_during_the_read_is_an_error() {
        for (size, found) in [(3, 4), (5, 4)] {
            let mut writer = LayerWriter::new(Vec::new(), 0);
            let kind = EntryKind::File { size, content: &mut &b"1234"[..] };
            match writer.entry(Path::new("f"), 0o644, kind) {
                Err(LayerError::Changed { actual: f, .. }) => assert_eq!(f, found),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn metadata_is_normalized_and_long_names_are_kept() {
        let long = format!("{}/{}", "d".repeat(90), "f".repeat(180));
        let target = "t".repeat(300);
        let mut writer = LayerWriter::new(Vec::new(), 42);
        let kind = EntryKind::File { size: 1, content: &mut &b"x"[..] };
        writer.entry(Path::new(&long), 0o6755, kind).unwrap();
        let kind = EntryKind::Symlink(Path::new(&target));
        writer.entry(Path::new("link"), 0o777, kind).unwrap();
        let (_, bytes) = writer.finish().unwrap();

        let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(&bytes[..]));
        let mut entries = archive.entries().unwrap();
        let file = entries.next().unwrap().unwrap();
        assert_eq!(file.path().unwrap().to_str(), Some(long.as_str()));
        assert_eq!(file.header().mode().unwrap(), 0o755);
        assert_eq!((file.header().uid().unwrap(), file.header().mtime().unwrap()), (0, 42));
        let link = entries.next().unwrap().unwrap();
        assert_eq!(link.link_name().unwrap().unwrap().to_str(), Some(target.as_str()));
    }

    proptest! {
        #[test]
        fn the_digester_agrees_with_the_writer(
            files in proptest::collection::btree_map(
                "[a-z]{1,12}(/[a-z.]{0,3}[a-z]){0,3}".prop_map(PathBuf::from),
                proptest::collection::vec(any::<u8>(), 0..2000),
                0..12,
            )
        ) {
            let mut writer = LayerWriter::new(io::sink(), 0);
            let mut digester = TreeDigester::new(0);
            for (path, content) in &files {
                let size = content.len() as u64;
                writer.entry(path, 0o644, EntryKind::File { size, content: &mut &content[..] }).unwrap();
                digester.entry(path, 0o644, EntryKind::File { size, content: &mut &content[..] }).unwrap();
            }
            prop_assert_eq!(writer.finish().unwrap().0.diff_id, digester.finish().unwrap());
        }
    }
}
