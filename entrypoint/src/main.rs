//! `driver-entrypoint`: what runs inside farrier's driver containers. The first argument is what it is: a driver's
//! personality, or `boot-check`, the init process of a virtual machine in which farrier loads modules. No shell, no
//! network.
#![forbid(unsafe_code)]

mod boot_check;
mod fault;
mod files;
mod isolated;
mod kernel;
mod kmsg;
mod lock;
mod log;
mod modules;
mod mounts;
mod node;
mod paths;
mod personality;
mod signals;
#[cfg(test)]
mod testing;

use std::{env, process::ExitCode};

use personality::{generic, mofed};

const USAGE: &str = "usage: driver-entrypoint mofed [--expose-root]
       driver-entrypoint generic [--keep] MODULE...
       driver-entrypoint boot-check";

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["boot-check"] => boot_check::main(),
        [isolated::LOAD, path, parameters] => isolated::load_and_exit(path, parameters),
        [isolated::UNLOAD, name] => isolated::unload_and_exit(name),
        ["mofed", ref rest @ ..] => match mofed::Settings::read(rest, |name| env::var(name).ok()) {
            Ok(settings) => personality::run(|node, signals| mofed::run(node, &settings, signals)),
            Err(message) => misused(&message),
        },
        ["generic", ref rest @ ..] => match generic::Options::parse(rest) {
            Some(options) => personality::run(|node, signals| generic::run(node, &options, signals)),
            None => misused(USAGE),
        },
        _ => misused(USAGE),
    }
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
