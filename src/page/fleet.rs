//! Pure: the first view: what is wrong, what is at risk, what changed, and the matrix of images and kernels.

use std::{
    cmp::Ordering,
    collections::{BTreeMap, BTreeSet, HashMap},
};

use jiff::Timestamp;
use serde::Serialize;
use sha2::{Digest as _, Sha256};

use super::facts::{Facts, Names};
use crate::{
    image::ImageName,
    kernel::{KernelTarget, order_of},
    kmod::Verdict,
    plan::{
        Activity, BuildTime, Outcome, Phase, PlannedCell, Readiness, RolloutDecision, StatusEntry,
        status_entries,
    },
};

/// Findings written out before the rest is only counted.
const LISTED: usize = 10;

/// Which part of the matrix is shown: what is in the address.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Filter {
    /// A part of an image's name.
    pub image: String,
    /// A part of a kernel release.
    pub kernel: String,
    /// A phase, as `farrier status` has it.
    pub state: String,
}

/// The first view.
#[derive(Debug, Serialize)]
pub struct FleetPage {
    pub configuration_error: Option<String>,
    pub counts: Vec<StateCount>,
    pub changed: Vec<Change>,
    pub wrong: Listed<Problem>,
    pub at_risk: Listed<Risk>,
    pub at_risk_nodes: usize,
    pub matrix: Matrix,
    /// Does something build, so that it changes between passes?
    pub live: bool,
    pub filter: Filter,
    /// Is there a server that reads the address?
    pub served: bool,
}

/// Something that changed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Change {
    #[serde(skip)]
    pub at: Timestamp,
    pub subject: String,
    pub link: String,
    pub state: &'static str,
    pub class: &'static str,
    /// As [`ago`] has it; filled in when it is shown.
    pub ago: String,
}

/// How many cells stand so.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct StateCount {
    pub state: &'static str,
    pub class: &'static str,
    pub count: usize,
    pub chosen: bool,
}

/// The first of a list.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Listed<T> {
    pub items: Vec<T>,
    pub more: usize,
}

impl<T> Listed<T> {
    pub fn of(mut items: Vec<T>, most: usize) -> Self {
        let more = items.len().saturating_sub(most);
        items.truncate(most);
        Self { items, more }
    }
}

/// What is wrong, once for all that is wrong in the same way.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Problem {
    pub state: &'static str,
    pub class: &'static str,
    pub subject: String,
    pub link: Option<String>,
    pub more: usize,
    pub reason: String,
    pub hint: String,
}

/// Nodes that would lack an image at their next reboot.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Risk {
    pub kernel: String,
    pub announced: bool,
    pub missing: Vec<MissingImage>,
    pub nodes: Vec<Link>,
    pub more: usize,
    pub count: usize,
}

/// An image that is not there.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct MissingImage {
    pub image: String,
    pub link: Option<String>,
    pub why: String,
}

/// A page, by its name.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Link {
    pub name: String,
    pub link: String,
}

/// Images by kernels.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Matrix {
    pub images: Vec<String>,
    pub columns: usize,
    pub groups: Vec<Group>,
}

/// The kernels of one distribution.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Group {
    pub name: String,
    pub rows: Vec<Row>,
}

/// One kernel.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Row {
    pub kernel: String,
    pub nodes: usize,
    pub announced: bool,
    pub cells: Vec<Option<CellView>>,
}

/// One cell of the matrix.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CellView {
    pub state: &'static str,
    pub class: &'static str,
    pub link: Option<String>,
    pub note: String,
}

/// Facts with their rows, ready to be looked at.
pub struct Fleet<'a> {
    pub facts: &'a Facts,
    pub entries: Vec<StatusEntry<'a>>,
    places: HashMap<(&'a ImageName, &'a KernelTarget), usize>,
    since: &'a BTreeMap<(ImageName, KernelTarget), Timestamp>,
    /// When it is looked at; the facts may be older.
    pub now: Timestamp,
}

impl<'a> Fleet<'a> {
    /// `since`: when cells came to stand as they do, as far as a loop saw it.
    pub fn new(facts: &'a Facts, since: &'a BTreeMap<(ImageName, KernelTarget), Timestamp>) -> Self {
        Self::at(facts, since, &facts.activity, facts.now)
    }

    /// The same with what builds do by now.
    pub fn at(
        facts: &'a Facts,
        since: &'a BTreeMap<(ImageName, KernelTarget), Timestamp>,
        activity: &'a Activity,
        now: Timestamp,
    ) -> Self {
        let entries = status_entries(&facts.plan, activity);
        let places =
            entries.iter().enumerate().map(|(place, entry)| ((entry.image, entry.target), place)).collect();
        Self { facts, entries, places, since, now }
    }

    /// How long a build has taken, and usually takes.
    pub fn time(&self, entry: &StatusEntry<'_>) -> Option<BuildTime> {
        entry.activity.and_then(|activity| activity.time(self.now))
    }

    /// The cell of an image for a kernel.
    pub fn entry(&self, image: &ImageName, target: &KernelTarget) -> Option<&StatusEntry<'a>> {
        self.entries.get(*self.places.get(&(image, target))?)
    }

    fn link(&self, image: &ImageName, target: &KernelTarget) -> Option<String> {
        self.entry(image, target).map(|entry| cell_link(entry.image, entry.target))
    }

    /// How long a cell stands so, where that is known.
    pub fn age(&self, entry: &StatusEntry<'_>) -> Option<Timestamp> {
        let failed = match entry.outcome {
            Outcome::HeldBack { at, .. } => Some(*at),
            _ => entry.activity.and_then(|activity| activity.since),
        };
        failed.or_else(|| self.since.get(&(entry.image.clone(), entry.target.clone())).copied())
    }

    /// The whole first view; `changed` is what it says of the time before.
    pub fn page(&self, filter: Filter, changed: Vec<Change>) -> FleetPage {
        let at_risk = self.at_risk();
        FleetPage {
            configuration_error: self.facts.configuration_error.clone(),
            counts: self.counts(&filter),
            changed,
            wrong: Listed::of(self.wrong(), LISTED),
            at_risk_nodes: at_risk.iter().map(|risk| risk.count).sum(),
            at_risk: Listed::of(at_risk, LISTED),
            matrix: self.matrix(&filter),
            live: self.entries.iter().any(is_building),
            filter,
            served: self.facts.served,
        }
    }

    fn counts(&self, filter: &Filter) -> Vec<StateCount> {
        let mut counts: BTreeMap<Phase, usize> = BTreeMap::new();
        for entry in &self.entries {
            *counts.entry(entry.row.phase).or_default() += 1;
        }
        let count = |(phase, count): (Phase, usize)| StateCount {
            state: phase.as_str(),
            class: class_of_phase(phase, Some(Verdict::Loads)),
            count,
            chosen: filter.state == phase.as_str(),
        };
        counts.into_iter().map(count).collect()
    }

    /// What is wrong: cells first, then rollouts, then nodes.
    fn wrong(&self) -> Vec<Problem> {
        let mut problems: Vec<Problem> = Vec::new();
        let mut places: HashMap<(&ImageName, Phase, String), usize> = HashMap::new();
        for entry in &self.entries {
            let class = class_of(entry);
            if !matches!(class, "bad" | "warn") {
                continue;
            }
            let (reason, hint) = entry.reason_and_hint();
            let key = (entry.image, entry.row.phase, reason.clone());
            if let Some(known) = places.get(&key).and_then(|place| problems.get_mut(*place)) {
                known.more += 1;
                continue;
            }
            places.insert(key, problems.len());
            let (subject, link) = (subject(entry), Some(cell_link(entry.image, entry.target)));
            problems.push(Problem {
                state: entry.row.phase.as_str(),
                class,
                subject,
                link,
                more: 0,
                reason,
                hint,
            });
        }
        // What is broken before what waits.
        problems.sort_by_key(|problem| problem.class != "bad");
        for rollout in &self.facts.plan.rollouts {
            let RolloutDecision::Hold(why) = &rollout.decision else { continue };
            let (state, class) = ("on hold", if why.is_failure() { "bad" } else { "warn" });
            let subject = format!("{}: {}", rollout.image, rollout.target);
            let (link, reason) = (Some("rollouts.html".to_owned()), why.to_string());
            problems.push(Problem { state, class, subject, link, more: 0, reason, hint: String::new() });
        }
        for (why, names) in &self.facts.aside {
            let subject = match (names.first.as_slice(), names.count) {
                ([first, ..], 1) => format!("node {first}"),
                (_, count) => format!("{count} nodes"),
            };
            let (state, class, hint) = ("left out", "warn", String::new());
            problems.push(Problem { state, class, subject, link: None, more: 0, reason: why.clone(), hint });
        }
        problems
    }

    /// Nodes that would lack an image: first those that announced another kernel, then those that run a kernel whose image is
    /// not there. Its cost does not depend on the number of nodes.
    fn at_risk(&self) -> Vec<Risk> {
        let announced = self.facts.unready.iter().map(|(next, names)| {
            let missing = next.needs.iter().filter_map(|needed| match &needed.state {
                Readiness::Ready { .. } => None,
                Readiness::Missing { message } | Readiness::Unknown { message } => Some(MissingImage {
                    image: needed.image.to_string(),
                    link: self.link(&needed.image, &next.kernel),
                    why: message.clone(),
                }),
            });
            let doubt = next.doubt.as_ref();
            let doubt =
                doubt.map(|why| MissingImage { image: String::new(), link: None, why: why.to_string() });
            risk(&next.kernel, true, missing.chain(doubt).collect(), names)
        });
        let running = self.facts.groups.iter().filter_map(|group| {
            let missing: Vec<MissingImage> = group
                .calls
                .iter()
                .filter_map(|image| self.entry(image, &group.target))
                .filter(|entry| entry.row.phase != Phase::Published && class_of(entry) != "off")
                .map(|entry| MissingImage {
                    image: entry.image.to_string(),
                    link: Some(cell_link(entry.image, entry.target)),
                    why: said(entry),
                })
                .collect();
            (!missing.is_empty()).then(|| risk(&group.target, false, missing, &Names::of(&group.nodes)))
        });
        announced.chain(running).collect()
    }

    fn matrix(&self, filter: &Filter) -> Matrix {
        let mut cells: BTreeMap<&KernelTarget, BTreeMap<&ImageName, CellView>> = BTreeMap::new();
        let shown = |image: &ImageName, target: &KernelTarget, phase: Phase| {
            image.as_str().contains(&filter.image)
                && target.release.as_str().contains(&filter.kernel)
                && (filter.state.is_empty() || filter.state == phase.as_str())
        };
        let own = self.facts.plan.own_drivers.iter();
        for own in own.filter(|own| shown(&own.image, &own.target, Phase::OwnDriver)) {
            let (state, note) = (Phase::OwnDriver.as_str(), nodes(own.nodes.len()));
            let view = CellView { state, class: "off", link: None, note };
            cells.entry(&own.target).or_default().insert(&own.image, view);
        }
        for entry in self.entries.iter().filter(|entry| shown(entry.image, entry.target, entry.row.phase)) {
            cells.entry(entry.target).or_default().insert(entry.image, self.cell(entry));
        }
        let images: BTreeSet<&ImageName> = cells.values().flat_map(BTreeMap::keys).copied().collect();
        let mut running: HashMap<&KernelTarget, usize> = HashMap::new();
        for group in &self.facts.groups {
            *running.entry(&group.target).or_default() += group.nodes.len();
        }
        let announced: BTreeSet<&KernelTarget> = self
            .facts
            .plan
            .cells
            .iter()
            .filter(|cell| !cell.announced_by.is_empty())
            .map(|cell| &cell.target)
            .collect();
        let mut kernels: Vec<_> = cells.into_iter().collect();
        kernels.sort_by(|(a, _), (b, _)| platform(a).cmp(&platform(b)).then_with(|| newest_first(a, b)));
        let mut groups: Vec<Group> = Vec::new();
        for (target, mut views) in kernels {
            let name = format!("{} {}, {}", target.os, target.os_version, target.arch);
            if groups.last().is_none_or(|group| group.name != name) {
                groups.push(Group { name, rows: Vec::new() });
            }
            let row = Row {
                kernel: target.release.to_string(),
                nodes: running.get(target).copied().unwrap_or(0),
                announced: announced.contains(target),
                cells: images.iter().map(|image| views.remove(*image)).collect(),
            };
            if let Some(group) = groups.last_mut() {
                group.rows.push(row);
            }
        }
        let images: Vec<String> = images.iter().map(ToString::to_string).collect();
        Matrix { columns: images.len() + 1, images, groups }
    }

    fn cell(&self, entry: &StatusEntry<'_>) -> CellView {
        let row = &entry.row;
        let time = self.time(entry).filter(|_| is_building(entry));
        let age = self.age(entry).filter(|_| time.is_none() && row.phase != Phase::Published);
        let note = [
            row.verdict.map(|verdict| verdict.as_str().to_owned()),
            (row.nodes > 0).then(|| nodes(row.nodes)),
            time.map(|time| time.to_string()),
            age.map(|since| ago(since, self.facts.now)),
        ];
        CellView {
            state: row.phase.as_str(),
            class: class_of(entry),
            link: Some(cell_link(entry.image, entry.target)),
            note: note.into_iter().flatten().collect::<Vec<_>>().join(" · "),
        }
    }
}

fn risk(kernel: &KernelTarget, announced: bool, missing: Vec<MissingImage>, names: &Names) -> Risk {
    let nodes: Vec<Link> = names.first.iter().map(|name| node_link(name)).collect();
    let more = names.count - nodes.len();
    Risk { kernel: kernel.to_string(), announced, missing, nodes, more, count: names.count }
}

/// Is a build of it under way?
pub fn is_building(entry: &StatusEntry<'_>) -> bool {
    entry.row.phase == Phase::Building
}

/// The colour and the shape of a cell.
pub fn class_of(entry: &StatusEntry<'_>) -> &'static str {
    match entry.outcome {
        Outcome::UpToDate { denied: true, .. } => "bad",
        Outcome::Skipped { why } if why.is_finding() => "off",
        _ => class_of_phase(entry.row.phase, entry.row.verdict),
    }
}

fn class_of_phase(phase: Phase, verdict: Option<Verdict>) -> &'static str {
    match phase {
        Phase::Published if verdict == Some(Verdict::Loads) => "ok",
        Phase::Published => "part",
        Phase::Building => "run",
        Phase::Queued | Phase::Missing | Phase::Waiting => "wait",
        Phase::Retrying | Phase::Unknown | Phase::Skipped => "warn",
        Phase::Failed | Phase::Conflict => "bad",
        Phase::OwnDriver => "off",
    }
}

fn said(entry: &StatusEntry<'_>) -> String {
    let (phase, reason) = (entry.row.phase.as_str(), &entry.row.reason);
    if reason.is_empty() { phase.to_owned() } else { format!("{phase}: {reason}") }
}

fn platform(target: &KernelTarget) -> (&str, &str, String) {
    (target.os.as_str(), target.os_version.as_str(), target.arch.to_string())
}

fn newest_first(a: &KernelTarget, b: &KernelTarget) -> Ordering {
    order_of(&a.os, a.release.as_str())(b.release.as_str(), a.release.as_str())
}

/// `mofed for 6.1.0-47-amd64 (debian 12, amd64)`.
pub fn subject(entry: &StatusEntry<'_>) -> String {
    format!("{} for {}", entry.image, entry.target)
}

/// `12 nodes`.
pub fn nodes(count: usize) -> String {
    if count == 1 { "1 node".to_owned() } else { format!("{count} nodes") }
}

/// `3 h`: how long ago. Of a time in the future nothing is known.
pub fn ago(at: Timestamp, now: Timestamp) -> String {
    match now.duration_since(at).as_secs() {
        seconds if seconds < 60 => "now".to_owned(),
        seconds if seconds < 3600 => format!("{} min", seconds / 60),
        seconds if seconds < 48 * 3600 => format!("{} h", seconds / 3600),
        seconds => format!("{} d", seconds / 86400),
    }
}

/// The page of a cell. A name from outside is no part of it, so that no name is unsafe, too long or another one's: these are
/// 64 bits of a digest.
pub fn cell_link(image: &ImageName, target: &KernelTarget) -> String {
    let KernelTarget { os, os_version, release, arch } = target;
    let parts = [image.as_str(), os.as_str(), os_version.as_str(), release.as_str(), arch.as_str()];
    format!("c/{}.html", digits_of(&parts))
}

/// The cell of a page.
pub fn cell_at<'a>(facts: &'a Facts, path: &str) -> Option<&'a PlannedCell> {
    let mut cells = facts.plan.cells.iter().filter(|_| path.starts_with("c/"));
    cells.find(|cell| cell_link(&cell.image, &cell.target) == path)
}

/// The whole log of a cell's newest build.
pub fn log_link(entry: &StatusEntry<'_>) -> String {
    cell_link(entry.image, entry.target).replace(".html", ".txt")
}

/// The page of a node.
pub fn node_link(name: &str) -> Link {
    Link { name: name.to_owned(), link: format!("n/{}.html", digits_of(&[name])) }
}

fn digits_of(parts: &[&str]) -> String {
    hex::encode(&Sha256::digest(parts.join("\0").as_bytes())[..8])
}

#[cfg(test)]
#[path = "fleet_tests.rs"]
pub(in crate::page) mod tests;
