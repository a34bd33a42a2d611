//! `farrier collect`: the headers that a host's own driver exposes, as one archive.

use serde::Serialize;
use tokio_util::sync::CancellationToken;

use super::{
    CliError, Exit,
    args::{CollectArgs, Global, OutputForm},
    printer, settings,
};
use crate::headers::{self, Collected, Collection};

/// What was collected, for `-o json`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Told {
    path: String,
    digest: String,
    size: u64,
    symbol_tables: Vec<String>,
    left_out: Vec<String>,
}

/// Writes the archive.
pub async fn collect(
    global: &Global,
    args: CollectArgs,
    cancel: CancellationToken,
) -> Result<Exit, CliError> {
    let CollectArgs { paths, root, kernel, to } = args;
    let release = settings::parse("kernel release", &kernel)?;
    let collected = tokio::select! {
        () = cancel.cancelled() => return Ok(Exit::Interrupted),
        collected = headers::collect(Collection { root, release, paths }, to.clone()) => collected?,
    };
    let Collected { digest, size, symvers, left_out } = collected;
    let texts =
        |paths: Vec<std::path::PathBuf>| paths.iter().map(|path| path.display().to_string()).collect();
    let told = Told {
        path: to.display().to_string(),
        digest: digest.to_string(),
        size,
        symbol_tables: texts(symvers),
        left_out: texts(left_out),
    };
    for link in &told.left_out {
        printer::message(&format!("note: {link} leads nowhere on the host, and was left out"));
    }
    let text = match global.output {
        OutputForm::Json => printer::json(&told)?,
        OutputForm::Table => {
            format!("{} ({} bytes, {})\n{}", told.path, told.size, told.digest, told.symbol_tables.join("\n"))
        }
    };
    printer::result(&text)?;
    Ok(Exit::Done)
}
