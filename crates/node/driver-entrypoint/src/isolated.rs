//! Loads and unloads each module in a separate child process. A kernel oops kills the process that made the system call;
//! this program must survive to report the oops.

use std::{
    fs, io,
    os::unix::process::ExitStatusExt,
    process::{Child, Command, ExitStatus, exit},
    sync::mpsc,
    thread,
    time::Duration,
};

use driver_entrypoint::report::{ReadBack, SyscallResult};
use rustix::{
    io::{Errno, retry_on_intr},
    process::{Pid, Signal, WaitId, WaitIdOptions, set_parent_process_death_signal, waitid},
};

use crate::files;

/// First argument of the process that loads a module; the module's file and parameters follow.
pub(crate) const LOAD: &str = "load-module";
/// First argument of the process that unloads a module; the module's name follows. The unload fails if the module is in
/// use or has no exit function.
pub(crate) const UNLOAD: &str = "unload-module";

/// Time limit for a process to end after it was killed.
const KILL_LIMIT: Duration = Duration::from_secs(5);

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

/// Asks the kernel to kill this process when its parent ends, so that no load outlives a killed guard. Until such a load ends,
/// the next guard cannot load a module of the same name.
pub(crate) fn end_with_parent() {
    // Continue after a failure: the load may then outlive the parent.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
}

/// Runs this program with the arguments as a child process, and returns how the process ended.
pub(crate) fn run_child(arguments: &[&str]) -> io::Result<SyscallResult> {
    Ok(result_of(Command::new("/proc/self/exe").args(arguments).status()?))
}

/// Like [`run_child`], for a load with a time limit. At the limit, kills the process and returns an error.
pub(crate) fn run_child_within(arguments: &[&str], limit: Duration) -> io::Result<SyscallResult> {
    let mut child = Command::new("/proc/self/exe").args(arguments).spawn()?;
    if let Some(status) = wait_within(&mut child, limit)? {
        return Ok(result_of(status));
    }
    child.kill()?;
    let end = match wait_within(&mut child, KILL_LIMIT)? {
        Some(_) => "was killed",
        // The process is in an uninterruptible system call.
        None => "cannot be killed and ends only with a reboot",
    };
    Err(io::Error::other(format!("not done within {} s; the load {end}", limit.as_secs())))
}

/// Waits for a child process; `None` at the time limit.
pub(crate) fn wait_within(child: &mut Child, limit: Duration) -> io::Result<Option<ExitStatus>> {
    let id = Pid::from_child(child);
    let (sender, ended) = mpsc::channel();
    // The thread keeps waiting after the time limit. `NOWAIT` leaves the child to be reaped by `try_wait`, so that the kernel
    // cannot reuse its process ID before.
    thread::Builder::new().spawn(move || {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        let _ = sender.send(retry_on_intr(|| waitid(WaitId::Pid(id), options)).map(drop));
    })?;
    let _ = ended.recv_timeout(limit);
    child.try_wait()
}

fn result_of(status: ExitStatus) -> SyscallResult {
    match (status.code(), status.signal()) {
        (Some(0), _) => SyscallResult::Success,
        (Some(number), _) => SyscallResult::Errno(number),
        (None, signal) => SyscallResult::Killed(signal.unwrap_or_default()),
    }
}
