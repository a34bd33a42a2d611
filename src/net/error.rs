//! Adapter: why nobody was reached.

use std::{error::Error, io};

use rustls::{AlertDescription, CertificateError};

use super::SecretError;

/// Why a request was not sent, or not answered.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// A host that nothing names. Permanent.
    #[error("{who} needs {host}, which --offline forbids: nothing names it")]
    Offline {
        /// What was to be done, by whose wish.
        who: String,
        /// `host[:port]`.
        host: String,
    },
    /// A certificate, key or proxy that cannot be used. Permanent.
    #[error("{what}: {reason}")]
    Options {
        /// Which.
        what: String,
        /// Why.
        reason: String,
    },
    /// A client certificate's key.
    #[error("show the client certificate for {host}")]
    Secret {
        /// To whom.
        host: String,
        /// Why not.
        #[source]
        source: SecretError,
    },
    /// An answer that leads nowhere. Permanent.
    #[error("redirect not followed: {reason}")]
    Redirect {
        /// Why.
        reason: String,
    },
    /// No connection, or it broke. The address is not in it: it may hold what grants access.
    #[error("reach {host}")]
    Http {
        /// Whom.
        host: String,
        /// Why not.
        #[source]
        source: reqwest::Error,
    },
}

impl NetError {
    /// May the same request succeed later, without anybody changing anything?
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Http { source, .. } => fault(source) == Fault::Connection,
            Self::Secret { source, .. } => source.is_transient(),
            Self::Offline { .. } | Self::Options { .. } | Self::Redirect { .. } => false,
        }
    }

    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Offline { host, .. } => Some(format!(
                "if farrier may ask it, add `- host: {host}` to `hosts` in site.yaml; else let `mirrors` there lead to a \
                 host of the site"
            )),
            Self::Secret { source, .. } => source.hint(),
            Self::Http { host, source } => fault(source).hint(host),
            Self::Options { .. } | Self::Redirect { .. } => None,
        }
    }
}

/// What stands behind a connection that did not come about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The server's certificate is of an authority that nobody told us to trust.
    Certificate,
    /// The server's certificate ran out, or is not valid yet.
    CertificateTime,
    /// The server's certificate is another host's.
    CertificateName,
    /// The server does not accept our certificate, or wants one and got none.
    ClientCertificate,
    /// The other side does not speak TLS.
    NotTls,
    /// Refused, timed out, no such host, reset.
    Connection,
}

impl Fault {
    /// What to do about it, where that does not depend on what was wanted.
    pub fn hint(self, host: &str) -> Option<String> {
        Some(match self {
            Self::Certificate => format!(
                "if {host} has a certificate of your own authority, set --ca-file, or `caFile` of the host in site.yaml"
            ),
            Self::CertificateTime => {
                format!("renew the certificate of {host}, or set this machine's clock")
            }
            Self::CertificateName => {
                format!(
                    "ask for the host by a name that its certificate has, or give {host} a certificate with this name"
                )
            }
            Self::ClientCertificate => format!(
                "set `clientCertificate` and `clientKey` of {host} in site.yaml to a certificate that it accepts and that \
                 has not run out"
            ),
            Self::NotTls | Self::Connection => return None,
        })
    }
}

/// An error and its causes. An `io::Error` does not list the error that it wraps among them, only that
/// one's, so it is opened here.
fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |&error| {
        match error.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
            Some(inner) => Some(inner),
            None => error.source(),
        }
    })
}

/// Why there is no connection.
pub fn fault(error: &(dyn Error + 'static)) -> Fault {
    let Some(error) = causes(error).find_map(|cause| cause.downcast_ref::<rustls::Error>()) else {
        return Fault::Connection;
    };
    match error {
        rustls::Error::InvalidCertificate(error) => match error {
            CertificateError::Expired
            | CertificateError::ExpiredContext { .. }
            | CertificateError::NotValidYet
            | CertificateError::NotValidYetContext { .. } => Fault::CertificateTime,
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
                Fault::CertificateName
            }
            _ => Fault::Certificate,
        },
        rustls::Error::NoCertificatesPresented => Fault::Certificate,
        rustls::Error::AlertReceived(alert) if is_about_our_certificate(*alert) => Fault::ClientCertificate,
        rustls::Error::InvalidMessage(_) => Fault::NotTls,
        _ => Fault::Connection,
    }
}

/// RFC 8446, 6.2.
fn is_about_our_certificate(alert: AlertDescription) -> bool {
    matches!(
        alert,
        AlertDescription::BadCertificate
            | AlertDescription::UnsupportedCertificate
            | AlertDescription::CertificateRevoked
            | AlertDescription::CertificateExpired
            | AlertDescription::CertificateUnknown
            | AlertDescription::UnknownCA
            | AlertDescription::AccessDenied
            | AlertDescription::CertificateRequired
    )
}

/// Did the other side hang up? Some servers do, on a greeting that they do not understand.
pub(crate) fn hung_up(error: &(dyn Error + 'static)) -> bool {
    causes(error)
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|error| matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset))
}
