//! The smallest base image: one static busybox, and the files that programs expect in a container.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::AptSource;
use crate::definition::{
    NonEmpty,
    checked::{Component, LocalPath, Mirror, PackageName, PackageVersion, Suite},
};

/// A base with a static busybox, links for its commands (`sh`, `ls`, `lsmod`, `grep` and others), and the directories and files
/// that programs look for. It takes about 2 MB and has no package manager and no C library.
#[serde_with::skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct MinimalSpec {
    /// Suites to search for the package, such as `bookworm`.
    pub suites: NonEmpty<Suite>,
    /// Components. Default: `main`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub components: Vec<Component>,
    /// The package that contains a statically linked `busybox`.
    #[serde(default = "PackageName::busybox")]
    pub package: PackageName,
    /// Exact version. Default: the newest one in the suites, so that an update of busybox gives a new base.
    pub version: Option<PackageVersion>,
    /// The archive's address. Default: the host's entry for the suite.
    pub mirror: Option<Mirror>,
    /// Keyring that verifies the archive. Default: the keyring of the host's entry.
    pub signed_by: Option<LocalPath>,
}

impl MinimalSpec {
    /// Returns the package as an `apt` source.
    pub fn source(&self) -> AptSource {
        let Self { suites, components, package, version, mirror, signed_by } = self.clone();
        let package = package.into();
        AptSource { package, version, suites, components, mirror, signed_by, arch: None }
    }
}
