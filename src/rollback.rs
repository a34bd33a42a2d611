//! `farrier rollback`: reverts farrier's changes in a cluster.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use clap::Args;
use farrier_cluster::Cluster;
use farrier_controller::rollback::{RollbackResult, roll_back};
use farrier_core::plan::{self, ObservedKind, SnapshotScope, WriteNamespaces};

use super::{
    CliError, Exit, Result,
    args::NamespaceArg,
    env_vars as vars,
    output::{self, rollback::Search},
    session::Session,
};

#[derive(Debug, Args)]
pub struct RollbackArgs {
    /// Objects to roll back: namespace/name of a DaemonSet, Kind/name of an operator's resource [default:
    /// everything that has a record of changes by this farrier, see --instance]
    #[arg(value_name = "OBJECT")]
    pub objects: Vec<String>,
    #[command(flatten)]
    pub namespace: NamespaceArg,
    /// Live cluster: kube or kube:CONTEXT
    #[arg(long, env = vars::FARRIER_CLUSTER, value_name = "CLUSTER", default_value = "kube", hide_env_values = true)]
    pub cluster: String,
    /// Print what would be restored, and change nothing
    #[arg(long)]
    pub dry_run: bool,
}

/// Connects to a live cluster. The snapshot will include the objects that farrier has changed, and `objects`.
pub(super) async fn connect(
    session: &Session,
    cluster: &str,
    objects: &[String],
) -> Result<(Arc<dyn Cluster>, SnapshotScope)> {
    if cluster.starts_with("dir:") {
        let message = format!(
            "--cluster {cluster}: farrier keeps no record in a directory of manifests; its history is version control \
             (git revert)"
        );
        let hint = "revert the definition and its sources too, or the next run sets the newer image again";
        return Err(CliError::hinted(message, hint));
    }
    // The records on the objects decide, not the definitions, which may have been changed or deleted since.
    let daemon_sets = objects.iter().filter_map(|object| object.split_once('/'));
    let daemon_sets = daemon_sets.map(|(namespace, name)| (namespace.to_owned(), name.to_owned()));
    let scope = SnapshotScope::for_rollback(daemon_sets);
    // A user runs this command with the user's own rights, so all namespaces are writable.
    let connection = session.connect(cluster, WriteNamespaces::All, scope.clone()).await?;
    Ok((connection.cluster, scope))
}

/// Rolls back the selected objects, or everything.
pub async fn rollback(session: &Session, args: RollbackArgs) -> Result<Exit> {
    let objects: Vec<String> = args.objects.iter().map(|object| args.namespace.qualified(object)).collect();
    let (cluster, mut scope) = connect(session, &args.cluster, &objects).await?;
    let snapshot = cluster.snapshot().await?;
    let unseen = snapshot
        .unseen
        .iter()
        .filter(|(kind, _)| matches!(kind, ObservedKind::DaemonSets | ObservedKind::Resources));
    let unseen: Vec<String> =
        unseen.map(|(kind, reason)| format!("{kind} cannot be seen: {reason}")).collect();
    for warning in &unseen {
        output::message(&format!("warning: {warning}"));
    }
    let originals = plan::per_kernel_originals(&snapshot);
    if !originals.is_subset(&scope.daemon_sets) {
        // A DaemonSet whose copies have just been made carries no record yet.
        scope.daemon_sets.extend(originals.iter().cloned());
        cluster.set_snapshot_scope(&scope);
    }
    let mut others = BTreeMap::new();
    if objects.is_empty() {
        others = plan::set_by_others(&snapshot, &session.global.instance());
        others.retain(|object, _| args.namespace.selects(object));
    }
    if let Some((object, name)) = others.first_key_value() {
        let more = if others.len() > 1 { format!(" and {} more", others.len() - 1) } else { String::new() };
        output::message(&format!(
            "warning: another farrier set these objects, which stay unchanged: {object} ({name}){more}\n\
             hint: name the objects, or give that farrier's --instance"
        ));
    }
    let mut selected = objects.clone();
    let is_filtered = objects.is_empty() && (args.namespace.namespace.is_some() || !others.is_empty());
    if is_filtered {
        let recorded = plan::rollback(&snapshot, &[]).unwrap_or_default().into_iter().map(|step| step.object);
        let with_copies = originals.iter().map(|(namespace, name)| format!("{namespace}/{name}"));
        let all: BTreeSet<String> = recorded.chain(with_copies).collect();
        let is_selected = |object: &String| args.namespace.selects(object) && !others.contains_key(object);
        selected = all.into_iter().filter(is_selected).collect();
    }
    let rolled = match selected.as_slice() {
        // An empty list would select everything.
        [] if is_filtered => Vec::new(),
        selected => roll_back(cluster.as_ref(), selected, args.dry_run).await?,
    };
    let search = Search {
        cluster: cluster.describe(),
        objects: &objects,
        unseen: !unseen.is_empty(),
        others: !others.is_empty(),
    };
    session.show(&rolled, |rolled| output::rollback::text(rolled, args.dry_run, &search))?;
    let failed = |rolled: &RollbackResult| rolled.failed.is_some() || rolled.step.error.is_some();
    // If this farrier has set nothing but another one has, the option `--instance` is probably wrong.
    let is_other_instance = search.others && rolled.is_empty();
    // Objects requested by name were found. If everything was requested, unseen objects may be missing.
    let is_incomplete = objects.is_empty() && (search.unseen || is_other_instance);
    Ok(if is_incomplete || rolled.iter().any(failed) { Exit::Failed } else { Exit::Done })
}
