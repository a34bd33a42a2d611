//! What a command works with: settings, registry, cluster and engine, joined.

use std::{path::Path, sync::Arc};

use serde::Serialize;

use super::{
    CliError, Result,
    args::{Global, LimitArgs, RegistryArg},
    env_vars,
    output::{self, Progress},
    plan::PlanArgs,
    settings::{Settings, connect, parse},
    stop::Stop,
};
use crate::{
    cluster::{Cluster, Directory, KubeCluster, KubeOptions},
    engine::{EngineChoice, EngineEnv},
    images, machine,
    parts::{BuildLimits, LazyEngine, LazyEntrypoint, NeedsFrom, Parts, QemuBoot},
    plan::{Budget, Interest, WriteNamespaces},
    registry::{self, RegistryLocation, RegistryOptions, RemoteRegistry, Retrying},
    signing::ModuleSigner,
    site::Builds,
};

/// The directory in the cache for what boot checks remember of this machine.
pub const BOOT_MEMORY: &str = "boot";
/// The directory in the cache for what engines may hold of runs that are over.
const ENGINE_NOTES: &str = "engine-runs";
/// Where it is seen whether this machine lets a sandbox be made.
const SANDBOX_TRIALS: &str = "work";

/// What every command works with: the options that all of them have, and the signal to stop.
pub struct Session {
    pub global: Global,
    pub stop: Stop,
}

/// Where the loop works.
pub struct Connection {
    /// Nodes and rollout targets.
    pub cluster: Arc<dyn Cluster>,
    /// The same, where it is a live one: for the lease, the figures and the status.
    pub kube: Option<Arc<KubeCluster>>,
}

impl Session {
    /// Prints a result in the form that was asked for.
    pub fn show<T: Serialize + ?Sized>(&self, value: &T, text: impl FnOnce(&T) -> String) -> Result<()> {
        Ok(output::show(self.global.output, value, text)?)
    }

    /// The definitions, the cache and the ways to the network.
    pub fn settings(&self) -> Result<Settings> {
        Settings::resolve(&self.global)
    }

    /// The same with the stored inputs of the registry that `--registry` names, where it is given.
    pub fn settings_with_store(&self, location: Option<&str>) -> Result<Settings> {
        if location.is_none() {
            return self.settings();
        }
        let Parts { definitions, cache, fetcher, credentials, .. } =
            self.parts(location, EngineChoice::Auto)?;
        // This net knows the registry's host, which may then be asked offline, too.
        let registry = RegistryOptions { credentials, net: fetcher.net().clone() };
        Ok(Settings { definitions, cache, fetcher, registry })
    }

    /// The parts of a registry, and the cluster.
    pub async fn of_cluster(&self, plan: &PlanArgs) -> Result<(Parts, Arc<dyn Cluster>)> {
        let PlanArgs { registry, cluster, engine } = plan;
        let parts = self.publisher(registry, engine.engine)?;
        let interest = Interest::of(&parts.definitions);
        let Connection { cluster, kube: _ } =
            self.connect(&cluster.cluster, cluster.writable(), interest).await?;
        Ok((parts, cluster))
    }

    /// Reaches what `--cluster` names, for what is asked about.
    pub async fn connect(
        &self,
        cluster: &str,
        writable: WriteNamespaces,
        interest: Interest,
    ) -> Result<Connection> {
        if let Some(options) = kube_options(cluster) {
            let pod = env_vars::in_pod().then(env_vars::host_name);
            let options = KubeOptions { instance: self.global.instance(), writable, pod, ..options };
            let kube = KubeCluster::connect(options, interest, self.stop.cancel.clone()).await?;
            return Ok(Connection { cluster: Arc::clone(&kube) as Arc<dyn Cluster>, kube: Some(kube) });
        }
        let path = cluster.strip_prefix("dir:").filter(|path| !path.is_empty()).ok_or_else(|| {
            CliError::usage(format!("--cluster: {cluster:?} is none of kube, kube:CONTEXT and dir:PATH"))
        })?;
        Ok(Connection { cluster: Arc::new(Directory::open(Path::new(path))?), kube: None })
    }

    /// Parts that publish to a registry.
    pub fn publisher(&self, registry: &RegistryArg, engine: EngineChoice) -> Result<Parts> {
        self.parts(Some(&registry.registry), engine)
    }

    /// Parts that publish nothing, and look needed images and stored inputs up in a registry, where one is
    /// given.
    pub fn reader(&self, needs_from: Option<&str>, engine: EngineChoice) -> Result<Parts> {
        let mut parts = self.parts(None, engine)?;
        if let Some(location) = needs_from {
            let options =
                RegistryOptions { credentials: parts.credentials.clone(), net: parts.fetcher.net().clone() };
            let (location, registry) = connect(location, &options)?;
            // Not the layout directory of parts that publish nothing: it holds no stored inputs.
            let store = images::store_of(&parts, location.clone(), Arc::clone(&registry));
            parts.fetcher = parts.fetcher.with_store(store);
            let registry = Arc::new(Retrying::new(registry, parts.cancel.clone()));
            parts.needs_from = Some(NeedsFrom { location, registry });
        }
        Ok(parts)
    }

    /// Parts that publish to `location`; without one, to a layout directory in the cache, so that nothing
    /// outside is touched.
    pub fn parts(&self, location: Option<&str>, engine: EngineChoice) -> Result<Parts> {
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
        let module_signer = match &definitions.site.module_signing {
            None => None,
            Some(spec) => {
                let secrets = options.net.secrets().clone();
                Some(Arc::new(ModuleSigner::open(spec, &definitions.root, secrets)?))
            }
        };
        let mut parts = Parts {
            definitions,
            fetcher,
            cache,
            registry: Arc::new(Retrying::new(Arc::clone(&registry), cancel.clone())),
            needs_from: None,
            remote: Arc::new(Retrying::new(remote, cancel.clone())),
            credentials: options.credentials.clone(),
            location: location.clone(),
            engine: LazyEngine::new(engine, engine_env),
            entrypoint: LazyEntrypoint::new(self.global.entrypoint.clone()),
            limits: BuildLimits { at_once: usize::MAX, budget: machine::budget() },
            module_signer,
            boot_checker: None,
            reporter: Arc::new(Progress::new()),
            instance: self.global.instance(),
            fence: None,
            cancel,
        };
        // Without retry: what fetches from the store is repeated as a whole.
        let store = images::store_of(&parts, location, registry);
        parts.fetcher = parts.fetcher.with_store(store);
        parts.boot_checker = Some(Arc::new(QemuBoot {
            fetcher: parts.fetcher.clone(),
            entrypoint: self.global.entrypoint.clone(),
            memory: parts.cache.root().join(BOOT_MEMORY),
            cancel: parts.cancel.clone(),
        }));
        Ok(parts)
    }
}

/// How much is built at once: what the arguments say, else what the machine has. A cluster finds room for its builds itself.
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

/// Which live cluster `--cluster` names, if it names one.
pub fn kube_options(text: &str) -> Option<KubeOptions> {
    let context = match text.split_once(':') {
        None if text == "kube" => None,
        Some(("kube", context)) if !context.is_empty() => Some(context.to_owned()),
        _ => return None,
    };
    Some(KubeOptions { context, ..KubeOptions::default() })
}
