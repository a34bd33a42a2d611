//! Adapter: what registries answer instead of what was asked for.

use std::{error::Error, io};

use crate::{
    image::Digest,
    net::{Fault, NetError, fault},
};

/// What a registry answered, or did not.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// No connection, or it broke. Transient, unless it is a matter of certificates.
    #[error("reach {host} to {action}")]
    Unreachable {
        /// Whom.
        host: String,
        /// For what.
        action: String,
        /// Why not.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// 5xx, 429. Transient.
    #[error("{host} answered {status} to {action}")]
    Server {
        /// Who.
        host: String,
        /// HTTP status.
        status: u16,
        /// To what.
        action: String,
    },
    /// 401, 403, or no credentials for a registry that wants some. Permanent.
    #[error("{host} refused to {action}: {reason}")]
    Denied {
        /// Who.
        host: String,
        /// What.
        action: String,
        /// Its words.
        reason: String,
    },
    /// Anything else that it answered. Permanent.
    #[error("{host} gave an unusable answer to {action}: {reason}")]
    Protocol {
        /// Who.
        host: String,
        /// What.
        action: String,
        /// Its words.
        reason: String,
    },
    /// The registry is set up so that nothing can be deleted. Permanent.
    #[error("{host} does not allow to {action}")]
    NoDeletion {
        /// Who.
        host: String,
        /// What.
        action: String,
    },
    /// Content that is not what its digest says. Transient once, then permanent.
    #[error("{action}: content is {found}, wanted {wanted}")]
    Digest {
        /// What was done.
        action: String,
        /// What was asked for.
        wanted: Digest,
        /// What came.
        found: Digest,
    },
    /// A file of this machine.
    #[error("{action}")]
    Io {
        /// What was done, to what.
        action: String,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// Options that cannot be used, such as a CA file without certificates. Permanent.
    #[error("{what}: {reason}")]
    Options {
        /// Which option.
        what: String,
        /// Why.
        reason: String,
    },
    /// A [`super::Retrying`] was told to stop.
    #[error("interrupted")]
    Cancelled,
    /// A host that may not be asked, or a client certificate that cannot be shown.
    #[error(transparent)]
    Net(NetError),
}

impl RegistryError {
    /// What the network says to `action` at the registry `host`.
    pub(super) fn of_net(host: &str, action: &str, error: NetError) -> Self {
        let (host, action) = (host.to_owned(), action.to_owned());
        match error {
            NetError::Http { host: _, source } => {
                Self::Unreachable { host, action, source: Box::new(source) }
            }
            NetError::Options { what, reason } => Self::Options { what, reason },
            error @ NetError::Redirect { .. } => Self::Protocol { host, action, reason: error.to_string() },
            error @ (NetError::Offline { .. } | NetError::Secret { .. }) => Self::Net(error),
        }
    }

    /// May the same request succeed later, without anybody changing anything?
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable { source, .. } => fault(source.as_ref()) == Fault::Connection,
            Self::Server { .. } | Self::Digest { .. } => true,
            Self::Net(error) => error.is_transient(),
            Self::Denied { .. }
            | Self::Protocol { .. }
            | Self::NoDeletion { .. }
            | Self::Io { .. }
            | Self::Options { .. }
            | Self::Cancelled => false,
        }
    }

    /// Was the registry out of reach, or did it fail?
    pub fn is_unreachable(&self) -> bool {
        matches!(self, Self::Unreachable { .. } | Self::Server { .. })
    }

    /// What to do about it, where that is clear.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Unreachable { host, source, .. } => Some(match fault(source.as_ref()) {
                Fault::NotTls => format!(
                    "plain HTTP is only used for loopback; add --insecure-registry {host} if it is meant"
                ),
                fault => fault.hint(host).unwrap_or_else(|| {
                    format!("check that the registry runs and that {host} is its address")
                }),
            }),
            Self::Net(error) => error.hint(),
            Self::Denied { host, .. } => Some(format!(
                "docker login {host}, with a user who may do this, or check the name of the repository"
            )),
            Self::Io { source, .. } if source.kind() == io::ErrorKind::StorageFull => {
                Some("free some space; nothing incomplete was left".to_owned())
            }
            Self::NoDeletion { host, .. } => Some(format!(
                "allow deletion at {host}: in docker-registry (distribution) with REGISTRY_STORAGE_DELETE_ENABLED=true or \
                 `storage: {{delete: {{enabled: true}}}}`, in others by their own settings"
            )),
            Self::Digest { .. } => {
                Some("the registry, or a proxy before it, alters or mixes up content".to_owned())
            }
            Self::Server { host, .. } => {
                Some(format!("see the log of the registry at {host}; it was asked several times"))
            }
            Self::Protocol { .. } | Self::Io { .. } | Self::Options { .. } | Self::Cancelled => None,
        }
    }

    pub(super) fn io(action: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let action = action.into();
        move |source| Self::Io { action, source }
    }
}

/// The start of an answer's body in printable form: a registry's own words, a proxy's page, garbage.
pub(super) fn excerpt(body: &[u8]) -> String {
    #[derive(serde::Deserialize)]
    struct Answer {
        errors: Vec<Entry>,
    }
    #[derive(serde::Deserialize)]
    struct Entry {
        #[serde(default)]
        code: String,
        #[serde(default)]
        message: String,
    }
    let text = match serde_json::from_slice::<Answer>(body) {
        Ok(Answer { errors }) if !errors.is_empty() => errors
            .iter()
            .map(|Entry { code, message }| format!("{code}: {message}"))
            .collect::<Vec<_>>()
            .join("; "),
        _ => String::from_utf8_lossy(body).into_owned(),
    };
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

    fn unreachable(source: impl Error + Send + Sync + 'static) -> RegistryError {
        let (host, action) = ("r.example:5000".to_owned(), "list tags of drivers/x".to_owned());
        RegistryError::Unreachable { host, action, source: Box::new(source) }
    }

    #[test]
    fn faults_are_found_inside_wrapped_errors() {
        let wrap = |error: rustls::Error| unreachable(io::Error::other(io::Error::other(error)));
        let unknown_issuer = wrap(rustls::Error::InvalidCertificate(rustls::CertificateError::UnknownIssuer));
        assert!(!unknown_issuer.is_transient());
        insta::assert_snapshot!(
            unknown_issuer.hint().unwrap(),
            @"if r.example:5000 has a certificate of your own authority, set --ca-file, or `caFile` of the host in site.yaml"
        );
        let plain = wrap(rustls::Error::InvalidMessage(rustls::InvalidMessage::InvalidContentType));
        insta::assert_snapshot!(
            plain.hint().unwrap(),
            @"plain HTTP is only used for loopback; add --insecure-registry r.example:5000 if it is meant"
        );
        let refused = unreachable(io::Error::from(io::ErrorKind::ConnectionRefused));
        assert!(refused.is_transient());
        insta::assert_snapshot!(refused, @"reach r.example:5000 to list tags of drivers/x");
    }

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
