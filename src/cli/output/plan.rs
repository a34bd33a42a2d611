//! Plans and the matrix of status, as people read them.

use super::lines;
use crate::plan::{Plan, StatusRow, Table, status_table, summary, tables};

/// The plan as tables, and one closing line.
pub fn plan(plan: &Plan) -> String {
    format!("{}{}\n", sections(plan), summary(plan))
}

/// The tables alone, each with an empty line after it.
pub fn sections(plan: &Plan) -> String {
    tables(plan).iter().map(|table| laid_out(table) + "\n").collect()
}

/// The matrix of images and kernels.
pub fn status(rows: &[StatusRow]) -> String {
    if rows.is_empty() {
        "no node calls for a driver image\n".to_owned()
    } else {
        laid_out(&status_table(rows))
    }
}

/// A table in columns.
pub fn laid_out(Table { header, rows }: &Table) -> String {
    lines(header, rows, (0, 2))
}
