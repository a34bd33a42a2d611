//! `farrier upgrade`: shows and controls the order in which nodes get another driver.

use clap::{Args, Subcommand};
use farrier_controller::{
    Planned, observe_and_plan,
    rollback::{MAX_ATTEMPTS, apply_all, wait_for_change},
};
use farrier_core::plan::{self, Change, PlannedUpgrade};
use serde::Serialize;

use super::{
    CliError, Exit, Result,
    args::NamespaceArg,
    env_vars as vars, output,
    plan::PlanArgs,
    rollback::{self, RollbackArgs, connect},
    session::Session,
};

#[derive(Debug, Subcommand)]
pub enum UpgradeCommand {
    /// Show the order in which nodes get another driver, what each node waits for, and when the last one is
    /// done
    Plan(UpgradePlanArgs),
    /// Show the images that DaemonSets got, the newest first: when, what each replaced, and its outcome
    History(UpgradeHistoryArgs),
    /// Start no further node; nodes in progress are finished
    Pause(UpgradeArgs),
    /// Resume, also if the upgrade stopped because a node failed
    Resume(UpgradeArgs),
    /// Restore the previous image; nodes that have the new one get the previous one, in the same order
    Abort(UpgradeArgs),
}

#[derive(Debug, Args)]
pub struct UpgradePlanArgs {
    /// namespace/name of a DaemonSet [default: all whose rollouts have `upgrade`]
    #[arg(value_name = "OBJECT")]
    pub object: Option<String>,
    #[command(flatten)]
    pub namespace: NamespaceArg,
    #[command(flatten)]
    pub plan: PlanArgs,
}

#[derive(Debug, Args)]
pub struct UpgradeArgs {
    /// namespace/name of the DaemonSet
    #[arg(value_name = "OBJECT")]
    pub object: String,
    #[command(flatten)]
    pub namespace: NamespaceArg,
    /// Live cluster: kube or kube:CONTEXT
    #[arg(long, env = vars::FARRIER_CLUSTER, value_name = "CLUSTER", default_value = "kube", hide_env_values = true)]
    pub cluster: String,
}

#[derive(Debug, Args)]
pub struct UpgradeHistoryArgs {
    /// namespace/name of a DaemonSet [default: all that carry farrier's record]
    #[arg(value_name = "OBJECT")]
    pub object: Option<String>,
    #[command(flatten)]
    pub namespace: NamespaceArg,
    /// Live cluster: kube or kube:CONTEXT
    #[arg(long, env = vars::FARRIER_CLUSTER, value_name = "CLUSTER", default_value = "kube", hide_env_values = true)]
    pub cluster: String,
}

impl UpgradeArgs {
    fn qualified(self) -> Self {
        Self { object: self.namespace.qualified(&self.object), ..self }
    }
}

/// Result of pausing or resuming an upgrade.
#[derive(Serialize)]
struct PauseOutcome {
    object: String,
    paused: bool,
    /// Nodes on which the new driver did not work. Their upgrade starts again.
    forgiven: Vec<String>,
}

/// Runs `farrier upgrade`.
pub async fn upgrade(session: &Session, command: UpgradeCommand) -> Result<Exit> {
    match command {
        UpgradeCommand::Plan(args) => plan(session, args).await,
        UpgradeCommand::History(args) => history(session, args).await,
        UpgradeCommand::Pause(args) => pause_or_resume(session, &args.qualified(), true).await,
        UpgradeCommand::Resume(args) => pause_or_resume(session, &args.qualified(), false).await,
        UpgradeCommand::Abort(args) => {
            let args = args.qualified();
            let (objects, cluster) = (vec![args.object.clone()], args.cluster.clone());
            let namespace = NamespaceArg { namespace: None };
            let rollback_args = RollbackArgs { objects, namespace, cluster, dry_run: false };
            // Restore the image before resuming. Otherwise a running loop would start nodes with the new
            // image.
            let exit = rollback::rollback(session, rollback_args).await?;
            // Resume only a paused upgrade: on any other one, resuming would discard the rollback that was
            // just recorded.
            if exit == Exit::Done && is_paused(session, &args).await? {
                set_paused(session, &args, false).await?;
            }
            Ok(exit)
        }
    }
}

async fn plan(session: &Session, args: UpgradePlanArgs) -> Result<Exit> {
    let UpgradePlanArgs { object, namespace, plan } = args;
    let object = object.map(|object| namespace.qualified(&object));
    let (services, cluster) = session.services_and_cluster(&plan).await?;
    let Planned { plan, unreachable, .. } = observe_and_plan(&services, cluster.as_ref()).await?;
    let upgrades = plan.rollouts.iter().filter_map(|rollout| rollout.upgrade.as_ref());
    let upgrades: Vec<&PlannedUpgrade> = upgrades
        .filter(|upgrade| object.as_ref().is_none_or(|object| upgrade.rollout == *object))
        .filter(|upgrade| object.is_some() || namespace.selects(&upgrade.rollout))
        .collect();
    session.show(upgrades.as_slice(), output::upgrades)?;
    Ok(if unreachable { Exit::Unreachable } else { Exit::Done })
}

async fn history(session: &Session, args: UpgradeHistoryArgs) -> Result<Exit> {
    let UpgradeHistoryArgs { object, namespace, cluster } = args;
    let object = object.map(|object| namespace.qualified(&object));
    let (cluster, _) = connect(session, &cluster, object.as_slice()).await?;
    let mut past = plan::past_upgrades(&cluster.snapshot().await?, object.as_deref()).map_err(|reason| {
        let object = object.as_deref().unwrap_or("a DaemonSet");
        CliError::usage(format!("{object} in {}: {reason}", cluster.describe()))
    })?;
    past.retain(|past| object.is_some() || namespace.selects(&past.object));
    session.show(past.as_slice(), output::past_upgrades)?;
    Ok(Exit::Done)
}

async fn pause_or_resume(session: &Session, args: &UpgradeArgs, paused: bool) -> Result<Exit> {
    let outcome = set_paused(session, args, paused).await?;
    session.show(&outcome, |PauseOutcome { object, paused, forgiven }| {
        match (paused, forgiven.as_slice()) {
            (true, _) => format!("{object}: no further node is upgraded; upgrades under way are finished\n"),
            (false, []) => format!("{object}: the upgrade continues\n"),
            (false, forgiven) => format!("{object}: the upgrade continues, with {}\n", forgiven.join(", ")),
        }
    })?;
    Ok(Exit::Done)
}

async fn is_paused(session: &Session, UpgradeArgs { object, cluster, .. }: &UpgradeArgs) -> Result<bool> {
    let (cluster, _) = connect(session, cluster, std::slice::from_ref(object)).await?;
    Ok(plan::paused(&cluster.snapshot().await?).get(object).copied().unwrap_or_default())
}

async fn set_paused(session: &Session, args: &UpgradeArgs, paused: bool) -> Result<PauseOutcome> {
    let UpgradeArgs { object, cluster, .. } = args;
    let (cluster, _) = connect(session, cluster, std::slice::from_ref(object)).await?;
    let mut attempts = 1;
    loop {
        let changes = plan::pause(&cluster.snapshot().await?, object, paused)
            .map_err(|reason| CliError::usage(format!("{object} in {}: {reason}", cluster.describe())))?;
        match apply_all(cluster.as_ref(), &changes).await {
            Err(error) if error.is_conflict() && attempts < MAX_ATTEMPTS => attempts += 1,
            outcome => {
                outcome?;
                let node = |change: &Change| match change {
                    Change::Node(change) => Some(change.name.clone()),
                    _ => None,
                };
                let forgiven = changes.iter().filter_map(node).collect();
                return Ok(PauseOutcome { object: object.clone(), paused, forgiven });
            }
        }
        wait_for_change(cluster.as_ref()).await;
    }
}
