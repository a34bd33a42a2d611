//! Errors of registries, and why a connection to one failed.

use std::{error::Error, io, time::Duration};

use rustls::{AlertDescription, CertificateError};
use serde_json::Value;

use crate::{Digest, ImageError};

/// What the calls of this module give.
pub type Result<T, E = RegistryError> = std::result::Result<T, E>;

/// What a registry answered, or did not: `host` is the registry, `action` what was to be done, `reason` its words.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the fields are")]
pub enum RegistryError {
    /// No connection, or it broke. Transient, unless it is a matter of certificates.
    #[error("reach {host} to {action}")]
    Unreachable { host: String, action: String, source: Box<dyn Error + Send + Sync> },
    /// 5xx, 429, and how long it wants to be left alone (`Retry-After`). Transient.
    #[error(
        "{host} answered {status} to {action}{}",
        after.map(|after| format!(", and wants to be asked again in {} s", after.as_secs())).unwrap_or_default()
    )]
    Server { host: String, status: u16, action: String, after: Option<Duration> },
    /// 401, 403, or no credentials for a registry that wants some. Permanent.
    #[error("{host} refused to {action}: {reason}")]
    Denied { host: String, action: String, reason: String },
    /// It names a token server (`scheme://host[:port]`) that gets no credentials of it. Permanent.
    #[error(
        "{host} wants its credentials for {action} sent to the token server {realm}, which is not trusted with them"
    )]
    TokenServer { host: String, action: String, realm: String },
    /// Anything else that it answered, or what is wrong with its answer. Permanent.
    #[error("{host} gave an unusable answer to {action}: {reason}")]
    Protocol { host: String, action: String, reason: String },
    /// The registry says that it lacks something that a manifest names. Transient: all of it was sent before, and
    /// docker-registry 2.8 writes its links in place, so that it misses one that another client is just writing.
    #[error("{host} misses what it was sent before, to {action}: {reason}")]
    Missed { host: String, action: String, reason: String },
    /// The registry is set up so that nothing can be deleted. Permanent.
    #[error("{host} does not allow to {action}")]
    NoDeletion { host: String, action: String },
    /// Content that is not what its digest says. Transient once, then permanent.
    #[error("{action}: content is {found}, wanted {wanted}")]
    Digest { action: String, wanted: Digest, found: Digest },
    /// What is there is no image, or an index without the architecture that is asked for. Permanent.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// A file of this machine.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// Options that cannot be used, such as a CA file without certificates: which, and why. Permanent.
    #[error("{0}: {1}")]
    Options(String, String),
    /// [`super::Access`] sent nothing: a host that may not be asked, a client certificate that cannot be shown. `transient`: it may be
    /// sent later, without any change.
    #[error("{source}")]
    NotSent { source: Box<dyn Error + Send + Sync>, transient: bool },
    /// A [`super::Retrying`] was told to stop.
    #[error("interrupted")]
    Cancelled,
}

impl RegistryError {
    /// There is no connection, or it broke.
    pub fn unreachable(host: &str, action: &str, source: impl Error + Send + Sync + 'static) -> Self {
        Self::Unreachable { host: host.to_owned(), action: action.to_owned(), source: Box::new(source) }
    }

    /// An answer that cannot be used.
    pub fn protocol(
        host: impl Into<String>,
        action: impl Into<String>,
        reason: impl Into<String>,
    ) -> RegistryError {
        Self::Protocol { host: host.into(), action: action.into(), reason: reason.into() }
    }

    /// May the same request succeed later, without any change?
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable { source, .. } => {
                connection_problem(source.as_ref()) == ConnectionProblem::Broken
            }
            Self::Server { .. } | Self::Digest { .. } | Self::Missed { .. } => true,
            Self::NotSent { transient, .. } => *transient,
            Self::Denied { .. }
            | Self::TokenServer { .. }
            | Self::Protocol { .. }
            | Self::NoDeletion { .. }
            | Self::Image(_)
            | Self::Io(_)
            | Self::Options(..)
            | Self::Cancelled => false,
        }
    }

    /// Was the registry out of reach, or did it fail?
    pub fn is_unreachable(&self) -> bool {
        matches!(self, Self::Unreachable { .. } | Self::Server { .. })
    }
}

/// Why a connection did not come about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionProblem {
    /// The server's certificate is of an authority that is not trusted.
    Certificate,
    /// The server's certificate has expired, or is not valid yet.
    CertificateTime,
    /// The server's certificate is another host's.
    CertificateName,
    /// The server does not accept our certificate, or wants one and got none.
    ClientCertificate,
    /// The other side does not speak TLS.
    NotTls,
    /// Refused, timed out, no such host, reset.
    Broken,
}

/// Finds out why there is no connection.
pub fn connection_problem(error: &(dyn Error + 'static)) -> ConnectionProblem {
    let Some(error) = causes(error).find_map(|cause| cause.downcast_ref::<rustls::Error>()) else {
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

/// The TCP connection stood, and TLS did not: then there may be plain HTTP. A certificate that is not trusted is no
/// reason to do without. Some servers hang up on a greeting that they do not understand.
pub(super) fn speaks_something_else(error: &(dyn Error + 'static)) -> bool {
    let hung_up = |error: &io::Error| {
        matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset)
    };
    match connection_problem(error) {
        ConnectionProblem::NotTls => true,
        ConnectionProblem::Broken => {
            causes(error).filter_map(|cause| cause.downcast_ref::<io::Error>()).any(hung_up)
        }
        _ => false,
    }
}

/// An error and its causes. An `io::Error` does not list the error that it wraps among them, only that
/// one's, so it is opened here.
pub fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |&error| {
        match error.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
            Some(inner) => Some(inner),
            None => error.source(),
        }
    })
}

/// An error with its causes, on one line.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let words = error.to_string();
        if !text.ends_with(&words) {
            text.push_str(": ");
            text.push_str(&words);
        }
        cause = error.source();
    }
    text
}

/// The start of an answer's body in printable form: a registry's own words, a proxy's page, garbage.
pub fn excerpt(body: &[u8]) -> String {
    let answer: Value = serde_json::from_slice(body).unwrap_or_default();
    let word = |error: &Value, key: &str| error[key].as_str().unwrap_or_default().to_owned();
    let errors = answer["errors"].as_array().into_iter().flatten();
    let errors: Vec<_> = errors.map(|e| format!("{}: {}", word(e, "code"), word(e, "message"))).collect();
    let text = if errors.is_empty() { String::from_utf8_lossy(body).into_owned() } else { errors.join("; ") };
    let printable = |c: char| if c.is_control() || c == char::REPLACEMENT_CHARACTER { ' ' } else { c };
    let words: String = text.chars().take(2000).map(printable).collect();
    let words = words.split_whitespace().collect::<Vec<_>>().join(" ");
    if words.chars().count() > 160 {
        format!("{}...", words.chars().take(160).collect::<String>())
    } else {
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn excerpts_are_short_and_printable() {
        insta::assert_snapshot!(
            excerpt(br#"{"errors":[{"code":"DENIED","message":"no\u001b[31m way","detail":1}]}"#),
            @"DENIED: no [31m way"
        );
        insta::assert_snapshot!(excerpt(b"<html>\r\n\x1b]0;x\x07\xff hello"), @"<html> ]0;x hello");
        assert_eq!(excerpt("x".repeat(5000).as_bytes()).len(), 163);
        assert_eq!(excerpt(b""), "");
    }
}
