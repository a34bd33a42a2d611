//! Pure: how much farrier keeps on a disk.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::definition::Memory;

/// How much farrier keeps on a disk. What was not used for longest goes first; what a running build uses never goes, also
/// where that is more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Storage {
    /// Header sets, sources, packages, root file systems and blobs in the cache directory. The work of running builds comes
    /// on top of it.
    pub cache: Memory,
    /// Logs of builds in the cache directory.
    pub logs: Memory,
    /// Toolchains, and toolchains with headers, that farrier made in a Docker or Podman daemon.
    pub engine_images: Memory,
}

impl Default for Storage {
    fn default() -> Self {
        let gibibytes = |number: u64| Memory::from_bytes(number << 30);
        // Of the 20 GiB that the pod's cache has in `deploy/`, a third is left for running builds.
        Self { cache: gibibytes(12), logs: gibibytes(1), engine_images: gibibytes(30) }
    }
}

impl Storage {
    /// Is it what holds where the site says nothing?
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}
