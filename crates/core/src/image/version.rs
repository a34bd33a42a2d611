//! The version of a driver image.

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, de::Unexpected};

use crate::definition::{
    OneOf, TEXT,
    checked::{DriverVersion, ImageName},
    one_of,
};

/// A driver's version: a literal, or the version of one of the image's `apt` sources.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(untagged)]
#[schemars(deny_unknown_fields)]
pub enum VersionSpec {
    /// A literal version.
    Literal(DriverVersion),
    /// The upstream part of the package version of the named `apt` source.
    FromSource {
        /// The source's name.
        source: String,
    },
}

impl<'de> Deserialize<'de> for VersionSpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct FromSource {
            source: ImageName,
        }

        let expected = "a version, or `{source: NAME}` of an apt source";
        Ok(match one_of(deserializer, [TEXT, Unexpected::Map], expected)? {
            OneOf::First(version) => Self::Literal(version),
            OneOf::Second(FromSource { source }) => Self::FromSource { source: source.to_string() },
        })
    }
}
