//! `farrier render`: the Dockerfile of one image for one kernel.

use tokio_util::sync::CancellationToken;

use super::{
    CliError, Exit,
    args::{Global, RenderArgs},
    printer, session, settings,
};
use crate::engine::EngineChoice;

/// Prints the Dockerfile.
pub async fn render(global: &Global, args: &RenderArgs) -> Result<Exit, CliError> {
    let target = settings::target(&args.target.kernel, &args.target.platform)?;
    let name = settings::parse("image", &args.image)?;
    let controller = session::controller(global, None, EngineChoice::Auto, CancellationToken::new())?;
    printer::result(&controller.dockerfile(&name, &target).await?)?;
    Ok(Exit::Done)
}
