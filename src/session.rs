//! Joins settings, registry, cluster and engine for a command.

use std::{path::Path, sync::Arc};

use farrier_builder::{
    images,
    services::{
        BuildLimits, BuildServices, BuildTools, ImageAccess, LazyEngine, LazyEntrypoint, NeedsRegistry,
        ProcessControl,
    },
};
use farrier_cluster::{Cluster, Directory, KubeCluster, KubeOptions};
use farrier_core::{
    plan::{Budget, SnapshotScope, WriteNamespaces},
    site::Builds,
};
use farrier_engines::{EngineChoice, EngineEnv};
use farrier_local::machine;
use farrier_signing::ModuleSigner;
use farrier_store::registry::{self, RegistryLocation, RegistryOptions, RemoteRegistry, Retrying};
use serde::Serialize;

#[cfg(feature = "bootcheck")]
use super::check::boot_checker;
use super::{
    CliError, Result,
    args::{Global, LimitArgs, RegistryArg},
    env_vars,
    output::{self, Progress},
    plan::PlanArgs,
    settings::{Settings, connect, parse},
    stop::Stop,
};

/// Directory in the cache for notes about engine runs, which may need cleanup after a crash.
const ENGINE_NOTES: &str = "engine-runs";
/// Directory in the cache in which the engine tests whether this machine permits a sandbox.
const SANDBOX_TRIALS: &str = "work";

/// Context of every command: the global options, and the stop signal.
pub struct Session {
    pub global: Global,
    pub stop: Stop,
}

/// A connected cluster.
pub struct Connection {
    /// Source of nodes and rollout targets.
    pub cluster: Arc<dyn Cluster>,
    /// The cluster's connection if it is live, for the lease, the metrics and the status.
    pub kube: Option<Arc<KubeCluster>>,
}

impl Session {
    /// Prints a result in the requested format.
    pub fn show<T: Serialize + ?Sized>(&self, value: &T, text: impl FnOnce(&T) -> String) -> Result<()> {
        Ok(output::show(self.global.output, value, text)?)
    }

    /// Loads the definitions, and opens the cache and the network.
    pub fn settings(&self) -> Result<Settings> {
        Settings::resolve(&self.global)
    }

    /// Like [`Session::settings`], with the stored inputs of the registry that `--registry` names, if given.
    pub fn settings_with_store(&self, location: Option<&str>) -> Result<Settings> {
        if location.is_none() {
            return self.settings();
        }
        let BuildServices { definitions, cache, fetcher, images, .. } =
            self.services(location, EngineChoice::Auto)?;
        // This net allows the registry's host even with `--offline`.
        let registry = RegistryOptions { credentials: images.credentials, net: fetcher.net().clone() };
        Ok(Settings { definitions, cache, fetcher, registry })
    }

    /// Returns the services for a registry, and the cluster.
    pub async fn services_and_cluster(&self, plan: &PlanArgs) -> Result<(BuildServices, Arc<dyn Cluster>)> {
        let PlanArgs { registry, cluster, engine } = plan;
        let services = self.publisher(registry, engine.engine)?;
        let scope = SnapshotScope::of(&services.definitions);
        let Connection { cluster, kube: _ } =
            self.connect(&cluster.cluster, cluster.writable(), scope).await?;
        Ok((services, cluster))
    }

    /// Connects to the cluster that `--cluster` names. The snapshot covers `scope`.
    pub async fn connect(
        &self,
        cluster: &str,
        writable: WriteNamespaces,
        scope: SnapshotScope,
    ) -> Result<Connection> {
        if let Some(options) = self.global.kube_options(cluster) {
            let pod = env_vars::in_pod().then(env_vars::host_name);
            let options = KubeOptions { instance: self.global.instance(), writable, pod, ..options };
            let kube = KubeCluster::connect(options, scope, self.stop.cancel.clone()).await?;
            return Ok(Connection { cluster: Arc::clone(&kube) as Arc<dyn Cluster>, kube: Some(kube) });
        }
        if self.global.context.is_some() || self.global.kubeconfig.is_some() {
            return Err(CliError::usage(format!(
                "--cluster {cluster} is no live cluster: it takes neither --context nor --kubeconfig"
            )));
        }
        let path = cluster.strip_prefix("dir:").filter(|path| !path.is_empty()).ok_or_else(|| {
            let hint = Path::new(cluster).is_dir().then(|| format!("; did you mean dir:{cluster}?"));
            let hint = hint.unwrap_or_default();
            CliError::usage(format!("--cluster: {cluster:?} is not kube, kube:CONTEXT or dir:PATH{hint}"))
        })?;
        Ok(Connection { cluster: Arc::new(Directory::open(Path::new(path))?), kube: None })
    }

    /// Returns services that publish to a registry.
    pub fn publisher(&self, registry: &RegistryArg, engine: EngineChoice) -> Result<BuildServices> {
        if self.global.definitions.is_none() {
            tracing::info!(
                "no --definitions: using the built-in images only; FARRIER_DEFINITIONS or farrier.yaml can name yours"
            );
        }
        self.services(Some(&registry.registry), engine)
    }

    /// Returns services that publish nothing. They look up needed images and stored inputs in a registry, if one
    /// is given.
    pub fn reader(&self, needs_from: Option<&str>, engine: EngineChoice) -> Result<BuildServices> {
        let mut services = self.services(None, engine)?;
        if let Some(location) = needs_from {
            let options = RegistryOptions {
                credentials: services.images.credentials.clone(),
                net: services.fetcher.net().clone(),
            };
            let (location, registry) = connect(location, &options)?;
            // Replace the store: the layout directory of services that publish nothing holds no stored inputs.
            let store = images::store_of(&services, location.clone(), Arc::clone(&registry));
            services.fetcher = services.fetcher.with_store(store);
            let registry = Arc::new(Retrying::new(registry, services.process.cancel.clone()));
            services.images.needs_from = Some(NeedsRegistry { location, registry });
        }
        Ok(services)
    }

    /// Returns services that publish to `location`. Without one, they publish to a layout directory in the
    /// cache, so that nothing outside changes.
    pub fn services(&self, location: Option<&str>, engine: EngineChoice) -> Result<BuildServices> {
        let Settings { definitions, cache, fetcher, registry: options } = self.settings()?;
        let location = match location {
            Some(location) => parse("--registry", location)?,
            None => RegistryLocation::Layout(cache.root().join("layout")),
        };
        let registry = registry::connect(&location, &options);
        let remote = Arc::new(RemoteRegistry::new("registries".to_owned(), &options));
        let cancel = self.stop.cancel.clone();
        let engine_env = EngineEnv {
            notes: Some(cache.root().join(ENGINE_NOTES)),
            scratch: Some(cache.root().join(SANDBOX_TRIALS)),
            kube: self.global.kube.clone(),
            ..env_vars::engine_env()
        };
        let signing = definitions.site.module_signing.as_ref();
        let signer = signing
            .map(|spec| ModuleSigner::open(spec, &definitions.root, options.net.secrets().clone()))
            .transpose()?;
        let mut services = BuildServices {
            definitions,
            fetcher,
            cache: cache.clone(),
            images: ImageAccess {
                cache,
                registry: Arc::new(Retrying::new(Arc::clone(&registry), cancel.clone())),
                needs_from: None,
                remote: Arc::new(Retrying::new(remote, cancel.clone())),
                credentials: options.credentials.clone(),
                location: location.clone(),
            },
            tools: BuildTools {
                engine: LazyEngine::new(engine, engine_env),
                entrypoint: LazyEntrypoint::new(self.global.entrypoint.clone()),
                limits: BuildLimits { at_once: usize::MAX, budget: machine::budget() },
                module_signer: signer.map(Arc::new),
                boot_checker: None,
                output_maker: None,
            },
            process: ProcessControl {
                reporter: Arc::new(Progress::new()),
                instance: self.global.instance(),
                fence: None,
                cancel,
            },
        };
        // The store has no retry, because its callers retry a fetch as a whole.
        let store = images::store_of(&services, location, registry);
        services.fetcher = services.fetcher.with_store(store);
        #[cfg(feature = "bootcheck")]
        {
            services.tools.boot_checker = Some(boot_checker(&services, self.global.entrypoint.clone()));
        }
        #[cfg(feature = "host-artifacts")]
        {
            services.tools.output_maker = Some(Arc::new(farrier_host_artifacts::HostArtifacts));
        }
        Ok(services)
    }
}

/// Returns the limits of builds: the arguments, else this machine's resources. A cluster schedules its builds
/// itself.
pub fn limits(args: &LimitArgs, engine: EngineChoice, builds: &Builds) -> BuildLimits {
    let LimitArgs { parallel_builds, build_cpus, build_memory } = args;
    let (Budget { cpus, memory }, at_once) = match engine {
        EngineChoice::Kubernetes => {
            (Budget::UNLIMITED, usize::try_from(builds.at_once.get()).unwrap_or(usize::MAX))
        }
        _ => (machine::budget(), usize::MAX),
    };
    BuildLimits {
        at_once: parallel_builds.map_or(at_once, usize::from),
        budget: Budget { cpus: build_cpus.unwrap_or(cpus), memory: build_memory.unwrap_or(memory) },
    }
}

/// Returns the options of the live cluster that `--cluster` names, if it names one.
pub fn kube_options(text: &str) -> Option<KubeOptions> {
    let context = match text.split_once(':') {
        None if text == "kube" => None,
        Some(("kube", context)) if !context.is_empty() => Some(context.to_owned()),
        _ => return None,
    };
    Some(KubeOptions { context, ..KubeOptions::default() })
}
