//! Pure: the signature that the kernel's `scripts/sign-file` appends to a module, around what a key makes.

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

/// The digest that is signed. The kernel knows more of them; no key of today's signs with SHA-1 or SHA-224.
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

/// What kind of key signs a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModuleKey {
    /// RSA with PKCS#1 v1.5 padding.
    Rsa,
    /// ECDSA.
    Ecdsa,
}

/// Why a kernel would not take any signature of a key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CannotVerify {
    /// Neither the digest that its own modules are signed with is one that keys of today's sign with, nor is another built in.
    #[error(
        "the kernel's modules are signed with {0}, with which farrier does not sign, and its configuration builds \
         neither SHA-256 nor SHA-512 in"
    )]
    Hash(String),
    /// It cannot verify ECDSA.
    #[error(
        "the key is an ECDSA one, and the kernel has no CONFIG_CRYPTO_ECDSA=y (there is none before Linux 5.13)"
    )]
    Ecdsa,
}

impl SignatureHash {
    /// Its name for people, programs and the kernel: `sha256`.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// The digest of some content.
    pub fn digest(self, content: &[u8]) -> Vec<u8> {
        use sha2::Digest as _;
        match self {
            Self::Sha256 => sha2::Sha256::digest(content).to_vec(),
            Self::Sha384 => sha2::Sha384::digest(content).to_vec(),
            Self::Sha512 => sha2::Sha512::digest(content).to_vec(),
        }
    }

    /// The digest for a kernel's modules: the one that its own are signed with (`CONFIG_MODULE_SIG_HASH`); where that is
    /// SHA-1, SHA-224 or SHA-3, another one that the kernel has built in, because it takes the digest that a signature names.
    /// `None` for a kernel without `CONFIG_MODULE_SIG`, which looks at no signature.
    pub fn for_kernel(config: &KernelConfig, key: ModuleKey) -> Result<Option<Self>, CannotVerify> {
        if !config.is_set("MODULE_SIG") {
            return Ok(None);
        }
        if key == ModuleKey::Ecdsa && !config.is_set("CRYPTO_ECDSA") {
            return Err(CannotVerify::Ecdsa);
        }
        let hash = config.get("MODULE_SIG_HASH").unwrap_or_default();
        let own = hash.parse().ok();
        let built_in = || match (config.is_set("CRYPTO_SHA256"), config.is_set("CRYPTO_SHA512")) {
            (true, _) => Some(Self::Sha256),
            (false, true) => Some(Self::Sha512),
            (false, false) => None,
        };
        let hash = own.or_else(built_in).ok_or_else(|| CannotVerify::Hash(hash.to_owned()))?;
        Ok(Some(hash))
    }

    /// The last number of its identifiers: below NIST's digests, and, one more, below ECDSA with SHA-2.
    const fn number(self) -> u8 {
        match self {
            Self::Sha256 => 1,
            Self::Sha384 => 2,
            Self::Sha512 => 3,
        }
    }
}

/// Which signatures stay when modules are signed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SigningRule {
    /// Is every signature replaced?
    pub replace: bool,
    /// The key of signatures that are replaced in any case, as `modinfo` shows it: farrier's own before.
    pub previous: Option<String>,
}

impl SigningRule {
    /// Does a module with this signature keep it? What the kernel takes for no signature of its kind does not count as one.
    pub fn keeps(&self, signature: &Signature) -> bool {
        let Self { replace, previous } = self;
        match signature {
            Signature::By(signer) => !replace && *previous != Some(signer.key_id.clone()),
            Signature::Unread(_) => !replace,
            _ => false,
        }
    }
}

/// What follows the module's bytes when it is signed: a PKCS#7 message (RFC 5652) without certificates and attributes, the
/// record, the marker. `signature` is what the key made of the module's bytes.
pub fn trailer(certificate: &Certificate, key: ModuleKey, hash: SignatureHash, signature: &[u8]) -> Vec<u8> {
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
    let mut bytes = encode(SEQUENCE, &[&encode(OBJECT_ID, &[SIGNED_DATA]), &encode(CONTEXT_0, &[&data])]);
    // Messages have some hundred bytes, and with the longest of names some thousand.
    let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
    bytes.extend([0, 0, PKCS7, 0, 0, 0, 0, 0]);
    bytes.extend(length.to_be_bytes());
    bytes.extend(MARKER);
    bytes
}

/// Who a signature with this certificate's key will name.
pub fn signer(certificate: &Certificate, hash: SignatureHash) -> Signer {
    Signer {
        name: certificate.issuer_name.clone(),
        key_id: certificate.key_id.clone(),
        hash: Some(hash.as_str()),
    }
}

/// A module file without the signature at its end, and that signature.
pub fn without_signature(module: &[u8]) -> (&[u8], Signature) {
    let (signature, length) = signature::read(module, module.len() as u64);
    let length = usize::try_from(length).unwrap_or(module.len());
    match signature {
        // What is no signature to the kernel is no part that may be cut off.
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
    fn the_digest_is_the_kernels_where_keys_sign_with_it() {
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
            assert!(with("CONFIG_CRYPTO_SHA256=m\n").is_err(), "a module comes too late");
        }
        assert_eq!(rsa("CONFIG_MODULES=y\nCONFIG_MODULE_SIG_HASH=\"sha256\"\n"), Ok(None));
    }

    #[test]
    fn ecdsa_is_for_kernels_that_verify_it() {
        let signed = "CONFIG_MODULE_SIG=y\nCONFIG_MODULE_SIG_HASH=sha512\n";
        let ecdsa = |options: &str| SignatureHash::for_kernel(&config(options), ModuleKey::Ecdsa);
        assert_eq!(ecdsa(signed), Err(CannotVerify::Ecdsa));
        assert_eq!(ecdsa(&format!("{signed}CONFIG_CRYPTO_ECDSA=y\n")), Ok(Some(SignatureHash::Sha512)));
    }
}
