//! Builds the same trailer that the kernel's `scripts/sign-file` appends to a module, from a signature made by a key.

use strum::{Display, EnumString, IntoStaticStr};

use super::{
    Certificate, KernelConfig, Signature, Signer,
    der::{CONTEXT_0, INTEGER, NULL, OBJECT_ID, OCTET_STRING, SEQUENCE, SET, encode},
    signature::{self, MARKER, NIST_DIGESTS, PKCS7, SIGNED_DATA},
};

/// 1.2.840.113549.1.7.1
const DATA: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x07, 0x01];
/// 1.2.840.113549.1.1.1
const RSA: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01, 0x01];
/// 1.2.840.10045.4.3, ECDSA with SHA-2.
const ECDSA_WITH_SHA2: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x3d, 0x04, 0x03];

/// Digest algorithm of a signature. The kernel also supports SHA-1 and SHA-224, which current keys do not use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Display, EnumString, IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub enum SignatureHash {
    /// SHA-256.
    Sha256,
    /// SHA-384.
    Sha384,
    /// SHA-512.
    Sha512,
}

/// Kind of a key that signs modules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModuleKey {
    /// RSA with PKCS#1 v1.5 padding.
    Rsa,
    /// ECDSA.
    Ecdsa,
}

/// Reason why a kernel cannot verify any signature of a key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CannotVerify {
    /// farrier does not sign with the digest of the kernel's own modules, and the kernel has neither SHA-256 nor
    /// SHA-512 built in.
    #[error(
        "the kernel's modules are signed with {0}, which farrier does not sign with, and its configuration \
         has neither SHA-256 nor SHA-512 built in"
    )]
    Hash(String),
    /// The kernel cannot verify ECDSA.
    #[error(
        "the key is an ECDSA key, but the kernel lacks CONFIG_CRYPTO_ECDSA=y (available since Linux 5.13)"
    )]
    Ecdsa,
}

impl SignatureHash {
    /// Name for people, programs and the kernel: `sha256`.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// Computes the digest of some content.
    pub fn digest(self, content: &[u8]) -> Vec<u8> {
        use sha2::Digest as _;
        match self {
            Self::Sha256 => sha2::Sha256::digest(content).to_vec(),
            Self::Sha384 => sha2::Sha384::digest(content).to_vec(),
            Self::Sha512 => sha2::Sha512::digest(content).to_vec(),
        }
    }

    /// Selects the digest algorithm for a kernel's modules. Prefers the algorithm of the kernel's own modules
    /// (`CONFIG_MODULE_SIG_HASH`). If that is SHA-1, SHA-224 or SHA-3, selects another algorithm that the kernel has built
    /// in, because the kernel accepts any built-in algorithm that a signature names. Returns `None` for a kernel without
    /// `CONFIG_MODULE_SIG`, which ignores signatures.
    pub fn for_kernel(config: &KernelConfig, key: ModuleKey) -> Result<Option<Self>, CannotVerify> {
        if !config.is_set("MODULE_SIG") {
            return Ok(None);
        }
        if key == ModuleKey::Ecdsa && !config.is_set("CRYPTO_ECDSA") {
            return Err(CannotVerify::Ecdsa);
        }
        let hash = config.get("MODULE_SIG_HASH").unwrap_or_default();
        let configured = hash.parse().ok();
        let built_in = || match (config.is_set("CRYPTO_SHA256"), config.is_set("CRYPTO_SHA512")) {
            (true, _) => Some(Self::Sha256),
            (false, true) => Some(Self::Sha512),
            (false, false) => None,
        };
        let hash = configured.or_else(built_in).ok_or_else(|| CannotVerify::Hash(hash.to_owned()))?;
        Ok(Some(hash))
    }

    /// Last arc of the digest's object identifier below [`NIST_DIGESTS`]. The arc of ECDSA with that digest is one higher.
    const fn number(self) -> u8 {
        match self {
            Self::Sha256 => 1,
            Self::Sha384 => 2,
            Self::Sha512 => 3,
        }
    }
}

/// Decides which existing signatures stay when modules are signed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SigningRule {
    /// Whether all signatures are replaced.
    pub replace: bool,
    /// Key ID of signatures that are always replaced, as `modinfo` shows it: farrier's previous key.
    pub previous: Option<String>,
}

impl SigningRule {
    /// Whether a module keeps this signature. Anything that the kernel does not treat as a signature is not kept.
    pub fn keeps(&self, signature: &Signature) -> bool {
        let Self { replace, previous } = self;
        match signature {
            Signature::By(signer) => !replace && *previous != Some(signer.key_id.clone()),
            Signature::Unread(_) => !replace,
            _ => false,
        }
    }
}

/// Builds the trailer that makes a module a signed one: the message of the signature, the record, and the marker.
/// `signature` is the key's signature of the module's bytes.
pub fn trailer(certificate: &Certificate, key: ModuleKey, hash: SignatureHash, signature: &[u8]) -> Vec<u8> {
    let mut bytes = signature_message(certificate, key, hash, signature);
    // Messages have a few hundred bytes, or a few thousand with very long names.
    let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
    bytes.extend([0, 0, PKCS7, 0, 0, 0, 0, 0]);
    bytes.extend(length.to_be_bytes());
    bytes.extend(MARKER);
    bytes
}

/// Builds a PKCS#7 message (RFC 5652) without content, certificates and attributes, as the kernel verifies it. `signature` is
/// the key's signature of the content.
pub fn signature_message(
    certificate: &Certificate,
    key: ModuleKey,
    hash: SignatureHash,
    signature: &[u8],
) -> Vec<u8> {
    let version = encode(INTEGER, &[&[1]]);
    let digest = encode(SEQUENCE, &[&encode(OBJECT_ID, &[NIST_DIGESTS, &[hash.number()]])]);
    let algorithm = match key {
        ModuleKey::Rsa => encode(SEQUENCE, &[&encode(OBJECT_ID, &[RSA]), &encode(NULL, &[])]),
        ModuleKey::Ecdsa => encode(SEQUENCE, &[&encode(OBJECT_ID, &[ECDSA_WITH_SHA2, &[hash.number() + 1]])]),
    };
    let signer = encode(
        SEQUENCE,
        &[
            &version,
            &encode(SEQUENCE, &[&certificate.issuer, &certificate.serial]),
            &digest,
            &algorithm,
            &encode(OCTET_STRING, &[signature]),
        ],
    );
    let data = encode(
        SEQUENCE,
        &[
            &version,
            &encode(SET, &[&digest]),
            &encode(SEQUENCE, &[&encode(OBJECT_ID, &[DATA])]),
            &encode(SET, &[&signer]),
        ],
    );
    encode(SEQUENCE, &[&encode(OBJECT_ID, &[SIGNED_DATA]), &encode(CONTEXT_0, &[&data])])
}

/// Returns the signer that `modinfo` will show for a signature by this certificate's key.
pub fn signer(certificate: &Certificate, hash: SignatureHash) -> Signer {
    Signer {
        name: certificate.issuer_name.clone(),
        key_id: certificate.key_id.clone(),
        hash: Some(hash.as_str()),
    }
}

/// Splits a module file into the module without its signature, and the signature.
pub fn without_signature(module: &[u8]) -> (&[u8], Signature) {
    let (signature, length) = signature::read(module, module.len() as u64);
    let length = usize::try_from(length).unwrap_or(module.len());
    match signature {
        // Bytes that the kernel does not treat as a signature are part of the module.
        Signature::By(_) | Signature::Unread(_) => (module.get(..length).unwrap_or(module), signature),
        _ => (module, signature),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(options: &str) -> KernelConfig {
        KernelConfig::parse(options).unwrap()
    }

    #[test]
    fn the_digest_is_that_of_the_kernels_own_modules_if_supported() {
        let rsa = |options: &str| SignatureHash::for_kernel(&config(options), ModuleKey::Rsa);
        for hash in [SignatureHash::Sha256, SignatureHash::Sha384, SignatureHash::Sha512] {
            let own = format!("CONFIG_MODULE_SIG=y\nCONFIG_MODULE_SIG_HASH=\"{hash}\"\n");
            assert_eq!(rsa(&own), Ok(Some(hash)));
        }
        for hash in ["sha1", "sha224", "sha3-256", "sha3-512"] {
            let old = format!("CONFIG_MODULE_SIG=y\nCONFIG_MODULE_SIG_HASH=\"{hash}\"\n");
            assert_eq!(rsa(&old), Err(CannotVerify::Hash(hash.to_owned())));
            let with = |more: &str| rsa(&format!("{old}{more}"));
            assert_eq!(with("CONFIG_CRYPTO_SHA512=y\n"), Ok(Some(SignatureHash::Sha512)));
            assert_eq!(with("CONFIG_CRYPTO_SHA256=y\n"), Ok(Some(SignatureHash::Sha256)));
            assert!(
                with("CONFIG_CRYPTO_SHA256=m\n").is_err(),
                "a digest built as a module is not available in time"
            );
        }
        assert_eq!(rsa("CONFIG_MODULES=y\nCONFIG_MODULE_SIG_HASH=\"sha256\"\n"), Ok(None));
    }

    #[test]
    fn ecdsa_requires_a_kernel_that_verifies_it() {
        let signed = "CONFIG_MODULE_SIG=y\nCONFIG_MODULE_SIG_HASH=sha512\n";
        let ecdsa = |options: &str| SignatureHash::for_kernel(&config(options), ModuleKey::Ecdsa);
        assert_eq!(ecdsa(signed), Err(CannotVerify::Ecdsa));
        assert_eq!(ecdsa(&format!("{signed}CONFIG_CRYPTO_ECDSA=y\n")), Ok(Some(SignatureHash::Sha512)));
    }
}
