//! Pure: how the matrix of images and kernels stands.

use std::collections::{BTreeSet, HashMap};

use serde::Serialize;

use super::{Activity, AnnouncedBy, BuildActivity, Cell, OwnDriver, Plan, Skipped, Waiting};
use crate::{
    image::{Digest, ImageName, InputHash},
    kernel::KernelTarget,
    kmod::Verdict,
};

/// Where one image for one kernel stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// In the registry, with these inputs.
    Published,
    /// Being built at this moment.
    Building,
    /// To be built as soon as a builder is free.
    Queued,
    /// Failed for a reason that passes; tried again later.
    Retrying,
    /// To be built by the next pass.
    Missing,
    /// To be built when what it is compiled against is published.
    Waiting,
    /// Failed with these inputs; not tried again until one changes.
    Failed,
    /// The tag holds an image of other inputs.
    Conflict,
    /// The registry did not say.
    Unknown,
    /// Nothing can be built, for the reason given.
    Skipped,
    /// Nothing is built: the nodes have their own driver.
    OwnDriver,
}

impl Phase {
    /// The phase in lower case.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Published => "published",
            Self::Building => "building",
            Self::Queued => "queued",
            Self::Retrying => "retrying",
            Self::Missing => "missing",
            Self::Waiting => "waiting",
            Self::Failed => "failed",
            Self::Conflict => "conflict",
            Self::Unknown => "unknown",
            Self::Skipped => "skipped",
            Self::OwnDriver => "own-driver",
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
    #[serde(skip_serializing_if = "Option::is_none")]
    pub digest: Option<Digest>,
    /// Why it is not published.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// What it is compiled against: `name@sha256:digits` of what is exposed, or the names that it waits for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub needs: Vec<String>,
    /// Who announces the kernel.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub announced_by: Vec<String>,
}

/// One row, with what it is about in checked types.
#[derive(Clone, Debug)]
pub struct StatusEntry<'a> {
    /// The driver image.
    pub image: &'a ImageName,
    /// The kernel target.
    pub target: &'a KernelTarget,
    /// Its inputs; `None` where nothing can be built.
    pub input_hash: Option<InputHash>,
    /// What the loop knows of its builds.
    pub activity: Option<&'a BuildActivity>,
    /// The row.
    pub row: StatusRow,
}

/// The matrix, in the order of [`status_entries`], as far as registry and cluster tell.
pub fn status(plan: &Plan) -> Vec<StatusRow> {
    let nothing = Activity::new();
    let mut rows: Vec<StatusRow> =
        status_entries(plan, &nothing).into_iter().map(|entry| entry.row).collect();
    let built: BTreeSet<(String, String)> =
        rows.iter().map(|row| (row.image.clone(), row.kernel.clone())).collect();
    rows.extend(plan.own_drivers.iter().map(own_driver).filter(|row| {
        // Where other nodes of that kernel have none, the image's own row says how it stands.
        !built.contains(&(row.image.clone(), row.kernel.clone()))
    }));
    rows
}

fn own_driver(own: &OwnDriver) -> StatusRow {
    StatusRow {
        image: own.image.to_string(),
        kernel: own.target.to_string(),
        nodes: own.nodes.len(),
        phase: Phase::OwnDriver,
        verdict: None,
        reference: String::new(),
        digest: None,
        reason: own.to_string(),
        needs: Vec::new(),
        announced_by: Vec::new(),
    }
}

/// The matrix with what the loop knows of its builds: chain by chain, needs before their dependents, an image's kernels
/// together.
pub fn status_entries<'a>(plan: &'a Plan, activity: &'a Activity) -> Vec<StatusEntry<'a>> {
    let Plan {
        builds,
        tags: _,
        up_to_date,
        conflicts,
        held_back,
        unknown,
        skipped,
        left_alone: _,
        own_drivers: _,
        unions: _,
        unheard: _,
        rollouts: _,
        nodes: _,
        waiting,
        order,
        signatures: _,
        signable: _,
    } = plan;
    let about = |cell: &'a Cell, phase, reason: String| entry(cell, activity, phase, reason);
    let published = up_to_date.iter().map(|found| {
        let mut entry = about(&found.cell, Phase::Published, String::new());
        entry.row.verdict = found.verdict;
        entry.row.digest = Some(found.digest.clone());
        entry
    });
    let mut entries: Vec<StatusEntry<'a>> = published
        .chain(builds.iter().map(|build| about(&build.cell, Phase::Missing, build.why.to_string())))
        .chain(held_back.iter().map(|held| about(&held.cell, Phase::Failed, held.message.clone())))
        .chain(
            conflicts
                .iter()
                .map(|conflict| about(&conflict.cell, Phase::Conflict, conflict.remedy.to_owned())),
        )
        .chain(unknown.iter().map(|unknown| about(&unknown.cell, Phase::Unknown, unknown.message.clone())))
        .chain(waiting.iter().map(waiting_entry))
        .chain(skipped.iter().map(skipped_entry))
        .collect();
    let places: HashMap<&ImageName, usize> =
        order.iter().enumerate().map(|(place, name)| (name, place)).collect();
    entries.sort_by_key(|entry| (places.get(entry.image), entry.image, entry.target));
    entries
}

fn entry<'a>(cell: &'a Cell, activity: &'a Activity, phase: Phase, reason: String) -> StatusEntry<'a> {
    let activity = activity.get(&(cell.image.clone(), cell.target.clone()));
    let (phase, reason) = match (phase, activity) {
        (Phase::Missing, Some(found)) => underway(found, reason),
        (phase, _) => (phase, reason),
    };
    let row = StatusRow {
        image: cell.image.to_string(),
        kernel: cell.target.to_string(),
        nodes: cell.nodes.len(),
        phase,
        verdict: None,
        reference: cell.reference.to_string(),
        digest: None,
        reason,
        needs: cell.needs.iter().map(ToString::to_string).collect(),
        announced_by: cell.announced_by.iter().map(ToString::to_string).collect(),
    };
    let input_hash = Some(cell.input_hash);
    StatusEntry { image: &cell.image, target: &cell.target, input_hash, activity, row }
}

fn skipped_entry(skipped: &Skipped) -> StatusEntry<'_> {
    let Skipped { image, target, why, nodes, announced_by } = skipped;
    without_cell((image, target), *nodes, (Phase::Skipped, why.to_string()), announced_by)
}

fn waiting_entry(waiting: &Waiting) -> StatusEntry<'_> {
    let Waiting { image, target, needs, nodes, announced_by } = waiting;
    let mut entry = without_cell((image, target), *nodes, (Phase::Waiting, waiting.why()), announced_by);
    entry.row.needs = needs.iter().map(ToString::to_string).collect();
    entry
}

fn without_cell<'a>(
    (image, target): (&'a ImageName, &'a KernelTarget),
    nodes: usize,
    (phase, reason): (Phase, String),
    announced_by: &[AnnouncedBy],
) -> StatusEntry<'a> {
    let row = StatusRow {
        image: image.to_string(),
        kernel: target.to_string(),
        nodes,
        phase,
        verdict: None,
        reference: String::new(),
        digest: None,
        reason,
        needs: Vec::new(),
        announced_by: announced_by.iter().map(ToString::to_string).collect(),
    };
    StatusEntry { image, target, input_hash: None, activity: None, row }
}

/// What an image that is not published waits for.
fn underway(activity: &BuildActivity, reason: String) -> (Phase, String) {
    let BuildActivity { stage, next_retry, error, .. } = activity;
    match (stage.as_deref(), error) {
        (Some("queued"), _) => (Phase::Queued, reason),
        (Some(stage), _) => (Phase::Building, stage.to_owned()),
        (None, Some(error)) if next_retry.is_some() => (Phase::Retrying, error.clone()),
        (None, Some(error)) => (Phase::Failed, error.clone()),
        (None, None) => (Phase::Missing, reason),
    }
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
    for row in rows {
        let StatusRow {
            image,
            kernel,
            nodes,
            phase,
            verdict,
            reference,
            digest,
            reason,
            needs,
            announced_by,
        } = row;
        let check = verdict.map_or("", Verdict::as_str);
        let mut last = match (digest, reason.as_str()) {
            (Some(digest), _) => format!("{reference}\n@{digest}"),
            (None, reason) => [reference.as_str(), reason].join("\n").trim().to_owned(),
        };
        if !needs.is_empty() && *phase != Phase::Waiting {
            last.push_str("\nneeds ");
            last.push_str(&needs.join(", "));
        }
        if !announced_by.is_empty() {
            if !last.is_empty() {
                last.push('\n');
            }
            last.push_str("announced by ");
            last.push_str(&announced_by.join(" and "));
        }
        table.add_row([image, kernel, &nodes.to_string(), phase.as_str(), check, &last]);
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    let mut text = table.trim_fmt();
    text.push('\n');
    text
}
