//! Pure: public keys that signatures of images are checked with: ECDSA over P-256 and RSA, sha256, as `cosign` has them.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use ring::signature::{
    ECDSA_P256_SHA256_ASN1, RSA_PKCS1_2048_8192_SHA256, UnparsedPublicKey, VerificationAlgorithm,
};

use crate::image::Digest;

/// OID 1.2.840.113549.1.1.1 (RFC 8017).
const RSA: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01, 0x01];
/// OID 1.2.840.10045.2.1 (RFC 5480).
const EC: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01];
/// OID 1.2.840.10045.3.1.7 (RFC 5480).
const P256: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07];

const SEQUENCE: u8 = 0x30;
const OBJECT_ID: u8 = 0x06;
const BIT_STRING: u8 = 0x03;

/// Why a text is no key that images can be checked with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// No PEM block of the right kind.
    #[error("there is no PUBLIC KEY block in it")]
    NoBlock,
    /// A private key stands in its place.
    #[error("it is a private key, and the public one is wanted")]
    Private,
    /// A block that cannot be read.
    #[error("its PUBLIC KEY block is not well-formed")]
    Damaged,
    /// A key of a kind that is not used here.
    #[error("it is neither an ECDSA key over P-256 nor an RSA key of 2048 to 8192 bits")]
    Kind,
}

impl KeyError {
    /// What to do about it.
    pub fn hint(self) -> &'static str {
        match self {
            Self::NoBlock | Self::Private | Self::Damaged => {
                "give the public key in PEM form: `openssl pkey -in KEY -pubout` or `cosign public-key` print it"
            }
            Self::Kind => "make another: `openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256`",
        }
    }
}

/// A public key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublicKey {
    /// `SubjectPublicKeyInfo` in DER.
    info: Vec<u8>,
    kind: Kind,
    /// As ring wants it: the content of the bit string.
    key: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    EcdsaP256,
    Rsa,
}

impl PublicKey {
    /// Reads a PEM file's first public key.
    pub fn from_pem(text: &str) -> Result<Self, KeyError> {
        let Some((_, rest)) = text.split_once("-----BEGIN PUBLIC KEY-----") else {
            let private = text.contains("PRIVATE KEY-----");
            return Err(if private { KeyError::Private } else { KeyError::NoBlock });
        };
        let (block, _) = rest.split_once("-----END PUBLIC KEY-----").ok_or(KeyError::Damaged)?;
        let digits: String = block.split_whitespace().collect();
        Self::from_info(&STANDARD.decode(digits).map_err(|_| KeyError::Damaged)?)
    }

    /// Reads a `SubjectPublicKeyInfo` in DER (RFC 5280, 4.1).
    pub fn from_info(info: &[u8]) -> Result<Self, KeyError> {
        let (algorithm, parameters, key) = parts(info).ok_or(KeyError::Damaged)?;
        let kind = match algorithm {
            RSA => Kind::Rsa,
            EC if element(OBJECT_ID, parameters).is_some_and(|(curve, _)| curve == P256) => Kind::EcdsaP256,
            _ => return Err(KeyError::Kind),
        };
        Ok(Self { info: info.to_vec(), kind, key: key.to_vec() })
    }

    /// sha256 of the `SubjectPublicKeyInfo`: what tells one key from another.
    pub fn fingerprint(&self) -> Digest {
        Digest::of(&self.info)
    }

    /// Is it the signature of these bytes by this key (sha256; ECDSA in ASN.1 form, RSA by PKCS#1 v1.5)?
    pub fn verifies(&self, message: &[u8], signature: &[u8]) -> bool {
        let algorithm: &dyn VerificationAlgorithm = match self.kind {
            Kind::EcdsaP256 => &ECDSA_P256_SHA256_ASN1,
            Kind::Rsa => &RSA_PKCS1_2048_8192_SHA256,
        };
        UnparsedPublicKey::new(algorithm, &self.key).verify(message, signature).is_ok()
    }
}

/// Algorithm, parameters and key of a `SubjectPublicKeyInfo`.
fn parts(info: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let (whole, after) = element(SEQUENCE, info)?;
    let (identifier, rest) = element(SEQUENCE, whole)?;
    let (algorithm, parameters) = element(OBJECT_ID, identifier)?;
    let (bits, end) = element(BIT_STRING, rest)?;
    // The first byte counts unused bits; keys have none.
    let key = bits.strip_prefix(&[0])?;
    (after.is_empty() && end.is_empty()).then_some((algorithm, parameters, key))
}

/// The content of the first element, which must have this tag, and what follows it (X.690, 8.1 and 10.1).
fn element(tag: u8, bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (&first, rest) = bytes.split_first()?;
    let (&length, rest) = rest.split_first()?;
    let (length, rest) = if length < 0x80 {
        (usize::from(length), rest)
    } else {
        let (digits, rest) = rest.split_at_checked(usize::from(length & 0x7f))?;
        let digits = (digits.len() <= 4).then_some(digits)?;
        (digits.iter().fold(0, |length, digit| length << 8 | usize::from(*digit)), rest)
    };
    let (content, after) = rest.split_at_checked(length)?;
    (first == tag).then_some((content, after))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Made with `openssl genpkey` and `openssl pkey -pubout`; the signatures over `hello` with `openssl dgst -sha256 -sign`.
    const P256_KEY: &str = include_str!("testdata/p256.pem");
    const RSA_KEY: &str = include_str!("testdata/rsa.pem");
    const P384_KEY: &str = include_str!("testdata/p384.pem");
    const P256_SIGNATURE: &[u8] = include_bytes!("testdata/p256.sig");
    const RSA_SIGNATURE: &[u8] = include_bytes!("testdata/rsa.sig");

    #[test]
    fn signatures_of_openssl() {
        for (key, signature, other) in
            [(P256_KEY, P256_SIGNATURE, RSA_SIGNATURE), (RSA_KEY, RSA_SIGNATURE, P256_SIGNATURE)]
        {
            let key = PublicKey::from_pem(key).unwrap();
            assert!(key.verifies(b"hello", signature));
            assert!(!key.verifies(b"hellp", signature));
            assert!(!key.verifies(b"hello", other));
            assert!(!key.verifies(b"hello", b""));
        }
    }

    #[test]
    fn what_is_no_key() {
        let error = |text: &str| PublicKey::from_pem(text).unwrap_err();
        assert_eq!(error(""), KeyError::NoBlock);
        assert_eq!(error("-----BEGIN EC PRIVATE KEY-----\n"), KeyError::Private);
        assert_eq!(error("-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"), KeyError::Damaged);
        assert_eq!(error(&P256_KEY.replace("-----END", "")), KeyError::Damaged);
        assert_eq!(error(P384_KEY), KeyError::Kind);
    }

    proptest! {
        #[test]
        fn nothing_panics(bytes: Vec<u8>) {
            let _ = PublicKey::from_info(&bytes);
            let _ = element(SEQUENCE, &bytes);
        }
    }
}
