//! Options of what makes images, and of what asks for them.

use clap::Args;

use super::{ClusterArg, EngineArg, RegistryArg, TargetArgs};
use crate::cli::env_vars as vars;

#[derive(Debug, Args)]
pub struct RenderArgs {
    /// The driver image's name
    pub image: String,
    #[command(flatten)]
    pub target: TargetArgs,
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
