//! Public keys: ECDSA over P-256 and P-384, and RSA. For images, only the kinds that `cosign` also supports are accepted.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use kmod::SignatureHash;
use p256::ecdsa::signature::hazmat::PrehashVerifier as _;
use ring::signature::{
    RSA_PKCS1_2048_8192_SHA256, RSA_PKCS1_2048_8192_SHA384, RSA_PKCS1_2048_8192_SHA512, UnparsedPublicKey,
};
use spki::{
    AlgorithmIdentifierRef, ObjectIdentifier, SubjectPublicKeyInfoRef,
    der::{
        Encode as _,
        asn1::{AnyRef, BitStringRef},
    },
};

use crate::image::Digest;

/// Object identifier of RSA keys (RFC 8017).
const RSA: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.113549.1.1.1");
/// Object identifiers of ECDSA keys and of their curves (RFC 5480).
const EC: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.10045.2.1");
const P256: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.10045.3.1.7");
const P384: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.3.132.0.34");

/// Reason why a text is not a usable public key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// The text has no PEM block of a public key.
    #[error("no PUBLIC KEY block found")]
    NoBlock,
    /// The text contains a private key instead.
    #[error("found a private key instead of a public key")]
    Private,
    /// The PEM block cannot be parsed.
    #[error("the PUBLIC KEY block is malformed")]
    Damaged,
    /// The kind of key is not supported for image signatures.
    #[error("the key is neither ECDSA over P-256 nor RSA of 2048 to 8192 bits")]
    Kind,
    /// The kind of key is not supported at all.
    #[error("the key is neither RSA nor ECDSA over P-256 or P-384")]
    Unknown,
}

impl KeyError {
    /// Returns a hint for the user.
    pub fn hint(self) -> &'static str {
        match self {
            Self::NoBlock | Self::Private | Self::Damaged => {
                "give the public key in PEM form, as `openssl pkey -in KEY -pubout` or `cosign public-key` prints it"
            }
            Self::Kind | Self::Unknown => {
                "create another key: `openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256`"
            }
        }
    }
}

/// Signature algorithm of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, derive_more::Display)]
pub enum KeyAlgorithm {
    /// RSA with PKCS#1 v1.5 padding, and the number of bits of its modulus.
    #[display("RSA-{_0}")]
    Rsa(usize),
    /// ECDSA on NIST's P-256.
    #[display("ECDSA P-256")]
    P256,
    /// ECDSA on NIST's P-384.
    #[display("ECDSA P-384")]
    P384,
}

/// A public key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublicKey {
    /// `SubjectPublicKeyInfo` in DER.
    info: Vec<u8>,
    algorithm: KeyAlgorithm,
    /// The content of the bit string: an `RSAPublicKey`, or a point.
    key: Vec<u8>,
}

impl PublicKey {
    /// Reads the first public key of a PEM file. The key must be supported for image signatures.
    pub fn image_key_from_pem(text: &str) -> Result<Self, KeyError> {
        Self::any_from_pem(text)?.for_images()
    }

    /// Reads a `SubjectPublicKeyInfo` in DER (RFC 5280, 4.1). The key must be supported for image signatures.
    pub fn image_key_from_info(info: &[u8]) -> Result<Self, KeyError> {
        Self::any_from_info(info)?.for_images()
    }

    /// Reads the first public key of a PEM file, of any supported kind.
    pub fn any_from_pem(text: &str) -> Result<Self, KeyError> {
        let Some((_, block)) = text.split_once("-----BEGIN PUBLIC KEY-----") else {
            let private = text.contains("PRIVATE KEY-----");
            return Err(if private { KeyError::Private } else { KeyError::NoBlock });
        };
        let (block, _) = block.split_once("-----END PUBLIC KEY-----").ok_or(KeyError::Damaged)?;
        let digits: String = block.split_whitespace().collect();
        Self::any_from_info(&STANDARD.decode(digits).map_err(|_| KeyError::Damaged)?)
    }

    /// Reads a `SubjectPublicKeyInfo` in DER, of any supported kind.
    pub fn any_from_info(info: &[u8]) -> Result<Self, KeyError> {
        let parsed = SubjectPublicKeyInfoRef::try_from(info).map_err(|_| KeyError::Damaged)?;
        let key = parsed.subject_public_key.as_bytes().ok_or(KeyError::Damaged)?;
        let curve = || parsed.algorithm.parameters_oid().ok();
        let algorithm = match parsed.algorithm.oid {
            id if id == RSA => KeyAlgorithm::Rsa(modulus_bits(key).ok_or(KeyError::Damaged)?),
            id if id == EC && curve() == Some(P256) => KeyAlgorithm::P256,
            id if id == EC && curve() == Some(P384) => KeyAlgorithm::P384,
            _ => return Err(KeyError::Unknown),
        };
        Ok(Self { info: info.to_vec(), algorithm, key: key.to_vec() })
    }

    /// Converts an `RSAPublicKey` in DER (RFC 8017, A.1.1).
    pub fn of_rsa(key: &[u8]) -> Result<Self, KeyError> {
        let algorithm = AlgorithmIdentifierRef { oid: RSA, parameters: Some(AnyRef::NULL) };
        Self::any_from_info(&public_key_info(algorithm, key)?)
    }

    /// Returns the key if it is supported for image signatures.
    fn for_images(self) -> Result<Self, KeyError> {
        match self.algorithm {
            KeyAlgorithm::Rsa(_) | KeyAlgorithm::P256 => Ok(self),
            KeyAlgorithm::P384 => Err(KeyError::Kind),
        }
    }

    /// Returns the `SubjectPublicKeyInfo` in DER.
    pub fn info(&self) -> &[u8] {
        &self.info
    }

    /// Returns the algorithm of the signatures that the key verifies.
    pub fn algorithm(&self) -> KeyAlgorithm {
        self.algorithm
    }

    /// SHA-256 of the `SubjectPublicKeyInfo`, which identifies the key.
    pub fn fingerprint(&self) -> Digest {
        Digest::of(&self.info)
    }

    /// Fingerprints of all encodings of the key. A point may be compressed (RFC 5480, 2.2), and the parameters of an RSA key may be
    /// missing (RFC 4055, 1.2).
    pub fn fingerprints(&self) -> Vec<Digest> {
        let mut encodings = vec![Ok(self.info.clone())];
        match self.algorithm {
            KeyAlgorithm::Rsa(_) => {
                for parameters in [Some(AnyRef::NULL), None] {
                    encodings
                        .push(public_key_info(AlgorithmIdentifierRef { oid: RSA, parameters }, &self.key));
                }
            }
            KeyAlgorithm::P256 => {
                if let Ok(key) = p256::ecdsa::VerifyingKey::from_sec1_bytes(&self.key) {
                    let algorithm = AlgorithmIdentifierRef { oid: EC, parameters: Some(AnyRef::from(&P256)) };
                    for compressed in [false, true] {
                        let point = key.to_sec1_point(compressed);
                        encodings.push(public_key_info(algorithm, point.as_bytes()));
                    }
                }
            }
            // Such a key signs no images, so no site revokes it.
            KeyAlgorithm::P384 => {}
        }
        encodings.iter().flatten().map(|info| Digest::of(info)).collect()
    }

    /// Whether two keys are equal. The point of an ECDSA key can have two encodings, compressed or not (RFC 5480, 2.2).
    pub fn is_same_key(&self, other: &Self) -> bool {
        let point = |key: &Self| p256::ecdsa::VerifyingKey::from_sec1_bytes(&key.key).ok();
        let same_point = || point(self).is_some_and(|own| point(other) == Some(own));
        self.algorithm == other.algorithm
            && (self.key == other.key || (self.algorithm == KeyAlgorithm::P256 && same_point()))
    }

    /// Whether the signature is valid for these bytes and this key, with SHA-256.
    pub fn verify_sha256(&self, message: &[u8], signature: &[u8]) -> bool {
        self.verify(SignatureHash::Sha256, message, signature)
    }

    /// Whether the signature is valid for the content and this key (ECDSA in ASN.1 form, RSA by PKCS#1 v1.5).
    pub fn verify(&self, hash: SignatureHash, content: &[u8], signature: &[u8]) -> bool {
        match self.algorithm {
            KeyAlgorithm::Rsa(_) => {
                let algorithm = match hash {
                    SignatureHash::Sha256 => &RSA_PKCS1_2048_8192_SHA256,
                    SignatureHash::Sha384 => &RSA_PKCS1_2048_8192_SHA384,
                    SignatureHash::Sha512 => &RSA_PKCS1_2048_8192_SHA512,
                };
                UnparsedPublicKey::new(algorithm, &self.key).verify(content, signature).is_ok()
            }
            KeyAlgorithm::P256 => {
                let key = p256::ecdsa::VerifyingKey::from_sec1_bytes(&self.key).ok();
                let signature = p256::ecdsa::Signature::from_der(signature).ok();
                key.zip(signature).is_some_and(|(key, signature)| {
                    key.verify_prehash(&hash.digest(content), &signature).is_ok()
                })
            }
            KeyAlgorithm::P384 => {
                let key = p384::ecdsa::VerifyingKey::from_sec1_bytes(&self.key).ok();
                let signature = p384::ecdsa::Signature::from_der(signature).ok();
                key.zip(signature).is_some_and(|(key, signature)| {
                    key.verify_prehash(&hash.digest(content), &signature).is_ok()
                })
            }
        }
    }

    /// Converts a signature of two concatenated numbers, as PKCS#11 creates it, to the form that [`Self::verify`] accepts.
    pub fn to_der_signature(&self, signature: &[u8]) -> Option<Vec<u8>> {
        Some(match self.algorithm {
            KeyAlgorithm::Rsa(_) => return None,
            KeyAlgorithm::P256 => {
                p256::ecdsa::Signature::from_slice(signature).ok()?.to_der().as_bytes().to_vec()
            }
            KeyAlgorithm::P384 => {
                p384::ecdsa::Signature::from_slice(signature).ok()?.to_der().as_bytes().to_vec()
            }
        })
    }
}

/// Encodes a `SubjectPublicKeyInfo` in DER.
fn public_key_info(algorithm: AlgorithmIdentifierRef<'_>, key: &[u8]) -> Result<Vec<u8>, KeyError> {
    let subject_public_key = BitStringRef::from_bytes(key).map_err(|_| KeyError::Damaged)?;
    SubjectPublicKeyInfoRef { algorithm, subject_public_key }.to_der().map_err(|_| KeyError::Damaged)
}

fn modulus_bits(key: &[u8]) -> Option<usize> {
    let key = pkcs1::RsaPublicKeyRef::try_from(key).ok()?;
    let modulus = key.modulus.as_bytes();
    Some(modulus.len() * 8 - modulus.first()?.leading_zeros() as usize)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::provenance::testing::{P256_COMPRESSED_KEY, P256_KEY, RSA_KEY};

    /// Created with `openssl genpkey` and `openssl pkey -pubout`; the signatures over `hello` with `openssl dgst -sha256 -sign`.
    const P384_KEY: &str = include_str!("testdata/p384.pem");
    const P256_SIGNATURE: &[u8] = include_bytes!("testdata/p256.sig");
    const RSA_SIGNATURE: &[u8] = include_bytes!("testdata/rsa.sig");

    #[test]
    fn signatures_of_openssl() {
        for (key, signature, other) in
            [(P256_KEY, P256_SIGNATURE, RSA_SIGNATURE), (RSA_KEY, RSA_SIGNATURE, P256_SIGNATURE)]
        {
            let key = PublicKey::image_key_from_pem(key).unwrap();
            assert!(key.verify_sha256(b"hello", signature));
            assert!(!key.verify_sha256(b"hellp", signature));
            assert!(!key.verify_sha256(b"hello", other));
            assert!(!key.verify_sha256(b"hello", b""));
        }
    }

    #[test]
    fn each_unusable_text_has_its_own_error() {
        let error = |text: &str| PublicKey::image_key_from_pem(text).unwrap_err();
        assert_eq!(error(""), KeyError::NoBlock);
        assert_eq!(error("-----BEGIN EC PRIVATE KEY-----\n"), KeyError::Private);
        assert_eq!(error("-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"), KeyError::Damaged);
        assert_eq!(error(&P256_KEY.replace("-----END", "")), KeyError::Damaged);
        assert_eq!(error(P384_KEY), KeyError::Kind);
    }

    #[test]
    fn the_fingerprints_of_a_key_are_those_of_all_its_encodings() {
        let [point, compressed, rsa] =
            [P256_KEY, P256_COMPRESSED_KEY, RSA_KEY].map(|pem| PublicKey::image_key_from_pem(pem).unwrap());
        let without_parameters = AlgorithmIdentifierRef { oid: RSA, parameters: None };
        let info = public_key_info(without_parameters, &rsa.key).unwrap();
        let other_rsa = PublicKey::image_key_from_info(&info).unwrap();
        for (one, other) in [(&point, &compressed), (&rsa, &other_rsa)] {
            assert_ne!(one.fingerprint(), other.fingerprint());
            for (key, encoding) in [(one, one), (one, other), (other, one), (other, other)] {
                assert!(key.fingerprints().contains(&encoding.fingerprint()));
            }
        }
        assert!(!point.fingerprints().contains(&rsa.fingerprint()));
    }

    proptest! {
        #[test]
        fn nothing_panics(bytes: Vec<u8>) {
            let _ = PublicKey::image_key_from_info(&bytes);
        }
    }
}
