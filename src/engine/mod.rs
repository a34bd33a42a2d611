//! Adapter: engines, which run a rendered Dockerfile and hand back what it left.

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
};

use tokio_util::sync::CancellationToken;

/// Which engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineKind {
    /// Docker's API, on Docker's or Podman's socket.
    Docker,
    /// The buildah command.
    Buildah,
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Docker => "docker",
            Self::Buildah => "buildah",
        })
    }
}

/// One thing in the build context.
#[derive(Clone, Debug)]
pub struct ContextEntry {
    /// Its place in the context: relative, `/`-separated.
    pub dest: String,
    /// The file or directory on this machine. Ownership becomes root; symbolic links stay links.
    pub from: PathBuf,
}

/// Receives the build's output as it comes, line by line.
pub trait BuildLog: Send + Sync {
    /// One line, without its end.
    fn line(&self, line: &str);
}

/// One run of a Dockerfile.
#[derive(Clone)]
pub struct BuildJob {
    /// Names everything that the engine makes on the way: `[a-z0-9-]`.
    pub id: String,
    /// The Dockerfile's text.
    pub dockerfile: String,
    /// The build context.
    pub context: Vec<ContextEntry>,
    /// Where output goes.
    pub log: Arc<dyn BuildLog>,
    /// Stops the run; nothing of it is left behind.
    pub cancel: CancellationToken,
}

/// What went wrong in an engine.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// No engine answers, or the named one does not.
    #[error("no build engine: {tried}")]
    Unavailable {
        /// Each one tried, with its answer.
        tried: String,
    },
    /// A step of the Dockerfile exited with a failure. Permanent.
    #[error("build step failed: {message}")]
    Step {
        /// The engine's words, with the step and its exit code.
        message: String,
    },
    /// The engine itself failed or went away. Transient.
    #[error("{engine} failed to {action}")]
    Engine {
        /// Which engine.
        engine: EngineKind,
        /// What it was to do.
        action: String,
        /// Its words.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// What the build left cannot be unpacked.
    #[error("payload refused")]
    Payload(#[from] crate::archive::UnpackError),
    /// A file of this machine.
    #[error("{action} {path}")]
    Io {
        /// What was done.
        action: &'static str,
        /// To what.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// The job was cancelled.
    #[error("build cancelled")]
    Cancelled,
}

/// Runs Dockerfiles. `RUN` has no network.
#[async_trait::async_trait]
pub trait Engine: Send + Sync {
    /// Which engine.
    fn kind(&self) -> EngineKind;

    /// One line for people: the engine, its version, where it listens.
    fn describe(&self) -> String;

    /// Is there a local image of this name?
    async fn has_image(&self, name: &str) -> Result<bool, EngineError>;

    /// Runs the Dockerfile and keeps its final image under a local name.
    async fn build_image(&self, job: &BuildJob, name: &str) -> Result<(), EngineError>;

    /// Runs the Dockerfile's `modules` stage, unpacks its `/out` into `dest` (an empty directory) and
    /// leaves nothing in the engine.
    async fn build_payload(&self, job: &BuildJob, dest: &Path) -> Result<(), EngineError>;

    /// Runs the whole Dockerfile, writes its final image to `dest` as a `docker save` archive and leaves
    /// nothing in the engine.
    async fn build_archive(&self, job: &BuildJob, dest: &Path) -> Result<(), EngineError>;
}
