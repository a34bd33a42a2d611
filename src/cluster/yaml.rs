//! Pure: YAML documents as trees that know where each value stands in the text.

use std::{
    collections::{HashMap, HashSet},
    ops::Range,
    rc::Rc,
};

use granit_parser::{Event, Marker, Parser, ScalarStyle, Span, options};

/// Nesting beyond this is no manifest. It also bounds the recursion over, and the drop of, a tree.
const DEPTH: usize = 64;

/// Where something stands in a text, for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Position {
    /// From 1.
    pub(super) line: usize,
    /// From 1, in characters.
    pub(super) column: usize,
}

/// What is wrong with a text, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Fault {
    pub(super) at: Position,
    pub(super) reason: String,
}

/// A scalar and the bytes that it was written with, quotes included.
#[derive(Clone, Debug)]
pub(super) struct Scalar {
    pub(super) text: String,
    pub(super) style: ScalarStyle,
    pub(super) bytes: Range<usize>,
    /// Its tag, in full; empty where it has none.
    pub(super) tag: String,
}

#[derive(Debug)]
pub(super) enum Value {
    Scalar(Scalar),
    Sequence(Vec<Place>),
    Mapping(Vec<(Place, Place)>),
}

#[derive(Debug)]
pub(super) struct Node {
    pub(super) value: Value,
    pub(super) at: Position,
}

/// A place in a document. Aliases share their anchor's node, so that no document grows by being read.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) node: Rc<Node>,
    /// May the value stand for other places too: is it an alias, or anchored?
    pub(super) shared: bool,
}

impl Place {
    /// The value of a key, also one that is merged in (`<<`).
    pub(super) fn get(&self, key: &str) -> Option<Self> {
        let Value::Mapping(entries) = &self.node.value else { return None };
        let own = |wanted: &str| entries.iter().find(|(k, _)| k.is_text(wanted)).map(|(_, value)| value);
        if let Some(value) = own(key) {
            return Some(Self { node: Rc::clone(&value.node), shared: value.shared || self.shared });
        }
        let merged = own("<<")?;
        let found = match &merged.node.value {
            Value::Sequence(items) => items.iter().find_map(|item| item.get(key)),
            Value::Mapping(_) | Value::Scalar(_) => merged.get(key),
        };
        found.map(|value| Self { shared: true, ..value })
    }

    /// The items of a sequence.
    pub(super) fn items(&self) -> Option<impl Iterator<Item = Self>> {
        let Value::Sequence(items) = &self.node.value else { return None };
        let item = |item: &Self| Self { node: Rc::clone(&item.node), shared: item.shared || self.shared };
        Some(items.iter().map(item))
    }

    /// The keys and values of a mapping; merged ones first, as later ones win.
    pub(super) fn entries(&self) -> Option<Vec<(Self, Self)>> {
        let Value::Mapping(entries) = &self.node.value else { return None };
        let mut all = Vec::with_capacity(entries.len());
        for (_, value) in entries.iter().filter(|(key, _)| key.is_text("<<")) {
            match &value.node.value {
                // Of several merged mappings the first wins.
                Value::Sequence(items) => {
                    all.extend(items.iter().rev().filter_map(Self::entries).flatten());
                }
                Value::Mapping(_) | Value::Scalar(_) => all.extend(value.entries().into_iter().flatten()),
            }
        }
        all.extend(entries.iter().filter(|(key, _)| !key.is_text("<<")).cloned());
        Some(all)
    }

    /// The scalar, if it is one.
    pub(super) fn scalar(&self) -> Option<&Scalar> {
        match &self.node.value {
            Value::Scalar(scalar) => Some(scalar),
            Value::Sequence(_) | Value::Mapping(_) => None,
        }
    }

    /// Is it nothing: `~`, `null`, or empty?
    pub(super) fn is_null(&self) -> bool {
        self.scalar().is_some_and(|scalar| {
            scalar.style == ScalarStyle::Plain
                && scalar.tag.is_empty()
                && matches!(scalar.text.as_str(), "" | "~" | "null" | "Null" | "NULL")
        })
    }

    /// Is it `true`?
    pub(super) fn is_true(&self) -> bool {
        self.scalar().is_some_and(|scalar| {
            scalar.style == ScalarStyle::Plain && matches!(scalar.text.as_str(), "true" | "True" | "TRUE")
        })
    }

    /// The string, where Kubernetes would take the value for one.
    pub(super) fn string(&self) -> Result<&str, Fault> {
        let fault = |reason: &str| Err(self.fault(reason));
        let Some(scalar) = self.scalar() else { return fault("a string is wanted here") };
        match (scalar.style, scalar.tag.as_str()) {
            (ScalarStyle::Plain, "") if is_other_type(&scalar.text) => {
                fault("a string is wanted here; quote the value")
            }
            (_, "" | "tag:yaml.org,2002:str") => Ok(&scalar.text),
            _ => fault("a string is wanted here, without a tag"),
        }
    }

    /// A fault at this place.
    pub(super) fn fault(&self, reason: &str) -> Fault {
        Fault { at: self.node.at, reason: reason.to_owned() }
    }

    fn is_text(&self, wanted: &str) -> bool {
        self.scalar().is_some_and(|scalar| scalar.text == wanted)
    }
}

/// Would a YAML reader take the plain scalar for a null, a boolean or a number? YAML 1.1's booleans are
/// among them, since that is what Kubernetes' tools read.
fn is_other_type(text: &str) -> bool {
    let word = text.to_ascii_lowercase();
    if matches!(word.as_str(), "" | "~" | "null" | "true" | "false" | "yes" | "no" | "on" | "off" | "y" | "n")
    {
        return true;
    }
    let digits = word.trim_start_matches(['+', '-']).replace('_', "");
    if matches!(digits.as_str(), ".inf" | ".nan") {
        return true;
    }
    let radix = |prefix: &str, radix: u32| {
        digits
            .strip_prefix(prefix)
            .is_some_and(|rest| !rest.is_empty() && rest.chars().all(|c| c.is_digit(radix)))
    };
    let decimal =
        digits.starts_with(|c: char| c.is_ascii_digit() || c == '.') && digits.parse::<f64>().is_ok();
    decimal || radix("0x", 16) || radix("0o", 8) || radix("0b", 2)
}

/// Every event of a text with its span, comments left out.
pub(super) fn events(text: &str) -> impl Iterator<Item = Result<(Event<'_>, Span), Fault>> {
    let mut wanted = options! { block_nesting_limit: DEPTH, flow_nesting_limit: DEPTH };
    wanted.set_emit_comments(false);
    Parser::new_from_str_with_options(text, wanted)
        .map(|next| next.map_err(|error| Fault { at: position(error.marker()), reason: error.info() }))
}

fn position(marker: &Marker) -> Position {
    Position { line: marker.line(), column: marker.col() + 1 }
}

/// A collection that is being read.
struct Open {
    at: Position,
    anchor: usize,
    mapping: bool,
    children: Vec<Place>,
}

/// Reads every document of a text.
pub(super) fn documents(text: &str) -> Result<Vec<Place>, Fault> {
    let mut documents = Vec::new();
    let mut open: Vec<Open> = Vec::new();
    let mut anchors: HashMap<usize, Rc<Node>> = HashMap::new();
    for next in events(text) {
        let (event, span) = next?;
        let at = position(&span.start);
        let (node, anchor) = match event {
            Event::DocumentStart(..) => {
                anchors.clear();
                continue;
            }
            Event::Scalar(value, style, anchor, tag) => {
                let bytes = span.byte_range().unwrap_or_default();
                let tag = tag.map(|tag| format!("{}{}", tag.handle(), tag.suffix())).unwrap_or_default();
                let scalar = Scalar { text: value.into_owned(), style, bytes, tag };
                (Rc::new(Node { value: Value::Scalar(scalar), at }), anchor)
            }
            Event::SequenceStart(_, anchor, _) | Event::MappingStart(_, anchor, _) => {
                let mapping = matches!(event, Event::MappingStart(..));
                if open.len() >= DEPTH {
                    return Err(Fault { at, reason: format!("nested more than {DEPTH} deep") });
                }
                open.push(Open { at, anchor, mapping, children: Vec::new() });
                continue;
            }
            Event::SequenceEnd | Event::MappingEnd => {
                let Some(Open { at, anchor, mapping, children }) = open.pop() else { continue };
                let value =
                    if mapping { Value::Mapping(paired(children)?) } else { Value::Sequence(children) };
                (Rc::new(Node { value, at }), anchor)
            }
            Event::Alias(anchor) => {
                // An anchor is known when its node is complete, so a node that holds itself is refused.
                let node = anchors.get(&anchor).map(Rc::clone);
                let node = node.ok_or(Fault { at, reason: "an alias inside its own anchor".to_owned() })?;
                place(&mut open, &mut documents, Place { node, shared: true });
                continue;
            }
            _ => continue,
        };
        if anchor != 0 {
            anchors.insert(anchor, Rc::clone(&node));
        }
        place(&mut open, &mut documents, Place { node, shared: anchor != 0 });
    }
    Ok(documents)
}

fn place(open: &mut [Open], documents: &mut Vec<Place>, place: Place) {
    match open.last_mut() {
        Some(parent) => parent.children.push(place),
        None => documents.push(place),
    }
}

/// Keys with their values. A key that is there twice has no value that all readers agree on.
fn paired(children: Vec<Place>) -> Result<Vec<(Place, Place)>, Fault> {
    let mut entries = Vec::with_capacity(children.len() / 2);
    let mut children = children.into_iter();
    while let (Some(key), Some(value)) = (children.next(), children.next()) {
        entries.push((key, value));
    }
    let mut seen = HashSet::with_capacity(entries.len());
    for (key, _) in &entries {
        if let Some(scalar) = key.scalar()
            && !seen.insert(scalar.text.as_str())
        {
            return Err(key.fault(&format!("key {:?} is there twice", scalar.text)));
        }
    }
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn only(text: &str) -> Place {
        let mut found = documents(text).unwrap();
        assert_eq!(found.len(), 1, "{text:?}");
        found.remove(0)
    }

    #[test]
    fn values_know_their_bytes_in_every_document() {
        let text = "# é\na: one\n---\nb: 'two'\n---\n{\"c\": \"three\"}\n";
        let found: Vec<&str> = documents(text)
            .unwrap()
            .iter()
            .zip(["a", "b", "c"])
            .map(|(document, key)| text[document.get(key).unwrap().scalar().unwrap().bytes.clone()].trim())
            .collect();
        assert_eq!(found, ["one", "'two'", "\"three\""]);
    }

    #[test]
    fn aliases_anchors_and_merges_are_shared() {
        let document = only("base: &b {x: 1a, y: 2a}\nuse: *b\nmerge: {<<: *b, y: 3a}\nown: {x: 4a}\n");
        let shared = |path: [&str; 2]| {
            let place = document.get(path[0]).unwrap().get(path[1]).unwrap();
            (place.string().unwrap().to_owned(), place.shared)
        };
        assert_eq!(shared(["base", "x"]), ("1a".to_owned(), true));
        assert_eq!(shared(["use", "x"]), ("1a".to_owned(), true));
        assert_eq!(shared(["merge", "x"]), ("1a".to_owned(), true));
        assert_eq!(shared(["merge", "y"]), ("3a".to_owned(), false));
        assert_eq!(shared(["own", "x"]), ("4a".to_owned(), false));
    }

    #[test]
    fn strings_are_what_kubernetes_takes_for_strings() {
        for text in ["12", "22.04", "true", "yes", "~", "null", "0x1f", "1e3", "1_000", ".inf", ""] {
            assert!(only(&format!("a: {text}\n")).get("a").unwrap().string().is_err(), "{text:?}");
        }
        for text in ["'12'", "\"\"", "6.1.0-47-amd64", "nan", "!!str 12", "v12", "1.2.3"] {
            assert!(only(&format!("a: {text}\n")).get("a").unwrap().string().is_ok(), "{text:?}");
        }
    }

    #[test]
    fn hostile_texts_are_refused() {
        let deep = "[".repeat(10_000);
        for text in ["a: 1\na: 2\n", "&a [*a]", "*none", "image: {{ .Values.image }}:{{ x }}\n", &deep] {
            assert!(documents(text).is_err(), "{text:?}");
        }
        let bomb = (1..30).fold("a0: &a0 [x]\n".to_owned(), |text, n| {
            format!("{text}a{n}: &a{n} [*a{m}, *a{m}, *a{m}]\n", m = n - 1)
        });
        assert!(documents(&bomb).is_ok());
    }

    proptest! {
        #[test]
        fn nothing_panics(text in "[-a: \\[\\]{}&*'\"|>#%!?,\n\t]{0,60}") {
            let _ = documents(&text);
        }
    }
}
