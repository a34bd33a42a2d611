//! Errors about a payload, its layers, or `driver-entrypoint`.

use std::{io, path::PathBuf};

use farrier_core::{image::Period, kernel::KernelRelease};
use farrier_local::archive::UnpackError;
use farrier_signing::SigningError;
use oci::{LayerError, docker_archive::ArchiveError};

/// Result of work on a payload.
pub type Result<T, E = PayloadError> = std::result::Result<T, E>;

/// Reason why a payload cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PayloadError {
    /// Exposed paths are missing: the paths, and a list of files near the first path.
    #[error("the payload has no {missing}, which the definition exposes; {1}", missing = .0.join(", "))]
    Missing(Vec<String>, String),
    /// An exposed link cannot be resolved where the tree is used, because its target is outside of it.
    #[error("exposed link {} -> {}: {why}", .link.display(), .target.display())]
    Link { link: PathBuf, target: PathBuf, why: &'static str },
    /// An exposed path would move on a usr-merged base.
    #[error("exposed path {0} lies in a directory that is a link on usr-merged systems")]
    Merged(String),
    /// An exposed entry is a device, socket or FIFO.
    #[error("exposed entry {} is neither a file, a directory nor a symbolic link", .0.display())]
    ExposedKind(PathBuf),
    /// The symbol tables in the exposed trees are too large: the table that exceeds the limit, and the limit in MiB.
    #[error("symbol table {}: all exposed tables together are larger than {mib} MiB", .table.display())]
    SymbolTables { table: PathBuf, mib: u64 },
    /// The payload contains a device, socket or FIFO.
    #[error("payload entry {0:?} is neither a file, a directory nor a symbolic link")]
    Kind(PathBuf),
    /// Two entries have the same path on a usr-merged base.
    #[error("payload entries {first:?} and {second:?} have the same path {path:?} on the usr-merged base")]
    Conflict { first: PathBuf, second: PathBuf, path: PathBuf },
    /// A top-level `lib`, `bin`, ... is neither a directory nor the base's link.
    #[error("payload entry {0:?} would replace the link of the usr-merged base")]
    HidesBase(PathBuf),
    /// The layer cannot be written.
    #[error(transparent)]
    Layer(#[from] LayerError),
    /// A published payload cannot be unpacked.
    #[error("its layer cannot be unpacked")]
    Unpack(#[from] UnpackError),
    /// A published payload has properties that unpacking loses, such as a sticky bit.
    #[error("its layer has file properties that unpacking loses")]
    Lossy,
    /// A published payload has no module directory for the kernel.
    #[error("it has no directory lib/modules/{0}")]
    NoModules(KernelRelease),
    /// A published payload already has files for the other kernel.
    #[error("it already contains {}", .0.display())]
    Occupied(PathBuf),
    /// A published payload names its kernel outside of the module directory.
    #[error("its {0} names kernel {1}")]
    NamesKernel(PathBuf, KernelRelease),
    /// An engine's image archive is invalid.
    #[error(transparent)]
    Archive(#[from] ArchiveError),
    /// The digest of a layer in an engine's image, counted from 1, differs from the configuration.
    #[error("layer {number} of the image archive is {actual}, but its configuration says {expected}")]
    DiffId { number: usize, actual: String, expected: String },
    /// The modules of an image exceed the size limit.
    #[error("modules of the image archive are larger than {0} bytes")]
    TooLarge(u64),
    /// An image has too many modules and firmware files.
    #[error("the image has more than {0} modules and firmware files")]
    TooManyFiles(u64),
    /// The static `driver-entrypoint` binary is missing.
    #[error("cannot find driver-entrypoint at {0}")]
    NoEntrypoint(PathBuf),
    /// `driver-entrypoint` or `farrier-runner` cannot be read.
    #[error("cannot read the static program {0}")]
    Entrypoint(PathBuf, #[source] io::Error),
    /// `driver-entrypoint` or `farrier-runner` is not a program that can run in an image: the file, and the reason.
    #[error("cannot use {0} as a static program: {1}")]
    UnusableEntrypoint(PathBuf, String),
    /// The modules of one check exceed its byte budget.
    #[error(
        "cannot decompress module {}: stopped after {bytes} bytes: the limit for all modules of one check is \
         {limit} bytes",
        .module.display()
    )]
    DecompressionBytes { module: PathBuf, bytes: u64, limit: u64 },
    /// The build steps and the decompression of modules exceed the deadline.
    #[error("cannot decompress module {}: stopped after {bytes} bytes: the deadline of {deadline} has passed", .module.display())]
    DecompressionTime { module: PathBuf, bytes: u64, deadline: Period },
    /// A module cannot be signed.
    #[error("cannot sign module {}", .0.display())]
    Signing(PathBuf, #[source] SigningError),
    /// A local directory cannot be listed.
    #[error(transparent)]
    Walk(#[from] walkdir::Error),
    /// A local file operation failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl PayloadError {
    /// Returns a remedy, if there is a known one.
    pub fn hint(&self) -> Option<String> {
        let text = match self {
            Self::Missing(..) => {
                "make the template install the tree below /out, or correct `exposes` in the definition"
            }
            Self::Link { .. } => "make the template link to a path inside the payload, or copy the target",
            Self::Merged(_) => "make the template install it below /out/usr instead",
            Self::SymbolTables { .. } => {
                "expose fewer symbol tables, with nothing but the driver's own symbols"
            }
            Self::Conflict { .. } | Self::HidesBase(_) => "make the template install below /out/usr instead",
            Self::NoEntrypoint(_) => {
                "build it with `cargo build --profile entrypoint` in crates/node/driver-entrypoint/, and put it \
                 next to farrier or name it with --entrypoint"
            }
            Self::Entrypoint(..) | Self::UnusableEntrypoint(..) => {
                "take it from a release, or run `cargo build --profile entrypoint` in crates/node/driver-entrypoint/ or \
                 crates/node/runner/ (ci/arm64 builds both for arm64). Put it next to farrier, as NAME-ARCHITECTURE for another \
                 architecture, or name it with --entrypoint or FARRIER_RUNNER"
            }
            Self::DecompressionBytes { .. } => {
                "make the template strip the modules' debug information (strip --strip-debug), or install \
                 the modules without compression; a few kB that decompress to a GiB are not a module"
            }
            Self::DecompressionTime { .. } => {
                "raise build.deadline in the definition: the steps and the decompression of the modules \
                 share it; or make the template install the modules without compression"
            }
            Self::Signing(_, source) => return source.hint(),
            _ => return None,
        };
        Some(text.to_owned())
    }

    /// Whether the same build would fail again.
    pub fn is_permanent(&self) -> bool {
        match self {
            Self::Missing(..)
            | Self::Link { .. }
            | Self::Merged(_)
            | Self::ExposedKind(_)
            | Self::SymbolTables { .. }
            | Self::DecompressionBytes { .. } => true,
            _ => self.is_caused_by_deadline(),
        }
    }

    /// Whether the same build may succeed with a longer deadline.
    pub fn is_caused_by_deadline(&self) -> bool {
        matches!(self, Self::DecompressionTime { .. })
    }
}
