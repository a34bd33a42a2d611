//! Opens a bundle's file and validates its head and its end.

use std::{
    io::{self, Read},
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

use farrier_core::{image::Digest, text::is_deceptive};
use farrier_store::registry::BlobSource;
use oci::Hashing;

use super::{
    BundleError, Result,
    entry::{self, TAR_BLOCK, blob_name},
    frame::FrameReader,
    index::{Blob, BundleIndex, FORMAT, INDEX_NAME, MAX_INDEX},
    trailer::{FIXED, Trailer, TrailerError},
    volume::{Volume, parts_of},
};

/// Number of entries before the blobs.
pub(super) const HEAD_ENTRIES: usize = 3;
/// Magic number of a zstd frame.
const ZSTD: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
/// Bytes read at a time.
pub(super) const CHUNK: usize = 256 << 10;

/// A bundle whose head and end are valid. The content between them is unverified.
#[derive(Clone, Debug)]
pub struct Bundle {
    pub(super) path: PathBuf,
    pub(super) file: Arc<Volume>,
    index: BundleIndex,
    id: Digest,
    /// Start of each frame, and the end of the last one.
    pub(super) offsets: Vec<u64>,
}

impl Bundle {
    /// Opens a bundle, and checks its head and its end.
    pub fn open(path: &Path) -> Result<Self> {
        let (name, files) = parts_of(&[path.to_owned()])?;
        Self::open_parts(&name, &files)
    }

    /// Opens a bundle from its name and its files.
    pub(super) fn open_parts(path: &Path, files: &[PathBuf]) -> Result<Self> {
        let file = Arc::new(Volume::open(files)?);
        let length = file.length;
        let (index_bytes, index_range) = find_index(path, &file, length)?;
        let wrong_index = |reason: &str| BundleError::damaged(path, &index_range, INDEX_NAME, reason);
        check_version(path, &index_bytes)?;
        let truncated = |reason| BundleError::truncated(path, length, reason);
        let end = length.checked_sub(FIXED as u64).ok_or_else(|| truncated("is shorter than any bundle"))?;
        let wrong_end = |error: TrailerError| match error {
            TrailerError::Truncated => truncated("does not end like a bundle of this length"),
            TrailerError::Damaged(reason) => BundleError::damaged(path, &(end..length), "its end", reason),
        };
        let mut last = [0; FIXED];
        file.read_exact_at(&mut last, end)?;
        let start = Trailer::start(length, &last).map_err(wrong_end)?;
        let mut bytes = vec![0; usize::try_from(length - start).unwrap_or_default()];
        file.read_exact_at(&mut bytes, start)?;
        let trailer = Trailer::parse(&bytes, start).map_err(wrong_end)?;

        let id = Digest::of(&index_bytes);
        if id != trailer.index {
            let reason = format!("its sha256 is {id}, the end of the file says {}", trailer.index);
            return Err(wrong_index(&reason));
        }
        let index: BundleIndex =
            serde_json::from_slice(&index_bytes).map_err(|error| wrong_index(&error.to_string()))?;
        if let Some(reason) = index.find_problem() {
            return Err(BundleError::inconsistent(path, &reason));
        }
        let expected = HEAD_ENTRIES + index.carried().count() + 1;
        if trailer.frames.len() != expected {
            let reason = format!("it has {} frames, and entries for {expected}", trailer.frames.len());
            return Err(BundleError::inconsistent(path, &reason));
        }
        let mut offsets = vec![0];
        let mut frame_end = 0;
        for length in &trailer.frames {
            frame_end += length;
            offsets.push(frame_end);
        }
        let bundle = Self { path: path.to_owned(), file, index, id, offsets };
        bundle.check_head(&index_bytes)?;
        Ok(bundle)
    }

    /// ID of the bundle: the digest of its index.
    pub fn id(&self) -> &Digest {
        &self.id
    }

    /// Contents of the bundle.
    pub fn index(&self) -> &BundleIndex {
        &self.index
    }

    /// Size of the file in bytes.
    pub fn length(&self) -> u64 {
        self.file.length
    }

    /// Path of the file, without the number of a part.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Checks that the first frames hold exactly the entries that the index implies.
    fn check_head(&self, index_bytes: &[u8]) -> Result<()> {
        let head =
            self.index.head().map_err(|e| self.damaged(HEAD_ENTRIES - 1, INDEX_NAME, &e.to_string()))?;
        for (frame, (name, content)) in head.iter().enumerate() {
            if *name == INDEX_NAME && content != index_bytes {
                return Err(self.damaged(frame, name, "it is not in the form that farrier writes"));
            }
            let expected =
                entry::entry(name, content).map_err(|e| self.damaged(frame, name, &e.to_string()))?;
            self.compare(frame, name, &expected)?;
        }
        Ok(())
    }

    /// Checks that the frame has exactly this content.
    pub(super) fn compare(&self, frame: usize, entry: &str, expected: &[u8]) -> Result<()> {
        let section = self.section(frame);
        let length = section.len();
        let read = || -> io::Result<bool> {
            let mut reader = FrameReader::new(section)?;
            let mut content = Vec::new();
            reader.by_ref().take(expected.len() as u64).read_to_end(&mut content)?;
            reader.expect_end()?;
            Ok(content == expected && reader.consumed() == length)
        };
        match read() {
            Ok(true) => Ok(()),
            Ok(false) => Err(self.damaged(frame, entry, "it does not match the index")),
            Err(error) => Err(self.damaged(frame, entry, &error.to_string())),
        }
    }

    /// Byte range of a frame in the file.
    fn frame_range(&self, frame: usize) -> Range<u64> {
        let at = |frame: usize| self.offsets.get(frame).copied().unwrap_or(self.length());
        at(frame)..at(frame + 1)
    }

    pub(super) fn section(&self, frame: usize) -> Section {
        let Range { start, end } = self.frame_range(frame);
        Section::new(Arc::clone(&self.file), start, end)
    }

    pub(super) fn damaged(&self, frame: usize, entry: &str, reason: &str) -> BundleError {
        BundleError::damaged(&self.path, &self.frame_range(frame), entry, reason)
    }

    /// Blob in a frame, which can be read several times. Its digest is not verified.
    pub(super) fn source(&self, frame: usize, blob: &Blob) -> BundleBlob {
        BundleBlob { section: self.section(frame), size: blob.size }
    }
}

/// Finds farrier's index among the first entries by name, so that bundles in newer formats are recognized. Also returns
/// its byte range in the file.
pub(super) fn find_index(path: &Path, file: &Arc<Volume>, length: u64) -> Result<(Vec<u8>, Range<u64>)> {
    let not_a_bundle = |reason: &str| BundleError::NotABundle(path.to_owned(), reason.to_owned());
    let mut magic = [0; 4];
    if length < 4 || file.read_exact_at(&mut magic, 0).is_err() || magic != ZSTD {
        return Err(not_a_bundle("it is not compressed with zstd"));
    }
    let mut offset = 0;
    for _ in 0..HEAD_ENTRIES {
        let wrong = |error: io::Error| match error.kind() {
            io::ErrorKind::UnexpectedEof => BundleError::truncated(path, length, "ends within its head"),
            _ => BundleError::damaged(path, &(offset..length), "its head", &error.to_string()),
        };
        let mut reader = FrameReader::new(Section::new(Arc::clone(file), offset, length)).map_err(wrong)?;
        let mut header = tar::Header::new_old();
        reader.read_exact(header.as_mut_bytes()).map_err(wrong)?;
        let size = header.size().map_err(|_| not_a_bundle("it does not begin with a tar header"))?;
        if size > MAX_INDEX {
            return Err(not_a_bundle(&format!(
                "an entry at its head has {size} bytes; the limit is {MAX_INDEX} bytes"
            )));
        }
        let mut content = vec![0; usize::try_from(size).unwrap_or_default()];
        reader.read_exact(&mut content).map_err(wrong)?;
        if header.path_bytes().as_ref() == INDEX_NAME.as_bytes() {
            return Ok((content, offset..offset + reader.consumed()));
        }
        io::copy(&mut reader.by_ref().take(TAR_BLOCK as u64), &mut io::sink()).map_err(wrong)?;
        reader.expect_end().map_err(wrong)?;
        offset += reader.consumed();
    }
    Err(not_a_bundle(&format!("{INDEX_NAME} is not among its first entries")))
}

pub(super) fn check_version(path: &Path, index: &[u8]) -> Result<()> {
    #[derive(serde::Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Version {
        format_version: u64,
        #[serde(default)]
        made_by: String,
    }
    let path = path.to_owned();
    let Version { format_version, made_by } = match serde_json::from_slice(index) {
        Ok(version) => version,
        Err(error) => return Err(BundleError::NotABundle(path, format!("{INDEX_NAME}: {error}"))),
    };
    if format_version <= u64::from(FORMAT) {
        return Ok(());
    }
    let made_by: String = made_by.chars().filter(|c| !is_deceptive(*c)).take(80).collect();
    let message =
        format!("has format {format_version}, made by {made_by}; this farrier reads formats up to {FORMAT}");
    let hint =
        "use a farrier at least as new as the one that exported it, or export it again with this version";
    Err(BundleError::Unusable { path, message, hint })
}

/// Reads a blob's frame and verifies its digest. Returns the frame's length.
pub(super) fn read_blob(from: impl Read, blob: &Blob, mut on_chunk: impl FnMut(&[u8])) -> io::Result<u64> {
    let invalid = |reason: String| io::Error::new(io::ErrorKind::InvalidData, reason);
    let mut reader = FrameReader::new(from)?;
    let mut header = [0; TAR_BLOCK];
    reader.read_exact(&mut header)?;
    if header != entry::header(&blob_name(&blob.digest), blob.size)? {
        return Err(invalid("its tar header does not match the blob".to_owned()));
    }
    let mut content = Hashing::new(reader.by_ref().take(blob.size));
    let mut buffer = vec![0; CHUNK];
    loop {
        match content.read(&mut buffer)? {
            0 => break,
            count => on_chunk(&buffer[..count]),
        }
    }
    let (_, digest, size) = content.into_parts();
    if size < blob.size {
        return Err(invalid(format!("it ends {} bytes early", blob.size - size)));
    }
    if digest != blob.digest {
        return Err(invalid(format!("its sha256 is {digest}")));
    }
    let mut padding = [0; TAR_BLOCK];
    let padding = &mut padding[..entry::padding(blob.size).len()];
    reader.read_exact(padding)?;
    if padding != entry::padding(blob.size) {
        return Err(invalid("it has trailing content".to_owned()));
    }
    reader.expect_end()?;
    Ok(reader.consumed())
}

/// A byte range of a bundle. Several ranges can be read concurrently.
#[derive(Clone, Debug)]
pub(super) struct Section {
    file: Arc<Volume>,
    offset: u64,
    end: u64,
}

impl Section {
    pub(super) fn new(file: Arc<Volume>, offset: u64, end: u64) -> Self {
        Self { file, offset, end }
    }

    pub(super) fn len(&self) -> u64 {
        self.end - self.offset
    }
}

impl Read for Section {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let limit = to.len().min(usize::try_from(self.len()).unwrap_or(usize::MAX));
        let count = self.file.read_at(&mut to[..limit], self.offset)?;
        self.offset += count as u64;
        Ok(count)
    }
}

/// A blob inside a bundle.
pub(super) struct BundleBlob {
    section: Section,
    size: u64,
}

impl BlobSource for BundleBlob {
    fn size(&self) -> u64 {
        self.size
    }

    fn open(&self) -> io::Result<Box<dyn Read + Send>> {
        let mut reader = FrameReader::new(self.section.clone())?;
        reader.read_exact(&mut [0; TAR_BLOCK])?;
        Ok(Box::new(reader.take(self.size)))
    }
}
