//! Options of what brings headers.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::TargetArgs;
use crate::cli::env_vars as vars;

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
