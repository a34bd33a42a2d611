//! The input hash, over everything that can change the payload or the image.

use std::{collections::BTreeMap, str::FromStr};

use derive_more::{Debug, Display};
use serde_with::SerializeDisplay;
use sha2::Digest as _;

use super::Digest;
use crate::definition::ParseError;

/// Maximum length of a value that is recorded in full. For a longer value, the digest is recorded.
const MAX_RECORDED: usize = 100;

/// SHA-256 over everything that can change the payload or the image.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Display, SerializeDisplay)]
#[debug("{self}")]
#[display("{}", hex::encode(_0))]
pub struct InputHash([u8; 32]);

/// Hashes named fields, such as the inputs of a build. Names and values have a length prefix, so that different lists
/// cannot give the same hash.
#[derive(Clone, Debug)]
pub struct FieldHasher {
    hash: sha2::Sha256,
    recorded: BTreeMap<String, String>,
    /// Source, patch or need that the next fields belong to.
    subject: String,
}

impl FieldHasher {
    /// Starts a hash with the name of its format. The name must change whenever the meaning of the fields changes, for example
    /// if the same fields give a build with other bytes.
    pub fn new(format: &str) -> Self {
        let (recorded, subject) = (BTreeMap::new(), String::new());
        let mut hasher = Self { hash: sha2::Sha256::new(), recorded, subject };
        hasher.add("format", format);
        hasher
    }

    /// Adds one named field.
    pub fn add(&mut self, name: &str, value: impl AsRef<[u8]>) -> &mut Self {
        for bytes in [name.as_bytes(), value.as_ref()] {
            self.hash.update((bytes.len() as u64).to_be_bytes());
            self.hash.update(bytes);
        }
        self.record(name, &String::from_utf8_lossy(value.as_ref()));
        self
    }

    /// Records a field by name. Fields of a source, patch or need get its name, so that they do not replace each other.
    fn record(&mut self, name: &str, value: &str) {
        let (name, value) = match name {
            "source" | "patch" | "need" => {
                self.subject = format!("{name} {value}");
                return;
            }
            "identity" | "exposed" => (self.subject.clone(), value.to_owned()),
            "sha256" => (self.subject.clone(), format!("sha256:{value}")),
            "unpack" | "subdir" => (format!("{name} of {}", self.subject), value.to_owned()),
            name if value.len() > MAX_RECORDED => (name.to_owned(), Digest::of(value.as_bytes()).to_string()),
            name => (name.to_owned(), value.to_owned()),
        };
        self.recorded.insert(name, value);
    }

    /// Returns the fields by name, so that a later build can report which of its inputs changed.
    pub fn recorded(&self) -> BTreeMap<String, String> {
        self.recorded.clone()
    }

    /// Returns the hash over all fields.
    pub fn finish(self) -> InputHash {
        InputHash(self.hash.finalize().into())
    }
}

impl InputHash {
    /// The first 12 hexadecimal digits, for file names and messages.
    pub fn short(&self) -> String {
        hex::encode(&self.0[..6])
    }
}

impl FromStr for InputHash {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let mut bytes = [0; 32];
        hex::decode_to_slice(text, &mut bytes)
            .map_err(|_| ParseError::new(text, "an input hash (64 hexadecimal digits)"))?;
        Ok(Self(bytes))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hash(inputs: &[(&str, &str)]) -> InputHash {
        let mut hasher = FieldHasher::new("1");
        for (name, value) in inputs {
            hasher.add(name, value);
        }
        hasher.finish()
    }

    /// Published images carry the hash. An accidental change of the algorithm would rebuild every fleet.
    #[test]
    fn the_hash_stays_the_same_from_release_to_release() {
        let known = hash(&[("template", "FROM scratch\n"), ("kernel", "6.1.0-47-amd64")]).to_string();
        insta::assert_snapshot!(known, @"1446bc389c7472ac884a6f779faec13c3cb56cc396458fac8747876660b3cac4");
        assert!(
            known.starts_with(&hash(&[("template", "FROM scratch\n"), ("kernel", "6.1.0-47-amd64")]).short())
        );
    }

    #[test]
    fn everything_counts() {
        let base = hash(&[("a", "1"), ("b", "2")]);
        for other in [
            hash(&[("a", "1")]),
            hash(&[("b", "2"), ("a", "1")]),
            hash(&[("a", "2"), ("b", "1")]),
            hash(&[("a", "1"), ("b", "2"), ("", "")]),
            hash(&[("a", "1b2")]),
            FieldHasher::new("2").finish(),
        ] {
            assert_ne!(base, other);
        }
    }

    #[test]
    fn texts_that_are_no_hash_are_refused() {
        for text in ["", "ab", &"g".repeat(64), &"a".repeat(65), &format!("sha256:{}", "a".repeat(64))] {
            assert!(text.parse::<InputHash>().is_err(), "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn no_two_lists_run_together(a in "[ab]{0,4}", b in "[ab]{0,4}", c in "[ab]{0,4}", d in "[ab]{0,4}") {
            prop_assert_eq!(hash(&[(&a, &b)]) == hash(&[(&c, &d)]), (&a, &b) == (&c, &d));
        }

        #[test]
        fn a_hash_survives_its_text(bytes in any::<[u8; 32]>()) {
            let hash = InputHash(bytes);
            prop_assert_eq!(hash.to_string().parse(), Ok(hash));
        }
    }
}
