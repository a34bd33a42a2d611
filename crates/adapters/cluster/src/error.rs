//! Errors of cluster access, with hints for the platform engineer.

use std::{fmt::Write as _, path::PathBuf};

use farrier_core::shell::shell_word;

/// A failed operation on a cluster.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// An I/O error on this machine.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// A manifest that Kubernetes would not accept. Lines and columns count from 1.
    #[error("cannot read manifest {path}:{line}:{column}: {reason}")]
    Manifest { path: PathBuf, line: usize, column: usize, reason: String },
    /// Input above a size limit: the file or directory, and the exceeded limit.
    #[error("cannot read manifests in {0}: {1}")]
    TooLarge(PathBuf, String),
    /// A manifest's field has another value than the plan saw. `object` is the DaemonSet and container, or the resource. The next
    /// reconcile plans again.
    #[error("cannot set image of {object}: it holds {found:?}, but the plan expects {expected:?}")]
    Conflict { object: String, expected: String, found: String },
    /// A manifest's field is missing, is ambiguous, or cannot be edited in place.
    #[error("cannot set image of {object}: {reason}")]
    Refused { object: String, reason: String },
    /// Neither a kubeconfig nor a pod's service account provides access to a cluster.
    #[error("cannot find the cluster: {0}")]
    Configuration(String),
    /// A failed call to the API server.
    #[error("cannot {action}: {error}")]
    Api { action: String, error: ApiError },
}

/// Reason why a call to the API server failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ApiError {
    /// The API server did not answer, or was overloaded, for longer than farrier retries. Transient.
    #[error("the API server is unavailable: {0}")]
    Unavailable(String),
    /// The API server does not accept the credentials.
    #[error("the API server does not accept the credentials: {0}")]
    Unauthorized(String),
    /// A permission is missing.
    #[error("{}", .0.sentence())]
    Forbidden(Box<MissingPermission>),
    /// The object does not exist, or no longer exists. The next reconcile plans again.
    #[error("the object no longer exists")]
    Gone,
    /// The object is not in the state that the plan saw. The next reconcile plans again.
    #[error("the object has changed since it was read: {0}")]
    Changed(String),
    /// The API server or an admission webhook rejected the write.
    #[error("the API server rejected the request: {0}")]
    Rejected(String),
    /// The API server accepted the write and did not keep this field: an admission webhook changed it.
    #[error("the API server did not keep the {0}: an admission webhook changes it")]
    NotKept(String),
    /// farrier does not write this kind of change.
    #[error("the change cannot be written: {0}")]
    Unwritable(String),
    /// A PodDisruptionBudget currently prevents the eviction.
    #[error("{0}")]
    Disruption(String),
    /// This process must not write, for example because it lost the lease.
    #[error("farrier may not write: {0}")]
    Fenced(String),
}

impl ClusterError {
    /// Whether the same call may succeed later without any change.
    pub fn is_transient(&self) -> bool {
        self.is_unreachable() || self.disruption().is_some()
    }

    /// Returns the API server's message about a PodDisruptionBudget that currently prevents an eviction.
    pub fn disruption(&self) -> Option<&str> {
        match self {
            Self::Api { error: ApiError::Disruption(reason), .. } => Some(reason),
            _ => None,
        }
    }

    /// Returns the field that the API server did not keep, although it accepted the write.
    pub fn lost_field(&self) -> Option<&str> {
        match self {
            Self::Api { error: ApiError::NotKept(field), .. } => Some(field),
            _ => None,
        }
    }

    /// Whether the cluster could not be reached.
    pub fn is_unreachable(&self) -> bool {
        matches!(self, Self::Api { error: ApiError::Unavailable(_), .. })
    }

    /// Whether the object has changed, so that a new plan is needed.
    pub fn is_conflict(&self) -> bool {
        matches!(self, Self::Conflict { .. } | Self::Api { error: ApiError::Changed(_) | ApiError::Gone, .. })
    }

    /// Returns a hint for the user.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::Configuration(_) => {
                "name a context with --cluster kube:CONTEXT, set KUBECONFIG, or make sure that `kubectl cluster-info` works; in a \
                 pod, mount the service account's token"
            }
            Self::Api { error: ApiError::Unavailable(_), .. } => {
                "make sure that `kubectl version` reaches the API server from here; `farrier run` retries automatically"
            }
            Self::Api { error: ApiError::Unauthorized(_), .. } => {
                "log in again, or make sure that the token of the kubeconfig or service account has not expired"
            }
            Self::Api { error: ApiError::Forbidden(missing), .. } => return Some(missing.remedy()),
            Self::Api { error: ApiError::NotKept(_), .. } => {
                "exempt the DaemonSet from the admission webhook that changes it; see `kubectl get mutatingwebhookconfigurations`"
            }
            Self::Api { error: ApiError::Disruption(_), .. } => {
                "the pod is evicted once its PodDisruptionBudget allows it; see `kubectl get pdb -A`"
            }
            _ => return None,
        };
        Some(hint.to_owned())
    }
}

/// A permission that farrier needs and does not have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingPermission {
    /// farrier's user name at the API server, if known.
    pub user: Option<String>,
    /// The forbidden verb: `list`.
    pub verb: &'static str,
    /// The API group; empty for the core group.
    pub group: String,
    /// The resource, with its subresource: `pods/eviction`.
    pub resource: String,
    /// Scope of the permission.
    pub scope: PermissionScope,
    /// All verbs that farrier needs for this resource.
    pub verbs: &'static [&'static str],
}

/// Scope of a permission.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PermissionScope {
    /// A resource without namespaces.
    Cluster,
    /// Every namespace.
    AllNamespaces,
    Namespace(String),
}

impl MissingPermission {
    /// Describes the missing permission: `farrier may not list daemonsets.apps in all namespaces (as ...)`.
    pub fn sentence(&self) -> String {
        let Self { user, verb, group, resource, scope, verbs: _ } = self;
        let mut text = format!("farrier may not {verb} {resource}");
        if !group.is_empty() {
            let _ = write!(text, ".{group}");
        }
        match scope {
            PermissionScope::Cluster => {}
            PermissionScope::AllNamespaces => text.push_str(" in all namespaces"),
            PermissionScope::Namespace(namespace) => {
                let _ = write!(text, " in namespace {namespace}");
            }
        }
        if let Some(user) = user {
            let _ = write!(text, " (as {user})");
        }
        text
    }

    /// Returns the commands for an administrator that grant the permission with an additional role.
    pub fn remedy(&self) -> String {
        let Self { user, verb, group, resource, scope, verbs } = self;
        // Each permission gets its own role, so that two for one resource do not conflict.
        let name = format!("farrier-{verb}-{}", resource.replace('/', "-"));
        let resource = match resource.split_once('/') {
            _ if group.is_empty() => resource.clone(),
            Some((resource, subresource)) => format!("{resource}.{group}/{subresource}"),
            None => format!("{resource}.{group}"),
        };
        let (role, namespace_flag) = match scope {
            PermissionScope::Cluster | PermissionScope::AllNamespaces => ("clusterrole", String::new()),
            PermissionScope::Namespace(namespace) => {
                ("role", format!(" --namespace {}", shell_word(namespace)))
            }
        };
        let account = user.as_deref().and_then(|user| user.strip_prefix("system:serviceaccount:"));
        let subject = match (account, user) {
            (Some(account), _) => format!("--serviceaccount {}", shell_word(account)),
            (None, Some(user)) => format!("--user {}", shell_word(user)),
            (None, None) => "--user NAME".to_owned(),
        };
        let verbs = verbs.join(",");
        format!(
            "kubectl create {role} {name}{namespace_flag} --verb {verbs} --resource {resource} && \
             kubectl create {role}binding {name}{namespace_flag} --{role} {name} {subject}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_permission_names_the_commands_that_grant_it() {
        let permission = MissingPermission {
            user: Some("system:serviceaccount:farrier:farrier".to_owned()),
            verb: "list",
            group: "apps".to_owned(),
            resource: "daemonsets".to_owned(),
            scope: PermissionScope::AllNamespaces,
            verbs: &["get", "list", "watch"],
        };
        assert_eq!(
            format!("{}: {}", permission.sentence(), permission.remedy()),
            "farrier may not list daemonsets.apps in all namespaces (as system:serviceaccount:farrier:farrier): \
             kubectl create clusterrole farrier-list-daemonsets --verb get,list,watch --resource daemonsets.apps && kubectl create \
             clusterrolebinding farrier-list-daemonsets --clusterrole farrier-list-daemonsets --serviceaccount farrier:farrier"
        );
        let permission = MissingPermission {
            user: None,
            verb: "create",
            group: String::new(),
            resource: "pods/eviction".to_owned(),
            scope: PermissionScope::Namespace("gpu".to_owned()),
            verbs: &["create"],
        };
        assert_eq!(permission.sentence(), "farrier may not create pods/eviction in namespace gpu");
        assert_eq!(
            permission.remedy(),
            "kubectl create role farrier-create-pods-eviction --namespace gpu --verb create --resource pods/eviction && kubectl create \
             rolebinding farrier-create-pods-eviction --namespace gpu --role farrier-create-pods-eviction --user NAME"
        );
        let user = Some("x; reboot".to_owned());
        let permission = MissingPermission {
            user,
            group: "apps".to_owned(),
            resource: "daemonsets/status".to_owned(),
            ..permission
        };
        assert!(
            permission.remedy().contains(" --resource daemonsets.apps/status && "),
            "{}",
            permission.remedy()
        );
        assert!(permission.remedy().ends_with(" --user 'x; reboot'"), "{}", permission.remedy());
    }
}
