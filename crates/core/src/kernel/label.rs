//! The kernel label: Node Feature Discovery's lossy form of a kernel release.

use super::KernelRelease;
use crate::definition::checked::KernelLabel;

impl KernelLabel {
    /// Returns the label that NFD sets for a release. Every character outside `[-A-Za-z0-9_.]` becomes `_`, and `-_.` are trimmed
    /// from both ends (NFD `source/kernel/version.go`). `None` if more than 63 characters remain, because NFD then publishes no
    /// such label.
    pub fn of(release: &KernelRelease) -> Option<Self> {
        let replaced: String =
            release.as_str().chars().map(|c| if is_label_character(c) { c } else { '_' }).collect();
        replaced.trim_matches(['-', '_', '.']).parse().ok()
    }
}

fn is_label_character(c: char) -> bool {
    c.is_ascii_alphanumeric() || "-_.".contains(c)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn label(release: &str) -> Option<String> {
        KernelLabel::of(&release.parse().unwrap()).map(|l| l.to_string())
    }

    #[test]
    fn labels_are_what_nfd_publishes() {
        for (release, expected) in [
            ("6.1.0-47-amd64", "6.1.0-47-amd64"),
            ("6.1.192-acme+", "6.1.192-acme"),
            ("5.14.0-427.13.1.el9_4.aarch64+64k", "5.14.0-427.13.1.el9_4.aarch64_64k"),
            ("6.9.0-0.rc1~acme", "6.9.0-0.rc1_acme"),
            ("6.1.0-+_.", "6.1.0"),
        ] {
            assert_eq!(label(release).as_deref(), Some(expected));
        }
    }

    #[test]
    fn a_release_of_64_characters_has_no_label_unless_its_end_is_trimmed() {
        assert_eq!(label(&format!("6.1.0-{}", "a".repeat(58))), None);
        assert_eq!(label(&format!("6.1.0-{}+", "a".repeat(57))).map(|l| l.len()), Some(63));
    }

    #[test]
    fn two_releases_can_share_a_label() {
        assert_eq!(label("6.1.0+acme"), label("6.1.0~acme"));
    }

    #[test]
    fn values_that_kubernetes_refuses_are_refused() {
        for text in ["", "-6.1", "6.1-", "6.1+", "6.1/x", "6.1\n", "ü", &"6".repeat(64)] {
            assert!(text.parse::<KernelLabel>().is_err(), "{text:?} was accepted");
        }
    }

    proptest! {
        #[test]
        fn the_label_of_any_release_is_a_valid_label_value(text in "[0-9]{1,2}\\.[0-9]{1,2}[A-Za-z0-9._+~-]{0,60}") {
            if let Ok(release) = text.parse::<KernelRelease>()
                && let Some(label) = KernelLabel::of(&release) {
                prop_assert_eq!(label.as_str().parse::<KernelLabel>(), Ok(label.clone()));
                // A label is stable: converting it again gives the same label.
                prop_assert_eq!(KernelLabel::of(&label.as_str().parse().unwrap()), Some(label));
            }
        }
    }
}
