//! Pure: in which namespaces farrier may write.

use std::{collections::BTreeSet, str::FromStr};

use crate::definition::checked::DnsLabel;

/// The namespaces whose DaemonSets are rewritten and whose pods are restarted.
#[derive(Clone, Debug, Default, PartialEq, Eq, derive_more::Display)]
pub enum WriteNamespaces {
    /// All of them. Written `*`; and what a directory of manifests has, where files and not rights decide.
    #[default]
    #[display("*")]
    All,
    /// These and no others. Written with commas between them.
    #[display("{}", _0.iter().map(String::as_str).collect::<Vec<_>>().join(","))]
    Named(BTreeSet<String>),
}

/// A text that names no namespaces.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WriteNamespacesError {
    /// It is empty.
    #[error(
        "it names no namespace; name those of the DaemonSets that are rolled out, such as drivers,gpu, or `*` for all"
    )]
    Empty,
    /// One of the names is no name of a namespace.
    #[error("{0:?} is no name of a namespace")]
    Name(String),
}

impl FromStr for WriteNamespaces {
    type Err = WriteNamespacesError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.trim() {
            "" => Err(WriteNamespacesError::Empty),
            "*" => Ok(Self::All),
            names => {
                let name = |name: &str| match name.trim().parse::<DnsLabel>() {
                    Ok(name) => Ok(name.to_string()),
                    Err(_) => Err(WriteNamespacesError::Name(name.trim().chars().take(80).collect())),
                };
                names.split(',').map(name).collect::<Result<_, _>>().map(Self::Named)
            }
        }
    }
}

impl WriteNamespaces {
    /// May farrier write there?
    pub fn contains(&self, namespace: &str) -> bool {
        match self {
            Self::All => true,
            Self::Named(names) => names.contains(namespace),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_namespaces_are_an_explicit_word() {
        for (text, inside, outside) in [("*", "any", None), (" drivers , gpu", "gpu", Some("kube-system"))] {
            let found: WriteNamespaces = text.parse().unwrap();
            assert!(found.contains(inside), "{text}");
            assert!(outside.is_none_or(|name| !found.contains(name)), "{text}");
            assert_eq!(found.to_string().parse(), Ok(found));
        }
        for wrong in ["", " ", "*,drivers", "a,,b", "a,", "A", "a/b", "-a"] {
            wrong.parse::<WriteNamespaces>().unwrap_err();
        }
    }
}
