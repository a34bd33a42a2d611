//! `farrier mirror`: puts what images are made from into the registry.

use std::collections::BTreeSet;

use tokio_util::sync::CancellationToken;

use super::{
    CliError, Exit,
    args::{CarryArgs, Global, MirrorArgs, OutputForm},
    printer, session, settings,
};
use crate::{
    controller::{Carried, CarryReport, Carrying, Controller, Lacking, TargetError},
    engine::EngineChoice,
    image::ImageName,
};

/// Fills the store of the registry.
pub async fn mirror(global: &Global, args: &MirrorArgs, cancel: CancellationToken) -> Result<Exit, CliError> {
    let controller =
        session::controller(global, Some(&args.registry.registry), EngineChoice::Auto, cancel.clone())?;
    let carrying = carrying(&args.carry, &controller)?;
    let reports = controller.fill_store(&carrying, &mut tell).await;
    if cancel.is_cancelled() {
        return Ok(Exit::Interrupted);
    }
    printer::result(&match global.output {
        OutputForm::Json => printer::json(&reports)?,
        OutputForm::Table => table(&reports),
    })?;
    let failed: Vec<&Lacking> = reports
        .iter()
        .filter_map(|report| match report {
            CarryReport::Failed(lacking) => Some(lacking),
            CarryReport::Kept(_) => None,
        })
        .collect();
    Ok(if failed.is_empty() {
        Exit::Done
    } else if failed.iter().any(|lacking| lacking.unreachable) {
        Exit::Unreachable
    } else {
        Exit::Failed
    })
}

/// The images and kernels of the arguments.
pub(super) fn carrying(args: &CarryArgs, controller: &Controller) -> Result<Carrying, CliError> {
    let CarryArgs { kernel, platform, image } = args;
    let mut kernels = BTreeSet::new();
    for kernel in kernel {
        kernels.insert(settings::target(kernel, platform)?);
    }
    let known = &controller.definitions.images;
    let mut images: BTreeSet<ImageName> = BTreeSet::new();
    for name in image {
        let name: ImageName = settings::parse("--image", name)?;
        if !known.contains_key(&name) {
            let known = known.keys().map(ToString::to_string).collect();
            return Err(TargetError::NoImage { name: name.to_string(), known }.into());
        }
        images.insert(name);
    }
    if images.is_empty() {
        images.extend(known.keys().cloned());
    }
    Ok(Carrying { images, kernels })
}

/// One line as each is done.
fn tell(report: &CarryReport) {
    printer::message(&match report {
        CarryReport::Kept(Carried { what, content: _, new: true }) => {
            format!("{what}: put into the registry")
        }
        CarryReport::Kept(Carried { what, content: _, new: false }) => format!("{what}: there already"),
        CarryReport::Failed(Lacking { what, error, .. }) => format!("{what}: failed: {error}"),
    });
}

fn table(reports: &[CarryReport]) -> String {
    let mut table = printer::table(["WHAT", "OUTCOME", "REFERENCE"]);
    for report in reports {
        match report {
            CarryReport::Kept(Carried { what, content, new }) => {
                let tag = content.tag.as_ref().map(|tag| format!(":{tag}")).unwrap_or_default();
                let outcome = if *new { "stored" } else { "there already" };
                table.add_row([what, outcome, &format!("{}{tag}", content.repository)]);
            }
            CarryReport::Failed(Lacking { what, error, hint, .. }) => {
                let hint = hint.as_ref().map(|hint| format!("\n{hint}")).unwrap_or_default();
                table.add_row([what, "failed", &format!("{error}{hint}")]);
            }
        }
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table.lines().flat_map(|line| [line.trim_end().to_owned(), "\n".to_owned()]).collect()
}
