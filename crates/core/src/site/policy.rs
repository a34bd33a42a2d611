//! Requirements for images before nodes get them.

use schemars::JsonSchema;
use serde::{
    Deserialize, Deserializer, Serialize,
    de::{Error as _, Unexpected},
};

use crate::definition::{
    OneOf,
    checked::{ImageName, LocalPath},
    one_of,
};
use crate::image::Redistribute;

/// Requirements that an image must meet before a rollout uses it, or before it leaves the site.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Policy {
    /// Public keys (PEM files, relative to the definitions directory) that must have signed the image. For a list, one key
    /// suffices; `atLeast` sets the number of different keys. Default: no signature is required.
    ///
    /// A signature covers the manifest and its annotations: inputs, kernel and verdict. `farrier verify` also checks the
    /// documents beside the image.
    #[serde(default, skip_serializing_if = "RequireSigned::is_empty")]
    pub require_signed: RequireSigned,
    /// Driver images whose license terms the site meets. `farrier bundle export` refuses other images with `redistribute: terms`, and
    /// all images and sources with `redistribute: forbidden`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub accept_terms: Vec<ImageName>,
}

/// Requirements of the load check.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SiteCheck {
    /// Treatment of modules that the kernel loads although it lacks a protection, such as symbol versions, and that nothing
    /// proves to fit the kernel.
    #[serde(default)]
    pub unproven: UnprovenPolicy,
}

/// Treatment of modules that nothing proves to fit the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum UnprovenPolicy {
    /// Publish the payload, with a warning.
    #[default]
    Allow,
    /// Do not publish the payload: its verdict is `unknown`, and `check.unknown` of the definition does not permit it. Images that
    /// are already published stay.
    Deny,
}

impl Policy {
    /// Whether an image may leave the site, given whether its license allows redistribution.
    pub fn may_export(&self, image: &str, redistribute: Redistribute) -> bool {
        match redistribute {
            Redistribute::Allowed => true,
            Redistribute::Terms => self.accept_terms.iter().any(|name| name.as_str() == image),
            Redistribute::Forbidden => false,
        }
    }
}

/// Keys that must have signed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum RequireSigned {
    /// One of these keys.
    OneOf(Vec<LocalPath>),
    /// Several of these keys.
    AtLeast(Signatures),
}

/// A number of keys that must have signed, for instance the site's and a release team's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Signatures {
    /// Number of different keys that must have signed. A key that is listed twice counts once, whatever its file name.
    #[schemars(range(min = 1))]
    pub at_least: usize,
    /// The public keys.
    #[schemars(length(min = 1))]
    pub keys: Vec<LocalPath>,
}

impl RequireSigned {
    /// Whether nothing is required.
    pub fn is_empty(&self) -> bool {
        self.keys().is_empty()
    }

    /// Returns the files of the keys.
    pub fn keys(&self) -> &[LocalPath] {
        match self {
            Self::OneOf(keys) | Self::AtLeast(Signatures { keys, .. }) => keys,
        }
    }

    /// Returns the number of keys that must have signed.
    pub fn at_least(&self) -> usize {
        match self {
            Self::OneOf(_) => 1,
            Self::AtLeast(Signatures { at_least, .. }) => *at_least,
        }
    }
}

impl Default for RequireSigned {
    fn default() -> Self {
        Self::OneOf(Vec::new())
    }
}

impl<'de> Deserialize<'de> for RequireSigned {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let expected = "a list of public keys, or {atLeast: NUMBER, keys: [...]}";
        match one_of(deserializer, [Unexpected::Seq, Unexpected::Map], expected)? {
            OneOf::First(keys) => Ok(Self::OneOf(keys)),
            OneOf::Second(Signatures { at_least, keys }) if !(1..=keys.len()).contains(&at_least) => {
                let listed = keys.len();
                Err(D::Error::custom(format!(
                    "{at_least} keys must have signed, but {listed} are named: `atLeast` must be from 1 to the number of keys"
                )))
            }
            OneOf::Second(signatures) => Ok(Self::AtLeast(signatures)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_are_read() {
        let read = |text: &str| serde_json::from_str::<RequireSigned>(text);
        let one = read(r#"["a.pem", "b.pem"]"#).unwrap();
        assert_eq!((one.keys().len(), one.at_least()), (2, 1));
        let text = r#"{"atLeast":2,"keys":["a.pem","b.pem"]}"#;
        let two = read(text).unwrap();
        assert_eq!((two.keys().len(), two.at_least()), (2, 2));
        assert_eq!(serde_json::to_string(&two).unwrap(), text);
        assert!(read("[]").unwrap().is_empty());
        for text in [
            r#"{"atLeast": 3, "keys": ["a.pem", "b.pem"]}"#,
            r#"{"atLeast": 0, "keys": ["a.pem"]}"#,
            r#"{"atLeast": 0, "keys": []}"#,
            r#"{"keys": ["a.pem"]}"#,
            r#"{"atLeast": 1, "keys": ["a.pem"], "of": 2}"#,
            r#""a.pem""#,
        ] {
            assert!(read(text).is_err(), "{text}");
        }
    }
}
