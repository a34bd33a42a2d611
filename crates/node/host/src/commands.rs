//! Programs of the host that this program runs.

use std::process::{Command, Stdio};

use crate::{Error, Result};

/// Runs a program, and returns what it printed. A failure contains the last line that it printed as an error.
pub(crate) fn output_of(command: &mut Command) -> Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let failed = |why: String| Error::Program { program: program.clone(), why };
    let output = command.stdin(Stdio::null()).output().map_err(|error| failed(error.to_string()))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    Err(failed(errors.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it failed").trim().to_owned()))
}
