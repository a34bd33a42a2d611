//! The engine and the `driver-entrypoint` binary. Each is set up when the first build needs it, once for all clones.

use std::{collections::BTreeSet, path::PathBuf, sync::Arc};

use farrier_core::kernel::Architecture;
use farrier_engines as engine;
use farrier_engines::{DockerEngine, Engine, EngineChoice, EngineEnv, EngineError};
use farrier_local::{blocking::blocking, machine::native};
use farrier_payload::{Entrypoint, PayloadError, find_entrypoint};
use oci::Layer;
use tokio::sync::OnceCell;

use super::error::{BuildError, Result};

/// Engines that are connected on first use.
#[derive(Clone)]
pub struct LazyEngine {
    choice: EngineChoice,
    env: EngineEnv,
    engine: Arc<OnceCell<Engine>>,
    docker: Arc<OnceCell<Arc<DockerEngine>>>,
}

impl LazyEngine {
    /// Stores the choice of engine without connecting.
    pub fn new(choice: EngineChoice, env: EngineEnv) -> Self {
        Self { choice, env, engine: Arc::default(), docker: Arc::default() }
    }

    /// Returns the engine that compiles, connecting it if necessary.
    pub async fn get(&self) -> Result<Engine, EngineError> {
        self.engine.get_or_try_init(|| engine::connect(self.choice, &self.env)).await.cloned()
    }

    /// Returns the daemon, for builds that cannot run in place. With the automatic choice, the daemon is available in
    /// addition to a sandbox. If the sandbox was requested explicitly, there is no daemon.
    pub async fn docker(&self) -> Result<Arc<DockerEngine>, EngineError> {
        if let Some(Engine::Docker(engine)) = self.engine.get() {
            return Ok(Arc::clone(engine));
        }
        let connect = || async { engine::connect_docker(self.choice, &self.env).await.map(Arc::new) };
        self.docker.get_or_try_init(connect).await.cloned()
    }

    /// Returns the only architecture that builds can run on, or `None` if there may be others. A sandbox has this
    /// machine's architecture. A daemon may run programs of other architectures, and a cluster may have such nodes. An
    /// automatic choice is resolved now.
    pub async fn machine(&self) -> Option<Architecture> {
        let is_sandbox = match self.choice {
            EngineChoice::Auto => matches!(self.get().await, Ok(Engine::Sandbox(_))),
            choice => choice == EngineChoice::Sandbox,
        };
        is_sandbox.then(native)
    }

    /// Whether a daemon is available. A daemon that was requested explicitly counts as available: if it does not
    /// respond, the build that needs it reports the error.
    pub async fn has_daemon(&self) -> bool {
        match self.choice {
            EngineChoice::Auto => self.docker().await.is_ok(),
            EngineChoice::Docker | EngineChoice::Podman => true,
            EngineChoice::Sandbox | EngineChoice::Kubernetes => false,
        }
    }

    /// Whether another engine may run a build that the connected engine does not support.
    pub(crate) fn may_fall_back(&self) -> bool {
        self.choice == EngineChoice::Auto
    }
}

/// The `driver-entrypoint` binary for images. It is read once, so that the plan's digest and the image's layer come
/// from the same bytes even if the file changes.
#[derive(Clone, Debug, Default)]
pub struct LazyEntrypoint {
    path: Option<PathBuf>,
    programs: Arc<[Program; 2]>,
}

/// The binary for one architecture.
#[derive(Debug, Default)]
struct Program {
    binary: OnceCell<Arc<Entrypoint>>,
    layer: OnceCell<(Layer, Vec<u8>)>,
}

impl LazyEntrypoint {
    /// Uses the given file, or the one next to farrier's executable.
    pub fn new(path: Option<PathBuf>) -> Self {
        Self { path, ..Self::default() }
    }

    fn program(&self, arch: Architecture) -> &Program {
        &self.programs[usize::from(arch == Architecture::Arm64)]
    }

    /// Returns the binary for an architecture, reading it on first use. If only a binary for another architecture
    /// exists, returns that binary.
    pub async fn binary(&self, arch: Architecture) -> Result<&Arc<Entrypoint>> {
        let read = || async {
            let path = find_entrypoint(self.path.as_deref(), arch)?;
            Ok::<_, BuildError>(Arc::new(blocking(move || Entrypoint::read(&path)).await?))
        };
        self.program(arch).binary.get_or_try_init(read).await
    }

    /// Returns the architectures for which a binary exists.
    pub async fn architectures(&self) -> Result<BTreeSet<Architecture>> {
        let mut architectures = BTreeSet::new();
        for arch in [Architecture::Amd64, Architecture::Arm64] {
            architectures.insert(self.binary(arch).await?.arch);
        }
        Ok(architectures)
    }

    /// Writes the entrypoint layer for an image of the architecture.
    pub async fn write_layer(&self, arch: Architecture, out: PathBuf) -> Result<Layer> {
        let binary = self.binary(arch).await?;
        binary.check_arch(arch)?;
        let binary = Arc::clone(binary);
        let make = || blocking(move || binary.layer());
        let (layer, bytes): &(Layer, Vec<u8>) =
            self.program(arch).layer.get_or_try_init::<PayloadError, _, _>(make).await?;
        fs_err::tokio::write(&out, bytes).await?;
        Ok(layer.clone())
    }
}

#[cfg(test)]
mod tests {
    use farrier_payload::elf_program;
    use oci::{Descriptor, ImageManifest};
    use serde_json::json;

    use super::*;
    use crate::testing::{Bench, K9, K10, module};

    async fn layers(bench: &Bench, release: &str) -> Vec<Descriptor> {
        let reference = bench.cell(release).await.reference;
        let registry = &bench.services.images.registry;
        let stored = registry.manifest(&reference.repository, &reference.version).await.unwrap().unwrap();
        ImageManifest::parse(&stored.bytes).unwrap().layers
    }

    fn bench() -> Bench {
        Bench::new(&json!({"runtime": {"entrypoint": ["driver-entrypoint", "generic", "m"]}}))
    }

    #[tokio::test]
    async fn one_more_kernel_is_one_more_payload_over_the_same_entrypoint() {
        let bench = bench();
        let path = bench.services.definitions.root.join("driver-entrypoint");
        std::fs::write(&path, elf_program(62, 1)).unwrap();
        let first = bench.publish(K9, &[&module()]).await.unwrap();
        // Changes of the file no longer matter: the plan used its earlier content.
        std::fs::remove_file(path).unwrap();
        let second = bench.publish(K10, &[&module()]).await.unwrap();
        let [first_layers, second_layers] = [layers(&bench, K9).await, layers(&bench, K10).await];
        assert_eq!((first_layers.len(), second_layers.len()), (2, 2));
        assert_eq!(first_layers[0], second_layers[0]);
        assert_ne!(first_layers[1], second_layers[1]);
        // The two payloads differ by a few bytes, while the entrypoint's layer has hundreds.
        assert!(second.pushed_bytes < first.pushed_bytes, "{second:?} after {first:?}");
    }

    #[tokio::test]
    async fn an_engine_that_nobody_named_is_the_one_that_is_there() {
        let found = |choice| async move {
            let nowhere = PathBuf::from("/nonexistent/runner");
            let docker_host = Some("unix:///nonexistent/docker.sock".to_owned());
            let env = EngineEnv { runner: Some(nowhere), docker_host, ..EngineEnv::default() };
            let engine = LazyEngine::new(choice, env);
            (engine.machine().await, engine.has_daemon().await)
        };
        assert_eq!(found(EngineChoice::Sandbox).await, (Some(native()), false));
        assert_eq!(found(EngineChoice::Docker).await, (None, true));
        // There is no sandbox, whatever other engines exist.
        assert_eq!(found(EngineChoice::Auto).await.0, None);
    }

    #[tokio::test]
    async fn without_the_binary_the_image_is_unresolved_and_says_how_to_build_it() {
        let bench = bench();
        let name = "x".parse().unwrap();
        let error = crate::plan_cell(&bench.services, &name, &Bench::target(K9)).await.unwrap_err();
        let text = oci::error_chain(&error);
        assert!(
            text.contains("driver-entrypoint at ") && text.contains("cargo build --profile entrypoint"),
            "{text}"
        );
        // An arm64 binary does not fit this target.
        let path = bench.services.definitions.root.join("driver-entrypoint");
        std::fs::write(path, elf_program(183, 1)).unwrap();
        let error = crate::plan_cell(&bench.services, &name, &Bench::target(K9)).await.unwrap_err();
        let text = oci::error_chain(&error);
        assert!(text.contains("is for arm64, and the target is amd64"), "{text}");
    }
}
