//! Rolls back farrier's changes in a cluster, for the command and the status page.

use std::{collections::BTreeSet, time::Duration};

use farrier_cluster::{Cluster, ClusterError};
use farrier_core::plan::{self, Change, PER_KERNEL_ANNOTATION, RollbackOutcome, RollbackStep};
use oci::error_chain;
use serde::Serialize;

/// Number of attempts to read and write an object when another writer causes conflicts.
pub const TRIES: usize = 3;
/// How long to wait for a newer state after a conflict.
const PATIENCE: Duration = Duration::from_secs(2);

/// Reasons why a rollback cannot start.
#[derive(Debug, thiserror::Error)]
pub enum RollbackError {
    /// The cluster's state could not be read.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// Some of the given names match no object.
    #[error(
        "roll back {}: there is no such object in {place}; objects are namespace/name for a DaemonSet and Kind/name \
         for an operator's resource",
        .names.join(" and ")
    )]
    Unknown { names: Vec<String>, place: String },
}

/// Rollback step of one object, with its result.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RollbackResult {
    /// The step that was planned.
    #[serde(flatten)]
    pub step: RollbackStep,
    /// Whether the step has a change to write; in a dry run, whether it would write one.
    #[serde(skip)]
    pub written: bool,
    /// Error that prevented the change.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
}

/// Rolls back farrier's changes to the named objects, or to every object with a record if `objects` is empty. A dry run
/// only reports the steps.
pub async fn roll_back(
    cluster: &dyn Cluster,
    objects: &[String],
    dry_run: bool,
) -> Result<Vec<RollbackResult>, RollbackError> {
    let mut selected = objects.to_vec();
    let originals = plan::per_kernel_originals(&cluster.snapshot().await?);
    let mut taken = roll_back_copies(cluster, &originals, objects, dry_run).await?;
    for tries_left in (0..TRIES).rev() {
        let mut again = Vec::new();
        for step in steps(cluster, &selected).await? {
            let outcome = match &step.change {
                Some(change) if !dry_run => cluster.apply(change).await,
                Some(_) | None => Ok(()),
            };
            match outcome {
                Err(error) if error.is_conflict() && tries_left > 0 => again.push(step.object),
                outcome => {
                    let written = step.change.is_some();
                    taken.push(RollbackResult {
                        step,
                        failed: outcome.err().map(|error| error_chain(&error)),
                        written,
                    });
                }
            }
        }
        if again.is_empty() {
            break;
        }
        wait_for_change(cluster).await;
        selected = again;
    }
    taken.sort_by(|a, b| a.step.object.cmp(&b.step.object));
    Ok(taken)
}

/// Waits briefly for a newer cluster state after a conflict. The timeout also covers sources without change
/// notifications, so the caller rereads the state in any case.
pub async fn wait_for_change(cluster: &dyn Cluster) {
    let _ = tokio::time::timeout(PATIENCE, cluster.changed()).await;
}

/// Removes the per-kernel copies of each DaemonSet and restores the original. Each step is planned from the cluster
/// state after the previous step.
async fn roll_back_copies(
    cluster: &dyn Cluster,
    originals: &BTreeSet<(String, String)>,
    objects: &[String],
    dry_run: bool,
) -> Result<Vec<RollbackResult>, RollbackError> {
    let mut all = Vec::new();
    for (namespace, name) in originals {
        let object = format!("{namespace}/{name}");
        if !objects.is_empty() && !objects.contains(&object) {
            continue;
        }
        let (mut made, mut conflicts, mut failed) = (0, 0, None);
        loop {
            let snapshot = cluster.snapshot().await?;
            let now = jiff::Timestamp::now();
            let changes = match plan::rollback_per_kernel(&snapshot, now, (namespace.as_str(), name.as_str()))
            {
                Ok(changes) => changes,
                Err(hold) => {
                    failed = Some(hold.to_string());
                    break;
                }
            };
            made += changes.len();
            if changes.is_empty() || dry_run {
                break;
            }
            match apply_all(cluster, &changes).await {
                Ok(()) => conflicts = 0,
                Err(error) if error.is_conflict() && conflicts < TRIES => {
                    conflicts += 1;
                    wait_for_change(cluster).await;
                }
                Err(error) => {
                    failed = Some(error_chain(&error));
                    break;
                }
            }
        }
        if made == 0 && failed.is_none() {
            continue;
        }
        let outcome = RollbackOutcome::Restored {
            from: "a DaemonSet for each kernel".to_owned(),
            to: "the DaemonSet itself, on all its nodes".to_owned(),
        };
        let step = RollbackStep {
            resume: format!(
                "kubectl annotate daemonset {name} --namespace {namespace} {PER_KERNEL_ANNOTATION}-"
            ),
            object,
            fields: [("nodes".to_owned(), outcome)].into(),
            error: None,
            change: None,
        };
        all.push(RollbackResult { step, failed, written: made > 0 });
    }
    Ok(all)
}

/// Makes the changes, one after the other, until one is refused.
pub async fn apply_all(cluster: &dyn Cluster, changes: &[Change]) -> Result<(), ClusterError> {
    for change in changes {
        cluster.apply(change).await?;
    }
    Ok(())
}

async fn steps(cluster: &dyn Cluster, selected: &[String]) -> Result<Vec<RollbackStep>, RollbackError> {
    let snapshot = cluster.snapshot().await?;
    let place = || cluster.describe();
    plan::rollback(&snapshot, selected).map_err(|names| RollbackError::Unknown { names, place: place() })
}
