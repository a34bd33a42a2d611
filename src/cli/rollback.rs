//! `farrier rollback`: takes back what farrier has set in a cluster.

use std::{collections::BTreeSet, time::Duration};

use clap::Args;

use super::{
    CliError, Exit, Result, env_vars as vars,
    output::{
        self,
        rollback::{Looked, Rolled},
    },
    session::Session,
};
use crate::{
    cluster::{Cluster, ClusterError},
    error_chain,
    plan::{
        self, Change, Interest, PER_KERNEL_ANNOTATION, RollbackOutcome, RollbackStep, Seen, WriteNamespaces,
    },
};

#[derive(Debug, Args)]
pub struct RollbackArgs {
    /// What to roll back: namespace/name of a DaemonSet, Kind/name of an operator's resource
    /// [default: everything that carries a record of what farrier has set]
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

/// Takes back what is selected, or everything.
pub async fn rollback(session: &Session, args: RollbackArgs) -> Result<Exit> {
    if args.cluster.starts_with("dir:") {
        return Err(CliError::usage(format!(
            "--cluster {}: farrier keeps no record in a directory of manifests; its history is version control \
             (git revert)",
            args.cluster
        )));
    }
    // The records on the objects decide, and no definitions: those may have been changed or deleted by now.
    let named = args.objects.iter().filter_map(|object| object.split_once('/'));
    let named = named.map(|(namespace, name)| (namespace.to_owned(), name.to_owned()));
    let mut interest = Interest::for_rollback(named);
    // A person's word, with a person's rights.
    let cluster = session.connect(&args.cluster, WriteNamespaces::All, interest.clone()).await?.cluster;
    let snapshot = cluster.snapshot().await?;
    let unseen =
        snapshot.unseen.iter().filter(|(what, _)| matches!(what, Seen::DaemonSets | Seen::Resources));
    let unseen: Vec<String> = unseen.map(|(what, why)| format!("{what} cannot be seen: {why}")).collect();
    for unseen in &unseen {
        output::message(&format!("warning: {unseen}"));
    }
    let originals = plan::per_kernel_originals(&snapshot);
    if !originals.is_subset(&interest.daemon_sets) {
        // One whose copies have just been made carries no record yet.
        interest.daemon_sets.extend(originals.iter().cloned());
        cluster.set_interest(&interest);
    }
    let rolled = take_back(cluster.as_ref(), &originals, &args).await?;
    let looked = Looked { place: cluster.describe(), objects: &args.objects, unseen: !unseen.is_empty() };
    session.show(&rolled, |rolled| output::rollback::text(rolled, args.dry_run, &looked))?;
    let failed = |rolled: &Rolled| rolled.failed.is_some() || rolled.step.error.is_some();
    // What was asked for by its name was found; of everything, a part may be missing.
    let missed = looked.unseen && args.objects.is_empty();
    Ok(if missed || rolled.iter().any(failed) { Exit::Failed } else { Exit::Done })
}

async fn take_back(
    cluster: &dyn Cluster,
    originals: &BTreeSet<(String, String)>,
    args: &RollbackArgs,
) -> Result<Vec<Rolled>> {
    let mut selected = args.objects.clone();
    let mut taken = take_back_copies(cluster, originals, args).await?;
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
    originals: &BTreeSet<(String, String)>,
    args: &RollbackArgs,
) -> Result<Vec<Rolled>> {
    let mut all = Vec::new();
    for (namespace, name) in originals {
        let object = format!("{namespace}/{name}");
        if !args.objects.is_empty() && !args.objects.contains(&object) {
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
                "kubectl annotate daemonset {name} --namespace {namespace} {PER_KERNEL_ANNOTATION}-"
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

async fn steps(cluster: &dyn Cluster, selected: &[String]) -> Result<Vec<RollbackStep>> {
    let snapshot = cluster.snapshot().await?;
    plan::rollback(&snapshot, selected).map_err(|unknown| {
        CliError::usage(format!(
            "roll back {}: there is no such object in {}; objects are namespace/name for a DaemonSet and Kind/name \
             for an operator's resource",
            unknown.join(" and "),
            cluster.describe()
        ))
    })
}
