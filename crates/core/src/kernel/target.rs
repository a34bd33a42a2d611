//! Pure: one kernel target, the unit that images are built for.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use super::{Architecture, KernelRelease};

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
