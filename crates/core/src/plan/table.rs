//! Pure: a plan as people read it.

use std::collections::{BTreeMap, HashMap};

use comfy_table::{Table, presets};

use super::{
    AnnouncedBy, Plan, PlannedNode, PlannedRollout, PlannedSignature, RolloutDecision, readiness::why_not,
};

/// Names of nodes written out before the rest is only counted.
const NAMED_NODES: usize = 3;

/// The plan as tables, those without rows left out, and one closing line.
pub fn table(plan: &Plan) -> String {
    format!("{}{}\n", sections(plan), summary(plan))
}

/// The tables alone, each with an empty line after it.
pub fn sections(plan: &Plan) -> String {
    let sections =
        [images(plan), rollouts(plan), nodes(plan), left_alone(plan), own_drivers(plan), unheard(plan)];
    sections
        .into_iter()
        .filter(|table| !table.is_empty())
        .flat_map(|table| [lines(&table), "\n".to_owned()])
        .collect()
}

/// `2 images to build, 1 up to date, 1 field to rewrite`.
pub fn summary(plan: &Plan) -> String {
    let said = counts(plan);
    match (said.is_empty(), plan.is_idle()) {
        (true, _) => "nothing to do".to_owned(),
        (false, true) if !plan.has_failures() => format!("nothing to do: {said}"),
        (false, _) => said,
    }
}

/// How many of each, without those that there are none of.
pub fn counts(plan: &Plan) -> String {
    let Plan {
        builds,
        tags,
        up_to_date,
        conflicts,
        held_back,
        unknown,
        skipped,
        left_alone,
        own_drivers,
        unions,
        unheard,
        rollouts,
        nodes,
        waiting,
        order: _,
        signatures,
        signable: _,
    } = plan;
    let count =
        |wanted: fn(&RolloutDecision) -> bool| rollouts.iter().filter(|r| wanted(&r.decision)).count();
    let parts = [
        (builds.len(), "to build"),
        (waiting.len(), "to build after those"),
        (unions.len(), "to put together"),
        (tags.len(), "to tag"),
        (signatures.len(), "to sign"),
        (up_to_date.len(), "up to date"),
        (conflicts.len(), "in conflict"),
        (held_back.len(), "held back"),
        (unknown.len(), "unknown"),
        (skipped.len(), "skipped"),
        (count(|d| matches!(d, RolloutDecision::Rewrite { .. })), "to rewrite"),
        (count(|d| matches!(d, RolloutDecision::Pending { .. })), "to rewrite after their build"),
        (count(|d| matches!(d, RolloutDecision::Steps { .. })), "to change"),
        (
            count(|d| matches!(d, RolloutDecision::AlreadySet { .. } | RolloutDecision::Settled { .. })),
            "already set",
        ),
        (count(|d| matches!(d, RolloutDecision::Hold(_))), "on hold"),
        (left_alone.len(), if left_alone.len() == 1 { "node left alone" } else { "nodes left alone" }),
        (own_drivers.iter().map(|own| own.nodes.len()).sum(), "with a driver of their own"),
        (
            nodes.iter().filter(|node| node.change.is_some()).count(),
            "to mark ready, or ready no more, for a kernel",
        ),
        (unheard.len(), if unheard.len() == 1 { "announcement not used" } else { "announcements not used" }),
    ];
    let said: Vec<String> =
        parts.iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{count} {what}")).collect();
    said.join(", ")
}

fn images(plan: &Plan) -> Table {
    let Plan {
        builds,
        tags,
        up_to_date,
        conflicts,
        held_back,
        unknown,
        skipped,
        left_alone: _,
        own_drivers: _,
        unions,
        unheard: _,
        rollouts: _,
        nodes: _,
        waiting,
        order,
        signatures,
        signable: _,
    } = plan;
    let mut rows: Vec<(String, String, usize, &str, String)> = Vec::new();
    let mut add = |cell: &super::Cell, action, why: String| {
        let why = announced(against(why, cell), &cell.announced_by);
        rows.push((cell.image.to_string(), cell.target.to_string(), cell.nodes.len(), action, why));
    };
    for build in builds {
        let reuse =
            if build.may_reuse { "; an image for another kernel is reused if the check allows" } else { "" };
        add(&build.cell, "build", format!("{}{reuse}", build.why));
    }
    for found in up_to_date {
        let verdict = found.verdict.map_or("no check report", crate::kmod::Verdict::as_str);
        let denied = if found.denied { ", not accepted: check.unknown is deny" } else { "" };
        add(&found.cell, "up to date", format!("{} ({verdict}{denied})", found.digest));
    }
    for tag in tags {
        let names: Vec<_> = tag.references.iter().map(ToString::to_string).collect();
        add(&tag.cell, "tag", format!("{} also as {}", tag.digest, names.join(", ")));
    }
    for conflict in conflicts {
        let theirs =
            conflict.theirs.map_or("unknown inputs".to_owned(), |hash| format!("inputs {}", hash.short()));
        let ours = conflict.cell.input_hash.short();
        let why = format!("{} has {theirs}, wanted {ours}; {}", conflict.reference, conflict.remedy);
        add(&conflict.cell, "conflict", why);
    }
    for held in held_back {
        add(&held.cell, "held back", format!("failed at {:.0}: {}", held.at, held.message));
    }
    for unclear in unknown {
        add(&unclear.cell, "unknown", format!("{}: {}", unclear.reference, unclear.message));
    }
    for found in waiting {
        let why = announced(found.why(), &found.announced_by);
        rows.push((found.image.to_string(), found.target.to_string(), found.nodes, "wait", why));
    }
    for skip in skipped {
        rows.push((
            skip.image.to_string(),
            skip.target.to_string(),
            skip.nodes,
            "skip",
            announced(skip.why.to_string(), &skip.announced_by),
        ));
    }
    for union in unions {
        let kernels: Vec<&str> = union.members.iter().map(|member| member.kernel.as_str()).collect();
        let what = format!("{} from {}", union.reference, kernels.join(", "));
        rows.push((union.image.to_string(), format!("{} kernels", kernels.len()), 0, "put together", what));
    }
    for signature in signatures {
        let PlannedSignature { image, reference } = signature;
        let (image, what) = (image.to_string(), format!("{reference}, which lacks the site's signature"));
        rows.push((image, String::new(), 0, "sign", what));
    }
    let places: HashMap<&str, usize> =
        order.iter().enumerate().map(|(place, name)| (name.as_str(), place)).collect();
    rows.sort_by(|a, b| places.get(a.0.as_str()).cmp(&places.get(b.0.as_str())).then_with(|| a.cmp(b)));
    let rows = rows.into_iter().map(|(image, kernel, nodes, action, why)| {
        vec![image, kernel, nodes.to_string(), action.to_owned(), why]
    });
    plain(&["IMAGE", "KERNEL", "NODES", "ACTION", "WHY"], rows)
}

fn rollouts(plan: &Plan) -> Table {
    let row = |rollout: &PlannedRollout| {
        let (action, why) = match &rollout.decision {
            RolloutDecision::Rewrite { from, to } => ("rewrite", format!("{from} -> {to}")),
            RolloutDecision::Pending { on } => ("rewrite later", format!("after {on} is published")),
            RolloutDecision::AlreadySet { image } => ("already set", image.to_string()),
            RolloutDecision::Steps { now } => ("change", now.join("\n")),
            RolloutDecision::Settled { how } => ("settled", how.clone()),
            RolloutDecision::Hold(why) => ("hold", why.to_string()),
        };
        vec![rollout.image.to_string(), rollout.target.to_string(), action.to_owned(), why]
    };
    plain(&["IMAGE", "ROLLOUT", "ACTION", "WHY"], plan.rollouts.iter().map(row))
}

/// What it is compiled against.
fn against(why: String, cell: &super::Cell) -> String {
    let needs: Vec<String> = cell.needs.iter().map(ToString::to_string).collect();
    if needs.is_empty() { why } else { format!("{why}; needs {}", needs.join(", ")) }
}

/// Who asks for it, where that is not only nodes that run the kernel.
fn announced(why: String, by: &[AnnouncedBy]) -> String {
    if by.is_empty() {
        return why;
    }
    let by: Vec<String> = by.iter().map(ToString::to_string).collect();
    format!("{why}; announced by {}", by.join(" and "))
}

/// One row for each kernel and answer.
fn nodes(plan: &Plan) -> Table {
    let mut kernels: BTreeMap<(String, &str, String), Vec<&str>> = BTreeMap::new();
    for PlannedNode { node, next, ready, change } in &plan.nodes {
        let key = match (next, ready, change) {
            (None, _, _) => {
                ("none".to_owned(), "no mark", "no kernel is announced for it any more".to_owned())
            }
            (Some(next), true, _) => (next.kernel.to_string(), "ready", String::new()),
            (Some(next), false, _) => (next.kernel.to_string(), "wait", why_not(next)),
        };
        kernels.entry(key).or_default().push(node);
    }
    let row = |((kernel, answer, why), nodes): ((String, &str, String), Vec<&str>)| {
        vec![named(&nodes), kernel, answer.to_owned(), why]
    };
    plain(&["NODES", "NEXT KERNEL", "REBOOT", "WHY"], kernels.into_iter().map(row))
}

/// One row for each reason: of a fleet without labels, ten thousand rows would say nothing more.
fn left_alone(plan: &Plan) -> Table {
    let left = plan.left_alone.iter().map(|left| (left.why.to_string(), left.node.as_str()));
    by_reason("NODES LEFT ALONE", left)
}

fn own_drivers(plan: &Plan) -> Table {
    let own = plan.own_drivers.iter().flat_map(|own| {
        let why = format!("image {}: {own}", own.image);
        own.nodes.iter().map(move |node| (why.clone(), node.as_str()))
    });
    by_reason("NODES WITH THEIR OWN DRIVER", own)
}

fn unheard(plan: &Plan) -> Table {
    let unheard = plan.unheard.iter().map(|unheard| (unheard.why.to_string(), unheard.node.as_str()));
    by_reason("ANNOUNCEMENTS NOT USED", unheard)
}

fn by_reason<'a>(header: &str, nodes: impl Iterator<Item = (String, &'a str)>) -> Table {
    let mut reasons: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for (why, node) in nodes {
        reasons.entry(why).or_default().push(node);
    }
    plain(&[header, "WHY"], reasons.into_iter().map(|(why, nodes)| vec![named(&nodes), why]))
}

/// The first names; the rest is counted.
fn named(nodes: &[&str]) -> String {
    let names = nodes[..nodes.len().min(NAMED_NODES)].join(", ");
    match nodes.len().saturating_sub(NAMED_NODES) {
        0 => names,
        more => format!("{names} and {more} more"),
    }
}

fn plain(header: &[&str], rows: impl Iterator<Item = Vec<String>>) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(header);
    for row in rows {
        table.add_row(row.iter().map(|text| printable(text)));
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table
}

/// Names and labels come from strangers; a terminal must not take them for commands.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

fn lines(table: &Table) -> String {
    table.lines().flat_map(|line| [line.trim_end().to_owned(), "\n".to_owned()]).collect()
}
