//! Text for display: lists, and untrusted text without deceptive characters.

/// Whether a character could control a terminal or mislead a reader. These are control characters, bidirectional marks
/// and zero-width characters (Unicode's Cf, line and paragraph separators, and fillers).
pub fn is_deceptive(c: char) -> bool {
    c.is_control()
        || matches!(
            c,
            '\u{ad}'
                | '\u{34f}'
                | '\u{61c}'
                | '\u{115f}'..='\u{1160}'
                | '\u{17b4}'..='\u{17b5}'
                | '\u{180b}'..='\u{180f}'
                | '\u{200b}'..='\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}'
                | '\u{3164}'
                | '\u{feff}'
                | '\u{ffa0}'
                | '\u{fff9}'..='\u{fffb}'
                | '\u{1bca0}'..='\u{1bca3}'
                | '\u{1d173}'..='\u{1d17a}'
                | '\u{e0000}'..='\u{e0fff}'
        )
}

/// Replaces each [deceptive](is_deceptive) character with U+FFFD, line breaks included. The result is a single line.
pub fn printable(text: &str) -> String {
    text.replace(is_deceptive, "\u{fffd}")
}

/// Replaces [deceptive](is_deceptive) characters like [`printable`], but keeps line ends and tabs.
pub fn printable_lines(text: &str) -> String {
    let line = |line: &str| line.replace(|c: char| is_deceptive(c) && !matches!(c, '\n' | '\t'), "\u{fffd}");
    text.split("\r\n").map(line).collect::<Vec<_>>().join("\r\n")
}

/// Escapes [deceptive](is_deceptive) characters in serialized JSON. In valid JSON they occur inside strings only.
pub fn printable_json(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    for c in json.chars() {
        if is_deceptive(c) && !matches!(c, '\n' | '\t' | '\r') {
            let mut units = [0; 2];
            text.extend(c.encode_utf16(&mut units).iter().map(|unit| format!("\\u{unit:04x}")));
        } else {
            text.push(c);
        }
    }
    text
}

/// Joins the first names, and counts the rest.
pub fn some_of(names: &[impl AsRef<str>], most: usize) -> String {
    let first: Vec<&str> = names.iter().take(most).map(AsRef::as_ref).collect();
    format!("{}{}", first.join(", "), and_more(names.len().saturating_sub(most)))
}

/// Counts the items that a message does not name, to append to the named ones: ` and 3 more`. Empty for 0.
pub fn and_more(rest: usize) -> String {
    if rest == 0 { String::new() } else { format!(" and {rest} more") }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DECEPTIVE: &str = "\0\u{1b}\u{7f}\u{85}\u{9b}\u{ad}\u{61c}\u{180e}\u{200b}\u{200e}\u{200f}\u{2028}\u{202a}\u{202e}\u{2060}\u{2066}\
                             \u{2069}\u{3164}\u{feff}\u{fff9}\u{e0041}";
    const PLAIN: &str = "acmé 6.1.0-47 → 日本 ✓ 🚀";

    #[test]
    fn what_steers_a_terminal_or_an_eye_is_visible() {
        for c in DECEPTIVE.chars() {
            for printed in [printable(&format!("a{c}b")), printable_lines(&format!("a{c}b"))] {
                assert_eq!(printed, "a\u{fffd}b", "{:x}", u32::from(c));
            }
        }
        assert_eq!(printable(PLAIN), PLAIN);
        assert_eq!(printable("a\n\tb"), "a\u{fffd}\u{fffd}b");
        assert_eq!(printable_lines("a\n\tb\r\nc\rd"), "a\n\tb\r\nc\u{fffd}d");
    }

    #[test]
    fn a_list_names_the_first_items_and_counts_the_rest() {
        assert_eq!(some_of(&["a", "b"], 2), "a, b");
        assert_eq!(some_of(&["a", "b", "c", "d"], 2), "a, b and 2 more");
    }

    #[test]
    fn json_says_the_same_without_deceptive_characters() {
        let value = serde_json::json!({DECEPTIVE: [DECEPTIVE, PLAIN]});
        let json = printable_json(&serde_json::to_string_pretty(&value).unwrap());
        assert!(!json.contains(|c| is_deceptive(c) && c != '\n'), "{json:?}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&json).unwrap(), value);
    }
}
