//! Output of `farrier verify` as text.

use farrier_builder::images::VerifyReport;
use farrier_core::image::{ImageReference, Version};

use super::{printable, table};

/// Formats a line for each check, hints for failed checks, the verdict, and the parts that were not checked.
/// For an index, formats each of its images first.
pub fn text(report: &VerifyReport, reference: &ImageReference) -> String {
    let mut text: String = report.platforms.iter().map(|image| image_text(image, &image.image)).collect();
    let name = match reference.version {
        Version::Tag(_) => format!("{reference}, {}", report.image),
        Version::Digest(_) => report.image.clone(),
    };
    text.push_str(&image_text(report, &name));
    text
}

fn image_text(report: &VerifyReport, name: &str) -> String {
    let mut text = table(
        ["CHECK", "RESULT", "FOUND"],
        report.checks.iter().map(|check| {
            [check.check.to_owned(), check.result.as_str().to_owned(), printable(&check.message)]
        }),
    );
    let mut shown_hints: Vec<&str> = Vec::new();
    for check in &report.checks {
        if let Some(hint) = check.hint.filter(|hint| !shown_hints.contains(hint)) {
            shown_hints.push(hint);
            text.extend(["hint (", check.check, "): ", hint, "\n"]);
        }
    }
    let verdict = match (report.verified, report.has_no_problems()) {
        (true, _) => "verified",
        (false, true) => "no problem found, but NOT verified",
        (false, false) => "NOT verified",
    };
    text.extend([name, ": ", verdict, "\n"]);
    for subject in &report.not_looked_at {
        text.extend(["not checked: ", subject, "\n"]);
    }
    text
}
