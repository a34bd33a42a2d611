//! Regular expressions in definitions.

use regex::bytes::{Regex, RegexBuilder};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Size limit of a compiled pattern in bytes. Patterns of the built-in families take a hundredth of the limit.
const COMPILED_LIMIT: usize = 1 << 20;

/// A regular expression that matches whole texts (anchored at both ends), compiled when the definition is read.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema, derive_more::Display)]
#[serde(try_from = "String", into = "String")]
#[schemars(with = "String")]
#[display("{text}")]
pub struct Pattern {
    text: String,
    compiled: Regex,
}

impl Pattern {
    /// Whether the pattern matches the whole text.
    pub fn is_match(&self, text: &str) -> bool {
        self.compiled.is_match(text.as_bytes())
    }

    /// Whether the pattern matches a part of the text.
    pub(crate) fn is_found_in(&self, text: &str) -> bool {
        // `try_from` has already compiled this text.
        compile(&self.text).is_ok_and(|part| part.is_match(text.as_bytes()))
    }
}

/// `\d`, `\w` and `\s` match ASCII only, like the names of kernels, unless the pattern requires Unicode. Every command compiles
/// the patterns of all families; with Unicode classes this took four fifths of a command's run time.
fn compile(text: &str) -> Result<Regex, regex::Error> {
    let build = |unicode| RegexBuilder::new(text).unicode(unicode).size_limit(COMPILED_LIMIT).build();
    build(false).or_else(|_| build(true))
}

impl PartialEq for Pattern {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

impl TryFrom<String> for Pattern {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        // Compile the text alone first: `a)|(b` compiles inside parentheses, but would not be anchored at either end.
        match compile(&text).and_then(|_| compile(&format!("^(?:{text})$"))) {
            Ok(compiled) => Ok(Self { text, compiled }),
            Err(error) => {
                Err(format!("{text:?} is not a regular expression: {}", last_line(&error.to_string())))
            }
        }
    }
}

impl From<Pattern> for String {
    fn from(pattern: Pattern) -> Self {
        pattern.text
    }
}

/// The regex crate prints an illustration first and the reason last.
fn last_line(text: &str) -> String {
    text.lines().last().unwrap_or_default().trim_start_matches("error: ").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(text: &str) -> Result<Pattern, String> {
        Pattern::try_from(text.to_owned())
    }

    #[test]
    fn patterns_are_about_the_whole_text() {
        assert!(pattern(r"6\.1\.\d+").unwrap().is_match("6.1.0"));
        assert!(!pattern(r"6\.1\.\d+").unwrap().is_match("6.1.0-47-amd64"));
        assert!(!pattern(r"1\.0").unwrap().is_match("6.1.0"));
        assert!(pattern(r"^6\.1$").unwrap().is_match("6.1"));
        assert!(pattern(r"6\.1-\w+").unwrap().is_match("6.1-amd64"));
        assert!(!pattern(r"6\.1\.\d").unwrap().is_match("6.1.\u{663}"), "digits are ASCII");
        for not_ascii in ["6.1-.*", "6.1-\u{e9}", "6.1-[\u{e0}-\u{ff}]"] {
            assert!(pattern(not_ascii).unwrap().is_match("6.1-\u{e9}"), "{not_ascii}");
        }
        // Anchor alternatives at both ends as well.
        assert!(!pattern("a|b").unwrap().is_match("ax"));
        assert!(!pattern("a|b").unwrap().is_match("xb"));
    }

    #[test]
    fn texts_that_are_no_pattern_are_refused() {
        for text in ["(", "a)|(b", "*", r"\p{nonesuch}", "(a{1000}){1000}"] {
            assert!(pattern(text).is_err(), "{text:?} was accepted");
        }
        insta::assert_snapshot!(pattern("(6").unwrap_err(), @r#""(6" is not a regular expression: unclosed group"#);
    }
}
