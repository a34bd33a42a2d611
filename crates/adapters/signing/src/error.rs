//! Errors of signing.

use std::{fmt::Display, io, path::PathBuf};

use farrier_net::SecretError;
use kmod::CertificateError;

pub type Result<T, E = SigningError> = std::result::Result<T, E>;

/// Failure to load a key or to sign. No message contains any part of a key or a passphrase.
#[derive(Debug, thiserror::Error)]
pub enum SigningError {
    /// A file is unreadable. `what` is `the certificate` or `the public key`.
    #[error("cannot read {what} {}", .path.display())]
    Read { what: &'static str, path: PathBuf, source: io::Error },
    /// A secret is unreadable. `what` is `the signing key` or `the passphrase`.
    #[error("cannot read {what} {from}")]
    Secret { what: &'static str, from: String, source: SecretError },
    /// The file contains no certificate.
    #[error("cannot read the certificate {}", .0.display())]
    Certificate(PathBuf, #[source] CertificateError),
    /// The private key does not match the certificate or public key.
    #[error("the private key of {from} does not belong to {}", .public.display())]
    Mismatch { from: String, public: PathBuf },
    /// The signing command cannot be started.
    #[error("cannot start the signing command {0}")]
    Start(String, #[source] io::Error),
    /// The key or the signing command cannot sign. The hint is empty if no remedy is known.
    #[error("{message}")]
    Key { message: String, hint: &'static str },
}

impl SigningError {
    pub(super) fn key(message: String, hint: &'static str) -> Self {
        Self::Key { message, hint }
    }

    /// Creates the error for a private key in an unsupported form.
    pub(super) fn unsupported_format(from: &str, why: &str) -> Self {
        let message = format!("the private key in {from} is in an unsupported format: {why}");
        let hint = "convert it: `openssl pkcs8 -topk8 -v2 aes-256-cbc` (with a passphrase) or `openssl pkcs8 -topk8 -nocrypt`";
        Self::Key { message, hint }
    }

    /// Creates the error for a key of an unsupported kind or size.
    pub(super) fn unusable(from: &str, why: impl Display) -> Self {
        let hint = "use an RSA key of 2048 to 4096 bits, or ECDSA with P-256 or P-384";
        Self::Key { message: format!("the key of {from} cannot sign: {why}"), hint }
    }

    /// Suggested remedy, if one is known.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::Read { path, .. } => {
                return Some(format!("check that {} exists and that farrier may read it", path.display()));
            }
            Self::Secret { source, .. } => return source.hint(),
            Self::Certificate(..) => {
                "name an X.509 certificate in PEM or DER form, like the kernel's certs/signing_key.x509"
            }
            Self::Mismatch { .. } => {
                "compare `openssl pkey -pubout` of the key with `openssl x509 -pubkey -noout` of the certificate"
            }
            Self::Start(..) => "check that the program is installed where farrier runs",
            Self::Key { hint, .. } => hint,
        };
        (!hint.is_empty()).then(|| hint.to_owned())
    }
}
