//! Signs with an external program, for private keys that farrier cannot load.

use std::{
    io::Write as _,
    process::{Command, Output, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use kmod::SignatureHash;
use rustix::process::{Pid, Signal, kill_process_group};

use super::{Result, SigningError};

/// Timeout for one signature. A hardware security module answers within seconds, unless it waits for an operator.
const TIMEOUT: Duration = Duration::from_mins(1);
/// Maximum number of characters of standard error in a message.
const MAX_CHARS: usize = 500;

/// A program and its arguments.
#[derive(Clone, Debug)]
pub(super) struct SigningCommand {
    program: String,
    arguments: Vec<String>,
}

impl SigningCommand {
    pub(super) fn new(command: &[String]) -> Option<Self> {
        let (program, arguments) = command.split_first()?;
        Some(Self { program: program.clone(), arguments: arguments.to_vec() })
    }

    pub(super) fn program(&self) -> &str {
        &self.program
    }

    /// Runs the program: it reads the raw digest from standard input and writes the signature to standard output. Blocks.
    pub(super) fn run(&self, hash: SignatureHash, digest: &[u8]) -> Result<Vec<u8>> {
        use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
        let failed = |outcome: String| {
            let message = format!("the signing command {} {outcome}", self.program);
            SigningError::key(message, "run it by hand: it reads the digest from its standard input")
        };
        let start = |source| SigningError::Start(self.program.clone(), source);
        let arguments = self.arguments.iter().map(|argument| argument.replace("{{hash}}", hash.as_str()));
        let mut child = Command::new(&self.program)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .map_err(start)?;
        let group = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        if let Some(mut stdin) = child.stdin.take() {
            // Ignore the error: a program that does not read its input reports the reason on standard error.
            let _ = stdin.write_all(digest);
        }
        let (send, receive) = mpsc::channel();
        thread::spawn(move || send.send(child.wait_with_output()));
        let Ok(output) = receive.recv_timeout(TIMEOUT) else {
            if let Some(group) = group {
                let _ = kill_process_group(group, Signal::KILL);
            }
            return Err(failed(format!("did not exit within {} s", TIMEOUT.as_secs())));
        };
        let output = output.map_err(start)?;
        let Output { status, stdout, stderr } = output;
        if status.success() {
            return Ok(stdout);
        }
        let outcome = match (status.code(), status.signal()) {
            (Some(code), _) => format!("exited with status {code}"),
            (None, Some(signal)) => format!("was killed by signal {signal}"),
            (None, None) => "failed".to_owned(),
        };
        Err(failed(match last_lines(&stderr) {
            lines if lines.is_empty() => outcome,
            lines => format!("{outcome}: {lines}"),
        }))
    }
}

fn last_lines(stderr: &[u8]) -> String {
    let text = String::from_utf8_lossy(stderr);
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let from = lines.len().saturating_sub(3);
    lines.get(from..).unwrap_or_default().join("; ").chars().take(MAX_CHARS).collect()
}
