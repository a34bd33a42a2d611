//! Pure: who commits to Git repositories.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::SecretSource;
use crate::definition::checked::OneLine;

/// Who commits, in the repositories of `git` rollouts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct GitCommits {
    /// The name of author and committer.
    pub name: OneLine,
    /// Their email address.
    pub email: OneLine,
    /// The private key, in OpenSSH's form and without a passphrase, that signs commits; without it they are not signed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signing_key: Option<SecretSource>,
}
