//! Pure: what a build takes of the machine.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::definition::{Cpus, Memory, Period};

/// What one build takes of the machine; farrier runs builds side by side as long as their sum fits. It decides when a
/// build runs, and whether it comes to its end; it changes nothing in what is built, so it is no part of the input hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct BuildSpec {
    /// Processors that it keeps busy: `2`, `500m`.
    #[serde(default)]
    pub cpus: Cpus,
    /// Memory at its peak: `2Gi`, `1500M`.
    #[serde(default)]
    pub memory: Memory,
    /// How long the engine may run before the build is stopped; two hours where nothing is said.
    #[serde(default = "default_deadline")]
    pub deadline: Period,
}

/// Several times what a whole GPU driver takes on two processors.
fn default_deadline() -> Period {
    Period::seconds(2 * 60 * 60)
}

impl Default for BuildSpec {
    fn default() -> Self {
        Self { cpus: Cpus::default(), memory: Memory::default(), deadline: default_deadline() }
    }
}
