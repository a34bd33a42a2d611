//! The commands, as clap parses them.

use std::path::PathBuf;

use clap::{Parser, Subcommand};

use super::{
    args::Global,
    build::BuildArgs,
    bundle::BundleCommand,
    check::CheckArgs,
    doctor::DoctorArgs,
    gc::GcArgs,
    headers::HeadersCommand,
    init::InitArgs,
    logs::LogsArgs,
    mirror::MirrorArgs,
    plan::{PlanCommandArgs, StatusArgs},
    prebuild::PrebuildArgs,
    preflight::PreflightArgs,
    render::RenderArgs,
    retry::RetryArgs,
    rollback::RollbackArgs,
    run::RunArgs,
    schema::SchemaArgs,
    ui::UiArgs,
    upgrade::UpgradeCommand,
    verify::VerifyArgs,
    why::WhyArgs,
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

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Make a definitions directory from what the cluster and other tools' files say, with comments for newcomers
    Init(InitArgs),
    /// Show what would be built and rolled out, and why
    Plan(PlanCommandArgs),
    /// Print the Dockerfile of one image for one kernel
    Render(RenderArgs),
    /// Fetch, import, collect and list header sets
    #[command(subcommand)]
    Headers(HeadersCommand),
    /// Build, check and, with --push, publish one image for one kernel
    Build(BuildArgs),
    /// Print what was printed in the newest build of one image for one kernel, also while it runs
    Logs(LogsArgs),
    /// Build again what failed, though no input has changed
    Retry(RetryArgs),
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
    Status(StatusArgs),
    /// Open the page of the fleet in a browser: what is wrong, which nodes are at risk, images by kernels
    Ui(UiArgs),
    /// Say why a node gets its images, or why an image stands for a kernel as it does, from labels to image fields
    Why(WhyArgs),
    /// Put back what was there before farrier's rewrites
    Rollback(RollbackArgs),
    /// Upgrades in order (`upgrade` of a rollout): show the plan, pause, go on, give up
    #[command(subcommand)]
    Upgrade(UpgradeCommand),
    /// Remove published images for kernels that no node has any more; without --delete only say which
    Gc(GcArgs),
    /// Look at this machine, the registry and the cluster for what farrier would lack there, and say what to do about it
    Doctor(DoctorArgs),
    /// Print the JSON Schema of a definition
    Schema(SchemaArgs),
    /// Print what a shell reads at its start to complete commands, options, and names of images, kernels and nodes
    ///
    /// bash: `source <(farrier completions bash)` in ~/.bashrc; zsh: the same with `zsh` in ~/.zshrc, after `compinit`; fish:
    /// `farrier completions fish | source` in ~/.config/fish/config.fish. Names of images come from --definitions, those of kernels and
    /// nodes from --cluster, as far as the command line or the environment names them; a live cluster has two seconds to answer.
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Write a man page for each command into a directory
    Man {
        /// The directory, such as /usr/local/share/man/man1
        #[arg(value_name = "DIR")]
        directory: PathBuf,
    },
}
