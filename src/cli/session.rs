//! Joins settings, registry, cluster and engine into a controller.

use std::{path::Path, sync::Arc};

use tokio_util::sync::CancellationToken;

use super::{
    CliError,
    args::{Global, LimitArgs},
    env_vars,
    printer::Progress,
    serve::Connection,
    settings::{Settings, parse},
};
use crate::{
    cluster::{Cluster, Directory, KubeCluster, KubeOptions},
    controller::{BuildLimits, Controller, LazyEngine, LazyEntrypoint, NeedsFrom, QemuBoot},
    engine::EngineChoice,
    image::Definitions,
    machine,
    plan::{Budget, Interest},
    registry::{self, RegistryLocation, RegistryOptions, RemoteRegistry, Retrying},
    signing::ModuleSigner,
    store::Store,
};

/// The directory in the cache for what boot checks remember of this machine.
pub const BOOT_MEMORY: &str = "boot";

/// A controller that publishes nothing, and looks needed images up in a registry, where one is given.
pub fn reader(
    global: &Global,
    needs_from: Option<&str>,
    engine: EngineChoice,
    cancel: CancellationToken,
) -> Result<Controller, CliError> {
    let mut controller = controller(global, None, engine, cancel)?;
    if let Some(location) = needs_from {
        let location: RegistryLocation = parse("--registry", location)?;
        let options = RegistryOptions {
            credentials: controller.credentials.clone(),
            net: controller.fetcher.net().clone(),
        };
        let registry = registry::connect(&location, &options)?;
        // Not the layout directory of a controller that publishes nothing: it holds no stored inputs.
        let store = Store::new(location.clone(), Arc::clone(&registry));
        controller.fetcher = controller.fetcher.with_store(store);
        let registry = Arc::new(Retrying::new(registry, controller.cancel.clone()));
        controller.needs_from = Some(NeedsFrom { location, registry });
    }
    Ok(controller)
}

/// A controller that publishes to `location`; without one, to a layout directory in the cache, so that
/// nothing outside is touched.
pub fn controller(
    global: &Global,
    location: Option<&str>,
    engine: EngineChoice,
    cancel: CancellationToken,
) -> Result<Controller, CliError> {
    let Settings { definitions, cache, fetcher, registry: options } = Settings::resolve(global)?;
    let location = match location {
        Some(location) => parse("--registry", location)?,
        None => RegistryLocation::Layout(cache.root().join("layout")),
    };
    let registry = registry::connect(&location, &options)?;
    // Without retry: what fetches from the store is repeated as a whole.
    let fetcher = fetcher.with_store(Store::new(location.clone(), Arc::clone(&registry)));
    let remote = Arc::new(RemoteRegistry::new("registries".to_owned(), &options));
    let boot = QemuBoot {
        fetcher: fetcher.clone(),
        root: definitions.root.clone(),
        entrypoint: global.entrypoint.clone(),
        memory: cache.root().join(BOOT_MEMORY),
        cancel: cancel.clone(),
    };
    let module_signer = match &definitions.site.module_signing {
        None => None,
        Some(spec) => {
            let secrets = options.net.secrets().clone();
            Some(Arc::new(ModuleSigner::open(spec, &definitions.root, secrets)?))
        }
    };
    Ok(Controller {
        definitions,
        fetcher,
        cache,
        registry: Arc::new(Retrying::new(registry, cancel.clone())),
        needs_from: None,
        remote: Arc::new(Retrying::new(remote, cancel.clone())),
        credentials: options.credentials.clone(),
        location,
        engine: LazyEngine::new(engine, env_vars::engine_env()),
        entrypoint: LazyEntrypoint::new(global.entrypoint.clone()),
        limits: BuildLimits { at_once: usize::MAX, budget: machine::budget() },
        module_signer,
        boot_checker: Some(Arc::new(boot)),
        reporter: Arc::new(Progress::new()),
        fence: None,
        cancel,
    })
}

/// How much is built at once: what the arguments say, else what the machine has.
pub fn limits(args: &LimitArgs) -> BuildLimits {
    let LimitArgs { parallel_builds, build_cpus, build_memory } = args;
    let Budget { cpus, memory } = machine::budget();
    BuildLimits {
        at_once: parallel_builds.map_or(usize::MAX, usize::from),
        budget: Budget { cpus: build_cpus.unwrap_or(cpus), memory: build_memory.unwrap_or(memory) },
    }
}

/// What `--cluster` names.
#[derive(Debug)]
pub enum ClusterChoice {
    /// `dir:PATH`.
    Directory(Directory),
    /// `kube` or `kube:CONTEXT`.
    Kube(KubeOptions),
}

/// Reads `--cluster`.
pub fn cluster(text: &str) -> Result<ClusterChoice, CliError> {
    if let Some(options) = kube_options(text) {
        return Ok(ClusterChoice::Kube(options));
    }
    match text.split_once(':') {
        Some(("dir", path)) if !path.is_empty() => {
            Ok(ClusterChoice::Directory(Directory::open(Path::new(path))?))
        }
        _ => Err(CliError::Usage(format!("--cluster: {text:?} is none of kube, kube:CONTEXT and dir:PATH"))),
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

impl ClusterChoice {
    /// Reaches the cluster, for what these definitions ask about.
    pub async fn open(
        self,
        definitions: &Definitions,
        cancel: CancellationToken,
    ) -> Result<Arc<dyn Cluster>, CliError> {
        self.open_for(Interest::of(definitions), cancel).await
    }

    /// Reaches the cluster, for what is asked about.
    pub async fn open_for(
        self,
        interest: Interest,
        cancel: CancellationToken,
    ) -> Result<Arc<dyn Cluster>, CliError> {
        Ok(self.connect(interest, cancel).await?.cluster)
    }

    /// The same, with what the loop needs beside it.
    pub async fn connect(
        self,
        interest: Interest,
        cancel: CancellationToken,
    ) -> Result<Connection, CliError> {
        Ok(match self {
            Self::Directory(directory) => Connection { cluster: Arc::new(directory), kube: None },
            Self::Kube(options) => {
                let kube = KubeCluster::connect(options, interest, cancel).await?;
                Connection { cluster: Arc::clone(&kube) as Arc<dyn Cluster>, kube: Some(kube) }
            }
        })
    }
}
