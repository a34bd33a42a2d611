//! Resolves arguments and the environment to settings.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    str::FromStr,
    sync::Arc,
    time::Duration,
};

use farrier_builder::services::BuildError;
use farrier_cluster::KubeSecrets;
use farrier_core::{
    image::{Definitions, ImageName},
    kernel::{Architecture, KernelTarget},
    provenance::Distribution,
};
use farrier_definitions as definitions;
use farrier_inputs::{FetchOptions, Fetcher};
use farrier_local::cache::Cache;
use farrier_net::{Net, NetOptions};
use farrier_store::registry::{self, CredentialFile, Keyring, Registry, RegistryLocation, RegistryOptions};

use super::{
    CliError, Result,
    args::{Global, PlatformArgs, TargetArgs},
    env_vars,
};

/// Settings of every command.
pub struct Settings {
    /// Built-in definitions and the user's.
    pub definitions: Definitions,
    /// The cache directory.
    pub cache: Cache,
    /// Fetches headers and sources.
    pub fetcher: Fetcher,
    /// Access to registries.
    pub registry: RegistryOptions,
}

impl Settings {
    /// Reads the definitions and opens the cache.
    pub fn resolve(global: &Global) -> Result<Self> {
        let definitions = Self::definitions(global.definitions.as_deref())?;
        let cache = open_cache(global)?;
        let options =
            FetchOptions { refresh: Duration::from_secs(global.refresh), ..FetchOptions::default() };
        let registry = Self::registry_options(global, &definitions)?;
        let fetcher = Fetcher::new(cache.clone(), options)
            .with_definitions(definitions.root.clone())
            .with_net(registry.net.clone())
            .with_credentials(registry.credentials.clone());
        Ok(Self { definitions, cache, fetcher, registry })
    }

    /// Returns the access to registries: the network and the credentials.
    pub fn registry_options(global: &Global, definitions: &Definitions) -> Result<RegistryOptions> {
        let net = Net::new(NetOptions {
            site: definitions.site.clone(),
            root: definitions.root.clone(),
            ca_file: global.ca_file.clone(),
            insecure: global.insecure_registry.clone(),
            environment: env_vars::proxies(),
            offline: global.offline,
            cluster: Some(Arc::new(KubeSecrets::new(global.kube.clone()))),
        })?;
        let docker = CredentialFile::new(env_vars::registry_auth_file());
        let credentials = Keyring::new(definitions.site.credentials.clone(), net.secrets().clone(), docker);
        Ok(RegistryOptions { credentials, net })
    }

    /// Loads the definitions of a directory, or the built-in ones.
    pub fn definitions(directory: Option<&Path>) -> Result<Definitions> {
        let directory = directory.map(existing_directory).transpose()?;
        Ok(definitions::load(directory.as_deref())?)
    }
}

/// Opens the cache directory that `--cache-dir` names, or the default one.
pub fn open_cache(global: &Global) -> Result<Cache> {
    Ok(Cache::open(global.cache_dir.clone().unwrap_or_else(env_vars::default_cache_dir))?)
}

/// Connects to the registry or layout directory that `--registry` names.
pub fn connect(text: &str, options: &RegistryOptions) -> Result<(RegistryLocation, Arc<dyn Registry>)> {
    let location: RegistryLocation = parse("--registry", text)?;
    let registry = registry::connect(&location, options);
    Ok((location, registry))
}

/// Returns the canonical path of a definitions directory.
pub fn existing_directory(path: &Path) -> Result<PathBuf> {
    match path.canonicalize() {
        Ok(path) if path.is_dir() => Ok(path),
        Ok(path) => Err(CliError::hinted(
            format!("definitions {}: not a directory", path.display()),
            "name the directory that has images/ and site.yaml",
        )),
        Err(error) => Err(CliError::hinted(
            format!("definitions {}: {error}", path.display()),
            "create a definitions directory with `farrier init`",
        )),
    }
}

/// Returns the kernel target of the arguments.
pub fn target_of(args: &TargetArgs) -> Result<KernelTarget> {
    target(&args.kernel, &args.platform)
}

/// Returns the kernel target for a kernel release. The operating system and architecture default to this machine's.
pub fn target(kernel: &str, platform: &PlatformArgs) -> Result<KernelTarget> {
    let host = if platform.os.is_none() || platform.os_version.is_none() { host_os() } else { (None, None) };
    let os = platform.os.clone().or(host.0).ok_or_else(|| {
        CliError::usage("no --os given, and this machine's os-release has no ID".to_owned())
    })?;
    let os_version = platform.os_version.clone().or(host.1).ok_or_else(|| {
        CliError::usage("no --os-version given, and this machine's os-release has no VERSION_ID".to_owned())
    })?;
    Ok(KernelTarget {
        os: parse("--os", &os)?,
        os_version: parse("--os-version", &os_version)?,
        release: parse("--kernel", kernel)?,
        arch: architecture(platform)?,
    })
}

/// Returns the architecture of the arguments, by default this machine's.
pub fn architecture(platform: &PlatformArgs) -> Result<Architecture> {
    parse("--arch", platform.arch.as_deref().unwrap_or(std::env::consts::ARCH))
}

/// Parses an argument's value. The error names the argument.
pub fn parse<T>(argument: &str, text: &str) -> Result<T>
where
    T: FromStr,
    T::Err: std::fmt::Display,
{
    text.parse().map_err(|error| CliError::usage(format!("{argument}: {error}")))
}

/// Parses the driver images that `--image` names. All must be defined.
pub fn images(names: &[String], definitions: &Definitions) -> Result<BTreeSet<ImageName>> {
    let parse_known = |name: &String| {
        let name: ImageName = parse("--image", name)?;
        if definitions.images.contains_key(&name) {
            return Ok(name);
        }
        Err(BuildError::no_image(name, definitions).into())
    };
    names.iter().map(parse_known).collect()
}

/// Reads `ID` and `VERSION_ID` of this machine's os-release.
pub fn host_os() -> (Option<String>, Option<String>) {
    let text = fs::read_to_string("/etc/os-release")
        .or_else(|_| fs::read_to_string("/usr/lib/os-release"))
        .unwrap_or_default();
    let Some(Distribution { id, version }) = Distribution::parse(&text) else { return (None, None) };
    (Some(id), Some(version).filter(|version| !version.is_empty()))
}
