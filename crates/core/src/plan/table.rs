//! The tables of a plan, as text cells. The command line does their layout.

use std::{
    collections::{BTreeMap, HashMap},
    sync::LazyLock,
};

use regex::Regex;

use super::{
    BootReadiness, HoldReason, HostDrivers, NextKernel, Outcome, Phase, Plan, PlannedCell, PlannedNode,
    PlannedRollout, PlannedSignature, Readiness, RequiredImage, RolloutDecision, RolloutObject, StatusRow,
};
use crate::{
    kmod::Verdict,
    text::{printable_lines, some_of},
};

/// Number of nodes to name; the rest is only counted.
const NAMED_NODES: usize = 3;

/// Header and rows with equal numbers of cells. A cell may have several lines. Names and labels are untrusted input:
/// cells never contain terminal control sequences.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// Names of the columns.
    pub header: Vec<&'static str>,
    /// Rows, in order.
    pub rows: Vec<Vec<String>>,
}

/// Returns the tables of a plan. Tables without rows are omitted.
pub fn tables(plan: &Plan) -> Vec<Table> {
    let mut tables = vec![
        images(plan),
        rollouts(plan, plan.rollouts.iter()),
        nodes(plan),
        skipped_nodes(plan),
        unused_images(plan),
        own_drivers(plan),
        host_drivers(plan),
        unused_announcements(plan),
    ];
    tables.retain(|table| !table.rows.is_empty());
    tables
}

/// Summarizes a plan: `2 images to build, 1 up to date, 1 field to rewrite`.
pub fn summary(plan: &Plan) -> String {
    let counts = counts(plan);
    match (counts.is_empty(), plan.is_idle()) {
        (true, _) => "nothing to do".to_owned(),
        (false, true) if !plan.has_failures() => format!("nothing to do: {counts}"),
        (false, _) => counts,
    }
}

/// Returns the number of items of each kind. Kinds without items are omitted.
pub fn counts(plan: &Plan) -> String {
    let misses_tags = |cell: &&PlannedCell| matches!(&cell.outcome, Outcome::UpToDate { missing_tags, .. } if !missing_tags.is_empty());
    let written = plan.rollouts.iter().filter(|rollout| rollout.target.object != RolloutObject::Nothing {});
    let pending =
        written.filter(|rollout| matches!(rollout.decision, RolloutDecision::Pending { .. })).count();
    let count =
        |matches: fn(&RolloutDecision) -> bool| plan.rollouts.iter().filter(|r| matches(&r.decision)).count();
    let counted = |count: usize, one, many| (count, if count == 1 { one } else { many });
    let kinds = [
        (plan.count(Phase::Missing), "to build"),
        (plan.count(Phase::Waiting), "to build afterwards"),
        (plan.unions.len(), "to assemble"),
        (plan.cells.iter().filter(misses_tags).count(), "to tag"),
        (plan.signatures.len(), "to sign"),
        (plan.count(Phase::Published), "up to date"),
        (plan.count(Phase::Conflict), "in conflict"),
        (plan.count(Phase::Failed), "failed"),
        (plan.count(Phase::Unknown), "unknown"),
        (plan.count(Phase::Skipped), "skipped"),
        (count(|d| matches!(d, RolloutDecision::Rewrite { .. })), "to rewrite"),
        (pending, "to rewrite after their build"),
        (count(|d| matches!(d, RolloutDecision::Steps { .. })), "to change"),
        (
            count(|d| matches!(d, RolloutDecision::AlreadySet { .. } | RolloutDecision::Settled { .. })),
            "already set",
        ),
        (plan.held_rollouts().count(), "on hold"),
        counted(plan.skipped_nodes.len(), "node skipped", "nodes skipped"),
        counted(plan.unused_images.len(), "image without nodes", "images without nodes"),
        (plan.own_drivers.iter().map(|own| own.nodes.len()).sum(), "with their own driver"),
        (plan.nodes.iter().filter(|node| node.change.is_some()).count(), "to mark for their next kernel"),
        counted(plan.unused_announcements.len(), "unused announcement", "unused announcements"),
    ];
    let counts: Vec<String> =
        kinds.iter().filter(|(count, _)| *count > 0).map(|(count, name)| format!("{count} {name}")).collect();
    counts.join(", ")
}

fn images(plan: &Plan) -> Table {
    let mut order: HashMap<&str, usize> = HashMap::new();
    let mut rows: Vec<(String, String, usize, &str, String)> = Vec::new();
    for (index, planned) in plan.cells.iter().enumerate() {
        order.entry(planned.image.as_str()).or_insert(index);
        for (action, why) in actions(&planned.outcome) {
            let cell = planned.outcome.cell().into_iter();
            let patches = cell.clone().flat_map(|cell| &cell.patches).map(|patch| &patch.name);
            let outputs = cell.clone().filter(|_| action == "build").flat_map(|cell| &cell.outputs);
            let more = [
                listed("publishes also", outputs, " and "),
                listed("needs", cell.flat_map(|cell| &cell.needs), ", "),
                listed("patched with", patches, ", "),
                listed("announced by", &planned.announced_by, " and "),
            ];
            let why = [why].into_iter().chain(more.into_iter().flatten()).collect::<Vec<_>>().join("; ");
            rows.push((planned.image.to_string(), planned.target.to_string(), planned.nodes, action, why));
        }
    }
    for union in &plan.unions {
        let kernels: Vec<&str> = union.members.iter().map(|member| member.kernel.as_str()).collect();
        let why = format!("{} from {}", union.reference, kernels.join(", "));
        rows.push((union.image.to_string(), format!("{} kernels", kernels.len()), 0, "assemble", why));
    }
    for PlannedSignature { image, reference } in &plan.signatures {
        let (image, why) = (image.to_string(), format!("{reference}, which lacks the site's signature"));
        rows.push((image, String::new(), 0, "sign", why));
    }
    rows.sort_by(|a, b| order.get(a.0.as_str()).cmp(&order.get(b.0.as_str())).then_with(|| a.cmp(b)));
    let rows = rows.into_iter().map(|(image, kernel, nodes, action, why)| {
        vec![image, kernel, nodes.to_string(), action.to_owned(), why]
    });
    table(&["IMAGE", "KERNEL", "NODES", "ACTION", "WHY"], rows)
}

/// Returns the actions for a cell, each with its reason.
fn actions(outcome: &Outcome) -> Vec<(&'static str, String)> {
    let action = match outcome {
        Outcome::Build { why, may_reuse, .. } => {
            let reuse =
                if *may_reuse { "; an image for another kernel is reused if the check allows" } else { "" };
            ("build", format!("{why}{reuse}"))
        }
        Outcome::UpToDate { published, denied, missing_tags, .. } => {
            let digest = &published.digest;
            let verdict = published.verdict.map_or("no check report", Verdict::as_str);
            let denied = if *denied { ", not accepted: check.unknown is deny" } else { "" };
            let mut actions = vec![("up to date", format!("{digest} ({verdict}{denied})"))];
            let tags = listed("also as", missing_tags, ", ");
            actions.extend(tags.map(|tags| ("tag", format!("{digest} {tags}"))));
            return actions;
        }
        Outcome::Conflict { remedy, .. } => ("conflict", format!("{}; {remedy}", outcome.absence_reason())),
        Outcome::Failed { at, message, .. } => ("failed", format!("failed at {at:.0}: {message}")),
        Outcome::Unknown { reference, message, .. } => ("unknown", format!("{reference}: {message}")),
        Outcome::Waiting { .. } => ("wait", outcome.absence_reason()),
        Outcome::Skipped { .. } => ("skip", outcome.absence_reason()),
    };
    vec![action]
}

/// Returns the table of rollouts on hold.
pub fn held_rollouts(plan: &Plan) -> Table {
    rollouts(plan, plan.held_rollouts())
}

fn rollouts<'a>(plan: &Plan, shown: impl Iterator<Item = &'a PlannedRollout>) -> Table {
    let row = |rollout: &PlannedRollout| {
        let (action, mut why) = match (&rollout.decision, &rollout.target.object) {
            (RolloutDecision::Pending { on }, RolloutObject::Nothing {}) => {
                ("wait", format!("until {on} is published"))
            }
            (RolloutDecision::Hold(HoldReason::Chain { image, why }), _) => {
                // The row of the other image already gives the reason.
                let (action, text) = rollout_action(rollout);
                (
                    action,
                    text.replacen(&format!("{image} is on hold: {why}"), &format!("{image} is on hold"), 1),
                )
            }
            _ => rollout_action_below_images(plan, rollout),
        };
        if let Some(upgrade) = &rollout.upgrade {
            why = format!("{why}\n{}", upgrade.summary());
        }
        for warning in &rollout.warnings {
            why = format!("{why}\n{warning}");
        }
        vec![rollout.image.to_string(), rollout.target.to_string(), action.to_owned(), why]
    };
    table(&["IMAGE", "ROLLOUT", "ACTION", "WHY"], shown.map(row))
}

/// Returns what [`rollout_action`] returns, but does not repeat the reason that the image's own row above gives.
pub(super) fn rollout_action_below_images(plan: &Plan, rollout: &PlannedRollout) -> (&'static str, String) {
    let (action, text) = rollout_action(rollout);
    let RolloutDecision::Hold(HoldReason::NoImage { kernel, .. }) = &rollout.decision else {
        return (action, text);
    };
    let is_missing_cell =
        |cell: &&PlannedCell| cell.image == rollout.image && cell.target.to_string() == *kernel;
    let reason = plan.cells.iter().find(is_missing_cell).map(|cell| cell.outcome.absence_reason());
    let repeated = reason.filter(|reason| !reason.is_empty()).map(|reason| format!(": {reason}"));
    (action, repeated.map_or(text.clone(), |repeated| text.replacen(&repeated, ", for the reason above", 1)))
}

/// Returns the action for a rollout target, and its reason.
pub fn rollout_action(rollout: &PlannedRollout) -> (&'static str, String) {
    match &rollout.decision {
        RolloutDecision::Rewrite { from, to } => ("rewrite", format!("{from} -> {to}")),
        RolloutDecision::Pending { on } => ("rewrite later", format!("after {on} is published")),
        RolloutDecision::AlreadySet { image } => ("already set", image.to_string()),
        RolloutDecision::Steps { now } => ("change", now.join("\n")),
        RolloutDecision::Settled { how } => ("settled", how.clone()),
        RolloutDecision::Hold(_) => ("hold", rollout.hold_text().unwrap_or_default()),
    }
}

/// Joins the items after a label; `None` where there are none.
fn listed<T: ToString>(label: &str, items: impl IntoIterator<Item = T>, separator: &str) -> Option<String> {
    let items: Vec<String> = items.into_iter().map(|item| item.to_string()).collect();
    (!items.is_empty()).then(|| format!("{label} {}", items.join(separator)))
}

/// Returns the table for the matrix of [`status`](super::status).
pub fn status_table(rows: &[StatusRow]) -> Table {
    let row = |row: &StatusRow| {
        let mut reference = vec![row.reference.clone()];
        let reason = || match row.time {
            Some(time) => format!("{}, {time}", row.reason),
            None => row.reason.clone(),
        };
        reference.push(row.digest.as_ref().map_or_else(reason, |digest| format!("@{digest}")));
        reference.extend(listed("needs", &row.needs, ", ").filter(|_| row.phase != Phase::Waiting));
        reference.extend(listed("announced by", &row.announced_by, " and "));
        reference.retain(|line| !line.is_empty());
        let check = row.verdict.map_or("", Verdict::as_str).to_owned();
        let phase = row.phase.as_str().to_owned();
        vec![row.image.clone(), row.kernel.clone(), row.nodes.to_string(), phase, check, reference.join("\n")]
    };
    table(&["IMAGE", "KERNEL", "NODES", "PHASE", "CHECK", "REFERENCE"], rows.iter().map(row))
}

/// Returns the table of the images that one kernel needs.
pub fn readiness_table(next: &NextKernel) -> Table {
    let row = |RequiredImage { image, reference, state }: &RequiredImage| {
        let (verdict, why) = match state {
            Readiness::Ready { verdict } => {
                (verdict.as_str(), reference.as_ref().map(ToString::to_string).unwrap_or_default())
            }
            Readiness::Missing { message } => ("missing", message.clone()),
            Readiness::Unknown { message } => ("unknown", message.clone()),
        };
        vec![image.to_string(), verdict.to_owned(), why]
    };
    table(&["IMAGE", "VERDICT", "WHY"], next.needs.iter().map(row))
}

/// Returns a line `image: why` for every missing image.
pub fn missing_images(next: &NextKernel) -> String {
    let missing = next.needs.iter().filter_map(|required| match &required.state {
        Readiness::Ready { .. } => None,
        Readiness::Missing { message } | Readiness::Unknown { message } => {
            Some(format!("{}: {message}", required.image))
        }
    });
    missing.chain(next.blocker.as_ref().map(ToString::to_string)).collect::<Vec<_>>().join("\n")
}

/// Returns the table of nodes' next kernels, with one row per kernel and answer.
fn nodes(plan: &Plan) -> Table {
    let mut kernels: BTreeMap<(String, &str, String), Vec<&str>> = BTreeMap::new();
    for PlannedNode { node, next, ready: _, may_boot, change: _ } in &plan.nodes {
        let key = match (next, may_boot) {
            (None, _) => ("none".to_owned(), "no mark", "no next kernel is announced".to_owned()),
            (Some(next), BootReadiness::Ready) => (next.kernel.to_string(), "ready", String::new()),
            (Some(next), BootReadiness::NoDriver) => {
                (next.kernel.to_string(), "no driver", "no driver image selects the node".to_owned())
            }
            (Some(next), BootReadiness::Wait | BootReadiness::Unknown) => {
                (next.kernel.to_string(), "wait", missing_images(next))
            }
        };
        kernels.entry(key).or_default().push(node);
    }
    let row = |((kernel, answer, why), nodes): ((String, &str, String), Vec<&str>)| {
        vec![some_of(&nodes, NAMED_NODES), kernel, answer.to_owned(), why]
    };
    table(&["NODES", "NEXT KERNEL", "REBOOT", "WHY"], kernels.into_iter().map(row))
}

/// Returns the table of skipped nodes, with one row per reason: in a fleet without labels, ten thousand rows would add
/// nothing.
pub fn skipped_nodes(plan: &Plan) -> Table {
    let skipped = plan.skipped_nodes.iter().map(|skipped| (skipped.why.to_string(), skipped.node.as_str()));
    by_reason("SKIPPED NODES", skipped)
}

fn unused_images(plan: &Plan) -> Table {
    let unused =
        plan.unused_images.iter().map(|unused| vec![unused.image.to_string(), unused.why.to_string()]);
    table(&["IMAGES WITHOUT NODES", "WHY"], unused)
}

fn own_drivers(plan: &Plan) -> Table {
    let nodes = plan.own_drivers.iter().flat_map(|own_driver| {
        let why = format!("image {}: {own_driver}", own_driver.image);
        own_driver.nodes.iter().map(move |node| (why.clone(), node.as_str()))
    });
    by_reason("NODES WITH THEIR OWN DRIVER", nodes)
}

/// Returns the table of nodes whose hosts load drivers.
pub fn host_drivers(plan: &Plan) -> Table {
    let row = |drivers: &HostDrivers| {
        let nodes: Vec<&str> = drivers.nodes.iter().map(String::as_str).collect();
        vec![some_of(&nodes, NAMED_NODES), format!("farrier-host {drivers}")]
    };
    table(&["HOST DRIVERS", "WHAT"], plan.host_drivers.iter().map(row))
}

fn unused_announcements(plan: &Plan) -> Table {
    let unused =
        plan.unused_announcements.iter().map(|unused| (unused.why.to_string(), unused.node.as_str()));
    by_reason("UNUSED ANNOUNCEMENTS", unused)
}

fn by_reason<'a>(header: &'static str, nodes: impl Iterator<Item = (String, &'a str)>) -> Table {
    let mut reasons: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for (why, node) in nodes {
        reasons.entry(why).or_default().push(node);
    }
    table(&[header, "WHY"], reasons.into_iter().map(|(why, nodes)| vec![some_of(&nodes, NAMED_NODES), why]))
}

pub(super) fn table(header: &[&'static str], rows: impl Iterator<Item = Vec<String>>) -> Table {
    let rows = rows.map(|row| row.iter().map(|cell| printable_lines(cell)).collect());
    Table { header: header.to_vec(), rows: rows.collect() }
}

/// Shortens each digest to its first twelve digits.
pub fn with_short_digests(text: &str) -> String {
    static DIGEST: LazyLock<Option<Regex>> =
        LazyLock::new(|| Regex::new("(sha256:[0-9a-f]{12})[0-9a-f]{52}").ok());
    DIGEST.as_ref().map_or_else(|| text.to_owned(), |digest| digest.replace_all(text, "$1").into_owned())
}

/// Layout for the tests' snapshots; it equals the command line's layout.
#[cfg(test)]
pub(crate) mod layout {
    use comfy_table::presets::NOTHING;

    use super::{Plan, Table, summary, tables};

    pub(crate) fn table(plan: &Plan) -> String {
        let tables: String = tables(plan).iter().map(|table| text(table) + "\n").collect();
        format!("{tables}{}\n", summary(plan))
    }

    pub(crate) fn text(Table { header, rows }: &Table) -> String {
        let mut table = comfy_table::Table::new();
        table.load_style(NOTHING).set_header(header).add_rows(rows);
        for column in table.column_iter_mut() {
            column.set_padding((0, 2));
        }
        table.lines().map(|line| line.trim_end().to_owned() + "\n").collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::fixtures::{K47, K48, World, name};

    /// Row of the only rollout.
    fn rollout_row(world: &World) -> String {
        let plan = world.plan();
        rollouts(&plan, plan.rollouts.iter()).rows[0].join(" ")
    }

    #[test]
    fn a_hold_names_the_image_that_stays() {
        let mut world = World::new(&[K47, K48]);
        let stays = format!("; its image stays {}", world.image_of("driver"));
        assert!(rollout_row(&world).ends_with(&stays), "{}", rollout_row(&world));
        let json = serde_json::to_value(&world.plan().rollouts[0]).unwrap();
        assert_eq!(json["currentImage"], world.image_of("driver"));
        world.snapshot.daemon_sets.clear();
        assert!(!rollout_row(&world).contains("stays"), "{}", rollout_row(&world));
    }

    #[test]
    fn the_reason_of_a_missing_image_is_in_one_row() {
        let mut world = World::new(&[K47]);
        world.resolved.images.insert(name("mft"), Err("404 for driver.tgz".to_owned()));
        let text = layout::table(&world.plan());
        assert_eq!(text.matches("404 for driver.tgz").count(), 1, "{text}");
        assert!(text.contains("hold    no image for 6.1.0-47-amd64 (debian 12, amd64), for the reason above; its image stays "), "{text}");
    }

    #[test]
    fn a_cell_has_lines_and_steers_no_terminal() {
        let row = vec!["a".to_owned(), "b\u{1b}[1m\nc".to_owned()];
        assert_eq!(layout::text(&table(&["X", "Y"], [row].into_iter())), "X  Y\na  b\u{fffd}[1m\n   c\n");
    }

    #[test]
    fn digests_get_short() {
        let digits = "0123456789abcdef".repeat(4);
        let text = format!("r.example/x@sha256:{digits} and sha256:0123");
        assert_eq!(with_short_digests(&text), "r.example/x@sha256:0123456789ab and sha256:0123");
    }
}
