//! Child processes that end with the future that waits for them.

use std::{
    io,
    path::Path,
    process::{ExitStatus, Stdio},
    time::{Duration, Instant},
};

use farrier_local::cache::reports_full_disk;
use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process_group, prlimit};
use tokio::{
    io::{AsyncRead, AsyncReadExt},
    process::{Child, Command},
};

use super::{FetchError, Result};

/// Fixed search path for the programs of a Debian system. As root, `dpkg` needs the `sbin` directories, which a service's search
/// path often lacks.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A program in a separate process group. Dropping this value ends the whole group.
pub(super) struct Running {
    pub(super) child: Child,
    grace: Duration,
}

/// Exit status and output of a program.
pub struct Output {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

/// Maximum size of a program's output that is kept, in bytes.
const MAX_OUTPUT_SIZE: u64 = 256 << 20;

/// Creates a command with a fixed search path and locale, and an empty standard input.
pub fn command(program: &'static str) -> Command {
    with_defaults(ended_with_parent(program))
}

/// Creates a command in the way of [`command`], without any other variable of the environment.
pub(super) fn clean_command(program: &'static str) -> Command {
    let mut command = ended_with_parent(program);
    command.env_clear();
    with_defaults(command)
}

/// Creates a command that the kernel kills if farrier is killed. `setpriv` of util-linux requests that, because only unsafe code
/// could do so between fork and exec.
fn ended_with_parent(program: &'static str) -> Command {
    let is_installed = |name: &str| PATH.split(':').any(|directory| Path::new(directory).join(name).exists());
    // The error for an absent program names that program.
    if !is_installed("setpriv") || !is_installed(program) {
        return Command::new(program);
    }
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--", program]);
    command
}

fn with_defaults(mut command: Command) -> Command {
    command.env("PATH", PATH).env("LC_ALL", "C.UTF-8").env("DEBIAN_FRONTEND", "noninteractive");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Removes the proxy variables from a command's environment, for programs whose configuration has the proxies.
pub fn without_proxies(command: &mut Command) {
    for name in ["http_proxy", "https_proxy", "all_proxy", "no_proxy"] {
        command.env_remove(name).env_remove(name.to_ascii_uppercase());
    }
}

/// Starts a command. If dropped while running, the program has `grace` to clean up after a SIGTERM.
pub(super) fn start(mut command: Command, program: &'static str, grace: Duration) -> Result<Running> {
    let child = command
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
        .map_err(|source| FetchError::Start(program, source))?;
    Ok(Running { child, grace })
}

/// Limits the memory of a program and of the programs that it starts, in bytes. Does nothing if the program has exited.
pub(super) fn limit_memory(id: u32, bytes: u64) {
    let limit = Rlimit { current: Some(bytes), maximum: Some(bytes) };
    if let Some(id) = i32::try_from(id).ok().and_then(Pid::from_raw) {
        let _ = prlimit(Some(id), Resource::As, limit);
    }
}

impl Running {
    /// Limits the memory of the program, as [`limit_memory`] does.
    pub(super) fn limit_memory(&self, bytes: u64) {
        if let Some(id) = self.child.id() {
            limit_memory(id, bytes);
        }
    }
}

/// Runs a command until it exits, whatever its exit status.
pub async fn output(command: Command, program: &'static str) -> Result<Output> {
    collect_output(start(command, program, Duration::ZERO)?, program).await
}

async fn collect_output(mut running: Running, program: &'static str) -> Result<Output> {
    let failed = |source| FetchError::Start(program, source);
    let (out, err) = (running.child.stdout.take(), running.child.stderr.take());
    let (stdout, stderr) = tokio::try_join!(read_text(out), read_text(err)).map_err(failed)?;
    let status = running.child.wait().await.map_err(failed)?;
    Ok(Output { status, stdout, stderr })
}

/// Runs a command and returns an error if it fails. `action` describes the program's task in that error.
pub async fn run(command: Command, program: &'static str, action: impl FnOnce() -> String) -> Result<Output> {
    require_success(output(command, program).await?, action)
}

fn require_success(output: Output, action: impl FnOnce() -> String) -> Result<Output> {
    if output.status.success() { Ok(output) } else { Err(failure(action(), &output.stderr)) }
}

/// Runs a command like [`run`], with at most `memory` bytes.
pub(super) async fn run_limited(
    memory: u64,
    command: Command,
    program: &'static str,
    action: impl FnOnce() -> String,
) -> Result<Output> {
    let running = start(command, program, Duration::ZERO)?;
    running.limit_memory(memory);
    require_success(collect_output(running, program).await?, action)
}

/// Reads a program's output until it closes the pipe.
pub(super) async fn read_text(pipe: Option<impl AsyncRead + Unpin>) -> io::Result<String> {
    let mut bytes = Vec::new();
    if let Some(pipe) = pipe {
        // A program that writes more gets SIGPIPE.
        pipe.take(MAX_OUTPUT_SIZE).read_to_end(&mut bytes).await?;
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

impl Drop for Running {
    fn drop(&mut self) {
        // Without an ID, the program has already exited and been reaped.
        let id = self.child.id().and_then(|id| i32::try_from(id).ok());
        let Some(group) = id.and_then(Pid::from_raw) else { return };
        if !self.grace.is_zero() && kill_process_group(group, Signal::TERM).is_ok() {
            // Block on purpose, which happens only during cancellation: the caller then removes the program's working directory,
            // and the program must no longer write there.
            let deadline = Instant::now() + self.grace;
            while Instant::now() < deadline && matches!(self.child.try_wait(), Ok(None)) {
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        // Kill the rest of the group; an empty group is not an error.
        let _ = kill_process_group(group, Signal::KILL);
    }
}

/// Creates an error from a failed program's standard error.
pub fn failure(action: String, stderr: &str) -> FetchError {
    FetchError::Program { action, message: error_lines(stderr), transient: is_transient(stderr) }
}

/// Returns the lines of a program's standard error that report the failure, at most five.
fn error_lines(stderr: &str) -> String {
    // tar names the full disk on a separate line, before mmdebstrap's own errors.
    if let Some(line) = stderr.lines().find(|line| reports_full_disk(line)) {
        return line.trim_start_matches("E: ").trim().chars().take(2000).collect();
    }
    let mut lines: Vec<&str> = stderr.lines().filter(|line| line.starts_with("E: ")).collect();
    if lines.is_empty() {
        lines = stderr.lines().filter(|line| !line.trim().is_empty()).collect();
    }
    let from = lines.len().saturating_sub(5);
    let text = lines[from..].iter().map(|line| line.trim_start_matches("E: ").trim()).collect::<Vec<_>>();
    text.join("; ").chars().take(2000).collect()
}

/// Whether a failure of apt, mmdebstrap or git is transient. A failure is permanent if the output reports a full disk, or an archive
/// that answered but lacks the requested file or has no valid signature.
fn is_transient(stderr: &str) -> bool {
    const TRANSIENT: [&str; 8] = [
        "Could not resolve",
        "Could not connect",
        "Unable to connect",
        "Temporary failure",
        "timed out",
        "Connection failed",
        "Hash Sum mismatch",
        "unexpected size",
    ];
    const PERMANENT: [&str; 23] = [
        "does not have a Release file",
        "no longer has a Release file",
        " is expired (invalid since",
        "NO_PUBKEY",
        "is not signed",
        "EXPKEYSIG",
        "BADSIG",
        "Unable to locate package",
        "Unable to correct problems",
        "404  Not Found",
        "' was not found",
        "' not found",
        "fsck error",
        "not our ref",
        "unadvertised object",
        "config blob",
        "SSL certificate problem",
        "certificate verification failed",
        "Host key verification failed",
        "Permission denied (publickey",
        "Authentication failed",
        "could not read Username",
        "The requested URL returned error: 30",
    ];
    let reports = |messages: &[&str]| messages.iter().any(|message| stderr.contains(message));
    reports(&TRANSIENT) || !(reports(&PERMANENT) || reports_full_disk(stderr) || exceeds_memory(stderr))
}

/// Whether git's error output or a message from it reports that git itself, and not the server (`remote: `), had too little memory.
pub(super) fn exceeds_memory(text: &str) -> bool {
    text.split(['\n', ';']).any(|line| line.trim_start().starts_with("fatal: Out of memory"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn output_and_status() {
        let mut sh = command("sh");
        sh.args(["-c", "echo out; echo 'E: bad' >&2; exit 3"]);
        let output = output(sh, "sh").await.unwrap();
        assert_eq!((output.stdout.as_str(), output.status.code()), ("out\n", Some(3)));
        assert_eq!(error_lines(&output.stderr), "bad");
    }

    #[tokio::test]
    async fn an_absent_program_is_named() {
        let error = output(command("no-such-program"), "no-such-program").await.err().unwrap();
        assert_eq!(error.to_string(), "cannot start no-such-program");
        assert_eq!(error.hint().unwrap(), "install no-such-program, or put it in the search path");
    }

    #[tokio::test]
    async fn dropping_ends_the_whole_group() {
        for grace in [Duration::ZERO, Duration::from_secs(5)] {
            let mut sh = command("sh");
            // The grandchild keeps the pipe open as long as it lives.
            sh.args(["-c", "sleep 1000 & echo started; wait"]);
            let mut running = start(sh, "sh", grace).unwrap();
            let mut pipe = running.child.stdout.take().unwrap();
            let mut text = [0; 8];
            pipe.read_exact(&mut text).await.unwrap();
            drop(running);
            assert_eq!(pipe.read_to_end(&mut Vec::new()).await.unwrap(), 0);
        }
    }

    #[test]
    fn what_may_pass() {
        assert!(is_transient("E: Failed to fetch x  Could not resolve 'x'"));
        assert!(is_transient("E: something new"));
        assert!(!is_transient("E: The repository 'x' does not have a Release file."));
        assert!(!is_transient("W: GPG error: NO_PUBKEY 1234"));
        let expired = "E: Release file for http://a.test/InRelease is expired (invalid since 16d 4h). Updates for this \
                       repository will not be applied.";
        assert!(!is_transient(expired));
        assert!(failure("fetch".to_owned(), expired).hint().unwrap().contains("check-valid-until=no"));
        let early = "E: Release file for http://a.test/InRelease is not valid yet (invalid for another 2h 3min 4s). Updates for \
                     this repository will not be applied.";
        assert!(failure("fetch".to_owned(), early).hint().unwrap().contains("clock"));
        let moved = "fatal: unable to access 'https://git.test/a/': The requested URL returned error: 301\n";
        assert!(!is_transient(moved));
        assert!(failure("fetch".to_owned(), moved).hint().unwrap().contains("`.git`"));
    }

    #[test]
    fn a_server_that_refuses_is_not_taken_for_an_archive_without_a_signature() {
        let said = "E: Failed to fetch http://a.test/dists/sid/InRelease  403  Forbidden [IP: 192.0.2.1 80]\n\
                    E: The repository 'http://a.test sid InRelease' is not signed.\n";
        let error = failure("fetch the package lists".to_owned(), said);
        assert!(!error.is_transient());
        assert!(error.hint().unwrap().contains("/etc/apt/auth.conf"), "{error}");
    }

    #[test]
    fn a_git_object_above_the_memory_limit_is_permanent_and_a_short_server_is_not() {
        let said = "fatal: Out of memory, malloc failed (tried to allocate 2314572801 bytes)\n\
                    fatal: fetch-pack: invalid index-pack output\n";
        let error = failure("fetch refs/tags/v1".to_owned(), said);
        assert!(!error.is_transient());
        assert!(error.hint().unwrap().contains("2 GiB"), "{error}");
        let error =
            failure("fetch".to_owned(), "remote: fatal: Out of memory, malloc failed\nfatal: early EOF\n");
        assert!(error.is_transient() && error.hint().is_none());
    }

    #[test]
    fn words_are_bounded() {
        let many = "E: line\n".repeat(1000);
        assert_eq!(error_lines(&many), ["line"; 5].join("; "));
        assert_eq!(error_lines("\nfirst\n\nlast\n"), "first; last");
    }

    #[test]
    fn a_full_disk_is_named_and_does_not_pass() {
        let said = "tar: ./usr/bin/gcc-12: Cannot write: No space left on device\n\
                    tar: Exiting with failure status due to previous errors\n\
                    E: tar --extract failed: 512\n\
                    E: mmdebstrap failed to run\n";
        assert_eq!(error_lines(said), "tar: ./usr/bin/gcc-12: Cannot write: No space left on device");
        assert!(!is_transient(said));
        // apt checks the free space before it writes.
        let said = "E: You don't have enough free space in /var/cache/apt/archives/.\n";
        assert!(!is_transient(said));
        assert_eq!(
            failure("make the toolchain".to_owned(), said).hint().unwrap(),
            farrier_local::cache::FULL_DISK
        );
    }
}
