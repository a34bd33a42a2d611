//! Pure: the pages of one cell and one node, and that of all nodes.

use std::fmt::Display;

use indicatif::HumanBytes;
use serde::Serialize;
use serde_json::Value;

use super::{
    action::Offer,
    facts::Facts,
    fleet::{
        Fleet, Link, Listed, ago, cell_link, class_of, is_building, log_link, node_link, nodes, subject,
    },
    image::{Found, FoundImage, Image},
    log::Excerpt,
    materials::{Before, Difference, Part, as_planned, differences, planned_parts},
};
use crate::{
    image::{Digest, ImageName},
    plan::{BuildTime, MayBoot, Outcome, Phase, PlannedNode, StatusEntry, why_not},
    store::Standing,
};

/// Nodes that a cell's page names.
pub const NAMED: usize = 200;
/// Differing inputs, and components of an image, that it shows.
const DIFFERENCES: usize = 50;
const PARTS: usize = 300;
/// Fields in which it was put that it names.
const REPLACED: usize = 10;

/// A name and what is said of it.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Fact {
    pub name: &'static str,
    pub value: String,
}

pub fn fact(name: &'static str, value: impl Display) -> Fact {
    Fact { name, value: value.to_string() }
}

/// One image for one kernel.
#[derive(Debug, Serialize)]
pub struct CellPage {
    pub state: &'static str,
    pub class: &'static str,
    pub reason: String,
    pub hint: String,
    pub facts: Vec<Fact>,
    pub inputs: Vec<Fact>,
    pub excerpt: Option<Excerpt>,
    /// The whole log, where there is one.
    pub whole_log: Option<String>,
    pub signature: Option<Answer>,
    pub report: Option<Value>,
    /// Why there is none, or nothing of the image.
    pub no_report: Option<String>,
    pub parts: Option<Listed<Part>>,
    pub before: Option<Compared>,
    pub offers: Vec<Offer>,
    /// Do the nodes wait for it?
    pub waits: bool,
    /// Is it being built?
    pub live: bool,
    pub nodes: Listed<Link>,
}

/// What a cell's image is compared with.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Compared {
    pub name: String,
    pub image: String,
    pub link: Option<String>,
    pub differences: Listed<Difference>,
    /// Why nothing can be said.
    pub why_not: Option<String>,
}

impl Fleet<'_> {
    /// The page of a cell.
    pub fn cell_page(&self, entry: &StatusEntry<'_>, found: Found) -> CellPage {
        let Found { log, image, before, usual, mut offers } = found;
        let has_log = log.is_some();
        let (image, no_image) = match image {
            Some(Err(why)) => (None, Some(why)),
            image => (image.and_then(Result::ok), None),
        };
        let report = image.as_ref().and_then(|image| image.report.clone());
        let no_report = image.as_ref().filter(|_| report.is_none());
        let no_report = no_report.map(|_| "there is none beside the image".to_owned());
        let (reason, hint) = entry.reason_and_hint();
        let row = &entry.row;
        let mut facts = Vec::new();
        if let Some(since) = self.age(entry) {
            facts.push(fact("Since", format!("{since:.0} ({})", ago(since, self.now))));
        }
        let time = self.time(entry).unwrap_or_default();
        let usual_seconds = time.usual_seconds.or_else(|| usual.map(|usual| usual.as_secs()));
        let time = BuildTime { usual_seconds, ..time };
        facts.extend((time != BuildTime::default()).then(|| fact("Build time", time)));
        facts.extend(row.verdict.map(|verdict| fact("Check", verdict)));
        facts.extend((!row.reference.is_empty()).then(|| fact("Image", &row.reference)));
        facts.extend(row.digest.as_ref().map(|digest| fact("Published digest", digest)));
        if let Outcome::UpToDate { published, .. } = entry.outcome {
            facts.extend(self.replaced(&published.digest));
        } else if let Some((Before { image, cell }, _)) = &before {
            let of = cell.as_ref().map(|cell| format!(" (for {})", cell.target)).unwrap_or_default();
            facts.push(fact("Previous good image", format!("{image}{of}")));
        }
        facts.extend(image.as_ref().map(|image| fact("Size", HumanBytes(image.size))));
        let provenance = image.as_ref().and_then(|image| image.provenance.as_ref());
        facts.extend(provenance.map(|built| fact("Provenance", built)));
        if let Some(activity) = entry.activity {
            facts.extend((activity.attempts > 0).then(|| fact("Attempts", activity.attempts)));
            facts
                .extend(activity.took.map(|took| fact("The last one took", format!("{} s", took.as_secs()))));
            facts.extend(activity.next_retry.map(|at| fact("Tried again", format!("{at:.0}"))));
        }
        facts.extend(
            (!row.announced_by.is_empty()).then(|| fact("Announced by", row.announced_by.join(", "))),
        );
        let calling = self.facts.groups.iter();
        let calling =
            calling.filter(|group| group.target == *entry.target && group.calls.contains(entry.image));
        let links = calling.flat_map(|group| &group.nodes).map(|name| node_link(name)).collect();
        CellPage {
            state: row.phase.as_str(),
            class: class_of(entry),
            reason,
            hint,
            facts,
            inputs: inputs(entry),
            excerpt: log.and_then(|log| log.excerpt).filter(|excerpt| !excerpt.lines.is_empty()),
            whole_log: has_log.then(|| log_link(entry)),
            signature: image.as_ref().and_then(|image| image.signature.as_ref()).map(signature),
            report,
            no_report: no_report.or(no_image),
            parts: image.as_ref().and_then(|image| Some(Listed::of(image.parts.clone()?, PARTS))),
            before: before.and_then(|before| compared(entry, image.as_deref(), before)),
            offers: offers.remove(&cell_link(entry.image, entry.target)).unwrap_or_default(),
            waits: row.phase != Phase::Published,
            live: is_building(entry),
            nodes: Listed::of(links, NAMED),
        }
    }

    /// What was there before an image was rolled out: what a rollback puts back.
    fn replaced(&self, digest: &Digest) -> impl Iterator<Item = Fact> {
        let records =
            self.facts.records.iter().filter_map(|(object, record)| Some((object, record.as_ref().ok()?)));
        let fields = records
            .flat_map(|(object, record)| record.0.iter().map(move |(field, record)| (object, field, record)));
        let of_image = fields.filter(|(_, _, record)| text(&record.set).contains(digest.as_str()));
        of_image.take(REPLACED).map(|(object, field, record)| {
            fact("Took the place of", format!("{} ({object}, {field})", text(&record.replaced)))
        })
    }

    /// The page of a node, if there is one of this name.
    pub fn node_page(&self, name: &str) -> Option<NodePage> {
        let node = self.facts.nodes.get(name)?;
        let group = node.group.as_ref().ok().and_then(|place| self.facts.groups.get(*place));
        let runs = match (&node.group, group) {
            (Err(why), _) => format!("left alone: {why}"),
            (Ok(_), group) => group.map(|group| group.target.to_string()).unwrap_or_default(),
        };
        let mut facts = vec![fact("Runs", runs)];
        facts.push(fact("Operating system", &node.os_image));
        facts.extend(node.cordoned.then(|| fact("Scheduling", "cordoned")));
        facts.extend(node.announces.as_ref().map(|release| fact("Announces", release)));
        let planned = self.facts.plan.nodes.iter().find(|planned| planned.node == name);
        let next = planned.and_then(|planned| planned.next.as_deref());
        facts.extend(next.map(|next| fact("Next kernel", &next.kernel)));
        let unused = self.facts.plan.unused_announcements.iter().filter(|unused| unused.node == name);
        facts.extend(unused.map(|unused| fact("Announcement not used", &unused.why)));
        let own = self.facts.plan.own_drivers.iter().filter(|own| own.nodes.iter().any(|node| node == name));
        facts.extend(own.map(|own| fact("Own driver", format!("{}: {own}", own.image))));
        facts.extend(self.facts.plan.rollouts.iter().filter_map(|rollout| {
            let upgrade = rollout.upgrade.as_ref()?;
            let turn = upgrade.nodes.iter().find(|turn| turn.node == name)?;
            let told = turn.note.as_ref();
            let told = told.map(|told| format!(" ({} since {:.0})", told.state.as_str(), told.since));
            Some(fact("Upgrade", format!("{}: {turn}{}", upgrade.rollout, told.unwrap_or_default())))
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
        Standing::NoKeys => ("not looked at", "off", "site.yaml names no key"),
        Standing::Refused(why) => ("not signed", "bad", why.as_str()),
    };
    Answer { word, class, why: why.to_owned() }
}

/// What an image was made of, beside what the one before was: by their bills; else by what the plan knows.
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
        None => ("the image that has its name".to_owned(), None),
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

/// What an image is built from.
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

/// A node.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct NodePage {
    /// May it boot its next kernel?
    pub may_boot: Option<Answer>,
    pub facts: Vec<Fact>,
    pub images: Vec<NodeImage>,
}

/// Yes or no, and why not.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Answer {
    pub word: &'static str,
    pub class: &'static str,
    pub why: String,
}

/// An image that a node calls for, or will.
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
        MayBoot::Ready => ("ready", "ok"),
        MayBoot::NoDriver => ("no driver is called for", "ok"),
        MayBoot::Unknown => ("not known", "warn"),
        MayBoot::Wait => ("wait", "bad"),
    };
    let why = planned.next.as_ref().map(|next| why_not(next)).unwrap_or_default();
    Answer { word, class, why }
}

/// All nodes, by what they run.
#[derive(Debug, Serialize)]
pub struct NodesPage {
    pub groups: Vec<NodesOf>,
}

/// Nodes that are alike.
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
        groups.sort_by(|a, b| a.what.cmp(&b.what));
        let unknown: Vec<&String> =
            facts.nodes.iter().filter(|(_, node)| node.group.is_err()).map(|(name, _)| name).collect();
        if !unknown.is_empty() {
            groups.push(of("left alone".to_owned(), unknown));
        }
        Self { groups }
    }
}

/// A value of a field, as people write it.
pub fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}
