//! The exact `uname -r` string.

use std::str::FromStr;

use derive_more::Display;
use serde::{Deserialize, Serialize};

/// The exact kernel release (`uname -r`, `node.status.nodeInfo.kernelVersion`), validated.
///
/// The release is used unaltered in paths (`/lib/modules/<release>`). A valid release therefore has 1 to 64 characters
/// (`__NEW_UTS_LEN` in the kernel's `include/uapi/linux/utsname.h`) of `[A-Za-z0-9._+~-]`, and starts with
/// `<number>.<number>`.
#[derive(Serialize, Deserialize, schemars::JsonSchema, Display)]
#[serde(try_from = "String")]
#[schemars(!try_from)]
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KernelRelease(#[schemars(regex(pattern = r"^[0-9]+\.[0-9]+[A-Za-z0-9._+~-]{0,61}$"))] String);

/// Reason why a string is not a kernel release.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReleaseError {
    /// The release is empty, or longer than the kernel's own limit.
    #[error("kernel release {0:?} has {1} characters; 1 to 64 are allowed")]
    Length(String, usize),
    /// The release contains a character that no kernel build system accepts.
    #[error("kernel release {0:?} holds the character {1:?}; only letters, digits and `._+~-` are allowed")]
    Character(String, char),
    /// The release does not start with `x.y`.
    #[error("kernel release {0:?} does not start with <major>.<minor>")]
    Version(String),
}

impl KernelRelease {
    /// Returns the release as the kernel spells it.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns `x.y.z` at the start of the release as a semantic version. A missing `z` is 0, and the rest is ignored
    /// (`5.14.0-427.13.1.el9_4` is `5.14.0`).
    pub fn version(&self) -> semver::Version {
        let mut numbers = leading_numbers(&self.0);
        // Only `z` can be absent: `from_str` has checked the other two.
        let mut next = || numbers.next().flatten().unwrap_or(0);
        semver::Version::new(next(), next(), next())
    }
}

/// Iterates over the dot-separated numbers at the start of the text. A part that is not a 32-bit number gives `None`.
fn leading_numbers(text: &str) -> impl Iterator<Item = Option<u64>> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    text[..end].split('.').map(|part| part.parse::<u32>().ok().map(u64::from))
}

impl TryFrom<String> for KernelRelease {
    type Error = ReleaseError;

    fn try_from(text: String) -> Result<Self, ReleaseError> {
        text.parse()
    }
}

impl FromStr for KernelRelease {
    type Err = ReleaseError;

    fn from_str(text: &str) -> Result<Self, ReleaseError> {
        let length = text.chars().count();
        if !(1..=64).contains(&length) {
            return Err(ReleaseError::Length(text.chars().take(80).collect(), length));
        }
        let forbidden = |c: &char| !(c.is_ascii_alphanumeric() || "._+~-".contains(*c));
        if let Some(c) = text.chars().find(forbidden) {
            return Err(ReleaseError::Character(text.to_owned(), c));
        }
        let mut numbers = leading_numbers(text);
        let (major, minor) = (numbers.next().flatten(), numbers.next().flatten());
        // A patch part that is not a number, as in `5.14.x`, must not pass as 5.14.0. Refuse `..`, so that no path
        // built from the release contains a step upward.
        let patch_is_number = numbers.next().is_none_or(|patch| patch.is_some());
        if major.is_none() || minor.is_none() || !patch_is_number || text.contains("..") {
            return Err(ReleaseError::Version(text.to_owned()));
        }
        Ok(Self(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn releases_of_the_distributions_are_kept_unaltered() {
        for (text, version) in [
            ("3.10.0-1160.45.1.el7.custom.x86_64", (3, 10, 0)),
            ("6.8.0-45-generic", (6, 8, 0)),
            ("5.14.0-427.13.1.el9_4.aarch64+64k", (5, 14, 0)),
            ("6.1.192-acme+", (6, 1, 192)),
            ("6.12.0", (6, 12, 0)),
            ("5.3.18-150300.59.106-default", (5, 3, 18)),
            ("6.1.0-47-amd64", (6, 1, 0)),
            ("6.12.12+bpo-cloud-amd64", (6, 12, 12)),
            ("6.11-rc3", (6, 11, 0)),
            ("6.9.0-0.rc1~acme", (6, 9, 0)),
        ] {
            let release: KernelRelease = text.parse().unwrap();
            assert_eq!(release.to_string(), text);
            assert_eq!(release.version(), semver::Version::new(version.0, version.1, version.2), "{text}");
        }
    }

    #[test]
    fn hostile_releases_are_refused() {
        let long = format!("6.1.0-{}", "a".repeat(59));
        assert_eq!(long.len(), 65);
        for text in [
            "6.1.0$(reboot)",
            "../../etc",
            "6.1.0\n",
            "6.1.0\nRUN id",
            "",
            long.as_str(),
            "6.1.0-ünï",
            "6.1.0-٣",
            "6",
            "6.",
            "6..1",
            ".6.1",
            "6.x",
            "6.1.x86_64",
            "-6.1",
            "6.1/..",
            "6.1 .0",
            "6.1\0",
            "6.1.0;id",
            "99999999999999999999.1.0",
            "6.99999999999999999999",
        ] {
            assert!(text.parse::<KernelRelease>().is_err(), "{text:?} was accepted");
        }
    }

    #[test]
    fn the_longest_release_is_accepted() {
        assert!(format!("6.1.0-{}", "a".repeat(58)).parse::<KernelRelease>().is_ok());
    }

    #[test]
    fn messages_name_the_error() {
        insta::assert_snapshot!(
            "6.1.0$(reboot)".parse::<KernelRelease>().unwrap_err(),
            @r#"kernel release "6.1.0$(reboot)" holds the character '$'; only letters, digits and `._+~-` are allowed"#
        );
        insta::assert_snapshot!(
            "../../etc".parse::<KernelRelease>().unwrap_err(),
            @r#"kernel release "../../etc" holds the character '/'; only letters, digits and `._+~-` are allowed"#
        );
    }

    proptest! {
        #[test]
        fn anything_accepted_is_one_plain_path_component(text in "\\PC{0,70}") {
            if let Ok(release) = text.parse::<KernelRelease>() {
                prop_assert_eq!(release.as_str(), text.as_str());
                let path = std::path::Path::new(&text);
                prop_assert_eq!(path.components().count(), 1);
                prop_assert_eq!(path.file_name().and_then(|n| n.to_str()), Some(text.as_str()));
            }
        }

        #[test]
        fn the_version_is_the_leading_numbers(x in 0u32..100, y in 0u32..100, z in 0u32..1000, tail in "-[a-z0-9._+~]{0,20}") {
            let text = format!("{x}.{y}.{z}{tail}");
            prop_assume!(!text.contains(".."));
            let release: KernelRelease = text.parse().unwrap();
            prop_assert_eq!(release.version(), semver::Version::new(x.into(), y.into(), z.into()));
        }
    }
}
