//! Reads the signature at the end of a module, as far as possible without the kernel's keys. The PKCS#7 parser is a custom one: to
//! predict the kernel's verdict, it accepts the same messages as the kernel.
//!
//! The format is `<module> <PKCS#7 message> <12-byte record> ~Module signature appended~\n`. See `mod_check_sig` in
//! `kernel/module_signature.c` and `module_sig_check` in `kernel/module/signing.c`.

use std::fmt::Write as _;

use object::ReadRef;

use super::der::{
    CONTEXT_0, CONTEXT_1, CONTEXT_2, CONTEXT_3, Der, DerError, INTEGER, KEY_ID, OBJECT_ID, OCTET_STRING,
    SEQUENCE, SET,
};

/// Marker at the end of a signed module (`MODULE_SIG_STRING` in `include/linux/module_signature.h`).
pub(super) const MARKER: &[u8] = b"~Module signature appended~\n";
/// Size of `struct module_signature` in bytes.
pub(super) const RECORD: u64 = 12;
/// `PKEY_ID_PKCS7`, the only kind that the kernel accepts since Linux 4.3.
pub(super) const PKCS7: u8 = 2;
/// Bytes before the end of the file in which a misplaced marker is searched for.
const MARKER_SEARCH_RANGE: u64 = 4096;
/// Maximum size of a message in bytes. Messages of RSA keys have about 700, with certificates a few thousand.
const MAX_MESSAGE: u64 = 256 << 10;

/// Signature at the end of a module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Signature {
    /// The module is not signed.
    None,
    /// This number of bytes follows the marker, so the kernel treats the module as unsigned.
    TrailingBytes(u64),
    /// The kernel rejects the record or message, whether or not it enforces signatures: mostly with `EBADMSG`.
    Malformed(&'static str),
    /// The signature is not PKCS#7, but of the kind with this number: `ENOPKG`.
    Unsupported(u8),
    /// The signature is well-formed; only the kernel's keys can tell whether it is valid.
    By(Signer),
    /// The record is correct, but the message uses an encoding that this parser does not support.
    Unread(&'static str),
}

/// Signer as `modinfo` prints it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signer {
    /// Common name of the certificate's issuer, or else its organization.
    pub name: Option<String>,
    /// Serial number of the certificate, or identifier of the key: `6A:0F:...`.
    pub key_id: String,
    /// Digest, for example `sha256`.
    pub hash: Option<&'static str>,
}

/// Reads the signature at the end of a module. Also returns the length of the object without the signature. Memory: the PKCS#7
/// message, which has at most 256 KiB, and at most three times as much for the parsed facts.
pub(super) fn read<'d, R: ReadRef<'d>>(data: R, length: u64) -> (Signature, u64) {
    let marker = MARKER.len() as u64;
    let Some(body) = length.checked_sub(marker) else { return (Signature::None, length) };
    if data.read_bytes_at(body, marker).ok() != Some(MARKER) {
        return (find_misplaced_marker(data, length), length);
    }
    let Some(record_start) = body.checked_sub(RECORD).filter(|&start| start > 0) else {
        return (Signature::Malformed("is shorter than its own record"), body);
    };
    let Some(&[algo, hash, kind, signer, key, pad1, pad2, pad3, a, b, c, d]) =
        data.read_bytes_at(record_start, RECORD).ok()
    else {
        return (Signature::Malformed("has a record that cannot be read"), body);
    };
    let size = u64::from(u32::from_be_bytes([a, b, c, d]));
    // The following checks are in the kernel's order.
    let Some(start) = record_start.checked_sub(size).filter(|&start| start > 0) else {
        return (Signature::Malformed("claims more bytes than the file has"), body);
    };
    if kind != PKCS7 {
        return (Signature::Unsupported(kind), body);
    }
    if [algo, hash, signer, key, pad1, pad2, pad3] != [0; 7] {
        return (Signature::Malformed("has a record with unexpected non-zero fields"), body);
    }
    if size > MAX_MESSAGE {
        return (Signature::Unread("has more bytes than any known one"), start);
    }
    let signature = match data.read_bytes_at(start, size).map(parse_message) {
        Ok(Ok(signer)) => Signature::By(signer),
        Ok(Err(DerError::Invalid)) | Err(()) => {
            Signature::Malformed("is not a PKCS#7 message that the kernel accepts")
        }
        Ok(Err(DerError::Unsupported(problem))) => Signature::Unread(problem),
    };
    (signature, start)
}

/// Searches for a marker that is not at the end of the file.
fn find_misplaced_marker<'d, R: ReadRef<'d>>(data: R, length: u64) -> Signature {
    let size = length.min(MARKER_SEARCH_RANGE);
    let Ok(tail) = data.read_bytes_at(length - size, size) else { return Signature::None };
    match tail.windows(MARKER.len()).rposition(|window| window == MARKER) {
        Some(index) => Signature::TrailingBytes((tail.len() - index - MARKER.len()) as u64),
        None => Signature::None,
    }
}

/// 1.2.840.113549.1.7.2
pub(super) const SIGNED_DATA: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x07, 0x02];
/// 1.2.840.113549.1.7.1
const DATA: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x07, 0x01];
/// 2.5.4.3 and 2.5.4.10
const COMMON_NAME: &[u8] = &[0x55, 0x04, 0x03];
const ORGANIZATION: &[u8] = &[0x55, 0x04, 0x0a];
/// 2.16.840.1.101.3.4.2, NIST's digests.
pub(super) const NIST_DIGESTS: &[u8] = &[0x60, 0x86, 0x48, 0x01, 0x65, 0x03, 0x04, 0x02];
/// 1.3.14.3.2.26
const SHA1: &[u8] = &[0x2b, 0x0e, 0x03, 0x02, 0x1a];

/// Reads a PKCS#7 `SignedData` (RFC 5652, section 5), and returns its first signer. Follows `pkcs7.asn1` and
/// `pkcs7_parser.c` in `crypto/asymmetric_keys`, and the requirements of `pkcs7_verify` for a module's message: the signed data is
/// not in it, and no signer signs attributes.
fn parse_message(bytes: &[u8]) -> Result<Signer, DerError> {
    let mut content_info = Der::new(bytes).open(SEQUENCE)?;
    if content_info.expect(OBJECT_ID)? != SIGNED_DATA {
        return Err(DerError::Invalid);
    }
    let mut data = content_info.open(CONTEXT_0)?.open(SEQUENCE)?;
    let version = data.expect(INTEGER)?;
    if !matches!(version, [1 | 3]) {
        return Err(DerError::Invalid);
    }
    let mut digests = match data.element()? {
        (SET | SEQUENCE, digests) => Der::new(digests),
        _ => return Err(DerError::Invalid),
    };
    while !digests.is_empty() {
        parse_algorithm(&mut digests)?;
    }
    let mut content = data.open(SEQUENCE)?;
    if content.expect(OBJECT_ID)? != DATA || !content.is_empty() {
        return Err(DerError::Invalid);
    }
    let mut signers = loop {
        match data.element()? {
            // Certificates and revocation lists.
            (CONTEXT_0 | CONTEXT_1 | CONTEXT_2 | CONTEXT_3, _) => {}
            (SET | SEQUENCE, signers) => break Der::new(signers),
            _ => return Err(DerError::Invalid),
        }
    };
    if !data.is_empty() || !content_info.is_empty() {
        return Err(DerError::Invalid);
    }
    // Fails for a message without a signer.
    let first = parse_signer(&mut signers, version)?;
    while !signers.is_empty() {
        parse_signer(&mut signers, version)?;
    }
    Ok(first)
}

/// Reads a `SignerInfo` of a message with this version.
fn parse_signer(signers: &mut Der<'_>, message_version: &[u8]) -> Result<Signer, DerError> {
    let mut signer = signers.open(SEQUENCE)?;
    if !matches!((signer.expect(INTEGER)?, message_version), ([1], [1]) | ([3], [3])) {
        return Err(DerError::Invalid);
    }
    let (name, key_id) = match signer.element()? {
        (SEQUENCE, identity) => {
            let mut identity = Der::new(identity);
            let issuer_and_serial =
                (common_name(identity.expect(SEQUENCE)?)?, serial_id(identity.expect(INTEGER)?));
            if !identity.is_empty() {
                return Err(DerError::Invalid);
            }
            issuer_and_serial
        }
        (KEY_ID, octets) => (None, key_id(octets)),
        _ => return Err(DerError::Invalid),
    };
    let hash = digest_name(parse_algorithm(&mut signer)?);
    // Fails for signed attributes, which have another tag. The kernel refuses them.
    parse_algorithm(&mut signer)?;
    signer.expect(OCTET_STRING)?;
    if !signer.is_empty() {
        // Unsigned attributes.
        signer.element()?;
    }
    if signer.is_empty() { Ok(Signer { name, key_id, hash }) } else { Err(DerError::Invalid) }
}

/// Reads an `AlgorithmIdentifier`, and returns its object identifier.
fn parse_algorithm<'a>(der: &mut Der<'a>) -> Result<&'a [u8], DerError> {
    let mut algorithm = der.open(SEQUENCE)?;
    let id = algorithm.expect(OBJECT_ID)?;
    if !algorithm.is_empty() {
        algorithm.element()?;
    }
    if algorithm.is_empty() { Ok(id) } else { Err(DerError::Invalid) }
}

/// Formats a certificate's serial number as `modinfo` prints it.
pub(super) fn serial_id(serial: &[u8]) -> String {
    key_id(serial.strip_prefix(&[0]).filter(|rest| !rest.is_empty()).unwrap_or(serial))
}

/// Formats octets as `modinfo` prints them: `6A:0F:...`.
fn key_id(octets: &[u8]) -> String {
    let mut text = String::with_capacity(3 * octets.len());
    for octet in octets {
        let colon = if text.is_empty() { "" } else { ":" };
        // Writing to a string cannot fail.
        let _ = write!(text, "{colon}{octet:02X}");
    }
    text
}

/// Returns the common name, or else the organization, of a distinguished name.
fn common_name(issuer: &[u8]) -> Result<Option<String>, DerError> {
    let (mut issuer, mut organization) = (Der::new(issuer), None);
    while !issuer.is_empty() {
        let mut part = issuer.open(SET)?.open(SEQUENCE)?;
        let kind = part.expect(OBJECT_ID)?;
        let (_, value) = part.element()?;
        let text = || String::from_utf8_lossy(value).into_owned();
        match kind {
            COMMON_NAME => return Ok(Some(text())),
            ORGANIZATION => organization = Some(text()),
            _ => {}
        }
    }
    Ok(organization)
}

/// Returns the name of a digest algorithm as `modinfo` prints it.
fn digest_name(id: &[u8]) -> Option<&'static str> {
    if id == SHA1 {
        return Some("sha1");
    }
    match id.strip_prefix(NIST_DIGESTS)? {
        [1] => Some("sha256"),
        [2] => Some("sha384"),
        [3] => Some("sha512"),
        [4] => Some("sha224"),
        [8] => Some("sha3-256"),
        [9] => Some("sha3-384"),
        [10] => Some("sha3-512"),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
