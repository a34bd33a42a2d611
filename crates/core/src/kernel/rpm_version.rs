//! Comparison of RPM versions (rpm's `rpmio/rpmvercmp.cc`).

use std::cmp::Ordering;

use super::runs::{leading_digits, number_key, split_prefix};

/// Compares two versions, each with an RPM release after the first `-`, as rpm does.
pub fn compare(a: &str, b: &str) -> Ordering {
    let split = |text| str::split_once(text, '-').unwrap_or((text, ""));
    let ((version_a, release_a), (version_b, release_b)) = (split(a), split(b));
    compare_part(version_a, version_b).then_with(|| compare_part(release_a, release_b))
}

/// Compares versions or RPM releases by their segments of digits and of letters; other characters only separate segments. A tilde
/// sorts before the end of the text, a caret after it but before everything else. Numbers sort after letters.
pub fn compare_part(mut a: &str, mut b: &str) -> Ordering {
    let is_letter = |c: char| c.is_ascii_alphabetic();
    loop {
        (a, b) = (skip_separators(a), skip_separators(b));
        match (a.strip_prefix('~'), b.strip_prefix('~')) {
            (Some(rest_a), Some(rest_b)) => {
                (a, b) = (rest_a, rest_b);
                continue;
            }
            (Some(_), None) => return Ordering::Less,
            (None, Some(_)) => return Ordering::Greater,
            (None, None) => {}
        }
        match (a.strip_prefix('^'), b.strip_prefix('^')) {
            (Some(rest_a), Some(rest_b)) => {
                (a, b) = (rest_a, rest_b);
                continue;
            }
            (Some(_), None) => return if b.is_empty() { Ordering::Greater } else { Ordering::Less },
            (None, Some(_)) => return if a.is_empty() { Ordering::Less } else { Ordering::Greater },
            (None, None) => {}
        }
        if a.is_empty() || b.is_empty() {
            return a.len().min(1).cmp(&b.len().min(1));
        }
        let ((digits_a, rest_a), (digits_b, rest_b)) = (leading_digits(a), leading_digits(b));
        let (order, rests) = match (digits_a.is_empty(), digits_b.is_empty()) {
            (false, false) => (number_key(digits_a).cmp(&number_key(digits_b)), (rest_a, rest_b)),
            (false, true) => return Ordering::Greater,
            (true, false) => return Ordering::Less,
            (true, true) => {
                let ((text_a, rest_a), (text_b, rest_b)) =
                    (split_prefix(a, is_letter), split_prefix(b, is_letter));
                (text_a.cmp(text_b), (rest_a, rest_b))
            }
        };
        if order.is_ne() {
            return order;
        }
        (a, b) = rests;
    }
}

/// Skips the characters that separate segments.
fn skip_separators(text: &str) -> &str {
    text.trim_start_matches(|c: char| !c.is_ascii_alphanumeric() && c != '~' && c != '^')
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `tests/it/version_order.rs` compares the order with rpm's own.
    #[test]
    fn orders_as_rpm_does() {
        let ascending = [
            "4.18.0-553.el8_10",
            "5.14.0-427.13.1.el9_4",
            "5.14.0-427.20.1.el9_4",
            "5.14.0-503",
            "5.14.0-503.11.1.el9_5",
            "5.14.0-570.el9",
            "5.14.21-150400.24.9",
            "5.14.21-150400.24.100",
            "6.12.0~rc1-1",
            "6.12.0-1",
            "6.12.0^20240101-1",
            "6.12.0.1-1",
        ];
        for (i, a) in ascending.iter().enumerate() {
            for (j, b) in ascending.iter().enumerate() {
                assert_eq!(compare(a, b), i.cmp(&j), "{a} and {b}");
            }
        }
    }

    proptest::proptest! {
        #[test]
        fn is_an_order(a in "[0-9a-c.~^+_-]{0,10}", b in "[0-9a-c.~^+_-]{0,10}", c in "\\PC{0,8}") {
            proptest::prop_assert_eq!(compare(&a, &b), compare(&b, &a).reverse());
            proptest::prop_assert!(compare(&c, &c).is_eq());
        }
    }
}
