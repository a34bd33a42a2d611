//! Loads and unloads modules, each in a process of its own: when the kernel oopses it kills the process that
//! it worked for, and that must not be the one that reports.

use std::{
    ffi::CString,
    fs::{self, File},
    io,
    os::unix::process::ExitStatusExt,
    process::{Command, ExitCode, exit},
};

use driver_entrypoint::report::{Ended, ReadBack};
use rustix::{
    fs::OFlags,
    io::Errno,
    system::{delete_module, finit_module},
};

/// First argument of the process that loads a module: its file and its parameters follow.
pub(crate) const LOAD: &str = "load-module";
/// First argument of the process that unloads a module: its name follows.
pub(crate) const UNLOAD: &str = "unload-module";

/// Loads a module file.
pub(crate) fn load(path: &str, parameters: &str) -> io::Result<Ended> {
    in_a_process(&[LOAD, path, parameters])
}

/// Unloads a module; one that is in use, or that has no exit function, is left alone.
pub(crate) fn unload(name: &str) -> io::Result<Ended> {
    in_a_process(&[UNLOAD, name])
}

/// What `load` starts.
pub(crate) fn load_and_exit(path: &str, parameters: &str) -> ExitCode {
    let load = || {
        let parameters = CString::new(parameters).map_err(|_| Errno::INVAL)?;
        let file = File::open(path).map_err(|error| errno(&error))?;
        finit_module(file, &parameters, 0)
    };
    exit_with(load())
}

/// What `unload` starts.
pub(crate) fn unload_and_exit(name: &str) -> ExitCode {
    // What it means is in kernel/module/main.c: try_stop_module() does not wait, and says EWOULDBLOCK.
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let name = CString::new(name).map_err(|_| Errno::INVAL);
    exit_with(name.and_then(|name| delete_module(&name, flags)))
}

/// What user space sees of a module.
pub(crate) fn read_back(name: &str) -> ReadBack {
    let attribute = |file: &str| {
        let text = fs::read_to_string(format!("/sys/module/{name}/{file}")).unwrap_or_default();
        text.trim_end().to_owned()
    };
    let modules = fs::read_to_string("/proc/modules").unwrap_or_default();
    ReadBack {
        listed: modules.lines().any(|line| line.split(' ').next() == Some(name)),
        state: attribute("initstate"),
        source_version: attribute("srcversion"),
        taint: attribute("taint"),
    }
}

/// The kernel's `errno` values fit into an exit code: 133 is the highest that a system call answers.
fn exit_with(result: Result<(), Errno>) -> ! {
    exit(result.map_or_else(Errno::raw_os_error, |()| 0))
}

fn in_a_process(arguments: &[&str]) -> io::Result<Ended> {
    let status = Command::new("/proc/self/exe").args(arguments).status()?;
    Ok(match (status.code(), status.signal()) {
        (Some(0), _) => Ended::Done,
        (Some(number), _) => Ended::Error(number),
        (None, signal) => Ended::Killed(signal.unwrap_or_default()),
    })
}

fn errno(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}
