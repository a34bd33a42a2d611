//! Output of `farrier verify` as text.

use farrier_builder::images::VerifyReport;
use farrier_core::image::{ImageReference, Version};

use super::{printable, table};

/// Formats a line for each check, hints for failed checks, the verdict, and what the verdict does not cover.
/// For an index, formats each of its images first.
pub fn text(report: &VerifyReport, reference: &ImageReference) -> String {
    let mut text: String = report.platforms.iter().map(|image| found(image, &image.image)).collect();
    let named = match reference.version {
        Version::Tag(_) => format!("{reference}, {}", report.image),
        Version::Digest(_) => report.image.clone(),
    };
    text.push_str(&found(report, &named));
    text
}

fn found(report: &VerifyReport, named: &str) -> String {
    let mut text = table(
        ["CHECK", "RESULT", "FOUND"],
        report.checks.iter().map(|check| {
            [check.check.to_owned(), check.result.as_str().to_owned(), printable(&check.message)]
        }),
    );
    let mut said: Vec<&str> = Vec::new();
    for check in &report.checks {
        if let Some(hint) = check.hint.filter(|hint| !said.contains(hint)) {
            said.push(hint);
            text.extend(["hint (", check.check, "): ", hint, "\n"]);
        }
    }
    let verdict = match (report.verified, report.has_no_problems()) {
        (true, _) => "verified",
        (false, true) => "in order, but NOT verified",
        (false, false) => "NOT verified",
    };
    text.extend([named, ": ", verdict, "\n"]);
    for what in &report.not_looked_at {
        text.extend(["not looked at: ", what, "\n"]);
    }
    text
}
