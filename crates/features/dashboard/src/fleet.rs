//! The index page: problems, nodes at risk, recent changes, and the matrix of images and kernels.

use std::{
    collections::{BTreeMap, HashMap},
    sync::OnceLock,
};

use farrier_core::{
    image::ImageName,
    kernel::KernelTarget,
    plan::{
        Activity, BuildTime, HostDrivers, NextKernel, Outcome, OwnDriver, Phase, Plan, PlannedCell,
        PlannedNode, PlannedNodeUpgrade, PlannedUpgrade, Readiness, RolloutDecision, StatusEntry,
        status_entries,
    },
};
use jiff::Timestamp;
use kmod::Verdict;
use serde::Serialize;
use sha2::{Digest as _, Sha256};

use super::{
    facts::{Announced, Facts, NameList},
    matrix::{Filter, Matrix, StateCount},
    rollouts::decision_state,
};

/// Maximum number of problems and risks that are listed. Further ones are only counted.
const MAX_LISTED: usize = 10;
/// Number of a list's items that are visible before the list is unfolded.
const UNFOLDED_ITEMS: usize = 3;

/// Model of the index page.
#[derive(Debug, Serialize)]
pub struct FleetPage {
    pub configuration_error: Option<String>,
    pub cluster: String,
    pub registry: String,
    pub version: &'static str,
    pub published: usize,
    /// Number of cells, without those whose image does not apply to the kernel.
    pub wanted: usize,
    pub counts: Vec<StateCount>,
    pub changed: Vec<Change>,
    pub problems: Listed<Problem>,
    pub at_risk: Listed<Risk>,
    pub at_risk_nodes: usize,
    pub problems_count: usize,
    pub changed_count: usize,
    pub matrix: Matrix,
    /// Whether a build runs, so that the page changes between reconciles.
    pub live: bool,
    pub filter: Filter,
    /// The filter in words. Empty without a filter.
    pub filtered_by: String,
    /// Whether a server evaluates the page's address. A written file has no filter form.
    pub served: bool,
}

/// A recent change of state.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Change {
    #[serde(skip)]
    pub time: Timestamp,
    pub subject: String,
    pub link: String,
    pub state: &'static str,
    pub class: StateClass,
    /// Age as [`ago`] formats it. Empty until the change is shown.
    pub ago: String,
    /// Image (without its kernel) or object that has changed.
    #[serde(skip)]
    pub changed: String,
    /// Number of further changes of the same image or object to the same state at the same time.
    pub more: usize,
}

/// The first items of a list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Listed<T> {
    pub items: Vec<T>,
    /// Number of items that are folded away.
    pub folded: usize,
    /// Number of items that are omitted.
    pub more: usize,
}

impl<T> Default for Listed<T> {
    fn default() -> Self {
        Self { items: Vec::new(), folded: 0, more: 0 }
    }
}

impl<T> Listed<T> {
    pub fn of(items: Vec<T>, limit: usize) -> Self {
        let list = Self::unfolded(items, limit);
        Self { folded: list.items.len().saturating_sub(UNFOLDED_ITEMS), ..list }
    }

    /// The first items up to `limit`, all of them unfolded.
    pub fn unfolded(mut items: Vec<T>, limit: usize) -> Self {
        let more = items.len().saturating_sub(limit);
        items.truncate(limit);
        Self { items, folded: 0, more }
    }

    /// Converts the items.
    pub fn map<U>(self, convert: impl FnMut(T) -> U) -> Listed<U> {
        let Self { items, folded, more } = self;
        Listed { items: items.into_iter().map(convert).collect(), folded, more }
    }
}

/// A problem. The same problem of several kernels is listed once.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Problem {
    pub state: &'static str,
    pub class: StateClass,
    pub subject: String,
    pub link: Option<String>,
    pub more: usize,
    pub reason: String,
    pub hint: String,
}

/// Nodes that lack images for one kernel. Their next reboot would leave them without drivers.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Risk {
    pub kernel: String,
    pub announced: bool,
    pub missing: Vec<ImageBadge>,
    pub nodes: Vec<Link>,
    pub more: usize,
    pub count: usize,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct ImageBadge {
    pub image: String,
    pub link: Option<String>,
    pub state: &'static str,
    pub class: StateClass,
    /// Reason. Empty if the state says enough.
    pub why: String,
}

/// A named link to a page.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Link {
    pub name: String,
    pub link: String,
}

/// Facts and status rows, indexed for rendering.
pub struct Fleet<'a> {
    pub facts: &'a Facts,
    pub entries: Vec<StatusEntry<'a>>,
    indexes: HashMap<(&'a ImageName, &'a KernelTarget), usize>,
    since: &'a BTreeMap<(ImageName, KernelTarget), Timestamp>,
    by_node: OnceLock<HashMap<&'a str, NodeEntries<'a>>>,
    /// Time of rendering. The facts may be older.
    pub now: Timestamp,
}

/// Entries of a plan about one node.
#[derive(Default)]
pub struct NodeEntries<'a> {
    pub planned: Option<&'a PlannedNode>,
    pub ignored_announcement: Option<String>,
    pub own_drivers: Vec<&'a OwnDriver>,
    pub host_drivers: Option<&'a HostDrivers>,
    pub upgrades: Vec<(&'a PlannedUpgrade, &'a PlannedNodeUpgrade)>,
}

impl<'a> Fleet<'a> {
    /// Indexes the facts. `since` has the times at which a loop saw cells reach their state.
    pub fn new(facts: &'a Facts, since: &'a BTreeMap<(ImageName, KernelTarget), Timestamp>) -> Self {
        Self::at(facts, since, &facts.activity, facts.now)
    }

    /// Like [`Fleet::new`], with the current activity of builds.
    pub fn at(
        facts: &'a Facts,
        since: &'a BTreeMap<(ImageName, KernelTarget), Timestamp>,
        activity: &'a Activity,
        now: Timestamp,
    ) -> Self {
        let entries = status_entries(&facts.plan, activity);
        let indexes =
            entries.iter().enumerate().map(|(index, entry)| ((entry.image, entry.target), index)).collect();
        Self { facts, entries, indexes, since, by_node: OnceLock::new(), now }
    }

    /// Returns the entries of the plan about a node. Builds the index once, because pages of many nodes may be requested.
    pub fn node_entries(&self, name: &str) -> Option<&NodeEntries<'a>> {
        self.by_node.get_or_init(|| index_by_node(&self.facts.plan)).get(name)
    }

    /// Returns how long a build has taken, and how long it usually takes.
    pub fn time(&self, entry: &StatusEntry<'_>) -> Option<BuildTime> {
        entry.activity.and_then(|activity| activity.time(self.now))
    }

    pub fn entry(&self, image: &ImageName, target: &KernelTarget) -> Option<&StatusEntry<'a>> {
        self.entries.get(*self.indexes.get(&(image, target))?)
    }

    /// Returns the time since when a cell has been in its state, if known.
    pub fn state_since(&self, entry: &StatusEntry<'_>) -> Option<Timestamp> {
        let key = (entry.image.clone(), entry.target.clone());
        let recorded = match entry.outcome {
            Outcome::Failed { at, .. } => Some(*at),
            Outcome::UpToDate { .. } => self.facts.builds.times.get(&key).copied(),
            _ => entry.activity.and_then(|activity| activity.since),
        };
        recorded.or_else(|| self.since.get(&key).copied())
    }

    /// Returns the model of the index page. `changed` are the recent changes.
    pub fn page(&self, filter: Filter, changed: Vec<Change>) -> FleetPage {
        let ((at_risk, at_risk_nodes), problems) = (self.at_risk(), self.problems());
        let applicable = || self.entries.iter().filter(|entry| class_of(entry) != StateClass::Off);
        FleetPage {
            cluster: self.facts.cluster.clone(),
            registry: self.facts.registry.clone(),
            version: env!("CARGO_PKG_VERSION"),
            published: applicable().filter(|entry| entry.row.phase == Phase::Published).count(),
            wanted: applicable().count(),
            configuration_error: self.facts.configuration_error.clone(),
            counts: self.counts(&filter),
            changed_count: changed.len(),
            changed,
            problems_count: problems.len(),
            problems: Listed::of(problems, MAX_LISTED),
            at_risk_nodes,
            at_risk: Listed::of(at_risk, MAX_LISTED),
            matrix: self.matrix(&filter),
            live: self.entries.iter().any(is_building),
            filtered_by: filter.to_string(),
            filter,
            served: self.facts.served,
        }
    }

    /// Returns the problems: cells first, then rollouts, then nodes.
    fn problems(&self) -> Vec<Problem> {
        let mut problems: Vec<Problem> = Vec::new();
        let mut indexes: HashMap<(&ImageName, Phase, String), usize> = HashMap::new();
        for entry in &self.entries {
            let class = class_of(entry);
            if !matches!(class, StateClass::Bad | StateClass::Warn) {
                continue;
            }
            let (reason, hint) = entry.reason_and_hint();
            let key = (entry.image, entry.row.phase, reason.clone());
            if let Some(listed) = indexes.get(&key).and_then(|index| problems.get_mut(*index)) {
                listed.more += 1;
                continue;
            }
            indexes.insert(key, problems.len());
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
        // List failures before warnings.
        problems.sort_by_key(|problem| problem.class != StateClass::Bad);
        for rollout in &self.facts.plan.rollouts {
            let (state, class) = decision_state(&rollout.decision);
            let (class, reason) = match self.facts.failed_rewrites.get(&rollout.target) {
                Some(error) => (StateClass::Bad, format!("the last rewrite failed: {error}")),
                None if matches!(rollout.decision, RolloutDecision::Hold(_)) => {
                    (class, rollout.hold_text().unwrap_or_default())
                }
                None => continue,
            };
            let subject = format!("{}: {}", rollout.image, rollout.target);
            let link = Some("rollouts.html".to_owned());
            problems.push(Problem { state, class, subject, link, more: 0, reason, hint: String::new() });
        }
        for ((why, remedy), names) in &self.facts.excluded {
            let subject = match (names.first.as_slice(), names.count) {
                ([first, ..], 1) => format!("node {first}"),
                (_, count) => format!("{count} nodes"),
            };
            let (state, class) = ("skipped", StateClass::Warn);
            let (reason, hint) = (why.clone(), remedy.clone());
            problems.push(Problem { state, class, subject, link: None, more: 0, reason, hint });
        }
        problems
    }

    /// Returns the nodes for which an image is missing, and their number. Nodes that announced another kernel come first, then
    /// nodes that run a kernel without its image. The cost does not depend on the number of nodes.
    fn at_risk(&self) -> (Vec<Risk>, usize) {
        let unready = self.facts.announced.iter().filter(|announced| !announced.next.may_boot().is_free());
        let mut risks: Vec<Risk> = unready
            .map(|Announced { next, nodes }| risk(&next.kernel, true, self.missing_for(next), nodes))
            .collect();
        let mut count: usize = risks.iter().map(|risk| risk.count).sum();
        for group in &self.facts.groups {
            let images: Vec<ImageBadge> = group
                .images
                .iter()
                .filter_map(|image| self.entry(image, &group.target))
                .filter(|entry| match class_of(entry) {
                    StateClass::Off => false,
                    // A published image that its definition does not accept is not rolled out either.
                    StateClass::Bad => true,
                    _ => entry.row.phase != Phase::Published,
                })
                .map(image_badge)
                .collect();
            if !images.is_empty() {
                // Nodes that also announced a kernel are already counted.
                count += group.nodes.len().saturating_sub(group.unready);
                risks.push(risk(&group.target, false, images, &group.nodes));
            }
        }
        (risks, count)
    }

    /// Returns the images that nodes lack for their next kernel. If the needed images are unknown, the last item has the reason.
    fn missing_for(&self, next: &NextKernel) -> Vec<ImageBadge> {
        let images = next.needs.iter().filter_map(|needed| match &needed.state {
            Readiness::Ready { .. } => None,
            Readiness::Missing { message } | Readiness::Unknown { message } => {
                let entry = self.entry(&needed.image, &next.kernel);
                Some(match entry.filter(|entry| entry.row.phase != Phase::Published) {
                    Some(entry) => image_badge(entry),
                    None => ImageBadge {
                        image: needed.image.to_string(),
                        link: entry.map(|entry| cell_link(entry.image, entry.target)),
                        state: "not ready",
                        class: StateClass::Warn,
                        why: message.clone(),
                    },
                })
            }
        });
        let unknown = next.blocker.as_ref().map(|why| ImageBadge {
            image: String::new(),
            link: None,
            state: "unknown",
            class: StateClass::Warn,
            why: why.to_string(),
        });
        images.chain(unknown).collect()
    }
}

fn index_by_node(plan: &Plan) -> HashMap<&str, NodeEntries<'_>> {
    let mut nodes: HashMap<&str, NodeEntries<'_>> = HashMap::new();
    for planned in &plan.nodes {
        nodes.entry(&planned.node).or_default().planned = Some(planned);
    }
    for unused in &plan.unused_announcements {
        nodes.entry(&unused.node).or_default().ignored_announcement = Some(unused.why.to_string());
    }
    for own_driver in &plan.own_drivers {
        for node in &own_driver.nodes {
            nodes.entry(node).or_default().own_drivers.push(own_driver);
        }
    }
    for drivers in &plan.host_drivers {
        for node in &drivers.nodes {
            nodes.entry(node).or_default().host_drivers = Some(drivers);
        }
    }
    for upgrade in plan.rollouts.iter().filter_map(|rollout| rollout.upgrade.as_ref()) {
        for node_upgrade in &upgrade.nodes {
            nodes.entry(&node_upgrade.node).or_default().upgrades.push((upgrade, node_upgrade));
        }
    }
    nodes
}

pub fn image_badge(entry: &StatusEntry<'_>) -> ImageBadge {
    let is_denied = matches!(entry.outcome, Outcome::UpToDate { denied: true, .. });
    ImageBadge {
        image: entry.image.to_string(),
        link: Some(cell_link(entry.image, entry.target)),
        state: entry.row.phase.as_str(),
        class: class_of(entry),
        why: if is_denied { entry.reason_and_hint().0 } else { String::new() },
    }
}

fn risk(kernel: &KernelTarget, announced: bool, missing: Vec<ImageBadge>, nodes: &[String]) -> Risk {
    let names = NameList::of(nodes);
    let nodes: Vec<Link> = names.first.iter().map(|name| node_link(name)).collect();
    let more = names.count - nodes.len();
    Risk { kernel: kernel.to_string(), announced, missing, nodes, more, count: names.count }
}

/// Whether a build of the cell runs.
pub fn is_building(entry: &StatusEntry<'_>) -> bool {
    entry.row.phase == Phase::Building
}

/// Class of states. The CSS class of the same name sets their color and shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum StateClass {
    Ok,
    /// Published, but the check's verdict is not `loads`.
    Part,
    Run,
    Wait,
    Warn,
    Bad,
    /// Not applicable.
    Off,
}

pub fn class_of(entry: &StatusEntry<'_>) -> StateClass {
    match entry.outcome {
        Outcome::UpToDate { denied: true, .. } => StateClass::Bad,
        Outcome::Skipped { why } if why.is_not_applicable() => StateClass::Off,
        _ => class_of_phase(entry.row.phase, entry.row.verdict),
    }
}

pub fn class_of_phase(phase: Phase, verdict: Option<Verdict>) -> StateClass {
    match phase {
        Phase::Published if verdict == Some(Verdict::Loads) => StateClass::Ok,
        Phase::Published => StateClass::Part,
        Phase::Building => StateClass::Run,
        Phase::Queued | Phase::Missing | Phase::Waiting => StateClass::Wait,
        Phase::Retrying | Phase::Unknown | Phase::Skipped => StateClass::Warn,
        Phase::Failed | Phase::Conflict => StateClass::Bad,
        Phase::OwnDriver => StateClass::Off,
    }
}

/// Formats a cell's image and kernel: `mofed for 6.1.0-47-amd64 (debian 12, amd64)`.
pub fn subject(entry: &StatusEntry<'_>) -> String {
    format!("{} for {}", entry.image, entry.target)
}

/// Formats a number of nodes: `12 nodes`.
pub fn nodes_in_words(count: usize) -> String {
    if count == 1 { "1 node".to_owned() } else { format!("{count} nodes") }
}

/// Formats an age: `3 h`. A time in the future is shown as `now`.
pub fn ago(time: Timestamp, now: Timestamp) -> String {
    match now.duration_since(time).as_secs() {
        seconds if seconds < 60 => "now".to_owned(),
        seconds if seconds < 3600 => format!("{} min", seconds / 60),
        seconds if seconds < 48 * 3600 => format!("{} h", seconds / 3600),
        seconds => format!("{} d", seconds / 86400),
    }
}

/// Returns the address of a cell's page. It has 64 bits of a digest in place of the names, which are untrusted and may be long.
pub fn cell_link(image: &ImageName, target: &KernelTarget) -> String {
    let KernelTarget { os, os_version, release, arch } = target;
    let parts = [image.as_str(), os.as_str(), os_version.as_str(), release.as_str(), arch.as_str()];
    format!("c/{}.html", short_digest(&parts))
}

/// Returns the cell whose page has this address.
pub fn cell_at<'a>(facts: &'a Facts, path: &str) -> Option<&'a PlannedCell> {
    let mut cells = facts.plan.cells.iter().filter(|_| path.starts_with("c/"));
    cells.find(|cell| cell_link(&cell.image, &cell.target) == path)
}

/// Returns the address of the whole log of a cell's latest build.
pub fn log_link(entry: &StatusEntry<'_>) -> String {
    cell_link(entry.image, entry.target).replace(".html", ".txt")
}

/// Returns the link to a node's page.
pub fn node_link(name: &str) -> Link {
    Link { name: name.to_owned(), link: format!("n/{}.html", short_digest(&[name])) }
}

fn short_digest(parts: &[&str]) -> String {
    hex::encode(&Sha256::digest(parts.join("\0").as_bytes())[..8])
}

#[cfg(test)]
#[path = "fleet_tests.rs"]
pub(crate) mod tests;
