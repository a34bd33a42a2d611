//! Signs the modules of a payload directory in place.

use std::{
    io::{self, Read as _, Write},
    path::Path,
};

use farrier_signing::{ModuleSigner, Signer};
use fs_err as fs;
use kmod::{self, Compression, SignatureHash, SigningRule};
use liblzma::stream::{Check, Filters, LzmaOptions, Stream};

use super::{
    decompression::{DecompressionBudget, Meter, Metered},
    error::{PayloadError, Result},
    modules::files,
};

/// Dictionary size that the kernel's own decompressor supports (`scripts/Makefile.modinst`).
const XZ_DICTIONARY: u32 = 2 << 20;
/// Default levels of gzip, xz and zstd, as used by the kernel's `make modules_install`.
const GZIP_LEVEL: u32 = 6;
const XZ_LEVEL: u32 = 6;
const ZSTD_LEVEL: i32 = 3;

/// Parameters of module signing.
#[derive(Debug)]
pub struct ModuleSigning<'a> {
    pub certificate: &'a ModuleSigner,
    /// Key of the certificate.
    pub signer: &'a Signer,
    /// Digest algorithm that the kernel accepts.
    pub hash: SignatureHash,
    /// Rule for existing signatures.
    pub rule: &'a SigningRule,
}

/// Signs all modules (`*.ko`, plain or compressed) below a directory in place, each atomically. Compressed modules are compressed
/// again, deterministically. Files that are not modules stay unchanged. Returns the number of signed modules. Blocks; needs twice
/// the memory of the largest module.
pub fn sign_modules(
    payload: &Path,
    signing: &ModuleSigning<'_>,
    budget: &DecompressionBudget,
) -> Result<usize> {
    let mut signed = 0;
    for (path, compression) in files(payload)? {
        let name = path.strip_prefix(payload).unwrap_or(&path);
        if sign_file(&path, name, compression, signing, budget)? {
            signed += 1;
        }
    }
    Ok(signed)
}

fn sign_file(
    path: &Path,
    name: &Path,
    compression: Compression,
    signing: &ModuleSigning<'_>,
    budget: &DecompressionBudget,
) -> Result<bool> {
    // The check has already refused modules that do not decompress.
    let Ok(mut file) = budget.open(path, name, compression)? else { return Ok(false) };
    let mut module = Vec::new();
    file.read_to_end(&mut module)?;
    let (bare, signature) = kmod::without_signature(&module);
    if signing.rule.keeps(&signature) {
        return Ok(false);
    }
    let trailer = signing.certificate.trailer(signing.signer, signing.hash, bare);
    let trailer = trailer.map_err(|source| PayloadError::Signing(name.to_owned(), source))?;
    let length = bare.len();
    module.truncate(length);
    module.extend(trailer);
    // An encoder wraps the error of the decompression budget as an error of its writer.
    replace(path, compression, &module, budget.meter(name))
        .map_err(|error| error.downcast().unwrap_or_else(PayloadError::Io))?;
    Ok(true)
}

/// Writes a temporary file in the same directory and renames it, so that the file is never incomplete.
fn replace(path: &Path, compression: Compression, module: &[u8], meter: Meter<'_>) -> io::Result<()> {
    let directory = path.parent().unwrap_or(Path::new("."));
    let mode = fs::metadata(path)?.permissions();
    let mut file = tempfile::NamedTempFile::new_in(directory)?;
    compress(compression, module, Metered { meter, writer: file.as_file_mut() })?;
    file.as_file().set_permissions(mode)?;
    file.persist(path)?;
    Ok(())
}

fn compress(compression: Compression, module: &[u8], mut file: impl Write) -> io::Result<()> {
    match compression {
        Compression::None => file.write_all(module),
        Compression::Gzip => {
            let level = flate2::Compression::new(GZIP_LEVEL);
            let mut encoder = flate2::GzBuilder::new().mtime(0).write(&mut file, level);
            encoder.write_all(module)?;
            encoder.finish().map(drop)
        }
        Compression::Xz => {
            let mut options = LzmaOptions::new_preset(XZ_LEVEL)?;
            options.dict_size(XZ_DICTIONARY);
            let mut filters = Filters::new();
            filters.lzma2(&options);
            // The kernel's decompressor supports no other integrity check.
            let stream = Stream::new_stream_encoder(&filters, Check::Crc32)?;
            let mut encoder = liblzma::write::XzEncoder::new_stream(&mut file, stream);
            encoder.write_all(module)?;
            encoder.finish().map(drop)
        }
        Compression::Zstd => {
            let mut encoder = zstd::Encoder::new(&mut file, ZSTD_LEVEL)?;
            encoder.set_pledged_src_size(Some(module.len() as u64))?;
            encoder.include_checksum(true)?;
            encoder.write_all(module)?;
            encoder.finish().map(drop)
        }
    }
}

#[cfg(test)]
#[path = "sign_tests.rs"]
mod tests;
