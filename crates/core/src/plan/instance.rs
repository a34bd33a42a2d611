//! The name that distinguishes several farriers in one cluster.

use std::str::FromStr;

use crate::definition::{ParseError, checked::DnsLabel};

/// Name of one of several farriers in a cluster; no name where there is only one. The field manager, the lease and the
/// marks on nodes include the name, so that the instances do not undo each other's writes. Displayed as `farrier` or
/// `farrier-NAME`, it is the name of the field manager and of the lease.
#[derive(Clone, Debug, Default, PartialEq, Eq, derive_more::Display)]
#[display("farrier{}", self.suffix('-'))]
pub struct Instance(Option<String>);

/// Longest name: with the longest mark as prefix, a label's name must not exceed 63 characters.
const MAX_LENGTH: usize = 32;

impl FromStr for Instance {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let expected =
            "a valid name: use 1 to 32 characters of a-z, 0-9 and '-', with a letter or digit at both ends";
        match text.parse::<DnsLabel>() {
            Ok(name) if name.len() <= MAX_LENGTH => Ok(Self(Some(name.to_string()))),
            _ => Err(ParseError::new(text, expected)),
        }
    }
}

impl Instance {
    /// Returns the key of the label and annotation with which this instance marks nodes: `farrier.dev/ready-for`, or
    /// `farrier.dev/ready-for.NAME`.
    pub(super) fn mark(&self, mark: &str) -> String {
        mark.to_owned() + &self.suffix('.')
    }

    fn suffix(&self, separator: char) -> String {
        self.0.as_ref().map(|name| format!("{separator}{name}")).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_only_one_has_the_names_of_old() {
        let only = Instance::default();
        assert_eq!(
            (only.to_string(), only.mark("farrier.dev/x")),
            ("farrier".to_owned(), "farrier.dev/x".to_owned())
        );
        let gpu: Instance = "gpu".parse().unwrap();
        assert_eq!(
            (gpu.to_string(), gpu.mark("farrier.dev/x")),
            ("farrier-gpu".to_owned(), "farrier.dev/x.gpu".to_owned())
        );
    }

    #[test]
    fn a_name_fits_into_a_label_and_a_lease() {
        for wrong in ["", "-a", "a-", "A", "a.b", "a/b", "\u{1b}", &"a".repeat(MAX_LENGTH + 1)] {
            wrong.parse::<Instance>().unwrap_err();
        }
        let longest: Instance = "a".repeat(MAX_LENGTH).parse().unwrap();
        for mark in [super::super::READY_FOR, super::super::NO_DRIVER_FOR] {
            let label = longest.mark(mark);
            assert!(label.trim_start_matches("farrier.dev/").len() <= 63, "{label}");
        }
    }
}
