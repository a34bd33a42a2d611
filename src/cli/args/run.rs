//! Options of the loop, and of what undoes and tidies.

use clap::Args;

use super::{ClusterArg, EngineArg, RegistryArg};
use crate::cli::env_vars as vars;
use crate::image::{Cpus, Memory};

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
