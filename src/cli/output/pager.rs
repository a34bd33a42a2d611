//! Results that are longer than the terminal go through a pager, as git's do, once the command has ended.

use std::{
    io::{self, IsTerminal as _, Write as _},
    process::{Command, Stdio},
};

use parking_lot::Mutex;
use rustix::termios::tcgetwinsize;

use crate::cli::{env_vars, error::OutputError};

/// What is printed at the end; `None` where results are printed at once.
static KEPT: Mutex<Option<String>> = Mutex::new(None);

/// From now on results are kept for the end, where they go to a terminal and a pager is wanted.
pub fn set(wanted: bool) {
    *KEPT.lock() = (wanted && io::stdout().is_terminal()).then(String::new);
}

/// Keeps a result for the end, if results are kept.
pub fn keep(text: &str) -> bool {
    KEPT.lock().as_mut().map(|kept| kept.push_str(text)).is_some()
}

/// Prints what was kept. By now nothing in this process takes Ctrl-C, which is the pager's.
pub fn show() -> Result<(), OutputError> {
    match KEPT.lock().take() {
        Some(text) if fits(&text) || !is_paged(&text) => super::raw(&text),
        _ => Ok(()),
    }
}

/// Is it shorter than the screen? A terminal that does not know its size says 0.
fn fits(text: &str) -> bool {
    let Ok(size) = tcgetwinsize(io::stdout()) else { return true };
    let columns = usize::from(size.ws_col).max(1);
    let rows = |line: &str| line.chars().count().div_ceil(columns).max(1);
    size.ws_row == 0 || text.lines().map(rows).sum::<usize>() < usize::from(size.ws_row)
}

/// Has a pager shown it?
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
        // It ends at once with what fits, takes colours, and leaves what it has shown.
        pager.env("LESS", "FRX");
    }
    let Ok(mut pager) = pager.stdin(Stdio::piped()).spawn() else { return false };
    if let Some(mut stdin) = pager.stdin.take() {
        // Who leaves it early does not want the rest.
        let _ = stdin.write_all(text.as_bytes());
    }
    // With these a shell says that it could not start it.
    pager.wait().is_ok_and(|status| !matches!(status.code(), Some(126 | 127)))
}
