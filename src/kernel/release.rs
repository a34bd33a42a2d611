//! Pure: the exact `uname -r` string.

use std::{fmt, str::FromStr};

/// The exact kernel release (`uname -r`, `node.status.nodeInfo.kernelVersion`), checked.
///
/// It is used unaltered in paths (`/lib/modules/<release>`), so the checked form has 1 to 64
/// characters (`__NEW_UTS_LEN` in the kernel's `include/uapi/linux/utsname.h`) of
/// `[A-Za-z0-9._+~-]` and starts with `<number>.<number>`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KernelRelease(String);

/// Why a string is not a kernel release.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReleaseError {
    /// Empty, or longer than the kernel's own limit.
    #[error("kernel release {0:?} has {1} characters, 1 to 64 are possible")]
    Length(String, usize),
    /// A character that no kernel build system accepts in a release.
    #[error("kernel release {0:?} holds the character {1:?}; only letters, digits and `._+~-` are possible")]
    Character(String, char),
    /// Does not start with `x.y`.
    #[error("kernel release {0:?} does not start with <major>.<minor>")]
    Version(String),
}

impl KernelRelease {
    /// The release as the kernel spells it.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// `x.y.z` at the start of the release as a semantic version; a missing `z` is 0, and what
    /// follows is ignored (`5.14.0-427.13.1.el9_4` is `5.14.0`).
    pub fn version(&self) -> semver::Version {
        let mut numbers = self
            .0
            .split(|c: char| !c.is_ascii_digit() && c != '.')
            .next()
            .unwrap_or("")
            .split('.')
            .map(|n| n.parse().unwrap_or(0));
        let mut next = || numbers.next().unwrap_or(0);
        semver::Version::new(next(), next(), next())
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
        let mut parts = text.splitn(2, '.');
        let number =
            |part: Option<&str>| part.and_then(|p| p.chars().next()).is_some_and(|c| c.is_ascii_digit());
        let major_is_number =
            text.split('.').next().is_some_and(|m| !m.is_empty() && m.chars().all(|c| c.is_ascii_digit()));
        parts.next();
        if !major_is_number || !number(parts.next()) || text.contains("..") {
            return Err(ReleaseError::Version(text.to_owned()));
        }
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Display for KernelRelease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
