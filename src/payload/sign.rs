//! Adapter: signs the modules of a payload directory in place.

use std::{
    io::{self, Read as _, Write},
    path::Path,
};

use fs_err as fs;
use liblzma::stream::{Check, Filters, LzmaOptions, Stream};

use super::{
    decompression::{DecompressionBudget, Meter, Metered},
    error::{PayloadError, Result},
    modules::{Compression, files},
};
use crate::{
    kmod::{self, SignatureHash, SigningRule},
    signing::{ModuleSigner, Signer},
};

/// The dictionary that the kernel's own decompressor is made for (`scripts/Makefile.modinst`).
const XZ_DICTIONARY: u32 = 2 << 20;
/// The levels that gzip, xz and zstd take by themselves, as the kernel's own `make modules_install` calls them.
const GZIP_LEVEL: u32 = 6;
const XZ_LEVEL: u32 = 6;
const ZSTD_LEVEL: i32 = 3;

/// How modules are to be signed.
#[derive(Debug)]
pub struct ModuleSigning<'a> {
    /// The certificate.
    pub certificate: &'a ModuleSigner,
    /// Its key.
    pub signer: &'a Signer,
    /// The digest that the kernel takes.
    pub hash: SignatureHash,
    /// Which signatures are kept.
    pub rule: &'a SigningRule,
}

/// Signs all modules (`*.ko`, plain or compressed) below a directory, in place, each whole or not at all. Compressed ones
/// are compressed again, always in the same way. What is no module stays as it is. Returns how many were signed. Blocks; memory is twice the
/// largest module.
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
    // The check has refused what does not decompress.
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
    replace(path, compression, &module, budget.meter(name)).map_err(of_budget)?;
    Ok(true)
}

/// Writes beside the file and renames, so that it is never half there.
fn replace(path: &Path, compression: Compression, module: &[u8], meter: Meter<'_>) -> io::Result<()> {
    let directory = path.parent().unwrap_or(Path::new("."));
    let mode = fs::metadata(path)?.permissions();
    let mut file = tempfile::NamedTempFile::new_in(directory)?;
    compress(compression, module, Metered { meter, writer: file.as_file_mut() })?;
    file.as_file().set_permissions(mode)?;
    file.persist(path)?;
    Ok(())
}

/// What ended the work inside an encoder, which passes errors of its writer on.
fn of_budget(error: io::Error) -> PayloadError {
    error.downcast().unwrap_or_else(PayloadError::Io)
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
            // The kernel's decompressor knows no other check.
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
