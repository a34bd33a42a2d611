//! `farrier-host`: lets a host boot a new kernel only when the host's drivers for it are there, and loads the drivers from
//! verified system extensions at each boot.
//!
//! The boot loader's default stays a kernel whose drivers have loaded. Once all drivers of a newer kernel are stored, that
//! kernel is booted once, on trial. If its drivers load, it becomes the default. If not, the next boot returns to the old kernel.
#![forbid(unsafe_code)]

mod artifacts;
mod boot_loader;
mod commands;
mod config;
mod error;
mod extensions;
mod gate;
mod host;
mod kernels;
mod log;
mod node_labels;
mod state;

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::{Parser, Subcommand};

use error::{Error, Result};
use host::Host;
use log::print_error;

/// Keeps a host on its kernel until the drivers for the next one are there
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
    /// File that names the host's drivers
    #[arg(long, global = true, env = "FARRIER_HOST_CONFIG", default_value = "/etc/farrier/host.yaml")]
    config: PathBuf,
}

#[derive(Subcommand)]
enum Command {
    /// Fetch drivers for newer kernels; boot one of them once when it has all of them
    Reconcile,
    /// Make the running kernel the boot loader's default
    Pin,
    /// Keep the default after a kernel package was installed or replaced
    KeepDefault,
    /// At boot: verify the running kernel's drivers, merge them into /usr and load them
    Activate,
    /// Take the drivers' files out of /usr, so that dpkg can write there; their modules stay loaded
    Unmerge {
        /// Process of the dpkg that runs `merge` at its end; after its failure, `reconcile` merges the files
        dpkg: Option<u32>,
    },
    /// Merge the drivers' files into /usr again
    Merge,
    /// Late in the boot: make the running kernel the default if its drivers are loaded, else go back to the default
    Confirm,
    /// Fetch a kernel's drivers again, and try it again if its first boot failed
    Retry {
        /// Kernel release
        release: String,
    },
    /// Import drivers from a farrier bundle, without a network
    Import {
        /// The bundle
        bundle: PathBuf,
    },
    /// Print the kernels, and why newer ones are held
    Status {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

fn main() -> ExitCode {
    match run(Arguments::parse()) {
        Ok(code) => code,
        Err(error) => {
            print_error(format!("error: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: Arguments) -> Result<ExitCode> {
    let host = || Host::open(&arguments.config);
    match arguments.command {
        Command::Pin => host::pin()?,
        Command::KeepDefault => host::keep_default()?,
        Command::Unmerge { dpkg } => extensions::unmerge(dpkg)?,
        Command::Merge => extensions::merge_again(&kernels::running()?, false)?,
        Command::Activate => return at_boot(&arguments.config, Host::activate),
        Command::Confirm => return at_boot(&arguments.config, Host::confirm),
        Command::Reconcile => host()?.reconcile()?,
        Command::Retry { release } => host()?.retry(&release)?,
        Command::Import { bundle } => host()?.import(&bundle)?,
        Command::Status { json } => host()?.print_status(json)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs a step of the boot. An unreadable configuration is a failure of the boot, too: it ends a trial of the running kernel.
fn at_boot(config: &Path, step: impl FnOnce(&Host) -> Result<ExitCode>) -> Result<ExitCode> {
    match Host::open(config) {
        Ok(host) => step(&host),
        Err(error) => host::fail_boot(&kernels::running()?, &error),
    }
}
