//! Pure: the version of a driver image.

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, de::Unexpected};

use crate::definition::{
    TextOr,
    checked::{DriverVersion, ImageName},
    text_or,
};

/// A driver's version: written down, or that of one of its `apt` sources.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(untagged)]
#[schemars(deny_unknown_fields)]
pub enum VersionSpec {
    /// Written down.
    Literal(DriverVersion),
    /// The upstream part of the version of the package behind the named `apt` source.
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
        Ok(match text_or(deserializer, Unexpected::Map, expected)? {
            TextOr::Text(version) => Self::Literal(version),
            TextOr::Other(FromSource { source }) => Self::FromSource { source: source.to_string() },
        })
    }
}
