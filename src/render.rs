//! `farrier render`: prints the Dockerfile of one image for one kernel.

use clap::Args;
use farrier_builder as build;
use farrier_engines::EngineChoice;

use super::{Exit, Result, args::TargetArgs, output, session::Session, settings};

#[derive(Debug, Args)]
pub struct RenderArgs {
    /// Name of the driver image
    pub image: String,
    #[command(flatten)]
    pub target: TargetArgs,
}

/// Prints the Dockerfile.
pub async fn render(session: &Session, args: RenderArgs) -> Result<Exit> {
    let target = settings::target_of(&args.target)?;
    let name = settings::parse("image", &args.image)?;
    let services = session.services(None, EngineChoice::Auto)?;
    output::result(&build::dockerfile(&services, &name, &target).await?)?;
    Ok(Exit::Done)
}
