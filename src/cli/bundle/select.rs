//! What the arguments of an export ask for, found in the registry.

use crate::{
    bundle::{BundleError, Content, ContentKind, contents::in_order},
    cli::{CliError, args::BundleExportArgs, mirror::carrying, printer, settings},
    controller::{Controller, Lacking},
    image::{ImageReference, Repository, Version},
    registry::RegistryLocation,
};

/// What a site must get; `None` where something of it is missing, which has been told then.
pub(super) async fn contents(
    controller: &Controller,
    args: &BundleExportArgs,
) -> Result<Option<Vec<Content>>, CliError> {
    let mut found = Vec::new();
    for reference in &args.reference {
        found.push(referred(controller, reference).await?);
    }
    if !args.carry.kernel.is_empty() {
        let (contents, lacking) = controller.site_contents(&carrying(&args.carry, controller)?).await;
        lacking.iter().for_each(tell);
        if !lacking.is_empty() && !args.incomplete {
            printer::message(
                "error: nothing was written, because the bundle would lack what is told above\n\
                 hint: put it into the registry, or pass --incomplete",
            );
            return Ok(None);
        }
        found.extend(contents);
    }
    if found.is_empty() {
        let reason = format!("{} has nothing of what was asked for", controller.location);
        return Err(BundleError::Nothing(reason).into());
    }
    Ok(Some(in_order(found)))
}

fn tell(Lacking { what, error, hint, unreachable: _ }: &Lacking) {
    let hint = hint.as_ref().map(|hint| format!(" ({hint})")).unwrap_or_default();
    printer::message(&format!("missing: {what}: {error}{hint}"));
}

/// A repository below the registry's prefix.
pub(super) fn repository(location: &RegistryLocation, name: &str) -> Result<Repository, CliError> {
    location.repository(name).map_err(|error| CliError::Usage(error.to_string()))
}

/// What stands under a name below the registry's prefix.
async fn referred(controller: &Controller, text: &str) -> Result<Content, CliError> {
    let ImageReference { repository: name, version } = settings::parse("--reference", text)?;
    let place = repository(&controller.location, name.as_str())?;
    let found = controller.registry.manifest(&place, &version).await?;
    let found = found.ok_or_else(|| BundleError::Absent(format!("{place}{version}")))?;
    let tag = match version {
        Version::Tag(tag) => Some(tag),
        Version::Digest(_) => None,
    };
    let repository = name.as_str().to_owned();
    Ok(Content { kind: ContentKind::Image, repository, tag, digest: found.digest })
}
