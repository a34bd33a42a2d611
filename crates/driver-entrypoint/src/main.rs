//! `driver-entrypoint`: the program in farrier's driver containers. The first argument selects a driver's personality,
//! a helper command such as `forecast`, or `boot-check`. `boot-check` is the init process of the virtual machine in
//! which farrier loads modules. The program uses no shell and no network.
#![forbid(unsafe_code)]

mod blacklist;
mod boot_check;
mod devices;
mod disruption;
mod error;
mod failure;
mod files;
mod firmware;
mod forecast;
mod ibdev;
mod isolated;
mod kernel;
mod kmsg;
mod lock;
mod log;
mod logind;
mod module_file;
mod modules;
mod mounts;
mod node;
mod personality;
mod pods;
mod routes;
mod signals;
mod storage;
mod taken_out;
#[cfg(test)]
mod testing;

use std::{env, path::Path, process::ExitCode};

use disruption::Allowed;
use driver_entrypoint::holders::DRIVER_POD;
use personality::{
    generic, mofed,
    nvidia::{
        self,
        companion::{self, Companion},
        toolkit,
    },
};

/// Names of links in the image that select a personality by the program's name, as the operators' manifests call them.
const LINKS: [&str; 5] =
    ["nvidia-driver", "nvidia-gds-driver", "nvidia-gdrcopy-driver", "ocp_dtk_entrypoint", "ibdev2netdev"];

const USAGE: &str = "usage: driver-entrypoint mofed [--expose-root]
       driver-entrypoint nvidia-driver COMMAND [OPTION...]
       driver-entrypoint nv-peer-mem [--ready-file PATH]
       driver-entrypoint nvidia-gds-driver install
       driver-entrypoint nvidia-gdrcopy-driver install
       driver-entrypoint ocp_dtk_entrypoint ROLE
       driver-entrypoint ibdev2netdev
       driver-entrypoint generic [OPTION...] [MODULE...]
       driver-entrypoint forecast [--message PATH] MODULE...
       driver-entrypoint boot-check";

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (called, arguments) = arguments.split_first().unwrap_or((&"", &[]));
    let called = Path::new(called).file_name().and_then(|name| name.to_str());
    let link = called.filter(|name| LINKS.contains(name));
    let words: Vec<&str> = link.into_iter().chain(arguments.iter().copied()).collect();
    run(&words)
}

/// Dispatches on the first argument.
fn run(words: &[&str]) -> ExitCode {
    let variable = |name: &str| env::var(name).ok();
    match *words {
        ["boot-check"] => boot_check::main(),
        [isolated::LOAD, path, parameters] => {
            isolated::exit_with(kernel::insert_file(Path::new(path), parameters, 0))
        }
        [isolated::UNLOAD, name] => isolated::exit_with(kernel::remove(name)),
        ["mofed", ref rest @ ..] => match mofed::Settings::read(rest, variable) {
            Ok(settings) => personality::run(|node, signals| mofed::run(node, &settings, signals)),
            Err(message) => misused(&message),
        },
        ["generic", ref rest @ ..] => match generic::Options::read(rest, variable) {
            Ok(options) => personality::run(|node, signals| generic::run(node, &options, signals)),
            Err(message) => misused(&format!("{message}\n{}", generic::USAGE)),
        },
        ["forecast", ref rest @ ..] => match Allowed::read(variable) {
            Ok(allowed) => match forecast::Question::parse(rest, variable(DRIVER_POD), allowed) {
                Some(question) => personality::run(|node, _| forecast::run(node, &question)),
                None => misused(forecast::USAGE),
            },
            Err(message) => misused(&message),
        },
        ["nvidia-driver", ref rest @ ..] => {
            nvidia::main(rest, variable).unwrap_or_else(|message| misused(&message))
        }
        ["nv-peer-mem", ref rest @ ..] => {
            beside_driver(Companion::nv_peer_mem(rest, variable), companion::USAGE)
        }
        [program @ ("nvidia-gds-driver" | "nvidia-gdrcopy-driver"), ref rest @ ..] => {
            beside_driver(Companion::install(program, rest), companion::INSTALL_USAGE)
        }
        ["ocp_dtk_entrypoint", ref rest @ ..] => match toolkit::words(rest) {
            Ok(None) => personality::run(|node, signals| toolkit::wait(node, signals)),
            Ok(Some(words)) => {
                // If this fails, the toolkit's container waits in vain and the log says why. The driver itself needs
                // nothing from that container.
                let _ = personality::run(|node, _| toolkit::hand_over(node));
                run(&words)
            }
            Err(message) => misused(&message),
        },
        ["ibdev2netdev", ..] => ibdev::main(),
        _ => misused(USAGE),
    }
}

fn beside_driver(companion: Option<Companion<'_>>, usage: &str) -> ExitCode {
    match companion {
        Some(companion) => personality::run(|node, signals| companion.run(node, signals)),
        None => misused(usage),
    }
}

fn misused(message: &str) -> ExitCode {
    complain(message);
    ExitCode::from(2)
}

/// Writes a line to the container's log or to the virtual machine's console.
#[allow(clippy::print_stderr)]
fn complain(message: &str) {
    eprintln!("driver-entrypoint: {message}");
}
