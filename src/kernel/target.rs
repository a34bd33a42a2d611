//! Pure: one kernel target, the unit that images are built for.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use super::KernelRelease;

/// `ID` of `/etc/os-release`: 1 to 63 characters of `[A-Za-z0-9._-]`, not starting with `.` or `-`.
#[derive(
    Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(try_from = "String", into = "String")]
#[schemars(!try_from, !into)]
pub struct OsId(#[schemars(regex(pattern = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,62}$"))] String);

/// `VERSION_ID` of `/etc/os-release`: 1 to 63 characters of `[A-Za-z0-9._-]`, not starting with `.` or `-`.
#[derive(
    Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(try_from = "String", into = "String")]
#[schemars(!try_from, !into)]
pub struct OsVersion(#[schemars(regex(pattern = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,62}$"))] String);

/// Why a string is not an operating system's id or version.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not an operating system {1}: 1 to 63 of letters, digits and `._-` are possible")]
pub struct OsNameError(pub String, pub &'static str);

/// A processor architecture, in Kubernetes' (Go's) spelling.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Architecture {
    /// x86_64.
    Amd64,
    /// aarch64.
    Arm64,
}

/// An architecture that farrier does not build for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("architecture {0:?} is not supported; amd64 and arm64 are")]
pub struct ArchitectureError(pub String);

/// What a node runs, or is about to: the unit that images are built for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct KernelTarget {
    /// Operating system id.
    pub os: OsId,
    /// Operating system version.
    pub os_version: OsVersion,
    /// Exact kernel release.
    pub release: KernelRelease,
    /// Processor architecture.
    pub arch: Architecture,
}

impl KernelTarget {
    /// The GPU Operator's name of the operating system: `ubuntu22.04`, but `rhel9`: of the Enterprise Linux family the
    /// major version only (gpu-operator, `controllers/state_manager.go`).
    pub fn os_tag(&self) -> String {
        let Self { os, os_version, release: _, arch: _ } = self;
        let major = os_version.as_str().split('.').next().unwrap_or_default();
        match os.as_str() {
            "rhel" | "rocky" | "ol" => format!("{os}{major}"),
            _ => format!("{os}{os_version}"),
        }
    }
}

impl OsId {
    /// The id's text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl OsVersion {
    /// The version's text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Architecture {
    /// Kubernetes' and OCI's name: `amd64`, `arm64`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Amd64 => "amd64",
            Self::Arm64 => "arm64",
        }
    }

    /// The kernel's and GNU's name: `x86_64`, `aarch64`.
    pub fn gnu_name(self) -> &'static str {
        match self {
            Self::Amd64 => "x86_64",
            Self::Arm64 => "aarch64",
        }
    }
}

fn is_os_name(text: &str) -> bool {
    (1..=63).contains(&text.len())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
        && !text.starts_with(['.', '-'])
}

impl FromStr for OsId {
    type Err = OsNameError;

    fn from_str(text: &str) -> Result<Self, OsNameError> {
        if is_os_name(text) {
            Ok(Self(text.to_owned()))
        } else {
            Err(OsNameError(text.chars().take(80).collect(), "id"))
        }
    }
}

impl TryFrom<String> for OsId {
    type Error = OsNameError;

    fn try_from(text: String) -> Result<Self, OsNameError> {
        text.parse()
    }
}

impl From<OsId> for String {
    fn from(id: OsId) -> Self {
        id.0
    }
}

impl TryFrom<String> for OsVersion {
    type Error = OsNameError;

    fn try_from(text: String) -> Result<Self, OsNameError> {
        text.parse()
    }
}

impl From<OsVersion> for String {
    fn from(version: OsVersion) -> Self {
        version.0
    }
}

impl FromStr for OsVersion {
    type Err = OsNameError;

    fn from_str(text: &str) -> Result<Self, OsNameError> {
        if is_os_name(text) {
            Ok(Self(text.to_owned()))
        } else {
            Err(OsNameError(text.chars().take(80).collect(), "version"))
        }
    }
}

impl FromStr for Architecture {
    type Err = ArchitectureError;

    fn from_str(text: &str) -> Result<Self, ArchitectureError> {
        match text {
            "amd64" | "x86_64" => Ok(Self::Amd64),
            "arm64" | "aarch64" => Ok(Self::Arm64),
            other => Err(ArchitectureError(other.chars().take(80).collect())),
        }
    }
}

impl fmt::Display for OsId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for OsVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Display for KernelTarget {
    /// `6.1.0-47-amd64 (debian 12, amd64)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { os, os_version, release, arch } = self;
        write!(f, "{release} ({os} {os_version}, {arch})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_a_path_or_a_shell_would_misread_are_refused() {
        for text in ["", ".", "..", "-rf", "a/b", "a b", "ubuntu\n", "ü", "$(id)", &"a".repeat(64)] {
            assert!(text.parse::<OsId>().is_err(), "{text:?} was accepted as an id");
            assert!(text.parse::<OsVersion>().is_err(), "{text:?} was accepted as a version");
        }
    }

    #[test]
    fn both_spellings_of_an_architecture_are_known() {
        assert_eq!("x86_64".parse(), Ok(Architecture::Amd64));
        assert_eq!("arm64".parse(), Ok(Architecture::Arm64));
        assert_eq!("aarch64".parse::<Architecture>().map(Architecture::as_str), Ok("arm64"));
        assert!("riscv64".parse::<Architecture>().is_err());
    }

    #[test]
    fn a_target_is_told_in_one_line() {
        let target = KernelTarget {
            os: "debian".parse().unwrap(),
            os_version: "12".parse().unwrap(),
            release: "6.1.0-47-amd64".parse().unwrap(),
            arch: Architecture::Amd64,
        };
        assert_eq!(target.to_string(), "6.1.0-47-amd64 (debian 12, amd64)");
    }
}
