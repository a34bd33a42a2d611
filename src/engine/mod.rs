//! Adapter: engines, which run what a Dockerfile says and hand back what it left: in place, or as Docker does.

mod bridge;
mod connect;
mod context;
mod docker;
mod dockerfile;
mod error;
mod hearing;
mod kubernetes;
mod lines;
mod protocol;
mod sandbox;

use std::{path::PathBuf, sync::Arc, time::SystemTime};

use tokio_util::sync::CancellationToken;

pub use connect::{EngineChoice, EngineEnv, connect, connect_docker};
pub use context::write_tar;
pub use docker::DockerEngine;
pub use error::{EngineError, Result};
pub use kubernetes::{InCluster, JobSpec, Kubernetes, Phase, USER, environment};
pub use sandbox::{InPlace, Owner, Sandbox};

/// How the names of kept images begin.
pub const LOCAL_PREFIX: &str = "localhost/farrier/";

/// Which engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display)]
#[strum(serialize_all = "lowercase")]
pub enum EngineKind {
    /// Namespaces of this machine.
    Sandbox,
    /// Docker's API, on Docker's or Podman's socket.
    Docker,
    /// Jobs of a cluster.
    Kubernetes,
}

/// What compiles.
#[derive(Clone)]
pub enum Engine {
    /// In place: steps run over trees of farrier's cache.
    Sandbox(Arc<Sandbox>),
    /// A daemon that runs whole Dockerfiles.
    Docker(Arc<DockerEngine>),
    /// In place: steps run in a pod whose image is made of such trees.
    Kubernetes(Arc<Kubernetes>),
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

/// An image that the engine keeps for later builds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptImage {
    /// Its local name.
    pub name: String,
    /// The bytes that are its own; all of them for one that others are made from, and where the daemon (before API 1.42) does not
    /// tell them apart.
    pub bytes: u64,
    /// When it was made.
    pub created: SystemTime,
}

/// A name and a password for a registry.
#[derive(Clone, PartialEq, Eq, derive_more::Debug)]
pub struct Credentials {
    /// The user.
    pub username: String,
    /// The password or token.
    #[debug("***")]
    pub password: String,
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
