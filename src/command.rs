//! The commands, in clap's derive form.

use std::path::PathBuf;

use clap::{Parser, Subcommand};

#[cfg(feature = "gc")]
use super::gc::GcArgs;
#[cfg(feature = "migrate")]
use super::init::InitArgs;
#[cfg(feature = "host-artifacts")]
use super::pull::PullArgs;
#[cfg(feature = "radar")]
use super::radar::RadarArgs;
#[cfg(feature = "dashboard")]
use super::ui::UiArgs;
use super::{
    args::Global,
    build::BuildArgs,
    check::CheckArgs,
    doctor::DoctorArgs,
    headers::HeadersCommand,
    lint::LintArgs,
    logs::LogsArgs,
    plan::{PlanCommandArgs, StatusArgs},
    prebuild::PrebuildArgs,
    preflight::PreflightArgs,
    render::RenderArgs,
    retry::RetryArgs,
    rollback::RollbackArgs,
    rotate::RotateArgs,
    run::RunArgs,
    schema::SchemaArgs,
    upgrade::UpgradeCommand,
    verify::VerifyArgs,
    why::WhyArgs,
};
#[cfg(feature = "bundle")]
use super::{bundle::BundleCommand, mirror::MirrorArgs};

#[cfg(feature = "migrate")]
const INIT_EXAMPLES: &str = "\
Examples:
  farrier init --source ./hello --cluster dir:cluster --registry registry.example/drivers
  farrier init --driver mofed --cluster kube --registry registry.example/drivers
  farrier init mine --from module.yaml --source acme --cluster kube --registry oci:images";
const PLAN_EXAMPLES: &str = "\
Examples:
  farrier plan --cluster kube --registry oci:images --definitions definitions
  farrier plan --cluster dir:cluster --registry oci:images --exit-code
  farrier plan --cluster kube --registry registry.example/drivers --matrix github";
const BUILD_EXAMPLES: &str = "\
Examples:
  farrier build hello --kernel 6.1.0-56-amd64 --definitions definitions
  farrier build hello --kernel 6.1.0-56-amd64 --registry registry.example/drivers --push";
const CHECK_EXAMPLES: &str = "\
Examples:
  farrier check hello.ko --host
  farrier check registry.example/drivers/hello:1.0 --kernel 6.1.0-56-amd64
  farrier check --explain vermagic";
const RUN_EXAMPLES: &str = "\
Examples:
  farrier run --once --cluster dir:cluster --registry oci:images --definitions definitions
  farrier run --once --dry-run --cluster kube --registry registry.example/drivers
  farrier run --cluster kube --write-namespaces drivers --registry registry.example/drivers";
#[cfg(feature = "host-artifacts")]
const PULL_EXAMPLES: &str = "\
Examples:
  farrier pull deb hello --kernel 6.1.0-56-amd64 --registry registry.example/drivers
  farrier pull deb registry.example/drivers/hello:1.0 --key site.pub --to hello.deb";
#[cfg(feature = "bundle")]
const BUNDLE_EXAMPLES: &str = "\
Examples:
  farrier bundle export --kernel 6.1.0-56-amd64 --registry oci:images --to site.tar
  farrier bundle inspect site.tar --key exporter.pub
  farrier bundle import site.tar --key exporter.pub --registry registry.site/drivers";

/// Builds, checks, publishes and rolls out driver-container images for the kernels of a Kubernetes fleet.
///
/// Results go to standard output; progress and logs to standard error.
/// Exit codes: 0 done; 1 some target failed; 2 the command, the configuration or a definition is wrong; 3 an
/// outside system could not be reached; 130 interrupted. `run` without --once exits with 0 on SIGTERM, which
/// is how services are stopped.
#[derive(Debug, Parser)]
#[command(name = "farrier", version, propagate_version = true, max_term_width = 100)]
pub struct Cli {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Draft a definitions directory from the cluster and other tools' files, with comments for newcomers
    #[cfg(feature = "migrate")]
    #[command(after_help = INIT_EXAMPLES)]
    Init(InitArgs),
    /// Validate definitions, without a network; exits with 1 if there are mistakes
    Lint(LintArgs),
    /// Show what would be built and rolled out, and why
    #[command(after_help = PLAN_EXAMPLES)]
    Plan(PlanCommandArgs),
    /// Print the Dockerfile of one image for one kernel
    Render(RenderArgs),
    /// Fetch, import, collect and list header sets
    #[command(subcommand)]
    Headers(HeadersCommand),
    /// Build, check and, with --push, publish one image for one kernel
    #[command(after_help = BUILD_EXAMPLES)]
    Build(BuildArgs),
    /// Show the log of the latest build of an image for a kernel, also while it runs
    ///
    /// A terminal shows the beginning of each step's command; with -o wide, all of it.
    Logs(LogsArgs),
    /// Build images for later kernels, and name the header changes behind failures
    #[cfg(feature = "radar")]
    Radar(RadarArgs),
    /// Retry a failed build whose inputs have not changed
    Retry(RetryArgs),
    /// Build and publish images for a kernel before a node runs it
    Prebuild(PrebuildArgs),
    /// Check that all images that nodes need for a kernel are published; exits with 1 if one is missing
    Preflight(PreflightArgs),
    /// Copy everything that images are made from into the registry, so that an air-gapped site can build them
    ///
    /// Copies sources, header sets, root file systems, images of other registries and the definitions
    /// directory. Kernel images are not copied: for boot checks at the other site, put them into the
    /// definitions directory and name them as the family's `kernelImage: file`.
    #[cfg(feature = "bundle")]
    Mirror(MirrorArgs),
    /// Check whether modules or images load on a kernel
    #[command(after_help = CHECK_EXAMPLES)]
    Check(CheckArgs),
    /// Verify a published image: blobs, signature, check report, bill of materials, provenance
    Verify(VerifyArgs),
    /// Fetch and verify an output of an image, such as a package with its modules for a host
    #[cfg(feature = "host-artifacts")]
    #[command(after_help = PULL_EXAMPLES)]
    Pull(PullArgs),
    /// Carry images and everything that they are made from to an air-gapped site, in one file
    #[command(subcommand, after_help = BUNDLE_EXAMPLES)]
    #[cfg(feature = "bundle")]
    Bundle(BundleCommand),
    /// Rotate the signing key: sign with imageSigning.key everything that other trusted keys signed
    Rotate(RotateArgs),
    /// Run the control loop: observe, plan, build, check, publish, roll out
    #[command(after_help = RUN_EXAMPLES)]
    Run(RunArgs),
    /// Show the state of each image for each kernel, and the rollouts on hold
    Status(StatusArgs),
    /// Open the page of the fleet in a browser: problems, nodes at risk, images by kernel
    #[cfg(feature = "dashboard")]
    Ui(UiArgs),
    /// Explain which images a node gets and why, or the state of an image for a kernel
    Why(WhyArgs),
    /// Restore the image fields that farrier rewrote
    Rollback(RollbackArgs),
    /// Manage upgrades in order (`upgrade` of a rollout): show the plan or the history, pause, resume, abort
    #[command(subcommand)]
    Upgrade(UpgradeCommand),
    /// Remove published images for kernels that no node has any more; without --delete only list them
    #[cfg(feature = "gc")]
    Gc(GcArgs),
    /// Check this machine, the registry and the cluster for missing prerequisites, and suggest remedies
    Doctor(DoctorArgs),
    /// Print the version, the commit, the versions of formats, and the features
    Version,
    /// Print the JSON Schema of a definition
    Schema(SchemaArgs),
    /// Print a script that completes commands, options, and names of images, kernels and nodes in a shell
    ///
    /// bash: `source <(farrier completions bash)` in ~/.bashrc; zsh: the same with `zsh` in ~/.zshrc, after
    /// `compinit`; fish: `farrier completions fish | source` in ~/.config/fish/config.fish. Names of images
    /// come from --definitions, and names of kernels and nodes from --cluster, if the command line or the
    /// environment sets these options; a live cluster has two seconds to answer.
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Write a man page for each command into a directory
    Man {
        /// Output directory, such as /usr/local/share/man/man1
        #[arg(value_name = "DIR")]
        directory: PathBuf,
    },
}

impl Command {
    /// Whether the command handles cancellation itself: it cleans up or completes its work.
    pub fn cleans_up(&self) -> bool {
        match self {
            Self::Build(_) | Self::Prebuild(_) | Self::Run(_) => true,
            #[cfg(feature = "radar")]
            Self::Radar(_) => true,
            #[cfg(feature = "bundle")]
            Self::Mirror(_) => true,
            #[cfg(feature = "dashboard")]
            Self::Ui(_) => true,
            #[cfg(feature = "gc")]
            Self::Gc(_) => true,
            _ => false,
        }
    }
}
