//! Rolls back farrier's changes in a cluster, for the command and the status page.

use std::{collections::BTreeSet, time::Duration};

use farrier_cluster::{Cluster, ClusterError};
use farrier_core::plan::{self, Change, PER_KERNEL_ANNOTATION, RollbackOutcome, RollbackStep};
use oci::error_chain;
use serde::Serialize;

/// Maximum number of attempts to read and write an object while another writer causes conflicts.
pub const MAX_ATTEMPTS: usize = 3;
/// How long to wait for a newer cluster state after a conflict.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(2);

/// Reason why a rollback cannot start.
#[derive(Debug, thiserror::Error)]
pub enum RollbackError {
    /// The cluster's state could not be read.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// Some of the given names match no object.
    #[error(
        "roll back {}: there is no such object in {cluster}; objects are namespace/name for a DaemonSet and Kind/name \
         for an operator's resource",
        .names.join(" and ")
    )]
    Unknown { names: Vec<String>, cluster: String },
}

/// Rollback step of one object, with its result.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RollbackResult {
    /// The step that was planned.
    #[serde(flatten)]
    pub step: RollbackStep,
    /// Whether the step has a change, even in a dry run or if the write failed.
    #[serde(skip)]
    pub written: bool,
    /// Error that prevented the change.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
}

/// Rolls back farrier's changes to the named objects, or to every object with a record if `objects` is empty. A dry run only
/// returns the steps.
pub async fn roll_back(
    cluster: &dyn Cluster,
    objects: &[String],
    dry_run: bool,
) -> Result<Vec<RollbackResult>, RollbackError> {
    let mut selected = objects.to_vec();
    let originals = plan::per_kernel_originals(&cluster.snapshot().await?);
    let mut results = roll_back_copies(cluster, &originals, objects, dry_run).await?;
    for attempts_left in (0..MAX_ATTEMPTS).rev() {
        let mut conflicting = Vec::new();
        for step in steps(cluster, &selected).await? {
            let outcome = match &step.change {
                Some(change) if !dry_run => cluster.apply(change).await,
                Some(_) | None => Ok(()),
            };
            match outcome {
                Err(error) if error.is_conflict() && attempts_left > 0 => conflicting.push(step.object),
                outcome => {
                    let written = step.change.is_some();
                    results.push(RollbackResult {
                        step,
                        failed: outcome.err().map(|error| error_chain(&error)),
                        written,
                    });
                }
            }
        }
        if conflicting.is_empty() {
            break;
        }
        wait_for_change(cluster).await;
        selected = conflicting;
    }
    results.sort_by(|a, b| a.step.object.cmp(&b.step.object));
    Ok(results)
}

/// Waits briefly for a newer cluster state after a conflict. Returns after a timeout too, because not every cluster reports
/// changes. The caller must read the state again in both cases.
pub async fn wait_for_change(cluster: &dyn Cluster) {
    let _ = tokio::time::timeout(CHANGE_TIMEOUT, cluster.changed()).await;
}

/// Rolls back the selected DaemonSets with per-kernel copies.
async fn roll_back_copies(
    cluster: &dyn Cluster,
    originals: &BTreeSet<(String, String)>,
    objects: &[String],
    dry_run: bool,
) -> Result<Vec<RollbackResult>, RollbackError> {
    let mut results = Vec::new();
    for (namespace, name) in originals {
        let object = format!("{namespace}/{name}");
        if !objects.is_empty() && !objects.contains(&object) {
            continue;
        }
        let (changes, failed) = roll_back_copies_of(cluster, namespace, name, dry_run).await?;
        if changes == 0 && failed.is_none() {
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
        results.push(RollbackResult { step, failed, written: changes > 0 });
    }
    Ok(results)
}

/// Removes the per-kernel copies of a DaemonSet and restores the original. Each step is planned from the cluster state after the
/// previous step. Returns the number of planned changes, and the error that ended the rollback.
async fn roll_back_copies_of(
    cluster: &dyn Cluster,
    namespace: &str,
    name: &str,
    dry_run: bool,
) -> Result<(usize, Option<String>), RollbackError> {
    let (mut planned, mut conflicts) = (0, 0);
    loop {
        let snapshot = cluster.snapshot().await?;
        let changes = match plan::rollback_per_kernel(&snapshot, jiff::Timestamp::now(), namespace, name) {
            Ok(changes) => changes,
            Err(hold) => return Ok((planned, Some(hold.to_string()))),
        };
        planned += changes.len();
        if changes.is_empty() || dry_run {
            return Ok((planned, None));
        }
        match apply_all(cluster, &changes).await {
            Ok(()) => conflicts = 0,
            Err(error) if error.is_conflict() && conflicts < MAX_ATTEMPTS => {
                conflicts += 1;
                wait_for_change(cluster).await;
            }
            Err(error) => return Ok((planned, Some(error_chain(&error)))),
        }
    }
}

/// Applies the changes in order, and stops at the first error.
pub async fn apply_all(cluster: &dyn Cluster, changes: &[Change]) -> Result<(), ClusterError> {
    for change in changes {
        cluster.apply(change).await?;
    }
    Ok(())
}

async fn steps(cluster: &dyn Cluster, selected: &[String]) -> Result<Vec<RollbackStep>, RollbackError> {
    let snapshot = cluster.snapshot().await?;
    plan::rollback(&snapshot, selected)
        .map_err(|names| RollbackError::Unknown { names, cluster: cluster.describe() })
}
