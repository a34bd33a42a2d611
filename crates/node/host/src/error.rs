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
    #[error("no boot loader found: farrier-host needs GRUB with a grub.cfg in /boot/grub or /boot/grub2")]
    NoBootLoader,
    #[error(
        "GRUB has no default kernel: set GRUB_DEFAULT=saved, run update-grub, and then `farrier-host pin`"
    )]
    NoDefault,
    #[error("grub.cfg has no entry for kernel {release}: run update-grub")]
    NoEntry { release: String },
    #[error("not loaded: {modules}")]
    NotLoaded { modules: String },
    #[error(transparent)]
    Io(#[from] io::Error),
}
