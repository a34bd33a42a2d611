//! Pure: announced kernels (`announced/*.yaml`): kernels that images are made for before a node runs them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::KernelTarget;
use crate::definition::{ApiVersion, Metadata, NonEmpty};

/// One file of `announced/`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct AnnouncedKernels {
    /// Always `farrier.dev/v1alpha1`.
    pub api_version: ApiVersion,
    /// Always `AnnouncedKernels`.
    pub kind: AnnouncedKernelsKind,
    /// The list's name.
    pub metadata: Metadata,
    /// What it says.
    pub spec: AnnouncedKernelsSpec,
}

/// The one value of such a list's `kind`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum AnnouncedKernelsKind {
    /// `AnnouncedKernels`.
    AnnouncedKernels,
}

/// Which kernels are announced. Every driver image whose range holds one is built and published for it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct AnnouncedKernelsSpec {
    /// The kernels.
    pub kernels: NonEmpty<KernelTarget>,
}
