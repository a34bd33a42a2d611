//! Runs the build steps of a Dockerfile for the build pipeline: in a sandbox, in a Kubernetes Job, or in a Docker daemon.
#![forbid(unsafe_code)]

mod bridge;
mod connect;
mod context;
mod docker;
mod dockerfile;
mod error;
mod kubernetes;
mod lines;
mod protocol;
mod runner_session;
mod sandbox;

use std::{path::PathBuf, sync::Arc, time::SystemTime};

use tokio_util::sync::CancellationToken;

pub use connect::{EngineChoice, EngineEnv, connect, connect_docker};
pub use context::write_tar;
pub use docker::DockerEngine;
pub use error::{EngineError, Result};
pub use kubernetes::{InCluster, JobSpec, Kubernetes, Phase, USER, environment, job_name};
pub use sandbox::{InPlace, Owner, Sandbox};

/// Prefix of the names of kept images.
pub const LOCAL_PREFIX: &str = "localhost/farrier/";

#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display)]
#[strum(serialize_all = "lowercase")]
pub enum EngineKind {
    /// Linux namespaces on this machine.
    Sandbox,
    /// Docker's API, on the socket of Docker or Podman.
    Docker,
    /// Jobs in a cluster.
    Kubernetes,
}

/// A connected build engine.
#[derive(Clone)]
pub enum Engine {
    /// In place: steps run over trees in the cache.
    Sandbox(Arc<Sandbox>),
    /// A daemon that runs whole Dockerfiles.
    Docker(Arc<DockerEngine>),
    /// In place: steps run in a pod whose image is made of the same kind of trees.
    Kubernetes(Arc<Kubernetes>),
}

/// An entry of the build context.
#[derive(Clone, Debug)]
pub struct ContextEntry {
    /// Path in the context: relative, `/`-separated.
    pub dest: String,
    /// The file or directory on this machine. Ownership becomes root; symbolic links stay links.
    pub from: PathBuf,
}

/// Receives the output of a build line by line.
pub trait BuildLog: Send + Sync {
    /// Receives one line, without its line end.
    fn line(&self, line: &str);
}

/// Request to an engine to run a Dockerfile.
#[derive(Clone)]
pub struct BuildRequest {
    /// ID of the request, of the characters `[a-z0-9-]`. It identifies everything that the engine creates for the request.
    pub id: String,
    pub dockerfile: String,
    pub context: Vec<ContextEntry>,
    pub log: Arc<dyn BuildLog>,
    /// Cancels the run, which then leaves nothing behind. A dropped future cannot clean up in the engine, so cancel instead.
    pub cancel: CancellationToken,
}

/// An image that the engine keeps for later builds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachedImage {
    /// Local name of the image.
    pub name: String,
    /// Bytes that the image does not share with others. The full size if the image shares all bytes, or if the daemon (before API
    /// 1.42) does not report the shared size.
    pub bytes: u64,
    pub created: SystemTime,
}

/// User name and password for a registry.
#[derive(Clone, PartialEq, Eq, derive_more::Debug)]
pub struct Credentials {
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
