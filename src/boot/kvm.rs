//! Adapter: is KVM worth a try? Where `/dev/kvm` is there and a guest hangs on it, finding that out takes seconds, so it
//! is remembered: by the process, and in a file until the machine restarts.

use std::{
    fs::{self, OpenOptions},
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

use crate::kernel::Architecture;

static FAILS: AtomicBool = AtomicBool::new(false);

/// Changes with each start of the machine.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// The file's name in the directory for what is remembered. It holds the id of the start in which KVM failed.
const FILE: &str = "kvm-fails";

/// Is KVM worth a try for such a guest?
pub(super) fn may_work(guest: Architecture, memory: Option<&Path>) -> bool {
    let host = match guest {
        Architecture::Amd64 => cfg!(target_arch = "x86_64"),
        Architecture::Arm64 => cfg!(target_arch = "aarch64"),
    };
    let opens = || OpenOptions::new().read(true).write(true).open("/dev/kvm").is_ok();
    host && !FAILS.load(Ordering::Relaxed) && opens() && !failed_before(memory)
}

/// It is not tried again. That this cannot be written down costs seconds later, and nothing else.
pub(super) fn remember_that_it_fails(memory: Option<&Path>) {
    FAILS.store(true, Ordering::Relaxed);
    let (Some(memory), Ok(id)) = (memory, fs::read(BOOT_ID)) else { return };
    let written = fs::create_dir_all(memory).and_then(|()| fs::write(memory.join(FILE), id));
    if let Err(error) = written {
        tracing::debug!(directory = %memory.display(), %error, "cannot remember that KVM does not work here");
    }
}

fn failed_before(memory: Option<&Path>) -> bool {
    let said = memory.and_then(|memory| fs::read(memory.join(FILE)).ok());
    said.zip(fs::read(BOOT_ID).ok()).is_some_and(|(then, now)| then == now)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_remembered_until_the_machine_restarts() {
        let dir = tempfile::tempdir().unwrap();
        let memory = dir.path().join("boot");
        assert!(!failed_before(Some(&memory)));
        remember_that_it_fails(Some(&memory));
        assert!(failed_before(Some(&memory)));
        assert!(!failed_before(None));
        fs::write(memory.join(FILE), "another start").unwrap();
        assert!(!failed_before(Some(&memory)));
    }
}
