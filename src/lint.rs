//! `farrier lint`: validates definitions without a network, a cluster or a registry.

use std::path::PathBuf;

use clap::Args;
use farrier_core::image::{Definitions, DriverImage, ImageName, Output, RuntimeSpec};
use farrier_definitions::{self as definitions, DefinitionError, DefinitionErrors};
use farrier_inputs::dkms_conf_warnings;
use serde::Serialize;

use super::{CliError, Exit, Result, session::Session, settings::existing_directory};

/// Files and directories of definitions.
const CONTENTS: [&str; 6] = ["images", "kernels", "templates", "patches", "announced", "site.yaml"];

#[derive(Debug, Args)]
pub struct LintArgs {
    /// Definitions directory [default: that of --definitions, or `definitions`]
    #[arg(value_name = "DIR")]
    pub directory: Option<PathBuf>,
}

/// JSON output of `farrier lint`.
#[derive(Serialize)]
struct LintReport {
    directory: PathBuf,
    mistakes: Vec<DefinitionError>,
    /// Probable mistakes in valid definitions.
    warnings: Vec<String>,
}

/// Prints every mistake and warning. Exits with 1 if there is a mistake.
pub async fn lint(session: &Session, args: LintArgs) -> Result<Exit> {
    let directory = args.directory.or_else(|| session.global.definitions.clone());
    let directory = directory.unwrap_or_else(|| PathBuf::from("definitions"));
    let existing = existing_directory(&directory)?;
    if !CONTENTS.iter().any(|name| directory.join(name).exists()) {
        let message = format!(
            "{}: has no definitions: it contains none of {}",
            directory.display(),
            CONTENTS.join(", ")
        );
        return Err(CliError::hinted(
            message,
            "name the directory that `farrier init` created: farrier lint DIR",
        ));
    }
    let (mistakes, warnings) = match definitions::load(Some(&existing)) {
        Ok(definitions) => (Vec::new(), warnings(&definitions).await?),
        Err(DefinitionErrors(mistakes)) => (mistakes, Vec::new()),
    };
    let exit = if mistakes.is_empty() { Exit::Done } else { Exit::Failed };
    session.show(&LintReport { directory, mistakes, warnings }, text)?;
    Ok(exit)
}

async fn warnings(definitions: &Definitions) -> Result<Vec<String>> {
    let Definitions { root, images, source_positions, .. } = definitions;
    let mut warnings = definitions::unused_files(root);
    for ((_, path), position) in source_positions {
        if !root.join(path).exists() {
            let path = path.display();
            warnings.push(format!(
                "{position}: {path} does not exist; correct it, unless the registry has a copy for builds"
            ));
        }
    }
    for (name, image) in images {
        let dkms = dkms_conf_warnings(root, &image.spec).await?;
        warnings.extend(dkms.into_iter().map(|warning| format!("image {name}: {warning}")));
        warnings.extend(missing_command_warning(name, image));
    }
    Ok(warnings)
}

/// Returns a warning about an image with nothing to run.
fn missing_command_warning(name: &ImageName, image: &DriverImage) -> Option<String> {
    let RuntimeSpec { base, entrypoint, env: _ } = &image.spec.runtime;
    let is_empty = base.is_none() && entrypoint.is_empty() && image.spec.output == Output::Payload;
    is_empty.then(|| {
        format!(
            "image {name}: without `runtime` the image has neither an entrypoint nor programs; set runtime.base and \
             runtime.entrypoint, unless another tool reads files from the image and runs nothing in it"
        )
    })
}

fn text(report: &LintReport) -> String {
    let LintReport { directory, mistakes, warnings } = report;
    let mut lines: Vec<String> = warnings.iter().map(|warning| format!("warning: {warning}")).collect();
    if mistakes.is_empty() {
        let count = match warnings.len() {
            0 => String::new(),
            1 => ", 1 warning".to_owned(),
            count => format!(", {count} warnings"),
        };
        lines.push(format!("{}: no mistakes{count}", directory.display()));
    } else {
        lines.push(DefinitionErrors(mistakes.clone()).render());
    }
    lines.join("\n")
}
