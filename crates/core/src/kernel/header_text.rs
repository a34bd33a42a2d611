//! Conditions on the content of kernel headers. They detect changes that distributions backported to older kernel versions.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Pattern;
use crate::definition::checked::HeaderFile;

/// A condition on a kernel header's text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema, derive_more::Display)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[display("{header} matches {matches}")]
pub struct HeaderText {
    /// Path of the header in the kernel's build tree: `include/linux/pci.h`. A missing header does not match.
    pub header: HeaderFile,
    /// A regular expression that must match a part of the header. A declaration over several lines counts as one line: line
    /// breaks between parentheses become blanks.
    pub matches: Pattern,
}

impl HeaderText {
    /// Whether the header's text matches.
    pub fn is_match(&self, text: &str) -> bool {
        self.matches.is_found_in(&join_declarations(text))
    }
}

/// Joins declarations that span several lines. Unclosed parentheses, as in comments, end with the statement or at an empty line.
fn join_declarations(text: &str) -> String {
    let mut joined = String::with_capacity(text.len());
    let mut open_parentheses = 0_usize;
    for line in text.lines() {
        let line = if open_parentheses > 0 { line.trim_start() } else { line };
        if line.is_empty() {
            open_parentheses = 0;
        }
        joined.push_str(line.trim_end());
        for c in line.chars() {
            match c {
                '(' => open_parentheses += 1,
                ')' => open_parentheses = open_parentheses.saturating_sub(1),
                ';' | '{' | '}' => open_parentheses = 0,
                _ => {}
            }
        }
        joined.push(if open_parentheses > 0 { ' ' } else { '\n' });
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEFORE: &str = "/* resizes (a BAR */\n\nint __must_check pci_resize_resource(struct pci_dev *dev, int i, int size);\nint pci_select_bars(struct pci_dev *dev, unsigned long flags);\n";
    const AFTER: &str = "int __must_check pci_resize_resource(struct pci_dev *dev, int i, int size,\n\t\t\t\t     int exclude_bars);\nint pci_select_bars(struct pci_dev *dev, unsigned long flags);\n";

    fn says(pattern: &str, text: &str) -> bool {
        let when: HeaderText =
            serde_json::from_value(serde_json::json!({"header": "include/linux/pci.h", "matches": pattern}))
                .unwrap();
        when.is_match(text)
    }

    #[test]
    fn a_declaration_is_one_line() {
        for pattern in [
            r"pci_resize_resource\(.*,.*,.*,",
            r"pci_resize_resource\([^;]*\bint exclude_bars\)",
            r"size, int ex",
        ] {
            assert!(says(pattern, AFTER) && !says(pattern, BEFORE), "{pattern}");
        }
        assert!(says(r"(?m)^int pci_select_bars\(.*\);$", AFTER));
        assert!(!says(r"pci_resize_resource.*pci_select_bars", AFTER), "two declarations are two lines");
    }

    #[test]
    fn a_header_is_a_file_of_the_tree() {
        for header in ["/etc/passwd", "../x", "a/../b", "", "a*"] {
            let when = serde_json::json!({"header": header, "matches": "x"});
            assert!(serde_json::from_value::<HeaderText>(when).is_err(), "{header:?}");
        }
    }
}
