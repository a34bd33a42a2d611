//! Output for the journal, and for people.

use std::{fmt::Display, io::Write as _};

/// Prints a line. A closed output is no error: the work goes on.
pub(crate) fn print(line: impl Display) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

/// Prints a line as an error.
pub(crate) fn print_error(line: impl Display) {
    let _ = writeln!(std::io::stderr(), "{line}");
}
