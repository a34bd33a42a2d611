//! `farrier plan` and `farrier status`: what would be done, and how the matrix stands.

use std::{path::PathBuf, sync::Arc, time::Duration};

use clap::{Args, ValueEnum};
use jiff::Timestamp;

use super::{
    CliError, Exit, Result,
    args::{ClusterArg, EngineArg, RegistryArg},
    output,
    session::Session,
};
use crate::{
    build::builds_elsewhere,
    cluster::Cluster,
    controller::Planned,
    engine::EngineChoice,
    page::{Facts, built, write_files},
    parts::Parts,
    plan,
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
    /// Print only what is to be built, as the list from which a CI system makes jobs of `farrier build --push`
    #[arg(long, value_enum, value_name = "FORM", conflicts_with = "output")]
    pub matrix: Option<MatrixForm>,
}

#[derive(Debug, Args)]
pub struct StatusArgs {
    #[command(flatten)]
    pub plan: PlanArgs,
    /// Also write the page that `farrier run` serves, as files of this directory that need no server
    #[arg(long, value_name = "DIR")]
    pub html: Option<PathBuf>,
    /// Go on, and print it again when the cluster changes and every ten seconds, as far as it is another one
    #[arg(long, conflicts_with = "html")]
    pub watch: bool,
}

/// How often `--watch` looks again, whatever changes: a registry tells nothing by itself.
const WATCH: Duration = Duration::from_secs(10);
/// And how long it waits at least: what changes comes in swarms.
const PAUSE: Duration = Duration::from_secs(1);

/// Forms of a list of builds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MatrixForm {
    /// {"include": [...]} for strategy.matrix of GitHub Actions
    Github,
    /// A job `build` with parallel: matrix, for a child pipeline of GitLab CI
    Gitlab,
    /// An array of strings for a Tekton matrix: image, kernel, OS, OS version, architecture with blanks between them
    Tekton,
    /// The same, one on each line
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

/// `farrier plan`.
pub async fn plan(session: &Session, args: PlanCommandArgs) -> Result<Exit> {
    let PlanCommandArgs { mut plan, matrix } = args;
    // A CI system has machines of its own for the jobs, as a cluster has.
    if matrix.is_some() {
        plan.engine.engine = EngineChoice::Kubernetes;
    }
    let (parts, cluster) = session.of_cluster(&plan).await?;
    let Some(form) = matrix else { return show(session, &parts, cluster.as_ref()).await };
    let planned = parts.plan(cluster.as_ref()).await?;
    // Its list has no place for what cannot be built, and why.
    if planned.unreachable || planned.plan.cells.iter().any(|cell| cell.outcome.is_unbuildable()) {
        output::message(&output::plan(&planned.plan));
    }
    // Jobs must not be made from half an answer.
    if planned.unreachable {
        return Ok(Exit::Unreachable);
    }
    let text = plan::ci_matrix(&planned.plan, form.into());
    // No lines are no empty line either.
    if !text.is_empty() {
        output::result(&text)?;
    }
    Ok(Exit::Done)
}

/// Prints the plan; the same for `plan` and `run --dry-run`.
pub async fn show(session: &Session, parts: &Parts, cluster: &dyn Cluster) -> Result<Exit> {
    let planned = parts.plan(cluster).await?;
    session.show(&planned.plan, output::plan)?;
    Ok(if planned.unreachable { Exit::Unreachable } else { Exit::Done })
}

/// `farrier status`.
pub async fn status(session: &Session, args: StatusArgs) -> Result<Exit> {
    let StatusArgs { plan, html, watch } = args;
    let (parts, cluster) = session.of_cluster(&plan).await?;
    if watch {
        return watch_status(session, &parts, cluster.as_ref()).await;
    }
    let Planned { plan, snapshot, unreachable, .. } = parts.plan(cluster.as_ref()).await?;
    let (activity, now) = (builds_elsewhere(&parts, &plan).await, Timestamp::now());
    session.show(&plan::status_at(&plan, &activity, now), |rows| output::status(rows, &plan))?;
    if let Some(directory) = html {
        let built = built(&parts.cache, &plan);
        let facts =
            Facts { activity, built, ..Facts::of(Arc::new(plan), &snapshot, &parts.definitions, now) };
        write_files(&directory, &facts, &parts).await?;
        output::message(&format!("the page is {}", directory.join("index.html").display()));
    }
    Ok(if unreachable { Exit::Unreachable } else { Exit::Done })
}

/// Prints the matrix whenever it is another one, until it is stopped. What cannot be planned any more is told, and tried again:
/// a manifest may be half written.
async fn watch_status(session: &Session, parts: &Parts, cluster: &dyn Cluster) -> Result<Exit> {
    let mut shown = None;
    loop {
        match parts.plan(cluster).await {
            Ok(Planned { plan, .. }) => {
                let activity = builds_elsewhere(parts, &plan).await;
                let rows = plan::status_at(&plan, &activity, Timestamp::now());
                if shown.as_ref() != Some(&rows) {
                    output::clear()?;
                    session.show(&rows, |rows| output::status(rows, &plan))?;
                    shown = Some(rows);
                }
            }
            Err(error) if shown.is_none() => return Err(error.into()),
            Err(error) => output::message(&CliError::from(error).render()),
        }
        until_due(cluster).await;
    }
}

/// Waits until it is to be looked again.
pub async fn until_due(cluster: &dyn Cluster) {
    tokio::select! {
        () = async { cluster.changed().await; tokio::time::sleep(PAUSE).await } => {}
        () = tokio::time::sleep(WATCH) => {}
    }
}
