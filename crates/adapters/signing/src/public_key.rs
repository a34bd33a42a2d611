//! Reads files with public keys and certificates.

use std::path::Path;

use farrier_core::provenance::{KeyAlgorithm, KeyError, PublicKey};
use kmod::{Certificate, CertificateError};

use super::{Result, SigningError, pem};

/// Supported sizes of RSA keys in bits. Smaller keys are weak, and ring does not support larger ones.
const RSA_BITS: std::ops::RangeInclusive<usize> = 2048..=4096;

/// Checks that farrier can sign with the private key of this public key. `from` is its source, for messages.
pub(super) fn check_usable(key: Result<PublicKey, KeyError>, from: &str) -> Result<PublicKey> {
    let key = key.map_err(|error| SigningError::unusable(from, error))?;
    match key.algorithm() {
        KeyAlgorithm::Rsa(bits) if !RSA_BITS.contains(&bits) => {
            Err(SigningError::unusable(from, format!("it is an RSA key of {bits} bits")))
        }
        _ => Ok(key),
    }
}

/// Reads a public key in PEM form. Blocks.
pub fn read_public_key(path: &Path) -> Result<PublicKey> {
    let what = "the public key";
    let read = |source| SigningError::Read { what, path: path.to_owned(), source };
    let text = std::fs::read_to_string(path).map_err(read)?;
    check_usable(PublicKey::any_from_pem(&text), &path.display().to_string())
}

/// Reads a certificate in PEM or DER form. Uses the first certificate of a PEM file. Blocks.
pub fn read_certificate(path: &Path) -> Result<Certificate> {
    let what = "the certificate";
    let bytes =
        std::fs::read(path).map_err(|source| SigningError::Read { what, path: path.to_owned(), source })?;
    let unreadable = |source| SigningError::Certificate(path.to_owned(), source);
    let text = std::str::from_utf8(&bytes).ok().filter(|text| text.contains("-----BEGIN "));
    let Some(text) = text else { return Certificate::parse(&bytes).map_err(unreadable) };
    let block = pem::blocks(text).into_iter().find(|block| block.label == "CERTIFICATE");
    let der = block.and_then(|block| block.bytes).ok_or_else(|| unreadable(CertificateError))?;
    Certificate::parse(&der).map_err(unreadable)
}
