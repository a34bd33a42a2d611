//! Resources and deadline of a build.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::definition::{Cpus, Memory, Period};

/// Resources that one build needs. farrier runs builds concurrently as long as their sum fits the machine. These values decide
/// when a build runs and whether it finishes. They do not affect the result, so the input hash excludes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct BuildSpec {
    /// CPUs that the build uses: `2`, `500m`.
    #[serde(default)]
    pub cpus: Cpus,
    /// Peak memory use: `2Gi`, `1500M`.
    #[serde(default)]
    pub memory: Memory,
    /// Maximum run time of the engine before farrier stops the build. Default: two hours.
    #[serde(default = "default_deadline")]
    pub deadline: Period,
}

/// Several times the build time of a complete GPU driver on two CPUs.
fn default_deadline() -> Period {
    Period::seconds(2 * 60 * 60)
}

impl Default for BuildSpec {
    fn default() -> Self {
        Self { cpus: Cpus::default(), memory: Memory::default(), deadline: default_deadline() }
    }
}
