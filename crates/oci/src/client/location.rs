//! Parses the address of a registry.

use std::{path::PathBuf, str::FromStr};

use crate::{ReferenceError, Repository, names_host};

/// Location of images: `host[:port][/prefix]` or `oci:PATH`.
#[derive(Clone, Debug, PartialEq, Eq, derive_more::Display)]
#[expect(missing_docs, reason = "the doc comments of the variants explain the fields")]
pub enum RegistryLocation {
    /// A registry at `host[:port]`, with an optional prefix of every repository.
    #[display("{host}{}", prefix.as_ref().map(|prefix| format!("/{prefix}")).unwrap_or_default())]
    Remote { host: String, prefix: Option<String> },
    /// An OCI layout directory.
    #[display("oci:{}", _0.display())]
    Layout(PathBuf),
}

/// Reason why a string is not a registry location.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a registry: {reason}; write host[:port][/prefix] or oci:PATH")]
pub struct LocationError {
    /// The text, cut to 200 characters.
    pub text: String,
    /// Explanation.
    pub reason: String,
}

impl RegistryLocation {
    /// Returns the repository with this name at this location.
    pub fn repository(&self, name: &str) -> Result<Repository, ReferenceError> {
        match self {
            Self::Remote { host, prefix: Some(prefix) } => format!("{host}/{prefix}/{name}").parse(),
            Self::Remote { host, prefix: None } => format!("{host}/{name}").parse(),
            Self::Layout(_) => name.parse(),
        }
    }

    /// Returns the name of a repository at this location, without the prefix. Returns `None` for a repository elsewhere.
    pub fn name_of<'a>(&self, repository: &'a Repository) -> Option<&'a str> {
        match self {
            Self::Remote { .. } => repository.as_str().strip_prefix(&self.to_string())?.strip_prefix('/'),
            Self::Layout(_) => repository.host().is_none().then_some(repository.as_str()),
        }
    }

    /// Whether a client of the location can address the repository. A client of the distribution protocol addresses every host; names in a
    /// layout directory have no host.
    pub fn can_address(&self, repository: &Repository) -> bool {
        match self {
            Self::Remote { .. } => true,
            Self::Layout(_) => repository.host().is_none(),
        }
    }
}

impl FromStr for RegistryLocation {
    type Err = LocationError;

    fn from_str(text: &str) -> Result<Self, LocationError> {
        let refuse = |reason: &str| {
            Err(LocationError { text: text.chars().take(200).collect(), reason: reason.to_owned() })
        };
        if let Some(path) = text.strip_prefix("oci:") {
            if path.is_empty() {
                return refuse("the path is missing");
            }
            // Tools that read layouts treat the text after a colon as the image's name.
            if path.contains(':') {
                return refuse("the path of a layout directory cannot contain a colon");
            }
            return Ok(Self::Layout(PathBuf::from(path)));
        }
        if text.contains("://") {
            return refuse("it has a scheme");
        }
        let (host, prefix) = match text.trim_end_matches('/').split_once('/') {
            Some((host, prefix)) => (host, Some(prefix.to_owned())),
            None => (text.trim_end_matches('/'), None),
        };
        if !names_host(host) {
            return refuse("the host must contain a dot or a port, or be localhost");
        }
        let location = Self::Remote { host: host.to_owned(), prefix };
        match location.repository("x") {
            Ok(_) => Ok(location),
            Err(error) => refuse(&error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locations_are_parsed_and_displayed() {
        let remote = |host: &str, prefix: Option<&str>| RegistryLocation::Remote {
            host: host.to_owned(),
            prefix: prefix.map(str::to_owned),
        };
        for (text, location, repository) in [
            ("127.0.0.1:5000/drivers", remote("127.0.0.1:5000", Some("drivers")), "127.0.0.1:5000/drivers/x"),
            ("localhost:5000", remote("localhost:5000", None), "localhost:5000/x"),
            ("r.example/a/b/", remote("r.example", Some("a/b")), "r.example/a/b/x"),
            ("oci:out/images", RegistryLocation::Layout("out/images".into()), "x"),
        ] {
            let parsed: RegistryLocation = text.parse().unwrap();
            assert_eq!(parsed, location);
            assert_eq!(parsed.repository("x").unwrap().as_str(), repository);
            assert_eq!(parsed.to_string().parse::<RegistryLocation>().unwrap(), location);
        }
    }

    #[test]
    fn invalid_locations_are_rejected() {
        for text in
            ["", "oci:", "oci:/a:b", "https://r.example/x", "drivers", "r.example/UPPER", "r.example/a b"]
        {
            assert!(text.parse::<RegistryLocation>().is_err(), "{text:?}");
        }
    }
}
