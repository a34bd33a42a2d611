//! Pure: one kernel target, the unit that images are built for.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Architecture, KernelRelease, OsId, OsVersion};

/// What a node runs, or is about to: the unit that images are built for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct KernelTarget {
    /// Operating system id (`ID` of os-release).
    pub os: OsId,
    /// Operating system version (`VERSION_ID` of os-release).
    pub os_version: OsVersion,
    /// Exact kernel release, as `uname -r` will print it.
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
