//! Locations of secrets. A definition never contains a secret itself.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::definition::checked::{DnsLabel, DnsName, LocalPath};

/// A Kubernetes Secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, derive_more::Display)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[display("{namespace}/{name}")]
pub struct SecretName {
    /// Namespace of the Secret.
    #[schemars(with = "String")]
    pub namespace: DnsLabel,
    /// Name of the Secret.
    #[schemars(with = "String")]
    pub name: DnsName,
}

/// One entry of a Kubernetes Secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SecretKey {
    /// Namespace of the Secret.
    #[schemars(with = "String")]
    pub namespace: DnsLabel,
    /// Name of the Secret.
    #[schemars(with = "String")]
    pub name: DnsName,
    /// The key in the Secret's `data`.
    pub key: String,
}

/// Location of a secret. Set exactly one field.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum SecretSource {
    /// A file, absolute or relative to the definitions directory.
    File(LocalPath),
    /// An entry of a Kubernetes Secret.
    Secret(SecretKey),
}
