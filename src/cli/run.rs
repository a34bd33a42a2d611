//! `farrier run`: one pass, or the loop.

use std::sync::Arc;

use super::{
    CliError, Exit, Stop,
    args::{Global, OutputForm, RunArgs},
    printer, serve, session,
};
use crate::{
    cluster::Cluster,
    controller::{Controller, PassReport},
    plan::Interest,
};

/// Runs one pass, or the loop until a signal comes.
pub async fn run(global: &Global, args: &RunArgs, stop: Stop) -> Result<Exit, CliError> {
    let cancel = stop.cancel.clone();
    let cluster = session::cluster(&args.cluster.cluster)?;
    let mut controller =
        session::controller(global, Some(&args.registry.registry), args.engine.engine, cancel.clone())?;
    controller.limits = session::limits(&args.limits);
    let connection = cluster.connect(Interest::of(&controller.definitions), cancel.clone()).await?;
    let cluster = Arc::clone(&connection.cluster);
    if args.dry_run {
        return super::plan::show(&controller, cluster.as_ref(), global.output).await;
    }
    if !args.once {
        return serve::serve(global, args, controller, connection, &stop).await;
    }
    let outcome = pass(&controller, cluster.as_ref(), global.output).await;
    if cancel.is_cancelled() { Ok(Exit::Interrupted) } else { outcome }
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
