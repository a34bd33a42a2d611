//! `farrier plan` and `farrier status`: what would be done, and how the matrix stands.

use tokio_util::sync::CancellationToken;

use super::{
    CliError, Exit,
    args::{Global, OutputForm, PlanArgs, PlanCommandArgs},
    printer, session,
};
use crate::{cluster::Cluster, controller::Controller, engine::EngineChoice, plan};

/// `farrier plan`.
pub async fn plan(
    global: &Global,
    args: &PlanCommandArgs,
    cancel: CancellationToken,
) -> Result<Exit, CliError> {
    let PlanCommandArgs { plan: args, matrix } = args;
    let cluster = session::cluster(&args.cluster.cluster)?;
    let controller =
        session::controller(global, Some(&args.registry.registry), EngineChoice::Auto, cancel.clone())?;
    let cluster = cluster.open(&controller.definitions, cancel).await?;
    let Some(form) = matrix else { return show(&controller, cluster.as_ref(), global.output).await };
    let planned = controller.plan(cluster.as_ref()).await?;
    // Jobs must not be made from half an answer.
    if planned.unreachable {
        printer::message(&plan::table(&planned.plan));
        return Ok(Exit::Unreachable);
    }
    let text = plan::ci_matrix(&planned.plan, (*form).into());
    // No lines are no empty line either.
    if !text.is_empty() {
        printer::result(&text)?;
    }
    Ok(Exit::Done)
}

/// Prints the plan; the same for `plan` and `run --dry-run`.
pub async fn show(
    controller: &Controller,
    cluster: &dyn Cluster,
    form: OutputForm,
) -> Result<Exit, CliError> {
    let planned = controller.plan(cluster).await?;
    printer::result(&match form {
        OutputForm::Table => plan::table(&planned.plan),
        OutputForm::Json => printer::json(&planned.plan)?,
    })?;
    Ok(if planned.unreachable { Exit::Unreachable } else { Exit::Done })
}

/// `farrier status`.
pub async fn status(global: &Global, args: &PlanArgs, cancel: CancellationToken) -> Result<Exit, CliError> {
    let cluster = session::cluster(&args.cluster.cluster)?;
    let controller =
        session::controller(global, Some(&args.registry.registry), EngineChoice::Auto, cancel.clone())?;
    let cluster = cluster.open(&controller.definitions, cancel).await?;
    let planned = controller.plan(cluster.as_ref()).await?;
    printer::result(&match global.output {
        OutputForm::Table => plan::status_table(&plan::status(&planned.plan)),
        OutputForm::Json => printer::json(&plan::status(&planned.plan))?,
    })?;
    Ok(if planned.unreachable { Exit::Unreachable } else { Exit::Done })
}
