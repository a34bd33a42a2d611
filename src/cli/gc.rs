//! `farrier gc`: removes published images for kernels that are gone.

use std::collections::BTreeMap;

use indicatif::BinaryBytes;
use tokio_util::sync::CancellationToken;

use super::{
    CliError, Exit,
    args::{GcArgs, Global, OutputForm},
    printer, session,
    settings::parse,
};
use crate::{
    controller::{GcError, GcOptions, GcReport, GcState},
    engine::EngineChoice,
    plan::KeptWhy,
    registry::RegistryLocation,
};

impl From<GcError> for CliError {
    fn from(error: GcError) -> Self {
        match error {
            GcError::Cluster(error) => Self::Cluster(error),
            GcError::Target(error) => Self::Target(error),
        }
    }
}

/// Says what would go, or deletes it.
pub async fn gc(global: &Global, args: &GcArgs, cancel: CancellationToken) -> Result<Exit, CliError> {
    let GcArgs { registry, cluster, keep_days, image, delete } = args;
    let further = image.iter().map(|name| parse("--image", name)).collect::<Result<_, _>>()?;
    let cluster = session::cluster(&cluster.cluster)?;
    let controller =
        session::controller(global, Some(&registry.registry), EngineChoice::Auto, cancel.clone())?;
    let cluster = cluster.open(&controller.definitions, cancel.clone()).await?;
    let options = GcOptions { keep_days: *keep_days, further, delete: *delete };
    let report = tokio::select! {
        biased;
        report = controller.gc(cluster.as_ref(), &options) => report?,
        () = cancel.cancelled() => return Ok(Exit::Interrupted),
    };
    printer::result(&match global.output {
        OutputForm::Table => text(&report, matches!(controller.location, RegistryLocation::Remote { .. })),
        OutputForm::Json => printer::json(&report)?,
    })?;
    if let Some(refused) = &report.refused {
        let hint = report.hint.as_ref().map(|hint| format!("\nhint: {hint}")).unwrap_or_default();
        printer::message(&format!("error: {refused}{hint}"));
    }
    Ok(if report.failed() { Exit::Failed } else { Exit::Done })
}

fn text(report: &GcReport, remote: bool) -> String {
    let mut lines = Vec::new();
    if !report.images.is_empty() {
        let mut table = printer::table(["IMAGE", "KERNEL", "LAST SEEN", "FREES", "STATE"]);
        for image in &report.images {
            let going = &image.going;
            let tags: Vec<String> =
                going.tags.iter().map(|tag| format!("{}:{tag}", going.repository)).collect();
            let column = |items: Vec<String>| items.join("\n");
            table.add_row([
                column(tags),
                column(going.gone.keys().cloned().collect()),
                column(going.gone.values().map(ToString::to_string).collect()),
                BinaryBytes(going.bytes).to_string(),
                state(&image.state).to_owned(),
            ]);
        }
        lines.push(table.to_string());
        lines.extend(report.images.iter().filter_map(|image| failure(report, &image.state)));
    }
    for leftover in &report.leftovers {
        lines.push(format!(
            "beside {}@{}, which is gone: {}",
            leftover.repository,
            leftover.subject,
            state(&leftover.state)
        ));
        lines.extend(failure(report, &leftover.state));
    }
    lines.push(summary(report));
    lines.push(kept(report));
    for stored in &report.stored {
        lines.push(format!(
            "not looked at: {} in {} ({}), which may be all that is left of a kernel",
            stored.artifacts,
            stored.kind,
            BinaryBytes(stored.bytes)
        ));
    }
    if report.delete && remote && report.images.iter().any(|image| image.state == GcState::Deleted) {
        lines.push(
            "the registry frees the space when it collects its own garbage (docker-registry garbage-collect)"
                .to_owned(),
        );
    }
    lines.join("\n")
}

fn state(state: &GcState) -> &'static str {
    match state {
        GcState::WouldGo => "would go",
        GcState::Deleted => "deleted",
        GcState::Failed { .. } => "failed",
        GcState::Untouched => "not tried",
    }
}

/// Why something is not deleted, on a line of its own; what stopped everything is said at the end.
fn failure(report: &GcReport, state: &GcState) -> Option<String> {
    match state {
        GcState::Failed { error } if report.refused.as_ref() != Some(error) => {
            Some(format!("failed: {error}"))
        }
        _ => None,
    }
}

fn summary(report: &GcReport) -> String {
    let GcReport { images, leftovers, bytes, keep_days, delete, .. } = report;
    let deleted = images.iter().filter(|image| image.state == GcState::Deleted).count();
    if *delete {
        return format!("{deleted} of {} deleted", counted(images.len(), "image"));
    }
    if images.is_empty() && leftovers.is_empty() {
        return format!("no image is for a kernel that no node has had for {}", counted_days(*keep_days));
    }
    format!(
        "{} would go with --delete: {} that no other image names",
        counted(images.len(), "image"),
        BinaryBytes(*bytes)
    )
}

fn counted_days(days: u32) -> String {
    counted(usize::try_from(days).unwrap_or(usize::MAX), "day")
}

fn counted(number: usize, what: &str) -> String {
    if number == 1 { format!("1 {what}") } else { format!("{number} {what}s") }
}

/// How many images stay for which reason; which of them is in the JSON form.
fn kept(report: &GcReport) -> String {
    let mut reasons: BTreeMap<&str, usize> = BTreeMap::new();
    for image in &report.kept {
        let reason = match &image.why {
            KeptWhy::Runs { .. } => "for kernels that nodes run",
            KeptWhy::Announced { .. } => "for announced kernels",
            KeptWhy::Left { .. } => "for kernels that unions still hold",
            KeptWhy::Recent { .. } => "for kernels that were seen since",
            KeptWhy::Named { .. } => "named in the cluster",
            KeptWhy::PartOf { .. } => "part of images that stay",
            KeptWhy::BaseOf { .. } => "bases of images that stay",
            KeptWhy::NotOurs => "not farrier's",
        };
        *reasons.entry(reason).or_default() += 1;
    }
    let reasons: Vec<String> = reasons.iter().map(|(reason, count)| format!("{count} {reason}")).collect();
    let reasons = if reasons.is_empty() { String::new() } else { format!(": {}", reasons.join(", ")) };
    format!("{} kept{reasons}", counted(report.kept.len(), "image"))
}
