//! `farrier mirror`: copies everything that images are made from into the registry.

use clap::Args;
use farrier_builder::parts::Parts;
use farrier_bundle::{MirrorReport, MirroredInput, MissingInput, Selection, mirror_inputs};
use farrier_engines::EngineChoice;

use super::{
    Exit, Result,
    args::{PlatformArgs, RegistryArg},
    output,
    session::Session,
    settings,
};

/// Selection of kernels and images.
#[derive(Debug, Args)]
pub struct CarryArgs {
    /// Kernel release, exactly as `uname -r` prints it (repeatable)
    #[arg(long, value_name = "RELEASE")]
    pub kernel: Vec<String>,
    #[command(flatten)]
    pub platform: PlatformArgs,
    /// Name of a driver image (repeatable), which includes the images that it needs [default: all]
    #[arg(long, value_name = "IMAGE")]
    pub image: Vec<String>,
}

#[derive(Debug, Args)]
#[command(group(clap::ArgGroup::new("kernels").args(["kernel"]).required(true)))]
pub struct MirrorArgs {
    #[command(flatten)]
    pub carry: CarryArgs,
    #[command(flatten)]
    pub registry: RegistryArg,
}

/// Fills the store of the registry.
pub async fn mirror(session: &Session, args: MirrorArgs) -> Result<Exit> {
    let parts = session.publisher(&args.registry, EngineChoice::Auto)?;
    let selection = selection(&args.carry, &parts)?;
    let reports = mirror_inputs(&parts, &selection, &mut tell).await;
    if session.stop.cancel.is_cancelled() {
        return Ok(Exit::Interrupted);
    }
    session
        .show(&reports, |reports| output::table(["WHAT", "OUTCOME", "REFERENCE"], reports.iter().map(row)))?;
    let exit = |report: &MirrorReport| match report {
        MirrorReport::Stored(_) => Exit::Done,
        MirrorReport::Failed(missing) if missing.unreachable => Exit::Unreachable,
        MirrorReport::Failed(_) => Exit::Failed,
    };
    Ok(reports.iter().map(exit).max().unwrap_or(Exit::Done))
}

/// Returns the selected images and kernels.
pub fn selection(args: &CarryArgs, parts: &Parts) -> Result<Selection> {
    let CarryArgs { kernel, platform, image } = args;
    let kernels = kernel.iter().map(|kernel| settings::target(kernel, platform)).collect::<Result<_, _>>()?;
    let mut images = settings::images(image, &parts.definitions)?;
    if images.is_empty() {
        images.extend(parts.definitions.images.keys().cloned());
    }
    Ok(Selection { images, kernels })
}

/// Prints a line for each finished input.
fn tell(report: &MirrorReport) {
    output::message(&match report {
        MirrorReport::Stored(MirroredInput { what, content: _, new: true }) => {
            format!("{what}: put into the registry")
        }
        MirrorReport::Stored(MirroredInput { what, content: _, new: false }) => {
            format!("{what}: there already")
        }
        MirrorReport::Failed(MissingInput { what, error, .. }) => format!("{what}: failed: {error}"),
    });
}

fn row(report: &MirrorReport) -> [String; 3] {
    match report {
        MirrorReport::Stored(MirroredInput { what, content, new }) => {
            let tag = content.tag.as_ref().map(|tag| format!(":{tag}")).unwrap_or_default();
            let outcome = if *new { "stored" } else { "there already" };
            [what.clone(), outcome.to_owned(), format!("{}{tag}", content.repository)]
        }
        MirrorReport::Failed(MissingInput { what, error, hint, .. }) => {
            let hint = hint.as_ref().map(|hint| format!("\n{hint}")).unwrap_or_default();
            [what.clone(), "failed".to_owned(), format!("{error}{hint}")]
        }
    }
}
