//! `driver-entrypoint`: the program in farrier's driver containers. The first argument selects a driver's personality,
//! a helper command such as `forecast`, or `boot-check`. `boot-check` is the init process of the virtual machine in
//! which farrier loads modules. The program uses no shell. Its only use of the network is to see whether API
//! servers answer.
#![forbid(unsafe_code)]

mod blacklist;
mod boot_check;
mod connectivity;
mod devices;
mod disruption;
mod error;
mod failure;
mod files;
mod firmware;
mod forecast;
mod guard;
mod host_modules;
mod ibdev;
mod isolated;
mod kernel;
mod kmsg;
mod lock;
mod log;
mod logind;
mod module_file;
mod modules;
mod mountinfo;
mod mounts;
mod node;
mod personality;
mod pod_interfaces;
mod program;
mod routes;
mod selinux;
mod signals;
mod storage;
#[cfg(test)]
mod testing;

use std::{env, path::Path, process::ExitCode};

use driver_entrypoint::holders::DRIVER_POD;
use guard::install;
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
       driver-entrypoint swap-guard install|serve
       driver-entrypoint boot-check";

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (program, arguments) = arguments.split_first().unwrap_or((&"", &[]));
    let program = Path::new(program).file_name().and_then(|name| name.to_str());
    let link = program.filter(|name| LINKS.contains(name));
    let arguments: Vec<&str> = link.into_iter().chain(arguments.iter().copied()).collect();
    run(&arguments).unwrap_or_else(|message| {
        print_error(&message);
        ExitCode::from(2)
    })
}

/// Dispatches on the first argument. The error is a usage message.
fn run(arguments: &[&str]) -> Result<ExitCode, String> {
    let variable = |name: &str| env::var(name).ok();
    Ok(match *arguments {
        ["boot-check"] => boot_check::main(),
        [isolated::LOAD, path, parameters] => {
            isolated::end_with_parent();
            isolated::exit_with(kernel::insert_file(Path::new(path), parameters, 0))
        }
        [isolated::UNLOAD, name] => isolated::exit_with(kernel::remove(name)),
        ["mofed", ref rest @ ..] => {
            let settings = mofed::Settings::read(rest, variable)?;
            personality::run(|node, signals| mofed::run(node, &settings, signals))
        }
        ["generic", ref rest @ ..] => {
            let options = generic::Options::read(rest, variable)
                .map_err(|message| format!("{message}\n{}", generic::USAGE))?;
            personality::run(|node, signals| generic::run(node, &options, signals))
        }
        ["forecast", ref rest @ ..] => {
            let allowed = disruption::read_allowed(variable)?;
            let request = forecast::ForecastRequest::parse(rest, variable(DRIVER_POD), allowed)
                .ok_or(forecast::USAGE)?;
            personality::run_with_message(|node, _| forecast::run(node, &request))
        }
        ["nvidia-driver", ref rest @ ..] => nvidia::main(rest, variable)?,
        ["nv-peer-mem", ref rest @ ..] => {
            let companion = Companion::nv_peer_mem(rest, variable).ok_or(companion::USAGE)?;
            personality::run(|node, signals| companion.run(node, signals))
        }
        [program @ ("nvidia-gds-driver" | "nvidia-gdrcopy-driver"), ref rest @ ..] => {
            let companion = Companion::install(program, rest).ok_or(companion::INSTALL_USAGE)?;
            personality::run(|node, signals| companion.run(node, signals))
        }
        ["ocp_dtk_entrypoint", ref rest @ ..] => match toolkit::role_arguments(rest)? {
            None => personality::run(|node, signals| toolkit::wait(node, signals)),
            Some(arguments) => {
                // If this fails, the log contains the reason and the toolkit's container waits in vain. The driver itself
                // does not need that container.
                let _ = personality::run(|node, _| toolkit::provide_program(node));
                return run(&arguments);
            }
        },
        ["ibdev2netdev", ..] => ibdev::main(),
        ["swap-guard", ref rest @ ..] => run_guard(rest)?,
        _ => return Err(USAGE.to_owned()),
    })
}

/// Runs the guard or its installation.
fn run_guard(arguments: &[&str]) -> Result<ExitCode, &'static str> {
    Ok(match *arguments {
        ["serve"] => personality::run(|node, signals| guard::serve(node, false, signals)),
        ["serve", guard::REBOOT] => personality::run(|node, signals| guard::serve(node, true, signals)),
        ["install", ref rest @ ..] => {
            let installation = install::Installation::parse(rest).ok_or(guard::USAGE)?;
            personality::run(|node, signals| install::install(node, installation, signals))
        }
        [install::ON_HOST, root, program, ref rest @ ..] => install::run_on_host(root, program, rest),
        _ => return Err(guard::USAGE),
    })
}

/// Writes a line to the container's log or to the virtual machine's console.
#[allow(clippy::print_stderr)]
fn print_error(message: &str) {
    eprintln!("driver-entrypoint: {message}");
}
