//! Connects to the chosen engine, or to the first available one.

use std::{fmt::Write as _, path::PathBuf, sync::Arc};

use farrier_cluster::KubeOptions;

use super::{DockerEngine, Engine, EngineError, Kubernetes, Result, Sandbox, sandbox::find_runner};

/// Reason why a daemon is not tried.
const NO_TLS: &str = "DOCKER_TLS_VERIFY is set, and farrier connects to daemons without TLS: forward the daemon's socket with \
                      ssh -L, and name the local socket";
/// Default socket of Docker.
const DOCKER_SOCKET: &str = "unix:///var/run/docker.sock";
/// Socket of Podman's system service.
const PODMAN_SOCKET: &str = "/run/podman/podman.sock";

/// The user's choice of an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum EngineChoice {
    /// The sandbox if this machine supports it, otherwise the first Docker or Podman socket that answers.
    #[default]
    Auto,
    /// Namespaces on this machine, without a daemon or root.
    Sandbox,
    /// Docker's API, at `DOCKER_HOST` or on the default socket.
    Docker,
    /// Docker's API, on Podman's socket.
    Podman,
    /// Jobs in the cluster that `--kubeconfig`, `KUBECONFIG` or the pod's service account selects.
    Kubernetes,
}

/// Settings of engines from the environment and the cache; the caller reads them.
#[derive(Clone, Debug, Default)]
pub struct EngineEnv {
    /// `DOCKER_HOST`: `unix://PATH` or `tcp://HOST:PORT`.
    pub docker_host: Option<String>,
    /// `DOCKER_TLS_VERIFY`: whether the user requires TLS to a daemon that is not on a local socket.
    pub docker_tls: bool,
    /// `XDG_RUNTIME_DIR`: the directory with the socket of a user's Podman.
    pub runtime_dir: Option<PathBuf>,
    /// Directory of notes about runs in a daemon, by which a run removes the leftovers of dead runs. `None` if nothing is built.
    pub notes: Option<PathBuf>,
    /// `FARRIER_RUNNER`: the runner of sandboxes and pods; `None` selects the one next to farrier's own program.
    pub runner: Option<PathBuf>,
    /// The cluster that runs builds.
    pub kube: KubeOptions,
    /// Directory for the trial sandbox, on the file system to which builds write.
    pub scratch: Option<PathBuf>,
}

/// Connects to the chosen engine, or to the first one that works.
pub async fn connect(choice: EngineChoice, env: &EngineEnv) -> Result<Engine> {
    let mut tried = Tried::default();
    if matches!(choice, EngineChoice::Auto | EngineChoice::Sandbox) {
        match Sandbox::connect(env.runner.as_deref(), env.scratch.as_deref()).await? {
            Ok(sandbox) => return Ok(Engine::Sandbox(Arc::new(sandbox))),
            Err(error) => tried.note("sandbox", &error),
        }
    }
    if choice == EngineChoice::Kubernetes {
        match kubernetes(env).await {
            Ok(engine) => return Ok(Engine::Kubernetes(Arc::new(engine))),
            Err(error) => tried.note("kubernetes", &error),
        }
    }
    let sandbox_error = tried.0.clone();
    let daemon = connect_daemon(choice, env, tried).await?;
    if !sandbox_error.is_empty() {
        // The daemon's container is the weaker boundary, so the fallback is not silent.
        tracing::warn!(
            reason = sandbox_error,
            "the sandbox cannot be used here: builds run in the daemon's containers"
        );
    }
    Ok(Engine::Docker(Arc::new(daemon)))
}

async fn kubernetes(env: &EngineEnv) -> Result<Kubernetes, String> {
    Kubernetes::connect(find_runner(env.runner.as_deref())?, &env.kube).await
}

/// Connects to the chosen daemon, or to the first one that answers, for operations that only a daemon supports.
pub async fn connect_docker(choice: EngineChoice, env: &EngineEnv) -> Result<DockerEngine> {
    connect_daemon(choice, env, Tried::default()).await
}

async fn connect_daemon(choice: EngineChoice, env: &EngineEnv, mut tried: Tried) -> Result<DockerEngine> {
    for (name, address) in sockets(choice, env) {
        if env.docker_tls && !address.starts_with("unix://") {
            tried.note(&format!("{name} at {address}"), NO_TLS);
            continue;
        }
        match DockerEngine::connect(&address, env.notes.as_deref()).await {
            Ok(engine) => return Ok(engine),
            Err(error) => tried.note(&format!("{name} at {address}"), &error),
        }
    }
    Err(EngineError::Unavailable(tried.0))
}

/// Each engine that was tried, with its error.
#[derive(Default)]
struct Tried(String);

impl Tried {
    fn note(&mut self, engine: &str, error: &str) {
        let separator = if self.0.is_empty() { "" } else { "; " };
        let _ = write!(self.0, "{separator}{engine}: {error}");
    }
}

/// Names and addresses of the daemons to try, in order. Empty if the user chose an engine without a daemon.
fn sockets(choice: EngineChoice, env: &EngineEnv) -> Vec<(&'static str, String)> {
    let EngineEnv { docker_host, runtime_dir, .. } = env;
    let docker = || ("docker", docker_host.clone().unwrap_or_else(|| DOCKER_SOCKET.to_owned()));
    let podman = || {
        let user = runtime_dir.as_ref().map(|dir| dir.join("podman/podman.sock"));
        user.into_iter()
            .chain([PathBuf::from(PODMAN_SOCKET)])
            .map(|path| ("podman", format!("unix://{}", path.display())))
    };
    match choice {
        EngineChoice::Auto => std::iter::once(docker()).chain(podman()).collect(),
        EngineChoice::Sandbox | EngineChoice::Kubernetes => Vec::new(),
        EngineChoice::Docker => vec![docker()],
        EngineChoice::Podman => podman().collect(),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn env(dir: &Path) -> EngineEnv {
        EngineEnv {
            docker_host: Some(format!("unix://{}", dir.join("docker.sock").display())),
            runtime_dir: Some(dir.to_owned()),
            ..EngineEnv::default()
        }
    }

    #[test]
    fn docker_comes_before_podman() {
        let found = sockets(EngineChoice::Auto, &EngineEnv::default());
        assert_eq!(
            found,
            [("docker", DOCKER_SOCKET.to_owned()), ("podman", format!("unix://{PODMAN_SOCKET}"))]
        );
        assert!(sockets(EngineChoice::Sandbox, &EngineEnv::default()).is_empty());
    }

    #[tokio::test]
    async fn without_a_runner_there_is_no_sandbox() {
        let env = EngineEnv { runner: Some("/nonexistent/runner".into()), ..EngineEnv::default() };
        let error = connect(EngineChoice::Sandbox, &env).await.err().unwrap();
        let what = "no build engine: sandbox: there is no /nonexistent/runner: put farrier-runner beside farrier, or name it with \
                    FARRIER_RUNNER";
        assert_eq!(error.to_string(), what);
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
        // The socket file exists, but no process listens on it.
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

    /// Docker's own client would refuse the connection, too.
    #[tokio::test]
    async fn a_daemon_that_must_have_tls_is_not_reached_without_it() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let host = format!("tcp://{}", listener.local_addr().unwrap());
        let env = EngineEnv { docker_host: Some(host), docker_tls: true, ..EngineEnv::default() };
        let error = connect(EngineChoice::Docker, &env).await.err().unwrap();
        assert!(error.to_string().contains("DOCKER_TLS_VERIFY is set"), "{error}");
        assert!(listener.accept().is_err(), "nothing was sent");
    }

    #[tokio::test]
    async fn every_podman_socket_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let error = connect(EngineChoice::Podman, &env(dir.path())).await.err().unwrap().to_string();
        assert!(error.contains("podman/podman.sock: no such socket"), "{error}");
    }
}
