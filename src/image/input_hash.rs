//! Pure: the input hash, over everything that can change the payload or the image.

use std::{fmt, str::FromStr};

use sha2::Digest as _;

/// sha256 over everything that can change the payload or the image.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InputHash([u8; 32]);

/// A string that is not 64 hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not an input hash (64 hexadecimal digits)")]
pub struct InputHashError(pub String);

/// Collects named inputs; names and values are length-prefixed, so that no two lists run together.
#[derive(Clone, Debug)]
pub struct InputHasher(sha2::Sha256);

impl InputHasher {
    /// Starts with farrier's own build format, which changes when the same inputs give other bytes.
    pub fn new(format: &str) -> Self {
        let mut hasher = Self(sha2::Sha256::new());
        hasher.add("format", format);
        hasher
    }

    /// Adds one named input.
    pub fn add(&mut self, name: &str, value: impl AsRef<[u8]>) -> &mut Self {
        for part in [name.as_bytes(), value.as_ref()] {
            self.0.update((part.len() as u64).to_be_bytes());
            self.0.update(part);
        }
        self
    }

    /// The hash over what was added.
    pub fn finish(self) -> InputHash {
        InputHash(self.0.finalize().into())
    }
}

impl InputHash {
    /// The first 12 hexadecimal digits, for file names and messages.
    pub fn short(&self) -> String {
        hex::encode(&self.0[..6])
    }
}

impl FromStr for InputHash {
    type Err = InputHashError;

    fn from_str(text: &str) -> Result<Self, InputHashError> {
        let mut bytes = [0; 32];
        hex::decode_to_slice(text, &mut bytes)
            .map_err(|_| InputHashError(text.chars().take(80).collect()))?;
        Ok(Self(bytes))
    }
}

impl fmt::Display for InputHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for InputHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
