//! Tables from the sources: variants of enums and constants with their documentation.

use std::fmt::Write as _;

use regex::Regex;

/// Returns the variants of an enum, with their documentation.
pub fn variants(source: &str, name: &str) -> Vec<(String, String)> {
    let start = source.find(&format!("pub enum {name} {{")).unwrap_or_else(|| panic!("no enum {name}"));
    let body = source[start..].split("\n}").next().unwrap();
    let variant = Regex::new(r"^    ([A-Z][A-Za-z]*)\b").unwrap();
    let mut found = Vec::new();
    let mut meaning = String::new();
    for line in body.lines().skip(1) {
        if let Some(text) = line.strip_prefix("    /// ") {
            write!(meaning, "{text} ").unwrap();
        } else if let Some(name) = variant.captures(line) {
            found.push((name[1].to_owned(), cell(&std::mem::take(&mut meaning))));
        }
    }
    assert!(!found.is_empty(), "{name} has no variants");
    found
}

/// Returns the documented text constants of a source as `(value, meaning)`.
pub fn constants(source: &str) -> Vec<(String, String)> {
    let constant = Regex::new(r#"^(?:pub(?:\([a-z]+\))? )?const [A-Z_]+: &str = "([^"]+)";"#).unwrap();
    let mut found = Vec::new();
    let mut meaning = String::new();
    for line in source.lines() {
        if let Some(text) = line.strip_prefix("/// ") {
            write!(meaning, "{text} ").unwrap();
        } else if let Some(value) = constant.captures(line) {
            found.push((value[1].to_owned(), cell(&std::mem::take(&mut meaning))));
        } else if !line.starts_with("#[") {
            meaning.clear();
        }
    }
    found
}

/// Writes a table of two columns.
pub fn table(head: &str, rows: impl IntoIterator<Item = (String, String)>) -> String {
    let mut text = format!("| {head} | meaning |\n|---|---|\n");
    for (word, meaning) in rows {
        writeln!(text, "| `{word}` | {meaning} |").unwrap();
    }
    text
}

/// Puts documentation into a cell: without links to other items.
pub fn cell(text: &str) -> String {
    let link = Regex::new(r"\[(`[^`]+`)\](\([^)]*\))?").unwrap();
    link.replace_all(text.trim(), "$1").replace('|', "\\|")
}

/// Writes a variant's name in kebab case, as serde does.
pub fn kebab(name: &str) -> String {
    let mut word = String::new();
    for (place, letter) in name.char_indices() {
        if letter.is_uppercase() && place > 0 {
            word.push('-');
        }
        word.push(letter.to_ascii_lowercase());
    }
    word
}
