//! Pure: what goes wrong with a cluster, in words that a platform engineer can act on.

use std::{fmt::Write as _, path::PathBuf};

use crate::shell::shell_word;

/// What went wrong with a cluster.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the fields are")]
pub enum ClusterError {
    /// A file of this machine.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// A manifest that Kubernetes would not accept. Lines and columns count from 1.
    #[error("read manifest {path}:{line}:{column}: {reason}")]
    Manifest { path: PathBuf, line: usize, column: usize, reason: String },
    /// More than farrier reads: the file or directory, and which bound.
    #[error("read manifests in {0}: {1}")]
    TooLarge(PathBuf, String),
    /// The field of a manifest (`object`: DaemonSet and container) is not what the plan saw. The next pass plans anew.
    #[error("set image of {object}: it holds {found:?}, and {expected:?} was planned for")]
    Conflict { object: String, expected: String, found: String },
    /// The field of a manifest is not there, is there twice, or cannot be set where it stands.
    #[error("set image of {object}: {reason}")]
    Refused { object: String, reason: String },
    /// Neither a kubeconfig nor the files of a pod's service account say how to reach a cluster.
    #[error("find the cluster: {0}")]
    Configuration(String),
    /// A call of the API server.
    #[error("{action}: {error}")]
    Api { action: String, error: ApiError },
}

/// Why a call of the API server failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ApiError {
    /// It does not answer, or has too much to do, for longer than farrier waits. Transient.
    #[error("the API server is unavailable: {0}")]
    Unavailable(String),
    /// It does not know who is asking.
    #[error("the API server does not accept the credentials: {0}")]
    Unauthorized(String),
    /// A right is missing.
    #[error("{}", .0.sentence())]
    Forbidden(Box<MissingRight>),
    /// The object does not exist (any more). The next pass plans anew.
    #[error("it is gone")]
    Gone,
    /// The object is not in the state that the plan saw. The next pass plans anew.
    #[error("it has changed since it was read: {0}")]
    Changed(String),
    /// The API server, or an admission webhook, does not accept what was written.
    #[error("the API server refuses it: {0}")]
    Rejected(String),
    /// The change is not one that farrier writes.
    #[error("it cannot be written: {0}")]
    Unwritable(String),
    /// A PodDisruptionBudget does not let the pod go now.
    #[error("{0}")]
    Disruption(String),
    /// This process may not write (any more).
    #[error("nothing is written: {0}")]
    Fenced(String),
}

impl ClusterError {
    /// Can the same call succeed later, without anything being changed?
    pub fn is_transient(&self) -> bool {
        self.is_unreachable() || self.disruption().is_some()
    }

    /// What the API server says of a PodDisruptionBudget that does not let a pod go now.
    pub fn disruption(&self) -> Option<&str> {
        match self {
            Self::Api { error: ApiError::Disruption(reason), .. } => Some(reason),
            _ => None,
        }
    }

    /// Could the cluster not be reached?
    pub fn is_unreachable(&self) -> bool {
        matches!(self, Self::Api { error: ApiError::Unavailable(_), .. })
    }

    /// Is the object another by now, so that a new plan is called for?
    pub fn is_conflict(&self) -> bool {
        matches!(self, Self::Conflict { .. } | Self::Api { error: ApiError::Changed(_) | ApiError::Gone, .. })
    }

    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::Configuration(_) => {
                "name a context with --cluster kube:CONTEXT, set KUBECONFIG, or see that `kubectl cluster-info` \
                 works; in a pod, mount the service account's token"
            }
            Self::Api { error: ApiError::Unavailable(_), .. } => {
                "see that `kubectl version` reaches the API server from here; `farrier run` tries again by itself"
            }
            Self::Api { error: ApiError::Unauthorized(_), .. } => {
                "log in again, or see that the kubeconfig's or service account's token has not run out"
            }
            Self::Api { error: ApiError::Forbidden(missing), .. } => return Some(missing.remedy()),
            Self::Api { error: ApiError::Disruption(_), .. } => {
                "the pod is evicted once its PodDisruptionBudget allows it; see `kubectl get pdb -A`"
            }
            _ => return None,
        };
        Some(hint.to_owned())
    }
}

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

    /// The commands that give the right, as an administrator enters them: a role of its own, beside those that there are.
    pub fn remedy(&self) -> String {
        let Self { user, verb, group, resource, scope, verbs } = self;
        // Two rights for one resource are two roles.
        let name = format!("farrier-{verb}-{}", resource.replace('/', "-"));
        let resource = match resource.split_once('/') {
            _ if group.is_empty() => resource.clone(),
            Some((resource, part)) => format!("{resource}.{group}/{part}"),
            None => format!("{resource}.{group}"),
        };
        let (role, place) = match scope {
            Scope::Cluster | Scope::AllNamespaces => ("clusterrole", String::new()),
            Scope::Namespace(namespace) => ("role", format!(" --namespace {}", shell_word(namespace))),
        };
        let account = user.as_deref().and_then(|user| user.strip_prefix("system:serviceaccount:"));
        let subject = match (account, user) {
            (Some(account), _) => format!("--serviceaccount {}", shell_word(account)),
            (None, Some(user)) => format!("--user {}", shell_word(user)),
            (None, None) => "--user NAME".to_owned(),
        };
        let verbs = verbs.join(",");
        format!(
            "kubectl create {role} {name}{place} --verb {verbs} --resource {resource} && \
             kubectl create {role}binding {name}{place} --{role} {name} {subject}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_right_names_the_commands_that_give_it() {
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
             kubectl create clusterrole farrier-list-daemonsets --verb get,list,watch --resource daemonsets.apps && kubectl create \
             clusterrolebinding farrier-list-daemonsets --clusterrole farrier-list-daemonsets --serviceaccount farrier:farrier"
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
            "kubectl create role farrier-create-pods-eviction --namespace gpu --verb create --resource pods/eviction && kubectl create \
             rolebinding farrier-create-pods-eviction --namespace gpu --role farrier-create-pods-eviction --user NAME"
        );
        let user = Some("x; reboot".to_owned());
        let right = MissingRight {
            user,
            group: "apps".to_owned(),
            resource: "daemonsets/status".to_owned(),
            ..right
        };
        assert!(right.remedy().contains(" --resource daemonsets.apps/status && "), "{}", right.remedy());
        assert!(right.remedy().ends_with(" --user 'x; reboot'"), "{}", right.remedy());
    }
}
