//! Debian-like archives, and root file systems built from their packages.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    NonEmpty,
    checked::{Component, LocalPath, Mirror, PackageToInstall, Suite},
};

/// Suites and components of a Debian-like archive.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AptSuites {
    /// Suites, such as `bookworm`, `bookworm-security`, `sid`.
    pub suites: Vec<Suite>,
    /// Components. Default: `main`.
    pub components: Vec<Component>,
    /// The archive's address. Default: the host's entry for the suite, else the host's entry for the distribution's
    /// main archive.
    pub mirror: Option<Mirror>,
    /// Keyring that verifies the archive, relative to the definitions directory or absolute. Default: the keyring of
    /// the host's entry.
    pub signed_by: Option<LocalPath>,
}

/// Packages of a Debian-like archive, whose names may depend on the kernel.
#[serde_with::skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(rename = "Apt{P}")]
pub struct AptPackages<P> {
    /// Package names. `{{release}}` is replaced with the kernel release.
    pub packages: NonEmpty<P>,
    /// Suites, such as `bookworm`, `bookworm-security`.
    pub suites: NonEmpty<Suite>,
    /// Components. Default: `main`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub components: Vec<Component>,
    /// The archive's address. Default: the host's entry for the suite.
    pub mirror: Option<Mirror>,
    /// Keyring that verifies the archive, relative to the definitions directory or absolute. Default: the keyring of
    /// the host's entry.
    pub signed_by: Option<LocalPath>,
}

impl<P: Clone> AptPackages<P> {
    /// Suites and components to search for the packages.
    pub fn apt_suites(&self) -> AptSuites {
        let Self { packages: _, suites, components, mirror, signed_by } = self.clone();
        AptSuites { suites: suites.to_vec(), components, mirror, signed_by }
    }
}

/// A root file system built from packages.
#[serde_with::skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct BootstrapSpec {
    /// The suite to install from. List its further suites (security, updates) in `extraSuites`.
    pub suite: Suite,
    /// Further suites of the same release.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub extra_suites: Vec<Suite>,
    /// Components. Default: `main`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub components: Vec<Component>,
    /// Packages to install in addition to the essential ones.
    pub include: Vec<PackageToInstall>,
    /// The archive's address. Default: as for `apt`.
    pub mirror: Option<Mirror>,
    /// Keyring that verifies the archive. Default: as for `apt`.
    pub signed_by: Option<LocalPath>,
}

impl BootstrapSpec {
    /// Fills in the driver's version where a package asks for it. The result is a base for that driver's user space.
    #[must_use]
    pub fn for_version(&self, version: &str) -> Self {
        let include = self.include.iter().map(|package| package.for_version(version)).collect();
        Self { include, ..self.clone() }
    }

    /// Index in `include` of the first package whose version contains `{{version}}`, the driver's version.
    pub fn versioned_package_index(&self) -> Option<usize> {
        self.include.iter().position(|package| package.contains("{{"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_base_follows_the_driver_s_version() {
        let spec: BootstrapSpec = serde_json::from_value(serde_json::json!({
            "suite": "bookworm", "include": ["kmod", "nvidia-smi={{version}}-*", "libx={{ version }}"],
        }))
        .unwrap();
        assert_eq!(spec.versioned_package_index(), Some(1));
        let filled = spec.for_version("535.261.03");
        assert_eq!(filled.include, ["kmod", "nvidia-smi=535.261.03-*", "libx=535.261.03"]);
        assert_eq!((filled.versioned_package_index(), filled.suite), (None, spec.suite));
    }
}
