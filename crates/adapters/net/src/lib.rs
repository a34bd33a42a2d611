//! Provides HTTP clients, permitted hosts, proxies, certificates and secrets to all crates that access the network.
//!
//! Every HTTP request goes through [`Net::execute`], which enforces `--offline` before the first request and before
//! each redirect. Programs that access the network themselves (apt, mmdebstrap, git, engines) are checked with
//! [`Net::check_allowed`] before they start. `--cluster` permits the API server, whose connection the kubeconfig configures.
//!
//! `--offline` allows only named hosts: those that `site.yaml` names (hosts, their token servers, mirrors, the proxy), and
//! the registry of the command line.

#![forbid(unsafe_code)]

mod apt;
mod client;
mod error;
mod git;
mod secrets;
mod tls;

use std::{fmt, path::PathBuf, sync::Arc};

use derive_more::Display;
use jiff::Timestamp;
use parking_lot::RwLock;
use reqwest::Client;
use tokio::sync::OnceCell;
use url::Url;

pub use apt::AptOptions;
pub use error::{NetError, connection_hint};
use farrier_core::{
    image::Repository,
    site::{self, Host, HostPolicy, HostPort, MirrorRule, Prefix, Proxy, ProxyUrl, SiteSpec},
};
pub use git::{GitAccess, git_access};
pub use secrets::{ClusterSecretError, ClusterSecrets, Secret, SecretError, SecretReader};

/// Network options of this machine and site.
#[derive(Clone, Default, derive_more::Debug)]
pub struct NetOptions {
    /// Mirrors, proxies and hosts of the site.
    pub site: SiteSpec,
    /// Base of relative paths: the definitions directory.
    pub root: PathBuf,
    /// Certificates (PEM) trusted for every host, in addition to the system's.
    pub ca_file: Option<PathBuf>,
    /// Hosts (`host` or `host:port`) that may be accessed over plain HTTP, in addition to loopback and the site's hosts.
    pub insecure: Vec<String>,
    /// Proxies from the environment, which apply if the site names none.
    pub environment: Proxy,
    /// Whether only named hosts may be accessed (`--offline`).
    pub offline: bool,
    /// Cluster that holds Secrets, if there is one.
    #[debug(skip)]
    pub cluster: Option<Arc<dyn ClusterSecrets>>,
}

/// Purpose of an access to a host, and the origin of its address.
#[derive(Clone, Copy, Debug, Display)]
#[display("{action}{}", redirected_by.map(|host| format!(" (redirected by {host})")).unwrap_or_default())]
pub struct AccessPurpose<'a> {
    /// Action that needs the access: `fetch manifest of drivers/x:1`, `apt for suite bookworm`.
    pub action: &'a str,
    /// Host that named the address; `None` if a definition or the command line named it.
    pub redirected_by: Option<&'a str>,
}

impl<'a> AccessPurpose<'a> {
    /// Access to an address from a definition or the command line.
    pub fn of(action: &'a str) -> Self {
        Self { action, redirected_by: None }
    }
}

/// HTTP clients, created on first use.
#[derive(Default)]
struct Clients {
    general: OnceCell<Client>,
    /// One client for each of the site's hosts.
    hosts: Vec<OnceCell<Client>>,
}

/// Access to the network. A clone shares connections and named hosts. By default all hosts are permitted, directly and
/// with the system's certificates.
#[derive(Clone, Default)]
pub struct Net(Arc<Inner>);

/// Origin of the proxies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum ProxyOrigin {
    /// There is no proxy.
    #[default]
    None,
    /// The site's definition.
    Site,
    /// The environment. Such a proxy is not a named host.
    Environment,
}

#[derive(Default)]
struct Inner {
    mirrors: Vec<MirrorRule>,
    hosts: Vec<Host>,
    insecure: Vec<HostPort>,
    proxy: Proxy,
    proxy_origin: ProxyOrigin,
    policy: RwLock<HostPolicy>,
    secrets: SecretReader,
    root: PathBuf,
    clients: Clients,
    trusted: tls::Trusted,
}

impl Net {
    /// Reads the certificates in the options; contacts no host.
    pub fn new(options: NetOptions) -> Result<Self, NetError> {
        let NetOptions { site, root, ca_file, insecure, environment, offline, cluster } = options;
        let SiteSpec { mirrors, proxy, hosts, .. } = site;
        let mut policy = if offline { HostPolicy::offline() } else { HostPolicy::default() };
        let mirror_hosts = mirrors.iter().flat_map(|rule| &rule.to).filter_map(host_of_prefix);
        let named = hosts.iter().flat_map(|host| std::iter::once(&host.host).chain(&host.token_servers));
        for host in named.cloned().chain(mirror_hosts) {
            policy.allow(host);
        }
        for address in proxy.iter().flat_map(|proxy| [&proxy.http, &proxy.https]).flatten() {
            if let Some(host) = address.host() {
                policy.allow(host);
            }
        }
        let proxy_origin = match &proxy {
            Some(_) => ProxyOrigin::Site,
            None if environment == Proxy::default() => ProxyOrigin::None,
            None => ProxyOrigin::Environment,
        };
        let mut insecure_hosts = Vec::new();
        for text in &insecure {
            let host = text.parse().map_err(|error: site::ParseError| {
                NetError::Options("--insecure-registry".to_owned(), error.to_string())
            })?;
            insecure_hosts.push(host);
        }
        insecure_hosts.extend(hosts.iter().filter(|host| host.plain_http).map(|host| host.host.clone()));
        let trusted = tls::Trusted::read(ca_file.as_deref(), &hosts, &root)?;
        Ok(Self(Arc::new(Inner {
            clients: Clients { hosts: hosts.iter().map(|_| OnceCell::new()).collect(), ..Clients::default() },
            proxy_origin,
            proxy: proxy.unwrap_or(environment),
            policy: RwLock::new(policy),
            secrets: SecretReader::new(root.clone(), cluster),
            insecure: insecure_hosts,
            mirrors,
            hosts,
            root,
            trusted,
        })))
    }

    /// Reader for this site's secrets.
    pub fn secrets(&self) -> &SecretReader {
        &self.0.secrets
    }

    /// Whether only named hosts may be accessed.
    pub fn is_offline(&self) -> bool {
        self.0.policy.read().is_offline()
    }

    /// Adds a host from the command line (`--registry`) to the named hosts, which `--offline` allows.
    pub fn add_named_host(&self, host: HostPort) {
        self.0.policy.write().allow(host);
    }

    /// Checks that a host may be accessed. The error states the purpose.
    pub fn check_allowed(&self, host: &HostPort, purpose: &AccessPurpose<'_>) -> Result<(), NetError> {
        if self.is_allowed(host) {
            return Ok(());
        }
        Err(NetError::Offline { purpose: purpose.to_string(), host: host.to_string() })
    }

    /// Whether a host may be accessed.
    pub fn is_allowed(&self, host: &HostPort) -> bool {
        self.0.policy.read().allows(host)
    }

    /// Expiry times of the certificate files that were read at startup: for a client certificate, the first in its chain to
    /// expire; for a file of roots, the last.
    pub fn certificate_expiries(&self) -> Vec<(String, Timestamp)> {
        self.0.trusted.expiries(&self.0.hosts)
    }

    /// Whether this host may be accessed without TLS.
    pub fn allows_plain(&self, host: &HostPort) -> bool {
        host.is_loopback() || self.0.insecure.iter().any(|entry| entry.covers(host))
    }

    /// Whether the site trusts a token server with the credentials of a registry.
    pub fn trusts_token_server(&self, authority: &str, realm: &Url) -> bool {
        let (Some(registry), Some(server)) = (HostPort::of_registry(authority), HostPort::of_url(realm))
        else {
            return false;
        };
        let entries = self.0.hosts.iter().filter(|entry| entry.host.covers(&registry));
        entries.flat_map(|entry| &entry.token_servers).any(|trusted| trusted.covers(&server))
    }

    /// Whether the site configures certificates for this host. farrier never accesses such a host without TLS.
    pub fn requires_tls(&self, host: &HostPort) -> bool {
        self.host_entry(host).is_some_and(|(_, entry)| {
            !entry.plain_http && (entry.ca_file.is_some() || entry.client_certificate.is_some())
        })
    }

    /// Whether the registry at this host refuses to move tags.
    pub fn has_immutable_tags(&self, host: &HostPort) -> bool {
        self.0.hosts.iter().any(|entry| entry.immutable_tags && entry.host.covers(host))
    }

    /// Repositories to look for an image in: first the mirrors, then the original. A forbidden original is dropped unless it is
    /// the only candidate. Then it stays, so that the error names it.
    pub fn image_candidates(&self, repository: &Repository) -> Vec<Repository> {
        let candidates = site::image_candidates(&self.0.mirrors, repository);
        self.drop_forbidden_original(candidates, |candidate| HostPort::of_registry(&candidate.normalized().0))
    }

    /// Addresses to look for a file at, by the rules of [`Self::image_candidates`].
    pub fn url_candidates(&self, url: &Url) -> Vec<Url> {
        self.drop_forbidden_original(site::url_candidates(&self.0.mirrors, url), HostPort::of_url)
    }

    fn drop_forbidden_original<T>(
        &self,
        mut candidates: Vec<T>,
        host: impl Fn(&T) -> Option<HostPort>,
    ) -> Vec<T> {
        // The original is the last candidate (`site::image_candidates`). Mirrors are named hosts, which are always allowed.
        let is_forbidden = candidates.last().and_then(host).is_some_and(|host| !self.is_allowed(&host));
        if is_forbidden && candidates.len() > 1 {
            candidates.pop();
        }
        candidates
    }

    /// Most specific entry for a host, and its index.
    fn host_entry(&self, host: &HostPort) -> Option<(usize, &Host)> {
        let covering = self.0.hosts.iter().enumerate().filter(|(_, entry)| entry.host.covers(host));
        // Of equally specific entries the first wins; `max_by_key` returns the last, hence `rev`.
        covering.rev().max_by_key(|(_, entry)| entry.host.port().is_some())
    }

    /// Proxy for an address, if that proxy comes from the environment.
    fn environment_proxy(&self, url: &Url) -> Option<&ProxyUrl> {
        match self.0.proxy_origin {
            ProxyOrigin::Environment => self.0.proxy.for_url(url),
            ProxyOrigin::None | ProxyOrigin::Site => None,
        }
    }
}

fn host_of_prefix(prefix: &Prefix) -> Option<HostPort> {
    match prefix {
        Prefix::Image(images) => images.host().parse().ok(),
        Prefix::Address(url) => HostPort::of_url(url),
    }
}

impl fmt::Debug for Net {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { mirrors, hosts, proxy, .. } = self.0.as_ref();
        f.debug_struct("Net")
            .field("mirrors", mirrors)
            .field("hosts", hosts)
            .field("proxy", proxy)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
