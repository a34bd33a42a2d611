//! `farrier rollback`: takes back what farrier has set in a cluster.

use std::time::Duration;

use clap::Args;
use serde::Serialize;

use super::{CliError, Exit, env_vars as vars, output, session::Session};
use crate::{
    cluster::{Cluster, ClusterError},
    error_chain,
    image::{DaemonSetContainer, Definitions, OperatorResource, RolloutSpec},
    plan::{
        self, Change, HoldReason, Interest, PER_KERNEL_ANNOTATION, RollbackOutcome, RollbackStep,
        RolloutTarget, Seen,
    },
};

#[derive(Debug, Args)]
pub struct RollbackArgs {
    /// What to roll back: namespace/name of a DaemonSet, Kind/name of an operator's resource
    /// [default: everything that farrier has set]
    #[arg(value_name = "OBJECT")]
    pub objects: Vec<String>,
    /// The cluster
    #[arg(long, env = vars::FARRIER_CLUSTER, value_name = "CLUSTER", default_value = "kube", hide_env_values = true)]
    pub cluster: String,
    /// Print what would be put back, and touch nothing
    #[arg(long)]
    pub dry_run: bool,
}

/// How often an object is read again after another writer was faster.
const TRIES: usize = 3;
/// How long farrier waits for the newer state of such an object.
const PATIENCE: Duration = Duration::from_secs(2);

/// One object's step, and how it went.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Rolled {
    #[serde(flatten)]
    pub step: RollbackStep,
    /// Is, or was, anything written?
    #[serde(skip)]
    pub written: bool,
    /// Why the change was not made.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
}

/// Takes back what is selected, or everything.
pub async fn rollback(session: &Session, args: RollbackArgs) -> Result<Exit, CliError> {
    if args.cluster.starts_with("dir:") {
        return Err(CliError::usage(format!(
            "--cluster {}: farrier keeps no record in a directory of manifests; its history is version control \
             (git revert)",
            args.cluster
        )));
    }
    let definitions = session.settings()?.definitions;
    let mut interest = Interest::of(&definitions);
    // Objects whose rollout the definitions have lost meanwhile can still be named.
    for object in &args.objects {
        let Some((first, name)) = object.split_once('/') else { continue };
        match OperatorResource::ALL.into_iter().find(|resource| resource.kind() == first) {
            Some(resource) => drop(interest.resources.insert(resource)),
            None => drop(interest.daemon_sets.insert((first.to_owned(), name.to_owned()))),
        }
    }
    let cluster = session.connect(&args.cluster, interest).await?.cluster;
    let rolled = take_back(cluster.as_ref(), &definitions, &args).await?;
    session.show(&rolled, |rolled| output::rollback::text(rolled, args.dry_run))?;
    let failed = |rolled: &Rolled| rolled.failed.is_some() || rolled.step.error.is_some();
    Ok(if rolled.iter().any(failed) { Exit::Failed } else { Exit::Done })
}

async fn take_back(
    cluster: &dyn Cluster,
    definitions: &Definitions,
    args: &RollbackArgs,
) -> Result<Vec<Rolled>, CliError> {
    let mut selected = args.objects.clone();
    let mut taken = take_back_copies(cluster, definitions, args).await?;
    for tries_left in (0..TRIES).rev() {
        let mut again = Vec::new();
        for step in steps(cluster, &selected).await? {
            let outcome = match &step.change {
                Some(change) if !args.dry_run => cluster.apply(change).await,
                Some(_) | None => Ok(()),
            };
            match outcome {
                Err(error) if error.is_conflict() && tries_left > 0 => again.push(step.object),
                outcome => {
                    let written = step.change.is_some();
                    taken.push(Rolled {
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
        // What was seen is out of date; a source that cannot tell of news is asked anew in any case.
        let _ = tokio::time::timeout(PATIENCE, cluster.changed()).await;
        selected = again;
    }
    taken.sort_by(|a, b| a.step.object.cmp(&b.step.object));
    Ok(taken)
}

/// Takes back what stands for a DaemonSet over mixed kernels: step by step, each decided from what the cluster shows
/// after the one before.
async fn take_back_copies(
    cluster: &dyn Cluster,
    definitions: &Definitions,
    args: &RollbackArgs,
) -> Result<Vec<Rolled>, CliError> {
    let rollouts = definitions.images.values().flat_map(|image| &image.spec.rollout);
    let mut all = Vec::new();
    for spec in rollouts.filter(|spec| matches!(spec, RolloutSpec::PerKernel { .. })) {
        let target = RolloutTarget::of(spec);
        let Some(found) = spec.daemon_set() else { continue };
        let DaemonSetContainer { namespace, daemon_set, container: _ } = found;
        let object = format!("{namespace}/{daemon_set}");
        if !args.objects.is_empty() && !args.objects.contains(&object) {
            continue;
        }
        let (mut made, mut conflicts, mut failed) = (0, 0, None);
        loop {
            let snapshot = cluster.snapshot().await?;
            let now = jiff::Timestamp::now();
            let changes = match plan::rollback_per_kernel(definitions, &snapshot, now, &target) {
                Ok(changes) => changes,
                Err(HoldReason::NotFound) => break,
                Err(hold) => {
                    failed = Some(hold.to_string());
                    break;
                }
            };
            made += changes.len();
            if changes.is_empty() || args.dry_run {
                break;
            }
            match apply_all(cluster, &changes).await {
                Ok(()) => conflicts = 0,
                Err(error) if error.is_conflict() && conflicts < TRIES => {
                    conflicts += 1;
                    let _ = tokio::time::timeout(PATIENCE, cluster.changed()).await;
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
        let outcome = RollbackOutcome::PutBack {
            from: "a DaemonSet for each kernel".to_owned(),
            to: "the DaemonSet itself, on all its nodes".to_owned(),
        };
        let step = RollbackStep {
            resume: format!(
                "kubectl annotate daemonset {daemon_set} --namespace {namespace} {PER_KERNEL_ANNOTATION}-"
            ),
            object,
            fields: [("nodes".to_owned(), outcome)].into(),
            error: None,
            change: None,
        };
        all.push(Rolled { step, failed, written: made > 0 });
    }
    Ok(all)
}

async fn apply_all(cluster: &dyn Cluster, changes: &[Change]) -> Result<(), ClusterError> {
    for change in changes {
        cluster.apply(change).await?;
    }
    Ok(())
}

async fn steps(cluster: &dyn Cluster, selected: &[String]) -> Result<Vec<RollbackStep>, CliError> {
    let snapshot = cluster.snapshot().await?;
    for (what, why) in &snapshot.unseen {
        if matches!(what, Seen::DaemonSets | Seen::Resources) {
            output::message(&format!("warning: {what} cannot be seen: {why}"));
        }
    }
    plan::rollback(&snapshot, selected).map_err(|unknown| {
        CliError::usage(format!(
            "roll back {}: there is no such object in {}; objects are namespace/name for a DaemonSet and Kind/name \
             for an operator's resource that a rollout names",
            unknown.join(" and "),
            cluster.describe()
        ))
    })
}
