//! Colours for check reports.

use regex::{Captures, Regex};

const RED: &str = "\u{1b}[31m";
const YELLOW: &str = "\u{1b}[33m";
const GREEN: &str = "\u{1b}[32m";
const DIM: &str = "\u{1b}[2m";
const RESET: &str = "\u{1b}[0m";

/// What gets a colour: words before reasons, verdicts in their column and at the end of the first line, and what to do.
/// Columns stand two blanks apart.
const PAINTED: [&str; 3] = [
    r"(?m)(^|  )(refused:|unknown:|warning[:,])()",
    r"(?m)(\A.*: |  )(loads|unknown|refused)(  |$)",
    r"(?m)(^|  )(help: .*)($)",
];

/// The report with colours, and not a letter changed.
pub fn coloured(text: &str) -> String {
    PAINTED.into_iter().filter_map(|pattern| Regex::new(pattern).ok()).fold(
        text.to_owned(),
        |text, pattern| {
            let paint = |found: &Captures<'_>| {
                let colour = match found[2].as_bytes()[0] {
                    b'r' => RED,
                    b'l' => GREEN,
                    b'h' => DIM,
                    _ => YELLOW,
                };
                format!("{}{colour}{}{RESET}{}", &found[1], &found[2], &found[3])
            };
            pattern.replace_all(&text, paint).into_owned()
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT: &str = "\
payload on 6.1.0-9-amd64 (amd64): refused
MODULE      VERDICT  REASON
nvidia      refused  refused: disagrees about version of symbol ib_free: found 0x00000004, wanted 0x00000005
                       help: rebuild it against the exposed headers of mofed
nvidia_uvm  loads
warning, 2 modules: the module is not signed
  help: sign it
load order: nvidia, nvidia_uvm
";

    #[test]
    fn colours_change_no_letter() {
        let coloured = coloured(REPORT);
        let mut bare = coloured.clone();
        for code in [RED, YELLOW, GREEN, DIM, RESET] {
            bare = bare.replace(code, "");
        }
        assert_eq!(bare, REPORT);
        assert!(coloured.starts_with("payload on 6.1.0-9-amd64 (amd64): \u{1b}[31mrefused\u{1b}[0m\n"));
        assert!(coloured.contains("\nnvidia_uvm  \u{1b}[32mloads\u{1b}[0m"), "{coloured}");
        assert!(coloured.contains("\u{1b}[31mrefused:\u{1b}[0m disagrees"), "{coloured}");
        assert!(coloured.contains("\u{1b}[33mwarning,\u{1b}[0m 2 modules"), "{coloured}");
        assert!(coloured.contains("\u{1b}[2m"), "{coloured}");
    }
}
