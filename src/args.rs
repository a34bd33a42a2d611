//! Options that several commands share.

use std::{collections::BTreeSet, path::PathBuf};

use clap::{Args, ColorChoice, ValueEnum};
use farrier_cluster::KubeOptions;
use farrier_core::{
    image::{Cpus, Memory},
    kernel::{KernelRelease, KernelTarget},
    plan::{Instance, WriteNamespaces},
};
use farrier_engines::EngineChoice;

use super::{CliError, Result, env_vars as vars, session::kube_options, settings::parse};

/// Heading of the options of every command.
pub const GLOBAL_OPTIONS: &str = "Global options";

/// Options of every command.
#[derive(Debug, Args)]
#[command(next_help_heading = GLOBAL_OPTIONS)]
pub struct Global {
    /// Directory with images/, kernels/, templates/, patches/, announced/ and site.yaml; built-in definitions
    /// supply what is missing
    #[arg(long, global = true, env = vars::FARRIER_DEFINITIONS, value_name = "DIR", hide_env_values = true)]
    pub definitions: Option<PathBuf>,
    /// Cache directory for headers, sources and logs, which may be deleted at any time [default:
    /// $XDG_CACHE_HOME/farrier]
    #[arg(long, global = true, env = vars::FARRIER_CACHE_DIR, value_name = "DIR", hide_env_values = true)]
    pub cache_dir: Option<PathBuf>,
    /// Additional root certificates for registries and downloads, in PEM format
    #[arg(long, global = true, env = vars::FARRIER_CA_FILE, value_name = "FILE", hide_env_values = true)]
    pub ca_file: Option<PathBuf>,
    /// Use plain HTTP for this registry host[:port] (repeatable); loopback hosts do not need this option
    #[arg(long, global = true, value_name = "HOST")]
    pub insecure_registry: Vec<String>,
    /// Contact only hosts that site.yaml (`hosts`, `mirrors`, `proxy`), --registry and --cluster name;
    /// sources, headers and toolchains come from the registry's store, and farrier does not look for newer
    /// ones
    #[arg(long, global = true, env = vars::FARRIER_OFFLINE, hide_env_values = true,
          value_parser = clap::builder::FalseyValueParser::new())]
    pub offline: bool,
    /// Refresh package lists that are older than this many seconds
    #[arg(long, global = true, value_name = "SECONDS", default_value_t = 6 * 3600)]
    pub refresh: u64,
    /// Stop the command after this many seconds, clean up, and exit with 3
    #[arg(long, global = true, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    pub timeout: Option<u64>,
    /// The static driver-entrypoint, for images that start with it and for boot checks [default: the one next
    /// to farrier]
    #[arg(long, global = true, env = vars::FARRIER_ENTRYPOINT, value_name = "FILE", hide_env_values = true)]
    pub entrypoint: Option<PathBuf>,
    /// Name of this farrier if a cluster has several: part of the names of its lease and field manager, and
    /// of the labels that tell nodes what they may boot
    #[arg(long, global = true, env = vars::FARRIER_INSTANCE, value_name = "NAME", hide_env_values = true)]
    pub instance: Option<Instance>,
    /// Output format
    #[arg(short, long, global = true, value_enum, default_value_t = OutputFormat::Table)]
    pub output: OutputFormat,
    /// When to use colors; auto: on a terminal, unless NO_COLOR or CLICOLOR_FORCE is set
    #[arg(long, global = true, value_enum, default_value_t = ColorChoice::Auto, value_name = "WHEN")]
    pub color: ColorChoice,
    /// Log more (-v: debug, -vv: trace)
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,
    /// Log messages of this level and above; takes precedence over --verbose and FARRIER_LOG
    #[arg(long, global = true, value_enum, value_name = "LEVEL", conflicts_with = "verbose")]
    pub log_level: Option<LogLevel>,
    /// Context of the kubeconfig; without --cluster, selects this live cluster
    #[arg(long, global = true, value_name = "NAME")]
    pub context: Option<String>,
    /// The kubeconfig [default: the file in KUBECONFIG, else ~/.kube/config, else the pod's service account]
    #[arg(long, global = true, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Cluster that holds the Secrets named by site.yaml, taken from the command's --cluster.
    #[arg(skip)]
    pub kube: KubeOptions,
    /// Log format
    #[arg(long, global = true, value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
}

impl Global {
    /// Returns the name of this farrier.
    pub fn instance(&self) -> Instance {
        self.instance.clone().unwrap_or_default()
    }

    /// Returns the options of the live cluster that `--cluster` names, if it names one.
    pub fn kube_options(&self, cluster: &str) -> Option<KubeOptions> {
        let options = kube_options(cluster)?;
        let (context, kubeconfig) = (self.context.clone().or(options.context), self.kubeconfig.clone());
        Some(KubeOptions { context, kubeconfig, ..options })
    }
}

/// Output format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OutputFormat {
    /// For people; on a terminal, rows fit its width and digests are short
    Table,
    /// Like table, with full digests and rows of any length
    Wide,
    /// For programs
    Json,
    /// Like json, as YAML
    Yaml,
    /// One name per line: the reference of an image, else the name of an object, a kernel or a file
    Name,
}

/// Log level.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogLevel {
    /// Errors.
    Error,
    /// Warnings.
    Warn,
    /// Progress; the default.
    Info,
    /// As with --verbose.
    Debug,
    /// As with --verbose twice.
    Trace,
}

/// Log format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object per line.
    Json,
}

/// Option for the registry of the published images.
#[derive(Debug, Args)]
pub struct RegistryArg {
    /// Registry of the published images: host[:port]/path, or oci:PATH for a layout directory
    #[arg(long, env = vars::FARRIER_REGISTRY, value_name = "LOCATION", hide_env_values = true)]
    pub registry: String,
}

/// Options for the cluster.
#[derive(Debug, Args)]
pub struct ClusterArg {
    /// Cluster with the nodes and rollout targets: kube or kube:CONTEXT for a live cluster, dir:PATH for a
    /// directory of manifests
    #[arg(long, env = vars::FARRIER_CLUSTER, value_name = "CLUSTER", hide_env_values = true)]
    pub cluster: String,
    /// Namespaces in which DaemonSets are written and pods evicted, such as drivers,gpu, or `*` for all;
    /// `farrier run` requires it for a live cluster
    #[arg(long, env = vars::FARRIER_WRITE_NAMESPACES, value_name = "NAMESPACES", hide_env_values = true)]
    pub write_namespaces: Option<WriteNamespaces>,
}

impl ClusterArg {
    /// Returns the writable namespaces: all if the option is absent, as in commands that write nothing.
    pub fn writable(&self) -> WriteNamespaces {
        self.write_namespaces.clone().unwrap_or_default()
    }
}

/// Option for the build engine.
#[derive(Debug, Args)]
pub struct EngineArg {
    /// Build engine; auto tries the sandbox, then a Docker socket that answers, then Podman's
    #[arg(long, env = vars::FARRIER_ENGINE, value_enum, default_value_t = EngineChoice::Auto, hide_env_values = true)]
    pub engine: EngineChoice,
}

/// Kernel target on the command line.
#[derive(Debug, Args)]
pub struct TargetArgs {
    /// Kernel release, exactly as `uname -r` prints it
    #[arg(long, value_name = "RELEASE")]
    pub kernel: String,
    #[command(flatten)]
    pub platform: PlatformArgs,
}

/// Kernel release beside an image on the command line.
#[derive(Debug, Args)]
pub struct KernelArg {
    /// Kernel release, exactly as `uname -r` prints it
    #[arg(long, value_name = "RELEASE")]
    pub kernel: Option<String>,
    /// The release without `--kernel`; needed only if there are several kernels
    #[arg(value_name = "KERNEL", conflicts_with = "kernel")]
    pub release: Option<String>,
}

impl KernelArg {
    /// Returns the release, if one is given.
    pub fn get(&self) -> Option<&str> {
        self.kernel.as_deref().or(self.release.as_deref())
    }

    /// Returns the release, or else the only one of `known`. If there are none or several, the error begins with `prefix`.
    pub fn or_only<'a>(
        &self,
        prefix: &str,
        known: impl Iterator<Item = &'a KernelRelease>,
    ) -> Result<KernelRelease> {
        if let Some(given) = self.get() {
            return parse("--kernel", given);
        }
        let known: Vec<&str> =
            known.map(KernelRelease::as_str).collect::<BTreeSet<_>>().into_iter().collect();
        let hint = "put the kernel's release after the image's name";
        match known[..] {
            [only] => parse("--kernel", only),
            [] => Err(CliError::absent(
                format!("{prefix} for no kernel"),
                "`farrier plan` shows which images the nodes need, and for which kernels",
            )),
            _ => Err(CliError::hinted(format!("{prefix} for several kernels: {}", known.join(", ")), hint)),
        }
    }
}

/// Option for the namespace of objects.
#[derive(Debug, Args)]
pub struct NamespaceArg {
    /// Namespace of the objects; without an object, selects those of this namespace
    #[arg(short, long, value_name = "NAMESPACE")]
    pub namespace: Option<String>,
}

impl NamespaceArg {
    /// Returns an object's full name: `namespace/name`.
    pub fn qualified(&self, object: &str) -> String {
        match &self.namespace {
            Some(namespace) if !object.contains('/') => format!("{namespace}/{object}"),
            _ => object.to_owned(),
        }
    }

    /// Whether the namespace selects an object.
    pub fn selects(&self, object: &str) -> bool {
        let namespace = object.split_once('/').map(|(namespace, _)| namespace);
        self.namespace.is_none() || self.namespace.as_deref() == namespace
    }
}

/// Platform of a kernel on the command line.
#[derive(Debug, Args)]
pub struct PlatformArgs {
    /// Operating system id, as in os-release [default: this machine's]
    #[arg(long, value_name = "ID")]
    pub os: Option<String>,
    /// Operating system version, as VERSION_ID in os-release [default: this machine's]
    #[arg(long, value_name = "VERSION")]
    pub os_version: Option<String>,
    /// Architecture, amd64 or arm64 [default: this machine's]
    #[arg(long, value_name = "ARCH")]
    pub arch: Option<String>,
}

impl PlatformArgs {
    /// Whether a kernel target is of this platform, as far as the platform is given.
    pub fn allows(&self, target: &KernelTarget) -> bool {
        let Self { os, os_version, arch } = self;
        let is = |given: &Option<String>, actual: &str| given.as_ref().is_none_or(|given| given == actual);
        is(os, target.os.as_str())
            && is(os_version, target.os_version.as_str())
            && is(arch, target.arch.as_str())
    }
}

/// Option for actions on the page of the fleet.
#[cfg(feature = "dashboard")]
#[derive(Debug, Args)]
pub struct PageArgs {
    /// Allow retry, prebuild, pause, resume and rollback on the page: for everyone who reaches a loopback
    /// --listen address, and for bearer tokens that the cluster accepts and whose user may do the write
    #[arg(long, env = vars::FARRIER_PAGE_ACTIONS, hide_env_values = true,
          value_parser = clap::builder::FalseyValueParser::new())]
    pub page_actions: bool,
}

/// Limits of concurrent builds.
#[derive(Debug, Args)]
pub struct LimitArgs {
    /// Maximum number of concurrent builds [default: limited by CPUs and memory only]
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u16).range(1..))]
    pub parallel_builds: Option<u16>,
    /// CPUs for builds, such as 4 or 500m [default: this machine's]
    #[arg(long, value_name = "NUMBER")]
    pub build_cpus: Option<Cpus>,
    /// Memory for builds, such as 8Gi [default: this machine's]
    #[arg(long, value_name = "AMOUNT")]
    pub build_memory: Option<Memory>,
}
