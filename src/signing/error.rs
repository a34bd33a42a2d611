//! Why nothing can be signed.

use std::{fmt::Display, io, path::PathBuf};

use crate::{kmod::CertificateError, net::SecretError};

/// What signing comes to.
pub type Result<T, E = SigningError> = std::result::Result<T, E>;

/// Why nothing can be signed. No message holds any part of a key or a passphrase.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the fields are")]
pub enum SigningError {
    /// A file that cannot be read: `the certificate`, `the public key`.
    #[error("read {what} {}", .path.display())]
    Read { what: &'static str, path: PathBuf, source: io::Error },
    /// A secret that cannot be read: `the signing key`, `the passphrase`.
    #[error("read {what} {from}")]
    Secret { what: &'static str, from: String, source: SecretError },
    /// A file that holds no certificate.
    #[error("read the certificate {}", .0.display())]
    Certificate(PathBuf, #[source] CertificateError),
    /// A private key and a certificate or public key that are no pair.
    #[error("the private key of {from} does not belong to {}", .public.display())]
    Mismatch { from: String, public: PathBuf },
    /// A command that cannot be run.
    #[error("start the signing command {0}")]
    Start(String, #[source] io::Error),
    /// A key, or a command, that does not sign. The hint is empty where it is not clear what to do.
    #[error("{message}")]
    Key { message: String, hint: &'static str },
}

impl SigningError {
    pub(super) fn key(message: String, hint: &'static str) -> Self {
        Self::Key { message, hint }
    }

    /// A private key in a form that is not read.
    pub(super) fn form(from: &str, why: &str) -> Self {
        let message = format!("the private key in {from} is in a form that farrier does not read: {why}");
        let hint = "convert it: `openssl pkcs8 -topk8 -v2 aes-256-cbc` (with a passphrase) or `openssl pkcs8 -topk8 -nocrypt`";
        Self::Key { message, hint }
    }

    /// A key of a kind or size that cannot be used.
    pub(super) fn kind(from: &str, why: impl Display) -> Self {
        let hint = "use an RSA key of 2048 to 4096 bits, or ECDSA with P-256 or P-384";
        Self::Key { message: format!("the key of {from} cannot sign: {why}"), hint }
    }

    /// What to do about it, where that is clear.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::Read { path, .. } => {
                return Some(format!("see that {} is there, and that farrier may read it", path.display()));
            }
            Self::Secret { source, .. } => return source.hint(),
            Self::Certificate(..) => {
                "name an X.509 certificate, PEM or DER, as the kernel's certs/signing_key.x509 is"
            }
            Self::Mismatch { .. } => {
                "compare `openssl pkey -pubout` of the key with `openssl x509 -pubkey -noout` of the certificate"
            }
            Self::Start(..) => "see that the program is installed where farrier runs",
            Self::Key { hint, .. } => hint,
        };
        (!hint.is_empty()).then(|| hint.to_owned())
    }
}
