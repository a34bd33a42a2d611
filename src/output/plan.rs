//! Output of plans and of the status matrix as text.

use farrier_core::plan::{
    PastUpgrade, Plan, PlannedUpgrade, StatusRow, Table, held_rollouts, host_drivers, past_table,
    skipped_nodes, status_table, summary, tables, upgrade_table,
};

use super::{padded_table, printable};

/// Formats the plan as tables with a closing line.
pub fn plan(plan: &Plan) -> String {
    format!("{}{}\n", sections(&tables(plan)), summary(plan))
}

/// Formats the tables alone, each with an empty line after it.
pub fn sections(tables: &[Table]) -> String {
    tables.iter().map(|table| table_text(table) + "\n").collect()
}

/// Formats the matrix of images and kernels, the rollouts on hold, the skipped nodes, and the nodes whose hosts load drivers.
pub fn status(rows: &[StatusRow], plan: &Plan) -> String {
    let matrix = if rows.is_empty() {
        "no node calls for a driver image\n".to_owned()
    } else {
        table_text(&status_table(rows))
    };
    let others = [held_rollouts(plan), skipped_nodes(plan), host_drivers(plan)];
    let others = others.iter().filter(|table| !table.rows.is_empty());
    others.fold(matrix, |text, table| format!("{text}\n{}", table_text(table)))
}

/// Formats the state of upgrades and their nodes.
pub fn upgrades(upgrades: &[&PlannedUpgrade]) -> String {
    let text = |upgrade: &&PlannedUpgrade| {
        format!("{}\n\n{}", printable(&upgrade.summary()), table_text(&upgrade_table(upgrade)))
    };
    match upgrades {
        [] => "no upgrade is planned; `farrier plan` says what rollouts wait for\n".to_owned(),
        upgrades => upgrades.iter().map(text).collect::<Vec<_>>().join("\n"),
    }
}

/// Formats the upgrade history of DaemonSets.
pub fn past_upgrades(past: &[PastUpgrade]) -> String {
    match past {
        [] => "no DaemonSet carries a record of an image that farrier set\n".to_owned(),
        past => table_text(&past_table(past)),
    }
}

/// Formats a table in columns.
pub fn table_text(Table { header, rows }: &Table) -> String {
    padded_table(header, rows, (0, 2))
}
