//! `farrier retry`: a build that failed is tried again, though none of its inputs has changed.

use clap::Args;

use super::{CliError, Exit, output, plan::PlanArgs, session::Session, settings::parse};
use crate::{
    build::forget_failure,
    controller::Planned,
    image::ImageName,
    kernel::KernelRelease,
    plan::{Outcome, PlannedCell},
};

#[derive(Debug, Args)]
pub struct RetryArgs {
    /// The driver image's name
    pub image: String,
    /// Kernel release, exactly as `uname -r` prints it
    pub kernel: String,
    #[command(flatten)]
    pub plan: PlanArgs,
}

/// Forgets failures that this machine's cache remembers. The next pass of the farrier that has this cache builds again; what
/// fails for a reason that passes is tried again anyway.
pub async fn retry(session: &Session, args: RetryArgs) -> Result<Exit, CliError> {
    let RetryArgs { image, kernel, plan } = args;
    let (image, release): (ImageName, KernelRelease) = (parse("image", &image)?, parse("kernel", &kernel)?);
    let (parts, cluster) = session.of_cluster(&plan).await?;
    let Planned { plan, .. } = parts.plan(cluster.as_ref()).await?;
    let is_failed = |planned: &&PlannedCell| {
        let PlannedCell { image: name, target, outcome, .. } = planned;
        *name == image && target.release == release && matches!(outcome, Outcome::HeldBack { .. })
    };
    let failed: Vec<&PlannedCell> = plan.cells.iter().filter(is_failed).collect();
    if failed.is_empty() {
        let message = format!("no build of {image} for {release} has failed");
        return Err(CliError::hinted(message, format!("`farrier why {image} {release}` says how it stands")));
    }
    for cell in failed.iter().filter_map(|planned| planned.outcome.cell()) {
        forget_failure(&parts.cache, cell.input_hash)?;
    }
    session.show(&failed, |failed| {
        let row = |planned: &&PlannedCell| {
            let PlannedCell { image, target, outcome, .. } = planned;
            [image.to_string(), target.to_string(), output::printable(&outcome.why_not())]
        };
        output::table(["BUILT AGAIN", "KERNEL", "BECAUSE"], failed.iter().map(row))
    })?;
    Ok(Exit::Done)
}
