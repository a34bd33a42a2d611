//! `farrier lint`: validates definitions without a network, a cluster or a registry.

use std::path::PathBuf;

use clap::Args;
use farrier_definitions::{self as definitions, DefinitionError, DefinitionErrors};
use serde::Serialize;

use super::{Exit, Result, session::Session, settings::existing_directory};

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
}

/// Prints every mistake. Exits with 1 if there is one.
pub fn lint(session: &Session, args: LintArgs) -> Result<Exit> {
    let directory = args.directory.or_else(|| session.global.definitions.clone());
    let directory = directory.unwrap_or_else(|| PathBuf::from("definitions"));
    let mistakes = match definitions::load(Some(&existing_directory(&directory)?)) {
        Ok(_) => Vec::new(),
        Err(DefinitionErrors(mistakes)) => mistakes,
    };
    let exit = if mistakes.is_empty() { Exit::Done } else { Exit::Failed };
    session.show(&LintReport { directory, mistakes }, text)?;
    Ok(exit)
}

fn text(report: &LintReport) -> String {
    let LintReport { directory, mistakes } = report;
    if mistakes.is_empty() {
        return format!("{}: no mistakes", directory.display());
    }
    DefinitionErrors(mistakes.clone()).render()
}
