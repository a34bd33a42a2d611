//! Output of `farrier gc` as text.

use std::collections::BTreeMap;

use farrier_core::plan::KeepReason;
use farrier_gc::{GcReport, GcState};
use indicatif::BinaryBytes;

use super::indented_table;

/// Formats the deleted images, the failures, and the kept images. A remote registry needs a hint, because it frees
/// no space by itself.
pub fn text(report: &GcReport, remote: bool) -> String {
    let mut lines = Vec::new();
    if !report.images.is_empty() {
        let header = ["IMAGE", "KERNEL", "LAST SEEN", "FREES", "STATE"];
        let rows = report.images.iter().map(|image| {
            let pruned = &image.pruned;
            let tags: Vec<String> =
                pruned.tags.iter().map(|tag| format!("{}:{tag}", pruned.repository)).collect();
            let kernels: Vec<String> = pruned.gone.keys().cloned().collect();
            let seen: Vec<String> = pruned.gone.values().map(ToString::to_string).collect();
            let frees = BinaryBytes(pruned.bytes).to_string();
            [tags.join("\n"), kernels.join("\n"), seen.join("\n"), frees, state(&image.state).to_owned()]
        });
        lines.push(indented_table(header, rows).trim_end().to_owned());
        lines.extend(report.images.iter().filter_map(|image| failure(report, &image.state)));
    }
    for leftover in &report.leftovers {
        let subject = format!("{}@{}", leftover.repository, leftover.subject);
        let state = state(&leftover.state);
        lines.push(format!("referrer of {subject}, which no longer exists: {state}"));
        lines.extend(failure(report, &leftover.state));
    }
    lines.push(summary(report));
    lines.push(kept(report));
    for stored in &report.stored {
        let (artifacts, kind, size) = (&stored.artifacts, &stored.kind, BinaryBytes(stored.bytes));
        lines.push(format!(
            "not examined: {artifacts} in {kind} ({size}), which may be the last artifacts of a kernel"
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
        GcState::WouldDelete => "would be deleted",
        GcState::Deleted => "deleted",
        GcState::Failed { .. } => "failed",
        GcState::Untouched => "not tried",
    }
}

/// Formats a failure as a separate line. The error that stopped the whole command is printed at the end.
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
        "{} would be deleted with --delete: {} that no other image references",
        counted(images.len(), "image"),
        BinaryBytes(*bytes)
    )
}

fn counted_days(days: u32) -> String {
    counted(usize::try_from(days).unwrap_or(usize::MAX), "day")
}

fn counted(count: usize, noun: &str) -> String {
    if count == 1 { format!("1 {noun}") } else { format!("{count} {noun}s") }
}

/// Formats the number of kept images for each reason. The JSON form names the images.
fn kept(report: &GcReport) -> String {
    let mut reasons: BTreeMap<&str, usize> = BTreeMap::new();
    for image in &report.kept {
        let reason = match &image.why {
            KeepReason::Runs { .. } => "for kernels that nodes run",
            KeepReason::Announced { .. } => "for announced kernels",
            KeepReason::Left { .. } => "for kernels that unions still hold",
            KeepReason::Recent { .. } => "for recently seen kernels",
            KeepReason::Named { .. } => "named in the cluster",
            KeepReason::PartOf { .. } => "part of kept images",
            KeepReason::BaseOf { .. } => "bases of kept images",
            KeepReason::NotOurs => "not farrier's",
        };
        *reasons.entry(reason).or_default() += 1;
    }
    let reasons: Vec<String> = reasons.iter().map(|(reason, count)| format!("{count} {reason}")).collect();
    let reasons = if reasons.is_empty() { String::new() } else { format!(": {}", reasons.join(", ")) };
    format!("{} kept{reasons}", counted(report.kept.len(), "image"))
}
