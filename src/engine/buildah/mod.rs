//! Adapter: the `buildah` engine: a subprocess, no daemon.
//!
//! A build that leaves nothing has a storage of its own, with the machine's as a read-only addition for base
//! images. It lies in one directory, which is removed at the end: so nothing of it can be left in the
//! machine's storage. A build whose image is kept works in the machine's storage, since moving the image
//! there afterwards takes four times as long (42 s against 9 s for a toolchain of 370 MB).

mod process;
mod store;

use std::{
    path::{Path, PathBuf},
    process::Stdio,
};

use fs_err as fs;
use tokio::process::Command;
use tokio_util::{io::ReaderStream, sync::CancellationToken};

use self::{
    process::{Ended, Running},
    store::{RunStore, Storage},
};
use super::{
    BuildJob, BuildLog, Credentials, Engine, EngineError, EngineKind, bridge,
    context::{self, DOCKERFILE},
    dockerfile::{self, OUT_STEP},
};
use crate::{blocking::blocking, error_chain};

/// The `buildah` command and its storage.
pub(super) struct BuildahEngine {
    program: PathBuf,
    version: String,
    storage: Storage,
}

/// Whose storage a build works in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// The run's own.
    Private,
    /// The machine's.
    Machine,
}

/// Writes lines to the debug log only.
struct Silent;

impl BuildLog for Silent {
    fn line(&self, line: &str) {
        tracing::debug!(line, "buildah says");
    }
}

impl BuildahEngine {
    /// Tries the command out. The error is its answer, for people.
    pub(super) async fn connect(program: &Path) -> Result<Self, String> {
        // chroot isolation leaves RUN in the caller's network: only a network namespace of our own takes it
        // away, and that needs root.
        if !rustix::process::geteuid().is_root() {
            return Err("needs root to run steps without a network".to_owned());
        }
        answer(isolated("true".as_ref()).arg("--version"))
            .await
            .map_err(|words| format!("cannot isolate steps: {words}"))?;
        let version = answer(Command::new(program).arg("--version")).await?;
        let info = answer(Command::new(program).arg("info")).await?;
        let storage = Storage::parse(&info).ok_or("`buildah info` does not say where its storage is")?;
        storage.remove_stale();
        let version = version.split_whitespace().nth(2).unwrap_or("of unknown version").to_owned();
        Ok(Self { program: program.to_owned(), version, storage })
    }

    /// A command on the machine's own storage.
    fn command(&self, subcommand: &str) -> Command {
        let mut command = Command::new(&self.program);
        command.arg(subcommand);
        command
    }

    /// `buildah build` with what all builds share; the context is laid out by now.
    fn build(&self, store: &RunStore, place: Place) -> Command {
        let mut command = isolated(self.program.as_os_str());
        match place {
            Place::Private => command.args(store.options(&self.storage)).arg("build"),
            // Chroot isolation has no control groups; buildah notes the name in the containers it makes.
            Place::Machine => command.args(["build", "--force-rm", "--cgroup-parent"]).arg(store.mark()),
        };
        // `--network host` is the namespace that `isolated` made: chroot isolation knows no other.
        // With its log in a file, what a step prints does not mix with the exported tar.
        command
            .args([
                "--isolation",
                "chroot",
                "--network",
                "host",
                "--http-proxy=false",
                "--layers=false",
                "--pull-never",
            ])
            .args(["--logfile", "/dev/stderr", "--file"])
            .arg(store.path().join(DOCKERFILE))
            .env("TMPDIR", store.temporary());
        command
    }

    /// Makes the run's directory, with Dockerfile and context.
    async fn prepare(&self, job: &BuildJob, text: String) -> Result<RunStore, EngineError> {
        let (storage, id, entries) = (self.storage.clone(), job.id.clone(), job.context.clone());
        blocking(move || {
            let store = storage.create_run(&id)?;
            let file = store.path().join(DOCKERFILE);
            fs::write(&file, text)?;
            context::stage(&entries, &store.context())?;
            Ok(store)
        })
        .await
    }

    async fn payload(&self, store: &RunStore, job: &BuildJob, dest: &Path) -> Result<(), EngineError> {
        let mut command = self.build(store, Place::Private);
        // Not `dest=-`, which silences the steps.
        command.args(["--output", "type=tar,dest=/dev/stdout"]).arg(store.context()).stdout(Stdio::piped());
        let mut running = Running::start(command, job.log.as_ref(), "build")?;
        let stop = CancellationToken::new();
        let Some(stdout) = running.stdout() else {
            return Err(EngineError::engine(EngineKind::Buildah, "build", "its output was not captured"));
        };
        let stream = ReaderStream::with_capacity(stdout, 256 * 1024);
        let unpack = async {
            let unreadable =
                |source| EngineError::engine(EngineKind::Buildah, "read the payload", Box::new(source));
            let result = bridge::unpack_out(stream, dest, &job.cancel, unreadable).await;
            // A failed build ends by itself, and so does its stream: this ends one whose payload is refused.
            if result.is_err() {
                stop.cancel();
            }
            result
        };
        let (unpacked, ended) = tokio::join!(unpack, running.wait(&job.cancel, &stop));
        let built = ended.and_then(Ended::into_result).map_err(missing_out);
        match (built, unpacked) {
            // Stopped by us, because of the payload.
            (Err(EngineError::Engine { .. }), Err(refused @ EngineError::Payload(_))) => Err(refused),
            (built, unpacked) => built.and(unpacked),
        }
    }

    /// Runs the whole Dockerfile and writes the image as an archive.
    async fn archive(&self, store: &RunStore, job: &BuildJob, dest: &Path) -> Result<(), EngineError> {
        let id_file = store.path().join("image-id");
        let mut build = self.build(store, Place::Private);
        build.arg("--iidfile").arg(&id_file).arg(store.context());
        self.run(build, job.log.as_ref(), "build", &job.cancel).await?;
        let id = fs::read_to_string(&id_file)?;
        // A fresh file beside it: buildah does not write over an archive.
        let partial = store.path().join("image.tar");
        let mut push = isolated(self.program.as_os_str());
        push.args(store.options(&self.storage)).arg("push").env("TMPDIR", store.temporary());
        push.args(["--quiet", "--disable-compression"]).arg(id.trim());
        push.arg(format!("docker-archive:{}", partial.display()));
        self.run(push, &Silent, "export the image", &job.cancel).await?;
        let dest = dest.to_owned();
        blocking(move || {
            // Across file systems a rename is a copy.
            Ok(fs::rename(&partial, &dest).or_else(|_| fs::copy(&partial, &dest).map(drop))?)
        })
        .await
    }

    async fn named(&self, store: &RunStore, job: &BuildJob, name: &str) -> Result<(), EngineError> {
        let mut build = self.build(store, Place::Machine);
        build.args(["--label", "farrier.dev/cache=base", "--tag", name]).arg(store.context());
        let result = self.run(build, job.log.as_ref(), "build", &job.cancel).await;
        if result.is_err() {
            self.remove_containers(store).await;
        }
        result
    }

    /// Removes the containers that a run left in the machine's storage: buildah does so itself, unless it
    /// was killed. The run's own outcome counts more than this one's.
    async fn remove_containers(&self, store: &RunStore) {
        for id in self.storage.containers_of(store) {
            let mut remove = self.command("rm");
            remove.arg(&id);
            if let Err(error) =
                self.run(remove, &Silent, "remove a container", &CancellationToken::new()).await
            {
                tracing::warn!(container = id, error = %error_chain(&error), "a container of this build is left in the storage");
            }
        }
    }

    /// Runs a command to its end.
    async fn run(
        &self,
        command: Command,
        log: &dyn BuildLog,
        action: &str,
        cancel: &CancellationToken,
    ) -> Result<(), EngineError> {
        let running = Running::start(command, log, action)?;
        let ended = running.wait(cancel, &CancellationToken::new()).await?;
        ended.into_result()
    }
}

#[async_trait::async_trait]
impl Engine for BuildahEngine {
    fn describe(&self) -> String {
        format!(
            "buildah {} ({}), storage {}",
            self.version,
            self.program.display(),
            self.storage.root().display()
        )
    }

    async fn has_image(&self, name: &str) -> Result<bool, EngineError> {
        let mut command = self.command("inspect");
        command.args(["--type", "image", "--format", "{{.FromImageID}}", "--", name]).stdout(Stdio::null());
        match self.run(command, &Silent, "look for an image", &CancellationToken::new()).await {
            Ok(()) => Ok(true),
            Err(EngineError::Engine { source, .. }) if source.to_string().contains("image not known") => {
                Ok(false)
            }
            Err(EngineError::Step { message }) if message.contains("image not known") => Ok(false),
            Err(error) => Err(error),
        }
    }

    async fn export_image(
        &self,
        name: &str,
        dest: &Path,
        cancel: &CancellationToken,
    ) -> Result<bool, EngineError> {
        if !self.has_image(name).await? {
            return Ok(false);
        }
        let mut push = self.command("push");
        push.args(["--quiet", "--disable-compression", "--", name]);
        push.arg(format!("docker-archive:{}", dest.display())).stdout(Stdio::null());
        self.run(push, &Silent, "export the image", cancel).await?;
        Ok(true)
    }

    async fn pull(&self, reference: &str, credentials: Option<&Credentials>) -> Result<(), EngineError> {
        let dir = tempfile::tempdir()?;
        let auth_file = dir.path().join("auth.json");
        let host = registry_host(reference);
        let verify = if is_loopback(host) { "--tls-verify=false" } else { "--tls-verify=true" };
        let refused = |error: EngineError| match error {
            EngineError::Engine { source, .. } => {
                EngineError::from_pull(EngineKind::Buildah, reference, source.to_string())
            }
            other => other,
        };
        let never = CancellationToken::new();
        let mut pull = self.command("pull");
        pull.args(["--quiet", verify]);
        if let Some(Credentials { username, password }) = credentials {
            // Not in an argument: every user of the machine can read those.
            let mut login = self.command("login");
            login
                .args([verify, "--username", username, "--password-stdin", "--authfile"])
                .arg(&auth_file)
                .arg(host);
            let running = Running::start_with_input(login, &Silent, "log in", password.clone().into_bytes())?;
            running.wait(&never, &never).await?.into_result().map_err(refused)?;
            pull.arg("--authfile").arg(&auth_file);
        }
        pull.arg("--").arg(reference).stdout(Stdio::null());
        self.run(pull, &Silent, "pull", &never).await.map_err(refused)
    }

    async fn build_image(&self, job: &BuildJob, name: &str) -> Result<(), EngineError> {
        let store = self.prepare(job, job.dockerfile.clone()).await?;
        let result = self.named(&store, job, name).await;
        discard(store).await;
        result
    }

    async fn build_payload(&self, job: &BuildJob, dest: &Path) -> Result<(), EngineError> {
        let store = self.prepare(job, dockerfile::with_out_stage(&job.dockerfile)).await?;
        let result = self.payload(&store, job, dest).await;
        discard(store).await;
        result
    }

    async fn build_archive(&self, job: &BuildJob, dest: &Path) -> Result<(), EngineError> {
        let store = self.prepare(job, job.dockerfile.clone()).await?;
        let result = self.archive(&store, job, dest).await;
        discard(store).await;
        result
    }
}

/// The stage that we added fails only for want of `/out`.
fn missing_out(error: EngineError) -> EngineError {
    match error {
        EngineError::Step { message } if message.starts_with(OUT_STEP) => EngineError::no_out(),
        other => other,
    }
}

/// A command in namespaces of its own: without a network; with mounts that go with it; and with process
/// ids, so that the death of its first process is the death of all, also of steps that detached.
fn isolated(program: &std::ffi::OsStr) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--"]).arg(program);
    command
}

/// Output of a command that is over in an instant, or its complaint.
async fn answer(command: &mut Command) -> Result<String, String> {
    let output =
        command.stdin(Stdio::null()).kill_on_drop(true).output().await.map_err(|error| error.to_string())?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        Err(String::from_utf8_lossy(&output.stderr).trim().to_owned())
    }
}

/// Removes a run's directory: a whole build tree, so not on the runtime's threads.
async fn discard(store: RunStore) {
    blocking(move || store.remove()).await;
}

/// The registry in a reference, as Docker reads it.
fn registry_host(reference: &str) -> &str {
    match reference.split_once('/') {
        Some((host, _)) if host.contains(['.', ':']) || host == "localhost" => host,
        _ => "docker.io",
    }
}

/// May this registry speak plain HTTP? Docker's own rule.
fn is_loopback(host: &str) -> bool {
    let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
    name == "localhost" || name == "[::1]" || name.starts_with("127.")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_of_references() {
        assert_eq!(registry_host("debian:12"), "docker.io");
        assert_eq!(registry_host("library/debian"), "docker.io");
        assert_eq!(registry_host("localhost/a"), "localhost");
        assert_eq!(registry_host("127.0.0.1:5000/a/b:1"), "127.0.0.1:5000");
        assert!(is_loopback("127.0.0.1:5000") && is_loopback("localhost") && is_loopback("[::1]:5000"));
        assert!(!is_loopback("127registry.example") && !is_loopback("registry.example:5000"));
    }
}
