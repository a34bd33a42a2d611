//! Errors of boot checks, with hints.

use std::{io, path::PathBuf};

use farrier_payload::PayloadError;

/// Result of a boot check.
pub type Result<T, E = BootError> = std::result::Result<T, E>;

/// Reason why a boot check has no result. A module that fails to load is a result, not an error: see
/// [`BootOutcome`](kmod::BootOutcome).
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// The static `driver-entrypoint` binary is missing.
    #[error(transparent)]
    NoEntrypoint(PayloadError),
    /// The static `driver-entrypoint` binary is for another architecture, or is not a valid binary.
    #[error("cannot start driver-entrypoint in a virtual machine")]
    Entrypoint(#[source] PayloadError),
    /// QEMU is missing; `package` provides it.
    #[error("cannot start {program}: not found")]
    NoEmulator { program: String, package: &'static str },
    /// QEMU cannot be started.
    #[error("cannot start {0}")]
    Start(String, #[source] io::Error),
    /// QEMU's output cannot be read.
    #[error("cannot read the output of the virtual machine")]
    Read(#[source] io::Error),
    /// A file or directory cannot be read or written.
    #[error("cannot prepare the virtual machine")]
    Io(#[from] io::Error),
    /// A module cannot be read.
    #[error("cannot read a module for the virtual machine")]
    Payload(#[from] PayloadError),
    /// The module at this path cannot be decompressed, with the reason.
    #[error("cannot read module {0} for the virtual machine: {1}")]
    Module(PathBuf, String),
    /// The modules need more memory than the limit allows.
    #[error("the virtual machine needs {needed} MiB of memory, more than its limit of {limit} MiB")]
    Memory { needed: u64, limit: u64 },
    /// The kernel did not start its init process. Contains the kernel release, and the last output lines of the console or
    /// QEMU.
    #[error("cannot boot kernel {0}: its init process did not report; last lines: {last}", last = .1.join(" | "))]
    NotStarted(String, Vec<String>),
    /// The image contains another kernel than the requested one.
    #[error("cannot boot kernel {requested}: the image is kernel {booted}")]
    OtherKernel { requested: String, booted: String },
    /// The init process in the virtual machine failed.
    #[error("cannot run the init process in the virtual machine: {0}")]
    Init(String),
    /// Lines of the report are missing.
    #[error("cannot read the virtual machine's report: lines are missing")]
    Incomplete,
    /// The user or the caller canceled the check.
    #[error("the boot check was canceled")]
    Canceled,
}

impl BootError {
    /// Hint for the user.
    pub fn hint(&self) -> String {
        let hint = match self {
            Self::NoEmulator { package, .. } => return format!("install the package {package}"),
            Self::NoEntrypoint(error) | Self::Entrypoint(error) => return error.hint().unwrap_or_default(),
            Self::Start(..) => "check the program's permissions",
            Self::Read(_) | Self::Canceled => "start the check again",
            Self::Payload(error) if error.hint().is_some() => return error.hint().unwrap_or_default(),
            Self::Io(_) | Self::Payload(_) => "check the file, its permissions and its disk",
            Self::Module(..) => "run the check without the boot check for details",
            Self::Memory { .. } => {
                "allow more memory, or strip the modules' debug information (strip --strip-debug)"
            }
            Self::NotStarted(..) => {
                "check that the image is a kernel of this architecture, with support for an initramfs and \
                 serial ports (CONFIG_BLK_DEV_INITRD, CONFIG_SERIAL_8250_CONSOLE); on a slow machine, allow more time"
            }
            Self::OtherKernel { .. } => "pass the image of the requested kernel",
            Self::Init(_) => {
                "check that driver-entrypoint has farrier's version, and that the kernel has \
                 CONFIG_DEVTMPFS, CONFIG_PROC_FS and CONFIG_SYSFS"
            }
            Self::Incomplete => "start the check again; a module may have disturbed the serial port",
        };
        hint.to_owned()
    }
}
