//! Errors.

use std::{io, path::PathBuf};

/// Result of this program's functions.
pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;

/// Reason why something on the host failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("{}: {why}", .path.display())]
    Config { path: PathBuf, why: String },
    #[error("{program}: {why}")]
    Program { program: String, why: String },
    #[error("no boot loader found: farrier-host needs systemd-boot, or GRUB with /boot/grub/grub.cfg")]
    NoBootLoader,
    #[error(
        "the boot loader's default is none of the installed kernels: with GRUB, set GRUB_DEFAULT=saved and run \
         `update-grub`; then run `farrier-host pin`"
    )]
    NoDefault,
    #[error(
        "kernel {release} was set as the default, and the boot loader's default is {actual}: see `bootctl list` or `grub-editenv list`"
    )]
    OtherDefault { release: String, actual: String },
    #[error(
        "GRUB cannot write to {}, on this file system or device, and would boot a kernel that is to boot once again and \
         again: move it to a plain partition",
        .directory.display()
    )]
    ReadOnlyEnvironment { directory: PathBuf },
    #[error(
        "not merged, because of another operating system or version in their extension-release: {drivers}"
    )]
    NotMerged { drivers: String },
    #[error("farrier-host-activate.service has not loaded the drivers in this boot: see its journal")]
    NotActivated,
    #[error("the boot loader has no entry for kernel {release}: run `{command}`")]
    NoEntry { release: String, command: String },
    #[error(
        "{place} sets a default entry, which systemd-boot boots even with no tries left: remove it{}",
        .command.map(|command| format!(" with `{command}`")).unwrap_or_default()
    )]
    FixedDefault { place: String, command: Option<&'static str> },
    #[error("kernel {release} is not installed: /usr/lib/modules has the installed ones")]
    NotInstalled { release: String },
    #[error("kernel {release}: no {driver}: {why}")]
    Unavailable { release: String, driver: String, why: String },
    #[error("{why}")]
    Drivers { why: String },
    #[error("it is not stored for this kernel")]
    NotStored,
    #[error(
        "loaded from another file than the system extension's, such as the kernel's own driver: {modules}: add `blacklist NAME` \
         for each to a file in /etc/modprobe.d, and make the initramfs again"
    )]
    OtherModule { modules: String },
    #[error("not loaded: {modules}")]
    NotLoaded { modules: String },
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Json(#[from] serde_json::Error),
}
