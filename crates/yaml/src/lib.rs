//! Parses YAML into trees whose values know their position, for readers of definitions and manifests.
//!
//! The loader of definitions removes faulty values one by one from a tree to find the next mistake.
#![forbid(unsafe_code)]

mod decode;

use std::{
    collections::{HashMap, HashSet},
    ops::Range,
    rc::Rc,
};

pub use decode::{decode, similar};
use granit_parser::{Event, Marker, Parser, ScalarStyle, Span, options};

/// Maximum nesting depth, aliases followed. It bounds the recursion when a tree is read or dropped. Valid documents
/// stay far below it.
const MAX_DEPTH: usize = 64;
/// Maximum number of keys that `<<` may merge into one text; each merged key takes memory.
const MAX_MERGED_KEYS: usize = 1_000_000;
/// Maximum number of values that the aliases of one text may repeat. Readers follow each alias, so a small text could
/// otherwise expand to a huge tree.
const MAX_REPEATED_VALUES: usize = 20_000;
/// Number of bytes of a text that count as one more value.
const BYTES_PER_VALUE: usize = 1024;

/// Position in a text, as shown to users.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// Counts from 1.
    pub line: usize,
    /// Counts from 1, in characters.
    pub column: usize,
}

/// A mistake in a text, with its position.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct YamlError {
    pub position: Position,
    pub message: String,
}

/// A scalar and the range of its bytes in the text, quotes included.
#[derive(Clone, Debug)]
pub struct Scalar {
    /// Literal text: `1.10` stays `1.10`.
    pub text: String,
    pub style: ScalarStyle,
    pub bytes: Range<usize>,
    /// The full tag; empty without a tag.
    pub tag: String,
}

#[derive(Clone, Debug)]
pub enum Value {
    /// `~`, `null`, or empty.
    Null,
    Scalar(Scalar),
    List(Vec<Node>),
    /// Keys and values, including the keys merged in by `<<`.
    Map(Vec<(Node, Node)>),
    /// A value that [`Node::remove`] removed.
    Removed,
}

/// A value with its position. Aliases share their anchor's content, so a document does not grow while it is
/// read.
#[derive(Clone, Debug)]
pub struct Node {
    content: Rc<Content>,
    /// Position of the value; for an alias, the position of the alias.
    pub position: Position,
    /// Whether other nodes may share the value: the value has an anchor, is an alias, or was merged in.
    pub shared: bool,
}

#[derive(Clone, Debug)]
struct Content {
    value: Value,
    size: usize,
    depth: usize,
}

impl Node {
    fn new(value: Value, position: Position, shared: bool) -> Result<Self, YamlError> {
        let length = if let Value::Scalar(scalar) = &value { scalar.text.len() } else { 0 };
        let (mut size, mut depth) = (1 + length / BYTES_PER_VALUE, 0);
        let mut count = |child: &Self| {
            size = size.saturating_add(child.size());
            depth = depth.max(child.content.depth + 1);
        };
        match &value {
            Value::List(items) => items.iter().for_each(count),
            Value::Map(entries) => entries.iter().flat_map(|(key, value)| [key, value]).for_each(&mut count),
            Value::Null | Value::Scalar(_) | Value::Removed => {}
        }
        if depth >= MAX_DEPTH {
            return Err(YamlError { position, message: format!("nested more than {MAX_DEPTH} deep") });
        }
        Ok(Self { content: Rc::new(Content { value, size, depth }), position, shared })
    }

    pub fn value(&self) -> &Value {
        &self.content.value
    }

    /// Returns the number of values in this node, aliases followed. A text counts as one more value for each KiB.
    pub fn size(&self) -> usize {
        self.content.size
    }

    /// Returns the value of a key.
    pub fn get(&self, key: &str) -> Option<Self> {
        Some(self.lookup(key)?.with_sharing_of(self))
    }

    fn lookup(&self, key: &str) -> Option<&Self> {
        self.entries()?.iter().find(|(name, _)| name.is_text(key)).map(|(_, value)| value)
    }

    /// Returns the items of a list.
    pub fn items(&self) -> Option<impl Iterator<Item = Self>> {
        let Value::List(items) = self.value() else { return None };
        Some(items.iter().map(|item| item.with_sharing_of(self)))
    }

    /// Returns the keys and values of a mapping.
    pub fn entries(&self) -> Option<&[(Self, Self)]> {
        match self.value() {
            Value::Map(entries) => Some(entries),
            _ => None,
        }
    }

    /// Returns the scalar, unless the value is null or a collection.
    pub fn scalar(&self) -> Option<&Scalar> {
        match self.value() {
            Value::Scalar(scalar) => Some(scalar),
            _ => None,
        }
    }

    pub fn is_null(&self) -> bool {
        matches!(self.value(), Value::Null)
    }

    /// Whether the value is a plain `true`.
    pub fn is_true(&self) -> bool {
        self.scalar().is_some_and(|scalar| {
            scalar.style == ScalarStyle::Plain && matches!(scalar.text.as_str(), "true" | "True" | "TRUE")
        })
    }

    /// Returns the text if Kubernetes would read the value as a string.
    pub fn string(&self) -> Result<&str, YamlError> {
        let error = |message: &str| Err(self.error(message));
        let scalar = match self.value() {
            Value::Scalar(scalar) => scalar,
            Value::Null => return error("expected a string; quote the value"),
            _ => return error("expected a string"),
        };
        match (scalar.style, scalar.tag.as_str()) {
            (ScalarStyle::Plain, "") if is_other_type(&scalar.text) => {
                error("expected a string; quote the value")
            }
            (_, "" | "tag:yaml.org,2002:str") => Ok(&scalar.text),
            _ => error("expected a string, without a tag"),
        }
    }

    /// Creates an error at this node's position.
    pub fn error(&self, message: impl Into<String>) -> YamlError {
        YamlError { position: self.position, message: message.into() }
    }

    /// Returns the position of the value at a path of names and numbers, or of its nearest existing ancestor.
    pub fn position_of(&self, path: &[&str]) -> Position {
        let mut node = self;
        for step in path {
            let item = || node.child(step.parse().ok()?);
            let child = if node.entries().is_some() { node.lookup(step) } else { item() };
            let Some(child) = child else { break };
            node = child;
        }
        node.position
    }

    /// Returns the child with this number, in file order.
    pub fn child(&self, index: usize) -> Option<&Self> {
        match self.value() {
            Value::Map(entries) => entries.get(index).map(|(_, value)| value),
            Value::List(items) => items.get(index),
            Value::Null | Value::Scalar(_) | Value::Removed => None,
        }
    }

    /// Removes the value at a path of child numbers. The other children keep their numbers.
    pub fn remove(&mut self, path: &[usize]) {
        let value = &mut Rc::make_mut(&mut self.content).value;
        let child = match (path, value) {
            ([], value) => return *value = Value::Removed,
            ([index, ..], Value::Map(entries)) => entries.get_mut(*index).map(|(_, child)| child),
            ([index, ..], Value::List(items)) => items.get_mut(*index),
            _ => None,
        };
        if let (Some(child), [_, inner_path @ ..]) = (child, path) {
            child.remove(inner_path);
        }
    }

    pub fn is_removed(&self) -> bool {
        matches!(self.value(), Value::Removed)
    }

    /// Returns the node, marked as shared if its parent is.
    fn with_sharing_of(&self, parent: &Self) -> Self {
        Self { shared: self.shared || parent.shared, ..self.clone() }
    }

    fn is_text(&self, text: &str) -> bool {
        self.scalar().is_some_and(|scalar| scalar.text == text)
    }
}

/// Whether a YAML reader would parse the plain scalar as null, a boolean or a number. YAML 1.1 booleans
/// count, because Kubernetes' tools read them as booleans.
pub fn is_other_type(text: &str) -> bool {
    let text = text.to_ascii_lowercase();
    if matches!(text.as_str(), "" | "~" | "null" | "true" | "false" | "yes" | "no" | "on" | "off" | "y" | "n")
    {
        return true;
    }
    let digits = text.trim_start_matches(['+', '-']).replace('_', "");
    if matches!(digits.as_str(), ".inf" | ".nan") {
        return true;
    }
    let is_integer = |prefix: &str, radix: u32| {
        let digits = digits.strip_prefix(prefix);
        digits.is_some_and(|digits| !digits.is_empty() && digits.chars().all(|c| c.is_digit(radix)))
    };
    let is_decimal =
        digits.starts_with(|c: char| c.is_ascii_digit() || c == '.') && digits.parse::<f64>().is_ok();
    is_decimal || is_integer("0x", 16) || is_integer("0o", 8) || is_integer("0b", 2)
}

/// Returns the parser events of a text with their spans, without comments.
pub fn events(text: &str) -> impl Iterator<Item = Result<(Event<'_>, Span), YamlError>> {
    let mut options = options! { block_nesting_limit: MAX_DEPTH, flow_nesting_limit: MAX_DEPTH };
    options.set_emit_comments(false);
    Parser::new_from_str_with_options(text, options).map(|next| {
        next.map_err(|error| YamlError {
            position: to_position(error.marker()),
            message: explained(error.info()),
        })
    })
}

/// Adds the usual causes to the parser's most frequent message.
fn explained(message: String) -> String {
    if message == "mapping values are not allowed in this context" {
        return format!(
            "{message}: check the indentation here and above, and quote a value that contains `: `"
        );
    }
    message
}

fn to_position(marker: &Marker) -> Position {
    Position { line: marker.line(), column: marker.col() + 1 }
}

/// A collection whose end has not been read yet.
struct OpenNode {
    position: Position,
    /// Number of the anchor; 0 without an anchor.
    anchor: usize,
    is_mapping: bool,
    children: Vec<Node>,
}

/// Parses every document of a text, except null documents.
pub fn documents(text: &str) -> Result<Vec<Node>, YamlError> {
    let mut documents = Vec::new();
    let mut open: Vec<OpenNode> = Vec::new();
    let mut anchors: HashMap<usize, Node> = HashMap::new();
    let (mut mergeable, mut repeatable) = (MAX_MERGED_KEYS, MAX_REPEATED_VALUES);
    for next in events(text) {
        let (event, span) = next?;
        let position = to_position(&span.start);
        let (value, position, anchor) = match event {
            Event::DocumentStart(..) => {
                anchors.clear();
                continue;
            }
            Event::Scalar(value, style, anchor, tag) => {
                let bytes = span.byte_range().unwrap_or_default();
                let tag = tag.map(|tag| format!("{}{}", tag.handle(), tag.suffix())).unwrap_or_default();
                (scalar_value(Scalar { text: value.into_owned(), style, bytes, tag }), position, anchor)
            }
            Event::SequenceStart(_, anchor, _) | Event::MappingStart(_, anchor, _) => {
                let is_mapping = matches!(event, Event::MappingStart(..));
                open.push(OpenNode { position, anchor, is_mapping, children: Vec::new() });
                continue;
            }
            Event::SequenceEnd | Event::MappingEnd => {
                let Some(OpenNode { position, anchor, is_mapping, children }) = open.pop() else {
                    continue;
                };
                let value = if is_mapping {
                    Value::Map(paired_entries(children, &mut mergeable)?)
                } else {
                    Value::List(children)
                };
                (value, position, anchor)
            }
            Event::Alias(anchor) => {
                // An anchor becomes known when its node is complete, so a node that contains itself is
                // refused.
                let message = || "an alias refers to the anchor that contains it".to_owned();
                let node = anchors.get(&anchor).ok_or_else(|| YamlError { position, message: message() })?;
                let message = || format!("aliases repeat more than {MAX_REPEATED_VALUES} values");
                let remaining = repeatable.checked_sub(node.size());
                repeatable = remaining.ok_or_else(|| YamlError { position, message: message() })?;
                attach(&mut open, &mut documents, Node { position, ..node.clone() });
                continue;
            }
            _ => continue,
        };
        let node = Node::new(value, position, anchor != 0)?;
        if anchor != 0 {
            anchors.insert(anchor, node.clone());
        }
        attach(&mut open, &mut documents, node);
    }
    documents.retain(|document| !document.is_null());
    Ok(documents)
}

fn scalar_value(scalar: Scalar) -> Value {
    let is_plain = scalar.style == ScalarStyle::Plain && scalar.tag.is_empty();
    let is_null = is_plain && matches!(scalar.text.as_str(), "" | "~" | "null" | "Null" | "NULL");
    if is_null { Value::Null } else { Value::Scalar(scalar) }
}

/// Adds a complete node to the collection that contains it, or to the documents.
fn attach(open: &mut [OpenNode], documents: &mut Vec<Node>, node: Node) {
    match open.last_mut() {
        Some(parent) => parent.children.push(node),
        None => documents.push(node),
    }
}

/// Pairs keys with values and merges `<<`. A mapping's own keys take precedence, then the keys of the first merged mapping.
/// A duplicate key is an error, because YAML readers disagree about its value.
fn paired_entries(children: Vec<Node>, mergeable: &mut usize) -> Result<Vec<(Node, Node)>, YamlError> {
    let (mut entries, mut merged) = (Vec::with_capacity(children.len() / 2), Vec::new());
    let mut seen = HashSet::with_capacity(children.len() / 2);
    let mut children = children.into_iter();
    while let (Some(key), Some(value)) = (children.next(), children.next()) {
        let name = key.scalar().map(|scalar| scalar.text.clone());
        if name.as_ref().is_some_and(|name| !seen.insert(name.clone())) {
            return Err(key.error(format!("duplicate field {:?}", name.unwrap_or_default())));
        }
        match (name.as_deref(), value.value()) {
            (Some("<<"), Value::List(items)) => merged.extend(items.iter().cloned()),
            (Some("<<"), _) => merged.push(value),
            _ => entries.push((key, value)),
        }
    }
    for (key, value) in merged.iter().filter_map(Node::entries).flatten() {
        *mergeable = mergeable.checked_sub(1).ok_or_else(|| key.error("too many fields are merged"))?;
        if key.scalar().is_none_or(|scalar| seen.insert(scalar.text.clone())) {
            entries.push((key.clone(), Node { shared: true, ..value.clone() }));
        }
    }
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn only(text: &str) -> Node {
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
    fn a_wrong_indentation_is_explained() {
        for text in ["a:\n   - b: 1\n      c: 2\n", "a: b: c\n"] {
            let error = documents(text).unwrap_err();
            assert!(error.message.contains("check the indentation"), "{}", error.message);
        }
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
        let long = format!("a: &a {}\nb: [{}]\n", "x".repeat(100 << 10), "*a, ".repeat(200));
        for text in [&bomb, &long] {
            let error = documents(text).unwrap_err();
            assert_eq!(error.message, "aliases repeat more than 20000 values");
        }
        assert_eq!(only(&long.replacen(", *a", "", 20)).size(), 5 + 100 + 180 * 101);
    }

    proptest! {
        #[test]
        fn nothing_panics(text in "[-a: \\[\\]{}&*'\"|>#%!?,\n\t]{0,60}") {
            let _ = documents(&text);
        }
    }
}
