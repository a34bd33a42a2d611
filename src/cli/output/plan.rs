//! Plans and the matrix of status, as people read them.

use super::{lines, printable};
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

/// Names and labels in it come from outside. A cell may have several lines.
pub fn laid_out(Table { header, rows }: &Table) -> String {
    let cell = |text: &String| text.split('\n').map(printable).collect::<Vec<_>>().join("\n");
    lines(header, rows.iter().map(|row| row.iter().map(cell).collect::<Vec<_>>()), (0, 2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_has_lines_and_steers_no_terminal() {
        let row = vec!["a".to_owned(), "b\u{1b}[1m\nc".to_owned()];
        let table = Table { header: vec!["X", "Y"], rows: vec![row] };
        assert_eq!(laid_out(&table), "X  Y\na  b\u{fffd}[1m\n   c\n");
    }
}
