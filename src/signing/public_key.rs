//! Adapter: the public half of a key, and what it says to signatures.

use std::{fmt, path::Path};

use p256::ecdsa::signature::hazmat::PrehashVerifier as _;
use ring::signature::{
    RSA_PKCS1_2048_8192_SHA256, RSA_PKCS1_2048_8192_SHA384, RSA_PKCS1_2048_8192_SHA512, UnparsedPublicKey,
};

use super::{SigningError, SigningError::Certificate as Unreadable, pem};
use crate::{
    image::Digest,
    kmod::{
        Certificate, CertificateError, SignatureHash,
        der::{BIT_STRING, Der, INTEGER, NULL, OBJECT_ID, SEQUENCE, encode},
    },
};

/// 1.2.840.113549.1.1.1
const RSA: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01, 0x01];
/// 1.2.840.10045.2.1
const EC: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01];
/// 1.2.840.10045.3.1.7
const P256: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07];
/// 1.3.132.0.34
const P384: &[u8] = &[0x2b, 0x81, 0x04, 0x00, 0x22];
/// Bits of RSA keys that sign. Smaller ones are weak, and ring makes no larger ones.
const RSA_BITS: std::ops::RangeInclusive<usize> = 2048..=4096;

/// What a key signs with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyAlgorithm {
    /// RSA with PKCS#1 v1.5 padding.
    Rsa {
        /// Of the modulus.
        bits: usize,
    },
    /// ECDSA on NIST's P-256.
    P256,
    /// ECDSA on NIST's P-384.
    P384,
}

impl fmt::Display for KeyAlgorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rsa { bits } => write!(f, "RSA-{bits}"),
            Self::P256 => f.write_str("ECDSA P-256"),
            Self::P384 => f.write_str("ECDSA P-384"),
        }
    }
}

/// The public half of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublicKey {
    der: Vec<u8>,
    /// What stands in the bit string: an `RSAPublicKey`, or a point.
    key: Vec<u8>,
    algorithm: KeyAlgorithm,
}

impl PublicKey {
    /// Reads a `SubjectPublicKeyInfo` in DER form; `from` says for messages where it comes from.
    pub fn from_der(der: &[u8], from: &str) -> Result<Self, SigningError> {
        let cannot = |why: String| SigningError::Kind { from: from.to_owned(), why };
        let Parts { algorithm, parameters, key } =
            parts(der).ok_or_else(|| cannot("it is no public key".to_owned()))?;
        let algorithm = match (algorithm, parameters) {
            (RSA, _) => {
                let bits = modulus_bits(key).ok_or_else(|| cannot("it is no RSA key".to_owned()))?;
                if !RSA_BITS.contains(&bits) {
                    return Err(cannot(format!("it is an RSA key of {bits} bits")));
                }
                KeyAlgorithm::Rsa { bits }
            }
            (EC, Some(P256)) => KeyAlgorithm::P256,
            (EC, Some(P384)) => KeyAlgorithm::P384,
            (EC, _) => return Err(cannot("it is an elliptic curve key on another curve".to_owned())),
            _ => return Err(cannot("it is neither an RSA nor an ECDSA key".to_owned())),
        };
        Ok(Self { der: der.to_vec(), key: key.to_vec(), algorithm })
    }

    /// Reads a file with a public key in PEM form. Blocks.
    pub fn from_file(path: &Path) -> Result<Self, SigningError> {
        let what = "the public key";
        let read = |source| SigningError::Read { what, path: path.to_owned(), source };
        let text = std::fs::read_to_string(path).map_err(read)?;
        Self::from_pem(&text, &path.display().to_string())
    }

    /// Reads a public key in PEM form.
    pub fn from_pem(text: &str, from: &str) -> Result<Self, SigningError> {
        let block = pem::blocks(text).into_iter().find(|block| block.label == "PUBLIC KEY");
        let bytes = block.and_then(|block| block.bytes);
        let none = || SigningError::Kind {
            from: from.to_owned(),
            why: "it holds no public key in PEM form".to_owned(),
        };
        Self::from_der(&bytes.ok_or_else(none)?, from)
    }

    pub(super) fn of_rsa(key: &[u8], from: &str) -> Result<Self, SigningError> {
        let algorithm = encode(SEQUENCE, &[&encode(OBJECT_ID, &[RSA]), &encode(NULL, &[])]);
        Self::from_der(&encode(SEQUENCE, &[&algorithm, &encode(BIT_STRING, &[&[0], key])]), from)
    }

    pub(super) fn of_point(curve: KeyAlgorithm, point: &[u8], from: &str) -> Result<Self, SigningError> {
        let curve = if curve == KeyAlgorithm::P256 { P256 } else { P384 };
        let algorithm = encode(SEQUENCE, &[&encode(OBJECT_ID, &[EC]), &encode(OBJECT_ID, &[curve])]);
        Self::from_der(&encode(SEQUENCE, &[&algorithm, &encode(BIT_STRING, &[&[0], point])]), from)
    }

    /// `SubjectPublicKeyInfo` in DER form.
    pub fn der(&self) -> &[u8] {
        &self.der
    }

    /// The same in PEM form.
    pub fn to_pem(&self) -> String {
        pem::encode("PUBLIC KEY", &self.der)
    }

    /// What it verifies.
    pub fn algorithm(&self) -> KeyAlgorithm {
        self.algorithm
    }

    /// sha256 over its DER.
    pub fn fingerprint(&self) -> Digest {
        Digest::of(&self.der)
    }

    /// Is it a signature of the content by this key?
    pub fn verify(&self, hash: SignatureHash, content: &[u8], signature: &[u8]) -> bool {
        match self.algorithm {
            KeyAlgorithm::Rsa { .. } => {
                let algorithm = match hash {
                    SignatureHash::Sha256 => &RSA_PKCS1_2048_8192_SHA256,
                    SignatureHash::Sha384 => &RSA_PKCS1_2048_8192_SHA384,
                    SignatureHash::Sha512 => &RSA_PKCS1_2048_8192_SHA512,
                };
                UnparsedPublicKey::new(algorithm, &self.key).verify(content, signature).is_ok()
            }
            KeyAlgorithm::P256 => {
                let key = p256::ecdsa::VerifyingKey::from_sec1_bytes(&self.key);
                let signature = p256::ecdsa::Signature::from_der(signature);
                key.ok().zip(signature.ok()).is_some_and(|(key, signature)| {
                    key.verify_prehash(&hash.digest(content), &signature).is_ok()
                })
            }
            KeyAlgorithm::P384 => {
                let key = p384::ecdsa::VerifyingKey::from_sec1_bytes(&self.key);
                let signature = p384::ecdsa::Signature::from_der(signature);
                key.ok().zip(signature.ok()).is_some_and(|(key, signature)| {
                    key.verify_prehash(&hash.digest(content), &signature).is_ok()
                })
            }
        }
    }

    /// A signature whose two numbers stand side by side, as PKCS#11 makes it, in the form that is verified.
    pub(super) fn verifiable(&self, signature: &[u8]) -> Option<Vec<u8>> {
        Some(match self.algorithm {
            KeyAlgorithm::Rsa { .. } => return None,
            KeyAlgorithm::P256 => {
                p256::ecdsa::Signature::from_slice(signature).ok()?.to_der().as_bytes().to_vec()
            }
            KeyAlgorithm::P384 => {
                p384::ecdsa::Signature::from_slice(signature).ok()?.to_der().as_bytes().to_vec()
            }
        })
    }
}

/// Reads a certificate file, PEM or DER; of a PEM file with several the first counts. Blocks.
pub fn read_certificate(path: &Path) -> Result<Certificate, SigningError> {
    let what = "the certificate";
    let bytes =
        std::fs::read(path).map_err(|source| SigningError::Read { what, path: path.to_owned(), source })?;
    let unreadable = |source| Unreadable { what, path: path.to_owned(), source };
    let text = std::str::from_utf8(&bytes).ok().filter(|text| text.contains("-----BEGIN "));
    let Some(text) = text else { return Certificate::parse(&bytes).map_err(unreadable) };
    let block = pem::blocks(text).into_iter().find(|block| block.label == "CERTIFICATE");
    let der = block.and_then(|block| block.bytes).ok_or_else(|| unreadable(CertificateError))?;
    Certificate::parse(&der).map_err(unreadable)
}

/// What a `SubjectPublicKeyInfo` holds.
struct Parts<'a> {
    algorithm: &'a [u8],
    /// The algorithm's parameter, where that is an object identifier.
    parameters: Option<&'a [u8]>,
    key: &'a [u8],
}

fn parts(der: &[u8]) -> Option<Parts<'_>> {
    let mut info = Der::new(der).open(SEQUENCE).ok()?;
    let mut identifier = info.open(SEQUENCE).ok()?;
    let algorithm = identifier.expect(OBJECT_ID).ok()?;
    let parameters = identifier.expect(OBJECT_ID).ok();
    let key = info.expect(BIT_STRING).ok()?.strip_prefix(&[0])?;
    Some(Parts { algorithm, parameters, key })
}

fn modulus_bits(key: &[u8]) -> Option<usize> {
    let modulus = Der::new(key).open(SEQUENCE).ok()?.expect(INTEGER).ok()?;
    let zeros = modulus.iter().take_while(|byte| **byte == 0).count();
    let first = modulus.get(zeros)?;
    Some((modulus.len() - zeros) * 8 - first.leading_zeros() as usize)
}
