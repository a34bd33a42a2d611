//! `driver-entrypoint`: what runs inside farrier's driver containers. The first argument is what it is: a driver's
//! personality, or `boot-check`, the init process of a virtual machine in which farrier loads modules. No shell, no
//! network.
#![forbid(unsafe_code)]

mod blacklist;
mod boot_check;
mod error;
mod files;
mod firmware;
mod forecast;
mod isolated;
mod kernel;
mod kmsg;
mod lock;
mod log;
mod module_file;
mod modules;
mod mounts;
mod node;
mod personality;
mod signals;
mod taken_out;
#[cfg(test)]
mod testing;

use std::{env, path::Path, process::ExitCode};

use modules::is_module_name;
use personality::{
    generic, mofed,
    nvidia::{
        self,
        peer_memory::{self, PeerMemory},
    },
};

/// The personality that is also called by this name.
const NVIDIA_DRIVER: &str = "nvidia-driver";

const USAGE: &str = "usage: driver-entrypoint mofed [--expose-root]
       driver-entrypoint nvidia-driver COMMAND [OPTION...]
       driver-entrypoint nv-peer-mem [--ready-file PATH]
       driver-entrypoint generic [OPTION...] MODULE...
       driver-entrypoint forecast MODULE...
       driver-entrypoint boot-check";

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (called, arguments) = arguments.split_first().unwrap_or((&"", &[]));
    // The operators' manifests call it so: the image has a link of that name.
    if Path::new(called).file_name().is_some_and(|name| name == NVIDIA_DRIVER) {
        return nvidia_driver(arguments);
    }
    match *arguments {
        ["boot-check"] => boot_check::main(),
        [isolated::LOAD, path, parameters] => {
            isolated::exit_with(kernel::insert_file(Path::new(path), parameters, 0))
        }
        [isolated::UNLOAD, name] => isolated::exit_with(kernel::remove(name)),
        ["mofed", ref rest @ ..] => match mofed::Settings::read(rest, |name| env::var(name).ok()) {
            Ok(settings) => personality::run(|node, signals| mofed::run(node, &settings, signals)),
            Err(message) => misused(&message),
        },
        ["generic", ref rest @ ..] => match generic::Options::parse(rest) {
            Ok(options) => personality::run(|node, signals| generic::run(node, &options, signals)),
            Err(message) => misused(&format!("{message}\n{}", generic::USAGE)),
        },
        ["forecast", ref names @ ..]
            if names.iter().all(|name| is_module_name(name)) && !names.is_empty() =>
        {
            personality::run(|node, _| forecast::run(node, names))
        }
        ["forecast", ..] => misused(forecast::USAGE),
        [NVIDIA_DRIVER, ref rest @ ..] => nvidia_driver(rest),
        ["nv-peer-mem", ref rest @ ..] => match PeerMemory::nv_peer_mem(rest, |name| env::var(name).ok()) {
            Some(peer_memory) => personality::run(|node, signals| peer_memory.run(node, signals)),
            None => misused(peer_memory::USAGE),
        },
        _ => misused(USAGE),
    }
}

fn nvidia_driver(arguments: &[&str]) -> ExitCode {
    nvidia::main(arguments, |name| env::var(name).ok()).unwrap_or_else(|message| misused(&message))
}

fn misused(message: &str) -> ExitCode {
    complain(message);
    ExitCode::from(2)
}

/// Writes a line for people: to the container's log, or to the virtual machine's console.
#[allow(clippy::print_stderr)]
fn complain(message: &str) {
    eprintln!("driver-entrypoint: {message}");
}
