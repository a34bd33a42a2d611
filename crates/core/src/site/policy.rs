//! Pure: what must hold of an image before nodes get it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::definition::checked::LocalPath;

/// What must hold of an image before a rollout names it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Policy {
    /// Public keys (PEM files, relative to the definitions directory), of which one must have signed the image; nothing is
    /// required where there are none. The signature is over the manifest, and so over what its annotations say: inputs,
    /// kernel and verdict. `farrier verify` checks the documents beside the image, too.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub require_signed: Vec<LocalPath>,
}

impl Policy {
    /// Is nothing required?
    pub fn is_empty(&self) -> bool {
        let Self { require_signed } = self;
        require_signed.is_empty()
    }
}
