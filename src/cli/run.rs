//! `farrier run`: passes, one or for ever.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::{
    CliError, Exit,
    args::{Global, OutputForm, RunArgs},
    printer, session,
};
use crate::{
    cluster::Cluster,
    controller::{Controller, PassReport},
};

/// Runs passes until one is enough or a signal comes.
pub async fn run(global: &Global, args: &RunArgs, cancel: CancellationToken) -> Result<Exit, CliError> {
    let cluster = session::cluster(&args.cluster.cluster)?;
    let controller =
        session::controller(global, Some(&args.registry.registry), args.engine.engine, cancel.clone())?;
    let cluster = cluster.open(&controller.definitions, cancel.clone()).await?;
    if args.dry_run {
        return super::plan::show(&controller, cluster.as_ref(), global.output).await;
    }
    loop {
        let outcome = pass(&controller, cluster.as_ref(), global.output).await;
        if cancel.is_cancelled() {
            return Ok(Exit::Interrupted);
        }
        if args.once {
            return outcome;
        }
        // A loop outlives the faults of one pass; a wrong definition has ended the command before.
        if let Err(error) = outcome {
            printer::message(&error.render());
        }
        tokio::select! {
            () = cancel.cancelled() => return Ok(Exit::Interrupted),
            () = tokio::time::sleep(Duration::from_secs(args.interval)) => {}
        }
    }
}

async fn pass(controller: &Controller, cluster: &dyn Cluster, form: OutputForm) -> Result<Exit, CliError> {
    let report = controller.pass(cluster).await?;
    printer::result(&match form {
        OutputForm::Table => report.text(),
        OutputForm::Json => printer::json(&report)?,
    })?;
    Ok(exit_of(&report))
}

/// 3 when an outside system was out of reach, 1 when some target failed, else 0.
fn exit_of(report: &PassReport) -> Exit {
    if report.unreachable {
        Exit::Unreachable
    } else if report.failed() {
        Exit::Failed
    } else {
        Exit::Done
    }
}
