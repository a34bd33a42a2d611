//! The candidates for an image or a URL. These are the mirrors of the longest matching prefix, in the order in which they are
//! written, then the original location.
//!
//! The original location remains a candidate because a caching mirror lacks files that were not requested yet. With `--offline`
//! it is used only if its host is allowed. [`HostPolicy`](super::HostPolicy) decides that, not this module.

use std::str::FromStr;

use derive_more::Display;
use oci::{Repository, is_docker_hub};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_with::{DeserializeFromStr, SerializeDisplay};
use url::Url;

use super::host::text_with_description;
use crate::definition::{NonEmpty, ParseError, text_schema};

/// Alternative locations for references or URLs with a prefix.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct MirrorRule {
    /// Prefix of image references (`docker.io/library`) or URLs (`https://github.com/Mellanox/`), up to a `/`.
    pub from: Prefix,
    /// Replacements of the prefix, in the order in which farrier tries them. The original location is tried last; with
    /// `--offline`, only if its host is allowed.
    pub to: NonEmpty<Prefix>,
}

/// Prefix of image references or URLs. It ends at a `/` or at the end.
#[derive(Clone, Debug, PartialEq, Eq, Display, DeserializeFromStr, SerializeDisplay)]
pub enum Prefix {
    /// `host[:port][/path]`.
    Image(ImagePrefix),
    /// `http://` or `https://`, a host, and optionally a path.
    Address(Url),
}

/// Prefix of image references: a host and optionally a path.
#[derive(Clone, Debug, PartialEq, Eq, Display)]
#[display("{host}{}{path}", if path.is_empty() { "" } else { "/" })]
pub struct ImagePrefix {
    host: String,
    path: String,
}

const PREFIX_SYNTAX: &str = "the beginning of image references (`docker.io/library`: Docker Hub's start with \
                        `docker.io`) or of addresses (`https://github.com/Mellanox/`)";

impl ImagePrefix {
    /// `host[:port]`.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Returns the length of this prefix if it covers `host` and `path`. A longer prefix is more specific.
    pub fn covers(&self, host: &str, path: &str) -> Option<usize> {
        let host = if is_docker_hub(host) { "docker.io" } else { host };
        self.strip(host, path).map(|_| self.host.len() + self.path.len())
    }

    /// Returns the part of a path after this prefix; `None` if the host or the path has another prefix.
    fn strip<'a>(&self, host: &str, path: &'a str) -> Option<&'a str> {
        if host == self.host { strip_path(path, &self.path) } else { None }
    }

    /// Returns the repository at a path below this prefix.
    fn join(&self, path: &str) -> Option<Repository> {
        let parts = [self.host.as_str(), &self.path, path];
        let text = parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("/");
        // A host alone would parse as the name of an image at Docker Hub.
        text.parse().ok().filter(|repository: &Repository| repository.host().is_some())
    }
}

/// Returns the part of a path after a prefix that ends at a `/` or at the end of the path.
fn strip_path<'a>(path: &'a str, prefix: &str) -> Option<&'a str> {
    match path.strip_prefix(prefix)? {
        "" => Some(""),
        path if prefix.is_empty() => Some(path),
        path => path.strip_prefix('/'),
    }
}

impl Prefix {
    /// Whether the prefix is one of image references.
    pub fn is_of_images(&self) -> bool {
        matches!(self, Self::Image(_))
    }
}

impl FromStr for Prefix {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let invalid = || ParseError::new(text, PREFIX_SYNTAX);
        if text.contains("://") {
            let mut url = Url::parse(text).map_err(|_| invalid())?;
            let has_only_path = url.query().is_none()
                && url.fragment().is_none()
                && url.username().is_empty()
                && url.password().is_none();
            if !matches!(url.scheme(), "http" | "https") || !url.has_host() || !has_only_path {
                return Err(ParseError::new(text.rsplit('@').next().unwrap_or_default(), PREFIX_SYNTAX));
            }
            let path = url.path().trim_end_matches('/').to_owned();
            url.set_path(&path);
            return Ok(Self::Address(url));
        }
        let text = text.strip_suffix('/').unwrap_or(text);
        // A repository must have a path, but a prefix may be a whole registry.
        let (host, path) = text.split_once('/').unwrap_or((text, ""));
        let sample: Repository = format!("{text}/x").parse().map_err(|_| invalid())?;
        if sample.host() != Some(host) {
            return Err(invalid());
        }
        let host = if is_docker_hub(host) { "docker.io" } else { host };
        Ok(Self::Image(ImagePrefix { host: host.to_owned(), path: path.to_owned() }))
    }
}

text_schema!(Prefix, true, text_with_description(PREFIX_SYNTAX));

/// Returns the repositories to try, in order. The last one is `repository` itself.
pub fn image_candidates(rules: &[MirrorRule], repository: &Repository) -> Vec<Repository> {
    let (host, path) = repository.normalized();
    let longest = rules
        .iter()
        .filter_map(|rule| match &rule.from {
            Prefix::Image(prefix) => Some((prefix.path.len(), rule, prefix.strip(&host, &path)?)),
            Prefix::Address(_) => None,
        })
        .max_by_key(|(length, ..)| *length);
    let mut candidates: Vec<Repository> = Vec::new();
    if let Some((_, rule, inner_path)) = longest {
        for to in &rule.to {
            let Prefix::Image(to) = to else { continue };
            candidates.extend(to.join(inner_path));
        }
    }
    candidates.retain(|candidate| candidate.normalized() != (host.clone(), path.clone()));
    candidates.push(repository.clone());
    candidates
}

/// Returns the URLs to try, in order. The last one is `url` itself.
pub fn url_candidates(rules: &[MirrorRule], url: &Url) -> Vec<Url> {
    let longest = rules
        .iter()
        .filter_map(|rule| match &rule.from {
            Prefix::Address(from) => Some((from.path().len(), rule, strip_url(url, from)?)),
            Prefix::Image(_) => None,
        })
        .max_by_key(|(length, ..)| *length);
    let mut candidates: Vec<Url> = Vec::new();
    if let Some((_, rule, inner_path)) = longest {
        for to in &rule.to {
            let Prefix::Address(to) = to else { continue };
            let mut candidate = to.clone();
            candidate.set_path(&format!("{}/{inner_path}", to.path().trim_end_matches('/')));
            candidate.set_query(url.query());
            candidates.push(candidate);
        }
    }
    candidates.retain(|candidate| candidate != url);
    candidates.push(url.clone());
    candidates
}

/// Returns the path of a URL after a prefix; `None` if the URL has another origin or path.
fn strip_url<'a>(url: &'a Url, prefix: &Url) -> Option<&'a str> {
    let is_same_server = prefix.scheme() == url.scheme()
        && prefix.host() == url.host()
        && prefix.port_or_known_default() == url.port_or_known_default();
    let path = url.path().strip_prefix('/').unwrap_or(url.path());
    is_same_server.then(|| strip_path(path, prefix.path().trim_matches('/'))).flatten()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::definition::NonEmpty;

    fn rule(from: &str, to: &[&str]) -> MirrorRule {
        let to = to.iter().map(|to| to.parse().unwrap()).collect();
        MirrorRule { from: from.parse().unwrap(), to: NonEmpty::new(to).unwrap() }
    }

    fn images(rules: &[MirrorRule], text: &str) -> Vec<String> {
        let repository = text.parse().unwrap();
        image_candidates(rules, &repository).iter().map(ToString::to_string).collect()
    }

    fn urls(rules: &[MirrorRule], text: &str) -> Vec<String> {
        url_candidates(rules, &text.parse().unwrap()).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn the_longest_prefix_counts_and_the_place_itself_comes_last() {
        let rules = [
            rule("docker.io", &["hub.example:5000/all"]),
            rule("docker.io/library", &["a.example", "b.example/library/"]),
            rule("nvcr.io/nvidia/", &["r.example/nvidia"]),
            rule("https://github.com/Mellanox/", &["https://x.example/mirrors"]),
        ];
        assert_eq!(images(&rules, "debian"), ["a.example/debian", "b.example/library/debian", "debian"]);
        assert_eq!(images(&rules, "acme/x"), ["hub.example:5000/all/acme/x", "acme/x"]);
        assert_eq!(
            images(&rules, "index.docker.io/library/debian"),
            ["a.example/debian", "b.example/library/debian", "index.docker.io/library/debian"]
        );
        // A prefix ends only at a path separator.
        assert_eq!(images(&rules, "nvcr.io/nvidia2/x"), ["nvcr.io/nvidia2/x"]);
        assert_eq!(images(&rules, "nvcr.io/nvidia/x"), ["r.example/nvidia/x", "nvcr.io/nvidia/x"]);
        assert_eq!(images(&rules, "docker.io.example/x/y"), ["docker.io.example/x/y"]);
        // A rule may replace a whole repository.
        let one = [rule("nvcr.io/nvidia/driver", &["r.example/gpu"])];
        assert_eq!(images(&one, "nvcr.io/nvidia/driver"), ["r.example/gpu", "nvcr.io/nvidia/driver"]);
        // A replacement that is not a valid repository is skipped.
        let bare = [rule("nvcr.io/nvidia/driver", &["r.example"])];
        assert_eq!(images(&bare, "nvcr.io/nvidia/driver"), ["nvcr.io/nvidia/driver"]);
    }

    #[test]
    fn addresses() {
        let rules = [
            rule("https://github.com", &["http://a.example:8080/github/"]),
            rule("https://github.com/Mellanox/", &["https://b.example/m", "https://c.example"]),
        ];
        assert_eq!(
            urls(&rules, "https://github.com/Mellanox/x/archive/1.tar.gz?raw=1"),
            [
                "https://b.example/m/x/archive/1.tar.gz?raw=1",
                "https://c.example/x/archive/1.tar.gz?raw=1",
                "https://github.com/Mellanox/x/archive/1.tar.gz?raw=1"
            ]
        );
        assert_eq!(
            urls(&rules, "https://github.com:443/MellanoxX/x"),
            ["http://a.example:8080/github/MellanoxX/x", "https://github.com/MellanoxX/x"]
        );
        for other in
            ["http://github.com/Mellanox/x", "https://github.com:8443/x", "https://github.com.evil/x"]
        {
            assert_eq!(urls(&rules, other), [other]);
        }
        // `..` components are resolved before the prefix is compared.
        assert_eq!(
            urls(&rules, "https://github.com/Mellanox/%2e%2e/other"),
            ["http://a.example:8080/github/other", "https://github.com/other"]
        );
    }

    #[test]
    fn mistakes() {
        for text in [
            "",
            "debian",
            "library/debian",
            "acme",
            "r.example/UPPER",
            "r.example//x",
            "r.example/x:1",
            "ftp://x/",
            "https://me:secret@x/",
            "https://x/?q",
            "https://",
            "a b.example",
        ] {
            let error = text.parse::<Prefix>().unwrap_err().to_string();
            assert!(!error.contains("secret"), "{error}");
        }
        for text in ["docker.io", "localhost:5000/x", "https://x.example", "http://x.example/a/b"] {
            let prefix: Prefix = text.parse().unwrap();
            assert_eq!(prefix.to_string().parse::<Prefix>().unwrap(), prefix);
        }
    }

    fn path() -> impl Strategy<Value = String> {
        proptest::collection::vec("[a-c]{1,2}", 1..5).prop_map(|parts| parts.join("/"))
    }

    proptest! {
        #[test]
        fn every_candidate_keeps_what_follows_the_longest_prefix(
            prefixes in proptest::collection::vec(path(), 0..5),
            path in path(),
        ) {
            let rules: Vec<MirrorRule> = prefixes
                .iter()
                .enumerate()
                .map(|(at, prefix)| rule(&format!("r.example/{prefix}"), &[&format!("m{at}.example/k")]))
                .collect();
            let found = images(&rules, &format!("r.example/{path}"));
            // Prefixes are compared component by component.
            let parts: Vec<&str> = path.split('/').collect();
            let fits = |prefix: &String| {
                let wanted: Vec<&str> = prefix.split('/').collect();
                parts.starts_with(&wanted)
            };
            let longest = prefixes.iter().filter(|prefix| fits(prefix)).map(|prefix| prefix.split('/').count()).max();
            prop_assert_eq!(found.last().unwrap(), &format!("r.example/{path}"));
            prop_assert_eq!(found.len(), 1 + usize::from(longest.is_some()));
            if let Some(longest) = longest {
                let rest = parts[longest..].iter().flat_map(|part| ["/", part]).collect::<String>();
                prop_assert!(found[0].ends_with(&format!(".example/k{rest}")), "{}", found[0]);
            }
            // URLs follow the same rules.
            let rules: Vec<MirrorRule> = prefixes
                .iter()
                .map(|prefix| rule(&format!("https://r.example/{prefix}/"), &["https://m.example/k/"]))
                .collect();
            let found = urls(&rules, &format!("https://r.example/{path}?q=1"));
            prop_assert_eq!(found.len(), 1 + usize::from(longest.is_some()));
            prop_assert!(found.iter().all(|url| url.ends_with("?q=1")));
        }

        #[test]
        fn any_text_is_a_prefix_or_none(text in "\\PC{0,40}") {
            if let Ok(prefix) = text.parse::<Prefix>() {
                prop_assert_eq!(prefix.to_string().parse::<Prefix>().unwrap(), prefix);
            }
            let _ = text.parse::<super::super::HostPort>();
            let _ = text.parse::<super::super::NoProxy>();
        }
    }
}
