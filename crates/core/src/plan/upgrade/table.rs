//! The plan of an upgrade, for display.

use std::{collections::BTreeSet, fmt};

use super::{PlannedNodeUpgrade, PlannedUpgrade};
use crate::plan::{Table, table::table};

/// Returns a table with one row per node. The row has the upgrade's stage and state, when the node entered the state, and
/// why the node waits or failed.
pub fn upgrade_table(plan: &PlannedUpgrade) -> Table {
    let rows = plan.nodes.iter().map(|node_upgrade| {
        let PlannedNodeUpgrade { node, stage, note, .. } = node_upgrade;
        let state = note.as_ref().map_or("", |note| note.state.as_str());
        let since = note.as_ref().map(|note| format!("{:.0}", note.since)).unwrap_or_default();
        let stage: &'static str = stage.into();
        vec![node.clone(), stage.to_owned(), state.to_owned(), since, node_upgrade.detail()]
    });
    table(&["NODE", "STAGE", "STATE", "SINCE", "DETAIL"], rows)
}

impl PlannedNodeUpgrade {
    /// Returns the reason why the node waits or its upgrade failed; empty where there is none.
    fn detail(&self) -> String {
        let why = || self.note.as_ref().and_then(|note| note.why.clone());
        self.waits.as_ref().map(ToString::to_string).or_else(why).unwrap_or_default()
    }
}

impl fmt::Display for PlannedNodeUpgrade {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (stage, detail): (&'static str, _) = (self.stage.into(), self.detail());
        if detail.is_empty() { f.write_str(stage) } else { write!(f, "{stage}: {detail}") }
    }
}

impl PlannedUpgrade {
    /// Summarizes the upgrade: `drivers/mofed gets registry.example/mofed@sha256:...: 3 nodes done, 1 under way, 6 to
    /// come; done at ...`.
    pub fn summary(&self) -> String {
        let Self { rollout, nodes, forecast } = self;
        let images: BTreeSet<&str> =
            nodes.iter().map(|node_upgrade| node_upgrade.to.as_str()).filter(|to| !to.is_empty()).collect();
        let image_text = match (images.len(), images.first()) {
            (1, Some(image)) => format!(" gets {image}"),
            (0, _) | (_, None) => String::new(),
            (count, _) => format!(" gets {count} images"),
        };
        let counts = [
            (forecast.done, "done"),
            (forecast.in_progress, "under way"),
            (forecast.waiting, "to come"),
            (forecast.skipped, "skipped"),
            (forecast.failed, "failed"),
        ];
        let counts: Vec<String> = counts
            .iter()
            .filter(|(count, _)| *count > 0)
            .map(|(count, name)| format!("{count} {name}"))
            .collect();
        let end_text = match (forecast.ends, forecast.seconds_per_node) {
            (None, _) => String::new(),
            (Some(ends), None) => format!("; not done before {ends:.0}"),
            (Some(ends), Some(_)) => format!("; done at about {ends:.0}"),
        };
        let nodes = if counts.is_empty() { "no nodes".to_owned() } else { counts.join(", ") };
        format!("{rollout}{image_text}: {nodes}{end_text}")
    }
}
