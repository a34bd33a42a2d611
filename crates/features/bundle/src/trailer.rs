//! The end of a bundle, a skippable zstd frame (RFC 8878, 3.1.2) that other tools ignore. It contains the lengths of
//! all frames, the digest of the index and the length of the file. The last bytes show whether the file is complete.

use farrier_core::image::Digest;

/// Magic number of a skippable frame.
const SKIPPABLE: u32 = 0x184d_2a5b;
/// Last bytes of every bundle.
const MAGIC: &[u8; 8] = b"farrier1";
/// Size in bytes of the skippable frame's magic number and length field.
const FRAME_HEADER: usize = 8;
/// Size in bytes of the fixed fields: digest, number of frames, length of the file, magic.
pub(super) const FIXED: usize = 32 + 8 + 8 + 8;
/// Maximum number of frames, more than the contents of any registry need.
const MAX_FRAMES: u64 = 1 << 20;

/// Content of a bundle's end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Trailer {
    /// Lengths of the preceding frames.
    pub frames: Vec<u64>,
    /// SHA-256 of the index.
    pub index: Digest,
}

/// Reason why a file does not end with a valid trailer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TrailerError {
    /// The magic is missing, or the recorded length differs from the file's.
    Truncated,
    /// The fields are inconsistent.
    Damaged(&'static str),
}

impl Trailer {
    /// Serializes the trailer.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let before: u64 = self.frames.iter().sum();
        let content = (self.frames.len() * 8 + FIXED) as u64;
        let mut bytes = Vec::new();
        bytes.extend(SKIPPABLE.to_le_bytes());
        // The conversion cannot fail, because there are at most `MAX_FRAMES` frames.
        bytes.extend(u32::try_from(content).unwrap_or(u32::MAX).to_le_bytes());
        bytes.extend(self.frames.iter().flat_map(|length| length.to_le_bytes()));
        bytes.extend(hex::decode(self.index.hex()).unwrap_or_default());
        bytes.extend((self.frames.len() as u64).to_le_bytes());
        bytes.extend((before + FRAME_HEADER as u64 + content).to_le_bytes());
        bytes.extend(MAGIC);
        bytes
    }

    /// Returns the offset of the trailer in a file of `length` bytes, computed from the file's last [`FIXED`] bytes.
    pub(super) fn start(length: u64, last: &[u8]) -> Result<u64, TrailerError> {
        let field = |offset: usize| last.get(offset..offset + 8)?.try_into().ok().map(u64::from_le_bytes);
        let (Some(frames), Some(size)) = (field(32), field(40)) else { return Err(TrailerError::Truncated) };
        if !last.ends_with(MAGIC) || size != length {
            return Err(TrailerError::Truncated);
        }
        if frames > MAX_FRAMES {
            return Err(TrailerError::Damaged("it states more frames than a bundle can have"));
        }
        length
            .checked_sub((FRAME_HEADER + FIXED) as u64 + frames * 8)
            .ok_or(TrailerError::Damaged("it states more frames than fit into the file"))
    }

    /// Parses a trailer at offset `start`.
    pub(super) fn parse(bytes: &[u8], start: u64) -> Result<Self, TrailerError> {
        let body = bytes.len().checked_sub(FIXED).and_then(|end| bytes.get(FRAME_HEADER..end));
        let body = body.ok_or(TrailerError::Truncated)?;
        let frames: Vec<u64> =
            body.as_chunks::<8>().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
        let digest = bytes.get(FRAME_HEADER + body.len()..).and_then(<[u8]>::first_chunk::<32>);
        let trailer = Self { frames, index: Digest::from_sha256(digest.ok_or(TrailerError::Truncated)?) };
        let sum = trailer.frames.iter().try_fold(0_u64, |sum, length| sum.checked_add(*length));
        if sum != Some(start) {
            return Err(TrailerError::Damaged("the lengths of its frames do not match the file"));
        }
        if trailer.to_bytes() != bytes {
            return Err(TrailerError::Damaged("its checksum is wrong"));
        }
        Ok(trailer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_back_and_no_flipped_bit_goes_unseen() {
        let trailer = Trailer { frames: vec![10, 20, 7000], index: Digest::of(b"index") };
        let bytes = trailer.to_bytes();
        let length = 7030 + bytes.len() as u64;
        let read = |bytes: &[u8]| {
            let start = Trailer::start(length, &bytes[bytes.len() - FIXED..])?;
            if start != 7030 {
                return Err(TrailerError::Damaged("another start"));
            }
            Trailer::parse(bytes, start)
        };
        assert_eq!(read(&bytes).unwrap(), trailer);
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            // The caller compares the digest with the index, so a changed digest is accepted here.
            assert!(
                read(&flipped).is_ok_and(|read| read.index != trailer.index) || read(&flipped).is_err(),
                "{bit}"
            );
        }
        assert_eq!(Trailer::start(length - 1, &bytes[..FIXED]), Err(TrailerError::Truncated));
    }
}
