//! Interface: what the loop asks of a cluster, whether it is live or a directory of manifests.

use std::collections::BTreeSet;

use super::error::ClusterError;
use crate::plan::{Candidates, Change, ClusterSnapshot, Interest};

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

    /// Makes one change. If the object is not what the plan saw, [`ClusterError::is_conflict`] is true.
    async fn apply(&self, change: &Change) -> Result<(), ClusterError>;

    /// Which of these images the cluster's objects name: all objects that can be seen, not only rollout targets.
    async fn mentions(&self, images: &Candidates) -> Result<BTreeSet<String>, ClusterError> {
        let mut mentioned = BTreeSet::new();
        images.mentioned_in_snapshot(&self.snapshot().await?, &mut mentioned);
        Ok(mentioned)
    }

    /// Manifests of nodes, DaemonSets and what else says how drivers are installed (KMM's Modules, the operators' resources), each
    /// text with some; of nodes no more than what they run, and their labels.
    async fn manifests(&self) -> Result<Vec<String>, ClusterError> {
        Ok(Vec::new())
    }

    /// Returns when something that a plan depends on may have changed since the last snapshot was taken. A
    /// source that cannot tell never returns.
    async fn changed(&self) {
        std::future::pending::<()>().await;
    }

    /// The definitions have changed: what is read from now on. A source that reads everything has nothing to do.
    fn set_interest(&self, interest: &Interest) {
        let _ = interest;
    }
}
