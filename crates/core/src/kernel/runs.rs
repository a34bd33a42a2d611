//! Runs of digits and of other characters in version numbers, which the version orders compare one by one.

/// Comparison key for a number of any length. Leading zeros are ignored.
pub(crate) fn number_key(text: &str) -> (usize, &str) {
    let text = text.trim_start_matches('0');
    (text.len(), text)
}

/// Splits a text after its leading digits.
pub(crate) fn leading_digits(text: &str) -> (&str, &str) {
    split_prefix(text, |c| c.is_ascii_digit())
}

/// Splits a text after the leading characters that meet a condition.
pub(super) fn split_prefix(text: &str, is_in_prefix: impl Fn(char) -> bool) -> (&str, &str) {
    text.split_at(text.find(|c| !is_in_prefix(c)).unwrap_or(text.len()))
}
