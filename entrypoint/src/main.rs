//! `driver-entrypoint`: what runs inside farrier's driver containers. The first argument is what it is:
//! `boot-check`, the init process of a virtual machine in which farrier loads modules. No shell, no network.
#![forbid(unsafe_code)]

mod boot_check;
mod kmsg;
mod modules;

use std::{env, process::ExitCode};

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["boot-check"] => boot_check::main(),
        [modules::LOAD, path, parameters] => modules::load_and_exit(path, parameters),
        [modules::UNLOAD, name] => modules::unload_and_exit(name),
        _ => {
            complain("usage: driver-entrypoint boot-check");
            ExitCode::from(2)
        }
    }
}

/// Writes a line for people: to the container's log, or to the virtual machine's console.
#[allow(clippy::print_stderr)]
fn complain(message: &str) {
    eprintln!("driver-entrypoint: {message}");
}
