//! Signs modules and images for the build pipeline, with private keys from files, Secrets or an external program.
//!
//! Private keys are held in memory only: farrier never writes them anywhere. The bytes of a key file are wiped as soon
//! as the key is loaded, as are passphrases. ECDSA keys are wiped when they are dropped. ring does not wipe RSA keys,
//! and the buffers of the API server's response with a Secret are not wiped.
#![forbid(unsafe_code)]

mod command;
mod error;
mod load;
mod modules;
mod pem;
mod public_key;
#[cfg(any(test, feature = "testing"))]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::missing_panics_doc, clippy::new_without_default)]
pub mod testing;

use std::path::Path;

use p256::ecdsa::signature::hazmat::PrehashSigner as _;
use ring::{
    rand::SystemRandom,
    signature::{RSA_PKCS1_SHA256, RSA_PKCS1_SHA384, RSA_PKCS1_SHA512, RsaKeyPair},
};

use self::command::SigningCommand;
pub use self::{
    error::{Result, SigningError},
    modules::ModuleSigner,
    public_key::{read_certificate, read_public_key},
};
pub use farrier_core::provenance::{KeyAlgorithm, PublicKey};
pub use kmod::SignatureHash;

/// Private key, or the program that has access to it.
enum Key {
    Rsa(Box<RsaKeyPair>),
    P256(Box<p256::ecdsa::SigningKey>),
    P384(Box<p384::ecdsa::SigningKey>),
    Command(SigningCommand),
}

/// A signer with its public key.
#[derive(derive_more::Debug)]
pub struct Signer {
    #[debug(skip)]
    key: Key,
    public: PublicKey,
    /// Source of the key, for messages.
    from: String,
}

impl Signer {
    pub fn public_key(&self) -> &PublicKey {
        &self.public
    }

    /// Signs the content: RSA with PKCS#1 v1.5 padding, or ECDSA in DER (`ECDSA-Sig-Value`). Signatures are
    /// deterministic, unless a program signs. Blocks, with a program for up to a minute.
    pub fn sign(&self, hash: SignatureHash, content: &[u8]) -> Result<Vec<u8>> {
        let failed = || {
            SigningError::key(
                format!(
                    "cannot sign with the key of {}: the cryptography library returned an error",
                    self.from
                ),
                "",
            )
        };
        match &self.key {
            Key::Rsa(key) => {
                let padding = match hash {
                    SignatureHash::Sha256 => &RSA_PKCS1_SHA256,
                    SignatureHash::Sha384 => &RSA_PKCS1_SHA384,
                    SignatureHash::Sha512 => &RSA_PKCS1_SHA512,
                };
                let mut signature = vec![0; key.public().modulus_len()];
                key.sign(padding, &SystemRandom::new(), content, &mut signature).map_err(|_| failed())?;
                Ok(signature)
            }
            Key::P256(key) => {
                let digest = hash.digest(content);
                let signature: p256::ecdsa::Signature = key.sign_prehash(&digest).map_err(|_| failed())?;
                Ok(signature.to_der().as_bytes().to_vec())
            }
            Key::P384(key) => {
                let digest = hash.digest(content);
                let signature: p384::ecdsa::Signature = key.sign_prehash(&digest).map_err(|_| failed())?;
                Ok(signature.to_der().as_bytes().to_vec())
            }
            Key::Command(command) => self.run_command(command, hash, content),
        }
    }

    /// Signs with a program, and verifies its output: the program may use another key, or write something else.
    fn run_command(&self, command: &SigningCommand, hash: SignatureHash, content: &[u8]) -> Result<Vec<u8>> {
        let output = command.run(hash, &hash.digest(content))?;
        if self.public.verify(hash, content, &output) {
            return Ok(output);
        }
        let converted = self.public.to_der_signature(&output);
        converted.filter(|signature| self.public.verify(hash, content, signature)).ok_or_else(|| {
            let message = format!(
                "the signing command {} wrote {} bytes that are not a signature ({hash}) by the {} key",
                command.program(),
                output.len(),
                self.public.algorithm()
            );
            let hint = "the command must sign the digest that it reads, in raw bytes: RSA with PKCS#1 v1.5 \
                padding over the DigestInfo of the digest, or ECDSA, with the key of the certificate";
            SigningError::key(message, hint)
        })
    }

    /// Fails if the key does not match a public key; `path` is the file of the public key.
    pub fn ensure_matches(&self, public: &PublicKey, path: &Path) -> Result<()> {
        if self.public == *public {
            return Ok(());
        }
        Err(SigningError::Mismatch { from: self.from.clone(), public: path.to_owned() })
    }
}

#[cfg(test)]
mod tests;
