//! `farrier-host`: lets a host boot a new kernel only when the host's drivers for it are there, and loads the drivers from
//! verified system extensions at each boot.
//!
//! The boot loader's default stays at a kernel that has loaded its drivers. A newer kernel boots once when all of its drivers are
//! stored. It becomes the default after they were loaded; otherwise the next boot is the old kernel's.
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

use std::{path::PathBuf, process::ExitCode};

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
    /// At boot: verify the running kernel's drivers, merge them into /usr and load them
    Activate,
    /// Take the drivers' files out of /usr, so that dpkg can write there; their modules stay loaded
    Unmerge,
    /// Merge the drivers' files into /usr again
    Merge,
    /// At boot, later: make the running kernel the default if its drivers are loaded, else go back to the default
    Confirm,
    /// Fetch the drivers again for a kernel: for one whose first boot failed, or for new versions of the drivers
    Retry {
        /// Kernel release
        release: String,
    },
    /// Take drivers from a bundle of farrier's, without a network
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
    // These need no configuration.
    match arguments.command {
        Command::Pin => return host::pin().map(|()| ExitCode::SUCCESS),
        Command::Unmerge => return extensions::unmerge().map(|()| ExitCode::SUCCESS),
        Command::Merge => return extensions::merge_again(&kernels::running()?).map(|()| ExitCode::SUCCESS),
        _ => {}
    }
    let host = Host::open(&arguments.config)?;
    match arguments.command {
        Command::Pin | Command::Unmerge | Command::Merge => {}
        Command::Reconcile => host.reconcile()?,
        Command::Activate => return host.activate(),
        Command::Confirm => return host.confirm(),
        Command::Retry { release } => host.retry(&release)?,
        Command::Import { bundle } => host.import(&bundle)?,
        Command::Status { json } => host.print_status(json)?,
    }
    Ok(ExitCode::SUCCESS)
}
