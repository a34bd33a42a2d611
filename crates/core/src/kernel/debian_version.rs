//! Comparison of Debian version numbers (Debian Policy, 5.6.12).
//!
//! There is no crate for this order here: `debversion` would add chrono, num-bigint and regular expressions for these sixty lines.

use std::cmp::Ordering;

use super::runs::{leading_digits, number_key, split_prefix};

/// Compares two versions as dpkg does.
pub fn compare(a: &str, b: &str) -> Ordering {
    let ((epoch_a, upstream_a, revision_a), (epoch_b, upstream_b, revision_b)) = (split(a), split(b));
    number_key(epoch_a)
        .cmp(&number_key(epoch_b))
        .then_with(|| compare_part(upstream_a, upstream_b))
        .then_with(|| compare_part(revision_a, revision_b))
}

/// Returns the upstream part, without epoch and revision.
pub fn upstream(version: &str) -> &str {
    split(version).1
}

fn split(version: &str) -> (&str, &str, &str) {
    let (epoch, version) = version.split_once(':').unwrap_or(("0", version));
    let (upstream, revision) = version.rsplit_once('-').unwrap_or((version, "0"));
    (epoch, upstream, revision)
}

/// Compares runs of non-digits and numbers in turn. Non-digits are compared by [`compare_text`].
fn compare_part(mut a: &str, mut b: &str) -> Ordering {
    while !(a.is_empty() && b.is_empty()) {
        let (text_a, rest_a) = split_prefix(a, |c| !c.is_ascii_digit());
        let (text_b, rest_b) = split_prefix(b, |c| !c.is_ascii_digit());
        let ((number_a, rest_a), (number_b, rest_b)) = (leading_digits(rest_a), leading_digits(rest_b));
        let order =
            compare_text(text_a, text_b).then_with(|| number_key(number_a).cmp(&number_key(number_b)));
        if order.is_ne() {
            return order;
        }
        (a, b) = (rest_a, rest_b);
    }
    Ordering::Equal
}

/// A tilde sorts before the end of the text, the end before letters, and letters before other characters.
fn compare_text(a: &str, b: &str) -> Ordering {
    let weight = |c: Option<char>| match c {
        Some('~') => (0, '~'),
        None => (1, '\0'),
        Some(c) if c.is_ascii_alphabetic() => (2, c),
        Some(c) => (3, c),
    };
    let (mut a, mut b) = (a.chars(), b.chars());
    loop {
        let (next_a, next_b) = (a.next(), b.next());
        let order = weight(next_a).cmp(&weight(next_b));
        if order.is_ne() || (next_a.is_none() && next_b.is_none()) {
            return order;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_as_dpkg_does() {
        let ascending = [
            "0.9",
            "1.0~rc1-1",
            "1.0~rc1-2",
            "1.0-1",
            "1.0-1+deb12u1",
            "1.0-1.1",
            "1.0-2",
            "1.0+dfsg-1",
            "1.0.1-1",
            "1.2",
            "1.10",
            "1.10a",
            "6.1.170-3",
            "6.1.192-2",
            "1:0.1",
        ];
        for (i, a) in ascending.iter().enumerate() {
            for (j, b) in ascending.iter().enumerate() {
                assert_eq!(compare(a, b), i.cmp(&j), "{a} and {b}");
            }
        }
        assert!(compare("1.01-0", "1.1").is_eq());
    }

    #[test]
    fn upstream_part() {
        for (version, part) in [
            ("1:4.33.0+1-1.1", "4.33.0+1"),
            ("535.261.03-1", "535.261.03"),
            ("1.0", "1.0"),
            ("2-a-b", "2-a"),
            ("", ""),
        ] {
            assert_eq!(upstream(version), part);
        }
    }

    proptest::proptest! {
        #[test]
        fn is_an_order(a in "[0-9a-z.~+:-]{0,12}", b in "[0-9a-z.~+:-]{0,12}", c in "\\PC{0,8}") {
            proptest::prop_assert_eq!(compare(&a, &b), compare(&b, &a).reverse());
            proptest::prop_assert!(compare(&c, &c).is_eq());
        }
    }
}
