//! Pure: repositories, tags, digests and references.

use std::{fmt, str::FromStr};

/// A repository: `host[:port]/path`, or only `path` inside a layout directory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Repository(String);

/// A tag: 1 to 128 characters of `[A-Za-z0-9_.-]`, not starting with `.` or `-` (OCI distribution spec).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tag(String);

/// `sha256:` and 64 lower-case hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest(String);

/// By what an image is named within its repository.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Version {
    /// `:tag`.
    Tag(Tag),
    /// `@sha256:...`.
    Digest(Digest),
}

/// `repository:tag` or `repository@digest`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ImageReference {
    /// The repository.
    pub repository: Repository,
    /// The tag or digest.
    pub version: Version,
}

/// Why a string is not a reference or a part of one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not {what}")]
pub struct ReferenceError {
    /// The text, cut to 200 characters.
    pub text: String,
    /// What was wanted, in words, with the allowed form.
    pub what: &'static str,
}

impl Repository {
    /// The repository's text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Tag {
    /// The tag's text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Digest {
    /// The digest's text, with `sha256:`.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The 64 hexadecimal digits.
    pub fn hex(&self) -> &str {
        self.0.strip_prefix("sha256:").unwrap_or(&self.0)
    }

    /// The digest of some bytes.
    pub fn of(bytes: &[u8]) -> Self {
        use sha2::Digest as _;
        Self::from_sha256(&sha2::Sha256::digest(bytes).into())
    }

    /// From a finished sha256.
    pub fn from_sha256(hash: &[u8; 32]) -> Self {
        Self(format!("sha256:{}", hex::encode(hash)))
    }
}

impl FromStr for Repository {
    type Err = ReferenceError;

    fn from_str(text: &str) -> Result<Self, ReferenceError> {
        let _ = text;
        todo!("image")
    }
}

impl FromStr for Tag {
    type Err = ReferenceError;

    fn from_str(text: &str) -> Result<Self, ReferenceError> {
        let _ = text;
        todo!("image")
    }
}

impl FromStr for Digest {
    type Err = ReferenceError;

    fn from_str(text: &str) -> Result<Self, ReferenceError> {
        let _ = text;
        todo!("image")
    }
}

impl FromStr for ImageReference {
    type Err = ReferenceError;

    fn from_str(text: &str) -> Result<Self, ReferenceError> {
        let _ = text;
        todo!("image")
    }
}

impl fmt::Display for Repository {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for Version {
    /// `:tag` or `@digest`, with its separator.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tag(tag) => write!(f, ":{tag}"),
            Self::Digest(digest) => write!(f, "@{digest}"),
        }
    }
}

impl fmt::Display for ImageReference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.repository, self.version)
    }
}
