//! `farrier check`: will these modules load on that kernel?

use std::path::Path;

use tokio_util::sync::CancellationToken;

use super::{
    CliError, Exit,
    args::{CheckArgs, Global, OutputForm},
    headers, printer,
    settings::{self, Settings},
};
use crate::{
    headers::read_header_set,
    kmod::{self, CheckRequest, KernelFacts, PayloadModule, Verdict},
    payload,
};

/// Checks the modules and prints the report. A refused module is exit code 1.
pub async fn check(global: &Global, args: &CheckArgs, cancel: CancellationToken) -> Result<Exit, CliError> {
    let facts = tokio::select! {
        () = cancel.cancelled() => return Ok(Exit::Interrupted),
        facts = facts(global, args) => facts?,
    };
    let mut modules = Vec::new();
    for path in &args.paths {
        modules.extend(read(path)?);
    }
    if modules.is_empty() {
        let paths: Vec<_> = args.paths.iter().map(|path| path.display().to_string()).collect();
        return Err(CliError::Usage(format!(
            "no module (.ko, .ko.gz, .ko.xz, .ko.zst) in {}",
            paths.join(", ")
        )));
    }
    let report = kmod::check(&CheckRequest {
        kernel: &facts,
        needs: &[],
        modules: &modules,
        required: &[],
        files: None,
    });
    printer::result(&match global.output {
        OutputForm::Table => kmod::table(&report),
        OutputForm::Json => printer::json(&report)?,
    })?;
    Ok(if report.verdict == Verdict::Refused { Exit::Failed } else { Exit::Done })
}

async fn facts(global: &Global, args: &CheckArgs) -> Result<KernelFacts, CliError> {
    if let Some(root) = &args.headers {
        let target = settings::target(&args.target)?;
        let (facts, _) = read_header_set(root, &target.release, target.arch)?;
        return Ok(facts);
    }
    let settings = Settings::resolve(global)?;
    Ok(headers::find(&settings, &args.target).await?.facts)
}

fn read(path: &Path) -> Result<Vec<PayloadModule>, CliError> {
    if path.is_dir() {
        Ok(payload::read_modules(path)?)
    } else {
        Ok(payload::read_module(path)?.into_iter().collect())
    }
}
