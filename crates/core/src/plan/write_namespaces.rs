//! The namespaces in which farrier may write.

use std::{collections::BTreeSet, str::FromStr};

use crate::definition::{ParseError, checked::DnsLabel};

/// Namespaces in which farrier may rewrite DaemonSets and restart pods.
#[derive(Clone, Debug, Default, PartialEq, Eq, derive_more::Display)]
pub enum WriteNamespaces {
    /// All namespaces, written `*`. Also used for a directory of manifests, where files decide instead of access
    /// rights.
    #[default]
    #[display("*")]
    All,
    /// Only these namespaces, written as a comma-separated list.
    #[display("{}", _0.iter().map(String::as_str).collect::<Vec<_>>().join(","))]
    Named(BTreeSet<String>),
}

impl FromStr for WriteNamespaces {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.trim() {
            "" => Err("it names no namespace; list the namespaces of the DaemonSets to roll out, such as drivers,gpu, \
                       or `*` for all"
                .to_owned()),
            "*" => Ok(Self::All),
            names => {
                let name = |name: &str| match name.trim().parse::<DnsLabel>() {
                    Ok(name) => Ok(name.to_string()),
                    Err(_) => Err(ParseError::new(name.trim(), "the name of a namespace").to_string()),
                };
                names.split(',').map(name).collect::<Result<_, _>>().map(Self::Named)
            }
        }
    }
}

impl WriteNamespaces {
    /// Whether farrier may write in this namespace.
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
