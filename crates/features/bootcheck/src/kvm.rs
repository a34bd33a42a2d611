//! Decides whether to try KVM. On some machines `/dev/kvm` exists but guests hang, which takes seconds to detect. A failure
//! of KVM is therefore recorded in the process, and in a file that is valid until the machine restarts.

use std::{
    fs::{self, OpenOptions},
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

use farrier_core::kernel::Architecture;

/// Whether KVM has failed in this process.
static HAS_FAILED: AtomicBool = AtomicBool::new(false);

/// ID that changes with each boot of the machine.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// Name of the file in the state directory. The file contains the ID of the boot in which KVM failed.
const FAILURE_FILE: &str = "kvm-fails";

/// Whether KVM may work for a guest of this architecture.
pub(super) fn may_be_usable(guest: Architecture, state_dir: Option<&Path>) -> bool {
    let is_native = match guest {
        Architecture::Amd64 => cfg!(target_arch = "x86_64"),
        Architecture::Arm64 => cfg!(target_arch = "aarch64"),
    };
    let has_device = || OpenOptions::new().read(true).write(true).open("/dev/kvm").is_ok();
    // Opening the device takes long on machines where it does not work, so read the record first.
    is_native && !HAS_FAILED.load(Ordering::Relaxed) && !failed_before(state_dir) && has_device()
}

/// Records that KVM failed, which prevents further attempts. If the file cannot be written, the next process tries KVM once
/// more and loses a few seconds.
pub(super) fn record_failure(state_dir: Option<&Path>) {
    HAS_FAILED.store(true, Ordering::Relaxed);
    let (Some(state_dir), Ok(id)) = (state_dir, fs::read(BOOT_ID)) else { return };
    let written = fs::create_dir_all(state_dir).and_then(|()| fs::write(state_dir.join(FAILURE_FILE), id));
    if let Err(error) = written {
        tracing::debug!(directory = %state_dir.display(), %error, "cannot record that KVM does not work here");
    }
}

/// Whether an earlier process recorded a failure during the current boot of the machine.
fn failed_before(state_dir: Option<&Path>) -> bool {
    let recorded = state_dir.and_then(|state_dir| fs::read(state_dir.join(FAILURE_FILE)).ok());
    recorded.zip(fs::read(BOOT_ID).ok()).is_some_and(|(then, now)| then == now)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recorded_failure_is_valid_until_the_machine_restarts() {
        let dir = tempfile::tempdir().unwrap();
        let state_dir = dir.path().join("boot");
        assert!(!failed_before(Some(&state_dir)));
        record_failure(Some(&state_dir));
        assert!(failed_before(Some(&state_dir)));
        assert!(!failed_before(None));
        fs::write(state_dir.join(FAILURE_FILE), "another start").unwrap();
        assert!(!failed_before(Some(&state_dir)));
    }
}
