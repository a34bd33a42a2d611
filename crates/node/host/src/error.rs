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
    #[error(
        "no boot loader found: farrier-host needs systemd-boot, or GRUB with a grub.cfg in /boot/grub or /boot/grub2"
    )]
    NoBootLoader,
    #[error(
        "the boot loader's default is none of the installed kernels: run `farrier-host pin`; for GRUB, set \
         GRUB_DEFAULT=saved and run update-grub before"
    )]
    NoDefault,
    #[error("kernel {release} was set as the default, and the boot loader still has another one")]
    OtherDefault { release: String },
    #[error("the boot loader has no entry for kernel {release}: run `{command}`")]
    NoEntry { release: String, command: String },
    #[error(
        "{place} sets a default entry, and systemd-boot then counts no boots: remove it{}",
        .command.map(|command| format!(" with `{command}`")).unwrap_or_default()
    )]
    FixedDefault { place: String, command: Option<&'static str> },
    #[error("not loaded: {modules}")]
    NotLoaded { modules: String },
    #[error(transparent)]
    Io(#[from] io::Error),
}
