//! Options of what checks modules and images.

use std::path::PathBuf;

use clap::Args;

use super::PlatformArgs;
use crate::cli::env_vars as vars;

#[derive(Debug, Args)]
#[expect(clippy::struct_excessive_bools, reason = "flags of a command line")]
pub struct CheckArgs {
    /// Module files (.ko, .ko.gz, .ko.xz, .ko.zst), directories, and images: oci:PATH[:TAG|@DIGEST] for a
    /// layout directory, docker:REF for the local engine, host/repository:tag for a registry
    #[arg(required = true, value_name = "SUBJECT")]
    pub subjects: Vec<String>,
    /// Kernel release, exactly as `uname -r` prints it [default: the one that --kernel-image, --headers or the
    /// checked image is for]
    #[arg(long, value_name = "RELEASE")]
    pub kernel: Option<String>,
    #[command(flatten)]
    pub platform: PlatformArgs,
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
