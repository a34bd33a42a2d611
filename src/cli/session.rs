//! Joins settings, registry, cluster and engine into a controller.

use std::{path::Path, sync::Arc};

use tokio_util::sync::CancellationToken;

use super::{
    CliError,
    args::Global,
    env_vars,
    printer::Progress,
    settings::{Settings, parse},
};
use crate::{
    cluster::{Cluster, Directory},
    controller::{Controller, LazyEngine, QemuBoot},
    engine::EngineChoice,
    registry::{self, RegistryLocation, RemoteRegistry},
};

/// The directory in the cache for what boot checks remember of this machine.
pub const BOOT_MEMORY: &str = "boot";

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
    let boot = QemuBoot {
        fetcher: fetcher.clone(),
        root: definitions.root.clone(),
        entrypoint: global.entrypoint.clone(),
        memory: cache.root().join(BOOT_MEMORY),
        cancel: cancel.clone(),
    };
    Ok(Controller {
        definitions,
        fetcher,
        cache,
        registry: registry::connect(&location, &options)?,
        remote: Arc::new(RemoteRegistry::new("registries".to_owned(), &options)?),
        credentials: options.credentials.clone(),
        location,
        engine: LazyEngine::new(engine, env_vars::engine_env()),
        boot_checker: Some(Arc::new(boot)),
        reporter: Arc::new(Progress::new()),
        fence: None,
        cancel,
    })
}

/// The cluster that `--cluster` names.
pub fn cluster(text: &str) -> Result<Arc<dyn Cluster>, CliError> {
    match text.split_once(':') {
        Some(("dir", path)) if !path.is_empty() => Ok(Arc::new(Directory::open(Path::new(path))?)),
        _ => Err(CliError::Usage(format!(
            "--cluster: {text:?} is not dir:PATH, the form that this version has"
        ))),
    }
}
