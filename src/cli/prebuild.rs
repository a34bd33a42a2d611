//! `farrier prebuild`: every image for one kernel, before a node runs it.

use std::collections::BTreeSet;

use serde::Serialize;
use tokio_util::sync::CancellationToken;

use super::{
    CliError, Exit,
    args::{Global, OutputForm, PrebuildArgs},
    printer, session, settings,
};
use crate::{
    controller::{BuildOutcome, Controller, TargetError, chain},
    image::ImageName,
    kernel::KernelTarget,
    plan::{Platform, called_for},
};

/// What became of one image.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Row {
    image: String,
    /// `built`, `reused`, `up-to-date`, `skipped` or `failed`.
    outcome: &'static str,
    /// The image by digest, where it is published.
    #[serde(skip_serializing_if = "Option::is_none")]
    pinned: Option<String>,
    /// What the check said, where it was made now.
    #[serde(skip_serializing_if = "Option::is_none")]
    verdict: Option<&'static str>,
    /// Why it failed or was skipped, and what to do.
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<String>,
}

/// Builds and publishes, one image after the other; one that fails does not stop the others.
pub async fn prebuild(
    global: &Global,
    args: &PrebuildArgs,
    cancel: CancellationToken,
) -> Result<Exit, CliError> {
    let target = settings::target(&args.target.kernel, &args.target.platform)?;
    let controller =
        session::controller(global, Some(&args.registry.registry), args.engine.engine, cancel.clone())?;
    let images = images(args, &controller, &target, cancel.clone()).await?;
    let mut exit = Exit::Done;
    let mut rows = Vec::new();
    for image in &images {
        let outcome = controller.build_one(image, &target, true, false).await;
        if cancel.is_cancelled() {
            return Ok(Exit::Interrupted);
        }
        rows.push(match outcome {
            Ok(outcome) => published(image, &outcome),
            // Images are not all meant for all kernels; one that was asked for by name is missed.
            Err(TargetError::Skipped { reason, .. }) if reason.is_finding() && args.image.is_empty() => {
                row(image, "skipped", Some(reason.to_string()))
            }
            Err(error) => {
                let hint = error.hint().map(|hint| format!("\n{hint}")).unwrap_or_default();
                let failed = row(image, "failed", Some(format!("{}{hint}", chain(&error))));
                exit = exit.max(CliError::from(error).exit());
                failed
            }
        });
    }
    printer::result(&match global.output {
        OutputForm::Json => printer::json(&rows)?,
        OutputForm::Table => table(&rows),
    })?;
    Ok(exit)
}

/// The named images; else those that nodes of the kernel's platform call for; else all.
async fn images(
    args: &PrebuildArgs,
    controller: &Controller,
    target: &KernelTarget,
    cancel: CancellationToken,
) -> Result<BTreeSet<ImageName>, CliError> {
    let known = &controller.definitions.images;
    let mut images = BTreeSet::new();
    for name in &args.image {
        let name: ImageName = settings::parse("--image", name)?;
        if !known.contains_key(&name) {
            return Err(TargetError::NoImage {
                name: name.to_string(),
                known: known.keys().map(ToString::to_string).collect(),
            }
            .into());
        }
        images.insert(name);
    }
    let Some(cluster) = args.cluster.as_deref().filter(|_| images.is_empty()) else {
        return Ok(if images.is_empty() { known.keys().cloned().collect() } else { images });
    };
    let snapshot = session::cluster(cluster)?.open(&controller.definitions, cancel).await?.snapshot().await?;
    let KernelTarget { os, os_version, release: _, arch } = target.clone();
    let platform = Platform { os, os_version, arch };
    let images = called_for(&controller.definitions, &snapshot).remove(&platform).unwrap_or_default();
    if images.is_empty() {
        let Platform { os, os_version, arch } = &platform;
        printer::message(&format!("no node of {os} {os_version}, {arch}, calls for a driver image"));
    }
    Ok(images)
}

fn row(image: &ImageName, outcome: &'static str, message: Option<String>) -> Row {
    Row { image: image.to_string(), outcome, pinned: None, verdict: None, message }
}

fn published(image: &ImageName, outcome: &BuildOutcome) -> Row {
    let BuildOutcome { cell, digest, built } = outcome;
    let how = match built {
        None => "up-to-date",
        Some(built) if built.reused_from.is_some() => "reused",
        Some(_) => "built",
    };
    Row {
        pinned: Some(format!("{}@{digest}", cell.reference.repository)),
        verdict: built.as_ref().map(|built| built.report.verdict.as_str()),
        ..row(image, how, None)
    }
}

fn table(rows: &[Row]) -> String {
    let mut table = printer::table(["IMAGE", "OUTCOME", "CHECK", "REFERENCE"]);
    for Row { image, outcome, pinned, verdict, message } in rows {
        let last = pinned.as_deref().or(message.as_deref()).unwrap_or_default();
        table.add_row([image.as_str(), outcome, verdict.unwrap_or_default(), last]);
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table.lines().flat_map(|line| [line.trim_end().to_owned(), "\n".to_owned()]).collect()
}
