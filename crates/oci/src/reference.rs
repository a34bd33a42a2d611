//! Parses repositories, tags, digests and image references.

use std::str::FromStr;

use derive_more::Display;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

/// A repository: `host[:port]/path`, or only `path` inside a layout directory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Display)]
pub struct Repository(String);

/// A tag: 1 to 128 characters of `[A-Za-z0-9_.-]`, not starting with `.` or `-` (OCI distribution spec).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Display)]
pub struct Tag(#[serde(deserialize_with = "text_of::<Tag, _>")] String);

/// `sha256:` and 64 lower-case hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Display)]
pub struct Digest(#[serde(deserialize_with = "text_of::<Digest, _>")] String);

/// Tag or digest of an image in its repository. `Display` includes the separator.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Display)]
pub enum Version {
    /// `:tag`.
    #[display(":{_0}")]
    Tag(Tag),
    /// `@sha256:...`.
    #[display("@{_0}")]
    Digest(Digest),
}

impl Version {
    /// Returns the tag, if the version is a tag.
    pub fn tag(&self) -> Option<&Tag> {
        if let Self::Tag(tag) = self { Some(tag) } else { None }
    }

    /// Returns the digest, if the version is a digest.
    pub fn digest(&self) -> Option<&Digest> {
        if let Self::Digest(digest) = self { Some(digest) } else { None }
    }
}

/// `repository:tag` or `repository@digest`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Display)]
#[display("{repository}{version}")]
pub struct ImageReference {
    /// The repository.
    pub repository: Repository,
    /// The tag or digest.
    pub version: Version,
}

/// Reason why a string is not a reference, or not a part of a reference.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not {what}")]
pub struct ReferenceError {
    /// The text, cut to 200 characters.
    pub text: String,
    /// Expected kind of value, with its allowed form.
    pub what: &'static str,
}

impl ReferenceError {
    fn new(text: &str, what: &'static str) -> Self {
        Self { text: text.chars().take(200).collect(), what }
    }
}

/// Whether the text is a host name or address with an optional port.
fn is_host(host: &str) -> bool {
    let (name, port) = host.rsplit_once(':').map_or((host, None), |(name, port)| (name, Some(port)));
    let port_fits = port.is_none_or(is_port);
    !name.is_empty()
        && port_fits
        && name.chars().all(|c| c.is_ascii_alphanumeric() || ".-".contains(c))
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
}

/// Whether the text is a port number. `parse` alone would accept `+5000`.
fn is_port(port: &str) -> bool {
    port.chars().all(|c| c.is_ascii_digit()) && port.parse::<u16>().is_ok_and(|port| port > 0)
}

/// Whether the text consists of letters and digits, joined by `.`, `_`, `__` or any number of `-`.
fn is_path_component(component: &str) -> bool {
    let ends_well = |c: Option<char>| c.is_some_and(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
    component.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "._-".contains(c))
        && ends_well(component.chars().next())
        && ends_well(component.chars().next_back())
        && !["..", "._", "_.", "___", ".-", "-.", "_-", "-_"].iter().any(|run| component.contains(run))
}

/// Splits at the last `:` that does not belong to a port.
fn split_tag(text: &str) -> Option<(&str, &str)> {
    text.rsplit_once(':').filter(|(_, tag)| !tag.contains('/'))
}

impl Repository {
    /// The repository as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the host with its port. Returns `None` for a repository in a layout directory.
    pub fn host(&self) -> Option<&str> {
        let (host, _) = self.0.split_once('/')?;
        names_host(host).then_some(host)
    }

    /// Returns the host and the path of the repository. A repository without a host belongs to Docker Hub, where official images are
    /// below `library/`.
    pub fn normalized(&self) -> (String, String) {
        let (host, path) = match self.0.split_once('/') {
            Some((host, path)) if names_host(host) => (host, path),
            _ => (DOCKER_HUB, self.0.as_str()),
        };
        if !is_docker_hub(host) {
            return (host.to_owned(), path.to_owned());
        }
        let path = if path.contains('/') { path.to_owned() } else { format!("library/{path}") };
        (DOCKER_HUB.to_owned(), path)
    }
}

/// Prefix of the repositories of copied images.
pub const MIRROR_PREFIX: &str = "mirror/";

/// Returns the name of a copy of another registry's image, below the prefix of the destination registry: `mirror/<host>/<path>`.
/// A `-` replaces the `:` before the port.
pub fn mirror_name(repository: &Repository) -> String {
    let (host, path) = repository.normalized();
    format!("{MIRROR_PREFIX}{}/{path}", host.replace(':', "-").to_ascii_lowercase())
}

/// Docker Hub's name in references.
const DOCKER_HUB: &str = "docker.io";

/// Whether the host is Docker Hub, by its usual name or by the name of one of its servers.
pub fn is_docker_hub(host: &str) -> bool {
    [DOCKER_HUB, "index.docker.io", "registry-1.docker.io"].contains(&host)
}

/// Whether the first component of a reference is a host and not a part of the path, by Docker's rule.
pub fn names_host(first: &str) -> bool {
    first.contains(['.', ':']) || first == "localhost"
}

impl Tag {
    /// The tag as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Digest {
    /// The digest as text, with `sha256:`.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The 64 hexadecimal digits.
    pub fn hex(&self) -> &str {
        self.0.strip_prefix("sha256:").unwrap_or(&self.0)
    }

    /// The first 12 hexadecimal digits, for tags and messages.
    pub fn short(&self) -> &str {
        self.hex().get(..12).unwrap_or_default()
    }

    /// Computes the digest of some bytes.
    pub fn of(bytes: &[u8]) -> Self {
        use sha2::Digest as _;
        Self::from_sha256(&sha2::Sha256::digest(bytes).into())
    }

    /// Creates a digest from a finished SHA-256.
    pub fn from_sha256(hash: &[u8; 32]) -> Self {
        Self(format!("sha256:{}", hex::encode(hash)))
    }
}

impl FromStr for Repository {
    type Err = ReferenceError;

    fn from_str(text: &str) -> Result<Self, ReferenceError> {
        // Grammar of the OCI distribution specification; the host may have a port and upper-case letters.
        let invalid = || ReferenceError::new(text, "a repository ([host[:port]/]path of a-z, 0-9 and ._-)");
        let (host, path) = match text.split_once('/') {
            Some((host, path)) if names_host(host) => (Some(host), path),
            _ => (None, text),
        };
        let host_fits = host.is_none_or(is_host);
        if text.len() <= 255 && host_fits && path.split('/').all(is_path_component) {
            Ok(Self(text.to_owned()))
        } else {
            Err(invalid())
        }
    }
}

impl FromStr for Tag {
    type Err = ReferenceError;

    fn from_str(text: &str) -> Result<Self, ReferenceError> {
        let inner = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
        if (1..=128).contains(&text.len()) && text.chars().all(inner) && !text.starts_with(['.', '-']) {
            Ok(Self(text.to_owned()))
        } else {
            Err(ReferenceError::new(text, "a tag (1 to 128 of A-Za-z0-9_.-, not starting with . or -)"))
        }
    }
}

impl FromStr for Digest {
    type Err = ReferenceError;

    fn from_str(text: &str) -> Result<Self, ReferenceError> {
        let hex = text.strip_prefix("sha256:").unwrap_or_default();
        if hex.len() == 64 && hex.chars().all(|c| c.is_ascii_digit() || ('a'..='f').contains(&c)) {
            Ok(Self(text.to_owned()))
        } else {
            Err(ReferenceError::new(text, "a digest (sha256: and 64 lower-case hexadecimal digits)"))
        }
    }
}

fn text_of<'de, T: FromStr<Err = ReferenceError>, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let text = String::deserialize(from)?;
    text.parse::<T>().map(|_| text).map_err(D::Error::custom)
}

impl FromStr for ImageReference {
    type Err = ReferenceError;

    fn from_str(text: &str) -> Result<Self, ReferenceError> {
        // If there are both a tag and a digest, use the digest, like every container runtime. Validate the tag and drop it.
        if let Some((name, digest)) = text.split_once('@') {
            let name = match split_tag(name) {
                Some((name, tag)) => tag.parse::<Tag>().map(|_| name)?,
                None => name,
            };
            return Ok(Self { repository: name.parse()?, version: Version::Digest(digest.parse()?) });
        }
        match split_tag(text) {
            Some((name, tag)) => Ok(Self { repository: name.parse()?, version: Version::Tag(tag.parse()?) }),
            None => Err(ReferenceError::new(text, "an image reference with a tag or a digest")),
        }
    }
}

impl Serialize for ImageReference {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_parsed_and_displayed() {
        let digest = format!("sha256:{}", "ab".repeat(32));
        for text in [
            "127.0.0.1:5000/drivers/mstflint:4.33.0_1-6.1.0-47-amd64-debian12-amd64".to_owned(),
            "localhost:5000/x:1".to_owned(),
            "registry.example/team/image__x-y:latest".to_owned(),
            format!("registry.example/a@{digest}"),
        ] {
            assert_eq!(text.parse::<ImageReference>().unwrap().to_string(), text);
        }
        let both: ImageReference = format!("registry.example:443/a:tag@{digest}").parse().unwrap();
        assert_eq!(both.to_string(), format!("registry.example:443/a@{digest}"));
    }

    #[test]
    fn mirror_names_contain_host_and_path() {
        for (text, name) in [
            ("debian", "mirror/docker.io/library/debian"),
            ("docker.io/debian", "mirror/docker.io/library/debian"),
            ("registry-1.docker.io/acme/x", "mirror/docker.io/acme/x"),
            ("acme/x", "mirror/docker.io/acme/x"),
            ("127.0.0.1:5000/a/b", "mirror/127.0.0.1-5000/a/b"),
            ("Quay.Example/a", "mirror/quay.example/a"),
        ] {
            let repository: Repository = text.parse().unwrap();
            assert_eq!(mirror_name(&repository), name);
            assert!(format!("r.example/{name}").parse::<Repository>().is_ok(), "{name}");
        }
    }

    #[test]
    fn hostile_references_are_refused() {
        for text in [
            "",
            ":tag",
            "a",
            "a:",
            "A/b:tag",
            "localhost/UPPER:1",
            "a/../b:1",
            "a//b:1",
            "a/b:-x",
            "host:port/a:1",
            "a b:1",
            "a:$(reboot)",
            "a@sha256:12",
            "a:1\n",
            "host:99999/a:1",
            "host:+5/a:1",
            "host:/a:1",
            "host:0/a:1",
            "a/b_-c:1",
            &format!("a:-x@sha256:{}", "ab".repeat(32)),
            &format!("a@sha256:{}", "AB".repeat(32)),
            "a@b@sha256:12",
            &format!("{}:1", "a".repeat(300)),
        ] {
            assert!(text.parse::<ImageReference>().is_err(), "{text:?}");
        }
        assert!("a".repeat(129).parse::<Tag>().is_err());
    }

    proptest::proptest! {
        #[test]
        fn accepted_references_contain_no_special_characters(text in "[a-zA-Z0-9./:@_ \\n$-]{0,30}") {
            if let Ok(reference) = text.parse::<ImageReference>() {
                proptest::prop_assert!(!text.contains(|c: char| c.is_whitespace() || c == '$'));
                proptest::prop_assert!(!reference.repository.as_str().split('/').any(|part| part == ".."));
                proptest::prop_assert_eq!(reference.to_string().parse::<ImageReference>(), Ok(reference));
            }
        }
    }
}
