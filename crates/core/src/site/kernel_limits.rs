//! Pure: how many kernels nodes may bring.

use std::num::NonZeroU32;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::definition::Period;

/// How many kernels nodes may bring. A node says itself which kernel it runs, and each kernel costs builds, images and a
/// place in the fleet's images. More than any real fleet has is not taken up: such a node is left alone, and holds no others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct KernelLimits {
    /// Kernels that one node may run or announce within `within`. One that names more is not believed until they are
    /// older: only kernels that other nodes run too count of it.
    pub per_node: NonZeroU32,
    /// See `perNode`. It is counted from farrier's start; `0s` takes the limit away.
    pub within: Period,
    /// Kernels that all nodes may run together. Those that the most nodes run count, then those that came first.
    pub distinct: NonZeroU32,
}

impl Default for KernelLimits {
    fn default() -> Self {
        let number = |number| NonZeroU32::new(number).unwrap_or(NonZeroU32::MIN);
        // As many as a union image has layers for.
        Self { per_node: number(16), within: Period::seconds(24 * 3600), distinct: number(100) }
    }
}

impl KernelLimits {
    /// Are they what holds where the site says nothing?
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}
