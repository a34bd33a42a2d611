//! Building blocks for values in definitions: parsed texts, non-empty lists, and values that are either a text or a mapping.

use std::{borrow::Cow, fmt, marker::PhantomData, mem::discriminant};

use derive_more::{Deref, IntoIterator};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{
    Deserialize, Deserializer, Serialize,
    de::{
        self, Error as _, IntoDeserializer, MapAccess, SeqAccess, Unexpected, Visitor,
        value::{MapAccessDeserializer, SeqAccessDeserializer},
    },
};

/// Parse error: a text does not have the expected form.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not {expected}")]
pub struct ParseError {
    /// The text after [`without_logins`], truncated to 80 characters.
    pub text: String,
    /// Description of the expected form.
    pub expected: &'static str,
}

impl ParseError {
    /// Reports that `text` is not `expected`.
    pub fn new(text: &str, expected: &'static str) -> Self {
        Self { text: without_logins(text).chars().take(80).collect(), expected }
    }
}

/// Masks user names and passwords in URLs: each character between `://` and the last `@` becomes `*`. A password may contain a
/// slash, but a user name may not, so an `@` in the path of a URL is kept. Without a scheme, only `user:password@` is masked.
pub fn without_logins(text: &str) -> String {
    let mut masked = String::with_capacity(text.len());
    for word in text.split_inclusive(|c: char| c.is_whitespace() || "\"'".contains(c)) {
        let (scheme, address) = word.split_at(word.find("://").map_or(0, |index| index + 3));
        // `user:password`, or after a scheme also `user` alone. Text with an earlier `/` is part of a path.
        let is_login = |text: &str| match text.find([':', '/']) {
            Some(end) => text[end..].starts_with(':') && !(scheme.is_empty() && text.contains(['@', '/'])),
            None => !scheme.is_empty(),
        };
        match address.rsplit_once('@') {
            Some((login, host_and_path)) if !host_and_path.starts_with("sha256:") && is_login(login) => {
                masked.push_str(scheme);
                masked.extend(login.chars().map(|_| '*').chain(['@']));
                masked.push_str(host_and_path);
            }
            _ => masked.push_str(word),
        }
    }
    masked
}

/// Implements `JsonSchema` for a type that is serialized as a text (`DeserializeFromStr`, `SerializeDisplay`). The schema is
/// inlined (`true`) or gets its own named definition (`false`).
macro_rules! text_schema {
    ($name:ident, $inline:expr, $schema:expr) => {
        impl ::schemars::JsonSchema for $name {
            fn inline_schema() -> bool {
                $inline
            }

            fn schema_name() -> ::std::borrow::Cow<'static, str> {
                stringify!($name).into()
            }

            fn json_schema(_: &mut ::schemars::SchemaGenerator) -> ::schemars::Schema {
                $schema
            }
        }
    };
}
pub(crate) use text_schema;

/// A list with at least one item.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deref, IntoIterator)]
pub struct NonEmpty<T>(#[into_iterator(ref)] Vec<T>);

impl<T> NonEmpty<T> {
    /// Wraps the list, unless it is empty.
    pub fn new(list: Vec<T>) -> Option<Self> {
        (!list.is_empty()).then_some(Self(list))
    }
}

impl<T: PartialEq> NonEmpty<T> {
    /// Appends the items that the list does not contain yet.
    pub fn add(&mut self, items: impl IntoIterator<Item = T>) {
        for item in items {
            if !self.0.contains(&item) {
                self.0.push(item);
            }
        }
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for NonEmpty<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let list = Vec::deserialize(deserializer)?;
        Self::new(list).ok_or_else(|| D::Error::custom("the list is empty: at least one entry is required"))
    }
}

impl<T: JsonSchema> JsonSchema for NonEmpty<T> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        format!("NonEmpty_{}", T::schema_name()).into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "array", "items": generator.subschema_for::<T>(), "minItems": 1})
    }
}

/// A value that has one of two forms.
pub enum OneOf<T, O> {
    /// Value of the first form.
    First(T),
    /// Value of the second form.
    Second(O),
}

/// The kind "text" for [`one_of`].
pub const TEXT: Unexpected<'static> = Unexpected::Str("");

/// Reads a value whose kind selects its form: a text, a mapping (`Map`) or a list (`Seq`). Serde's untagged enums are not used
/// here because they lose the position and the reason of an error.
pub fn one_of<'de, T: Deserialize<'de>, O: Deserialize<'de>, D: Deserializer<'de>>(
    deserializer: D,
    kinds: [Unexpected<'static>; 2],
    expected: &'static str,
) -> Result<OneOf<T, O>, D::Error> {
    struct OneOfVisitor<T, O> {
        kinds: [Unexpected<'static>; 2],
        expected: &'static str,
        types: PhantomData<(T, O)>,
    }

    impl<'de, T: Deserialize<'de>, O: Deserialize<'de>> OneOfVisitor<T, O> {
        fn read<D: Deserializer<'de>>(self, kind: Unexpected<'_>, value: D) -> Result<OneOf<T, O>, D::Error> {
            match self.kinds.iter().position(|known| discriminant(known) == discriminant(&kind)) {
                Some(0) => T::deserialize(value).map(OneOf::First),
                Some(_) => O::deserialize(value).map(OneOf::Second),
                None => Err(D::Error::invalid_type(kind, &self)),
            }
        }
    }

    impl<'de, T: Deserialize<'de>, O: Deserialize<'de>> Visitor<'de> for OneOfVisitor<T, O> {
        type Value = OneOf<T, O>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.expected)
        }

        fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
            self.read(Unexpected::Str(text), text.into_deserializer())
        }

        fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
            self.read(Unexpected::Map, MapAccessDeserializer::new(map))
        }

        fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Self::Value, A::Error> {
            self.read(Unexpected::Seq, SeqAccessDeserializer::new(list))
        }
    }

    deserializer.deserialize_any(OneOfVisitor { kinds, expected, types: PhantomData })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_are_not_shown() {
        for (text, shown) in [
            ("http: http://me:secret@proxy:3128", "http: http://*********@proxy:3128"),
            ("{url: \"https://me:se/cr@et@h/x@1.tgz\"}", "{url: \"https://***************@1.tgz\"}"),
            ("me:secret@proxy", "*********@proxy"),
            ("https://token@h/x", "https://*****@h/x"),
            ("version: \"@VERSION@\"", "version: \"@VERSION@\""),
            ("maintainer: me@example.test", "maintainer: me@example.test"),
            ("https://h/driver-@VERSION@.tgz", "https://h/driver-@VERSION@.tgz"),
            ("r.example/x@sha256:00", "r.example/x@sha256:00"),
            ("https://h/x", "https://h/x"),
            ("\"$@\" {{vars.makeArgs}}", "\"$@\" {{vars.makeArgs}}"),
            ("", ""),
        ] {
            assert_eq!(without_logins(text), shown);
        }
        assert_eq!(ParseError::new("ftp://me:secret@h", "a download").text, "ftp://*********@h");
    }
}
