//! The kernel target, the unit that images are built for.

use std::borrow::Cow;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Architecture, KernelLabel, KernelRelease, OsId, OsVersion};
use crate::definition::checked::KERNEL_PLACEHOLDERS;

/// A kernel that a node runs, or is about to run: the unit that images are built for.
#[derive(Serialize, Deserialize, JsonSchema, derive_more::Display)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[display("{release} ({os} {os_version}, {arch})")]
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KernelTarget {
    /// Operating system id (`ID` of os-release).
    pub os: OsId,
    /// Operating system version (`VERSION_ID` of os-release).
    pub os_version: OsVersion,
    /// Exact kernel release, as printed by `uname -r`.
    pub release: KernelRelease,
    /// Processor architecture.
    pub arch: Architecture,
}

impl KernelTarget {
    /// Operating system and version as the GPU Operator writes them in image tags: `ubuntu22.04`, but `rhel9`. For `rhel`,
    /// `rocky` and `ol` the tag has only the major version (gpu-operator, `controllers/state_manager.go`).
    pub(crate) fn os_tag(&self) -> String {
        let Self { os, os_version, release: _, arch: _ } = self;
        let major = os_version.as_str().split('.').next().unwrap_or_default();
        match os.as_str() {
            "rhel" | "rocky" | "ol" => format!("{os}{major}"),
            _ => format!("{os}{os_version}"),
        }
    }

    /// Replaces the kernel placeholders in a text. The values come from validated types, so they contain neither braces nor
    /// separators.
    pub fn fill(&self, text: &str) -> String {
        let Self { os, os_version, release, arch } = self;
        let label = KernelLabel::of(release).map_or_else(|| release.to_string(), |label| label.to_string());
        let releasever = self.repository_version();
        let (os, os_version) = (os.as_str(), os_version.as_str());
        let values =
            [release.as_str(), label.as_str(), os, os_version, &*releasever, arch.as_str(), arch.gnu_name()];
        let placeholders = KERNEL_PLACEHOLDERS.iter().zip(values);
        placeholders.fold(text.to_owned(), |text, (placeholder, value)| text.replace(placeholder, value))
    }

    /// Distribution version in the URLs of package repositories. RHCOS reports OpenShift's version as its own, so its RHEL
    /// version is read from the kernel release: `9.4` from `.el9_4`.
    pub fn repository_version(&self) -> Cow<'_, str> {
        let Self { os, os_version, release, arch: _ } = self;
        let Some((_, version)) = release.as_str().split_once(".el").filter(|_| os.as_str() == "rhcos") else {
            return Cow::Borrowed(os_version.as_str());
        };
        let end = version.find(|c: char| !c.is_ascii_digit() && c != '_').unwrap_or(version.len());
        Cow::Owned(version.get(..end).unwrap_or_default().replace('_', "."))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_unsafe_in_paths_or_shells_are_rejected() {
        for text in ["", ".", "..", "-rf", "a/b", "a b", "ubuntu\n", "ü", "$(id)", &"a".repeat(64)] {
            assert!(text.parse::<OsId>().is_err(), "{text:?} was accepted as an id");
            assert!(text.parse::<OsVersion>().is_err(), "{text:?} was accepted as a version");
        }
    }

    #[test]
    fn rhcos_has_kernels_of_rhel() {
        let version = |os: &str, release: &str| {
            let (os, os_version) = (os.parse().unwrap(), "4.16".parse().unwrap());
            let target =
                KernelTarget { os, os_version, release: release.parse().unwrap(), arch: Architecture::Amd64 };
            target.repository_version().into_owned()
        };
        assert_eq!(version("rhcos", "5.14.0-427.50.1.el9_4.x86_64"), "9.4");
        assert_eq!(version("rhcos", "4.18.0-553.el8_10.x86_64"), "8.10");
        assert_eq!(version("rhcos", "5.14.0-70.el9.x86_64+rt"), "9");
        assert_eq!(version("rhcos", "6.1.0-acme"), "4.16");
        assert_eq!(version("rhel", "5.14.0-427.50.1.el9_4.x86_64"), "4.16");
    }

    #[test]
    fn placeholders_are_filled_in() {
        let target = KernelTarget {
            os: "rhcos".parse().unwrap(),
            os_version: "4.16".parse().unwrap(),
            release: "5.14.0-427.50.1.el9_4.x86_64+rt".parse().unwrap(),
            arch: Architecture::Amd64,
        };
        let text = KERNEL_PLACEHOLDERS.join(" ");
        assert_eq!(
            target.fill(&text),
            "5.14.0-427.50.1.el9_4.x86_64+rt 5.14.0-427.50.1.el9_4.x86_64_rt rhcos 4.16 9.4 amd64 x86_64"
        );
        assert_eq!(target.fill("{{digest}} {x}"), "{{digest}} {x}");
    }

    #[test]
    fn target_displays_on_one_line() {
        let target = KernelTarget {
            os: "debian".parse().unwrap(),
            os_version: "12".parse().unwrap(),
            release: "6.1.0-47-amd64".parse().unwrap(),
            arch: Architecture::Amd64,
        };
        assert_eq!(target.to_string(), "6.1.0-47-amd64 (debian 12, amd64)");
    }
}
