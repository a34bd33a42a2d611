//! The options that several commands have.

use std::path::PathBuf;

use clap::{Args, ColorChoice, ValueEnum};

use super::env_vars as vars;
use crate::{
    cluster::KubeOptions,
    engine::EngineChoice,
    image::{Cpus, Memory},
    plan::{Instance, WriteNamespaces},
};

/// Options of every command.
#[derive(Debug, Args)]
pub struct Global {
    /// Directory with images/, kernels/, templates/, patches/, announced/ and site.yaml; what it lacks comes from the built-in definitions
    #[arg(long, global = true, env = vars::FARRIER_DEFINITIONS, value_name = "DIR", hide_env_values = true)]
    pub definitions: Option<PathBuf>,
    /// Cache of headers, sources and logs [default: $XDG_CACHE_HOME/farrier]; it may be deleted at any time
    #[arg(long, global = true, env = vars::FARRIER_CACHE_DIR, value_name = "DIR", hide_env_values = true)]
    pub cache_dir: Option<PathBuf>,
    /// Further root certificates for registries and downloads, PEM
    #[arg(long, global = true, env = vars::FARRIER_CA_FILE, value_name = "FILE", hide_env_values = true)]
    pub ca_file: Option<PathBuf>,
    /// Use plain HTTP for this registry host[:port]; loopback needs no such option
    #[arg(long, global = true, value_name = "HOST")]
    pub insecure_registry: Vec<String>,
    /// Contact only hosts that site.yaml (`hosts`, `mirrors`, `proxy`), --registry and --cluster name; sources, headers
    /// and toolchains come from the registry's store, and farrier does not look for newer ones
    #[arg(long, global = true, env = vars::FARRIER_OFFLINE, hide_env_values = true,
          value_parser = clap::builder::FalseyValueParser::new())]
    pub offline: bool,
    /// Look package lists up again when they are older than this many seconds
    #[arg(long, global = true, value_name = "SECONDS", default_value_t = 6 * 3600)]
    pub refresh: u64,
    /// The static driver-entrypoint, for images that start with it and for boot checks [default: the one beside farrier]
    #[arg(long, global = true, env = vars::FARRIER_ENTRYPOINT, value_name = "FILE", hide_env_values = true)]
    pub entrypoint: Option<PathBuf>,
    /// This farrier's name, where a cluster has several: part of its lease's name, of its name as a field manager, and of
    /// the labels that tell nodes what they may boot
    #[arg(long, global = true, env = vars::FARRIER_INSTANCE, value_name = "NAME", hide_env_values = true)]
    pub instance: Option<Instance>,
    /// Form of the result
    #[arg(short, long, global = true, value_enum, default_value_t = OutputForm::Table)]
    pub output: OutputForm,
    /// Colours; auto: on a terminal, unless NO_COLOR or CLICOLOR_FORCE is set
    #[arg(long, global = true, value_enum, default_value_t = ColorChoice::Auto, value_name = "WHEN")]
    pub color: ColorChoice,
    /// More log lines (-v: debug, -vv: trace)
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,
    /// Which cluster holds the Secrets that site.yaml names: that of the command's --cluster.
    #[arg(skip)]
    pub kube: KubeOptions,
    /// Form of log lines
    #[arg(long, global = true, value_enum, default_value_t = LogForm::Text)]
    pub log_format: LogForm,
}

impl Global {
    /// Which farrier this is.
    pub fn instance(&self) -> Instance {
        self.instance.clone().unwrap_or_default()
    }
}

/// Form of a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OutputForm {
    /// For people; on a terminal rows fit and digests are short
    Table,
    /// The same with whole digests, in rows of any length
    Wide,
    /// For programs
    Json,
}

/// Form of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogForm {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// Where images go.
#[derive(Debug, Args)]
pub struct RegistryArg {
    /// Where images are published: host[:port]/path, or oci:PATH for a layout directory
    #[arg(long, env = vars::FARRIER_REGISTRY, value_name = "LOCATION", hide_env_values = true)]
    pub registry: String,
}

/// Where nodes and rollout targets are.
#[derive(Debug, Args)]
pub struct ClusterArg {
    /// Where nodes and rollout targets are: kube or kube:CONTEXT, a live cluster, or dir:PATH, a directory of manifests
    #[arg(long, env = vars::FARRIER_CLUSTER, value_name = "CLUSTER", hide_env_values = true)]
    pub cluster: String,
    /// Namespaces in which DaemonSets are written and pods evicted, such as drivers,gpu, or `*` for all; `farrier run` needs it
    /// for a live cluster
    #[arg(long, env = vars::FARRIER_WRITE_NAMESPACES, value_name = "NAMESPACES", hide_env_values = true)]
    pub write_namespaces: Option<WriteNamespaces>,
}

impl ClusterArg {
    /// Where may be written: nothing is said where nothing is written.
    pub fn writable(&self) -> WriteNamespaces {
        self.write_namespaces.clone().unwrap_or_default()
    }
}

/// What compiles.
#[derive(Debug, Args)]
pub struct EngineArg {
    /// The build engine; auto takes the sandbox where this machine lets it, then a Docker socket that answers, then Podman's
    #[arg(long, env = vars::FARRIER_ENGINE, value_enum, default_value_t = EngineChoice::Auto, hide_env_values = true)]
    pub engine: EngineChoice,
}

/// A kernel target on the command line.
#[derive(Debug, Args)]
pub struct TargetArgs {
    /// Kernel release, exactly as `uname -r` prints it
    #[arg(long, value_name = "RELEASE")]
    pub kernel: String,
    #[command(flatten)]
    pub platform: PlatformArgs,
}

/// What a kernel runs on, on the command line.
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

/// What may be done on the page of the fleet.
#[derive(Debug, Args)]
pub struct PageArgs {
    /// Let people retry, prebuild, pause, resume and put back on the page: who reaches a --listen address of the loopback device,
    /// and who sends a bearer token that the cluster accepts and whose user it allows the write
    #[arg(long, env = vars::FARRIER_PAGE_ACTIONS, hide_env_values = true,
          value_parser = clap::builder::FalseyValueParser::new())]
    pub page_actions: bool,
}

/// How much is built at once.
#[derive(Debug, Args)]
pub struct LimitArgs {
    /// Builds at the same time, at most [default: as many as there is room for]
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u16).range(1..))]
    pub parallel_builds: Option<u16>,
    /// Processors for builds, such as 4 or 500m [default: this machine's]
    #[arg(long, value_name = "NUMBER")]
    pub build_cpus: Option<Cpus>,
    /// Memory for builds, such as 8Gi [default: this machine's]
    #[arg(long, value_name = "AMOUNT")]
    pub build_memory: Option<Memory>,
}
