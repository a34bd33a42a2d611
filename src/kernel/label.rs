//! Pure: Node Feature Discovery's lossy form of a kernel release.

use std::{fmt, str::FromStr};

use super::KernelRelease;

/// The value of `feature.node.kubernetes.io/kernel-version.full`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KernelLabel(String);

/// Why a string is not a label value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LabelError {
    /// Kubernetes allows 63 characters, and NFD publishes no empty value.
    #[error("label value {0:?} has {1} characters, 1 to 63 are possible")]
    Length(String, usize),
    /// Kubernetes allows `[A-Za-z0-9._-]`, with a letter or digit at both ends.
    #[error("label value {0:?} is not letters, digits and `._-` with a letter or digit at both ends")]
    Form(String),
}

impl KernelLabel {
    /// The label that NFD gives to this release: every character outside `[-A-Za-z0-9_.]` becomes
    /// `_`, and `-_.` are trimmed from both ends (NFD `source/kernel/version.go`). `None` when more
    /// than 63 characters remain, because then NFD publishes no such label.
    pub fn of(release: &KernelRelease) -> Option<Self> {
        let _ = release;
        todo!("kernel")
    }

    /// The label's text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for KernelLabel {
    type Err = LabelError;

    fn from_str(text: &str) -> Result<Self, LabelError> {
        let _ = text;
        todo!("kernel")
    }
}

impl fmt::Display for KernelLabel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
