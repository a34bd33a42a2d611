//! Adapter: why a payload, a layer of one, or the binary that goes beside it cannot be used.

use std::{io, path::PathBuf};

use crate::{
    archive::UnpackError,
    image::Period,
    kernel::KernelRelease,
    oci::{LayerError, docker_archive::ArchiveError},
    signing::SigningError,
};

/// What work on a payload comes to.
pub type Result<T, E = PayloadError> = std::result::Result<T, E>;

/// Why a payload cannot be used.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the fields are")]
pub enum PayloadError {
    /// Exposed paths that are not there, and what is near the first.
    #[error("the payload has no {missing}, which the definition exposes; {1}", missing = .0.join(", "))]
    Missing(Vec<String>, String),
    /// An exposed link, absolute in the payload, whose target cannot be followed where the tree is used.
    #[error("exposed link {} -> {}: {why}", .link.display(), .target.display())]
    Link { link: PathBuf, target: PathBuf, why: &'static str },
    /// An exposed path that has another place on a usr-merged base.
    #[error("exposed path {0} lies in a directory that is a link on usr-merged systems")]
    Merged(String),
    /// An exposed device, socket or FIFO.
    #[error("exposed entry {} is neither a file, a directory nor a symbolic link", .0.display())]
    ExposedKind(PathBuf),
    /// A device, a socket, a FIFO.
    #[error("payload entry {0:?} is neither a file, a directory nor a symbolic link")]
    Kind(PathBuf),
    /// Two entries with one place on a usr-merged base.
    #[error("payload entries {first:?} and {second:?} would both be {place:?} on the usr-merged base")]
    Conflict { first: PathBuf, second: PathBuf, place: PathBuf },
    /// A top-level `lib`, `bin`, ... that is neither a directory nor the link that the base has.
    #[error("payload entry {0:?} would replace the link of the usr-merged base")]
    HidesBase(PathBuf),
    /// The layer cannot be written.
    #[error(transparent)]
    Layer(#[from] LayerError),
    /// A published payload cannot be unpacked.
    #[error("its layer cannot be unpacked")]
    Unpack(#[from] UnpackError),
    /// Something in a published payload does not survive on this machine, such as a sticky bit.
    #[error("its layer holds what is lost when it is unpacked")]
    Lossy,
    /// A published payload has no modules where they are looked for.
    #[error("it has no directory lib/modules/{0}")]
    NoModules(KernelRelease),
    /// A published payload has something for the other kernel already.
    #[error("it holds {} already", .0.display())]
    Occupied(PathBuf),
    /// Something else than the module directory of a published payload depends on the kernel.
    #[error("its {0} names kernel {1}")]
    Named(PathBuf, KernelRelease),
    /// An engine's image archive.
    #[error(transparent)]
    Archive(#[from] ArchiveError),
    /// A layer of an engine's image, counted from 1, is not what the configuration says.
    #[error("layer {number} of the image archive is {found}, but its configuration says {wanted}")]
    DiffId { number: usize, found: String, wanted: String },
    /// More modules in an image than there can be.
    #[error("modules of the image archive have more than {0} bytes")]
    TooLarge(u64),
    /// `driver-entrypoint` cannot be read, or is not there.
    #[error("read driver-entrypoint at {0}")]
    Entrypoint(PathBuf, #[source] io::Error),
    /// `driver-entrypoint` is no program that could run in an image: the file, and why.
    #[error("use {0} as driver-entrypoint: {1}")]
    Unfit(PathBuf, String),
    /// The modules of one check have more bytes than its budget.
    #[error(
        "decompress module {}: stopped after {bytes} bytes of it: the modules of one check may have {limit} bytes together",
        .module.display()
    )]
    DecompressionBytes { module: PathBuf, bytes: u64, limit: u64 },
    /// The steps of a build and the decompression of its modules take longer than its deadline.
    #[error("decompress module {}: stopped after {bytes} bytes of it: the deadline of {deadline} is over", .module.display())]
    DecompressionTime { module: PathBuf, bytes: u64, deadline: Period },
    /// A module cannot be signed.
    #[error("sign module {}", .0.display())]
    Signing(PathBuf, #[source] SigningError),
    /// A directory of this machine.
    #[error(transparent)]
    Walk(#[from] walkdir::Error),
    /// A file of this machine.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl PayloadError {
    /// What to do about it, where that is clear.
    pub fn hint(&self) -> Option<String> {
        let text = match self {
            Self::Missing(..) => {
                "let the template install the tree below /out, or correct `exposes` in the definition"
            }
            Self::Link { .. } => "let the template link to a place inside the payload, or copy the target",
            Self::Merged(_) => "let the template install it below /out/usr instead",
            Self::Conflict { .. } | Self::HidesBase(_) => "let the template install below /out/usr instead",
            Self::Entrypoint(..) | Self::Unfit(..) => {
                "build it for the kernel's architecture with `cargo build --profile entrypoint` in crates/driver-entrypoint/ \
                 (ci/arm64 does on amd64), and put it beside farrier, another machine's as driver-entrypoint-ARCHITECTURE, or \
                 name it with --entrypoint"
            }
            Self::DecompressionBytes { .. } => {
                "let the template remove the modules' debug information (strip --strip-debug), or install the modules without \
                 compression; a few kB that hold a GiB are no module"
            }
            Self::DecompressionTime { .. } => {
                "raise build.deadline in the definition: the steps and the decompression of the modules share it; or let the \
                 template install the modules without compression"
            }
            Self::Signing(_, source) => return source.hint(),
            _ => return None,
        };
        Some(text.to_owned())
    }

    /// Would the same build give the same error?
    pub fn is_permanent(&self) -> bool {
        match self {
            Self::Missing(..)
            | Self::Link { .. }
            | Self::Merged(_)
            | Self::ExposedKind(_)
            | Self::DecompressionBytes { .. } => true,
            _ => self.is_of_deadline(),
        }
    }

    /// Would the same build do with a longer deadline?
    pub fn is_of_deadline(&self) -> bool {
        matches!(self, Self::DecompressionTime { .. })
    }
}
