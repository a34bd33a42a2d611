//! Driver images: their definitions, names, tags and input hashes.

mod build;
mod chain;
mod definition;
mod ended_branch;
mod git_source;
mod host_output;
mod input_hash;
mod kernel_condition;
mod minimal;
mod need;
mod rollout;
mod runfile;
mod source;
mod source_entry;
mod tag;
mod upgrade;
mod version;

pub use build::BuildSpec;
pub use chain::{Chains, connected_components, find_cycle, need_edges};
pub(crate) use definition::has_labels;
pub use definition::{
    CheckSpec, DRIVER_ENTRYPOINTS, Definitions, DriverImage, DriverImageSpec, NodeSelector, OnConflict,
    Output, Reuse, RuntimeBase, RuntimeSpec, UnknownPolicy,
};
pub use ended_branch::ended_branch;
pub use git_source::{GitSource, commit_in};
pub use host_output::{DEBIAN, HostOutput};
pub use input_hash::{FieldHasher, InputHash};
pub use kernel_condition::KernelVars;
pub use minimal::MinimalSpec;
pub use need::Need;
pub use oci::{Digest, ImageReference, ReferenceError, Repository, Tag, Version, mirror_name};
pub use rollout::{
    ChartImage, ChartValue, DaemonSetContainer, GitLocation, ManifestObject, OperatorResource, ResourceName,
    RolloutSpec, Strategy, Watch,
};
pub use runfile::{RunfileBase, RunfileSpec};
pub use source::{
    AptSource, FirmwareSpec, PatchSpec, Redistribute, RpmSource, SourceImage, SourceOrigin, SourceSpec,
};
pub use source_entry::{SourceEntry, is_editor_file, is_version_control};
pub use tag::{TagError, TagInputs, needs_in, render_tags, share_tags, sources_in};
pub use upgrade::{Canary, Drain, LabelSelector, MaxParallel, OnFailure, UpgradeSpec, WaitFor, Window};
pub use version::VersionSpec;

pub use crate::definition::{
    ApiVersion, Cpus, Memory, Metadata, Period,
    checked::{self, ImageName},
};
