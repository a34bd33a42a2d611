//! The `sandbox` engine. It runs steps in place, in Linux namespaces on this machine, over trees in the cache. It needs neither a
//! daemon nor root: steps run as farrier's user or, if that is root, as a user that owns nothing else.
//!
//! `farrier-runner` (`crates/node/runner`) creates the sandbox and runs the steps. This module is the other end of its pipes.

mod cgroup;
mod channel;
mod owner;

use std::{
    env, io,
    path::{Path, PathBuf},
    process::Stdio,
    sync::Arc,
};

use fs_err as fs;
use runner::{
    plan::{Action, Limits, Plan, Step},
    wire,
};
use rustix::{
    io::Errno,
    process::{Pid, Signal, kill_process},
};
use tokio::process::{Child, Command};
use tokio_util::sync::CancellationToken;

use farrier_core::provenance::Confinement;
use farrier_local::{cache::is_full_disk, tree_removal::remove_tree};
pub use owner::Owner;

use self::cgroup::{Group, Subtree};
use super::{BuildLog, ContextEntry, EngineError, EngineKind, Result, runner_session::RunnerSession};

/// File name of the runner, which is installed next to farrier's own program.
pub const RUNNER: &str = "farrier-runner";

/// Engine that builds in namespaces on this machine.
#[derive(Debug)]
pub struct Sandbox {
    runner: PathBuf,
    owner: Owner,
    /// Parent of the control groups of builds, if a subtree is delegated.
    subtree: Option<Subtree>,
    confinement: Confinement,
}

/// An in-place build.
pub struct InPlace {
    /// Steps and limits.
    pub plan: Plan,
    /// Lower directories of the overlay, the uppermost first. [`Owner::chown_tree`] must have set their ownership.
    pub lowers: Vec<PathBuf>,
    pub context: Vec<ContextEntry>,
    /// Directory for everything that the build writes; it must not exist yet. It is not removed after the build: the caller
    /// removes it together with its parent.
    pub scratch: PathBuf,
    pub log: Arc<dyn BuildLog>,
    /// Lowest Landlock ABI that the site accepts.
    pub min_landlock_abi: u32,
    pub cancel: CancellationToken,
}

impl Sandbox {
    /// Finds the runner, and checks that it can create a sandbox below `scratch` on this machine. The inner error is the
    /// reason why it cannot. The outer error is a fault of the check that may pass.
    pub(super) async fn connect(
        runner: Option<&Path>,
        scratch: Option<&Path>,
    ) -> Result<Result<Self, String>> {
        let owner = Owner::of_this_process();
        let runner = match find_runner(runner) {
            Ok(runner) => runner,
            Err(reason) => return Ok(Err(reason)),
        };
        let mut sandbox = Self {
            runner,
            owner: owner.with_mapped_trees().unwrap_or(owner),
            subtree: Subtree::find(),
            confinement: Confinement::default(),
        };
        let mut trial = sandbox.run_trial(scratch).await;
        if trial.is_err() && sandbox.owner != owner {
            // Older kernels and some file systems do not support idmapped mounts.
            sandbox.owner = owner;
            trial = sandbox.run_trial(scratch).await;
        }
        match trial {
            Ok(confinement) => Ok(Ok(Self { confinement, ..sandbox })),
            Err(error) if may_pass(&error) => Err(error),
            Err(EngineError::Engine { action, source, .. }) => {
                Ok(Err(with_remedy(&format!("{action}: {source}"))))
            }
            Err(error) => Ok(Err(error.to_string())),
        }
    }

    /// Returns the confinement of builds on this machine.
    pub fn confinement(&self) -> &Confinement {
        &self.confinement
    }

    /// Returns the ownership of the files that a sandbox reads and writes.
    pub fn owner(&self) -> Owner {
        self.owner
    }

    /// Runs a trial build that creates an empty `/out`.
    async fn run_trial(&self, scratch: Option<&Path>) -> Result<Confinement> {
        let directory = scratch.map_or_else(env::temp_dir, Path::to_owned);
        fs::create_dir_all(&directory)?;
        let directory = tempfile::Builder::new().prefix(".sandbox-").tempdir_in(directory)?;
        let lower = directory.path().join("lower");
        fs::create_dir(&lower)?;
        self.owner.chown_tree(&lower)?;
        let action = Action::Directory("/out".to_owned());
        let step = Step { line: 0, text: "WORKDIR /out".to_owned(), action };
        let build = InPlace {
            plan: Plan { steps: vec![step], limits: Limits::default() },
            lowers: vec![lower],
            context: Vec::new(),
            scratch: directory.path().join("scratch"),
            log: Arc::new(TrialLog),
            min_landlock_abi: 0,
            cancel: CancellationToken::new(),
        };
        let dest = directory.path().join("payload");
        fs::create_dir(&dest)?;
        let outcome = self.compile(build, &dest).await;
        remove_tree(&directory.keep())?;
        outcome
    }

    /// Runs the steps, unpacks `/out` into the empty directory `dest`, and ends all processes of the sandbox. Returns the
    /// confinement of the build.
    pub async fn compile(&self, build: InPlace, dest: &Path) -> Result<Confinement> {
        let InPlace { plan, lowers, context, scratch, log, min_landlock_abi, cancel } = build;
        fs::create_dir(&scratch)?;
        self.owner.chown_directory(&scratch)?;
        let group = self.subtree.as_ref().map(|subtree| subtree.group(plan.limits)).transpose();
        let group = group.map_err(|source| fault("make a control group", source))?;
        let mut child = Command::new(&self.runner)
            .arg("sandbox")
            .env_clear()
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .map_err(|source| fault("start", source))?;
        let directories = wire::Sandbox {
            lowers: texts(&lowers)?,
            scratch: text(&scratch)?,
            maps_owners: self.owner.maps_trees(),
        };
        let (stdin, stdout) = pipes(&mut child)?;
        let id = child.id().ok_or_else(|| fault("start", io::ErrorKind::NotFound))?;
        let session = RunnerSession {
            engine: EngineKind::Sandbox,
            plan: &plan,
            log: log.as_ref(),
            min_landlock_abi,
            cancel: &cancel,
        };
        let outcome = async {
            // The runner waits for its first message, so no process has run outside of the group.
            if let Some(group) = &group {
                group.add(id).map_err(|source| fault("use a control group", source))?;
            }
            let inputs = (&plan, context.as_slice());
            let mut runner_channel =
                channel::SandboxChannel::begin((self.owner, id), &directories, inputs, (stdin, stdout))
                    .await?;
            session.run(&mut runner_channel, dest).await
        };
        let outcome = outcome.await;
        kill(&mut child, id).await;
        let outcome = match group.as_ref().and_then(Group::memory_limit_exceeded) {
            Some(why) if !matches!(outcome, Ok(_) | Err(EngineError::Canceled)) => {
                Err(EngineError::MemoryLimit(why))
            }
            _ => outcome,
        };
        outcome.map(|confinement| Confinement { limits: limits(group.is_some()).into(), ..confinement })
    }
}

/// Mechanism that enforces each limit of a build.
fn limits(has_group: bool) -> [(&'static str, &'static str); 3] {
    let [memory, processes] = if has_group {
        ["cgroup v2", "cgroup v2"]
    } else {
        ["measured four times a second, without the kernel's own memory", "a resource limit"]
    };
    [("memory", memory), ("processes", processes), ("disk", "measured four times a second, per build")]
}

/// Kills process 1 of the sandbox, and thereby all processes of its PID namespace. Waits for the runner, which waits for
/// process 1. After this function has returned, no process of the sandbox writes any files.
async fn kill(child: &mut Child, id: u32) {
    let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap_or_default();
    let init = children.split_whitespace().find_map(|pid| Pid::from_raw(pid.parse().ok()?));
    let is_killed = init.is_some_and(|init| kill_process(init, Signal::KILL).is_ok());
    if !is_killed {
        let _ = child.start_kill();
    }
    let _ = child.wait().await;
}

/// Log of the trial build.
struct TrialLog;

impl BuildLog for TrialLog {
    fn line(&self, line: &str) {
        tracing::debug!(line, "sandbox");
    }
}

/// Whether an error of the trial build has a cause that may pass, such as a full disk.
fn may_pass(error: &EngineError) -> bool {
    match error {
        EngineError::DiskFull { .. } | EngineError::MemoryLimit(_) => true,
        EngineError::Io(source) => is_full_disk(source) || is_passing(source),
        // Not for a full disk: here that errno also stands for the limit of namespaces.
        EngineError::Engine { source, .. } => source.downcast_ref::<io::Error>().is_some_and(is_passing),
        _ => false,
    }
}

/// Whether a lack of resources or a failing device caused the error.
fn is_passing(error: &io::Error) -> bool {
    // fs-err keeps the kind of an error, and hides its number.
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::OutOfMemory)
        || matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE | Errno::IO))
}

/// Returns the given runner, or the one next to farrier's own program.
pub(super) fn find_runner(path: Option<&Path>) -> Result<PathBuf, String> {
    let runner = match path {
        Some(runner) => runner.to_owned(),
        None => default_runner().ok_or("farrier's own program cannot be found")?,
    };
    if runner.is_file() {
        return Ok(runner);
    }
    Err(format!(
        "there is no {}: put farrier-runner beside farrier, or name it with FARRIER_RUNNER",
        runner.display()
    ))
}

fn default_runner() -> Option<PathBuf> {
    let directory = env::current_exe().ok()?.parent()?.to_owned();
    // Test programs of cargo are one directory deeper.
    let beside_program = directory.join(RUNNER);
    let in_parent = directory.parent()?.join(RUNNER);
    Some(if !beside_program.is_file() && in_parent.is_file() { in_parent } else { beside_program })
}

/// Adds a remedy to the kernel's error message, if the cause is known.
fn with_remedy(message: &str) -> String {
    let remedy = if message.contains("namespaces") || message.contains("uid_map") {
        "; allow user namespaces: on Ubuntu 24.04 an AppArmor profile with `userns` for farrier-runner, elsewhere \
         user.max_user_namespaces above 0, in a container a runtime that does not filter unshare"
    } else if message.contains("/proc") {
        "; a container needs an unmasked /proc (systempaths=unconfined)"
    } else if message.contains("overlay") {
        "; the cache directory (--cache-dir) must be on a file system that an overlay can write to, such as ext4, xfs or tmpfs, \
         and the kernel be 5.11 or newer"
    } else {
        ""
    };
    format!("{message}{remedy}")
}

fn pipes(child: &mut Child) -> Result<(tokio::process::ChildStdin, tokio::process::ChildStdout)> {
    child.stdin.take().zip(child.stdout.take()).ok_or_else(|| fault("start", io::ErrorKind::BrokenPipe))
}

fn texts(paths: &[PathBuf]) -> Result<Vec<String>> {
    paths.iter().map(|path| text(path)).collect()
}

fn text(path: &Path) -> Result<String> {
    let not_utf8 = || {
        let reason = format!("{} is not valid UTF-8", path.display());
        EngineError::Io(io::Error::new(io::ErrorKind::InvalidInput, reason))
    };
    path.to_str().map(str::to_owned).ok_or_else(not_utf8)
}

fn fault(action: &str, source: impl Into<io::Error>) -> EngineError {
    EngineError::engine(EngineKind::Sandbox, action, source.into())
}

#[cfg(test)]
mod tests {
    use std::{ffi::OsStr, os::unix::ffi::OsStrExt as _};

    use super::*;

    #[test]
    fn only_faults_that_may_pass_keep_the_choice_of_an_engine_open() {
        let at_spawn = |errno: Errno| may_pass(&fault("start", errno));
        let of_a_file = |errno: Errno| may_pass(&EngineError::Io(errno.into()));
        for errno in [Errno::AGAIN, Errno::NOMEM, Errno::MFILE, Errno::NFILE, Errno::IO] {
            assert!(at_spawn(errno) && of_a_file(errno), "{errno}");
        }
        for errno in [Errno::ROFS, Errno::INVAL, Errno::NOSYS, Errno::NOTDIR, Errno::PERM, Errno::NOENT] {
            assert!(!at_spawn(errno) && !of_a_file(errno), "{errno}");
        }
        for errno in [Errno::NOSPC, Errno::DQUOT] {
            assert!(!at_spawn(errno) && of_a_file(errno), "{errno}");
        }
        assert!(!may_pass(&text(Path::new(OsStr::from_bytes(b"\xff"))).unwrap_err()));
    }
}
