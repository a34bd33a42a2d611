//! `farrier gc`: removes published images for kernels that no node has any more.

use clap::Args;
use farrier_engines::EngineChoice;
use farrier_gc::GcOptions;
use farrier_store::registry::RegistryLocation;

use super::{
    Exit, Result,
    args::{ClusterArg, EngineArg, RegistryArg},
    output,
    plan::PlanArgs,
    session::Session,
    settings::parse,
};

#[derive(Debug, Args)]
pub struct GcArgs {
    #[command(flatten)]
    pub registry: RegistryArg,
    #[command(flatten)]
    pub cluster: ClusterArg,
    /// Days that an image is kept after a node with its kernel was last seen
    #[arg(long, value_name = "DAYS", default_value_t = 30)]
    pub keep_days: u32,
    /// Also examine this image, whose definition no longer exists (repeatable)
    #[arg(long, value_name = "IMAGE")]
    pub image: Vec<String>,
    /// Delete the images instead of only listing them
    #[arg(long)]
    pub delete: bool,
    /// Continue even if no kernel was seen for --keep-days, which usually means a wrong clock, or that no
    /// `farrier run` records kernels in this registry
    #[arg(long)]
    pub accept_stale_record: bool,
}

/// Lists what would be deleted, or deletes it.
pub async fn gc(session: &Session, args: GcArgs) -> Result<Exit> {
    let GcArgs { registry, cluster, keep_days, image, delete, accept_stale_record } = args;
    let further = image.iter().map(|name| parse("--image", name)).collect::<Result<_, _>>()?;
    let plan = PlanArgs { registry, cluster, engine: EngineArg { engine: EngineChoice::Auto } };
    let (services, cluster) = session.services_and_cluster(&plan).await?;
    let options = GcOptions { keep_days, further, delete, accept_stale_record };
    let report = tokio::select! {
        // Poll the work first, so that the report of deletions is printed in any case.
        biased;
        report = farrier_gc::gc(&services, cluster.as_ref(), &options) => report?,
        () = session.stop.cancel.cancelled() => return Ok(Exit::Interrupted),
    };
    let is_remote = matches!(services.images.location, RegistryLocation::Remote { .. });
    session.show(&report, |report| output::gc::text(report, is_remote))?;
    if let Some(refused) = &report.refused {
        let hint = report.hint.as_ref().map(|hint| format!("\nhint: {hint}")).unwrap_or_default();
        output::message(&format!("error: {refused}{hint}"));
    }
    Ok(if report.failed() { Exit::Failed } else { Exit::Done })
}
