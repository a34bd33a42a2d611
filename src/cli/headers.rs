//! `farrier headers`: fetch a header set into the cache; list those that are there.

use serde::Serialize;
use tokio_util::sync::CancellationToken;

use super::{
    CliError, Exit,
    args::{Global, HeadersCommand, OutputForm, TargetArgs},
    printer,
    settings::{self, Settings},
};
use crate::{
    controller::TargetError,
    headers::{HeaderLookup, HeaderSet},
    kernel::{KernelTarget, match_family},
};

/// One header set, for `-o json`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Listed {
    release: String,
    arch: String,
    compiler: Option<String>,
    exported_symbols: Option<usize>,
    path: String,
    origin: Vec<String>,
}

impl From<&HeaderSet> for Listed {
    fn from(headers: &HeaderSet) -> Self {
        Self {
            release: headers.facts.release.to_string(),
            arch: headers.facts.arch.to_string(),
            compiler: headers.compiler.map(|compiler| compiler.to_string()),
            exported_symbols: headers.facts.symbols.as_ref().map(crate::kmod::SymbolTable::len),
            path: headers.root.display().to_string(),
            origin: headers.origin.clone(),
        }
    }
}

/// `farrier headers fetch` and `farrier headers list`.
pub async fn headers(
    global: &Global,
    command: &HeadersCommand,
    cancel: CancellationToken,
) -> Result<Exit, CliError> {
    let settings = Settings::resolve(global)?;
    match command {
        HeadersCommand::Fetch(args) => {
            let found = tokio::select! {
                () = cancel.cancelled() => return Ok(Exit::Interrupted),
                found = find(&settings, args) => found?,
            };
            show(&[Listed::from(&found)], global.output)?;
        }
        HeadersCommand::List => {
            let sets = settings.fetcher.header_sets().await?;
            show(&sets.iter().map(Listed::from).collect::<Vec<_>>(), global.output)?;
        }
    }
    Ok(Exit::Done)
}

/// The header set of the arguments' kernel, as a build would find it.
pub async fn find(settings: &Settings, args: &TargetArgs) -> Result<HeaderSet, CliError> {
    let target = settings::target(args)?;
    let family = match_family(&settings.definitions.families, &target).ok_or_else(|| no_family(&target))?;
    match settings.fetcher.header_set(&family.spec.headers, &settings.definitions.root, &target).await? {
        HeaderLookup::Found(headers) => Ok(*headers),
        HeaderLookup::Missing { looked_for, hint } => {
            Err(TargetError::HeadersMissing { looked_for, hint }.into())
        }
    }
}

/// No family: where headers would come from is not known.
pub fn no_family(target: &KernelTarget) -> CliError {
    CliError::Usage(format!(
        "no kernel family matches {target}; add one to kernels/ of the definitions directory"
    ))
}

fn show(sets: &[Listed], form: OutputForm) -> Result<(), CliError> {
    let text = match form {
        OutputForm::Json => printer::json(&sets)?,
        OutputForm::Table => {
            let mut table = printer::table(["KERNEL", "ARCH", "COMPILER", "SYMBOLS", "PATH"]);
            for Listed { release, arch, compiler, exported_symbols, path, origin: _ } in sets {
                let symbols = exported_symbols.map_or_else(|| "none".to_owned(), |count| count.to_string());
                table.add_row([release, arch, compiler.as_deref().unwrap_or("unknown"), &symbols, path]);
            }
            table.to_string()
        }
    };
    Ok(printer::result(&text)?)
}
