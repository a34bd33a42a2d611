//! Pure: what the API server says, in words that a platform engineer can act on.

use std::fmt::Write as _;

/// A right that farrier needs and does not have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingRight {
    /// Who farrier is to the API server, where that is known.
    pub user: Option<String>,
    /// What it may not do: `list`.
    pub verb: &'static str,
    /// The API group; empty for the core group.
    pub group: String,
    /// The resource, with its subresource: `pods/eviction`.
    pub resource: String,
    /// Where.
    pub scope: Scope,
    /// All verbs that farrier needs for this resource.
    pub verbs: &'static [&'static str],
}

/// Where a right counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Scope {
    /// A resource without namespaces.
    Cluster,
    /// Every namespace.
    AllNamespaces,
    /// One namespace.
    Namespace(String),
}

impl MissingRight {
    /// What may not be done: `farrier may not list daemonsets.apps in all namespaces (as ...)`.
    pub fn sentence(&self) -> String {
        let Self { user, verb, group, resource, scope, verbs: _ } = self;
        let mut text = format!("farrier may not {verb} {resource}");
        if !group.is_empty() {
            let _ = write!(text, ".{group}");
        }
        match scope {
            Scope::Cluster => {}
            Scope::AllNamespaces => text.push_str(" in all namespaces"),
            Scope::Namespace(namespace) => {
                let _ = write!(text, " in namespace {namespace}");
            }
        }
        if let Some(user) = user {
            let _ = write!(text, " (as {user})");
        }
        text
    }

    /// The rule to add.
    pub fn remedy(&self) -> String {
        let Self { user: _, verb: _, group, resource, scope, verbs } = self;
        let group = if group.is_empty() { "\"\"" } else { group };
        let role = match scope {
            Scope::Cluster | Scope::AllNamespaces => "ClusterRole".to_owned(),
            Scope::Namespace(namespace) => format!("ClusterRole, or a Role in namespace {namespace}"),
        };
        format!("add apiGroups [{group}], resources [{resource}], verbs [{}] to its {role}", verbs.join(", "))
    }
}

/// Longest message of a pod or an API server that is kept.
const LINE: usize = 500;

/// Foreign words on one line, without control characters, and not without end.
pub(super) fn one_line(text: &str) -> String {
    let mut line = String::new();
    for word in text.split(|c: char| c.is_whitespace() || c.is_control()).filter(|word| !word.is_empty()) {
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    if line.chars().count() > LINE {
        line = line.chars().take(LINE - 3).chain("...".chars()).collect();
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_right_names_the_rule() {
        let right = MissingRight {
            user: Some("system:serviceaccount:farrier:farrier".to_owned()),
            verb: "list",
            group: "apps".to_owned(),
            resource: "daemonsets".to_owned(),
            scope: Scope::AllNamespaces,
            verbs: &["get", "list", "watch"],
        };
        assert_eq!(
            format!("{}: {}", right.sentence(), right.remedy()),
            "farrier may not list daemonsets.apps in all namespaces (as system:serviceaccount:farrier:farrier): \
             add apiGroups [apps], resources [daemonsets], verbs [get, list, watch] to its ClusterRole"
        );
        let right = MissingRight {
            user: None,
            verb: "create",
            group: String::new(),
            resource: "pods/eviction".to_owned(),
            scope: Scope::Namespace("gpu".to_owned()),
            verbs: &["create"],
        };
        assert_eq!(right.sentence(), "farrier may not create pods/eviction in namespace gpu");
        assert_eq!(
            right.remedy(),
            "add apiGroups [\"\"], resources [pods/eviction], verbs [create] to its ClusterRole, or a Role in \
             namespace gpu"
        );
    }

    #[test]
    fn foreign_words_stay_on_one_line() {
        assert_eq!(one_line(" a\n\tb\u{7}c \u{1b}[1m"), "a b c [1m");
        assert_eq!(one_line(&"é".repeat(900)).chars().count(), LINE);
    }
}
