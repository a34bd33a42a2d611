//! Quoting for shell commands that people copy and paste.

use std::borrow::Cow;

/// Quotes a text as one word of a POSIX shell, so that untrusted text cannot run as a command.
pub fn shell_word(text: &str) -> Cow<'_, str> {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "-_./:@,+".contains(letter);
    if !text.is_empty() && text.chars().all(is_plain) {
        text.into()
    } else {
        format!("'{}'", text.replace('\'', r"'\''")).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_shell_would_read_is_quoted() {
        let words =
            [("node-7.example", "node-7.example"), ("", "''"), ("$(x) y", "'$(x) y'"), ("a'b", r"'a'\''b'")];
        for (text, word) in words {
            assert_eq!(shell_word(text), word);
        }
    }
}
