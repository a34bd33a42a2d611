//! Writes a bundle's file frame by frame, and resumes an interrupted run.

use std::{
    io::{self, BufWriter, Read, Write as _},
    path::{Path, PathBuf},
    sync::Arc,
};

use farrier_core::image::Digest;
use farrier_store::registry::RegistryError;
use oci::Hashing;

use super::{
    BundleError, Meter, Phase, Result,
    entry::{self, blob_name},
    frame::{FrameWriter, Packing, write_frame},
    index::{Blob, BundleIndex},
    read::{HEAD_ENTRIES, Section, read_blob},
    trailer::Trailer,
    volume::{MAX_PARTS, Volume, VolumeWriter, part, with_suffix},
};

/// Size of the write buffer in bytes.
const BUFFER: usize = 1 << 20;

/// A bundle in progress, written to a temporary file next to its destination.
pub(super) struct Writer {
    to: PathBuf,
    out: BufWriter<VolumeWriter>,
    frames: Vec<u64>,
    /// Offset of the next frame.
    offset: u64,
    index: Digest,
}

impl Writer {
    /// Opens `FILE.partial` or its parts of `split` bytes, keeps the complete frames of an earlier run, and truncates the
    /// file after them.
    pub(super) fn open(
        to: &Path,
        split: Option<u64>,
        index: &BundleIndex,
        meter: &dyn Meter,
    ) -> Result<Self> {
        for existing in [to.to_owned(), part(to, Some(1))] {
            if existing.exists() {
                return Err(BundleError::Exists(existing));
            }
        }
        let bytes = index.bytes().0;
        if split.is_some_and(|size| bytes.div_ceil(size) > MAX_PARTS) {
            let message =
                format!("{bytes} bytes make more than {MAX_PARTS} parts: choose a larger size (--split)");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message).into());
        }
        let mut files = VolumeWriter::open(&with_suffix(to, ".partial"), split)?;
        let bytes = index.to_bytes()?;
        let mut head = Vec::new();
        let mut frames = Vec::new();
        for (name, content) in index.head()? {
            let before = head.len();
            let entry = entry::entry(name, &content)?;
            write_frame(&mut head, &entry)?;
            frames.push((head.len() - before) as u64);
        }
        frames.extend(kept_frames(&Arc::new(Volume::open(&files.paths())?), &head, index, meter)?);
        files.write_all(&head)?;
        let offset = frames.iter().sum();
        files.truncate(offset)?;
        let out = BufWriter::with_capacity(BUFFER, files);
        Ok(Self { to: to.to_owned(), out, frames, offset, index: Digest::of(&bytes) })
    }

    /// Number of the index's blobs that the file already has.
    pub(super) fn resumed_blobs(&self) -> usize {
        self.frames.len() - HEAD_ENTRIES
    }

    /// Writes the next blob. Content that does not match the blob's size or digest is an error, and its frame is not
    /// recorded.
    pub(super) fn blob(&mut self, blob: &Blob, content: impl Read) -> Result<()> {
        let mut content = Hashing::new(content);
        let mut start = Vec::new();
        content.by_ref().take(blob.size.min(Packing::START)).read_to_end(&mut start)?;
        let mut writer = FrameWriter::new(&mut self.out, Packing::of(&start), entry::entry_size(blob.size))?;
        writer.write_all(&entry::header(&blob_name(&blob.digest), blob.size)?)?;
        writer.write_all(&start)?;
        io::copy(&mut content.by_ref().take(blob.size - start.len() as u64), &mut writer)?;
        // Also read the end of the content: a surplus byte changes its size and digest.
        io::copy(&mut content.by_ref().take(1), &mut io::sink())?;
        let (_, digest, size) = content.into_parts();
        if digest != blob.digest || size != blob.size {
            let action = format!("fetch blob {} of {} bytes", blob.digest, blob.size);
            return Err(
                RegistryError::Digest { action, expected: blob.digest.clone(), actual: digest }.into()
            );
        }
        writer.write_all(entry::padding(blob.size))?;
        writer.finish()?;
        let end = self.out.get_ref().offset + self.out.buffer().len() as u64;
        self.frames.push(end - self.offset);
        self.offset = end;
        Ok(())
    }

    /// Completes the archive and renames it to its destination. Returns its length and the index's digest.
    pub(super) fn finish(mut self) -> Result<(u64, Digest)> {
        let mut end = Vec::new();
        write_frame(&mut end, &entry::TAR_END)?;
        self.frames.push(end.len() as u64);
        let trailer = Trailer { frames: std::mem::take(&mut self.frames), index: self.index.clone() };
        end.extend(trailer.to_bytes());
        self.out.write_all(&end)?;
        self.out.into_inner().map_err(io::IntoInnerError::into_error)?.finish(&self.to)?;
        Ok((self.offset + end.len() as u64, self.index))
    }
}

/// Lengths of the blob frames that an earlier run completed; empty if the file does not start with the head.
fn kept_frames(
    file: &Arc<Volume>,
    head: &[u8],
    index: &BundleIndex,
    meter: &dyn Meter,
) -> io::Result<Vec<u64>> {
    let (length, mut frames) = (file.length, Vec::new());
    let mut start = Vec::new();
    Section::new(Arc::clone(file), 0, head.len() as u64).read_to_end(&mut start)?;
    if start != head {
        return Ok(frames);
    }
    meter.begin(Phase::Resume, length);
    let mut offset = head.len() as u64;
    meter.advance(offset);
    for blob in index.carried() {
        let section = Section::new(Arc::clone(file), offset, length);
        // A damaged frame is written again.
        let Ok(frame) = read_blob(section, blob, |_| {}) else { break };
        meter.advance(frame);
        offset += frame;
        frames.push(frame);
    }
    meter.end();
    Ok(frames)
}
