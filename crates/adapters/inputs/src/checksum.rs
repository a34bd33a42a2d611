//! File checksums in the algorithms that package repositories use.

use derive_more::Display;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256, Sha512, digest::DynDigest};

/// A file's checksum, displayed as `sha256:...`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, Display)]
#[display("{algorithm}:{hex}")]
pub struct Checksum {
    algorithm: Algorithm,
    hex: String,
}

#[derive(Serialize, Deserialize, strum::Display, strum::EnumString)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Algorithm {
    Sha256,
    Sha512,
}

impl Checksum {
    /// Creates a SHA-256 checksum from 64 hexadecimal digits.
    pub fn sha256(hex: &str) -> Self {
        Self { algorithm: Algorithm::Sha256, hex: hex.to_ascii_lowercase() }
    }

    /// Parses a checksum of the named algorithm (`sha256`, `sha512`). Returns `None` for another algorithm or a malformed checksum.
    pub fn parse(algorithm: &str, hex: &str) -> Option<Self> {
        let checksum = Self { algorithm: algorithm.parse().ok()?, hex: hex.to_ascii_lowercase() };
        let digits = 2 * checksum.hasher().state.output_size();
        (hex.len() == digits && hex.bytes().all(|byte| byte.is_ascii_hexdigit())).then_some(checksum)
    }

    /// Finds a file's checksum in a list as written by sha256sum or sha512sum. A list of one checksum without a name applies to
    /// the file.
    pub(crate) fn in_list(list: &str, file: &str) -> Option<Self> {
        let parse = |line: &str| {
            let hex = line.split_whitespace().next()?;
            ["sha256", "sha512"].iter().find_map(|algorithm| Self::parse(algorithm, hex))
        };
        let is_of_file = |line: &&str| line.rsplit([' ', '\t', '*', '/']).next() == Some(file);
        let mut words = list.split_whitespace();
        let only_word = words.next().filter(|_| words.next().is_none());
        let listed = list.lines().map(str::trim_end).filter(is_of_file).find_map(parse);
        listed.or_else(|| only_word.and_then(parse))
    }

    /// Returns the lower-case hexadecimal digits.
    pub fn hex(&self) -> &str {
        &self.hex
    }

    /// Returns a hasher of the same algorithm.
    pub fn hasher(&self) -> Hasher {
        let algorithm = self.algorithm;
        let state: Box<dyn DynDigest + Send> = match algorithm {
            Algorithm::Sha256 => Box::new(Sha256::new()),
            Algorithm::Sha512 => Box::new(Sha512::new()),
        };
        Hasher { algorithm, state }
    }
}

/// A checksum being computed.
pub struct Hasher {
    algorithm: Algorithm,
    state: Box<dyn DynDigest + Send>,
}

impl Hasher {
    /// Adds bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.state.update(bytes);
    }

    pub fn finish(self) -> Checksum {
        Checksum { algorithm: self.algorithm, hex: hex::encode(self.state.finalize()) }
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

    #[test]
    fn checksums_of_lists() {
        let [sha1, a, b, c] =
            [("0", 40), ("a", 64), ("b", 64), ("c", 128)].map(|(digit, count)| digit.repeat(count));
        let list = format!("# SHA1 HASH\n{sha1}  h.tgz\n{a}  other.tgz\n{b} *./x/h.tgz\n{c}  image.xz\n");
        let found = |list: &str, file: &str| Checksum::in_list(list, file).map(|found| found.to_string());
        assert_eq!(found(&list, "h.tgz"), Some(format!("sha256:{b}")));
        assert_eq!(found(&list, "image.xz"), Some(format!("sha512:{c}")));
        assert_eq!(found(&list, "tgz"), None);
        assert_eq!(found(&format!("{a}\n"), "h.tgz"), Some(format!("sha256:{a}")));
        assert_eq!(found(&format!("{a}  other.tgz\n"), "h.tgz"), None);
        assert_eq!(found(&format!("{a}\n{b}\n"), "h.tgz"), None, "whose?");
        assert_eq!(found("<html>", "h.tgz"), None);
    }
}
