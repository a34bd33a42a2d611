//! Pure: where a secret is read from. What is secret itself never stands in a definition.

use std::{fmt, path::PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::image::checked::{self, DnsLabel, DnsName, LocalPath};

/// A Kubernetes Secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SecretName {
    /// Its namespace.
    #[serde(deserialize_with = "checked::one::<DnsLabel, _>")]
    pub namespace: String,
    /// Its name.
    #[serde(deserialize_with = "checked::one::<DnsName, _>")]
    pub name: String,
}

impl fmt::Display for SecretName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { namespace, name } = self;
        write!(f, "{namespace}/{name}")
    }
}

/// One entry of a Kubernetes Secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SecretKey {
    /// Its namespace.
    #[serde(deserialize_with = "checked::one::<DnsLabel, _>")]
    pub namespace: String,
    /// Its name.
    #[serde(deserialize_with = "checked::one::<DnsName, _>")]
    pub name: String,
    /// The key in its `data`.
    pub key: String,
}

/// Where a secret stands: exactly one field.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum SecretSource {
    /// A file, absolute or relative to the definitions directory.
    File(#[serde(deserialize_with = "checked::path::<LocalPath, _>")] PathBuf),
    /// An entry of a Kubernetes Secret.
    Secret(SecretKey),
}
