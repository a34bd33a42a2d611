//! Shows results that are longer than the terminal in a pager once the command has ended, as git does.

use std::{
    io::{self, IsTerminal as _, Write as _},
    process::{Command, Stdio},
};

use parking_lot::Mutex;
use rustix::termios::tcgetwinsize;

use crate::cli::{env_vars, error::OutputError};

/// Results that are kept for the end; `None` if results are printed at once.
static KEPT: Mutex<Option<String>> = Mutex::new(None);

/// Keeps results for the end from now on, if they go to a terminal and a pager is wanted.
pub fn set(wanted: bool) {
    *KEPT.lock() = (wanted && io::stdout().is_terminal()).then(String::new);
}

/// Keeps a result for the end. Returns `false` if results are printed at once.
pub fn keep(text: &str) -> bool {
    KEPT.lock().as_mut().map(|kept| kept.push_str(text)).is_some()
}

/// Prints the kept results. At this point this process no longer handles Ctrl-C, so that the pager gets it.
pub fn show() -> Result<(), OutputError> {
    match KEPT.lock().take() {
        Some(text) if fits(&text) || !is_paged(&text) => super::raw(&text),
        _ => Ok(()),
    }
}

/// Whether the text fits on the screen. A terminal with an unknown size reports 0.
fn fits(text: &str) -> bool {
    let Ok(size) = tcgetwinsize(io::stdout()) else { return true };
    let columns = usize::from(size.ws_col).max(1);
    let rows = |line: &str| line.chars().count().div_ceil(columns).max(1);
    size.ws_row == 0 || text.lines().map(rows).sum::<usize>() < usize::from(size.ws_row)
}

/// Runs the pager and returns whether it has shown the text.
fn is_paged(text: &str) -> bool {
    let mut pager = match env_vars::pager() {
        Some(none) if matches!(none.trim(), "" | "cat") => return false,
        Some(command) => {
            let mut shell = Command::new("sh");
            shell.args(["-c", &command]);
            shell
        }
        None => Command::new("less"),
    };
    if !env_vars::has_less_options() {
        // F: exit at once if the text fits. R: show colors. X: leave the shown text on the screen.
        pager.env("LESS", "FRX");
    }
    let Ok(mut pager) = pager.stdin(Stdio::piped()).spawn() else { return false };
    if let Some(mut stdin) = pager.stdin.take() {
        // A user who quits the pager early does not want the rest.
        let _ = stdin.write_all(text.as_bytes());
    }
    // A shell that could not start the pager exits with one of these codes.
    pager.wait().is_ok_and(|status| !matches!(status.code(), Some(126 | 127)))
}
