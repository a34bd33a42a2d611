//! Zstd frames of a bundle (RFC 8878). Each entry has its own frame, so that it can be read without the others.

use std::io::{self, BufReader, Read, Write};

use zstd::stream::read::Decoder;

/// Maximum block size of the format.
const BLOCK: usize = 128 << 10;
/// Magic number, then a frame header descriptor for an 8-byte content size without a checksum, then a window of one
/// block.
const STORED_HEADER: [u8; 6] = [0x28, 0xb5, 0x2f, 0xfd, 0xc0, 0x38];
/// zstd's default level. Most content is already compressed, so this level applies to manifests and plain tars.
const LEVEL: i32 = 3;
/// Maximum window size for reading, as a power of two: the limit of zstd's levels without `--long`.
const MAX_WINDOW_LOG: u32 = 23;
/// Bytes read from a file at a time.
const CHUNK: usize = 256 << 10;

/// Encoding of an entry's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Packing {
    /// Stored unaltered, in the format's raw blocks.
    Stored,
    Compressed,
}

impl Packing {
    /// Number of bytes needed to choose the encoding.
    pub(super) const START: u64 = 4;

    /// Chooses the encoding from the start of a blob: compressed data would not become smaller.
    pub(super) fn of(start: &[u8]) -> Self {
        let compressed: [&[u8]; 4] = [
            &[0x1f, 0x8b],             // gzip
            &[0x28, 0xb5, 0x2f, 0xfd], // zstd
            &[0xfd, b'7', b'z', b'X'], // xz
            b"BZh",
        ];
        if compressed.iter().any(|magic| start.starts_with(magic)) { Self::Stored } else { Self::Compressed }
    }
}

enum Encoder<W: Write> {
    Stored(W),
    Compressed(zstd::stream::write::Encoder<'static, W>),
}

/// Writes one frame. The frame's bytes do not depend on how the content is split into writes.
pub(super) struct FrameWriter<W: Write> {
    encoder: Encoder<W>,
    pending: Vec<u8>,
    /// Number of content bytes that are not encoded yet.
    remaining: u64,
}

impl<W: Write> FrameWriter<W> {
    /// Starts a frame for `size` bytes of content; `size` must not be 0.
    pub(super) fn new(mut out: W, packing: Packing, size: u64) -> io::Result<Self> {
        let encoder = match packing {
            Packing::Stored => {
                out.write_all(&STORED_HEADER)?;
                out.write_all(&size.to_le_bytes())?;
                Encoder::Stored(out)
            }
            Packing::Compressed => {
                let mut encoder = zstd::stream::write::Encoder::new(out, LEVEL)?;
                encoder.include_checksum(true)?;
                encoder.set_pledged_src_size(Some(size))?;
                Encoder::Compressed(encoder)
            }
        };
        Ok(Self { encoder, pending: Vec::with_capacity(BLOCK), remaining: size })
    }

    /// Encodes the pending bytes as one block.
    fn block(&mut self) -> io::Result<()> {
        let block = &self.pending[..];
        let remaining = self.remaining.checked_sub(block.len() as u64);
        self.remaining = remaining.ok_or_else(|| io::Error::other("more bytes than were announced"))?;
        match &mut self.encoder {
            Encoder::Stored(out) => {
                // `Block_Header`: last block, type 0 (raw), size.
                let last = u32::from(self.remaining == 0);
                let header = u32::try_from(block.len()).map_err(io::Error::other)? << 3 | last;
                out.write_all(&header.to_le_bytes()[..3])?;
                out.write_all(block)?;
            }
            Encoder::Compressed(encoder) => encoder.write_all(block)?,
        }
        self.pending.clear();
        Ok(())
    }

    pub(super) fn finish(mut self) -> io::Result<W> {
        if !self.pending.is_empty() {
            self.block()?;
        }
        if self.remaining > 0 {
            return Err(io::Error::other("fewer bytes than were announced"));
        }
        match self.encoder {
            Encoder::Stored(out) => Ok(out),
            Encoder::Compressed(encoder) => encoder.finish(),
        }
    }
}

impl<W: Write> Write for FrameWriter<W> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let accepted = data.len().min(BLOCK - self.pending.len());
        self.pending.extend_from_slice(&data[..accepted]);
        if self.pending.len() == BLOCK {
            self.block()?;
        }
        Ok(accepted)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes a frame with this content.
pub(super) fn write_frame(out: impl Write, content: &[u8]) -> io::Result<()> {
    let mut writer = FrameWriter::new(out, Packing::Compressed, content.len() as u64)?;
    writer.write_all(content)?;
    writer.finish().map(drop)
}

/// Reads one frame, and stops at its end.
pub(super) struct FrameReader<R: Read>(Decoder<'static, BufReader<io::Take<R>>>);

impl<R: Read> FrameReader<R> {
    pub(super) fn new(from: R) -> io::Result<Self> {
        let mut decoder = Decoder::with_buffer(BufReader::with_capacity(CHUNK, from.take(u64::MAX)))?;
        decoder.window_log_max(MAX_WINDOW_LOG)?;
        Ok(Self(decoder.single_frame()))
    }

    /// Bytes of the frame consumed so far.
    pub(super) fn consumed(&self) -> u64 {
        let buffered = self.0.get_ref();
        u64::MAX - buffered.get_ref().limit() - buffered.buffer().len() as u64
    }

    /// Checks that the frame ends here; more content is an error.
    pub(super) fn expect_end(&mut self) -> io::Result<()> {
        match self.read(&mut [0])? {
            0 => Ok(()),
            _ => Err(io::Error::new(io::ErrorKind::InvalidData, "it has more content than expected")),
        }
    }
}

impl<R: Read> Read for FrameReader<R> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        self.0.read(to)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frame(packing: Packing, content: &[u8], portion: usize) -> Vec<u8> {
        let mut writer = FrameWriter::new(Vec::new(), packing, content.len() as u64).unwrap();
        for part in content.chunks(portion) {
            writer.write_all(part).unwrap();
        }
        writer.finish().unwrap()
    }

    fn noise(length: usize) -> Vec<u8> {
        (0..length as u64).map(|n| (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 53).to_le_bytes()[0]).collect()
    }

    #[test]
    fn portions_make_no_difference_and_zstd_reads_both() {
        let content = noise(3 * BLOCK + 77);
        for packing in [Packing::Stored, Packing::Compressed] {
            let whole = frame(packing, &content, content.len());
            for portion in [1000, BLOCK, BLOCK + 1] {
                assert_eq!(frame(packing, &content, portion), whole, "{packing:?} {portion}");
            }
            assert_eq!(zstd::stream::decode_all(&whole[..]).unwrap(), content, "{packing:?}");
            let with_more = [&whole[..], b"more"].concat();
            let mut reader = FrameReader::new(&with_more[..]).unwrap();
            let mut back = Vec::new();
            reader.read_to_end(&mut back).unwrap();
            assert!(back == content, "{packing:?}");
            assert_eq!(reader.consumed(), whole.len() as u64);
        }
        assert!(frame(Packing::Stored, &content, BLOCK).len() < content.len() + 64);
    }

    #[test]
    fn an_announced_size_is_kept() {
        let mut short = FrameWriter::new(Vec::new(), Packing::Stored, 4).unwrap();
        short.write_all(b"abc").unwrap();
        assert!(short.finish().is_err());
        let mut long = FrameWriter::new(Vec::new(), Packing::Stored, 2).unwrap();
        long.write_all(b"abc").unwrap();
        assert!(long.finish().is_err());
    }

    #[test]
    fn what_is_compressed_already_is_told() {
        assert_eq!(Packing::of(&[0x1f, 0x8b, 8, 0]), Packing::Stored);
        assert_eq!(Packing::of(b"{}"), Packing::Compressed);
        assert_eq!(Packing::of(b""), Packing::Compressed);
    }

    proptest! {
        #[test]
        fn any_bytes_are_an_answer(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let mut out = Vec::new();
            let _ = FrameReader::new(&bytes[..]).unwrap().take(1 << 20).read_to_end(&mut out);
        }
    }
}
