//! Why a host was not reached.

use ::oci::client::{ConnectionProblem, connection_problem};

use super::SecretError;

/// Why a request was not sent, or not answered.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the fields are")]
pub enum NetError {
    /// A host (`host[:port]`) that nothing names, and what was to be done by whose wish. Permanent.
    #[error("{who} needs {host}, which --offline forbids: nothing names it")]
    Offline { who: String, host: String },
    /// A certificate, key or proxy that cannot be used: which, and why. Permanent.
    #[error("{0}: {1}")]
    Options(String, String),
    /// A client certificate's key, or a password: what for, and why not.
    #[error("{0}")]
    Secret(String, #[source] SecretError),
    /// An answer that leads nowhere. Permanent.
    #[error("redirect not followed: {0}")]
    Redirect(String),
    /// No connection, or it broke. The address is not in it: it may hold what grants access.
    #[error("reach {0}")]
    Http(String, #[source] reqwest::Error),
}

impl NetError {
    /// May the same request succeed later, without any change?
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Http(_, source) => connection_problem(source) == ConnectionProblem::Broken,
            Self::Secret(_, source) => source.is_transient(),
            Self::Offline { .. } | Self::Options(..) | Self::Redirect(_) => false,
        }
    }

    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Offline { host, .. } => Some(format!(
                "if farrier may ask it, add `- host: {host}` to `hosts` in site.yaml; else let `mirrors` there lead to a \
                 host of the site"
            )),
            Self::Secret(_, source) => source.hint(),
            Self::Http(host, source) => connection_hint(connection_problem(source), host),
            Self::Options(..) | Self::Redirect(_) => None,
        }
    }
}

/// What to do about a connection that did not come about, where that does not depend on what was wanted.
pub fn connection_hint(problem: ConnectionProblem, host: &str) -> Option<String> {
    Some(match problem {
        ConnectionProblem::Certificate => format!(
            "if {host} has a certificate of your own authority, set --ca-file, or `caFile` of the host in site.yaml"
        ),
        ConnectionProblem::CertificateTime => {
            format!("renew the certificate of {host}, or set this machine's clock")
        }
        ConnectionProblem::CertificateName => format!(
            "ask for the host by a name that its certificate has, or give {host} a certificate with this name"
        ),
        ConnectionProblem::ClientCertificate => format!(
            "set `clientCertificate` and `clientKey` of {host} in site.yaml to a certificate that it accepts and that \
             has not run out"
        ),
        ConnectionProblem::NotTls | ConnectionProblem::Broken => return None,
    })
}
