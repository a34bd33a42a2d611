//! Replaces one scalar in a YAML text, and nothing else.

use farrier_yaml::{Scalar, events};
use granit_parser::{Event, ScalarStyle};

/// Replaces the scalar's value and keeps its quotes. All other bytes stay unchanged.
///
/// Parses the result and compares it with the original. Returns a reason if anything but this one value differs.
pub(super) fn replace(text: &str, scalar: &Scalar, value: &str) -> Result<String, String> {
    let bytes = &scalar.bytes;
    let written = text.get(bytes.clone()).ok_or("the position of the value is unknown")?;
    // Image references need no escapes in any style. A value that does not parse back is refused below.
    let replacement = match scalar.style {
        ScalarStyle::Plain if written == scalar.text => value.to_owned(),
        ScalarStyle::SingleQuoted if is_quoted(written, '\'') => format!("'{value}'"),
        ScalarStyle::DoubleQuoted if is_quoted(written, '"') => format!("\"{value}\""),
        _ => return Err("the value spans several lines or is a block scalar".to_owned()),
    };
    let after = [&text[..bytes.start], &replacement, &text[bytes.end..]].concat();
    verify(text, &after, scalar, value)?;
    Ok(after)
}

fn is_quoted(written: &str, quote: char) -> bool {
    written.len() >= 2 && written.starts_with(quote) && written.ends_with(quote)
}

/// Checks that the two texts differ only in the value of `scalar`.
fn verify(before: &str, after: &str, scalar: &Scalar, value: &str) -> Result<(), String> {
    let changes_more = || "the edit would change more than the value".to_owned();
    let mut changed = 0;
    let mut old_events = events(before);
    let mut new_events = events(after);
    loop {
        let ((old, span), (new, _)) = match (old_events.next(), new_events.next()) {
            (None, None) => break,
            (Some(Ok(old)), Some(Ok(new))) => (old, new),
            (Some(_) | None, _) => return Err(changes_more()),
        };
        let edited = matches!(old, Event::Scalar(..)) && span.byte_range().as_ref() == Some(&scalar.bytes);
        match (&old, &new) {
            (Event::Scalar(_, old_style, 0, None), Event::Scalar(text, new_style, 0, None))
                if edited && old_style == new_style && text == value =>
            {
                changed += 1;
            }
            _ if !edited && old == new => {}
            _ => return Err(changes_more()),
        }
    }
    if changed == 1 { Ok(()) } else { Err(changes_more()) }
}

#[cfg(test)]
mod tests {
    use farrier_yaml::{Node, documents};
    use proptest::prelude::*;

    use super::*;

    fn find(node: &Node) -> Option<Scalar> {
        if let Some(image) = node.get("image") {
            return image.scalar().cloned();
        }
        let inner = node.items().map(Iterator::collect::<Vec<_>>);
        let values = node.entries().map(|entries| entries.iter().map(|(_, value)| value.clone()).collect());
        inner.or(values).unwrap_or_default().iter().find_map(find)
    }

    fn edit(text: &str, value: &str) -> Result<String, String> {
        let found = documents(text).unwrap().iter().find_map(find).expect("an image");
        replace(text, &found, value)
    }

    #[test]
    fn an_edit_keeps_quotes_comments_and_line_ends() {
        let to = "localhost:5000/d@sha256:00";
        for text in [
            "image: OLD",
            "a: &x 1\r\nimage: 'OLD' # why\r\nb: *x\r\n",
            "\u{feff}x: é\n---\n- {image: \"OLD\", n: 1}\n...\n",
            "{\n\t\"image\": \"OLD\"\n}",
            "image:\n    OLD   # far\n\n\n",
            "? image\n: OLD\n",
        ] {
            assert_eq!(edit(&text.replace("OLD", "a/b:1"), to), Ok(text.replace("OLD", to)), "{text:?}");
        }
    }

    #[test]
    fn an_edit_that_would_change_the_structure_is_refused() {
        for text in
            ["image: |\n  a\n", "image: >-\n  a\n", "image: a\n  b\n", "image: &x a\n", "image: !!str a\n"]
        {
            assert!(edit(text, "b").is_err(), "{text:?}");
        }
        for value in ["b # c", "b: c", "'", "\"", "- a", "", " b", "b\nx: 1", "{", "*a"] {
            assert!(edit("image: a\n", value).is_err(), "{value:?}");
        }
        for value in ["'", "b', c: 'd"] {
            assert!(edit("{image: 'a'}\n", value).is_err(), "{value:?}");
        }
    }

    proptest! {
        #[test]
        fn an_edit_changes_only_the_value(
            before in prop::collection::vec("(# [a-zé:'\"*&]{0,9}|k[a-z]{1,4}: ('[a-z ]{0,4}'|[a-z]{1,4}|&a x|\\{a: \\[1, 2\\]\\}|\\|\n  é|\"\\\\t\")( # x)?|)", 0..6),
            quote in prop::sample::select(vec!["", "'", "\""]),
            gap in "[ ]{1,3}",
            tail in "( +#[ a-z'\"]{0,9})?",
            end in prop::sample::select(vec!["\n", "\r\n"]),
            last in prop::sample::select(vec!["", "\n", "\n---\nimage2: z\n"]),
            old in "[a-z]{1,5}(:[a-z0-9]{1,5})?",
            new in "[a-z]{1,5}/[a-z]{1,5}(:[a-z0-9]{1,5}|@sha256:[0-9a-f]{8})",
        ) {
            // Keys are numbered, because duplicate keys are invalid YAML.
            let numbered = |(n, line): (usize, &String)| {
                let line = line.replace("&a", &format!("&a{n}"));
                line.strip_prefix('k').map_or(format!("{line}\n"), |rest| format!("k{n}{rest}\n"))
            };
            let head = before.iter().enumerate().map(numbered).collect::<Vec<_>>().concat();
            let with = |value: &str| format!("{head}image:{gap}{quote}{value}{quote}{tail}{last}").replace('\n', end);
            prop_assume!(documents(&with(&old)).is_ok());
            prop_assert_eq!(edit(&with(&old), &new), Ok(with(&new)));
        }
    }
}
