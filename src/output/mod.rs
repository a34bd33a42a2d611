//! Output of commands: results go to standard output, messages and progress to standard error. All tables are
//! laid out here.

#[cfg(feature = "bundle")]
pub mod bundle;
#[cfg(feature = "bundle")]
mod bundle_bar;
#[cfg(feature = "gc")]
pub mod gc;
pub mod headers;
pub mod look;
mod plan;
pub mod preflight;
mod progress;
mod reconcile;
pub mod rollback;
pub mod verify;

use std::{
    collections::HashSet,
    io::{self, IsTerminal, Stderr, Write},
};

use comfy_table::{Cell, ColumnConstraint, ContentArrangement, Row, Table, Width, presets::NOTHING};
use serde::Serialize;
use serde_json::Value;

#[cfg(feature = "bundle")]
pub use bundle_bar::Bar;
pub use plan::{past_upgrades, plan, status, upgrades};
pub use progress::Progress;
pub use reconcile::reconcile;

/// Names, labels and annotations are untrusted: a terminal must not interpret them as commands.
pub use farrier_core::text::printable;
use farrier_core::{
    plan::with_short_digests,
    text::{is_deceptive, printable_json, printable_lines},
};

use super::{args::OutputFormat, error::OutputError};

/// Prints a result in the requested format.
pub fn show<T: Serialize + ?Sized>(
    format: OutputFormat,
    value: &T,
    text: impl FnOnce(&T) -> String,
) -> Result<(), OutputError> {
    write_line(&match format {
        OutputFormat::Table | OutputFormat::Wide => look::with_colors(printable_lines(&text(value))),
        OutputFormat::Json => printable_json(&serde_json::to_string_pretty(value).map_err(io::Error::from)?),
        OutputFormat::Yaml => printable_lines(&serde_saphyr::to_string(&value).map_err(io::Error::other)?),
        OutputFormat::Name => {
            let mut lines = names(&serde_json::to_value(value).map_err(io::Error::from)?);
            let mut printed = HashSet::new();
            lines.retain(|line| printed.insert(line.clone()));
            if lines.is_empty() {
                return Ok(());
            }
            printable_lines(&lines.join("\n"))
        }
    })
}

/// Fields that name an object of a result, the most specific first.
const NAME_FIELDS: [&str; 12] = [
    "pinned",
    "reference",
    "object",
    "node",
    "name",
    "image",
    "release",
    "kernel",
    "path",
    "file",
    "subject",
    "check",
];
/// Fields of a plan whose items `-o name` does not list.
const FIELDS_WITHOUT_NAMES: [&str; 2] = ["signatures", "unusedImages"];

/// Returns the names of the outermost objects that have one.
fn names(value: &Value) -> Vec<String> {
    let name = NAME_FIELDS.iter().find_map(|field| value.get(field)?.as_str());
    match (value, name) {
        // The image of a rollout is already listed with its cells.
        _ if value.get("decision").is_some() => Vec::new(),
        (_, Some(name)) => vec![name.to_owned()],
        (Value::Array(items), None) => items.iter().flat_map(names).collect(),
        (Value::Object(fields), None) => {
            let fields = fields.iter().filter(|(field, _)| !FIELDS_WITHOUT_NAMES.contains(&field.as_str()));
            fields.flat_map(|(_, value)| names(value)).collect()
        }
        (_, None) => Vec::new(),
    }
}

/// Writes text to standard output, with a newline at its end.
pub fn result(text: &str) -> Result<(), OutputError> {
    write_line(&printable_lines(text))
}

/// Writes text that is safe for a terminal.
fn write_line(text: &str) -> Result<(), OutputError> {
    if text.ends_with('\n') { write_stdout(text) } else { write_stdout(&format!("{text}\n")) }
}

/// Writes a part of the output immediately.
pub fn part(text: &str) -> Result<(), OutputError> {
    write_stdout(&printable_lines(text))
}

/// Writes text unchanged, including control sequences for the terminal. A closed pipe (`| head`) is not an error.
fn write_stdout(text: &str) -> Result<(), OutputError> {
    let mut out = io::stdout().lock();
    let outcome = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    match outcome {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => Ok(other?),
    }
}

/// Clears the terminal before output that is printed repeatedly.
pub fn clear() -> Result<(), OutputError> {
    if io::stdout().is_terminal() { write_stdout("\x1b[H\x1b[2J") } else { Ok(()) }
}

/// Writes a message to standard error. A failure is ignored, because there is nowhere to report it.
pub fn message(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{}", printable_lines(text));
}

/// Log writer for standard error that replaces deceptive characters. ASCII control characters pass, because
/// the log's colors use them; the log itself escapes those in its texts.
pub struct LogWriter(Stderr);

impl LogWriter {
    pub fn stderr() -> Self {
        Self(io::stderr())
    }
}

impl Write for LogWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(bytes);
        let text = text.replace(|c: char| is_deceptive(c) && !c.is_ascii_control(), "\u{fffd}");
        self.0.write_all(text.as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Formats a table without borders. A cell may have several lines.
pub fn table<const N: usize>(header: [&str; N], rows: impl IntoIterator<Item = [String; N]>) -> String {
    padded_table(header, rows, (0, 2))
}

/// Like [`table`], with a space before each column.
pub fn indented_table<const N: usize>(
    header: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
) -> String {
    padded_table(header, rows, (1, 1))
}

/// Formats a table with `padding`: the numbers of spaces before and after each column.
fn padded_table(
    header: impl Into<Row>,
    rows: impl IntoIterator<Item = impl Into<Row>>,
    padding: (u16, u16),
) -> String {
    let rows: Vec<Row> = rows.into_iter().map(Into::into).collect();
    lay_out(&header.into(), &rows, padding, look::width())
}

/// Number of characters of a reference by tag that are always shown.
const MIN_REFERENCE: usize = 20;

/// Lays out columns. With a width, shortens digests and wraps cells. References that would not fit lose registry and path, and
/// their tags are truncated if that does not suffice.
fn lay_out(header: &Row, rows: &[Row], padding: (u16, u16), width: Option<u16>) -> String {
    let Some(width) = width else { return text_of(&with_texts(header, rows, padding, |text| text)) };
    let excess = |table: &Table| longest_words(table, padding).sum::<usize>().saturating_sub(width.into());
    let shortened = |longest| {
        let shorten = |text: String| look::with_short_references(&with_short_digests(&text), longest);
        with_texts(header, rows, padding, shorten)
    };
    let mut table = with_texts(header, rows, padding, |text| with_short_digests(&text));
    if excess(&table) > 0 {
        table = shortened(usize::MAX);
    }
    if excess(&table) > 0 {
        let longest = longest_words(&table, padding).max().unwrap_or_default();
        let room = longest.saturating_sub(excess(&table) + usize::from(padding.0 + padding.1));
        table = shortened(room.max(MIN_REFERENCE));
    }
    let widths: Vec<usize> = longest_words(&table, padding).collect();
    table.set_content_arrangement(ContentArrangement::Dynamic).set_width(width);
    // Break no word if all words fit.
    if widths.iter().sum::<usize>() <= width.into() {
        for (column, width) in table.column_iter_mut().zip(widths) {
            let width = Width::Fixed(u16::try_from(width).unwrap_or(u16::MAX));
            column.set_constraint(ColumnConstraint::LowerBoundary(width));
        }
    }
    text_of(&table)
}

/// Makes a table with `change` applied to the text of each cell.
fn with_texts(header: &Row, rows: &[Row], padding: (u16, u16), change: impl Fn(String) -> String) -> Table {
    let mut table = Table::new();
    table.load_style(NOTHING).set_header(header.clone());
    let cell_text = |(column, cell): (usize, &Cell)| {
        let text = change(cell.content());
        if column == 0 { text } else { look::with_symbol(text) }
    };
    table.add_rows(rows.iter().map(|row| Row::from(row.cell_iter().enumerate().map(cell_text))));
    for column in table.column_iter_mut() {
        column.set_padding(padding);
    }
    table
}

/// Returns the width of each column's longest word, with the padding.
fn longest_words(table: &Table, padding: (u16, u16)) -> impl Iterator<Item = usize> {
    let length = |word: &str| word.chars().count();
    let longest = move |column: usize| {
        let cells = table.column_cells_with_header_iter(column).flatten().map(Cell::content);
        let longest = cells.filter_map(|text| text.split([' ', '\n']).map(length).max()).max();
        longest.unwrap_or_default() + usize::from(padding.0 + padding.1)
    };
    table.column_iter().map(move |column| longest(column.index))
}

fn text_of(table: &Table) -> String {
    table.lines().flat_map(|line| [line.trim_end().replace(look::NO_BREAK, " "), "\n".to_owned()]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_fits_its_width() {
        let row = || {
            Row::from(["driver".to_owned(), format!("r.example/drivers/driver@sha256:{}", "0a".repeat(32))])
        };
        let text = |width| lay_out(&["IMAGE", "REFERENCE"].into(), &[row()], (0, 2), width);
        assert!(
            text(None).lines().nth(1).unwrap().ends_with(&"0a".repeat(32)),
            "digests are complete without a width"
        );
        assert_eq!(
            text(Some(80)),
            "IMAGE   REFERENCE\ndriver  r.example/drivers/driver@sha256:0a0a0a0a0a0a\n"
        );
        assert_eq!(text(Some(40)), "IMAGE   REFERENCE\ndriver  driver@sha256:0a0a0a0a0a0a\n");
        let narrow = text(Some(20));
        assert!(narrow.lines().count() > 2 && narrow.lines().all(|line| line.len() <= 20), "{narrow}");
    }

    #[test]
    fn on_a_terminal_of_80_columns_no_reference_is_broken() {
        let tag = "127.0.0.1:5000/drivers/hello:1.0-6.1.0-56-amd64-debian12-amd64";
        let digest = format!("sha256:{}", "61".repeat(32));
        let kernel = "6.1.0-56-amd64 (debian 12, amd64)";
        let row = ["hello", kernel, "1", "published", "loads", &format!("{tag}\n@{digest}")];
        let header = ["IMAGE", "KERNEL", "NODES", "PHASE", "CHECK", "REFERENCE"];
        let mut status = lay_out(&header.into(), &[row.map(str::to_owned).into()], (0, 2), Some(80));
        assert!(status.contains("loads  hello@sha256:616161616161\n"), "{status}");
        // The tag of an unpublished image.
        let row = ["hello", kernel, "1", "missing", "", &format!("{tag}\nnot in the registry")];
        status += &lay_out(&header.into(), &[row.map(str::to_owned).into()], (0, 2), Some(80));
        assert!(status.contains("         hello:1.0-6.1.0-56-amd64-debi...\n"), "{status}");
        assert!(status.contains("         not in the registry\n"), "{status}");
        let target = "DaemonSet drivers/hello, container driver";
        let rows = [
            ["hello", target, "rewrite later", &format!("after {tag} is published")],
            ["hello", target, "rewrite", &format!("registry.example/hello:none -> {}@{digest}", &tag[..28])],
        ];
        let rows = rows.map(|row| Row::from(row.map(str::to_owned)));
        let plan = lay_out(&["IMAGE", "ROLLOUT", "ACTION", "WHY"].into(), &rows, (0, 2), Some(80));
        for word in [" hello:1.0-6.1.0-56-amd64-debian12-amd64", " hello:none", " hello@sha256:616161616161"]
        {
            assert!(plan.contains(word), "{word}: {plan}");
        }
        assert!(plan.lines().chain(status.lines()).all(|line| line.len() <= 80), "{plan}{status}");
    }
}
