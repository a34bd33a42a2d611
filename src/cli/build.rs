//! `farrier build`: one image for one kernel.

use serde::Serialize;
use tokio_util::sync::CancellationToken;

use super::{
    CliError, Exit,
    args::{BuildArgs, Global, OutputForm},
    printer, session, settings,
};
use crate::{controller::BuildOutcome, kmod};

/// What `farrier build -o json` prints.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct BuildResult<'a> {
    /// The image's name by tag.
    reference: String,
    /// The image by digest, once it is published.
    #[serde(skip_serializing_if = "Option::is_none")]
    pinned: Option<String>,
    digest: String,
    input_hash: String,
    /// `built` or `up-to-date`.
    outcome: &'a str,
    pushed_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    check: Option<&'a kmod::CheckReport>,
}

/// Builds and checks the image and, where asked, publishes it.
pub async fn build(global: &Global, args: &BuildArgs, cancel: CancellationToken) -> Result<Exit, CliError> {
    let target = settings::target(&args.target)?;
    let name = settings::parse("image", &args.image)?;
    let location = args.registry.as_deref().filter(|_| args.push);
    let controller = session::controller(global, location, args.engine.engine, cancel.clone())?;
    let outcome = controller.build_one(&name, &target, args.push, args.force).await;
    if cancel.is_cancelled() {
        return Ok(Exit::Interrupted);
    }
    let BuildOutcome { cell, digest, built } = outcome?;
    let reference = &cell.reference;
    let pinned = args.push.then(|| format!("{}@{digest}", reference.repository));
    let report = built.as_ref().map(|built| &built.report);
    let text = match global.output {
        OutputForm::Json => printer::json(&BuildResult {
            reference: reference.to_string(),
            pinned,
            digest: digest.to_string(),
            input_hash: cell.input_hash.to_string(),
            outcome: if built.is_some() { "built" } else { "up-to-date" },
            pushed_bytes: built.as_ref().map_or(0, |built| built.pushed_bytes),
            check: report,
        })?,
        OutputForm::Table => {
            let table = report.map(kmod::table).unwrap_or_default();
            let line = match (&pinned, &built) {
                (Some(pinned), Some(_)) => format!("{reference}\n{pinned}"),
                (Some(pinned), None) => format!("{reference} is up to date\n{pinned}"),
                (None, _) => format!("{reference} would be {digest} (not published: --push was not given)"),
            };
            format!("{table}{line}")
        }
    };
    printer::result(&text)?;
    Ok(Exit::Done)
}
