//! `farrier verify`: verifies that a published image is complete, checked and signed, and states its
//! provenance.

use std::path::{Path, PathBuf};

use clap::Args;
use farrier_builder::{images, services::BuildServices};
use farrier_core::image::ImageReference;
use farrier_engines::EngineChoice;

use super::{CliError, Exit, Result, env_vars as vars, output, session::Session, settings};

#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// Image: host/repository:tag or @sha256:..., oci:PATH:NAME:TAG of a layout directory, or NAME:TAG with
    /// --registry
    #[arg(value_name = "IMAGE")]
    pub image: String,
    /// Trusted public key, PEM; one of the keys must have signed (repeatable) [default: what
    /// policy.requireSigned in site.yaml asks for, else the key of imageSigning]
    #[arg(long, value_name = "PEM")]
    pub key: Vec<PathBuf>,
    /// Number of different keys of --key that must have signed
    #[arg(long, value_name = "N", requires = "key", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..))]
    pub at_least: u8,
    /// Skip signatures; the image may then come from anyone
    #[arg(long, conflicts_with = "key")]
    pub insecure_no_signature: bool,
    /// Read every blob and verify its digest, instead of only checking that the blob exists
    #[arg(long)]
    pub deep: bool,
    /// Registry of the image: host[:port]/path, or oci:PATH for a layout directory
    #[arg(long, env = vars::FARRIER_REGISTRY, value_name = "LOCATION", hide_env_values = true)]
    pub registry: Option<String>,
}

/// Verifies the image and prints a line for each check.
pub async fn verify(session: &Session, args: VerifyArgs) -> Result<Exit> {
    let (services, reference) = open(session, &args.image, args.registry.as_deref())?;
    let signers = if args.insecure_no_signature {
        None
    } else {
        Some(images::verification_keys(&services, &args.key, args.at_least.into()).await?)
    };
    let report = images::verify(&services, &reference, signers.as_ref(), args.deep).await?;
    session.show(&report, |report| output::verify::text(report, &reference))?;
    Ok(if report.has_no_problems() { Exit::Done } else { Exit::Failed })
}

/// Returns the registry of an image, and the image's reference in it.
pub fn open(
    session: &Session,
    image: &str,
    registry: Option<&str>,
) -> Result<(BuildServices, ImageReference)> {
    let (layout, name) = split_layout(image)?;
    let mut reference: ImageReference = settings::parse("image", name)?;
    // An image with a host needs no --registry.
    let ImageReference { repository, .. } = &reference;
    let prefix = repository.host().and_then(|_| Some(repository.as_str().rsplit_once('/')?.0.to_owned()));
    let location = layout.as_deref().or(registry).or(prefix.as_deref());
    let services = session.services(location, EngineChoice::Auto)?;
    // With --registry, a name below its prefix is sufficient.
    if layout.is_none() && registry.is_some() && reference.repository.host().is_none() {
        let ImageReference { repository, version } = reference;
        let repository = services.images.location.repository(repository.as_str());
        let repository = repository.map_err(|error| CliError::usage(format!("image: {error}")))?;
        reference = ImageReference { repository, version };
    }
    Ok((services, reference))
}

/// Splits `oci:PATH:NAME` into the layout directory and the image's name. The path may contain colons.
fn split_layout(image: &str) -> Result<(Option<String>, &str)> {
    let Some(text) = image.strip_prefix("oci:") else { return Ok((None, image)) };
    let colons = text.match_indices(':').map(|(index, _)| index);
    let splits = colons.filter_map(|index| Some((text.get(..index)?, text.get(index + 1..)?)));
    let mut layouts = splits.filter(|(path, _)| Path::new(path).join("index.json").is_file());
    let (path, name) = layouts.next().ok_or_else(|| {
        CliError::usage(format!(
            "image: {image:?} is no image of a layout directory: give oci:PATH:NAME:TAG or oci:PATH:NAME@sha256:..., \
             where PATH holds an index.json"
        ))
    })?;
    Ok((Some(format!("oci:{path}")), name))
}
