//! Runs programs of the host.

use std::process::{Command, Stdio};

use crate::{Error, Result};

/// Runs a program, and returns what it printed. A failure contains the program's error.
pub(crate) fn output_of(command: &mut Command) -> Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let failed = |why: String| Error::Program { program: program.clone(), why };
    let output = command.stdin(Stdio::null()).output().map_err(|error| failed(error.to_string()))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(failed(error_in(&String::from_utf8_lossy(&output.stderr)).to_owned()))
}

/// Returns the text of the last line that begins with `error: `, else the last line. A hint may follow the error.
fn error_in(printed: &str) -> &str {
    let mut lines = printed.lines().rev().map(str::trim).filter(|line| !line.is_empty());
    let last = lines.clone().next().unwrap_or("it failed");
    lines.find_map(|line| line.strip_prefix("error: ")).unwrap_or(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_preferred_to_the_hint_after_it() {
        let farrier = "warning: old\nerror: no image for kernel 6.2\nhint: `farrier build` publishes one\n";
        assert_eq!(error_in(farrier), "no image for kernel 6.2");
        assert_eq!(
            error_in("grub-reboot: usage\ngrub-reboot: no such entry\n\n"),
            "grub-reboot: no such entry"
        );
        assert_eq!(error_in(""), "it failed");
    }
}
