//! Pure: mirrors, proxies, and how single hosts are reached.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{SecretName, SecretSource};
use crate::image::checked::{self, LocalPath};

/// Other places for what begins with a prefix.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct MirrorRule {
    /// The beginning of image references (`docker.io/library`) or addresses (`https://github.com/Mellanox/`), up to a `/`.
    pub from: String,
    /// What stands in its place: the candidates, in the order in which they are tried.
    pub to: Vec<String>,
}

/// A proxy (`http://[user:password@]host:port`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Proxy {
    /// For `http://`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub http: Option<String>,
    /// For `https://`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub https: Option<String>,
    /// Hosts, domains (`.example`) and networks (`10.0.0.0/8`) that are reached directly. Loopback always is.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub no_proxy: Vec<String>,
}

/// How one host is reached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Host {
    /// `host` or `host:port`; without a port, all ports of the host.
    pub host: String,
    /// Root certificates for this host, PEM, beside the system's; relative to the definitions directory.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "checked::optional_path::<LocalPath, _>"
    )]
    pub ca_file: Option<PathBuf>,
    /// The certificate that farrier shows, PEM, with its chain.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "checked::optional_path::<LocalPath, _>"
    )]
    pub client_certificate: Option<PathBuf>,
    /// That certificate's key, PEM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client_key: Option<SecretSource>,
    /// May it be talked to without TLS?
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub plain_http: bool,
}

/// Where credentials for registries stand: exactly one field.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum Credentials {
    /// A file of the form that Docker's `config.json` and Podman's `auth.json` have; relative to the definitions directory.
    DockerConfig(#[serde(deserialize_with = "checked::path::<LocalPath, _>")] PathBuf),
    /// A Kubernetes Secret of type `kubernetes.io/dockerconfigjson`.
    PullSecret(SecretName),
    /// A user's name here, and the password where secrets are.
    Basic {
        /// `host[:port][/path]` of the registry.
        registry: String,
        /// The user.
        user: String,
        /// The password.
        password: SecretSource,
    },
}
