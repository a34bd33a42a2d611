//! Adapter: where nodes and rollout targets are read and rewritten.

mod dir;
mod edit;
mod manifest;
mod yaml;

use std::path::PathBuf;

pub use dir::Directory;

use crate::plan::{Change, ClusterSnapshot, Interest};

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
