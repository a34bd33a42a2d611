//! Locates the kernel in a bootable image and decompresses the kernel.
//!
//! x86's bzImage is described in `Documentation/arch/x86/boot.rst`, arm64's Image in
//! `Documentation/arch/arm64/booting.rst`, and the EFI zboot image in `drivers/firmware/efi/libstub/zboot-header.S`.
//! This is a custom parser: each header has only three relevant numbers, and the streams are untrusted, so each
//! decompressor needs a limit.

use std::io::{self, Read, Seek, SeekFrom, Write};

use liblzma::stream::Stream;

use super::{
    BtfError,
    btf::u32_at,
    lz4::{self, Lz4Reader},
};

/// Number of bytes at the start of an image from which its format is recognized.
const MAX_HEADER: u64 = 1024;
/// Memory limit for an xz or lzma stream in bytes. The kernel's own build uses a dictionary of at most 128 MiB
/// (`scripts/xz_wrap.sh`).
const MAX_XZ_MEMORY: u64 = 160 << 20;
/// Maximum window of a zstd stream, as a power of two. The kernel's build compresses at level 22, whose window is 128
/// MiB. The decoder touches only as much of the window as the kernel is long.
const MAX_ZSTD_WINDOW: u32 = 27;
/// Maximum size of a decompressed kernel in bytes.
const MAX_KERNEL: u64 = 2 << 30;
/// First boot protocol version that contains the payload's position (Linux 2.6.26).
const PAYLOAD_PROTOCOL: u16 = 0x0208;

/// Position of a kernel in its bootable image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Payload {
    /// Offset of the first byte.
    pub offset: u64,
    /// Length in bytes; may include a few bytes after the compressed kernel.
    pub length: u64,
    /// Compression of the kernel.
    pub method: Method,
}

/// Compression of a kernel (`KERNEL_GZIP` and related options in `init/Kconfig`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "each variant is named after its format")]
pub enum Method {
    /// Not compressed.
    Plain,
    Gzip,
    Xz,
    Zstd,
    Lzma,
    Lz4,
    Bzip2,
    Lzo,
}

/// Result of reading a kernel image.
pub(super) type Result<T, E = VmlinuzError> = std::result::Result<T, E>;

/// Reason why a file cannot be read as a kernel image.
#[derive(Debug, thiserror::Error)]
pub enum VmlinuzError {
    /// The file cannot be read.
    #[error("cannot read the kernel image")]
    Read(#[from] io::Error),
    /// The file has an unknown format.
    #[error("the file is neither a bzImage, an arm64 Image, an EFI zboot image nor an ELF vmlinux")]
    UnknownFormat,
    /// The header contradicts the file.
    #[error("the kernel image is damaged: {0}")]
    Damaged(&'static str),
    /// The kernel is compressed with a method that this crate does not support.
    #[error("the kernel in the image is compressed with {0}, which farrier does not unpack")]
    Method(&'static str),
    /// The kernel's type information cannot be read.
    #[error("cannot read the type information (BTF) of the kernel image")]
    Btf(#[from] BtfError),
    /// The kernel is larger than any known kernel.
    #[error("the kernel in the image has more than {} MiB", .0 >> 20)]
    TooLarge(u64),
}

impl VmlinuzError {
    /// Advice on how to fix the error.
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::Read(_) | Self::Damaged(_) | Self::TooLarge(_) => {
                "the file is incomplete or damaged: fetch it again"
            }
            Self::Btf(_) => "the image is damaged, or its kernel is newer than farrier supports",
            Self::UnknownFormat => "give the kernel's vmlinuz, Image or vmlinux, as /boot has it",
            Self::Method(_) => {
                "give the plain vmlinux instead (the kernel's scripts/extract-vmlinux makes it)"
            }
        }
    }
}

/// Locates the kernel in a bootable image.
pub fn locate(image: &mut (impl Read + Seek)) -> Result<Payload> {
    let length = image.seek(SeekFrom::End(0))?;
    let start = read_at(image, 0, MAX_HEADER)?;
    let is_at = |at: usize, magic: &[u8]| start.get(at..).is_some_and(|rest| rest.starts_with(magic));
    if is_at(0, b"\x7fELF") {
        return Ok(Payload { offset: 0, length, method: Method::Plain });
    }
    // The zboot image and the bzImage both start with `MZ`, as EFI programs do.
    if is_at(0, b"MZ") && is_at(4, b"zimg") {
        return zboot(image, &start, length);
    }
    if is_at(0x202, b"HdrS") {
        return bz_image(image, &start, length);
    }
    if is_at(56, b"ARM\x64") {
        return Ok(Payload { offset: 0, length, method: Method::Plain });
    }
    match Method::of(&start) {
        Some(method) => Ok(Payload { offset: 0, length, method }),
        None => Err(VmlinuzError::UnknownFormat),
    }
}

fn bz_image(image: &mut (impl Read + Seek), start: &[u8], length: u64) -> Result<Payload> {
    let byte = |offset: usize| start.get(offset).copied();
    let error = VmlinuzError::Damaged("it ends in its header");
    let (Some(sectors), Some(low), Some(high)) = (byte(0x1f1), byte(0x206), byte(0x207)) else {
        return Err(error);
    };
    if u16::from_le_bytes([low, high]) < PAYLOAD_PROTOCOL {
        return Err(VmlinuzError::Damaged("its boot protocol is older than 2.08"));
    }
    // For old boot loaders, 0 means 4 sectors. The number does not include the boot sector.
    let sectors = if sectors == 0 { 4 } else { u64::from(sectors) };
    let (Some(offset), Some(size)) = (u32_at(start, 0x248), u32_at(start, 0x24c)) else { return Err(error) };
    let offset = (sectors + 1) * 512 + u64::from(offset);
    compressed(image, offset, u64::from(size), length)
}

fn zboot(image: &mut (impl Read + Seek), start: &[u8], length: u64) -> Result<Payload> {
    let (Some(offset), Some(size)) = (u32_at(start, 8), u32_at(start, 12)) else {
        return Err(VmlinuzError::Damaged("it ends in its header"));
    };
    compressed(image, u64::from(offset), u64::from(size), length)
}

fn compressed(image: &mut (impl Read + Seek), offset: u64, size: u64, length: u64) -> Result<Payload> {
    if offset.checked_add(size).is_none_or(|end| end > length) {
        return Err(VmlinuzError::Damaged("its payload lies outside the file"));
    }
    let method = Method::of(&read_at(image, offset, 16)?)
        .ok_or(VmlinuzError::Damaged("its payload has no known compression"))?;
    Ok(Payload { offset, length: size, method })
}

impl Method {
    /// Recognizes the method by the first bytes (`compressed_formats` in `lib/decompress.c`).
    pub(super) fn of(start: &[u8]) -> Option<Self> {
        const MAGIC: [(&[u8], Method); 8] = [
            (b"\x7fELF", Method::Plain),
            (b"\x1f\x8b", Method::Gzip),
            (b"\xfd7zXZ\0", Method::Xz),
            (b"\x28\xb5\x2f\xfd", Method::Zstd),
            (b"\x5d\0\0", Method::Lzma),
            (lz4::MAGIC, Method::Lz4),
            (b"BZh", Method::Bzip2),
            (b"\x89LZO", Method::Lzo),
        ];
        MAGIC.iter().find(|(magic, _)| start.starts_with(magic)).map(|&(_, method)| method)
    }
}

/// Returns a reader of the decompressed kernel. The reader ends where the compressed stream ends, and ignores later bytes of
/// the payload, such as the kernel's size.
///
/// Memory: at most 161 MiB, regardless of the sizes in the stream. The caller has to limit the amount of output.
pub fn kernel<'r>(image: &'r mut (impl Read + Seek), payload: &Payload) -> Result<Box<dyn Read + 'r>> {
    image.seek(SeekFrom::Start(payload.offset))?;
    let bytes = io::BufReader::with_capacity(128 << 10, image.take(payload.length));
    let lzma = |stream: Result<Stream, _>| stream.map_err(io::Error::from);
    Ok(match payload.method {
        Method::Plain => Box::new(bytes),
        Method::Gzip => Box::new(flate2::bufread::GzDecoder::new(bytes)),
        Method::Xz => {
            let stream = lzma(Stream::new_stream_decoder(MAX_XZ_MEMORY, 0))?;
            Box::new(liblzma::bufread::XzDecoder::new_stream(bytes, stream))
        }
        Method::Lzma => {
            let stream = lzma(Stream::new_lzma_decoder(MAX_XZ_MEMORY))?;
            Box::new(liblzma::bufread::XzDecoder::new_stream(bytes, stream))
        }
        Method::Zstd => {
            let mut decoder = zstd::Decoder::with_buffer(bytes)?.single_frame();
            decoder.window_log_max(MAX_ZSTD_WINDOW)?;
            Box::new(decoder)
        }
        Method::Lz4 => Box::new(Lz4Reader::new(bytes)?),
        Method::Bzip2 => return Err(VmlinuzError::Method("bzip2")),
        Method::Lzo => return Err(VmlinuzError::Method("lzo")),
    })
}

/// Writes the decompressed kernel of a bootable image. Fails for a kernel of more than 2 GiB. Debian's kernels have 60 MiB, and a
/// kernel with every debugging option has 300 MiB.
pub fn unpack(reader: &mut dyn Read, out: &mut dyn Write) -> Result<()> {
    let count = io::copy(&mut reader.take(MAX_KERNEL + 1), out)?;
    if count > MAX_KERNEL { Err(VmlinuzError::TooLarge(MAX_KERNEL)) } else { Ok(()) }
}

fn read_at(file: &mut (impl Read + Seek), offset: u64, count: u64) -> io::Result<Vec<u8>> {
    file.seek(SeekFrom::Start(offset))?;
    let mut bytes = Vec::new();
    file.take(count).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
#[path = "vmlinuz_tests.rs"]
mod tests;
