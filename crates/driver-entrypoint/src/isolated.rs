//! Loads and unloads modules, each in a process of its own: when the kernel oopses it kills the process that
//! it worked for, and that must not be the one that reports.

use std::{
    fs, io,
    os::unix::process::ExitStatusExt,
    process::{Command, exit},
};

use driver_entrypoint::report::{Ended, ReadBack};
use rustix::io::Errno;

use crate::files;

/// First argument of the process that loads a module: its file and its parameters follow.
pub(crate) const LOAD: &str = "load-module";
/// First argument of the process that unloads a module, unless it is in use or has no exit function: its name follows.
pub(crate) const UNLOAD: &str = "unload-module";

/// What user space sees of a module.
pub(crate) fn read_back(name: &str) -> ReadBack {
    let attribute = |file: &str| files::text(format!("/sys/module/{name}/{file}")).unwrap_or_default();
    let modules = fs::read_to_string("/proc/modules").unwrap_or_default();
    ReadBack {
        listed: modules.lines().any(|line| line.split(' ').next() == Some(name)),
        state: attribute("initstate"),
        source_version: attribute("srcversion"),
        taint: attribute("taint"),
    }
}

/// Ends such a process. The kernel's `errno` values fit into an exit code: 133 is the highest that a system call answers.
pub(crate) fn exit_with(result: Result<(), Errno>) -> ! {
    exit(result.map_or_else(Errno::raw_os_error, |()| 0))
}

/// Runs one, and tells how it ended.
pub(crate) fn in_a_process(arguments: &[&str]) -> io::Result<Ended> {
    let status = Command::new("/proc/self/exe").args(arguments).status()?;
    Ok(match (status.code(), status.signal()) {
        (Some(0), _) => Ended::Done,
        (Some(number), _) => Ended::Error(number),
        (None, signal) => Ended::Killed(signal.unwrap_or_default()),
    })
}
