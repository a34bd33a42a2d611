//! Pure: the version of a driver image.

use std::fmt;

use schemars::JsonSchema;
use serde::{
    Deserialize, Deserializer, Serialize,
    de::{self, IntoDeserializer, MapAccess, Visitor, value::MapAccessDeserializer},
};

use super::{
    ImageName,
    checked::{self, DriverVersion, Rule},
};

/// A driver's version: written down, or that of one of its `apt` sources.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(untagged)]
#[schemars(deny_unknown_fields)]
pub enum VersionSpec {
    /// Written down.
    Literal(#[schemars(regex(pattern = DriverVersion::PATTERN))] String),
    /// The upstream part of the version of the package behind the named `apt` source.
    FromSource {
        /// The source's name.
        source: String,
    },
}

/// By hand, because serde's untagged enums lose both the place and the reason of an error.
impl<'de> Deserialize<'de> for VersionSpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct FromSource {
            source: ImageName,
        }

        struct Form;

        impl<'de> Visitor<'de> for Form {
            type Value = VersionSpec;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a version, or `{source: NAME}` of an apt source")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<VersionSpec, E> {
                checked::one::<DriverVersion, _>(text.into_deserializer()).map(VersionSpec::Literal)
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<VersionSpec, A::Error> {
                let FromSource { source } = FromSource::deserialize(MapAccessDeserializer::new(map))?;
                Ok(VersionSpec::FromSource { source: source.to_string() })
            }
        }

        deserializer.deserialize_any(Form)
    }
}
