//! Models of the pages of a cell, of a node, and of all nodes.

use std::fmt::Display;

use farrier_core::{
    image::{Digest, ImageName},
    plan::{BootReadiness, BuildTime, Outcome, Phase, PlannedNode, StatusEntry, why_not},
};
use farrier_store::Standing;
use indicatif::HumanBytes;
use serde::Serialize;
use serde_json::Value;

use super::{
    action::Offer,
    facts::{Facts, natural},
    fleet::{
        Fleet, Link, Listed, OfNode, ago, cell_link, class_of, is_building, log_link, node_link, nodes,
        subject,
    },
    image::{Built, Found, FoundImage, Image},
    log::Excerpt,
    materials::{Before, Difference, Part, as_planned, differences, image_of, planned_parts},
};

/// Maximum number of nodes that a cell's page names.
pub const NAMED: usize = 200;
/// Maximum numbers of differing inputs, and of an image's components, that a cell's page shows.
const DIFFERENCES: usize = 50;
const PARTS: usize = 300;
/// Maximum number of fields with a replaced image that a cell's page names.
const REPLACED: usize = 10;

/// A named value.
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
    pub class: &'static str,
    pub reason: String,
    pub hint: String,
    pub facts: Vec<Fact>,
    pub inputs: Vec<Fact>,
    /// Progress of the running build.
    pub build: Option<BuildBar>,
    pub excerpt: Option<Excerpt>,
    /// The log's first error, unless the reason states it.
    pub error: Option<String>,
    /// Link to the whole log, if any.
    pub whole_log: Option<String>,
    pub signature: Option<Answer>,
    pub report: Option<Value>,
    pub has_findings: bool,
    pub provenance: Option<Built>,
    /// Image reference by digest.
    pub image_name: Option<String>,
    /// Reason for a missing report, or for missing data of the image.
    pub no_report: Option<String>,
    pub parts: Option<Listed<Part>>,
    pub before: Option<Compared>,
    pub offers: Vec<Offer>,
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
    pub said: String,
}

/// Differences between a cell's image and an earlier or neighboring one.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Compared {
    pub name: String,
    pub image: String,
    pub link: Option<String>,
    pub differences: Listed<Difference>,
    /// Reason why the images cannot be compared.
    pub why_not: Option<String>,
}

impl Fleet<'_> {
    /// Returns the model of a cell's page.
    pub fn cell_page(&self, entry: &StatusEntry<'_>, found: Found) -> CellPage {
        let Found { log, image, before, usual, mut offers } = found;
        let has_log = log.is_some();
        let (image, no_image) = match image {
            Some(Err(why)) => (None, Some(why)),
            image => (image.and_then(Result::ok), None),
        };
        let report = image.as_ref().and_then(|image| image.report.clone());
        let no_report = image.as_ref().filter(|_| report.is_none());
        let no_report = no_report.map(|_| "the image has none".to_owned());
        let (reason, hint) = entry.reason_and_hint();
        let row = &entry.row;
        let mut facts = Vec::new();
        if let Some(since) = self.age(entry) {
            facts.push(fact("Since", format!("{since:.0} ({})", ago(since, self.now))));
        }
        let time = self.time(entry).unwrap_or_default();
        let usual_seconds = time.usual_seconds.or_else(|| usual.map(|usual| usual.as_secs()));
        let time = BuildTime { usual_seconds, ..time };
        let build = time.elapsed_seconds.filter(|_| is_building(entry));
        let build = build.map(|elapsed| BuildBar { elapsed, usual: usual_seconds, said: time.to_string() });
        facts.extend((build.is_none() && time != BuildTime::default()).then(|| fact("Build time", time)));
        facts.extend(row.verdict.map(|verdict| fact("Check", verdict)));
        facts.extend((!row.reference.is_empty()).then(|| fact("Image", &row.reference)));
        facts.extend(row.digest.as_ref().map(|digest| fact("Published digest", digest)));
        if let Outcome::UpToDate { published, .. } = entry.outcome {
            facts.extend(self.replaced(&published.digest));
        } else if let Some((Before { image, cell }, _)) = &before {
            let of = cell.as_ref().map(|cell| format!(" (for {})", cell.target)).unwrap_or_default();
            facts.push(fact("Previous good image", format!("{image}{of}")));
        } else if no_image.is_none() {
            facts.push(fact("Previous good image", "none for this distribution and architecture"));
        }
        facts.extend(image.as_ref().map(|image| fact("Size", HumanBytes(image.size))));
        if let Some(activity) = entry.activity {
            facts.extend((activity.attempts > 0).then(|| fact("Attempts", activity.attempts)));
            facts
                .extend(activity.took.map(|took| fact("Last attempt took", format!("{} s", took.as_secs()))));
            facts.extend(activity.next_retry.map(|at| fact("Next retry", format!("{at:.0}"))));
        }
        facts.extend(
            (!row.announced_by.is_empty()).then(|| fact("Announced by", row.announced_by.join(", "))),
        );
        let running = self.facts.groups.iter();
        let running = running
            .filter(|group| group.target == *entry.target && group.calls.contains(entry.image))
            .flat_map(|group| &group.nodes);
        let announcing = self.facts.announced.iter();
        let announcing = announcing
            .filter(|announced| {
                let mut needs = announced.next.needs.iter();
                announced.next.kernel == *entry.target && needs.any(|needed| needed.image == *entry.image)
            })
            .flat_map(|announced| &announced.nodes);
        let mut names: Vec<&String> = running.chain(announcing).collect();
        names.sort_unstable_by(|a, b| natural(a, b));
        names.dedup();
        let more = names.len().saturating_sub(NAMED);
        names.truncate(NAMED);
        let links = Listed { items: names.iter().map(|name| node_link(name)).collect(), folded: 0, more };
        let excerpt = log.and_then(|log| log.excerpt).filter(|excerpt| !excerpt.lines.is_empty());
        let error = excerpt.as_ref().and_then(|excerpt| excerpt.error.clone());
        let error = error.filter(|error| !reason.contains(error.as_str()));
        let modules = report.iter().filter_map(|report| report["modules"].as_array()).flatten();
        let has_findings =
            modules.filter_map(|module| module["findings"].as_array()).any(|findings| !findings.is_empty());
        CellPage {
            state: row.phase.as_str(),
            class: class_of(entry),
            reason,
            hint,
            facts,
            inputs: inputs(entry),
            build,
            excerpt,
            error,
            whole_log: has_log.then(|| log_link(entry)),
            signature: image.as_ref().and_then(|image| image.signature.as_ref()).map(signature),
            report,
            has_findings,
            image_name: image_of(entry.outcome).map(|image| image.to_string()),
            provenance: image.as_ref().and_then(|image| image.provenance.clone()),
            no_report: no_report.or(no_image),
            parts: image.as_ref().and_then(|image| Some(Listed::of(image.parts.clone()?, PARTS))),
            before: before.and_then(|before| compared(entry, image.as_deref(), before)),
            offers: offers.remove(&cell_link(entry.image, entry.target)).unwrap_or_default(),
            waits: row.phase != Phase::Published,
            live: is_building(entry),
            nodes: links,
        }
    }

    /// Returns what the image replaced in rollout targets, which is what a rollback restores.
    fn replaced(&self, digest: &Digest) -> impl Iterator<Item = Fact> {
        let records =
            self.facts.records.iter().filter_map(|(object, record)| Some((object, record.as_ref().ok()?)));
        let fields = records
            .flat_map(|(object, record)| record.0.iter().map(move |(field, record)| (object, field, record)));
        let of_image = fields.filter(|(_, _, record)| text(&record.set).contains(digest.as_str()));
        of_image.take(REPLACED).map(|(object, field, record)| {
            fact("Replaced", format!("{} ({object}, {field})", text(&record.replaced)))
        })
    }

    /// Returns the model of a node's page, if there is a node of this name.
    pub fn node_page(&self, name: &str) -> Option<NodePage> {
        let node = self.facts.nodes.get(name)?;
        let group = node.group.as_ref().ok().and_then(|place| self.facts.groups.get(*place));
        let runs = match (&node.group, group) {
            (Err(why), _) => format!("skipped: {why}"),
            (Ok(_), group) => group.map(|group| group.target.to_string()).unwrap_or_default(),
        };
        let nothing = OfNode::default();
        let OfNode { planned, unused, own, turns } = self.of_node(name).unwrap_or(&nothing);
        let mut facts = vec![fact("Runs", runs)];
        facts.extend((!node.os_image.is_empty()).then(|| fact("Operating system", &node.os_image)));
        facts.extend(node.cordoned.then(|| fact("Scheduling", "cordoned")));
        facts.extend(node.announces.as_ref().map(|release| fact("Announces", release)));
        let next = planned.and_then(|planned| planned.next.as_deref());
        facts.extend(next.map(|next| fact("Next kernel", &next.kernel)));
        facts.extend(unused.as_ref().map(|why| fact("Ignored announcement", why)));
        facts.extend(own.iter().map(|own| fact("Own driver", format!("{}: {own}", own.image))));
        facts.extend(turns.iter().map(|(upgrade, turn)| {
            let since =
                turn.note.as_ref().map(|last| format!(" ({} since {:.0})", last.state.as_str(), last.since));
            fact("Upgrade", format!("{}: {turn}{}", upgrade.rollout, since.unwrap_or_default()))
        }));
        let called = group.into_iter();
        let called = called.flat_map(|group| group.calls.iter().map(move |image| (image, &group.target)));
        let announced =
            next.into_iter().flat_map(|next| next.needs.iter().map(|needed| (&needed.image, &next.kernel)));
        let images = called.chain(announced).filter_map(|(image, target)| self.entry(image, target));
        let images = images.map(|entry| NodeImage {
            subject: subject(entry),
            link: cell_link(entry.image, entry.target),
            state: entry.row.phase.as_str(),
            class: class_of(entry),
            reason: entry.reason_and_hint().0,
        });
        Some(NodePage {
            may_boot: planned.filter(|planned| planned.next.is_some()).map(may_boot),
            facts,
            images: images.collect(),
        })
    }
}

fn signature(standing: &Standing) -> Answer {
    let (word, class, why) = match standing {
        Standing::Signed => ("signed", "ok", "with a key of this site"),
        Standing::NoKeys => ("not checked", "off", "site.yaml has no key"),
        Standing::Refused(why) => ("not signed", "bad", why.as_str()),
    };
    Answer { word, class, why: why.to_owned() }
}

/// Compares an image's components with those of the previous image: by their bills of materials, else by what
/// the plan knows.
fn compared(
    entry: &StatusEntry<'_>,
    image: Option<&Image>,
    (before, found): (Before, FoundImage),
) -> Option<Compared> {
    let planned = planned_parts(entry.outcome.cell()?);
    let Before { image: reference, cell } = before;
    let (name, link) = match &cell {
        Some(cell) => {
            (format!("{} for {}", cell.image, cell.target), Some(cell_link(&cell.image, &cell.target)))
        }
        None => ("the image under its tag".to_owned(), None),
    };
    let then = found.as_ref().ok().and_then(|found| found.parts.clone());
    let planned_then = || cell.as_ref().and_then(|cell| cell.outcome.cell()).map(|cell| planned_parts(cell));
    let pair = match (then, image.and_then(|image| image.parts.clone())) {
        (Some(then), Some(now)) => Some((then, now)),
        (Some(then), None) => Some((as_planned(&then), planned)),
        (None, _) => planned_then().map(|then| (then, planned)),
    };
    let why_not =
        pair.is_none().then(|| found.err().unwrap_or_else(|| "it has no bill of materials".to_owned()));
    let differing = pair.map(|(then, now)| differences(&then, &now, cell.is_none())).unwrap_or_default();
    let differences = Listed::of(differing, DIFFERENCES);
    Some(Compared { name, image: reference.to_string(), link, differences, why_not })
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

/// A short answer with its reason.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Answer {
    pub word: &'static str,
    pub class: &'static str,
    pub why: String,
}

/// An image that a node needs, now or with its next kernel.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct NodeImage {
    pub subject: String,
    pub link: String,
    pub state: &'static str,
    pub class: &'static str,
    pub reason: String,
}

fn may_boot(planned: &PlannedNode) -> Answer {
    let (word, class) = match planned.may_boot {
        BootReadiness::Ready => ("ready", "ok"),
        BootReadiness::NoDriver => ("no driver needed", "ok"),
        BootReadiness::Unknown => ("unknown", "warn"),
        BootReadiness::Wait => ("wait", "wait"),
    };
    let why = planned.next.as_ref().map(|next| why_not(next)).unwrap_or_default();
    Answer { word, class, why }
}

/// Model of the page of all nodes, grouped by what they run.
#[derive(Debug, Serialize)]
pub struct NodesPage {
    pub groups: Vec<NodesOf>,
}

/// Nodes with the same kernel and the same images.
#[derive(Debug, Serialize)]
pub struct NodesOf {
    pub what: String,
    pub count: String,
    pub nodes: Vec<Link>,
}

impl NodesPage {
    pub fn of(facts: &Facts) -> Self {
        let of = |what: String, names: Vec<&String>| NodesOf {
            what,
            count: nodes(names.len()),
            nodes: names.into_iter().map(|name| node_link(name)).collect(),
        };
        let mut groups: Vec<NodesOf> = facts
            .groups
            .iter()
            .map(|group| {
                let calls: Vec<&str> = group.calls.iter().map(ImageName::as_str).collect();
                let calls = if calls.is_empty() { "no driver image".to_owned() } else { calls.join(", ") };
                of(format!("{}: {calls}", group.target), group.nodes.iter().collect())
            })
            .collect();
        groups.sort_by(|a, b| natural(&a.what, &b.what));
        let unknown: Vec<&String> =
            facts.nodes.iter().filter(|(_, node)| node.group.is_err()).map(|(name, _)| name).collect();
        if !unknown.is_empty() {
            groups.push(of("skipped".to_owned(), unknown));
        }
        Self { groups }
    }
}

/// Formats the value of a field without the quotes of JSON strings.
pub fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}
