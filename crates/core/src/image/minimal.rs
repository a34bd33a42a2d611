//! Pure: the smallest base: one static busybox and what a container's programs expect around it.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    AptSource,
    checked::{self, Component, LocalPath, Mirror, PackageName, PackageVersion, Rule, Suite},
};
use crate::kernel::AptSuites;

/// A base with a static busybox, the links by which it is `sh`, `ls`, `lsmod`, `grep` and others, and the directories
/// and files that programs look for. About 2 MB; there is no package manager and no C library in it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct MinimalSpec {
    /// Where the package is looked for, such as `bookworm`.
    #[serde(deserialize_with = "checked::some::<Suite, _>")]
    #[schemars(length(min = 1), inner(regex(pattern = Suite::PATTERN)))]
    pub suites: Vec<String>,
    /// Components; `main` when empty.
    #[serde(
        default,
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "checked::many::<Component, _>"
    )]
    #[schemars(inner(regex(pattern = Component::PATTERN)))]
    pub components: Vec<String>,
    /// The package that has a statically linked `busybox`.
    #[serde(default = "busybox", deserialize_with = "checked::one::<PackageName, _>")]
    #[schemars(regex(pattern = PackageName::PATTERN))]
    pub package: String,
    /// Its exact version; the suites' newest when absent, so that an update of busybox is a new base.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "checked::optional::<PackageVersion, _>"
    )]
    #[schemars(regex(pattern = PackageVersion::PATTERN))]
    pub version: Option<String>,
    /// The archive's address; the host's own entry for the suite when absent.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "checked::optional::<Mirror, _>"
    )]
    #[schemars(regex(pattern = Mirror::PATTERN))]
    pub mirror: Option<String>,
    /// Keyring that signs the archive; that of the host's entry when absent.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "checked::optional_path::<LocalPath, _>"
    )]
    pub signed_by: Option<PathBuf>,
}

fn busybox() -> String {
    "busybox-static".to_owned()
}

impl MinimalSpec {
    /// The package, as sources name one.
    pub fn source(&self) -> AptSource {
        let Self { suites, components, package, version, mirror, signed_by } = self.clone();
        AptSource { package, version, suites: AptSuites { suites, components, mirror, signed_by } }
    }
}
