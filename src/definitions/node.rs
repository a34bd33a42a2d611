//! Adapter: a YAML document as a tree in which every value knows its place.
//!
//! serde stops at the first mistake and forgets where values stood. The tree keeps the places, and a mistaken
//! value can be taken out of it to find the next mistake.

use std::{fmt, ops::Range};

use serde::{
    Deserialize, Deserializer,
    de::{self, MapAccess, SeqAccess, Visitor},
};
use serde_saphyr::{Location, Spanned};

/// Where a value stands: line and column in characters, both from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub line: u64,
    pub column: u64,
}

/// A value with its place.
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub place: Place,
    pub value: Value,
    /// Names (or numbers) of the children that were taken out because they are mistaken.
    pub removed: Vec<String>,
}

/// A value. Scalars are texts as they are written: no field of a definition is a number or a boolean, and
/// `version: 1.10` is not to become 1.1.
#[derive(Clone, Debug)]
pub(super) enum Value {
    Nothing,
    Text(String),
    List(Vec<Node>),
    Map(Vec<(Key, Node)>),
}

/// A key with its place.
#[derive(Clone, Debug)]
pub(super) struct Key {
    pub place: Place,
    pub name: String,
}

/// Reads the documents of a file. Aliases are followed within the parser's budget.
pub(super) fn documents(text: &str) -> Result<Vec<Node>, serde_saphyr::Error> {
    // A definition has some fifty values; these bounds keep a hostile file from taking the memory.
    let options = serde_saphyr::options! {
        with_snippet: false,
        budget: serde_saphyr::budget! { max_nodes: 20_000, max_events: 100_000, max_depth: 32, max_documents: 256 },
        alias_limits: serde_saphyr::alias_limits! { max_total_replayed_events: 20_000 },
    };
    let raw: Vec<RawNode> = serde_saphyr::from_multiple_with_options(text, options)?;
    Ok(raw.into_iter().map(|node| node.resolve(text)).collect())
}

impl Node {
    /// The place of the value at this path of names and numbers, or of its nearest ancestor that exists.
    pub fn place_of(&self, path: &[&str]) -> Place {
        let mut node = self;
        for step in path {
            let child = match &node.value {
                Value::Map(entries) => {
                    entries.iter().find(|(key, _)| key.name == *step).map(|(_, value)| value)
                }
                Value::List(items) => step.parse().ok().and_then(|index: usize| items.get(index)),
                Value::Nothing | Value::Text(_) => None,
            };
            match child {
                Some(child) => node = child,
                None => break,
            }
        }
        node.place
    }

    /// The child of this number, in the order of the file.
    pub fn child(&self, index: usize) -> Option<&Self> {
        match &self.value {
            Value::Map(entries) => entries.get(index).map(|(_, value)| value),
            Value::List(items) => items.get(index),
            Value::Nothing | Value::Text(_) => None,
        }
    }

    /// Takes out the value at a path of child numbers.
    pub fn remove(&mut self, path: &[usize]) {
        let Some((&index, rest)) = path.split_first() else { return };
        match &mut self.value {
            Value::Map(entries) if rest.is_empty() && index < entries.len() => {
                self.removed.push(entries.remove(index).0.name);
            }
            Value::List(items) if rest.is_empty() && index < items.len() => {
                items.remove(index);
                self.removed.push(index.to_string());
            }
            Value::Map(entries) => {
                if let Some((_, child)) = entries.get_mut(index) {
                    child.remove(rest);
                }
            }
            Value::List(items) => {
                if let Some(child) = items.get_mut(index) {
                    child.remove(rest);
                }
            }
            Value::Nothing | Value::Text(_) => {}
        }
    }
}

impl From<Location> for Place {
    fn from(location: Location) -> Self {
        Self { line: location.line(), column: location.column() }
    }
}

/// A node as the parser gives it: numbers and booleans already interpreted.
struct RawNode {
    place: Place,
    /// Bytes of the file.
    range: Option<Range<usize>>,
    value: RawValue,
}

enum RawValue {
    Nothing,
    Text(String),
    /// A number or boolean, in the parser's form.
    Interpreted(String),
    List(Vec<RawNode>),
    Map(Vec<(Key, RawNode)>),
}

impl RawNode {
    fn resolve(self, source: &str) -> Node {
        let Self { place, range, value } = self;
        let value = match value {
            RawValue::Nothing => Value::Nothing,
            RawValue::Text(text) => Value::Text(text),
            RawValue::Interpreted(text) => {
                let written = range.and_then(|range| source.get(range)).map(str::trim);
                Value::Text(written.filter(|written| !written.is_empty()).map_or(text, str::to_owned))
            }
            RawValue::List(items) => {
                Value::List(items.into_iter().map(|item| item.resolve(source)).collect())
            }
            RawValue::Map(entries) => {
                Value::Map(entries.into_iter().map(|(key, value)| (key, value.resolve(source))).collect())
            }
        };
        Node { place, value, removed: Vec::new() }
    }
}

impl<'de> Deserialize<'de> for RawNode {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Spanned { value, referenced, defined } = Spanned::<RawValue>::deserialize(deserializer)?;
        let span = defined.span();
        let range = span.byte_offset().zip(span.byte_len()).and_then(|(start, length)| {
            let start = usize::try_from(start).ok()?;
            Some(start..start.checked_add(usize::try_from(length).ok()?)?)
        });
        Ok(Self { place: referenced.into(), range, value })
    }
}

impl<'de> Deserialize<'de> for RawValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(RawVisitor)
    }
}

struct RawVisitor;

impl<'de> Visitor<'de> for RawVisitor {
    type Value = RawValue;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a YAML value")
    }

    fn visit_unit<E: de::Error>(self) -> Result<RawValue, E> {
        Ok(RawValue::Nothing)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<RawValue, E> {
        Ok(RawValue::Text(text.to_owned()))
    }

    fn visit_bool<E: de::Error>(self, value: bool) -> Result<RawValue, E> {
        Ok(RawValue::Interpreted(value.to_string()))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<RawValue, E> {
        Ok(RawValue::Interpreted(value.to_string()))
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<RawValue, E> {
        Ok(RawValue::Interpreted(value.to_string()))
    }

    fn visit_i128<E: de::Error>(self, value: i128) -> Result<RawValue, E> {
        Ok(RawValue::Interpreted(value.to_string()))
    }

    fn visit_u128<E: de::Error>(self, value: u128) -> Result<RawValue, E> {
        Ok(RawValue::Interpreted(value.to_string()))
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<RawValue, E> {
        Ok(RawValue::Interpreted(value.to_string()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<RawValue, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = list.next_element()? {
            items.push(item);
        }
        Ok(RawValue::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawValue, A::Error> {
        let mut entries = Vec::new();
        while let Some((key, value)) = map.next_entry::<Spanned<String>, RawNode>()? {
            entries.push((Key { place: key.referenced.into(), name: key.value }, value));
        }
        Ok(RawValue::Map(entries))
    }
}
