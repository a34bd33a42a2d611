//! Converts a tree of values with positions to a definition, and reports every mistake at its position.

use std::{fmt, iter::Enumerate, slice};

use serde::{
    Deserialize,
    de::{
        self, DeserializeSeed, Deserializer, EnumAccess, Expected, IntoDeserializer, MapAccess, SeqAccess,
        Unexpected, VariantAccess, Visitor, value::StrDeserializer,
    },
    forward_to_deserialize_any,
};

use crate::{Node, Position, Value, YamlError};

/// Maximum number of reported mistakes in one document.
const MAX_MISTAKES: usize = 50;

/// Reads a document. Each attempt reports one mistake, marks the faulty value as removed and tries again. Errors caused only by a
/// removed value are dropped.
///
/// A missing field removes the whole mapping. Serde reports it only after it has read all other fields, whose mistakes have then
/// been reported.
pub fn decode<T: for<'de> Deserialize<'de>>(document: &Node) -> Result<T, Vec<YamlError>> {
    let mut remaining = document.clone();
    let mut mistakes = Vec::new();
    loop {
        let error = match T::deserialize(&remaining) {
            Ok(value) if mistakes.is_empty() => return Ok(value),
            Ok(_) => return Err(mistakes),
            Err(error) => error,
        };
        let path: Vec<usize> = error.path.iter().rev().copied().collect();
        let faulty = path.iter().try_fold(&remaining, |node, index| node.child(*index)).unwrap_or(&remaining);
        if !error.follows_from_removal(faulty) {
            let position = error.key_position.unwrap_or(faulty.position);
            mistakes.push(YamlError { position, message: error.message });
        }
        if path.is_empty() || mistakes.len() >= MAX_MISTAKES {
            return Err(mistakes);
        }
        remaining.remove(&path);
    }
}

/// A value that serde rejected, with the child indexes of its path, the innermost first.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct DecodeError {
    message: String,
    missing_field: Option<&'static str>,
    unknown_field: Option<String>,
    /// Position of the key, if the key and not its value is at fault.
    key_position: Option<Position>,
    path: Vec<usize>,
}

impl DecodeError {
    fn new(message: String) -> Self {
        Self { message, missing_field: None, unknown_field: None, key_position: None, path: Vec::new() }
    }

    /// Adds the index of the child that contains the faulty value.
    fn within(mut self, index: usize) -> Self {
        self.path.push(index);
        self
    }

    fn at_key(self, index: usize, position: Position) -> Self {
        Self { key_position: Some(position), ..self.within(index) }
    }

    /// Whether the error only results from the removal of a faulty part, so that it is not a separate mistake.
    fn follows_from_removal(&self, node: &Node) -> bool {
        // After the mistake in `version: [1]`, the field `version` is missing.
        if let Some(field) = self.missing_field {
            return node.get(field).is_some_and(|value| value.is_removed());
        }
        // A misspelt key is a mistake whatever its value is. `node` is that value.
        if self.key_position.is_some() {
            return false;
        }
        match node.value() {
            // After the mistake in `{oci: 5}`, the error "exactly one of apt, oci is required" is about the mapping.
            Value::Map(entries) => entries.iter().any(|(_, value)| value.is_removed()),
            // After the mistake in `[[x]]`, the error about an empty list is about the outer list.
            Value::List(items) => items.iter().any(Node::is_removed),
            Value::Null | Value::Scalar(_) | Value::Removed => false,
        }
    }
}

impl de::Error for DecodeError {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self::new(message.to_string())
    }

    fn invalid_type(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        let found = match found {
            Unexpected::Str(text) => quoted(text),
            Unexpected::Unit => "nothing".to_owned(),
            Unexpected::Seq => "a list".to_owned(),
            Unexpected::Map => "a mapping".to_owned(),
            other => other.to_string(),
        };
        Self::new(format!("expected {expected}, found {found}"))
    }

    fn unknown_variant(variant: &str, expected: &'static [&'static str]) -> Self {
        Self::new(format!("unknown value {}; {}", quoted(variant), suggestion(variant, expected)))
    }

    fn unknown_field(field: &str, expected: &'static [&'static str]) -> Self {
        let message = format!("unknown field {}; {}", quoted(field), suggestion(field, expected));
        Self { unknown_field: Some(field.to_owned()), ..Self::new(message) }
    }

    fn missing_field(field: &'static str) -> Self {
        Self { missing_field: Some(field), ..Self::new(format!("field \"{field}\" is missing")) }
    }
}

fn suggestion(name: &str, known: &[&str]) -> String {
    match similar(name, known.iter().copied()) {
        Some(meant) => format!("did you mean {meant:?}?"),
        None => format!("known: {}", known.join(", ")),
    }
}

/// Returns the known name that was probably meant: at most two edits away, in at most a third of the characters of `name`. With
/// three edits, `pci-15b3` would be suggested for the equally valid `pci-10de`.
pub fn similar<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let length = name.chars().count();
    // The comparison of a long hostile name would take too much time.
    if length > 128 {
        return None;
    }
    let near = known.into_iter().filter(|known| known.len().abs_diff(name.len()) <= 2);
    let distances = near.map(|known| (strsim::damerau_levenshtein(name, known), known));
    let (distance, nearest) = distances.min_by_key(|(distance, _)| *distance)?;
    (distance <= 2 && distance * 3 <= length).then_some(nearest)
}

/// Quotes the first 80 characters of a text.
fn quoted(text: &str) -> String {
    let start: String = text.chars().take(80).collect();
    format!("{start:?}")
}

fn describe(node: &Node) -> String {
    match node.value() {
        Value::Null | Value::Removed => "nothing".to_owned(),
        Value::Scalar(scalar) => quoted(&scalar.text),
        Value::List(_) => "a list".to_owned(),
        Value::Map(_) => "a mapping".to_owned(),
    }
}

fn type_error(expected: &str, node: &Node) -> DecodeError {
    DecodeError::new(format!("expected {expected}, found {}", describe(node)))
}

/// Moves an error about an unknown field to the key's position. Serde usually reports it while it reads the key. With
/// `#[serde(flatten)]` it first collects all keys and values, and then reports the error for the mapping.
fn move_to_key(map: &Node, error: DecodeError) -> DecodeError {
    // An error with a path is already at the key, or at a value inside.
    if !error.path.is_empty() {
        return error;
    }
    let (Some(entries), Some(field)) = (map.entries(), &error.unknown_field) else { return error };
    match entries.iter().position(|(key, _)| key_text(key).is_ok_and(|name| name == field)) {
        Some(index) => error.at_key(index, entries[index].0.position),
        None => error,
    }
}

fn key_text(key: &Node) -> Result<&str, DecodeError> {
    match key.value() {
        Value::Scalar(scalar) => Ok(&scalar.text),
        Value::Null => Ok(""),
        Value::List(_) | Value::Map(_) | Value::Removed => Err(type_error("a text", key)),
    }
}

impl<'de> Deserializer<'de> for &'de Node {
    type Error = DecodeError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        match self.value() {
            Value::Null | Value::Removed => visitor.visit_unit(),
            Value::Scalar(scalar) => visitor.visit_borrowed_str(&scalar.text),
            Value::List(_) => self.deserialize_seq(visitor),
            Value::Map(_) => self.deserialize_map(visitor),
        }
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        let scalar = self.scalar().ok_or_else(|| type_error("a text", self))?;
        visitor.visit_borrowed_str(&scalar.text)
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        self.deserialize_str(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        if self.is_null() { visitor.visit_none() } else { visitor.visit_some(self) }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, DecodeError> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        match self.value() {
            Value::List(items) => visitor.visit_seq(Items(items.iter().enumerate())),
            _ => Err(type_error("a list", self)),
        }
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        let entries = self.entries().ok_or_else(|| type_error("a mapping", self))?;
        let entries = Entries { entries: entries.iter().enumerate(), value: None };
        visitor.visit_map(entries).map_err(|error| move_to_key(self, error))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, DecodeError> {
        match self.value() {
            Value::Map(_) => self.deserialize_map(visitor),
            _ => Err(type_error(&format!("a mapping of {}", fields.join(", ")), self)),
        }
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, DecodeError> {
        let (name, value) = match self.value() {
            Value::Scalar(scalar) => (scalar.text.as_str(), None),
            Value::Map(entries) => match entries.as_slice() {
                [(key, value)] if !value.is_removed() => (key_text(key)?, Some((key.position, value))),
                _ => {
                    let message = format!("exactly one of {} is required", variants.join(", "));
                    return Err(DecodeError::new(message));
                }
            },
            _ => return Err(type_error(&format!("one of {}", variants.join(", ")), self)),
        };
        visitor.visit_enum(Choice { node: self, name, value, variants })
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        visitor.visit_unit()
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        let value = self.scalar().and_then(|scalar| scalar.text.parse().ok());
        visitor.visit_bool(value.ok_or_else(|| type_error("true or false", self))?)
    }

    fn deserialize_u64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        let value = self.scalar().and_then(|scalar| scalar.text.parse().ok());
        visitor.visit_u64(value.ok_or_else(|| type_error("a number", self))?)
    }

    fn deserialize_u32<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        self.deserialize_u64(visitor)
    }

    // No field of a definition has another number type.
    forward_to_deserialize_any! {
        i8 i16 i32 i64 i128 u8 u16 u128 f32 f64
        char bytes byte_buf unit unit_struct tuple tuple_struct identifier
    }
}

struct Items<'de>(Enumerate<slice::Iter<'de, Node>>);

impl<'de> SeqAccess<'de> for Items<'de> {
    type Error = DecodeError;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, DecodeError> {
        let Some((index, item)) = self.0.find(|(_, item)| !item.is_removed()) else { return Ok(None) };
        seed.deserialize(item).map(Some).map_err(|error| error.within(index))
    }
}

struct Entries<'de> {
    entries: Enumerate<slice::Iter<'de, (Node, Node)>>,
    /// The value of the key that was read last.
    value: Option<(usize, &'de Node)>,
}

impl<'de> MapAccess<'de> for Entries<'de> {
    type Error = DecodeError;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, DecodeError> {
        let next = self.entries.find(|(_, (_, value))| !value.is_removed());
        let Some((index, (key, value))) = next else { return Ok(None) };
        self.value = Some((index, value));
        let name = key_text(key).and_then(|name| {
            let name: StrDeserializer<'_, DecodeError> = name.into_deserializer();
            seed.deserialize(name)
        });
        name.map(Some).map_err(|error| error.at_key(index, key.position))
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, DecodeError> {
        let next = self.value.take();
        let (index, value) = next.ok_or_else(|| DecodeError::new("a value is missing".to_owned()))?;
        seed.deserialize(value).map_err(|error| error.within(index))
    }
}

/// The variant of an enum: a text, or a mapping with a single entry.
struct Choice<'de> {
    node: &'de Node,
    name: &'de str,
    /// The key's position, and the value.
    value: Option<(Position, &'de Node)>,
    variants: &'static [&'static str],
}

impl<'de> EnumAccess<'de> for Choice<'de> {
    type Error = DecodeError;
    type Variant = Self;

    fn variant_seed<V: DeserializeSeed<'de>>(self, seed: V) -> Result<(V::Value, Self), DecodeError> {
        let name: StrDeserializer<'de, DecodeError> = self.name.into_deserializer();
        match (seed.deserialize(name), self.value) {
            (Ok(name), _) => Ok((name, self)),
            (Err(error), Some((position, _))) => Err(error.at_key(0, position)),
            (Err(error), None) => Err(error),
        }
    }
}

impl<'de> Choice<'de> {
    fn content(&self) -> Result<&'de Node, DecodeError> {
        let expected = || format!("a mapping with one of {}", self.variants.join(", "));
        self.value.map(|(_, value)| value).ok_or_else(|| type_error(&expected(), self.node))
    }
}

impl<'de> VariantAccess<'de> for Choice<'de> {
    type Error = DecodeError;

    fn unit_variant(self) -> Result<(), DecodeError> {
        match self.value {
            None => Ok(()),
            Some(_) => Err(type_error(&format!("one of {}", self.variants.join(", ")), self.node)),
        }
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value, DecodeError> {
        seed.deserialize(self.content()?).map_err(|error| error.within(0))
    }

    fn tuple_variant<V: Visitor<'de>>(self, _length: usize, visitor: V) -> Result<V::Value, DecodeError> {
        self.content()?.deserialize_seq(visitor).map_err(|error| error.within(0))
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, DecodeError> {
        self.content()?.deserialize_struct("", fields, visitor).map_err(|error| error.within(0))
    }
}
