//! Why nothing can be signed.

use std::{io, path::PathBuf};

use crate::{kmod::CertificateError, net::SecretError};

/// Why nothing can be signed. No message holds any part of a key or a passphrase.
#[derive(Debug, thiserror::Error)]
pub enum SigningError {
    /// A file that cannot be read.
    #[error("read {what} {}", .path.display())]
    Read {
        /// `the certificate`, `the public key`.
        what: &'static str,
        /// Where.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// A secret that cannot be read.
    #[error("read {what} {from}")]
    Secret {
        /// `the signing key`, `the passphrase`.
        what: &'static str,
        /// Where it should be.
        from: String,
        /// Why not.
        #[source]
        source: SecretError,
    },
    /// No private key in it.
    #[error("{from} holds no private key in PEM form")]
    NoKey {
        /// Where it was looked for.
        from: String,
    },
    /// A form that is not read.
    #[error("the private key in {from} is in a form that farrier does not read: {why}")]
    Form {
        /// Where it is.
        from: String,
        /// What is wrong.
        why: &'static str,
    },
    /// Encrypted, and no passphrase is named.
    #[error("the private key in {from} is encrypted, and no passphrase is named")]
    NoPassphrase {
        /// Where it is.
        from: String,
    },
    /// It does not decrypt.
    #[error("the passphrase does not open the private key in {from}")]
    Passphrase {
        /// Where it is.
        from: String,
    },
    /// Of a kind or size that cannot be used.
    #[error("the key of {from} cannot sign: {why}")]
    Kind {
        /// Whose it is.
        from: String,
        /// What is wrong.
        why: String,
    },
    /// A certificate or public key that is none.
    #[error("read {what} {}", .path.display())]
    Certificate {
        /// `the certificate`.
        what: &'static str,
        /// Where.
        path: PathBuf,
        /// What is wrong.
        #[source]
        source: CertificateError,
    },
    /// Not a pair.
    #[error("the private key of {from} does not belong to {}", .public.display())]
    Mismatch {
        /// The private key.
        from: String,
        /// The certificate or public key.
        public: PathBuf,
    },
    /// A command, whose public key nothing tells.
    #[error("the key behind `{0}` is not known: no public key is named for it")]
    NoPublicKey(String),
    /// A command that cannot be run.
    #[error("start the signing command {command}")]
    Start {
        /// The program.
        command: String,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// A command that failed.
    #[error("the signing command {command} {outcome}")]
    Command {
        /// The program.
        command: String,
        /// How it ended, and its last words.
        outcome: String,
    },
    /// A command's output that is no signature of this content by this key.
    #[error(
        "the signing command {command} wrote {length} bytes that are no signature ({hash}) by the {key} key"
    )]
    NotASignature {
        /// The program.
        command: String,
        /// What it wrote.
        length: usize,
        /// The digest that it was given.
        hash: &'static str,
        /// What signature was expected.
        key: String,
    },
    /// The library's own fault.
    #[error("sign with the key of {0}: the library refused")]
    Library(String),
}

impl SigningError {
    /// What to do about it, where that is clear.
    pub fn hint(&self) -> Option<String> {
        Some(match self {
            Self::Read { path, .. } => {
                format!("see that {} is there, and that farrier may read it", path.display())
            }
            Self::Secret { source, .. } => return source.hint(),
            Self::NoKey { .. } => "name the file with the private key; a certificate alone signs nothing, and DER becomes \
                                   PEM with `openssl pkey -inform DER`"
                .to_owned(),
            Self::Form { .. } => {
                "convert it: `openssl pkcs8 -topk8 -v2 aes-256-cbc` (with a passphrase) or `openssl pkcs8 -topk8 -nocrypt`"
                    .to_owned()
            }
            Self::NoPassphrase { .. } => "name it with `passphrase: {file: PATH}`".to_owned(),
            Self::Passphrase { .. } => {
                "see that `passphrase` names the right file or secret; one newline at its end does not count".to_owned()
            }
            Self::Kind { .. } => "use an RSA key of 2048 to 4096 bits, or ECDSA with P-256 or P-384".to_owned(),
            Self::Certificate { .. } => {
                "name an X.509 certificate, PEM or DER, as the kernel's certs/signing_key.x509 is".to_owned()
            }
            Self::Mismatch { .. } => "compare `openssl pkey -pubout` of the key with `openssl x509 -pubkey -noout` of the \
                                      certificate"
                .to_owned(),
            Self::NoPublicKey(_) => "name the public half with `publicKey`".to_owned(),
            Self::Start { .. } => "see that the program is installed where farrier runs".to_owned(),
            Self::Command { .. } => "run it by hand: it gets the digest on its standard input".to_owned(),
            Self::NotASignature { .. } => "the command must sign the digest that it reads, in raw bytes: RSA with PKCS#1 \
                                           v1.5 padding over the DigestInfo that it makes of it, or ECDSA, with the key of the certificate"
                .to_owned(),
            Self::Library(_) => return None,
        })
    }
}
