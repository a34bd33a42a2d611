//! Decides whether to try KVM. On some machines `/dev/kvm` exists but guests hang, which takes seconds to detect. Such
//! a failure is remembered in the process, and in a file that is valid until the machine restarts.

use std::{
    fs::{self, OpenOptions},
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

use farrier_core::kernel::Architecture;

static FAILS: AtomicBool = AtomicBool::new(false);

/// ID that changes with each boot of the machine.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// Name of the file in the memory directory. The file holds the ID of the boot in which KVM failed.
const FILE: &str = "kvm-fails";

/// Whether KVM may work for a guest of this architecture.
pub(super) fn may_work(guest: Architecture, memory: Option<&Path>) -> bool {
    let host = match guest {
        Architecture::Amd64 => cfg!(target_arch = "x86_64"),
        Architecture::Arm64 => cfg!(target_arch = "aarch64"),
    };
    let opens = || OpenOptions::new().read(true).write(true).open("/dev/kvm").is_ok();
    host && !FAILS.load(Ordering::Relaxed) && opens() && !failed_before(memory)
}

/// Prevents further attempts with KVM. If the file cannot be written, a later process loses seconds with another
/// attempt.
pub(super) fn remember_that_it_fails(memory: Option<&Path>) {
    FAILS.store(true, Ordering::Relaxed);
    let (Some(memory), Ok(id)) = (memory, fs::read(BOOT_ID)) else { return };
    let written = fs::create_dir_all(memory).and_then(|()| fs::write(memory.join(FILE), id));
    if let Err(error) = written {
        tracing::debug!(directory = %memory.display(), %error, "cannot record that KVM does not work here");
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
