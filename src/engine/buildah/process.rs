//! Adapter: one run of a command: its output line by line, its end, its cancellation.

use std::{
    collections::VecDeque,
    pin::{Pin, pin},
    process::{ExitStatus, Stdio},
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    process::{Child, ChildStderr, ChildStdout, Command},
    time::timeout,
};
use tokio_util::sync::CancellationToken;

use super::super::{BuildLog, EngineError, EngineKind, error::is_disk_full, lines::LineSplitter};

/// How long a cancelled process may take to end by itself.
const GRACE: Duration = Duration::from_secs(2);
/// Lines of the end that are kept to explain a failure.
const TAIL: usize = 10;

/// A process under way, in a group of its own so that a terminal's Ctrl-C reaches us alone.
pub(super) struct Running<'a> {
    child: Child,
    stdout: Option<ChildStdout>,
    stderr: Option<ChildStderr>,
    log: &'a dyn BuildLog,
    action: String,
}

/// How a process ended.
pub(super) struct Ended {
    status: ExitStatus,
    tail: VecDeque<String>,
    action: String,
}

impl<'a> Running<'a> {
    /// Starts a command. Its standard error goes to the log; its output, unless piped, is dropped.
    pub(super) fn start(
        mut command: Command,
        log: &'a dyn BuildLog,
        action: &str,
    ) -> Result<Self, EngineError> {
        command.stdin(Stdio::null());
        Self::spawn(command, log, action)
    }

    /// Starts a command and gives it something to read.
    pub(super) fn start_with_input(
        mut command: Command,
        log: &'a dyn BuildLog,
        action: &str,
        input: Vec<u8>,
    ) -> Result<Self, EngineError> {
        command.stdin(Stdio::piped()).stdout(Stdio::null());
        let mut running = Self::spawn(command, log, action)?;
        if let Some(mut stdin) = running.child.stdin.take() {
            // A reader that does not care is no fault; the process's end tells.
            tokio::spawn(async move { stdin.write_all(&input).await });
        }
        Ok(running)
    }

    fn spawn(mut command: Command, log: &'a dyn BuildLog, action: &str) -> Result<Self, EngineError> {
        command.stderr(Stdio::piped()).process_group(0).kill_on_drop(true);
        let mut child =
            command.spawn().map_err(|source| EngineError::engine(EngineKind::Buildah, action, source))?;
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        Ok(Self { child, stdout, stderr, log, action: action.to_owned() })
    }

    /// Its output, if it was asked to be piped; once.
    pub(super) fn stdout(&mut self) -> Option<ChildStdout> {
        self.stdout.take()
    }

    /// Waits for its end and for that of everything that it started: only then its error stream ends.
    /// `cancel` stops it and gives [`EngineError::Cancelled`]; `stop` just stops it.
    pub(super) async fn wait(
        mut self,
        cancel: &CancellationToken,
        stop: &CancellationToken,
    ) -> Result<Ended, EngineError> {
        let group = self.child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        let mut tail = VecDeque::new();
        let stderr = self.stderr.take();
        let status = {
            let mut end = pin!(async {
                read_lines(stderr, self.log, &mut tail).await;
                self.child.wait().await
            });
            let ended = tokio::select! {
                biased;
                () = cancel.cancelled() => None,
                () = stop.cancelled() => None,
                status = &mut end => Some(status),
            };
            match ended {
                Some(status) => status,
                None => terminate(group, end).await,
            }
        };
        if cancel.is_cancelled() {
            return Err(EngineError::Cancelled);
        }
        let status =
            status.map_err(|source| EngineError::engine(EngineKind::Buildah, &*self.action, source))?;
        Ok(Ended { status, tail, action: self.action })
    }
}

/// Ends a process group: politely, then for good.
async fn terminate<T>(group: Option<Pid>, mut end: Pin<&mut impl Future<Output = T>>) -> T {
    for (signal, patience) in [(Signal::TERM, GRACE), (Signal::KILL, Duration::MAX)] {
        if let Some(group) = group {
            // It may have ended by itself meanwhile.
            let _ = kill_process_group(group, signal);
        }
        if let Ok(status) = timeout(patience, end.as_mut()).await {
            return status;
        }
    }
    end.await
}

/// Hands on the lines of an error stream and keeps the last ones.
async fn read_lines(stderr: Option<ChildStderr>, log: &dyn BuildLog, tail: &mut VecDeque<String>) {
    let Some(mut stderr) = stderr else { return };
    let mut splitter = LineSplitter::default();
    let mut line = |line: &str| {
        if tail.len() == TAIL {
            tail.pop_front();
        }
        tail.push_back(line.to_owned());
        log.line(line);
    };
    let mut chunk = vec![0; 16 * 1024];
    while let Ok(count @ 1..) = stderr.read(&mut chunk).await {
        splitter.feed(&chunk[..count], &mut line);
    }
    splitter.finish(&mut line);
}

impl Ended {
    /// Sorts the end: success, a step's failure, or buildah's own.
    pub(super) fn into_result(self) -> Result<(), EngineError> {
        let Self { status, tail, action } = self;
        if status.success() {
            return Ok(());
        }
        let complaint = tail.iter().rev().find_map(|line| line.strip_prefix("Error: "));
        let words = complaint.map_or_else(|| tail.iter().rev().take(1).cloned().collect(), str::to_owned);
        Err(sort(&action, words, &status.to_string()))
    }
}

/// Words of a failed build that the Dockerfile or its base image is to blame for.
const PERMANENT: [&str; 6] = [
    "creating build container",
    "ockerfile",
    "nknown instruction",
    "parsing main",
    "stage",
    "unable to build",
];

fn sort(action: &str, words: String, status: &str) -> EngineError {
    if is_disk_full(&words) {
        return EngineError::DiskFull {
            engine: EngineKind::Buildah,
            action: action.to_owned(),
            message: words,
        };
    }
    if let Some((step, reason)) = failed_step(&words) {
        let message = match reason.rsplit_once("exit status ") {
            Some((_, code)) if code.bytes().all(|byte| byte.is_ascii_digit()) => {
                format!("{step}: exit code {code}")
            }
            _ => format!("{step}: {reason}"),
        };
        return EngineError::Step { message };
    }
    if action == "build" && PERMANENT.iter().any(|part| words.contains(part)) {
        return EngineError::Step { message: words };
    }
    let words = if words.is_empty() { status.to_owned() } else { words };
    EngineError::engine(EngineKind::Buildah, action, words)
}

/// `building at STEP "RUN make": while running runtime: exit status 2` -> the step and the reason.
fn failed_step(words: &str) -> Option<(&str, &str)> {
    let (_, rest) = words.split_once("building at STEP \"")?;
    // The step may hold quotes itself.
    rest.rsplit_once("\": ")
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[derive(Default)]
    struct Lines(Mutex<Vec<String>>);

    impl BuildLog for Lines {
        fn line(&self, line: &str) {
            self.0.lock().unwrap().push(line.to_owned());
        }
    }

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[tokio::test]
    async fn lines_and_failure_are_reported() {
        let log = Lines::default();
        let never = CancellationToken::new();
        let running =
            Running::start(shell("echo one >&2; echo Error: two >&2; exit 3"), &log, "push").unwrap();
        let error = running.wait(&never, &never).await.unwrap().into_result().unwrap_err();
        assert!(matches!(&error, EngineError::Engine { source, .. } if source.to_string() == "two"));
        assert_eq!(*log.0.lock().unwrap(), ["one", "Error: two"]);
    }

    #[tokio::test]
    async fn cancelling_ends_the_whole_group() {
        let log = Lines::default();
        let (cancel, never) = (CancellationToken::new(), CancellationToken::new());
        // Its grandchild holds the error stream open: the wait is over only when that is gone, too.
        let running =
            Running::start(shell("trap '' TERM; sleep 600 & echo up >&2; wait; wait"), &log, "build")
                .unwrap();
        let (result, ()) = tokio::join!(running.wait(&cancel, &never), async {
            while log.0.lock().unwrap().is_empty() {
                tokio::task::yield_now().await;
            }
            cancel.cancel();
        });
        assert!(matches!(result, Err(EngineError::Cancelled)));
    }

    #[tokio::test]
    async fn a_missing_command_is_an_engine_fault() {
        let log = Lines::default();
        assert!(Running::start(Command::new("/nonexistent/buildah"), &log, "build").is_err());
    }

    #[test]
    fn complaints_are_sorted() {
        let sorted = |words: &str| sort("build", words.to_owned(), "exit status: 125");
        let step = sorted("building at STEP \"RUN make \"A\": b\": while running runtime: exit status 2");
        assert_eq!(step.to_string(), "build step failed: RUN make \"A\": b: exit code 2");
        let copy = sorted(
            "building at STEP \"COPY --from=modules /out /out\": copier: stat: \"/out\": no such file",
        );
        assert!(matches!(copy, EngineError::Step { .. }), "{copy}");
        assert!(matches!(sorted("creating build container: x: image not known"), EngineError::Step { .. }));
        assert!(matches!(sorted("writing blob: no space left on device"), EngineError::DiskFull { .. }));
        assert!(sorted("database is locked").is_transient());
        assert!(sorted("").is_transient());
    }
}
