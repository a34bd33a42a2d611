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
        let allowed = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
        let text: String = release.as_str().chars().map(allowed).collect();
        text.trim_matches(['-', '_', '.']).parse().ok()
    }

    /// The label's text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for KernelLabel {
    type Err = LabelError;

    fn from_str(text: &str) -> Result<Self, LabelError> {
        let length = text.chars().count();
        if !(1..=63).contains(&length) {
            return Err(LabelError::Length(text.chars().take(80).collect(), length));
        }
        let inner = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        let ends = [text.chars().next(), text.chars().next_back()];
        let ends_well = ends.iter().flatten().all(char::is_ascii_alphanumeric);
        if text.chars().all(inner) && ends_well {
            Ok(Self(text.to_owned()))
        } else {
            Err(LabelError::Form(text.to_owned()))
        }
    }
}

impl fmt::Display for KernelLabel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn label(release: &str) -> Option<String> {
        KernelLabel::of(&release.parse().unwrap()).map(|label| label.to_string())
    }

    #[test]
    fn labels_are_those_of_node_feature_discovery() {
        assert_eq!(label("6.1.0-47-amd64").unwrap(), "6.1.0-47-amd64");
        assert_eq!(label("6.1.192-acme+").unwrap(), "6.1.192-acme");
        assert_eq!(label("5.14.0-427.13.1.el9_4.aarch64+64k").unwrap(), "5.14.0-427.13.1.el9_4.aarch64_64k");
        assert_eq!(label("6.1.0~rc1-amd64").unwrap(), "6.1.0_rc1-amd64");
    }

    #[test]
    fn a_release_that_is_too_long_has_no_label() {
        assert_eq!(label(&format!("6.1.{}", "9".repeat(60))), None);
    }

    proptest! {
        #[test]
        fn every_label_is_a_label_value(release in "[0-9]{1,2}\\.[0-9]{1,3}[A-Za-z0-9._+~-]{0,58}") {
            if let Ok(release) = release.parse::<KernelRelease>()
                && let Some(label) = KernelLabel::of(&release)
            {
                prop_assert_eq!(label.as_str().parse::<KernelLabel>().unwrap(), label);
            }
        }
    }
}
