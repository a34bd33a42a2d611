//! Adapter: engines, which run a rendered Dockerfile and hand back what it left.

mod bridge;
mod buildah;
mod connect;
mod context;
pub mod diagnosis;
mod docker;
mod dockerfile;
mod error;
mod file_log;
mod lines;

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
};

use tokio_util::sync::CancellationToken;

pub use connect::{EngineChoice, EngineEnv, connect};
pub use diagnosis::{Diagnoser, Diagnosis};
pub use error::EngineError;
pub use file_log::FileLog;

/// Which engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display)]
#[strum(serialize_all = "lowercase")]
pub enum EngineKind {
    /// Docker's API, on Docker's or Podman's socket.
    Docker,
    /// The buildah command.
    Buildah,
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
    /// Stops the run; nothing of it is left behind. Cancelling is the way to stop: a future that is
    /// merely dropped cannot clean up in the engine.
    pub cancel: CancellationToken,
}

/// A name and a password for a registry.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    /// The user.
    pub username: String,
    /// The password or token.
    pub password: String,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { username, password: _ } = self;
        f.debug_struct("Credentials").field("username", username).field("password", &"***").finish()
    }
}

/// Runs Dockerfiles. `RUN` has no network.
#[async_trait::async_trait]
pub trait Engine: Send + Sync {
    /// One line for people: the engine, its version, where it listens.
    fn describe(&self) -> String;

    /// Is there a local image of this name?
    async fn has_image(&self, name: &str) -> Result<bool, EngineError>;

    /// Writes a local image to `dest` as a `docker save` archive; `false` when there is none of this name.
    async fn export_image(
        &self,
        name: &str,
        dest: &Path,
        cancel: &CancellationToken,
    ) -> Result<bool, EngineError>;

    /// Fetches an image from its registry into the engine.
    async fn pull(&self, reference: &str, credentials: Option<&Credentials>) -> Result<(), EngineError>;

    /// Runs the Dockerfile and keeps its final image under a local name, labelled
    /// `farrier.dev/cache=base`.
    async fn build_image(&self, job: &BuildJob, name: &str) -> Result<(), EngineError>;

    /// Runs the Dockerfile's `modules` stage, unpacks its `/out` into `dest` (an empty directory) and
    /// leaves nothing in the engine.
    async fn build_payload(&self, job: &BuildJob, dest: &Path) -> Result<(), EngineError>;

    /// Runs the whole Dockerfile, writes its final image to `dest` as a `docker save` archive and leaves
    /// nothing in the engine.
    async fn build_archive(&self, job: &BuildJob, dest: &Path) -> Result<(), EngineError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_do_not_print_the_password() {
        let shown = format!("{:?}", Credentials { username: "u".into(), password: "s3cret".into() });
        assert!(shown.contains('u') && !shown.contains("s3cret"));
    }
}
