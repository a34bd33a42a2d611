//! Proxies, credentials, and settings for single hosts.

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, de};
use url::Url;

use super::{HostPort, NoProxy, Prefix, ProxyUrl, SecretName, SecretSource};
use crate::definition::checked::LocalPath;

/// A user name, and the location of its password.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Login {
    /// The user name.
    pub user: String,
    /// The password.
    pub password: SecretSource,
}

/// A proxy (`http://host:port`).
#[serde_with::skip_serializing_none]
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Proxy {
    /// For `http://`.
    pub http: Option<ProxyUrl>,
    /// For `https://`.
    pub https: Option<ProxyUrl>,
    /// Hosts, domains (`.example`) and networks (`10.0.0.0/8`) that are reached directly. Loopback is always direct.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub no_proxy: Vec<NoProxy>,
    /// Login for the proxies.
    pub login: Option<Login>,
}

impl Proxy {
    /// Returns the proxy for a URL; `None` if the host is reached directly.
    pub fn for_url(&self, url: &Url) -> Option<&ProxyUrl> {
        let Self { http, https, no_proxy, login: _ } = self;
        let proxy = if url.scheme() == "https" { https } else { http }.as_ref()?;
        let host = HostPort::of_url(url)?;
        let is_direct = host.is_loopback() || no_proxy.iter().any(|entry| entry.matches(&host));
        (!is_direct).then_some(proxy)
    }
}

fn registry_prefix<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Prefix, D::Error> {
    match Prefix::deserialize(deserializer)? {
        prefix @ Prefix::Image(_) => Ok(prefix),
        Prefix::Address(url) => Err(de::Error::custom(format!(
            "{:?} is not a registry: `host[:port][/path]`, without a scheme",
            url.as_str()
        ))),
    }
}

/// Settings for one host.
#[serde_with::skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Host {
    /// `host` or `host:port`. Without a port, the settings apply to all ports of the host.
    pub host: HostPort,
    /// Root certificates for this host, PEM, in addition to the system's. Relative to the definitions directory.
    pub ca_file: Option<LocalPath>,
    /// Client certificate with its chain, PEM.
    pub client_certificate: Option<LocalPath>,
    /// Private key of the client certificate, PEM.
    pub client_key: Option<SecretSource>,
    /// Allow plain HTTP, without TLS.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub plain_http: bool,
    /// Login for downloads and Git repositories. Registries use `credentials`; apt uses its own `/etc/apt/auth.conf`.
    pub login: Option<Login>,
    /// The private key for SSH access to Git repositories, in OpenSSH's format.
    pub ssh_key: Option<SecretSource>,
    /// The host's SSH keys in `known_hosts` format, relative to the definitions directory. Default: the user's own file.
    pub known_hosts: Option<LocalPath>,
    /// For a registry: additional hosts (`host` or `host:port`) that may receive its credentials and issue tokens for it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub token_servers: Vec<HostPort>,
    /// For a registry where no tag may move: each content of a tag that farrier moves gets its own tag.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub immutable_tags: bool,
}

/// Credentials for registries. Set exactly one field.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum Credentials {
    /// A file in the format of Docker's `config.json` and Podman's `auth.json`, relative to the definitions directory.
    DockerConfig(LocalPath),
    /// A Kubernetes Secret of type `kubernetes.io/dockerconfigjson`.
    PullSecret(SecretName),
    /// A user name, with the location of its password.
    Basic {
        /// `host[:port][/path]` of the registry.
        #[serde(deserialize_with = "registry_prefix")]
        registry: Prefix,
        /// The user name.
        user: String,
        /// The password.
        password: SecretSource,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_proxy_of_an_address() {
        let proxy: Proxy = serde_json::from_str(
            r#"{"http": "http://p.example:1", "https": "http://p.example:2", "noProxy": [".site.example", "10.0.0.0/8"]}"#,
        )
        .unwrap();
        for (url, wanted) in [
            ("http://a.example/x", Some("http://p.example:1")),
            ("https://a.example/x", Some("http://p.example:2")),
            ("https://r.site.example:5000/x", None),
            ("https://10.1.1.1/x", None),
            ("http://127.0.0.1:5000/x", None),
            ("http://localhost/x", None),
        ] {
            let found = proxy.for_url(&url.parse().unwrap()).map(ToString::to_string);
            assert_eq!(found.as_deref(), wanted, "{url}");
        }
        let none = Proxy { https: None, ..proxy };
        assert_eq!(none.for_url(&"https://a.example/x".parse().unwrap()), None);
    }
}
