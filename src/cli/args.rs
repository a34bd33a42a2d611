//! The command line as clap parses it; `settings` turns it into what the commands use.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

use super::env_vars as vars;
use crate::{
    engine::EngineChoice,
    image::{Cpus, Memory},
    plan,
};

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
    /// Use plain HTTP for this registry host[:port]; loopback needs no such leave
    #[arg(long, global = true, value_name = "HOST")]
    pub insecure_registry: Vec<String>,
    /// Ask no host but those that site.yaml (`hosts`, `mirrors`, `proxy`), --registry and --cluster name; what the
    /// registry's store has of sources, headers and toolchains counts, and nobody is asked for something newer
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
    /// Put what images are made from into the registry, so that a site without a network can build them
    Mirror(MirrorArgs),
    /// Check modules or images against a kernel: will they load?
    Check(CheckArgs),
    /// Verify a published image: blobs, signature, check report, bill of materials, provenance
    Verify(VerifyArgs),
    /// Carry images and all that they are made from to a site that nothing outside can reach, in one file
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

#[derive(Debug, Args)]
pub struct PlanArgs {
    #[command(flatten)]
    pub registry: RegistryArg,
    #[command(flatten)]
    pub cluster: ClusterArg,
}

#[derive(Debug, Args)]
pub struct PlanCommandArgs {
    #[command(flatten)]
    pub plan: PlanArgs,
    /// Print only what is to be built, as the list from which a CI system makes jobs of `farrier build --push`
    #[arg(long, value_enum, value_name = "FORM", conflicts_with = "output")]
    pub matrix: Option<MatrixForm>,
}

#[derive(Debug, Args)]
pub struct RenderArgs {
    /// The driver image's name
    pub image: String,
    #[command(flatten)]
    pub target: TargetArgs,
}

#[derive(Debug, Subcommand)]
pub enum HeadersCommand {
    /// Fetch the header set of a kernel into the cache
    Fetch(TargetArgs),
    /// Import the header set of a kernel that no mirror has, for all who publish to the registry
    Import(HeadersImportArgs),
    /// Import the header set of the kernel that this node runs; what the Job of the chart does
    Collect(HeadersCollectArgs),
    /// List the header sets in the cache and the registry
    List {
        #[command(flatten)]
        store: HeadersStoreArg,
    },
}

/// Where imported header sets go.
#[derive(Debug, Args)]
pub struct HeadersStoreArg {
    /// The registry that keeps header sets beside the images: host[:port]/path, or oci:PATH [default: only the cache]
    #[arg(long, env = vars::FARRIER_REGISTRY, value_name = "LOCATION", hide_env_values = true)]
    pub registry: Option<String>,
}

#[derive(Debug, Args)]
pub struct HeadersImportArgs {
    /// Parts of one header set: a tarball or directory of a kernel's build tree (after `make modules_prepare`, with the
    /// Module.symvers of the full build; a separate build directory with the source tree beside it), one that is rooted
    /// at /, or .deb and .rpm files
    #[arg(required = true, value_name = "SOURCE")]
    pub sources: Vec<PathBuf>,
    /// Kernel release, exactly as `uname -r` prints it
    #[arg(long, value_name = "RELEASE")]
    pub kernel: String,
    /// Architecture, amd64 or arm64 [default: this machine's]
    #[arg(long, value_name = "ARCH")]
    pub arch: Option<String>,
    #[command(flatten)]
    pub store: HeadersStoreArg,
    /// Take the place of other headers of the same kernel: new builds use these, and images built with the old ones
    /// count as built from other inputs
    #[arg(long)]
    pub replace: bool,
}

#[derive(Debug, Args)]
pub struct HeadersCollectArgs {
    /// Where the node's file system is mounted
    #[arg(long, value_name = "DIR", default_value = "/")]
    pub root: PathBuf,
    /// Kernel release [default: the kernel that runs here, as `uname -r` prints it]
    #[arg(long, value_name = "RELEASE")]
    pub kernel: Option<String>,
    #[command(flatten)]
    pub store: HeadersStoreArg,
}

#[derive(Debug, Args)]
pub struct CollectArgs {
    /// Files and directories, as paths on the host, such as /usr/src/ofa_kernel
    #[arg(required = true, value_name = "PATH")]
    pub paths: Vec<PathBuf>,
    /// Where the host's file system is mounted
    #[arg(long, value_name = "DIR", default_value = "/")]
    pub root: PathBuf,
    /// Release of the kernel that the headers are for, exactly as `uname -r` prints it
    #[arg(long, value_name = "RELEASE")]
    pub kernel: String,
    /// The archive to write, a .tar.gz; name it as the `tree` of a definition's need does
    #[arg(long, value_name = "FILE")]
    pub to: PathBuf,
}

#[derive(Debug, Args)]
pub struct BuildArgs {
    /// The driver image's name
    pub image: String,
    #[command(flatten)]
    pub target: TargetArgs,
    #[command(flatten)]
    pub engine: EngineArg,
    /// Where images are published: host[:port]/path, or oci:PATH for a layout directory
    #[arg(long, env = vars::FARRIER_REGISTRY, value_name = "LOCATION", hide_env_values = true)]
    pub registry: Option<String>,
    /// Publish the image
    #[arg(long, requires = "registry")]
    pub push: bool,
    /// Build although an image with the same input hash is published, or the same inputs failed before
    #[arg(long)]
    pub force: bool,
}

#[derive(Debug, Args)]
pub struct PrebuildArgs {
    #[command(flatten)]
    pub target: TargetArgs,
    /// The driver image's name (repeatable) [default: with --cluster those that its nodes call for, else all]
    #[arg(long, value_name = "IMAGE")]
    pub image: Vec<String>,
    #[command(flatten)]
    pub engine: EngineArg,
    #[command(flatten)]
    pub registry: RegistryArg,
    /// Build only what nodes of the kernel's operating system and architecture call for here, where no image is named
    #[arg(long, env = vars::FARRIER_CLUSTER, value_name = "CLUSTER", hide_env_values = true)]
    pub cluster: Option<String>,
}

#[derive(Debug, Subcommand)]
pub enum BundleCommand {
    /// Write a bundle; after an interruption the same command goes on where it stopped
    Export(BundleExportArgs),
    /// Verify a bundle, then push what the registry lacks of it; it can be repeated at any time
    Import(BundleImportArgs),
    /// List what is in a bundle
    Inspect(BundleInspectArgs),
}

#[derive(Debug, Args)]
#[command(group(clap::ArgGroup::new("what").args(["kernel", "reference"]).required(true).multiple(true)))]
pub struct BundleExportArgs {
    #[command(flatten)]
    pub carry: CarryArgs,
    /// Carry this along too, and what refers to it: repository:tag below the registry's prefix (repeatable)
    #[arg(long, value_name = "NAME:TAG")]
    pub reference: Vec<String>,
    /// Write a bundle although something is missing that images are made from, or an image is not published
    #[arg(long)]
    pub incomplete: bool,
    #[command(flatten)]
    pub registry: RegistryArg,
    /// The bundle to write
    #[arg(long, value_name = "FILE")]
    pub to: PathBuf,
    /// Leave out what this previous bundle holds: the bundle, or what `bundle inspect -o json` printed of it
    #[arg(long, value_name = "FILE")]
    pub since: Option<PathBuf>,
    /// farrier's own image, to carry it along; it becomes `farrier` in the site's registry
    #[arg(long, value_name = "REFERENCE")]
    pub farrier_image: Option<String>,
}

#[derive(Debug, Args)]
pub struct BundleImportArgs {
    /// The bundle
    pub file: PathBuf,
    #[command(flatten)]
    pub registry: RegistryArg,
    /// Write the bundle's definitions into this directory, too
    #[arg(long, value_name = "DIR")]
    pub definitions_to: Option<PathBuf>,
    /// Replace files of that directory that differ from the bundle's
    #[arg(long, requires = "definitions_to")]
    pub overwrite: bool,
}

#[derive(Debug, Args)]
pub struct BundleInspectArgs {
    /// The bundle
    pub file: PathBuf,
    /// Read all of it, as an import does before it pushes anything
    #[arg(long)]
    pub verify: bool,
}

/// Images and kernels that are meant, with what they need.
#[derive(Debug, Args)]
pub struct CarryArgs {
    /// Kernel release, exactly as `uname -r` prints it (repeatable)
    #[arg(long, value_name = "RELEASE")]
    pub kernel: Vec<String>,
    /// Operating system id, as in os-release [default: this machine's]
    #[arg(long, value_name = "ID")]
    pub os: Option<String>,
    /// Operating system version, as VERSION_ID in os-release [default: this machine's]
    #[arg(long, value_name = "VERSION")]
    pub os_version: Option<String>,
    /// Architecture, amd64 or arm64 [default: this machine's]
    #[arg(long, value_name = "ARCH")]
    pub arch: Option<String>,
    /// The driver image's name (repeatable), with those it needs [default: all]
    #[arg(long, value_name = "IMAGE")]
    pub image: Vec<String>,
}

#[derive(Debug, Args)]
#[command(group(clap::ArgGroup::new("kernels").args(["kernel"]).required(true)))]
pub struct MirrorArgs {
    #[command(flatten)]
    pub carry: CarryArgs,
    #[command(flatten)]
    pub registry: RegistryArg,
}

#[derive(Debug, Args)]
pub struct PreflightArgs {
    /// Kernel release, exactly as `uname -r` will print it
    #[arg(long, value_name = "RELEASE")]
    pub kernel: String,
    /// Ask about this node (repeatable) [default: all]
    #[arg(long, value_name = "NAME")]
    pub node: Vec<String>,
    /// Ask about nodes with this operating system id [default: any]
    #[arg(long, value_name = "ID")]
    pub os: Option<String>,
    /// Ask about nodes with this operating system version [default: any]
    #[arg(long, value_name = "VERSION")]
    pub os_version: Option<String>,
    /// Ask about nodes of this architecture, amd64 or arm64 [default: any]
    #[arg(long, value_name = "ARCH")]
    pub arch: Option<String>,
    #[command(flatten)]
    pub registry: RegistryArg,
    #[command(flatten)]
    pub cluster: ClusterArg,
}

#[derive(Debug, Args)]
#[expect(clippy::struct_excessive_bools, reason = "flags of a command line")]
pub struct CheckArgs {
    /// Module files (.ko, .ko.gz, .ko.xz, .ko.zst), directories, and images: oci:PATH[:TAG|@DIGEST] for a
    /// layout directory, docker:REF for the local engine, host/repository:tag for a registry
    #[arg(required = true, value_name = "SUBJECT")]
    pub subjects: Vec<String>,
    #[command(flatten)]
    pub target: CheckTargetArgs,
    /// The registry whose store has imported headers, and that may be asked with --offline: host[:port]/path, or oci:PATH
    #[arg(long, env = vars::FARRIER_REGISTRY, value_name = "LOCATION", hide_env_values = true)]
    pub registry: Option<String>,
    /// A root with the kernel's headers at their natural paths, such as / [default: as in a build]
    #[arg(long, value_name = "DIR")]
    pub headers: Option<PathBuf>,
    /// Check against the kernel that this machine runs, and what it says itself
    #[arg(long, conflicts_with_all = ["kernel", "headers", "kernel_image", "fetch_kernel_image"])]
    pub host: bool,
    /// Take further facts from this kernel image (vmlinuz or vmlinux)
    #[arg(long, value_name = "FILE")]
    pub kernel_image: Option<PathBuf>,
    /// Fetch the kernel's own image, as its family says, when the headers leave something unknown; one that is
    /// in the cache is used in any case
    #[arg(long, conflicts_with = "kernel_image")]
    pub fetch_kernel_image: bool,
    /// What the modules may use beside the kernel: a Module.symvers, or a directory that holds one (repeatable)
    #[arg(long, value_name = "PATH")]
    pub needs: Vec<PathBuf>,
    /// Boot the kernel in a virtual machine (QEMU) too, and load the modules there. Its image is what --kernel-image
    /// names, else what the family says; with --host it is this machine's
    #[arg(long)]
    pub boot: bool,
    /// Exit with 1 also when a verdict is unknown
    #[arg(long)]
    pub deny_unknown: bool,
}

/// The kernel to check against. What is not said is found out where possible.
#[derive(Debug, Args)]
pub struct CheckTargetArgs {
    /// Kernel release, exactly as `uname -r` prints it [default: the one that --kernel-image, --headers or the
    /// checked image is for]
    #[arg(long, value_name = "RELEASE")]
    pub kernel: Option<String>,
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

impl CheckTargetArgs {
    /// The target's arguments, once it is known which kernel.
    pub fn with_kernel(&self, kernel: &str) -> TargetArgs {
        let Self { kernel: _, os, os_version, arch } = self;
        TargetArgs {
            kernel: kernel.to_owned(),
            os: os.clone(),
            os_version: os_version.clone(),
            arch: arch.clone(),
        }
    }
}

#[derive(Debug, Args)]
pub struct RunArgs {
    #[command(flatten)]
    pub registry: RegistryArg,
    #[command(flatten)]
    pub cluster: ClusterArg,
    #[command(flatten)]
    pub engine: EngineArg,
    /// One pass, then exit
    #[arg(long)]
    pub once: bool,
    /// Print what the run would do, and touch nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Seconds after which everything is looked up anew at the latest [default: 30 with dir:PATH, 60 with kube]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..), conflicts_with = "once")]
    pub interval: Option<u64>,
    #[command(flatten)]
    pub limits: LimitArgs,
    #[command(flatten)]
    pub service: ServiceArgs,
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

/// What a run without --once has around it.
#[derive(Debug, Args)]
pub struct ServiceArgs {
    /// Of several farriers with the same lease, let one build and write [default: in a pod, with --cluster kube]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub leader_elect: Option<bool>,
    /// The lease's name
    #[arg(long, value_name = "NAME", default_value = "farrier")]
    pub lease_name: String,
    /// The lease's namespace [default: farrier's own]
    #[arg(long, value_name = "NAMESPACE")]
    pub lease_namespace: Option<String>,
    /// Answer /metrics, /healthz and /readyz on this address, or `off` [default: 0.0.0.0:8080 in a pod with
    /// --cluster kube, else off]
    #[arg(long, env = vars::FARRIER_LISTEN, value_name = "ADDRESS", hide_env_values = true)]
    pub listen: Option<String>,
}

#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// The image: host/repository:tag or @sha256:..., oci:PATH:NAME:TAG of a layout directory, or with --registry NAME:TAG
    #[arg(value_name = "IMAGE")]
    pub image: String,
    /// A public key, PEM, of which one must have signed; may be repeated [default: those of policy.requireSigned in
    /// site.yaml, else that of imageSigning]
    #[arg(long, value_name = "PEM")]
    pub key: Vec<PathBuf>,
    /// Read every blob and compare its digest, rather than ask whether it is there
    #[arg(long)]
    pub deep: bool,
    /// Where the image is published: host[:port]/path, or oci:PATH for a layout directory
    #[arg(long, env = vars::FARRIER_REGISTRY, value_name = "LOCATION", hide_env_values = true)]
    pub registry: Option<String>,
}

#[derive(Debug, Args)]
pub struct RollbackArgs {
    /// What to roll back: namespace/name of a DaemonSet, Kind/name of an operator's resource
    /// [default: everything that farrier has set]
    #[arg(value_name = "OBJECT")]
    pub objects: Vec<String>,
    /// The cluster
    #[arg(long, env = vars::FARRIER_CLUSTER, value_name = "CLUSTER", default_value = "kube", hide_env_values = true)]
    pub cluster: String,
    /// Print what would be put back, and touch nothing
    #[arg(long)]
    pub dry_run: bool,
}

#[derive(Debug, Args)]
pub struct GcArgs {
    #[command(flatten)]
    pub registry: RegistryArg,
    #[command(flatten)]
    pub cluster: ClusterArg,
    /// Days that an image outlives the last node with its kernel
    #[arg(long, value_name = "DAYS", default_value_t = 30)]
    pub keep_days: u32,
    /// Look at this image as well, whose definition is gone (repeatable)
    #[arg(long, value_name = "IMAGE")]
    pub image: Vec<String>,
    /// Delete
    #[arg(long)]
    pub delete: bool,
}

#[derive(Debug, Args)]
pub struct SchemaArgs {
    /// The kind of document
    #[arg(value_enum, default_value_t = SchemaKind::DriverImage)]
    pub kind: SchemaKind,
}

/// Forms of a list of builds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MatrixForm {
    /// {"include": [...]} for strategy.matrix of GitHub Actions
    Github,
    /// A job `build` with parallel: matrix, for a child pipeline of GitLab CI
    Gitlab,
    /// An array of strings for a Tekton matrix: image, kernel, OS, OS version, architecture with blanks between them
    Tekton,
    /// The same, one on each line
    Lines,
}

impl From<MatrixForm> for plan::MatrixForm {
    fn from(form: MatrixForm) -> Self {
        match form {
            MatrixForm::Github => Self::Github,
            MatrixForm::Gitlab => Self::Gitlab,
            MatrixForm::Tekton => Self::Tekton,
            MatrixForm::Lines => Self::Lines,
        }
    }
}

/// Documents with a schema.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SchemaKind {
    /// images/*.yaml
    DriverImage,
    /// kernels/*.yaml
    KernelFamily,
    /// announced/*.yaml
    AnnouncedKernels,
    /// site.yaml
    Site,
    /// What `farrier check -o json` prints
    CheckReport,
    /// The CustomResourceDefinition of DriverBuild, as YAML for `kubectl apply`
    Crd,
}
