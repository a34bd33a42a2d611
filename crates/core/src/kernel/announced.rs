//! Announced kernels (`announced/*.yaml`): kernels that farrier builds images for before any node runs them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::KernelTarget;
use crate::definition::{ApiVersion, Metadata, NonEmpty};

/// One file in `announced/`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct AnnouncedKernels {
    /// Always `farrier.dev/v1alpha1`.
    pub api_version: ApiVersion,
    /// Always `AnnouncedKernels`.
    pub kind: AnnouncedKernelsKind,
    /// The list's name.
    pub metadata: Metadata,
    /// The specification.
    pub spec: AnnouncedKernelsSpec,
}

/// The only valid value of an announcement's `kind`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum AnnouncedKernelsKind {
    /// `AnnouncedKernels`.
    AnnouncedKernels,
}

/// The announced kernels. farrier builds and publishes every driver image whose range includes one of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct AnnouncedKernelsSpec {
    /// The kernels.
    pub kernels: NonEmpty<KernelTarget>,
}
