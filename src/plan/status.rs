//! Pure: how the matrix of images and kernels stands.

use serde::Serialize;

use super::{Cell, Plan, text};
use crate::{image::Digest, kmod::Verdict};

/// Where one image for one kernel stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// In the registry, with these inputs.
    Published,
    /// To be built by the next pass.
    Missing,
    /// Failed with these inputs; not tried again until one changes.
    Failed,
    /// The tag holds an image of other inputs.
    Conflict,
    /// The registry did not say.
    Unknown,
    /// Nothing can be built, for the reason given.
    Skipped,
}

impl Phase {
    /// The phase in lower case.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Published => "published",
            Self::Missing => "missing",
            Self::Failed => "failed",
            Self::Conflict => "conflict",
            Self::Unknown => "unknown",
            Self::Skipped => "skipped",
        }
    }
}

/// One row of the matrix.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct StatusRow {
    /// The driver image.
    pub image: String,
    /// The kernel target.
    pub kernel: String,
    /// How many nodes run it.
    pub nodes: usize,
    /// Where it stands.
    pub phase: Phase,
    /// What the check said, where the image is published.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verdict: Option<Verdict>,
    /// The name by tag; empty where there is none.
    pub reference: String,
    /// The digest, where it is published.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "text::optional")]
    pub digest: Option<Digest>,
    /// Why it is not published.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
}

/// The matrix, ordered by image and kernel.
pub fn status(plan: &Plan) -> Vec<StatusRow> {
    let Plan {
        builds,
        tags: _,
        up_to_date,
        conflicts,
        held_back,
        unknown,
        skipped,
        left_alone: _,
        unions: _,
        rollouts: _,
    } = plan;
    let row = |cell: &Cell, phase, reason: String| StatusRow {
        image: cell.image.to_string(),
        kernel: cell.target.to_string(),
        nodes: cell.nodes.len(),
        phase,
        verdict: None,
        reference: cell.reference.to_string(),
        digest: None,
        reason,
    };
    let published = up_to_date.iter().map(|found| StatusRow {
        verdict: found.verdict,
        digest: Some(found.digest.clone()),
        ..row(&found.cell, Phase::Published, String::new())
    });
    let mut rows: Vec<StatusRow> = published
        .chain(builds.iter().map(|build| row(&build.cell, Phase::Missing, build.why.to_string())))
        .chain(held_back.iter().map(|held| row(&held.cell, Phase::Failed, held.message.clone())))
        .chain(
            conflicts.iter().map(|conflict| row(&conflict.cell, Phase::Conflict, conflict.remedy.to_owned())),
        )
        .chain(unknown.iter().map(|unknown| row(&unknown.cell, Phase::Unknown, unknown.message.clone())))
        .chain(skipped.iter().map(|skipped| StatusRow {
            image: skipped.image.to_string(),
            kernel: skipped.target.to_string(),
            nodes: skipped.nodes,
            phase: Phase::Skipped,
            verdict: None,
            reference: String::new(),
            digest: None,
            reason: skipped.why.to_string(),
        }))
        .collect();
    rows.sort();
    rows
}

/// The matrix as people read it.
pub fn status_table(rows: &[StatusRow]) -> String {
    if rows.is_empty() {
        return "no node calls for a driver image\n".to_owned();
    }
    let mut table = comfy_table::Table::new();
    table.load_style(comfy_table::presets::NOTHING).set_header([
        "IMAGE",
        "KERNEL",
        "NODES",
        "PHASE",
        "CHECK",
        "REFERENCE",
    ]);
    for StatusRow { image, kernel, nodes, phase, verdict, reference, digest, reason } in rows {
        let check = verdict.map_or("", Verdict::as_str);
        let last = match (digest, reason.as_str()) {
            (Some(digest), _) => format!("{reference}\n@{digest}"),
            (None, reason) => [reference.as_str(), reason].join("\n").trim().to_owned(),
        };
        table.add_row([image, kernel, &nodes.to_string(), phase.as_str(), check, &last]);
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    let mut text = table.trim_fmt();
    text.push('\n');
    text
}
