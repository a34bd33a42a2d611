//! What commands print: results to standard output, messages and progress to standard error. Every table stands here.

pub mod bundle;
pub mod check;
pub mod gc;
pub mod headers;
mod pass;
mod plan;
pub mod preflight;
mod progress;
pub mod rollback;
pub mod verify;

use std::io::{self, IsTerminal, Write};

use comfy_table::{Row, Table, presets::NOTHING};
use serde::Serialize;

pub use pass::pass;
pub use plan::{plan, status};
pub use progress::{Bar, Progress};

use super::{args::OutputForm, env_vars, error::OutputError};

/// Prints a result in the form that was asked for.
pub fn show<T: Serialize + ?Sized>(
    form: OutputForm,
    value: &T,
    text: impl FnOnce(&T) -> String,
) -> Result<(), OutputError> {
    result(&match form {
        OutputForm::Table => text(value),
        OutputForm::Json => serde_json::to_string_pretty(value).map_err(io::Error::from)?,
    })
}

/// Writes text to standard output, and ends its last line. A closed pipe (`| head`) is no error.
pub fn result(text: &str) -> Result<(), OutputError> {
    if text.ends_with('\n') { part(text) } else { part(&format!("{text}\n")) }
}

/// Writes what is a part of the output.
pub fn part(text: &str) -> Result<(), OutputError> {
    let mut out = io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    match written {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => Ok(other?),
    }
}

/// Empties a terminal, for what is printed again and again.
pub fn clear() -> Result<(), OutputError> {
    if io::stdout().is_terminal() { part("\x1b[H\x1b[2J") } else { Ok(()) }
}

/// Writes a message to standard error. There is nowhere to report a failure of that.
pub fn message(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// Colours on a terminal, unless the environment says otherwise.
pub fn has_colours() -> bool {
    env_vars::colours().unwrap_or_else(|| io::stdout().is_terminal())
}

/// A table without borders. A cell may have several lines.
pub fn table<const N: usize>(header: [&str; N], rows: impl IntoIterator<Item = [String; N]>) -> String {
    lines(header, rows, (0, 2))
}

/// The same, with a blank before each column.
pub fn indented_table<const N: usize>(
    header: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
) -> String {
    lines(header, rows, (1, 1))
}

fn lines(
    header: impl Into<Row>,
    rows: impl IntoIterator<Item = impl Into<Row>>,
    padding: (u16, u16),
) -> String {
    let mut table = Table::new();
    table.load_style(NOTHING).set_header(header).add_rows(rows);
    for column in table.column_iter_mut() {
        column.set_padding(padding);
    }
    table.lines().flat_map(|line| [line.trim_end().to_owned(), "\n".to_owned()]).collect()
}

/// Names, labels and annotations come from outside: a terminal must not take them for commands.
pub fn printable(text: &str) -> String {
    text.replace(char::is_control, "\u{fffd}")
}
