//! `farrier rotate`: signs with the site's key the artifacts that other trusted keys signed.

use std::path::PathBuf;

use clap::Args;
use farrier_builder::images::{self, RotatedArtifact, RotationOutcome};
use farrier_core::image::ImageName;
use farrier_engines::EngineChoice;

use super::{Exit, Result, args::RegistryArg, output, session::Session, settings::parse};

#[derive(Debug, Args)]
pub struct RotateArgs {
    #[command(flatten)]
    pub registry: RegistryArg,
    /// Public key, PEM, whose signatures are trusted (repeatable) [default: what policy.requireSigned in
    /// site.yaml asks for]
    #[arg(long, value_name = "PEM")]
    pub key: Vec<PathBuf>,
    /// Also examine this image, whose definition no longer exists (repeatable)
    #[arg(long, value_name = "IMAGE")]
    pub image: Vec<String>,
}

/// Signs the artifacts in the registry, and prints a line for each artifact.
pub async fn rotate(session: &Session, args: RotateArgs) -> Result<Exit> {
    let services = session.publisher(&args.registry, EngineChoice::Auto)?;
    let further: Vec<ImageName> =
        args.image.iter().map(|name| parse("--image", name)).collect::<Result<_, _>>()?;
    let accepted = images::verification_keys(&services, &args.key, 1).await?;
    let artifacts = images::rotate(&services, &accepted, &further).await?;
    session
        .show(&artifacts, |artifacts| output::table(["OUTCOME", "REFERENCE"], artifacts.iter().map(row)))?;
    Ok(Exit::Done)
}

fn row(RotatedArtifact { reference, outcome }: &RotatedArtifact) -> [String; 2] {
    let outcome = match outcome {
        RotationOutcome::Signed => "signed".to_owned(),
        RotationOutcome::Present => "signed already".to_owned(),
        RotationOutcome::Untrusted { why } => format!("not signed: {why}"),
    };
    [outcome, reference.clone()]
}
