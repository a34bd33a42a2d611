//! Adapter: from a tree of placed values to a definition, reporting every mistake with its place.

use std::fmt;

use serde::{
    Deserialize,
    de::{
        self, DeserializeSeed, EnumAccess, Expected, IntoDeserializer, MapAccess, SeqAccess, Unexpected,
        VariantAccess, Visitor, value::StrDeserializer,
    },
    forward_to_deserialize_any,
};

use super::node::{Node, Place, Value};

/// After so many mistakes of one document the rest helps nobody.
const MAX_MISTAKES: usize = 50;

/// Something wrong at a place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mistake {
    pub place: Place,
    pub message: String,
}

/// Reads a document. On a mistake the mistaken value is taken out and the rest is read again, until nothing
/// more is wrong: serde reads all of a mapping before it asks what is missing, so nothing stays hidden.
pub(super) fn decode<T: for<'de> Deserialize<'de>>(document: &Node) -> Result<T, Vec<Mistake>> {
    let mut rest = document.clone();
    let mut mistakes = Vec::new();
    loop {
        let error = match T::deserialize(&rest) {
            Ok(value) if mistakes.is_empty() => return Ok(value),
            Ok(_) => return Err(mistakes),
            Err(error) => error,
        };
        let path: Vec<usize> = error.path.iter().rev().copied().collect();
        let at = path.iter().try_fold(&rest, |node, index| node.child(*index)).unwrap_or(&rest);
        if !error.follows_from_removal(at) {
            let place = error.key_place.unwrap_or(at.place);
            mistakes.push(Mistake { place, message: error.message });
        }
        if path.is_empty() || mistakes.len() >= MAX_MISTAKES {
            return Err(mistakes);
        }
        rest.remove(&path);
    }
}

/// What serde refused, with the child numbers that lead there, the innermost first.
#[derive(Debug)]
pub(super) struct DecodeError {
    message: String,
    missing_field: Option<&'static str>,
    /// The key at fault, where it is not the value.
    unknown_field: Option<String>,
    key_place: Option<Place>,
    path: Vec<usize>,
}

impl DecodeError {
    fn new(message: String) -> Self {
        Self { message, missing_field: None, unknown_field: None, key_place: None, path: Vec::new() }
    }

    fn within(mut self, index: usize) -> Self {
        self.path.push(index);
        self
    }

    /// A value whose mistaken part was taken out is incomplete; that is no mistake of its own.
    fn follows_from_removal(&self, at: &Node) -> bool {
        match self.missing_field {
            Some(field) => at.removed.iter().any(|name| name == field),
            None => !at.removed.is_empty() && self.key_place.is_none(),
        }
    }
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for DecodeError {}

impl de::Error for DecodeError {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self::new(message.to_string())
    }

    fn invalid_type(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        let found = match found {
            Unexpected::Str(text) => shown(text),
            Unexpected::Unit => "nothing".to_owned(),
            Unexpected::Seq => "a list".to_owned(),
            Unexpected::Map => "a mapping".to_owned(),
            other => other.to_string(),
        };
        Self::new(format!("expected {expected}, found {found}"))
    }

    fn unknown_variant(variant: &str, expected: &'static [&'static str]) -> Self {
        Self::new(format!("{} is not known here; {}", shown(variant), known(expected)))
    }

    fn unknown_field(field: &str, expected: &'static [&'static str]) -> Self {
        let message = format!("unknown field {}; {}", shown(field), known(expected));
        Self { unknown_field: Some(field.to_owned()), ..Self::new(message) }
    }

    fn missing_field(field: &'static str) -> Self {
        Self { missing_field: Some(field), ..Self::new(format!("field \"{field}\" is missing")) }
    }
}

fn known(names: &[&str]) -> String {
    format!("known: {}", names.join(", "))
}

fn shown(text: &str) -> String {
    let cut: String = text.chars().take(80).collect();
    format!("{cut:?}")
}

impl Node {
    fn found(&self) -> String {
        match &self.value {
            Value::Nothing => "nothing".to_owned(),
            Value::Text(text) => shown(text),
            Value::List(_) => "a list".to_owned(),
            Value::Map(_) => "a mapping".to_owned(),
        }
    }

    fn expected(&self, what: &str) -> DecodeError {
        DecodeError::new(format!("expected {what}, found {}", self.found()))
    }

    /// serde raises an unknown field on the mapping when it has buffered the key; the key's own place is better.
    fn blame_key(&self, error: DecodeError) -> DecodeError {
        let (Value::Map(entries), Some(field), true) =
            (&self.value, &error.unknown_field, error.path.is_empty())
        else {
            return error;
        };
        match entries.iter().position(|(key, _)| key.name == *field) {
            Some(index) => DecodeError { key_place: Some(entries[index].0.place), ..error.within(index) },
            None => error,
        }
    }
}

macro_rules! parsed {
    ($($method:ident $visit:ident $what:literal;)*) => {
        $(
            fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
                match &self.value {
                    Value::Text(text) => match text.parse() {
                        Ok(value) => visitor.$visit(value),
                        Err(_) => Err(self.expected($what)),
                    },
                    _ => Err(self.expected($what)),
                }
            }
        )*
    };
}

impl<'de> de::Deserializer<'de> for &'de Node {
    type Error = DecodeError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        match &self.value {
            Value::Nothing => visitor.visit_unit(),
            Value::Text(text) => visitor.visit_borrowed_str(text),
            Value::List(items) => visitor.visit_seq(Items { items, next: 0 }),
            Value::Map(_) => self.deserialize_map(visitor),
        }
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        match &self.value {
            Value::Text(text) => visitor.visit_borrowed_str(text),
            _ => Err(self.expected("a text")),
        }
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        self.deserialize_str(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        match &self.value {
            Value::Nothing => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, DecodeError> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        match &self.value {
            Value::List(items) => visitor.visit_seq(Items { items, next: 0 }),
            _ => Err(self.expected("a list")),
        }
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        match &self.value {
            Value::Map(_) => {
                visitor.visit_map(Entries { map: self, next: 0 }).map_err(|error| self.blame_key(error))
            }
            _ => Err(self.expected("a mapping")),
        }
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, DecodeError> {
        match &self.value {
            Value::Map(_) => self.deserialize_map(visitor),
            _ => Err(self.expected(&format!("a mapping of {}", fields.join(", ")))),
        }
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, DecodeError> {
        match &self.value {
            Value::Text(text) => visitor.visit_enum(Choice { node: self, name: text, value: None, variants }),
            Value::Map(entries) => match entries.as_slice() {
                [(key, value)] => {
                    visitor.visit_enum(Choice { node: self, name: &key.name, value: Some(value), variants })
                }
                _ => Err(DecodeError::new(format!("exactly one of {} is needed", variants.join(", ")))),
            },
            Value::Nothing | Value::List(_) => Err(self.expected(&format!("one of {}", variants.join(", ")))),
        }
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        visitor.visit_unit()
    }

    parsed! {
        deserialize_bool visit_bool "true or false";
        deserialize_i8 visit_i8 "a number";
        deserialize_i16 visit_i16 "a number";
        deserialize_i32 visit_i32 "a number";
        deserialize_i64 visit_i64 "a number";
        deserialize_u8 visit_u8 "a number";
        deserialize_u16 visit_u16 "a number";
        deserialize_u32 visit_u32 "a number";
        deserialize_u64 visit_u64 "a number";
        deserialize_f32 visit_f32 "a number";
        deserialize_f64 visit_f64 "a number";
    }

    forward_to_deserialize_any! {
        i128 u128 char bytes byte_buf unit unit_struct tuple tuple_struct identifier
    }
}

impl<'de> IntoDeserializer<'de, DecodeError> for &'de Node {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

struct Items<'de> {
    items: &'de [Node],
    next: usize,
}

impl<'de> SeqAccess<'de> for Items<'de> {
    type Error = DecodeError;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, DecodeError> {
        let Some(item) = self.items.get(self.next) else { return Ok(None) };
        let index = self.next;
        self.next += 1;
        seed.deserialize(item).map(Some).map_err(|error| error.within(index))
    }
}

struct Entries<'de> {
    map: &'de Node,
    next: usize,
}

impl<'de> MapAccess<'de> for Entries<'de> {
    type Error = DecodeError;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, DecodeError> {
        let Value::Map(entries) = &self.map.value else { return Ok(None) };
        let Some((key, _)) = entries.get(self.next) else { return Ok(None) };
        let text: StrDeserializer<'de, DecodeError> = key.name.as_str().into_deserializer();
        let at_key =
            |error: DecodeError| DecodeError { key_place: Some(key.place), ..error.within(self.next) };
        seed.deserialize(text).map(Some).map_err(at_key)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, DecodeError> {
        let index = self.next;
        self.next += 1;
        let value = self.map.child(index).ok_or_else(|| DecodeError::new("a value is missing".to_owned()))?;
        seed.deserialize(value).map_err(|error| error.within(index))
    }
}

/// One of several forms: a text, or a mapping of one entry.
struct Choice<'de> {
    node: &'de Node,
    name: &'de str,
    value: Option<&'de Node>,
    variants: &'static [&'static str],
}

impl<'de> EnumAccess<'de> for Choice<'de> {
    type Error = DecodeError;
    type Variant = Self;

    fn variant_seed<V: DeserializeSeed<'de>>(self, seed: V) -> Result<(V::Value, Self), DecodeError> {
        let text: StrDeserializer<'de, DecodeError> = self.name.into_deserializer();
        let name = seed.deserialize(text).map_err(|error| match (&self.node.value, self.value) {
            (Value::Map(entries), Some(_)) => {
                DecodeError { key_place: entries.first().map(|(key, _)| key.place), ..error.within(0) }
            }
            _ => error,
        })?;
        Ok((name, self))
    }
}

impl<'de> Choice<'de> {
    fn content(&self) -> Result<&'de Node, DecodeError> {
        self.value
            .ok_or_else(|| self.node.expected(&format!("a mapping with one of {}", self.variants.join(", "))))
    }
}

impl<'de> VariantAccess<'de> for Choice<'de> {
    type Error = DecodeError;

    fn unit_variant(self) -> Result<(), DecodeError> {
        match self.value {
            None => Ok(()),
            Some(_) => Err(self.node.expected(&format!("one of {}", self.variants.join(", ")))),
        }
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value, DecodeError> {
        seed.deserialize(self.content()?).map_err(|error| error.within(0))
    }

    fn tuple_variant<V: Visitor<'de>>(self, _length: usize, visitor: V) -> Result<V::Value, DecodeError> {
        de::Deserializer::deserialize_seq(self.content()?, visitor).map_err(|error| error.within(0))
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, DecodeError> {
        de::Deserializer::deserialize_struct(self.content()?, "", fields, visitor)
            .map_err(|error| error.within(0))
    }
}
