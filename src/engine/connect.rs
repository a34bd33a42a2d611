//! Adapter: finds an engine that works.

use std::{
    fmt::Write as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{Engine, EngineError, buildah::BuildahEngine, docker::DockerEngine};

/// Where Docker listens unless told otherwise.
const DOCKER_SOCKET: &str = "unix:///var/run/docker.sock";
/// Where Podman's system service listens.
const PODMAN_SOCKET: &str = "/run/podman/podman.sock";
/// Where buildah is looked for when the process has no search path of its own.
const BUILDAH: &str = "buildah";

/// Which engine the user wants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum EngineChoice {
    /// A Docker socket that answers, then Podman's, then buildah.
    #[default]
    Auto,
    /// Docker's API at `DOCKER_HOST` or on its usual socket.
    Docker,
    /// The same API on Podman's socket.
    Podman,
    /// The buildah command.
    Buildah,
}

/// What the environment says about engines, and the cache has for them; read elsewhere.
#[derive(Clone, Debug, Default)]
pub struct EngineEnv {
    /// `DOCKER_HOST`: `unix://PATH` or `tcp://HOST:PORT`.
    pub docker_host: Option<String>,
    /// `XDG_RUNTIME_DIR`: where a user's own Podman listens.
    pub runtime_dir: Option<PathBuf>,
    /// Where it is noted what runs may have left in a daemon, so that the next one removes it; `None` where nothing is built.
    pub notes: Option<PathBuf>,
}

/// One place where an engine may be.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Candidate {
    Socket { name: &'static str, address: String },
    Buildah,
}

/// Connects to the chosen engine, or to the first that answers.
pub async fn connect(choice: EngineChoice, env: &EngineEnv) -> Result<Arc<dyn Engine>, EngineError> {
    let mut tried = String::new();
    for candidate in candidates(choice, env) {
        let (place, answer) = match candidate {
            Candidate::Socket { name, address } => {
                match DockerEngine::connect(&address, env.notes.as_deref()).await {
                    Ok(engine) => return Ok(Arc::new(engine)),
                    Err(answer) => (format!("{name} at {address}"), answer),
                }
            }
            Candidate::Buildah => match BuildahEngine::connect(Path::new(BUILDAH)).await {
                Ok(engine) => return Ok(Arc::new(engine)),
                Err(answer) => (BUILDAH.to_owned(), answer),
            },
        };
        let separator = if tried.is_empty() { "" } else { "; " };
        let _ = write!(tried, "{separator}{place}: {answer}");
    }
    Err(EngineError::Unavailable { tried })
}

fn candidates(choice: EngineChoice, env: &EngineEnv) -> Vec<Candidate> {
    let EngineEnv { docker_host, runtime_dir, notes: _ } = env;
    let docker = || Candidate::Socket {
        name: "docker",
        address: docker_host.clone().unwrap_or_else(|| DOCKER_SOCKET.to_owned()),
    };
    let podman = || {
        let own = runtime_dir.as_ref().map(|dir| dir.join("podman/podman.sock"));
        own.into_iter()
            .chain([PathBuf::from(PODMAN_SOCKET)])
            .map(|path| Candidate::Socket { name: "podman", address: format!("unix://{}", path.display()) })
    };
    match choice {
        EngineChoice::Auto => std::iter::once(docker()).chain(podman()).chain([Candidate::Buildah]).collect(),
        EngineChoice::Docker => vec![docker()],
        EngineChoice::Podman => podman().collect(),
        EngineChoice::Buildah => vec![Candidate::Buildah],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env(dir: &Path) -> EngineEnv {
        EngineEnv {
            docker_host: Some(format!("unix://{}", dir.join("docker.sock").display())),
            runtime_dir: Some(dir.to_owned()),
            notes: None,
        }
    }

    #[test]
    fn docker_comes_before_podman_and_buildah() {
        let found = candidates(EngineChoice::Auto, &EngineEnv::default());
        let socket = |name, address: &str| Candidate::Socket { name, address: address.to_owned() };
        assert_eq!(
            found,
            [
                socket("docker", DOCKER_SOCKET),
                socket("podman", "unix:///run/podman/podman.sock"),
                Candidate::Buildah
            ]
        );
    }

    #[tokio::test]
    async fn a_missing_socket_is_said_to_be_missing() {
        let dir = tempfile::tempdir().unwrap();
        let error = connect(EngineChoice::Docker, &env(dir.path())).await.err().unwrap();
        let place = dir.path().join("docker.sock");
        assert_eq!(
            error.to_string(),
            format!("no build engine: docker at unix://{}: no such socket", place.display())
        );
        assert!(error.hint().is_some());
    }

    #[tokio::test]
    async fn a_dead_socket_refuses() {
        let dir = tempfile::tempdir().unwrap();
        // Bound once, and no longer listened on.
        drop(std::os::unix::net::UnixListener::bind(dir.path().join("docker.sock")).unwrap());
        let error = connect(EngineChoice::Docker, &env(dir.path())).await.err().unwrap();
        assert!(error.to_string().contains("Connection refused"), "{error}");
    }

    #[tokio::test]
    async fn other_addresses_are_refused() {
        let env = EngineEnv { docker_host: Some("ssh://host".to_owned()), ..EngineEnv::default() };
        let error = connect(EngineChoice::Docker, &env).await.err().unwrap();
        assert!(error.to_string().contains("only unix:// and tcp://"), "{error}");
    }

    #[tokio::test]
    async fn every_podman_socket_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let error = connect(EngineChoice::Podman, &env(dir.path())).await.err().unwrap().to_string();
        assert!(error.contains("podman/podman.sock: no such socket"), "{error}");
    }
}
