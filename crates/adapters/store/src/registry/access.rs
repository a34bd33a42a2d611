//! Gives the registry client network access and credentials, and provides hints for its errors.

use std::{error::Error, io, sync::Arc};

use farrier_core::{
    image::{Repository, Tag},
    site::HostPort,
};
use farrier_net::{AccessPurpose, Net, NetError, connection_hint};
use url::Url;

use super::{is_joined, keyring::Keyring};
use crate::is_moving_tag;
use ::oci::client::{
    Access, ConnectionProblem, Credential, LayoutRegistry, Registry, RegistryError, RegistryLocation,
    RemoteRegistry, connection_problem,
};

/// Options for access to registries.
#[derive(Clone, Debug, Default)]
pub struct RegistryOptions {
    pub credentials: Keyring,
    /// Network access.
    pub net: Net,
}

/// Creates a client for a location from the command line; contacts no host. A remote client serves all hosts, because a
/// [`Repository`] includes its host. Repositories that are not below the location are also read from the site's mirrors.
pub fn connect(location: &RegistryLocation, options: &RegistryOptions) -> Arc<dyn Registry> {
    match location {
        RegistryLocation::Remote { host, .. } => {
            let registry =
                RemoteRegistry::new(location.to_string(), options).publishing_below(location.to_string());
            let Ok(host) = host.parse() else { return Arc::new(registry) };
            let has_immutable_tags = options.net.has_immutable_tags(&host);
            options.net.add_named_host(host);
            Arc::new(if has_immutable_tags {
                registry.with_immutable_tags(is_moving_or_joined)
            } else {
                registry
            })
        }
        RegistryLocation::Layout(path) => Arc::new(LayoutRegistry::new(path.clone())),
    }
}

/// Whether farrier moves this tag of the repository `name`, or adds signatures under the tag.
fn is_moving_or_joined(name: &str, tag: &Tag) -> bool {
    is_moving_tag(name, tag) || is_joined(tag)
}

#[async_trait::async_trait]
impl Access for RegistryOptions {
    async fn execute(
        &self,
        request: reqwest::Request,
        action: &str,
        host: &str,
        redirected_by: Option<&str>,
    ) -> Result<reqwest::Response, RegistryError> {
        let sent = self.net.execute(request, &AccessPurpose { action, redirected_by }).await;
        sent.map_err(|error| match error {
            NetError::Http(_, source) => RegistryError::unreachable(host, action, source),
            NetError::Options(what, reason) => RegistryError::Options(what, reason),
            error @ NetError::Redirect(_) => RegistryError::protocol(host, action, error.to_string()),
            error @ (NetError::Offline { .. } | NetError::Secret(..)) => not_sent(error),
        })
    }

    fn may_be_plain(&self, authority: &str) -> bool {
        let host = authority.parse::<HostPort>();
        host.is_ok_and(|host| self.net.allows_plain(&host) && !self.net.requires_tls(&host))
    }

    fn allows_plain(&self, url: &Url) -> bool {
        HostPort::of_url(url).is_some_and(|host| self.net.allows_plain(&host))
    }

    fn trusts_token_server(&self, authority: &str, realm: &Url) -> bool {
        self.net.trusts_token_server(authority, realm)
    }

    fn candidates(&self, repository: &Repository) -> Vec<Repository> {
        self.net.image_candidates(repository)
    }

    async fn credential(&self, host: &str, path: &str) -> Result<Option<Credential>, String> {
        self.credentials.find(host, path).await
    }

    fn credentials_from(&self) -> String {
        self.credentials.describe()
    }
}

/// Wraps an error that prevented a request from being sent.
pub fn not_sent(error: NetError) -> RegistryError {
    RegistryError::NotSent { transient: error.is_transient(), source: Box::new(error) }
}

/// Whether `--offline` forbade access to the host.
pub fn is_forbidden(error: &RegistryError) -> bool {
    matches!(net_error(error), Some(NetError::Offline { .. }))
}

fn net_error(error: &RegistryError) -> Option<&NetError> {
    match error {
        RegistryError::NotSent { source, .. } => {
            let source: &(dyn Error + 'static) = source.as_ref();
            source.downcast_ref()
        }
        _ => None,
    }
}

/// Tells how to create a repository that a push does not create.
fn create_repository_hint(host: &str, repository: &str) -> String {
    // ACCOUNT.dkr.ecr.REGION.amazonaws.com; see "Creating a repository" in the manual of Amazon ECR.
    match host.split_once(".dkr.ecr.").and_then(|(_, rest)| rest.split_once('.')) {
        Some((region, _)) => {
            format!("aws ecr create-repository --region {region} --repository-name {repository}")
        }
        None => {
            format!("create the repository {repository} at {host}, or allow pushes to create repositories")
        }
    }
}

/// Suggested remedy, if one is known.
pub fn hint(error: &RegistryError) -> Option<String> {
    match error {
        // Harbor ("configured as immutable"), Amazon ECR ("the repository is immutable").
        RegistryError::Denied { host, reason, .. } | RegistryError::Protocol { host, reason, .. }
            if reason.contains("immutable") =>
        {
            Some(format!(
                "if this registry refuses to move tags, add `{{host: {host:?}, immutableTags: true}}` to `hosts` in site.yaml"
            ))
        }
        RegistryError::Unreachable { host, source, .. } => {
            let problem = connection_problem(source.as_ref());
            Some(match problem {
                ConnectionProblem::NotTls => format!(
                    "plain HTTP is only used for loopback; pass --insecure-registry {host} to allow it"
                ),
                problem => connection_hint(problem, host).unwrap_or_else(|| not_running_hint(host)),
            })
        }
        RegistryError::Refused { host, .. } => Some(not_running_hint(host)),
        RegistryError::Denied { host, .. } => Some(format!(
            "run `docker login {host}` as a user with this permission, or check the name of the repository"
        )),
        RegistryError::TokenServer { host, realm, .. } => {
            let server = realm.split_once("://").map_or(realm.as_str(), |(_, server)| server);
            Some(format!(
                "if this is the token server of {host}, add `{{host: {host:?}, tokenServers: [{server:?}]}}` to `hosts` in site.yaml; \
                 otherwise someone may have tampered with the responses of {host}"
            ))
        }
        RegistryError::Io(source) if source.kind() == io::ErrorKind::StorageFull => {
            Some("free some space; no partial files were left".to_owned())
        }
        RegistryError::NoRepository { host, repository, .. } => {
            Some(create_repository_hint(host, repository))
        }
        RegistryError::NoDeletion { host, .. } => Some(format!(
            "allow deletion at {host}: for docker-registry (distribution), set \
             REGISTRY_STORAGE_DELETE_ENABLED=true or `storage: {{delete: {{enabled: true}}}}`; for others, \
             see their documentation"
        )),
        RegistryError::Digest { .. } => {
            Some("the registry, or a proxy in front of it, returns altered or mixed-up content".to_owned())
        }
        RegistryError::Server { host, status: 429, .. } => Some(format!(
            "wait, or run `docker login {host}` as a user with a higher limit, or read from a mirror (`mirrors` in site.yaml)"
        )),
        // If the registry requests a long delay, there were no retries.
        RegistryError::Server { host, after: Some(_), .. } => {
            Some(format!("check the log of the registry at {host}"))
        }
        RegistryError::Server { host, .. } => {
            Some(format!("check the log of the registry at {host}; several retries failed"))
        }
        error => net_error(error).and_then(NetError::hint),
    }
}

fn not_running_hint(host: &str) -> String {
    format!("check that the registry is running and that {host} is its address")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn unreachable(source: impl Error + Send + Sync + 'static) -> RegistryError {
        let (host, action) = ("r.example:5000".to_owned(), "list tags of drivers/x".to_owned());
        RegistryError::Unreachable { host, action, source: Box::new(source) }
    }

    #[test]
    fn problems_are_found_inside_wrapped_errors() {
        let wrap = |error: rustls::Error| unreachable(io::Error::other(io::Error::other(error)));
        let unknown_issuer = wrap(rustls::Error::InvalidCertificate(rustls::CertificateError::UnknownIssuer));
        assert!(!unknown_issuer.is_transient());
        insta::assert_snapshot!(
            hint(&unknown_issuer).unwrap(),
            @"if your own authority issued the certificate of r.example:5000, set --ca-file, or `caFile` of the host in site.yaml"
        );
        let plain = wrap(rustls::Error::InvalidMessage(rustls::InvalidMessage::InvalidContentType));
        insta::assert_snapshot!(
            hint(&plain).unwrap(),
            @"plain HTTP is only used for loopback; pass --insecure-registry r.example:5000 to allow it"
        );
        let refused = unreachable(io::Error::from(io::ErrorKind::ConnectionRefused));
        assert!(refused.is_transient());
        insta::assert_snapshot!(refused, @"cannot reach r.example:5000 to list tags of drivers/x");
    }

    #[test]
    fn a_rate_limit_is_not_looked_for_in_a_log() {
        let hint = |status, after: Option<u64>| {
            let (host, action) = ("docker.io".to_owned(), "fetch manifest of library/debian:12".to_owned());
            let after = after.map(Duration::from_secs);
            hint(&RegistryError::Server { host, status, action, after }).unwrap()
        };
        insta::assert_snapshot!(
            hint(429, Some(3600)),
            @"wait, or run `docker login docker.io` as a user with a higher limit, or read from a mirror (`mirrors` in site.yaml)"
        );
        insta::assert_snapshot!(hint(503, Some(3600)), @"check the log of the registry at docker.io");
        insta::assert_snapshot!(hint(503, None), @"check the log of the registry at docker.io; several retries failed");
    }
}
