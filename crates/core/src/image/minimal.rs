//! Pure: the smallest base: one static busybox and what a container's programs expect around it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::AptSource;
use crate::definition::{
    NonEmpty,
    checked::{Component, LocalPath, Mirror, PackageName, PackageVersion, Suite},
};

/// A base with a static busybox, the links by which it is `sh`, `ls`, `lsmod`, `grep` and others, and the directories
/// and files that programs look for. About 2 MB; there is no package manager and no C library in it.
#[serde_with::skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct MinimalSpec {
    /// Where the package is looked for, such as `bookworm`.
    pub suites: NonEmpty<Suite>,
    /// Components; `main` when empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub components: Vec<Component>,
    /// The package that has a statically linked `busybox`.
    #[serde(default = "PackageName::busybox")]
    pub package: PackageName,
    /// Its exact version; the suites' newest when absent, so that an update of busybox is a new base.
    pub version: Option<PackageVersion>,
    /// The archive's address; the host's own entry for the suite when absent.
    pub mirror: Option<Mirror>,
    /// Keyring that signs the archive; that of the host's entry when absent.
    pub signed_by: Option<LocalPath>,
}

impl MinimalSpec {
    /// The package, as sources name one.
    pub fn source(&self) -> AptSource {
        let Self { suites, components, package, version, mirror, signed_by } = self.clone();
        let package = package.into();
        AptSource { package, version, suites, components, mirror, signed_by, arch: None }
    }
}
