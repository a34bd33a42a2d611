//! Errors of registry clients, and the classification of connection failures.

use std::{error::Error, io, time::Duration};

use rustls::{AlertDescription, CertificateError};
use serde_json::Value;

use crate::{Digest, ImageError, error_causes};

/// Result of a call to a registry.
pub type Result<T, E = RegistryError> = std::result::Result<T, E>;

/// Failure of a call to a registry. `host` is the registry, `action` the attempted operation, `reason` the explanation.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages explain the fields")]
pub enum RegistryError {
    /// The connection failed or broke. Transient, unless TLS is at fault (see [`ConnectionProblem`]).
    #[error("cannot reach {host} to {action}")]
    Unreachable { host: String, action: String, source: Box<dyn Error + Send + Sync> },
    /// No server is at the registry's address, and the registry has not responded before. Transient, but a retry within seconds is
    /// useless, because the address is wrong or the registry is not running.
    #[error("registry {host}")]
    Refused { host: String, source: NotListening },
    /// Status 408, 425, 429 or 5xx, with the delay from `Retry-After`. Transient.
    #[error(
        "{host} answered {status} to {action}{}",
        after.map(|after| format!("; retry after {} s", after.as_secs())).unwrap_or_default()
    )]
    Server { host: String, status: u16, action: String, after: Option<Duration> },
    /// Status 401 or 403, or missing credentials for a registry that requires them. Permanent.
    #[error("{host} refused to {action}: {reason}")]
    Denied { host: String, action: String, reason: String },
    /// The registry names a token server (`scheme://host[:port]`) that is not trusted with its credentials. Permanent.
    #[error(
        "{host} refers to the token server {realm} to {action}: the token server is not trusted with the \
         credentials of {host}"
    )]
    TokenServer { host: String, action: String, realm: String },
    /// Any other unexpected status, or an invalid response. Permanent.
    #[error("{host} sent an unusable response to {action}: {reason}")]
    Protocol { host: String, action: String, reason: String },
    /// The registry reports that a part of a pushed manifest is missing, although the part was pushed before.
    /// Transient: docker-registry 2.8 writes its links in place, and can miss a link that another client is writing.
    #[error("{host} lost content that was pushed before, to {action}: {reason}")]
    Missed { host: String, action: String, reason: String },
    /// The repository does not exist, and a push does not create it. Permanent.
    #[error("{host} has no repository {repository} to {action}")]
    NoRepository { host: String, repository: String, action: String },
    /// The registry is configured to refuse deletion. Permanent.
    #[error("{host} does not allow to {action}")]
    NoDeletion { host: String, action: String },
    /// Content does not match its digest. Transient: a retry may read correct content.
    #[error("cannot {action}: the content has digest {actual}, expected {expected}")]
    Digest { action: String, expected: Digest, actual: Digest },
    /// The content is not an image, or is an index without the requested architecture. Permanent.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// Local file I/O failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// Unusable options, such as a CA file without certificates: the option, then the reason. Permanent.
    #[error("{0}: {1}")]
    Options(String, String),
    /// [`super::Access`] sent nothing, because the host is not allowed or a client certificate is unusable. `transient`
    /// states whether a retry may succeed without any change.
    #[error("{source}")]
    NotSent { source: Box<dyn Error + Send + Sync>, transient: bool },
    /// The cancellation token of a [`super::Retrying`] was triggered.
    #[error("interrupted")]
    Canceled,
}

impl RegistryError {
    /// Creates [`Self::Unreachable`] for a failed or broken connection.
    pub fn unreachable(host: &str, action: &str, source: impl Error + Send + Sync + 'static) -> Self {
        Self::Unreachable { host: host.to_owned(), action: action.to_owned(), source: Box::new(source) }
    }

    /// Creates [`Self::Protocol`] for an unusable response.
    pub fn protocol(
        host: impl Into<String>,
        action: impl Into<String>,
        reason: impl Into<String>,
    ) -> RegistryError {
        Self::Protocol { host: host.into(), action: action.into(), reason: reason.into() }
    }

    /// Whether a retry of the same request may succeed without any change.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable { source, .. } => connection_problem(source.as_ref()).is_transient(),
            Self::Refused { .. } | Self::Server { .. } | Self::Digest { .. } | Self::Missed { .. } => true,
            Self::NotSent { transient, .. } => *transient,
            Self::Denied { .. }
            | Self::TokenServer { .. }
            | Self::Protocol { .. }
            | Self::NoRepository { .. }
            | Self::NoDeletion { .. }
            | Self::Image(_)
            | Self::Io(_)
            | Self::Options(..)
            | Self::Canceled => false,
        }
    }

    /// Returns the registry and the cause of a transient fault, without the attempted operation.
    pub fn fault(&self) -> Option<(&str, String)> {
        match self {
            Self::Unreachable { host, source, .. } => Some((host, root_cause(source.as_ref()))),
            Self::Refused { host, source } => Some((host, source.to_string())),
            Self::Server { host, status, .. } => Some((host, format!("status {status}"))),
            Self::Missed { host, reason, .. } => Some((host, reason.clone())),
            _ => None,
        }
    }

    /// Whether the registry was unreachable or failed with a server error.
    pub fn is_unreachable(&self) -> bool {
        matches!(self, Self::Unreachable { .. } | Self::Refused { .. } | Self::Server { .. })
    }
}

/// Whether a status states a transient fault: 408 (a proxy timed out), 425, 429 (throttling) or 5xx.
pub(super) fn is_transient_status(status: u16) -> bool {
    matches!(status, 408 | 425 | 429 | 500..=599)
}

/// No server is at an address. A separate type, so that a search through the sources of any error finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotListening {
    /// The machine refuses connections to the port.
    #[error("connection refused")]
    Refused,
    /// The DNS has no address for the name.
    #[error("its name is not known to the DNS")]
    UnknownName,
}

impl NotListening {
    /// Finds the cause in the sources of an error. Returns `None` if the DNS server does not answer, or if a proxy does not listen.
    pub fn find(error: &(dyn Error + 'static)) -> Option<Self> {
        /// Texts of `EAI_NONAME` in glibc and musl. The standard library keeps no code.
        const UNKNOWN_NAME: [&str; 2] = ["Name or service not known", "Name does not resolve"];
        if is_proxy_error(error) {
            return None;
        }
        error_causes(error).find_map(|cause| {
            let error = cause.downcast_ref::<io::Error>()?;
            let is_unknown = || UNKNOWN_NAME.iter().any(|text| error.to_string().ends_with(text));
            match error.kind() {
                io::ErrorKind::ConnectionRefused => Some(Self::Refused),
                _ => is_unknown().then_some(Self::UnknownName),
            }
        })
    }
}

/// Returns the text of the innermost source of an error.
pub fn root_cause(error: &(dyn Error + 'static)) -> String {
    error_causes(error).last().map(ToString::to_string).unwrap_or_default()
}

/// Cause of a failed connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionProblem {
    /// An untrusted authority issued the server's certificate.
    Certificate,
    /// The server's certificate has expired, or is not valid yet.
    CertificateTime,
    /// The server's certificate is for another host.
    CertificateName,
    /// The server rejects the client certificate, or requires one and received none.
    ClientCertificate,
    /// The other side does not speak TLS.
    NotTls,
    /// The proxy does not connect to the host. It may be down, require a password, or refuse the host.
    Proxy,
    /// Refused, timed out, unknown host, or reset.
    Broken,
}

impl ConnectionProblem {
    /// Whether a retry may succeed without any change.
    pub fn is_transient(self) -> bool {
        matches!(self, Self::Proxy | Self::Broken)
    }
}

/// Whether a proxy for HTTPS failed. hyper-util does not export the type of this error.
fn is_proxy_error(error: &(dyn Error + 'static)) -> bool {
    error_causes(error).any(|cause| cause.to_string().starts_with("tunnel error: "))
}

/// Classifies the cause of a failed connection.
pub fn connection_problem(error: &(dyn Error + 'static)) -> ConnectionProblem {
    if is_proxy_error(error) {
        return ConnectionProblem::Proxy;
    }
    let Some(error) = error_causes(error).find_map(|cause| cause.downcast_ref::<rustls::Error>()) else {
        return ConnectionProblem::Broken;
    };
    match error {
        rustls::Error::InvalidCertificate(error) => match error {
            CertificateError::Expired
            | CertificateError::ExpiredContext { .. }
            | CertificateError::NotValidYet
            | CertificateError::NotValidYetContext { .. } => ConnectionProblem::CertificateTime,
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
                ConnectionProblem::CertificateName
            }
            _ => ConnectionProblem::Certificate,
        },
        rustls::Error::NoCertificatesPresented => ConnectionProblem::Certificate,
        rustls::Error::AlertReceived(alert) if is_about_our_certificate(*alert) => {
            ConnectionProblem::ClientCertificate
        }
        rustls::Error::InvalidMessage(_) => ConnectionProblem::NotTls,
        _ => ConnectionProblem::Broken,
    }
}

/// Whether a TLS alert concerns the client certificate (RFC 8446, 6.2).
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

/// Whether the TCP connection succeeded but TLS failed, so that the server may speak plain HTTP. Some of these servers close the
/// connection when they receive a TLS hello. An untrusted certificate is no reason to use plain HTTP.
pub(super) fn may_speak_plain_http(error: &(dyn Error + 'static)) -> bool {
    let is_hang_up = |error: &io::Error| {
        matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset)
    };
    match connection_problem(error) {
        ConnectionProblem::NotTls => true,
        ConnectionProblem::Broken => {
            error_causes(error).filter_map(|cause| cause.downcast_ref::<io::Error>()).any(is_hang_up)
        }
        _ => false,
    }
}

/// Returns the start of a response body in printable form: the messages of a registry's JSON errors, or else the text.
pub fn excerpt(body: &[u8]) -> String {
    let json: Value = serde_json::from_slice(body).unwrap_or_default();
    let field = |error: &Value, key: &str| error[key].as_str().unwrap_or_default().to_owned();
    let errors = json["errors"].as_array().into_iter().flatten();
    let errors: Vec<_> = errors.map(|e| format!("{}: {}", field(e, "code"), field(e, "message"))).collect();
    let text = if errors.is_empty() { readable(&String::from_utf8_lossy(body)) } else { errors.join("; ") };
    let printable = |c: char| if c.is_control() || c == char::REPLACEMENT_CHARACTER { ' ' } else { c };
    let shown: String = text.chars().take(2000).map(printable).collect();
    let shown = shown.split_whitespace().collect::<Vec<_>>().join(" ");
    if shown.chars().count() > 160 {
        format!("{}...", shown.chars().take(160).collect::<String>())
    } else {
        shown
    }
}

/// Returns the title of an HTML page, as proxies send it, and any other text unchanged.
fn readable(text: &str) -> String {
    let lower = text.to_ascii_lowercase();
    let title = || {
        let start = lower.find("<title>")? + "<title>".len();
        let length = lower.get(start..)?.find("</title>")?;
        text.get(start..start + length)
    };
    title().map_or_else(|| text.to_owned(), |title| format!("an HTML page, {:?}", title.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_name_is_told_from_other_faults() {
        let looked_up = |name: &str| std::net::ToSocketAddrs::to_socket_addrs(&(name, 443)).unwrap_err();
        // A label has at most 63 characters, so the resolver asks no server.
        let unknown = looked_up(&format!("{}.invalid", "x".repeat(64)));
        assert_eq!(NotListening::find(&io::Error::other(unknown)), Some(NotListening::UnknownName));
        for text in ["Temporary failure in name resolution", "Try again", "Connection reset by peer"] {
            assert_eq!(NotListening::find(&io::Error::other(text)), None, "{text}");
        }
        assert_eq!(NotListening::find(&io::Error::from_raw_os_error(111)), Some(NotListening::Refused));
    }

    #[derive(Debug, thiserror::Error)]
    #[error("tunnel error: failed to create underlying connection")]
    struct Tunnel(#[source] io::Error);

    #[test]
    fn a_proxy_that_is_down_is_told_from_a_registry_that_is_down() {
        let tunnel = io::Error::other(Tunnel(io::Error::from_raw_os_error(111)));
        assert_eq!(NotListening::find(&tunnel), None);
        let problem = connection_problem(&tunnel);
        assert!(problem == ConnectionProblem::Proxy && problem.is_transient());
    }

    #[test]
    fn excerpts_are_short_and_printable() {
        insta::assert_snapshot!(
            excerpt(br#"{"errors":[{"code":"DENIED","message":"no\u001b[31m way","detail":1}]}"#),
            @"DENIED: no [31m way"
        );
        insta::assert_snapshot!(excerpt(b"<html>\r\n\x1b]0;x\x07\xff hello"), @"<html> ]0;x hello");
        let page = b"<html>\r\n<head><TITLE>502 Bad Gateway</TITLE></head>\r\n<body><center>nginx</center>";
        insta::assert_snapshot!(excerpt(page), @r#"an HTML page, "502 Bad Gateway""#);
        assert_eq!(excerpt("x".repeat(5000).as_bytes()).len(), 163);
        assert_eq!(excerpt(b""), "");
    }
}
