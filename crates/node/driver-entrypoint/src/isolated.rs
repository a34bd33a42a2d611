//! Loads and unloads each module in a separate child process. A kernel oops kills the process that made the system call;
//! this program must survive to report the oops.

use std::{
    fs, io,
    os::unix::process::ExitStatusExt,
    process::{Command, exit},
};

use driver_entrypoint::report::{ReadBack, SyscallResult};
use rustix::io::Errno;

use crate::files;

/// First argument of the process that loads a module; the module's file and parameters follow.
pub(crate) const LOAD: &str = "load-module";
/// First argument of the process that unloads a module; the module's name follows. The unload fails if the module is in
/// use or has no exit function.
pub(crate) const UNLOAD: &str = "unload-module";

/// Reads the module's state as user space sees it in `/proc/modules` and `/sys/module`.
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

/// Ends the child process with the `errno` as its exit code, or with 0 on success. Exit codes have 8 bits, and the highest
/// `errno` is 133.
pub(crate) fn exit_with(result: Result<(), Errno>) -> ! {
    exit(result.map_or_else(Errno::raw_os_error, |()| 0))
}

/// Runs this program with the arguments as a child process, and returns how the process ended.
pub(crate) fn run_child(arguments: &[&str]) -> io::Result<SyscallResult> {
    let status = Command::new("/proc/self/exe").args(arguments).status()?;
    Ok(match (status.code(), status.signal()) {
        (Some(0), _) => SyscallResult::Success,
        (Some(number), _) => SyscallResult::Errno(number),
        (None, signal) => SyscallResult::Killed(signal.unwrap_or_default()),
    })
}
