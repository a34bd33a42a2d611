//! Errors of network access.

use ::oci::client::{ConnectionProblem, connection_problem};

use super::SecretError;

/// Reason that a request was not sent, or got no response.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// `--offline` forbids the host (`host[:port]`), because no configuration names the host. Permanent.
    #[error("{purpose} needs {host}, which --offline forbids: no configuration names it")]
    Offline { purpose: String, host: String },
    /// A certificate, key or proxy is unusable: name and reason. Permanent.
    #[error("{0}: {1}")]
    Options(String, String),
    /// The key of a client certificate, or a password, is unreadable: purpose and cause.
    #[error("{0}")]
    Secret(String, #[source] SecretError),
    /// A redirect cannot be followed. Permanent.
    #[error("redirect not followed: {0}")]
    Redirect(String),
    /// The connection failed or broke. The error omits the URL, which may contain access tokens.
    #[error("cannot reach {0}")]
    Http(String, #[source] reqwest::Error),
}

impl NetError {
    /// Whether a retry of the same request may succeed without any change.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Http(_, source) => connection_problem(source).is_transient(),
            Self::Secret(_, source) => source.is_transient(),
            Self::Offline { .. } | Self::Options(..) | Self::Redirect(_) => false,
        }
    }

    /// Suggested remedy, if one is known.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Offline { host, .. } => Some(format!(
                "if farrier may use it, add `- host: {host}` to `hosts` in site.yaml; otherwise map it to a \
                 host of the site with `mirrors`"
            )),
            Self::Secret(_, source) => source.hint(),
            Self::Http(host, source) => connection_hint(connection_problem(source), host),
            Self::Options(..) | Self::Redirect(_) => None,
        }
    }
}

/// Suggested remedy for a failed connection, if it does not depend on the request.
pub fn connection_hint(problem: ConnectionProblem, host: &str) -> Option<String> {
    Some(match problem {
        ConnectionProblem::Certificate => format!(
            "if your own authority issued the certificate of {host}, set --ca-file, or `caFile` of the host \
             in site.yaml"
        ),
        ConnectionProblem::CertificateTime => {
            format!("renew the certificate of {host}, or set this machine's clock")
        }
        ConnectionProblem::CertificateName => format!(
            "use a host name that the certificate contains, or issue a certificate for {host} with this name"
        ),
        ConnectionProblem::ClientCertificate => format!(
            "set `clientCertificate` and `clientKey` of {host} in site.yaml to a certificate that the server \
             accepts and that has not expired"
        ),
        ConnectionProblem::Proxy => format!(
            "check that the proxy is running, takes the password and may connect to {host}: `proxy` in site.yaml, else the environment's; \
             or add {host} to `noProxy`"
        ),
        ConnectionProblem::NotTls | ConnectionProblem::Broken => return None,
    })
}
