//! Pure: where a secret is read from. What is secret itself never stands in a definition.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::definition::checked::{DnsLabel, DnsName, LocalPath};

/// A Kubernetes Secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, derive_more::Display)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[display("{namespace}/{name}")]
pub struct SecretName {
    /// Its namespace.
    #[schemars(with = "String")]
    pub namespace: DnsLabel,
    /// Its name.
    #[schemars(with = "String")]
    pub name: DnsName,
}

/// One entry of a Kubernetes Secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SecretKey {
    /// Its namespace.
    #[schemars(with = "String")]
    pub namespace: DnsLabel,
    /// Its name.
    #[schemars(with = "String")]
    pub name: DnsName,
    /// The key in its `data`.
    pub key: String,
}

/// Where a secret stands: exactly one field.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum SecretSource {
    /// A file, absolute or relative to the definitions directory.
    File(LocalPath),
    /// An entry of a Kubernetes Secret.
    Secret(SecretKey),
}
