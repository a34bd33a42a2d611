//! Decompresses the legacy format of LZ4 (`lz4 -l`), the only one that the kernel's build uses: blocks of at most 8 MiB, each after
//! its compressed length (`lib/decompress_unlz4.c`).

use std::{
    io::{self, Read},
    ops::Range,
};

use lz4_flex::block::{decompress_into, get_maximum_output_size};

/// First bytes of the format.
pub(super) const MAGIC: &[u8] = b"\x02\x21\x4c\x18";
/// Maximum size of a decompressed block in bytes.
const MAX_BLOCK: usize = 8 << 20;

/// Reader of the decompressed bytes. It ends at a block length that is too large, such as the size of the kernel in the last
/// four bytes of a bzImage's payload.
pub(super) struct Lz4Reader<R> {
    compressed: R,
    /// Buffer for one block. Not cleared between blocks, because each may have only a few bytes.
    block: Vec<u8>,
    /// Range of the decompressed bytes that were not read.
    unread: Range<usize>,
}

impl<R: Read> Lz4Reader<R> {
    pub(super) fn new(mut compressed: R) -> io::Result<Self> {
        let mut magic = [0; MAGIC.len()];
        compressed.read_exact(&mut magic)?;
        Ok(Self { compressed, block: Vec::new(), unread: 0..0 })
    }

    /// Decompresses the next block; an empty one at the end.
    fn next_block(&mut self) -> io::Result<()> {
        let mut length = Vec::new();
        self.compressed.by_ref().take(4).read_to_end(&mut length)?;
        let Some(length) = length.first_chunk().map(|bytes| u32::from_le_bytes(*bytes)) else {
            return Ok(());
        };
        if usize::try_from(length).is_ok_and(|length| length > get_maximum_output_size(MAX_BLOCK)) {
            return Ok(());
        }
        let mut bytes = Vec::new();
        if self.compressed.by_ref().take(length.into()).read_to_end(&mut bytes)? == 0 {
            return Ok(());
        }
        self.block.resize(MAX_BLOCK, 0);
        let size = decompress_into(&bytes, &mut self.block)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        self.unread = 0..size;
        Ok(())
    }
}

impl<R: Read> Read for Lz4Reader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.unread.is_empty() {
            self.next_block()?;
        }
        let mut unread = self.block.get(self.unread.clone()).unwrap_or_default();
        let count = unread.read(buffer)?;
        self.unread.start += count;
        Ok(count)
    }
}
