//! The canary: the self-test of the sandbox before the first step. Process 1, which by then has no more privileges than a step,
//! makes the attempts of a hostile step.
//!
//! If the kernel does not refuse every attempt, nothing is compiled. The provenance lists the refused attempts.

use std::{
    fs::{self, File, OpenOptions},
    io,
};

use nix::{
    sched::{CloneFlags, unshare},
    sys::ptrace,
    unistd::Pid,
};
use rustix::{
    fs::{CWD, FileType, Mode, makedev, mknodat},
    io::Errno,
    mount::{MountFlags, mount},
    net::{AddressFamily, SocketType, socket},
    process::chroot,
    system::init_module,
};

/// An attempt: its description in the provenance, and the function that makes it.
type Attempt = (&'static str, fn() -> io::Result<()>);

const ATTEMPTS: [Attempt; 13] = [
    ("a capability", capability),
    ("a socket of IPv4", || create_socket(AddressFamily::INET)),
    ("a socket of IPv6", || create_socket(AddressFamily::INET6)),
    ("a local socket", || create_socket(AddressFamily::UNIX)),
    ("a socket of the kernel's", || create_socket(AddressFamily::NETLINK)),
    ("to trace a process", || Ok(ptrace::attach(Pid::from_raw(1))?)),
    ("another root", || Ok(chroot("/tmp")?)),
    ("a mount", || Ok(mount("none", "/tmp", "tmpfs", MountFlags::empty(), None)?)),
    ("a user namespace", || Ok(unshare(CloneFlags::CLONE_NEWUSER)?)),
    ("a disk", || Ok(mknodat(CWD, "/tmp/.canary", FileType::BlockDevice, Mode::RUSR, makedev(8, 0))?)),
    ("a file beside the devices", || File::create("/dev/.canary").map(drop)),
    ("a setting of the kernel", || {
        OpenOptions::new().write(true).open("/proc/sys/kernel/core_pattern").map(drop)
    }),
    ("a kernel module", || Ok(init_module(&[], c"")?)),
];

/// Makes every attempt and returns the refused ones. With `requires_all`, fails at the first attempt that was not refused.
pub fn attempt_all(requires_all: bool) -> io::Result<Vec<String>> {
    let mut refused = Vec::new();
    for (name, attempt) in ATTEMPTS {
        let outcome = attempt();
        if is_refused(&outcome) {
            refused.push(name.to_owned());
        } else if requires_all {
            return Err(not_refused(name, &outcome));
        }
    }
    Ok(refused)
}

/// Whether an attempt was refused. Other errors, such as a missing file or an invalid argument, prove nothing.
fn is_refused(outcome: &io::Result<()>) -> bool {
    let refusals = [Errno::PERM, Errno::ACCESS, Errno::ROFS].map(Errno::raw_os_error);
    outcome.as_ref().is_err_and(|error| error.raw_os_error().is_some_and(|code| refusals.contains(&code)))
}

fn not_refused(name: &str, outcome: &io::Result<()>) -> io::Error {
    let result = outcome.as_ref().map_or_else(ToString::to_string, |()| "the attempt succeeded".to_owned());
    io::Error::other(format!("the kernel did not refuse the build {name} ({result}), so nothing is compiled"))
}

fn create_socket(family: AddressFamily) -> io::Result<()> {
    Ok(socket(family, SocketType::DGRAM, None).map(drop)?)
}

/// Fails with `EPERM`, as if refused, if every capability set is empty, including the bounding set.
fn capability() -> io::Result<()> {
    let status = fs::read_to_string("/proc/self/status")?;
    let sets: Vec<&str> =
        status.lines().filter_map(|line| Some(line.strip_prefix("Cap")?.split_once(':')?.1)).collect();
    let has_none = sets.len() >= 5 && sets.iter().all(|set| set.trim().bytes().all(|digit| digit == b'0'));
    if has_none { Err(Errno::PERM.into()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_permission_errors_count_as_refused() {
        assert!(is_refused(&Err(Errno::PERM.into())));
        for other in [Ok(()), Err(Errno::NOENT.into()), Err(Errno::INVAL.into()), Err(io::Error::other("x"))]
        {
            assert!(!is_refused(&other), "{other:?}");
        }
        // This process is not confined.
        let local = create_socket(AddressFamily::UNIX);
        assert!(!is_refused(&local));
        let message = not_refused("a local socket", &local).to_string();
        assert_eq!(
            message,
            "the kernel did not refuse the build a local socket (the attempt succeeded), so nothing is compiled"
        );
    }
}
