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
    /// `built`, `reused` or `up-to-date`.
    outcome: &'a str,
    /// For `reused`: where the payload was built.
    #[serde(skip_serializing_if = "Option::is_none")]
    reused_from: Option<Reused>,
    pushed_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    check: Option<&'a kmod::CheckReport>,
}

#[derive(Debug, Serialize)]
struct Reused {
    kernel: String,
    digest: String,
}

/// Builds and checks the image and, where asked, publishes it.
pub async fn build(global: &Global, args: &BuildArgs, cancel: CancellationToken) -> Result<Exit, CliError> {
    let target = settings::target(&args.target.kernel, &args.target.platform)?;
    let name = settings::parse("image", &args.image)?;
    let (location, engine) = (args.registry.as_deref(), args.engine.engine);
    let controller = if args.push {
        session::controller(global, location, engine, cancel.clone())?
    } else {
        session::reader(global, location, engine, cancel.clone())?
    };
    let outcome = controller.build_one(&name, &target, args.push, args.force).await;
    if cancel.is_cancelled() {
        return Ok(Exit::Interrupted);
    }
    let BuildOutcome { cell, digest, built } = outcome?;
    let reference = &cell.reference;
    let pinned = args.push.then(|| format!("{}@{digest}", reference.repository));
    let report = built.as_ref().map(|built| &built.report);
    let reused_from = built.as_ref().and_then(|built| built.reused_from.as_ref());
    let outcome = match (&built, reused_from) {
        (None, _) => "up-to-date",
        (Some(_), Some(_)) => "reused",
        (Some(_), None) => "built",
    };
    let text = match global.output {
        OutputForm::Json => printer::json(&BuildResult {
            reference: reference.to_string(),
            pinned,
            digest: digest.to_string(),
            input_hash: cell.input_hash.to_string(),
            outcome,
            reused_from: reused_from
                .map(|from| Reused { kernel: from.kernel.to_string(), digest: from.digest.to_string() }),
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
            let reused =
                reused_from.map(|from| format!("reused from kernel {}, not compiled\n", from.kernel));
            format!("{table}{}{line}", reused.unwrap_or_default())
        }
    };
    printer::result(&text)?;
    Ok(Exit::Done)
}
