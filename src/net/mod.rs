//! Adapter: the network: who may be asked, how, and with which secrets.
//!
//! All HTTP of farrier's own goes through [`Net::execute`], which is where `--offline` is enforced: before the first
//! request and before each redirect. Programs that reach the network by themselves (apt, mmdebstrap, git, engines) are asked
//! for with [`Net::permit`] before they start. The API server is `--cluster`'s, and reached as the kubeconfig says.

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

pub use apt::AptReach;
pub use error::{NetError, connection_hint};
pub use git::{GitReach, git_reach};
pub use secrets::{Secret, SecretError, SecretReader};

use crate::{
    cluster::KubeOptions,
    image::Repository,
    site::{self, Host, HostPolicy, HostPort, MirrorRule, Prefix, Proxy, ProxyUrl, SiteSpec},
};

/// What the network is like here.
#[derive(Clone, Debug, Default)]
pub struct NetOptions {
    /// Mirrors, proxies, hosts.
    pub site: SiteSpec,
    /// Where relative files start: the definitions directory.
    pub root: PathBuf,
    /// Certificates (PEM) that are trusted for every host, beside the system's.
    pub ca_file: Option<PathBuf>,
    /// Hosts (`host` or `host:port`) beside loopback that may be talked to in plain HTTP, further to the site's.
    pub insecure: Vec<String>,
    /// The environment's proxies, for a site that names none.
    pub environment: Proxy,
    /// May only hosts that are named be asked?
    pub offline: bool,
    /// Which cluster holds Secrets.
    pub kube: KubeOptions,
}

/// For what a host is to be asked, and who named it.
#[derive(Clone, Copy, Debug, Display)]
#[display("{what}{}", sent_by.map(|host| format!(" (sent on by {host})")).unwrap_or_default())]
pub struct Asker<'a> {
    /// What for, in words: `fetch manifest of drivers/x:1`, `apt for suite bookworm`.
    pub what: &'a str,
    /// The host that named the one that is to be asked; `None` where a definition or the command line did.
    pub sent_by: Option<&'a str>,
}

impl<'a> Asker<'a> {
    /// By a definition or the command line.
    pub fn of(what: &'a str) -> Self {
        Self { what, sent_by: None }
    }
}

/// HTTP clients, made when they are needed first.
#[derive(Default)]
struct Clients {
    general: OnceCell<Client>,
    /// One for each of the site's hosts.
    hosts: Vec<OnceCell<Client>>,
}

/// How hosts are reached. A clone shares connections and names. By default every host may be asked, directly, with the
/// system's certificates.
#[derive(Clone, Default)]
pub struct Net(Arc<Inner>);

#[derive(Default)]
struct Inner {
    mirrors: Vec<MirrorRule>,
    hosts: Vec<Host>,
    insecure: Vec<HostPort>,
    proxy: Proxy,
    /// Does `proxy` come from the environment? Such a proxy is not named for `--offline`.
    environment: bool,
    site_proxy: bool,
    policy: RwLock<HostPolicy>,
    secrets: SecretReader,
    root: PathBuf,
    clients: Clients,
    trusted: tls::Trusted,
}

impl Net {
    /// Reads the certificates that the options name; nothing is contacted yet.
    pub fn new(options: NetOptions) -> Result<Self, NetError> {
        let NetOptions { site, root, ca_file, insecure, environment, offline, kube } = options;
        let SiteSpec { mirrors, proxy, hosts, .. } = site;
        let mut policy = if offline { HostPolicy::only_named() } else { HostPolicy::default() };
        let places = mirrors.iter().flat_map(|rule| &rule.to).filter_map(host_of_prefix);
        let of_hosts = hosts.iter().flat_map(|host| std::iter::once(&host.host).chain(&host.token_servers));
        for named in of_hosts.cloned().chain(places) {
            policy.name(named);
        }
        for address in proxy.iter().flat_map(|proxy| [&proxy.http, &proxy.https]).flatten() {
            address.host().into_iter().for_each(|host| policy.name(host));
        }
        let mut plain = Vec::new();
        for text in &insecure {
            let host = text.parse().map_err(|error: site::NotA| {
                NetError::Options("--insecure-registry".to_owned(), error.to_string())
            })?;
            plain.push(host);
        }
        plain.extend(hosts.iter().filter(|host| host.plain_http).map(|host| host.host.clone()));
        let trusted = tls::Trusted::read(ca_file.as_deref(), &hosts, &root)?;
        Ok(Self(Arc::new(Inner {
            clients: Clients { hosts: hosts.iter().map(|_| OnceCell::new()).collect(), ..Clients::default() },
            environment: proxy.is_none() && environment != Proxy::default(),
            site_proxy: proxy.is_some(),
            proxy: proxy.unwrap_or(environment),
            policy: RwLock::new(policy),
            secrets: SecretReader::new(root.clone(), kube),
            insecure: plain,
            mirrors,
            hosts,
            root,
            trusted,
        })))
    }

    /// Reads this site's secrets.
    pub fn secrets(&self) -> &SecretReader {
        &self.0.secrets
    }

    /// May only named hosts be asked?
    pub fn is_offline(&self) -> bool {
        self.0.policy.read().is_offline()
    }

    /// The command line names this host (`--registry`), so that it may be asked with `--offline`, too.
    pub fn name_host(&self, host: HostPort) {
        self.0.policy.write().name(host);
    }

    /// May the host be asked? `asker` is who wants to know.
    pub fn permit(&self, host: &HostPort, asker: &Asker<'_>) -> Result<(), NetError> {
        if self.allows(host) {
            return Ok(());
        }
        Err(NetError::Offline { who: asker.to_string(), host: host.to_string() })
    }

    pub(crate) fn allows(&self, host: &HostPort) -> bool {
        self.0.policy.read().allows(host)
    }

    /// When the certificates end that were read at the start: of the chain that is shown to a host the first one, of the roots in
    /// a file the last one.
    pub fn certificate_ends(&self) -> Vec<(String, Timestamp)> {
        self.0.trusted.ends(&self.0.hosts)
    }

    /// May this host be talked to without TLS?
    pub fn allows_plain(&self, host: &HostPort) -> bool {
        host.is_loopback() || self.0.insecure.iter().any(|known| known.covers(host))
    }

    /// Whether the site lets a token server get the credentials of a registry.
    pub(crate) fn trusts_token_server(&self, authority: &str, realm: &Url) -> bool {
        let (Some(registry), Some(server)) = (HostPort::of_registry(authority), HostPort::of_url(realm))
        else {
            return false;
        };
        let of_registry = self.0.hosts.iter().filter(|entry| entry.host.covers(&registry));
        of_registry.flat_map(|entry| &entry.token_servers).any(|trusted| trusted.covers(&server))
    }

    /// Is there a word on this host's certificates? Then it speaks TLS, and is never asked without.
    pub(crate) fn wants_tls(&self, host: &HostPort) -> bool {
        self.host_entry(host).is_some_and(|(_, entry)| {
            !entry.plain_http && (entry.ca_file.is_some() || entry.client_certificate.is_some())
        })
    }

    /// Where an image is looked for, in order. Offline, its own place is left out unless its host is named, or there is
    /// no other: then the error tells that.
    pub fn image_candidates(&self, repository: &Repository) -> Vec<Repository> {
        let candidates = site::image_candidates(&self.0.mirrors, repository);
        self.without_forbidden(candidates, |candidate| HostPort::of_registry(&candidate.normalised().0))
    }

    /// The same for an address.
    pub fn url_candidates(&self, url: &Url) -> Vec<Url> {
        self.without_forbidden(site::url_candidates(&self.0.mirrors, url), HostPort::of_url)
    }

    fn without_forbidden<T>(&self, mut candidates: Vec<T>, host: impl Fn(&T) -> Option<HostPort>) -> Vec<T> {
        let forbidden = candidates.last().and_then(host).is_some_and(|host| !self.allows(&host));
        if forbidden && candidates.len() > 1 {
            candidates.pop();
        }
        candidates
    }

    /// The most specific word on a host, and its number.
    fn host_entry(&self, host: &HostPort) -> Option<(usize, &Host)> {
        let covering = self.0.hosts.iter().enumerate().filter(|(_, entry)| entry.host.covers(host));
        // The first of equals: `max_by_key` takes the last.
        covering.rev().max_by_key(|(_, entry)| entry.host.port().is_some())
    }

    /// The proxy for an address, and whether it is the environment's.
    fn proxy(&self, url: &Url) -> Option<(&ProxyUrl, bool)> {
        self.0.proxy.for_url(url).map(|proxy| (proxy, self.0.environment))
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
