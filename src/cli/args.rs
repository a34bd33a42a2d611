//! The command line as clap parses it: the commands, and the options that several of them have.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

use super::{
    build::BuildArgs,
    bundle::BundleCommand,
    check::CheckArgs,
    collect::CollectArgs,
    env_vars as vars,
    gc::GcArgs,
    headers::HeadersCommand,
    mirror::MirrorArgs,
    plan::{PlanArgs, PlanCommandArgs},
    prebuild::PrebuildArgs,
    preflight::PreflightArgs,
    render::RenderArgs,
    rollback::RollbackArgs,
    run::RunArgs,
    schema::SchemaArgs,
    verify::VerifyArgs,
};
use crate::{cluster::KubeOptions, engine::EngineChoice};

/// Builds, checks, publishes and rolls out driver-container images for the kernels of a Kubernetes fleet.
///
/// Results go to standard output; progress and logs to standard error.
/// Exit codes: 0 done; 1 some target failed; 2 the command, the configuration or a definition is wrong;
/// 3 an outside system could not be reached; 130 interrupted. `run` without --once ends with 0 at SIGTERM, which is
/// how services are stopped.
#[derive(Debug, Parser)]
#[command(name = "farrier", version, propagate_version = true, max_term_width = 100)]
pub struct Cli {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Command,
}

/// Options of every command.
#[derive(Debug, Args)]
pub struct Global {
    /// Directory with images/, kernels/, templates/ and announced/; what it lacks comes from the built-in definitions
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
    /// Form of the result
    #[arg(short, long, global = true, value_enum, default_value_t = OutputForm::Table)]
    pub output: OutputForm,
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

/// Form of a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OutputForm {
    /// For people.
    Table,
    /// For programs.
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

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show what would be built and rolled out, and why
    Plan(PlanCommandArgs),
    /// Print the Dockerfile of one image for one kernel
    Render(RenderArgs),
    /// Fetch, import, collect and list header sets
    #[command(subcommand)]
    Headers(HeadersCommand),
    /// Collect the headers that a host's own driver exposes, to compile other drivers against
    Collect(CollectArgs),
    /// Build, check and, with --push, publish one image for one kernel
    Build(BuildArgs),
    /// Build and publish images for a kernel before a node runs it
    Prebuild(PrebuildArgs),
    /// May nodes boot a kernel? Exits with 0 when every image that they will need is published, else with 1
    Preflight(PreflightArgs),
    /// Put everything that images are made from into the registry, so that a site without a network can build them
    ///
    /// Sources, header sets, root file systems, copies of other registries' images and the definitions directory. Kernel
    /// images are not among them: for boot checks on the other side put them into the definitions directory, and name
    /// them as the family's `kernelImage: file`.
    Mirror(MirrorArgs),
    /// Check modules or images against a kernel: will they load?
    Check(CheckArgs),
    /// Verify a published image: blobs, signature, check report, bill of materials, provenance
    Verify(VerifyArgs),
    /// Carry images and everything that they are made from to a site without a network, in one file
    #[command(subcommand)]
    Bundle(BundleCommand),
    /// The loop: observe, plan, build, check, publish, roll out
    Run(RunArgs),
    /// Show the matrix of images and kernels
    Status(PlanArgs),
    /// Put back what was there before farrier's rewrites
    Rollback(RollbackArgs),
    /// Remove published images for kernels that no node has any more; without --delete only say which
    Gc(GcArgs),
    /// Print the JSON Schema of a definition
    Schema(SchemaArgs),
    /// Print shell completions
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
}

impl Command {
    /// `--cluster`, where the command has it.
    pub fn cluster(&self) -> Option<&str> {
        match self {
            Self::Plan(args) => Some(&args.plan.cluster.cluster),
            Self::Status(args) => Some(&args.cluster.cluster),
            Self::Prebuild(args) => args.cluster.as_deref(),
            Self::Preflight(args) => Some(&args.cluster.cluster),
            Self::Run(args) => Some(&args.cluster.cluster),
            Self::Rollback(args) => Some(&args.cluster),
            Self::Gc(args) => Some(&args.cluster.cluster),
            _ => None,
        }
    }
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
}

/// What compiles.
#[derive(Debug, Args)]
pub struct EngineArg {
    /// The build engine; auto takes a Docker socket that answers, then Podman's, then buildah
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
