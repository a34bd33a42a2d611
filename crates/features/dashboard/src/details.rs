//! Models of the pages of a cell, of a node, and of all nodes.

use std::{fmt::Display, time::Duration};

use farrier_core::{
    image::Digest,
    plan::{BootReadiness, BuildTime, NextKernel, Outcome, Phase, PlannedNode, StatusEntry, missing_images},
};
use farrier_store::SignatureStatus;
use indicatif::HumanBytes;
use serde::Serialize;
use serde_json::Value;

use super::{
    action::ActionLink,
    facts::natural_order,
    fleet::{
        Fleet, ImageBadge, Link, Listed, NodeEntries, StateClass, ago, cell_link, class_of, image_badge,
        is_building, log_link, node_link, nodes_in_words, subject,
    },
    image::{CellData, Image, ImageResult, ProvenanceSummary},
    log::Excerpt,
    materials::{
        ComparedImage, Component, Difference, differences, image_of, only_planned, planned_components,
    },
};

/// Maximum number of nodes that a page names.
pub const MAX_NAMED_NODES: usize = 200;
/// Maximum number of differing inputs that a cell's page shows.
const MAX_DIFFERENCES: usize = 50;
/// Maximum number of an image's components that a cell's page shows.
const MAX_COMPONENTS: usize = 300;
/// Maximum number of fields with a replaced image that a cell's page names.
const MAX_REPLACED_FIELDS: usize = 10;

/// A name and a value, as pages show them.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Fact {
    pub name: &'static str,
    pub value: String,
}

pub fn fact(name: &'static str, value: impl Display) -> Fact {
    Fact { name, value: value.to_string() }
}

/// Model of a cell's page: one image for one kernel.
#[derive(Debug, Serialize)]
pub struct CellPage {
    pub state: &'static str,
    pub class: StateClass,
    pub reason: String,
    pub hint: String,
    pub facts: Vec<Fact>,
    pub inputs: Vec<Fact>,
    /// Progress of the running build.
    pub build: Option<BuildBar>,
    pub excerpt: Option<Excerpt>,
    /// Suffix of the title of an excerpt from the previous attempt; otherwise empty.
    pub of_attempt: &'static str,
    /// The log's first error, unless the reason contains the error.
    pub error: Option<String>,
    /// Link to the whole log, if any.
    pub whole_log: Option<String>,
    pub signature: Option<Answer>,
    pub report: Option<Value>,
    pub has_findings: bool,
    pub provenance: Option<ProvenanceSummary>,
    /// Image reference by digest.
    pub image_name: Option<String>,
    /// Reason why there is no report, or why the image could not be read.
    pub no_report: Option<String>,
    pub components: Option<Listed<Component>>,
    pub comparison: Option<Comparison>,
    pub actions: Vec<ActionLink>,
    /// Whether the nodes wait for the image.
    pub waits: bool,
    /// Whether the image is being built.
    pub live: bool,
    pub nodes: Listed<Link>,
}

/// Elapsed seconds of a build, and the usual duration.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct BuildBar {
    pub elapsed: u64,
    pub usual: Option<u64>,
    pub text: String,
}

/// Differences between a cell's image and the previous image, or the image of a neighboring kernel.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Comparison {
    pub name: String,
    pub image: String,
    pub link: Option<String>,
    pub differences: Listed<Difference>,
    /// Reason why the images cannot be compared.
    pub why_not: Option<String>,
}

impl Fleet<'_> {
    /// Returns the model of a cell's page.
    pub fn cell_page(&self, entry: &StatusEntry<'_>, data: CellData) -> CellPage {
        let CellData { log, image, previous_image, usual, mut actions } = data;
        let has_log = log.is_some();
        let (image, no_image) = match image {
            Some(Err(why)) => (None, Some(why)),
            image => (image.and_then(Result::ok), None),
        };
        let report = image.as_ref().and_then(|image| image.report.clone());
        let lacks_report = image.is_some() && report.is_none();
        let no_report = lacks_report.then(|| "the image has none".to_owned()).or(no_image.clone());
        let (reason, hint) = entry.reason_and_hint();
        let build_time = self.build_time(entry, usual);
        let elapsed = build_time.elapsed_seconds.filter(|_| is_building(entry));
        let build = elapsed.map(|elapsed| BuildBar {
            elapsed,
            usual: build_time.usual_seconds,
            text: build_time.to_string(),
        });
        // The bar of a running build already shows this time.
        let listed_time = Some(build_time).filter(|time| build.is_none() && *time != BuildTime::default());
        let previous = match entry.outcome {
            Outcome::UpToDate { published, .. } => self.replaced_values(&published.digest).collect(),
            _ => previous_image_fact(previous_image.as_ref(), no_image.is_some()).into_iter().collect(),
        };
        let is_previous = log.as_ref().is_some_and(|log| log.is_of_previous_attempt);
        let of_attempt = if is_previous { " of the previous attempt" } else { "" };
        let excerpt = log.and_then(|log| log.excerpt).filter(|excerpt| !excerpt.lines.is_empty());
        let error = excerpt.as_ref().and_then(|excerpt| excerpt.error.clone());
        CellPage {
            state: entry.row.phase.as_str(),
            class: class_of(entry),
            error: error.filter(|error| !reason.contains(error.as_str())),
            reason,
            hint,
            facts: self.cell_facts(entry, listed_time, previous, image.as_deref()),
            inputs: inputs(entry),
            build,
            excerpt,
            of_attempt,
            whole_log: has_log.then(|| log_link(entry)),
            signature: image.as_ref().and_then(|image| image.signature.as_ref()).map(signature_answer),
            has_findings: report.as_ref().is_some_and(has_findings),
            report,
            image_name: image_of(entry.outcome).map(|image| image.to_string()),
            provenance: image.as_ref().and_then(|image| image.provenance.clone()),
            no_report,
            components: image
                .as_ref()
                .and_then(|image| Some(Listed::of(image.components.clone()?, MAX_COMPONENTS))),
            comparison: previous_image.and_then(|previous| comparison(entry, image.as_deref(), previous)),
            actions: actions.remove(&cell_link(entry.image, entry.target)).unwrap_or_default(),
            waits: entry.row.phase != Phase::Published,
            live: is_building(entry),
            nodes: self.nodes_of_cell(entry),
        }
    }

    /// Returns how long the build has taken and usually takes. `usual` is the fallback for the usual duration.
    fn build_time(&self, entry: &StatusEntry<'_>, usual: Option<Duration>) -> BuildTime {
        let time = self.time(entry).unwrap_or_default();
        let usual_seconds = time.usual_seconds.or_else(|| usual.map(|usual| usual.as_secs()));
        BuildTime { usual_seconds, ..time }
    }

    /// Returns the facts in a cell's page. `previous` are the facts about the previous image.
    fn cell_facts(
        &self,
        entry: &StatusEntry<'_>,
        time: Option<BuildTime>,
        previous: Vec<Fact>,
        image: Option<&Image>,
    ) -> Vec<Fact> {
        let row = &entry.row;
        let mut facts = Vec::new();
        if let Some(since) = self.state_since(entry) {
            facts.push(fact("Since", format!("{since:.0} ({})", ago(since, self.now))));
        }
        facts.extend(time.map(|time| fact("Build time", time)));
        facts.extend(row.verdict.map(|verdict| fact("Check", verdict)));
        facts.extend((!row.reference.is_empty()).then(|| fact("Image", &row.reference)));
        facts.extend(row.digest.as_ref().map(|digest| fact("Published digest", digest)));
        facts.extend(previous);
        facts.extend(image.map(|image| fact("Size", HumanBytes(image.size))));
        if let Some(activity) = entry.activity {
            facts.extend((activity.attempts > 0).then(|| fact("Attempts", activity.attempts)));
            facts
                .extend(activity.took.map(|took| fact("Last attempt took", format!("{} s", took.as_secs()))));
            facts.extend(activity.next_retry.map(|time| fact("Next retry", format!("{time:.0}"))));
        }
        facts.extend(
            (!row.announced_by.is_empty()).then(|| fact("Announced by", row.announced_by.join(", "))),
        );
        facts
    }

    /// Returns links to the nodes that need the cell's image for their current kernel or their next kernel.
    fn nodes_of_cell(&self, entry: &StatusEntry<'_>) -> Listed<Link> {
        let groups = self.facts.groups.iter();
        let running = groups
            .filter(|group| group.target == *entry.target && group.images.contains(entry.image))
            .flat_map(|group| &group.nodes);
        let announced = self.facts.announced.iter();
        let announcing = announced
            .filter(|announced| {
                let mut needs = announced.next.needs.iter();
                announced.next.kernel == *entry.target && needs.any(|needed| needed.image == *entry.image)
            })
            .flat_map(|announced| &announced.nodes);
        let mut names: Vec<&String> = running.chain(announcing).collect();
        names.sort_unstable_by(|a, b| natural_order(a, b));
        names.dedup();
        Listed::unfolded(names, MAX_NAMED_NODES).map(|name| node_link(name))
    }

    /// Returns the values that the image replaced in rollout targets. A rollback restores these values.
    fn replaced_values(&self, digest: &Digest) -> impl Iterator<Item = Fact> {
        let records =
            self.facts.records.iter().filter_map(|(object, record)| Some((object, record.as_ref().ok()?)));
        let fields = records
            .flat_map(|(object, record)| record.0.iter().map(move |(field, record)| (object, field, record)));
        let of_image = fields.filter(|(_, _, record)| text(&record.set).contains(digest.as_str()));
        of_image.take(MAX_REPLACED_FIELDS).map(|(object, field, record)| {
            fact("Replaced", format!("{} ({object}, {field})", text(&record.replaced)))
        })
    }

    /// Returns the model of a node's page, if there is a node of this name.
    pub fn node_page(&self, name: &str) -> Option<NodePage> {
        let node = self.facts.nodes.get(name)?;
        let group = node.group.as_ref().ok().and_then(|index| self.facts.groups.get(*index));
        let runs = match (&node.group, group) {
            (Err(why), _) => format!("skipped: {why}"),
            (Ok(_), group) => group.map(|group| group.target.to_string()).unwrap_or_default(),
        };
        let nothing = NodeEntries::default();
        let NodeEntries { planned, ignored_announcement, own_drivers, host_drivers, upgrades } =
            self.node_entries(name).unwrap_or(&nothing);
        let mut facts = vec![fact("Runs", runs)];
        facts.extend((!node.os_image.is_empty()).then(|| fact("Operating system", &node.os_image)));
        facts.extend(node.cordoned.then(|| fact("Scheduling", "cordoned")));
        facts.extend(node.announces.as_ref().map(|release| fact("Announces", release)));
        let next = planned.and_then(|planned| planned.next.as_deref());
        facts.extend(next.map(|next| fact("Next kernel", &next.kernel)));
        facts.extend(ignored_announcement.as_ref().map(|why| fact("Ignored announcement", why)));
        facts.extend(own_drivers.iter().map(|own| fact("Own driver", format!("{}: {own}", own.image))));
        facts.extend(host_drivers.map(|drivers| fact("Host drivers", format!("farrier-host {drivers}"))));
        facts.extend(upgrades.iter().map(|(upgrade, node_upgrade)| {
            let last = node_upgrade.note.as_ref();
            let since = last.map(|last| format!(" ({} since {:.0})", last.state.as_str(), last.since));
            fact("Upgrade", format!("{}: {node_upgrade}{}", upgrade.rollout, since.unwrap_or_default()))
        }));
        let current = group.into_iter();
        let current = current.flat_map(|group| group.images.iter().map(move |image| (image, &group.target)));
        let announced =
            next.into_iter().flat_map(|next| next.needs.iter().map(|needed| (&needed.image, &next.kernel)));
        let images = current.chain(announced).filter_map(|(image, target)| self.entry(image, target));
        let images = images.map(|entry| NodeImage {
            subject: subject(entry),
            link: cell_link(entry.image, entry.target),
            state: entry.row.phase.as_str(),
            class: class_of(entry),
            reason: entry.reason_and_hint().0,
        });
        Some(NodePage {
            may_boot: planned.filter(|planned| planned.next.is_some()).map(|planned| may_boot(self, planned)),
            facts,
            images: images.collect(),
        })
    }
}

/// Returns the fact about the previous image, with which a cell's image is compared. Returns `None` if the cell's own image could
/// not be read, because the previous image is unknown then.
fn previous_image_fact(
    previous_image: Option<&(ComparedImage, ImageResult)>,
    is_unreadable: bool,
) -> Option<Fact> {
    match previous_image {
        Some((ComparedImage { image, cell }, _)) => {
            let kernel = cell.as_ref().map(|cell| format!(" (for {})", cell.target)).unwrap_or_default();
            Some(fact("Previous good image", format!("{image}{kernel}")))
        }
        None if is_unreadable => None,
        None => Some(fact("Previous good image", "none for this distribution and architecture")),
    }
}

/// Whether any module has a finding.
fn has_findings(report: &Value) -> bool {
    let modules = report["modules"].as_array().into_iter().flatten();
    modules.filter_map(|module| module["findings"].as_array()).any(|findings| !findings.is_empty())
}

fn signature_answer(signature_status: &SignatureStatus) -> Answer {
    let (word, class, why) = match signature_status {
        SignatureStatus::Signed => ("signed", StateClass::Ok, "with a key of this site"),
        SignatureStatus::NoKeys => ("not checked", StateClass::Off, "site.yaml has no key"),
        SignatureStatus::Refused(why) => ("not signed", StateClass::Bad, why.as_str()),
    };
    Answer { word, class, why: why.to_owned() }
}

/// Compares an image's components with the components of the previous image. Uses the bills of materials of both images, or else
/// the components that the plan knows.
fn comparison(
    entry: &StatusEntry<'_>,
    image: Option<&Image>,
    (previous, previous_image): (ComparedImage, ImageResult),
) -> Option<Comparison> {
    let planned = planned_components(entry.outcome.cell()?);
    let ComparedImage { image: reference, cell } = previous;
    let (name, link) = match &cell {
        Some(cell) => {
            (format!("{} for {}", cell.image, cell.target), Some(cell_link(&cell.image, &cell.target)))
        }
        None => ("the image under its tag".to_owned(), None),
    };
    let old_bill = previous_image.as_ref().ok().and_then(|image| image.components.clone());
    let new_bill = image.and_then(|image| image.components.clone());
    let pair = match (old_bill, new_bill) {
        (Some(old), Some(new)) => Some((old, new)),
        (Some(old), None) => Some((only_planned(&old), planned)),
        (None, _) => {
            let old_cell = cell.as_ref().and_then(|cell| cell.outcome.cell());
            old_cell.map(|old_cell| (planned_components(old_cell), planned))
        }
    };
    let why_not = pair
        .is_none()
        .then(|| previous_image.err().unwrap_or_else(|| "it has no bill of materials".to_owned()));
    let differing = pair.map(|(old, new)| differences(&old, &new, cell.is_none())).unwrap_or_default();
    let differences = Listed::of(differing, MAX_DIFFERENCES);
    Some(Comparison { name, image: reference.to_string(), link, differences, why_not })
}

/// Returns the inputs of an image's build.
fn inputs(entry: &StatusEntry<'_>) -> Vec<Fact> {
    let Some(cell) = entry.outcome.cell() else {
        return entry.row.needs.iter().map(|need| fact("Waits for", need)).collect();
    };
    let mut inputs = vec![
        fact("Input hash", cell.input_hash),
        fact("Driver version", &cell.version),
        fact("Kernel family", &cell.family),
        fact("Toolchain", &cell.toolchain),
    ];
    inputs.extend(cell.fetched.headers.as_ref().map(|headers| fact("Headers", headers)));
    let sources = cell.fetched.sources.iter();
    inputs.extend(sources.map(|(name, identity)| fact("Source", format!("{name}: {identity}"))));
    inputs.extend(cell.patches.iter().map(|patch| fact("Patch", &patch.name)));
    inputs.extend(cell.needs.iter().map(|need| fact("Compiled against", need)));
    inputs.extend(cell.fetched.base.as_ref().map(|base| fact("Runtime base", base)));
    inputs.extend(cell.further.iter().map(|tag| fact("Further tag", tag)));
    inputs
}

/// Model of a node's page.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct NodePage {
    /// Whether the node may boot its next kernel.
    pub may_boot: Option<Answer>,
    pub facts: Vec<Fact>,
    pub images: Vec<NodeImage>,
}

/// A one-word answer with its reason.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Answer {
    pub word: &'static str,
    pub class: StateClass,
    pub why: String,
}

/// An image that a node needs, now or with its next kernel.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct NodeImage {
    pub subject: String,
    pub link: String,
    pub state: &'static str,
    pub class: StateClass,
    pub reason: String,
}

fn may_boot(fleet: &Fleet<'_>, planned: &PlannedNode) -> Answer {
    let is_failed = |next: &NextKernel| {
        let entries = next.needs.iter().filter_map(|needed| fleet.entry(&needed.image, &next.kernel));
        entries.map(class_of).any(|class| class == StateClass::Bad)
    };
    let (word, class) = match planned.may_boot {
        BootReadiness::Ready => ("ready", StateClass::Ok),
        BootReadiness::NoDriver => ("no driver needed", StateClass::Ok),
        BootReadiness::Unknown => ("unknown", StateClass::Warn),
        BootReadiness::Wait if planned.next.as_deref().is_some_and(is_failed) => {
            ("no: an image failed", StateClass::Bad)
        }
        BootReadiness::Wait => ("wait", StateClass::Wait),
    };
    let why = planned.next.as_ref().map(|next| missing_images(next)).unwrap_or_default();
    Answer { word, class, why }
}

/// Maximum number of nodes of a group that the served page lists. A file lists all nodes, because it has no search.
const MAX_ROWS: usize = 200;
/// Maximum number of nodes in all groups of the served page, except that each group lists one.
const MAX_PAGE_ROWS: usize = 4000;

/// Model of the page of nodes, grouped by kernel and needed images.
#[derive(Debug, Serialize)]
pub struct NodesPage {
    pub groups: Vec<NodeGroupView>,
    /// The part of a name that users search for.
    pub name: String,
    /// Whether a server evaluates the search.
    pub served: bool,
}

/// Nodes with the same kernel and the same images.
#[derive(Debug, Serialize)]
pub struct NodeGroupView {
    pub what: String,
    pub count: String,
    pub images: Vec<ImageBadge>,
    pub nodes: Listed<NodeRow>,
}

/// A node in the list of its group.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct NodeRow {
    pub node: Link,
    pub os_image: String,
    pub next: String,
    pub may_boot: Option<Answer>,
    /// Reason for skipping the node, and `cordoned` for a cordoned node.
    pub remarks: String,
}

impl NodesPage {
    pub fn of(fleet: &Fleet<'_>, name: String) -> Self {
        let facts = fleet.facts;
        let share = MAX_PAGE_ROWS / (facts.groups.len() + 1);
        let limit = if facts.served { share.clamp(1, MAX_ROWS) } else { usize::MAX };
        let view = |title: String, images: Vec<ImageBadge>, all: &mut dyn Iterator<Item = &String>| {
            let matching: Vec<&String> = all.filter(|node| node.contains(&name)).collect();
            let rows = matching.iter().take(limit).filter_map(|node| NodeRow::of(fleet, node)).collect();
            let nodes = Listed { items: rows, folded: 0, more: matching.len().saturating_sub(limit) };
            NodeGroupView { what: title, count: nodes_in_words(matching.len()), images, nodes }
        };
        let mut groups: Vec<NodeGroupView> = facts
            .groups
            .iter()
            .map(|group| {
                let entries = group.images.iter().filter_map(|image| fleet.entry(image, &group.target));
                let images: Vec<ImageBadge> = entries.map(image_badge).collect();
                let suffix = if images.is_empty() { ": no driver image" } else { "" };
                view(format!("{}{suffix}", group.target), images, &mut group.nodes.iter())
            })
            .collect();
        groups.sort_by(|a, b| natural_order(&a.what, &b.what));
        let skipped = facts.nodes.iter().filter(|(_, node)| node.group.is_err());
        groups.push(view("skipped".to_owned(), Vec::new(), &mut skipped.map(|(name, _)| name)));
        groups.retain(|group| !group.nodes.items.is_empty());
        Self { groups, name, served: facts.served }
    }
}

impl NodeRow {
    fn of(fleet: &Fleet<'_>, name: &str) -> Option<Self> {
        let node = fleet.facts.nodes.get(name)?;
        let planned = fleet.node_entries(name).and_then(|entries| entries.planned);
        let next = planned.and_then(|planned| planned.next.as_deref());
        let cordoned = node.cordoned.then(|| "cordoned".to_owned());
        let remarks: Vec<String> = node.group.as_ref().err().cloned().into_iter().chain(cordoned).collect();
        Some(Self {
            node: node_link(name),
            os_image: node.os_image.clone(),
            next: next.map(|next| next.kernel.release.to_string()).unwrap_or_default(),
            may_boot: planned.filter(|_| next.is_some()).map(|planned| may_boot(fleet, planned)),
            remarks: remarks.join(", "),
        })
    }
}

/// Formats the value of a field without the quotes of JSON strings.
pub fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}
