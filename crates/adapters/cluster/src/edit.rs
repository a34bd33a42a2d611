//! Replaces scalars in a YAML text, or adds keys to a mapping, and changes nothing else.

use std::cmp::Reverse;

use farrier_yaml::{Node, Scalar, Value as YamlValue, YamlError, events};
use granit_parser::{Event, ScalarStyle};
use serde_json::Value;

use super::manifest::field;

/// Returns the text with these values in a mapping. Keys that the mapping lacks are added.
pub(super) fn set_values(text: &str, mapping: &Node, values: &Value) -> Result<String, String> {
    let mut edits = Vec::new();
    collect(mapping, values, &mut edits)?;
    // Edit from the end, so that the remaining positions stay valid.
    edits.sort_by_key(|(scalar, _)| Reverse(scalar.bytes.start));
    edits.into_iter().try_fold(text.to_owned(), |text, (scalar, edit)| match edit {
        Edit::Replace(value) => replace(&text, &scalar, &value),
        Edit::Insert { key, value } => insert(&text, &scalar, &key, &value),
    })
}

/// Edit at a scalar.
enum Edit {
    /// Replaces the scalar's value.
    Replace(String),
    /// Adds an entry to the mapping whose first key is the scalar.
    Insert { key: String, value: Value },
}

/// Collects the edits that give `node` this value.
fn collect(node: &Node, value: &Value, edits: &mut Vec<(Scalar, Edit)>) -> Result<(), String> {
    match (value, node.value()) {
        (Value::Object(fields), YamlValue::Map(entries)) => {
            for (key, value) in fields {
                match field(node, key) {
                    Some(inner) => collect(&inner, value, edits)?,
                    None if value.is_null() => {}
                    None => {
                        // A merged key is in the mapping of its anchor.
                        let mut own = entries.iter().filter(|(_, value)| !value.shared);
                        let first = own.next().and_then(|(first, _)| first.scalar());
                        let first = first.ok_or_else(|| {
                            format!("add `{key}: {value}` to the mapping in line {}", node.position.line)
                        })?;
                        let edit = Edit::Insert { key: key.clone(), value: value.clone() };
                        edits.push((first.clone(), edit));
                    }
                }
            }
        }
        (Value::Array(values), YamlValue::List(items)) if values.len() == items.len() => {
            items.iter().zip(values).try_for_each(|(item, value)| collect(item, value, edits))?;
        }
        (Value::String(_) | Value::Bool(_), YamlValue::Scalar(scalar)) => {
            let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            if text != scalar.text {
                edits.push((scalar.clone(), Edit::Replace(text)));
            }
        }
        _ => return Err(format!("line {} holds a value of another type", node.position.line)),
    }
    Ok(())
}

/// Adds a key to a mapping, before its first key.
fn insert(text: &str, first: &Scalar, key: &str, value: &Value) -> Result<String, String> {
    let (before, after) =
        text.split_at_checked(first.bytes.start).ok_or("the position of a key is unknown")?;
    let indent = before.rsplit('\n').next().unwrap_or_default();
    let key = if first.style == ScalarStyle::Plain { key.to_owned() } else { format!("\"{key}\"") };
    let value = value.to_string();
    let end = if before.ends_with(&format!("\r\n{indent}")) { "\r\n" } else { "\n" };
    let in_block = (indent.trim() == "").then(|| format!("{before}{key}: {value}{end}{indent}{after}"));
    let in_flow = format!("{before}{key}: {value}, {after}");
    let edited = in_block.into_iter().chain([in_flow]).find(|edited| adds_one_entry(text, edited));
    edited.ok_or_else(|| format!("add `{key}: {value}` by hand: the edit would change more than that"))
}

/// Whether the texts differ only in one key and its value, which the new text adds.
fn adds_one_entry(old: &str, new: &str) -> bool {
    let [old, new] = [old, new].map(|text| events(text).map(|event| Ok(event?.0)).collect());
    let (Ok(old), Ok(mut new)): (Result<Vec<_>, YamlError>, Result<Vec<_>, YamlError>) = (old, new) else {
        return false;
    };
    let start = old.iter().zip(&new).take_while(|(old, new)| old == new).count();
    let added: Vec<_> = new.drain(start..new.len().min(start + 2)).collect();
    added.iter().all(|event| matches!(event, Event::Scalar(..))) && new == old
}

/// Replaces the scalar's value and keeps its quotes. A plain value that YAML would read as a number gets quotes. All other bytes
/// stay unchanged.
///
/// Parses the result and compares it with the original. Returns a reason if anything but this one value differs.
pub(super) fn replace(text: &str, scalar: &Scalar, value: &str) -> Result<String, String> {
    let bytes = &scalar.bytes;
    let source = text.get(bytes.clone()).ok_or("the position of the value is unknown")?;
    // Image references need no escapes in any style. A value that does not parse back is refused below.
    let replacement = match scalar.style {
        ScalarStyle::Plain if source == scalar.text && is_number(value) => format!("\"{value}\""),
        ScalarStyle::Plain if source == scalar.text => value.to_owned(),
        ScalarStyle::SingleQuoted if is_quoted(source, '\'') => format!("'{value}'"),
        ScalarStyle::DoubleQuoted if is_quoted(source, '"') => format!("\"{value}\""),
        _ => return Err("the value spans several lines or is a block scalar".to_owned()),
    };
    let after = [&text[..bytes.start], &replacement, &text[bytes.end..]].concat();
    verify(text, &after, scalar, value)?;
    Ok(after)
}

/// Whether YAML reads a value without quotes as a number, for example the tag `1.10`.
fn is_number(value: &str) -> bool {
    value.replace('_', "").parse::<f64>().is_ok()
}

fn is_quoted(source: &str, quote: char) -> bool {
    source.len() >= 2 && source.starts_with(quote) && source.ends_with(quote)
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
                if edited && (old_style == new_style || is_number(value)) && text == value =>
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

    #[test]
    fn a_missing_key_is_added_in_the_style_of_its_mapping() {
        let set = |text: &str, values: Value| {
            set_values(text, &documents(text).unwrap()[0].get("d").unwrap(), &values)
        };
        for (text, after) in [
            ("d:\n  # x\n  v: 1.0 # y\n", "d:\n  # x\n  on: true\n  v: \"2.0\" # y\n"),
            ("d:\r\n  v: a\r\n", "d:\r\n  on: true\r\n  v: \"2.0\"\r\n"),
            ("d: {v: 'a'}\n", "d: {on: true, v: '2.0'}\n"),
            ("{\"d\": {\n  \"v\": \"a\"\n}}\n", "{\"d\": {\n  \"on\": true, \"v\": \"2.0\"\n}}\n"),
        ] {
            assert_eq!(
                set(text, serde_json::json!({"v": "2.0", "on": true})).as_deref(),
                Ok(after),
                "{text}"
            );
        }
        assert!(set("d: {}\n", serde_json::json!({"v": "1"})).unwrap_err().contains("add `v: "));
        // The keys of a merge are in another mapping.
        let merged = "c: &c {x: 1}\nd: {<<: *c}\n";
        let why = set(merged, serde_json::json!({"v": "1"})).unwrap_err();
        assert_eq!(why, "add `v: \"1\"` to the mapping in line 2");
        let after = set("c: &c {x: 1}\nd: {<<: *c, y: 2}\n", serde_json::json!({"v": "1"}));
        assert_eq!(after.as_deref(), Ok("c: &c {x: 1}\nd: {<<: *c, v: \"1\", y: 2}\n"));
        assert!(set("d: {v: [a]}\n", serde_json::json!({"v": "1"})).unwrap_err().contains("another type"));
    }

    /// Regression test: a key went to the wrong place after a longer value.
    #[test]
    fn keys_are_added_behind_replaced_values() {
        let text = "d:\n  a: {v: 'x'}\n  b:\n    w: y\n";
        let values = serde_json::json!({"a": {"v": "much/longer"}, "b": {"w": "z", "on": true}});
        let after = set_values(text, &documents(text).unwrap()[0].get("d").unwrap(), &values);
        assert_eq!(after.as_deref(), Ok("d:\n  a: {v: 'much/longer'}\n  b:\n    on: true\n    w: z\n"));
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
