//! Compression of module files.

use std::io::{self, Read};

use liblzma::stream::{CONCATENATED, Stream};

/// Memory limit of an xz stream in bytes. The kernel's own build uses a dictionary of 2 MiB.
const MAX_XZ_MEMORY: u64 = 128 << 20;

/// Compression of a module file, determined by its name like in `depmod` and the kernel's build.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "each variant is named after its format")]
pub enum Compression {
    /// Not compressed.
    None,
    Gzip,
    Xz,
    Zstd,
}

impl Compression {
    /// Returns the compression of a module file; `None` if the file does not have a module's name.
    pub fn of(name: &str) -> Option<Self> {
        [(".ko", Self::None), (".ko.gz", Self::Gzip), (".ko.xz", Self::Xz), (".ko.zst", Self::Zstd)]
            .into_iter()
            .find_map(|(end, compression)| name.ends_with(end).then_some(compression))
    }

    /// Whether a file of this compression is an xz stream whose integrity check the kernel's own decompressor (XZ Embedded) does not
    /// support. It supports CRC32, and streams without a check. Reads the start of the file.
    pub fn has_unsupported_xz_check(self, file: impl Read) -> io::Result<bool> {
        let mut start = Vec::new();
        file.take(8).read_to_end(&mut start)?;
        Ok(self == Self::Xz && start.get(7).is_some_and(|&check| check > 1))
    }

    /// Returns a reader of the decompressed file. Memory: at most 129 MiB. The caller has to limit the amount of output.
    pub fn reader<'r>(self, file: impl Read + 'r) -> io::Result<Box<dyn Read + 'r>> {
        Ok(match self {
            Self::None => Box::new(file),
            Self::Gzip => Box::new(flate2::read::MultiGzDecoder::new(file)),
            Self::Xz => {
                let stream = Stream::new_stream_decoder(MAX_XZ_MEMORY, CONCATENATED)?;
                Box::new(liblzma::read::XzDecoder::new_stream(file, stream))
            }
            Self::Zstd => Box::new(zstd::Decoder::new(file)?),
        })
    }
}
