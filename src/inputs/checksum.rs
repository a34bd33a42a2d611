//! Pure: checksums of files, in the algorithms that repositories of packages use.

use std::fmt;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256, Sha512};

/// The checksum of a file.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Checksum {
    algorithm: Algorithm,
    hex: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Algorithm {
    Sha256,
    Sha512,
}

impl Algorithm {
    const fn name(self) -> &'static str {
        match self {
            Self::Sha256 => "sha256",
            Self::Sha512 => "sha512",
        }
    }

    const fn digits(self) -> usize {
        match self {
            Self::Sha256 => 64,
            Self::Sha512 => 128,
        }
    }
}

impl Checksum {
    /// A sha256 of 64 hexadecimal digits.
    pub fn sha256(hex: &str) -> Self {
        Self { algorithm: Algorithm::Sha256, hex: hex.to_ascii_lowercase() }
    }

    /// One that says which algorithm it is of (`sha256`, `sha512`); `None` for any other, and for one that has not its form.
    pub fn parse(algorithm: &str, hex: &str) -> Option<Self> {
        let known = [Algorithm::Sha256, Algorithm::Sha512];
        let algorithm = known.into_iter().find(|known| known.name() == algorithm)?;
        let fits = hex.len() == algorithm.digits() && hex.bytes().all(|byte| byte.is_ascii_hexdigit());
        fits.then(|| Self { algorithm, hex: hex.to_ascii_lowercase() })
    }

    /// Lower-case hexadecimal digits.
    pub fn hex(&self) -> &str {
        &self.hex
    }

    /// What computes it.
    pub fn hasher(&self) -> Hasher {
        match self.algorithm {
            Algorithm::Sha256 => Hasher::Sha256(Sha256::new()),
            Algorithm::Sha512 => Hasher::Sha512(Box::new(Sha512::new())),
        }
    }
}

/// As `sha256:...`.
impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.algorithm.name(), self.hex)
    }
}

/// A checksum that is being computed.
pub enum Hasher {
    Sha256(Sha256),
    Sha512(Box<Sha512>),
}

impl Hasher {
    /// Goes on with these bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha256(hasher) => hasher.update(bytes),
            Self::Sha512(hasher) => hasher.update(bytes),
        }
    }

    /// The checksum.
    pub fn finish(self) -> Checksum {
        match self {
            Self::Sha256(hasher) => {
                Checksum { algorithm: Algorithm::Sha256, hex: hex::encode(hasher.finalize()) }
            }
            Self::Sha512(hasher) => {
                Checksum { algorithm: Algorithm::Sha512, hex: hex::encode(hasher.finalize()) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_sha256sum_and_sha512sum_print_for_nothing() {
        let empty = [
            ("sha256", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
            (
                "sha512",
                "cf83e1357eefb8bdf1542850d66d8007d620e4050b5715dc83f4a921d36ce9ce47d0d13c5d85f2b0ff8318d2877eec2f63b931bd47417a81a538327af927da3e",
            ),
        ];
        for (algorithm, hex) in empty {
            let checksum = Checksum::parse(algorithm, &hex.to_uppercase()).unwrap();
            assert_eq!(checksum.hasher().finish(), checksum);
            assert_eq!(checksum.to_string(), format!("{algorithm}:{hex}"));
            assert_eq!(Checksum::parse(algorithm, &hex[1..]), None);
        }
        assert_eq!(Checksum::parse("sha", &"0".repeat(40)), None, "SHA-1 proves nothing");
    }
}
