//! `farrier verify`: is a published image whole, checked, signed, and is it told where it came from?

use std::path::Path;

use tokio_util::sync::CancellationToken;

use super::{
    CliError, Exit,
    args::{Global, OutputForm, VerifyArgs},
    printer, session, settings,
};
use crate::{
    controller::VerifyReport,
    engine::EngineChoice,
    image::{ImageReference, Version},
};

/// Checks the image and prints a line for each check.
pub async fn verify(global: &Global, args: &VerifyArgs, cancel: CancellationToken) -> Result<Exit, CliError> {
    let (layout, name) = place(&args.image)?;
    let location = layout.as_deref().or(args.registry.as_deref());
    let controller = session::controller(global, location, EngineChoice::Auto, cancel)?;
    let mut reference: ImageReference = settings::parse("image", name)?;
    // With --registry a name below its prefix is enough.
    if layout.is_none() && args.registry.is_some() && reference.repository.host().is_none() {
        let ImageReference { repository, version } = reference;
        let repository = controller.location.repository(repository.as_str());
        let repository = repository.map_err(|error| CliError::Usage(format!("image: {error}")))?;
        reference = ImageReference { repository, version };
    }
    let keys = controller.verification_keys(&args.key).await?;
    let report = controller.verify(&reference, &keys, args.deep).await?;
    printer::result(&match global.output {
        OutputForm::Json => printer::json(&report)?,
        OutputForm::Table => text(&report, &reference),
    })?;
    Ok(if report.verified { Exit::Done } else { Exit::Failed })
}

/// The layout directory of `oci:PATH:NAME`, and the image's name.
fn place(word: &str) -> Result<(Option<String>, &str), CliError> {
    let Some(rest) = word.strip_prefix("oci:") else { return Ok((None, word)) };
    let ends = rest.match_indices(':').map(|(at, _)| at);
    let split = ends.filter_map(|at| Some((rest.get(..at)?, rest.get(at + 1..)?)));
    let mut layouts = split.filter(|(path, _)| Path::new(path).join("index.json").is_file());
    let found = layouts.next().ok_or_else(|| {
        CliError::Usage(format!(
            "image: {word:?} is no image of a layout directory: give oci:PATH:NAME:TAG or oci:PATH:NAME@sha256:..., \
             where PATH holds an index.json"
        ))
    })?;
    Ok((Some(format!("oci:{}", found.0)), found.1))
}

fn text(report: &VerifyReport, reference: &ImageReference) -> String {
    let mut table = printer::table(["CHECK", "RESULT", "FOUND"]);
    for check in &report.checks {
        table.add_row([check.check, check.result.as_str(), &printable(&check.message)]);
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    let mut text: String =
        table.lines().flat_map(|line| [line.trim_end().to_owned(), "\n".to_owned()]).collect();
    let mut said: Vec<&str> = Vec::new();
    for check in &report.checks {
        if let Some(hint) = check.hint.filter(|hint| !said.contains(hint)) {
            said.push(hint);
            text.extend(["hint (", check.check, "): ", hint, "\n"]);
        }
    }
    let named = match reference.version {
        Version::Tag(_) => format!("{reference}, {}", report.image),
        Version::Digest(_) => report.image.clone(),
    };
    text.extend([named.as_str(), ": ", if report.verified { "verified" } else { "NOT verified" }, "\n"]);
    text
}

/// Texts of registries must not steer a terminal.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}
