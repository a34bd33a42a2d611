//! The trait [`Cluster`], through which the reconcile loop reads and writes a live cluster or a directory of manifests.

use std::collections::BTreeSet;

use farrier_core::plan::{Candidates, Change, ClusterSnapshot, SnapshotScope};

use super::error::ClusterError;

/// Decides whether this process may still write. A leader that lost its lease must not write.
pub trait Fence: Send + Sync {
    /// Returns why writes are forbidden; `None` if they are allowed.
    fn closed_reason(&self) -> Option<String>;
}

/// A cluster with nodes and rollout targets.
#[async_trait::async_trait]
pub trait Cluster: Send + Sync {
    /// Describes the cluster in one line, for display.
    fn describe(&self) -> String;

    /// Returns the current nodes and rollout targets.
    async fn snapshot(&self) -> Result<ClusterSnapshot, ClusterError>;

    /// Applies one change. If the object has changed since the plan was made, returns an error for which
    /// [`ClusterError::is_conflict`] is true.
    async fn apply(&self, change: &Change) -> Result<(), ClusterError>;

    /// Returns the images that any visible object of the cluster mentions, including objects that are no rollout targets.
    async fn mentions(&self, images: &Candidates) -> Result<BTreeSet<String>, ClusterError> {
        let mut mentioned = BTreeSet::new();
        images.mentioned_in_snapshot(&self.snapshot().await?, &mut mentioned);
        Ok(mentioned)
    }

    /// Returns manifests of nodes, DaemonSets and other objects that install drivers (KMM's Modules, the operators' resources).
    /// Each text contains one or more manifests. Manifests of nodes contain only the running system and the labels.
    async fn manifests(&self) -> Result<Vec<String>, ClusterError> {
        Ok(Vec::new())
    }

    /// Waits until something that a plan depends on may have changed since the last snapshot. A cluster without change detection
    /// waits forever.
    async fn changed(&self) {
        std::future::pending::<()>().await;
    }

    /// Sets which objects later snapshots contain, after a change of the definitions. A cluster that always reads all objects
    /// ignores `scope`.
    fn set_snapshot_scope(&self, scope: &SnapshotScope) {
        let _ = scope;
    }
}
