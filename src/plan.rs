//! `farrier plan` and `farrier status`: show the planned work, and the state of the matrix.

#[cfg(feature = "dashboard")]
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use farrier_builder::{builds_elsewhere, services::BuildServices};
use farrier_cluster::Cluster;
use farrier_controller::{Planned, observe_and_plan};
use farrier_core::plan::{self, ClusterSnapshot, Plan, StatusItem};
use farrier_engines::EngineChoice;
use jiff::Timestamp;

#[cfg(feature = "dashboard")]
use super::page::write_pages;
use super::{
    CliError, Exit, Result,
    args::{ClusterArg, EngineArg, RegistryArg},
    output, secure_boot,
    session::Session,
};

#[derive(Debug, Args)]
pub struct PlanArgs {
    #[command(flatten)]
    pub registry: RegistryArg,
    #[command(flatten)]
    pub cluster: ClusterArg,
    #[command(flatten)]
    pub engine: EngineArg,
}

#[derive(Debug, Args)]
pub struct PlanCommandArgs {
    #[command(flatten)]
    pub plan: PlanArgs,
    /// Print only the list of builds, from which a CI system makes jobs of `farrier build --push`
    #[arg(long, value_enum, value_name = "FORM", conflicts_with = "output")]
    pub matrix: Option<MatrixForm>,
    /// Exit with 1 if something needs attention: a conflict, a failed build, an image that cannot be built, a skipped node
    /// or, without --matrix, a rollout on hold
    #[arg(long)]
    pub exit_code: bool,
}

#[derive(Debug, Args)]
pub struct StatusArgs {
    #[command(flatten)]
    pub plan: PlanArgs,
    /// Also write the status pages that `farrier run` serves to this directory, as files that need no server
    #[cfg(feature = "dashboard")]
    #[arg(long, value_name = "DIR")]
    pub html: Option<PathBuf>,
    /// Keep running, and print the status whenever it changes; looks on each change in the cluster and every
    /// ten seconds
    #[cfg_attr(feature = "dashboard", arg(short, long, conflicts_with = "html"))]
    #[cfg_attr(not(feature = "dashboard"), arg(short, long))]
    pub watch: bool,
}

/// Interval of `--watch` without a change in the cluster, because a registry sends no notifications.
const WATCH_INTERVAL: Duration = Duration::from_secs(10);
/// Delay of `--watch` after a change in the cluster, because changes come in bursts.
const BURST_DELAY: Duration = Duration::from_secs(1);

/// Formats of a list of builds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MatrixForm {
    /// {"include": [...]} for strategy.matrix of GitHub Actions
    Github,
    /// A job `build` with parallel: matrix, for a child pipeline of GitLab CI
    Gitlab,
    /// An array of strings for a Tekton matrix: image, kernel, OS, OS version, architecture, separated by
    /// spaces
    Tekton,
    /// Like tekton, with one string on each line
    Lines,
}

impl From<MatrixForm> for plan::MatrixForm {
    fn from(form: MatrixForm) -> Self {
        match form {
            MatrixForm::Github => Self::Github,
            MatrixForm::Gitlab => Self::Gitlab,
            MatrixForm::Tekton => Self::Tekton,
            MatrixForm::Lines => Self::Lines,
        }
    }
}

/// Runs `farrier plan`.
pub async fn plan(session: &Session, args: PlanCommandArgs) -> Result<Exit> {
    let PlanCommandArgs { mut plan, matrix, exit_code } = args;
    // The jobs run on the CI system's own machines, so this machine's limits do not apply, as for builds in a
    // cluster.
    if matrix.is_some() {
        plan.engine.engine = EngineChoice::Kubernetes;
    }
    let (services, cluster) = session.services_and_cluster(&plan).await?;
    let Planned { plan, snapshot, unreachable, .. } = observe_and_plan(&services, cluster.as_ref()).await?;
    warn_of_no_nodes(&snapshot, cluster.as_ref());
    // Jobs of a matrix build, and do not roll out.
    let needs_attention = if matrix.is_some() { plan.has_blocked_builds() } else { plan.needs_attention() };
    let attention = if exit_code && needs_attention { Exit::Failed } else { Exit::Done };
    let exit = if unreachable { Exit::Unreachable } else { attention };
    let Some(form) = matrix else {
        warn_of_secure_boot(&services, &plan).await;
        session.show(&plan, output::plan)?;
        return Ok(exit);
    };
    if unreachable || plan.matrix_hides_reasons() {
        output::message(&output::plan(&plan));
    }
    // Jobs must not be made from an incomplete plan.
    if unreachable {
        return Ok(exit);
    }
    let text = plan::ci_matrix(&plan, form.into());
    // An empty list prints no line at all.
    if !text.is_empty() {
        output::result(&text)?;
    }
    Ok(exit)
}

/// Warns of a cluster in which no image is needed, such as a directory without manifests of nodes.
fn warn_of_no_nodes(snapshot: &ClusterSnapshot, cluster: &dyn Cluster) {
    if snapshot.nodes.is_empty() {
        output::message(&format!("warning: {}: no node, so no image is needed", cluster.describe()));
    }
}

async fn warn_of_secure_boot(services: &BuildServices, plan: &Plan) {
    if let Some(warning) = secure_boot::warning(services, plan).await {
        output::message(&format!("warning: {warning}; {}", secure_boot::HINT));
    }
}

/// Prints the plan, for `run --dry-run`.
pub async fn show(session: &Session, services: &BuildServices, cluster: &dyn Cluster) -> Result<Exit> {
    let planned = observe_and_plan(services, cluster).await?;
    warn_of_no_nodes(&planned.snapshot, cluster);
    warn_of_secure_boot(services, &planned.plan).await;
    session.show(&planned.plan, output::plan)?;
    Ok(if planned.unreachable { Exit::Unreachable } else { Exit::Done })
}

/// Runs `farrier status`.
pub async fn status(session: &Session, args: StatusArgs) -> Result<Exit> {
    let (services, cluster) = session.services_and_cluster(&args.plan).await?;
    if args.watch {
        return watch_status(session, &services, cluster.as_ref()).await;
    }
    let planned = observe_and_plan(&services, cluster.as_ref()).await?;
    let (activity, now) = (builds_elsewhere(&services, &planned.plan).await, Timestamp::now());
    let rows = plan::status_at(&planned.plan, &activity, now);
    session.show(&StatusItem::all(&rows, &planned.plan), |_| output::status(&rows, &planned.plan))?;
    let unreachable = planned.unreachable;
    #[cfg(feature = "dashboard")]
    if let Some(directory) = args.html {
        write_pages(&directory, planned, activity, &services, cluster.describe(), now).await?;
    }
    Ok(if unreachable { Exit::Unreachable } else { Exit::Done })
}

/// Prints the matrix whenever it changes, until stopped. A plan that fails is reported and retried, because a
/// manifest may be half written.
async fn watch_status(session: &Session, services: &BuildServices, cluster: &dyn Cluster) -> Result<Exit> {
    let mut last_shown = None;
    loop {
        match observe_and_plan(services, cluster).await {
            Ok(Planned { plan, .. }) => {
                let activity = builds_elsewhere(services, &plan).await;
                let rows = plan::status_at(&plan, &activity, Timestamp::now());
                let text = output::status(&rows, &plan);
                let latest = (rows, text);
                if last_shown.as_ref() != Some(&latest) {
                    output::clear()?;
                    session.show(&StatusItem::all(&latest.0, &plan), |_| latest.1.clone())?;
                    last_shown = Some(latest);
                }
            }
            Err(error) if last_shown.is_none() => return Err(error.into()),
            Err(error) => output::message(&CliError::from(error).render()),
        }
        until_due(cluster).await;
    }
}

/// Waits for a change in the cluster, at most for the interval of `--watch`.
pub async fn until_due(cluster: &dyn Cluster) {
    tokio::select! {
        () = async { cluster.changed().await; tokio::time::sleep(BURST_DELAY).await } => {}
        () = tokio::time::sleep(WATCH_INTERVAL) => {}
    }
}
