//! Adapter: where nodes and rollout targets are read and rewritten.

mod dir;
mod edit;
pub mod kube;
mod manifest;
mod yaml;

use std::{collections::BTreeSet, path::PathBuf};

pub use dir::Directory;
pub use kube::{KubeCluster, KubeOptions};

use crate::plan::{Candidates, Change, ClusterSnapshot, Interest};

/// What went wrong with a cluster.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// A file of this machine. Transient where the system says so.
    #[error("{action} {path}")]
    Io {
        /// What was done.
        action: &'static str,
        /// To what.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// A manifest that is not what Kubernetes would take.
    #[error("read manifest {path}:{line}:{column}: {reason}")]
    Manifest {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// Column, from 1.
        column: usize,
        /// What is wrong.
        reason: String,
    },
    /// More than farrier reads.
    #[error("read manifests in {path}: {reason}")]
    TooLarge {
        /// The file or directory.
        path: PathBuf,
        /// Which bound.
        reason: String,
    },
    /// The field is not what the plan saw. The next pass plans anew.
    #[error("set image of {object}: it holds {found:?}, and {expected:?} was planned for")]
    Conflict {
        /// The DaemonSet and container.
        object: String,
        /// What the plan saw.
        expected: String,
        /// What is there.
        found: String,
    },
    /// The field is not there, is there twice, or cannot be set where it stands.
    #[error("set image of {object}: {reason}")]
    Refused {
        /// The DaemonSet and container.
        object: String,
        /// Why.
        reason: String,
    },
    /// Neither a kubeconfig nor the files of a pod's service account say how to reach a cluster.
    #[error("find the cluster: {reason}")]
    Configuration {
        /// What is wrong.
        reason: String,
    },
    /// The API server does not answer, or has too much to do, for longer than farrier waits. Transient.
    #[error("{action}: the API server is unavailable: {reason}")]
    Unavailable {
        /// What was done, to what.
        action: String,
        /// The last failure.
        reason: String,
    },
    /// The API server does not know who is asking.
    #[error("{action}: the API server does not accept the credentials: {reason}")]
    Unauthorized {
        /// What was done, to what.
        action: String,
        /// The API server's words.
        reason: String,
    },
    /// A right is missing.
    #[error("{action}: {}", .missing.sentence())]
    Forbidden {
        /// What was done, to what.
        action: String,
        /// Which right.
        missing: Box<kube::MissingRight>,
    },
    /// The object is not there (any more). The next pass plans anew.
    #[error("{action}: it is gone")]
    Gone {
        /// What was done, to what.
        action: String,
    },
    /// The object is another by now than what the plan saw. The next pass plans anew.
    #[error("{action}: it has changed since it was read: {reason}")]
    Changed {
        /// What was done, to what.
        action: String,
        /// How.
        reason: String,
    },
    /// The API server, or an admission webhook, does not take what was written.
    #[error("{action}: the API server refuses it: {reason}")]
    Rejected {
        /// What was done, to what.
        action: String,
        /// The API server's words.
        reason: String,
    },
    /// A PodDisruptionBudget does not let the pod go now.
    #[error("{action}: {reason}")]
    Disruption {
        /// What was done, to what.
        action: String,
        /// The API server's words.
        reason: String,
    },
    /// This process may not write (any more).
    #[error("{action}: nothing is written: {reason}")]
    Fenced {
        /// What was to be done.
        action: String,
        /// Why not.
        reason: String,
    },
}

impl ClusterError {
    /// Can the same call succeed later, without anything being changed?
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Unavailable { .. } | Self::Disruption { .. })
    }

    /// Could the cluster not be reached?
    pub fn is_unreachable(&self) -> bool {
        matches!(self, Self::Unavailable { .. })
    }

    /// Is the object another by now, so that a new plan is called for?
    pub fn is_conflict(&self) -> bool {
        matches!(self, Self::Conflict { .. } | Self::Changed { .. } | Self::Gone { .. })
    }

    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        Some(match self {
            Self::Configuration { .. } => "name a context with --cluster kube:CONTEXT, set KUBECONFIG, or see that \
                 `kubectl cluster-info` works; in a pod, mount the service account's token"
                .to_owned(),
            Self::Unavailable { .. } => {
                "see that `kubectl version` reaches the API server from here; farrier tries again with its next pass"
                    .to_owned()
            }
            Self::Unauthorized { .. } => {
                "log in again, or see that the kubeconfig's or service account's token has not run out".to_owned()
            }
            Self::Forbidden { missing, .. } => missing.remedy(),
            Self::Disruption { .. } => {
                "the pod is evicted once its PodDisruptionBudget allows it; see `kubectl get pdb -A`".to_owned()
            }
            Self::Io { .. }
            | Self::Manifest { .. }
            | Self::TooLarge { .. }
            | Self::Conflict { .. }
            | Self::Refused { .. }
            | Self::Gone { .. }
            | Self::Changed { .. }
            | Self::Rejected { .. }
            | Self::Fenced { .. } => return None,
        })
    }
}

/// Says whether this process may still write: a leader that lost its lease may not.
pub trait Fence: Send + Sync {
    /// Why not, where it may not.
    fn closed(&self) -> Option<String>;
}

/// Where nodes run and DaemonSets are kept.
#[async_trait::async_trait]
pub trait Cluster: Send + Sync {
    /// One line for people.
    fn describe(&self) -> String;

    /// Nodes and DaemonSets, as they are now.
    async fn snapshot(&self) -> Result<ClusterSnapshot, ClusterError>;

    /// Makes one change; an object that is not what the plan saw is a [`ClusterError::Conflict`].
    async fn apply(&self, change: &Change) -> Result<(), ClusterError>;

    /// Which of these images the cluster's objects name: of all that can be seen, not only of rollout targets.
    async fn mentions(&self, images: &Candidates) -> Result<BTreeSet<String>, ClusterError> {
        let mut mentioned = BTreeSet::new();
        images.mentioned_in_snapshot(&self.snapshot().await?, &mut mentioned);
        Ok(mentioned)
    }

    /// Returns when something that a plan depends on may have changed since the last snapshot was taken. A
    /// source that cannot tell never returns.
    async fn changed(&self) {
        std::future::pending::<()>().await;
    }

    /// The definitions have changed: what is seen from now on. A source that reads everything has nothing to do.
    fn set_interest(&self, interest: &Interest) {
        let _ = interest;
    }
}
