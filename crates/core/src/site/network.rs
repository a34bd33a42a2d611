//! Pure: proxies, credentials, and how single hosts are reached.

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, de};
use url::Url;

use super::{HostPort, NoProxy, Prefix, ProxyUrl, SecretName, SecretSource};
use crate::definition::checked::LocalPath;

/// A user's name, and the password where secrets are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Login {
    /// The user.
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
    /// Hosts, domains (`.example`) and networks (`10.0.0.0/8`) that are reached directly. Loopback always is.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub no_proxy: Vec<NoProxy>,
    /// Who asks the proxies.
    pub login: Option<Login>,
}

impl Proxy {
    /// The proxy through which an address is reached; `None`: directly.
    pub fn for_url(&self, url: &Url) -> Option<&ProxyUrl> {
        let Self { http, https, no_proxy, login: _ } = self;
        let proxy = if url.scheme() == "https" { https } else { http }.as_ref()?;
        let host = HostPort::of_url(url)?;
        let direct = host.is_loopback() || no_proxy.iter().any(|entry| entry.matches(&host));
        (!direct).then_some(proxy)
    }
}

fn of_images<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Prefix, D::Error> {
    match Prefix::deserialize(deserializer)? {
        prefix @ Prefix::Image(_) => Ok(prefix),
        Prefix::Address(url) => Err(de::Error::custom(format!(
            "{:?} is not a registry: `host[:port][/path]`, without a scheme",
            url.as_str()
        ))),
    }
}

/// How one host is reached.
#[serde_with::skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Host {
    /// `host` or `host:port`; without a port, all ports of the host.
    pub host: HostPort,
    /// Root certificates for this host, PEM, beside the system's; relative to the definitions directory.
    pub ca_file: Option<LocalPath>,
    /// The certificate that farrier shows, PEM, with its chain.
    pub client_certificate: Option<LocalPath>,
    /// That certificate's key, PEM.
    pub client_key: Option<SecretSource>,
    /// May it be talked to without TLS?
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub plain_http: bool,
    /// Who asks it for downloads and Git repositories. Registries have `credentials`, and apt has its own `/etc/apt/auth.conf`.
    pub login: Option<Login>,
    /// The private key, in OpenSSH's form, with which its Git repositories are reached by SSH.
    pub ssh_key: Option<SecretSource>,
    /// Its SSH keys, as `known_hosts` has them; relative to the definitions directory. Without it the user's own file counts.
    pub known_hosts: Option<LocalPath>,
    /// Of a registry: hosts (`host` or `host:port`) that may get its credentials and give tokens for it, where these are not its own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub token_servers: Vec<HostPort>,
}

/// Where credentials for registries stand: exactly one field.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum Credentials {
    /// A file of the form that Docker's `config.json` and Podman's `auth.json` have; relative to the definitions directory.
    DockerConfig(LocalPath),
    /// A Kubernetes Secret of type `kubernetes.io/dockerconfigjson`.
    PullSecret(SecretName),
    /// A user's name here, and the password where secrets are.
    Basic {
        /// `host[:port][/path]` of the registry.
        #[serde(deserialize_with = "of_images")]
        registry: Prefix,
        /// The user.
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
