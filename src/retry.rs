//! `farrier retry`: retries a failed build whose inputs have not changed.

use clap::Args;
use farrier_builder::forget_failure;
use farrier_controller::{Planned, observe_and_plan};
use farrier_core::{
    image::ImageName,
    plan::{Outcome, PlannedCell},
};

use super::{CliError, Exit, args::KernelArg, output, plan::PlanArgs, session::Session, settings::parse};

#[derive(Debug, Args)]
pub struct RetryArgs {
    /// Name of the driver image
    pub image: String,
    #[command(flatten)]
    pub kernel: KernelArg,
    #[command(flatten)]
    pub plan: PlanArgs,
}

/// Removes the records of failed builds from this machine's cache, so that the controller that uses this cache builds again in
/// its next reconcile. farrier retries transient failures without this command.
pub async fn retry(session: &Session, args: RetryArgs) -> Result<Exit, CliError> {
    let RetryArgs { image, kernel, plan } = args;
    let image: ImageName = parse("image", &image)?;
    let (services, cluster) = session.services_and_cluster(&plan).await?;
    let Planned { plan, .. } = observe_and_plan(&services, cluster.as_ref()).await?;
    let is_failed =
        |planned: &&PlannedCell| planned.image == image && matches!(planned.outcome, Outcome::Failed { .. });
    let mut failed: Vec<&PlannedCell> = plan.cells.iter().filter(is_failed).collect();
    let known = failed.iter().map(|planned| &planned.target.release);
    let release = kernel.or_only(&format!("builds of {image} failed"), known)?;
    failed.retain(|planned| planned.target.release == release);
    if failed.is_empty() {
        let message = format!("no build of {image} for {release} has failed");
        return Err(CliError::absent(
            message,
            format!("run `farrier why {image} --kernel {release}` to see its state"),
        ));
    }
    for cell in failed.iter().filter_map(|planned| planned.outcome.cell()) {
        forget_failure(&services.cache, cell.input_hash)?;
    }
    session.show(&failed, |failed| {
        let row = |planned: &&PlannedCell| {
            let PlannedCell { image, target, outcome, .. } = planned;
            [image.to_string(), target.to_string(), output::printable(&outcome.absence_reason())]
        };
        let table = output::table(["CLEARED", "KERNEL", "FAILED BECAUSE"], failed.iter().map(row));
        format!(
            "{table}\n`farrier run` builds it in its next reconcile; to build it now, `farrier run --once`"
        )
    })?;
    Ok(Exit::Done)
}
