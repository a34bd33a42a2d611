//! `farrier prebuild`: builds the images for one kernel before a node runs it.

use std::collections::BTreeSet;

use clap::Args;
use farrier_builder::{
    build_one,
    services::{BuildError, BuildServices},
};
use farrier_core::{
    image::ImageName,
    kernel::KernelTarget,
    plan::{Platform, SnapshotScope, WriteNamespaces, platforms_with_images},
};
use oci::error_chain;
use serde::Serialize;

use super::{
    CliError, Exit, Result,
    args::{EngineArg, RegistryArg, TargetArgs},
    build, env_vars as vars, output,
    session::Session,
    settings,
};

#[derive(Debug, Args)]
pub struct PrebuildArgs {
    #[command(flatten)]
    pub target: TargetArgs,
    /// Name of a driver image (repeatable) [default: with --cluster the images that its nodes call for, else
    /// all]
    #[arg(long, value_name = "IMAGE")]
    pub image: Vec<String>,
    #[command(flatten)]
    pub engine: EngineArg,
    #[command(flatten)]
    pub registry: RegistryArg,
    /// Without --image, build only the images that nodes of this cluster with the same operating system and
    /// architecture call for
    #[arg(long, env = vars::FARRIER_CLUSTER, value_name = "CLUSTER", hide_env_values = true)]
    pub cluster: Option<String>,
}

/// Result for one image.
#[serde_with::skip_serializing_none]
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Row {
    image: String,
    /// `built`, `reused`, `up-to-date`, `skipped` or `failed`.
    outcome: &'static str,
    /// Image reference by digest, if the image is published.
    pinned: Option<String>,
    /// Verdict of the check, if this run made it.
    verdict: Option<&'static str>,
    /// Reason for a failure or skip, with a hint.
    message: Option<String>,
}

/// Builds and publishes one image after the other. A failed image does not stop the others.
pub async fn prebuild(session: &Session, args: PrebuildArgs) -> Result<Exit> {
    let target = settings::target_of(&args.target)?;
    let services = session.publisher(&args.registry, args.engine.engine)?;
    let images = images(session, &args, &services, &target).await?;
    let mut exit = Exit::Done;
    let mut rows = Vec::new();
    for image in &images {
        let outcome = build_one(&services, image, &target, true, false).await;
        if session.stop.cancel.is_cancelled() {
            return Ok(Exit::Interrupted);
        }
        let mut row =
            Row { image: image.to_string(), outcome: "failed", pinned: None, verdict: None, message: None };
        match outcome {
            Ok(outcome) => {
                row.outcome = build::word(&outcome);
                row.pinned = Some(format!("{}@{}", outcome.cell.reference.repository, outcome.digest));
                row.verdict = outcome.built.map(|built| built.report.verdict.as_str());
            }
            // Skip an image that is not meant for this kernel, unless it was requested by name.
            Err(BuildError::Skipped(_, reason)) if reason.is_not_applicable() && args.image.is_empty() => {
                row.outcome = "skipped";
                row.message = Some(reason.to_string());
            }
            Err(error) => {
                let hint = error.hint().map(|hint| format!("\n{hint}")).unwrap_or_default();
                row.message = Some(format!("{}{hint}", error_chain(&error)));
                exit = exit.max(CliError::from(error).exit());
            }
        }
        rows.push(row);
    }
    session.show(&rows, |rows| {
        let header = ["IMAGE", "OUTCOME", "CHECK", "REFERENCE"];
        let cells = rows.iter().map(|Row { image, outcome, pinned, verdict, message }| {
            let detail = pinned.as_ref().or(message.as_ref()).cloned().unwrap_or_default();
            [image.clone(), (*outcome).to_owned(), verdict.unwrap_or_default().to_owned(), detail]
        });
        output::table(header, cells)
    })?;
    Ok(exit)
}

/// Returns the named images, else those that nodes of the kernel's platform need, else all.
async fn images(
    session: &Session,
    args: &PrebuildArgs,
    services: &BuildServices,
    target: &KernelTarget,
) -> Result<BTreeSet<ImageName>> {
    let definitions = &services.definitions;
    let selected = settings::images(&args.image, definitions)?;
    if !selected.is_empty() {
        return Ok(selected);
    }
    let Some(cluster) = &args.cluster else { return Ok(definitions.images.keys().cloned().collect()) };
    let connection =
        session.connect(cluster, WriteNamespaces::default(), SnapshotScope::of(definitions)).await?;
    let snapshot = connection.cluster.snapshot().await?;
    let KernelTarget { os, os_version, release: _, arch } = target.clone();
    let platform = Platform { os, os_version, arch };
    let mut platforms = platforms_with_images(definitions, &snapshot);
    let wanted = words(&platform);
    let Some(images) = platforms.remove(&platform) else {
        let existing: Vec<String> = platforms.keys().map(words).collect();
        let existing = if existing.is_empty() { "none".to_owned() } else { existing.join("; ") };
        return Err(CliError::hinted(
            format!("no node of the cluster is {wanted}; platforms of its nodes: {existing}"),
            "pass --os, --os-version and --arch of nodes, or choose the images with --image",
        ));
    };
    if images.is_empty() {
        output::message(&format!("no node of {wanted}, calls for a driver image"));
    }
    Ok(images)
}

fn words(Platform { os, os_version, arch }: &Platform) -> String {
    format!("{os} {os_version}, {arch}")
}
