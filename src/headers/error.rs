//! Pure: what can go wrong while fetching, whether trying again helps, and what to do about it.

use std::path::PathBuf;

use super::{CollectError, HostTreeError, ImportError, KernelImageError, tree::TreeError};
use crate::{
    archive::UnpackError,
    cache::CacheError,
    net::{Fault, NetError, fault},
    payload::PayloadError,
    store::StoreError,
};

/// A fault while fetching. "There are no such headers" is none: see
/// [`HeaderLookup`](super::HeaderLookup).
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// The cache directory.
    #[error("use the cache")]
    Cache(#[from] CacheError),
    /// An archive that cannot be unpacked.
    #[error("unpack {what}")]
    Unpack {
        /// The archive.
        what: String,
        /// Why.
        #[source]
        source: UnpackError,
    },
    /// A program that cannot be started.
    #[error("start {program}")]
    Start {
        /// Which one.
        program: &'static str,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// A program that failed.
    #[error("{action}: {message}")]
    Program {
        /// What it was to do.
        action: String,
        /// Its own words.
        message: String,
        /// Whether its words speak of a network or a mirror that may be better soon.
        transient: bool,
    },
    /// The host's apt configuration has no entry to derive a suite's address from.
    #[error("find an apt source for suite {suite}: the host has no entry for it")]
    NoAptSource {
        /// The suite.
        suite: String,
    },
    /// A definition's value that has no place in an apt source, a package name or a path.
    #[error("use {value:?} as {what}: {why}")]
    Value {
        /// What it should be.
        what: &'static str,
        /// The value, cut to 200 characters.
        value: String,
        /// What is wrong.
        why: &'static str,
    },
    /// A package that no suite has.
    #[error("find package {package} in {suites}")]
    NoPackage {
        /// Its name, with its version where one was asked for.
        package: String,
        /// Where it was looked for.
        suites: String,
    },
    /// A digest that differs.
    #[error("verify {what}: its sha256 is {found}, wanted {wanted}")]
    Checksum {
        /// The file.
        what: String,
        /// As computed, hexadecimal.
        found: String,
        /// As said, hexadecimal.
        wanted: String,
    },
    /// A download that ended too early.
    #[error("download {url}: {got} bytes arrived, {wanted} were announced")]
    Truncated {
        /// The address.
        url: String,
        /// Bytes.
        got: u64,
        /// Bytes.
        wanted: u64,
    },
    /// A server's refusal.
    #[error("download {url}: the server answers {status}")]
    Status {
        /// The address.
        url: String,
        /// The HTTP status.
        status: u16,
    },
    /// A download that failed.
    #[error("download {url}")]
    Transfer {
        /// The address.
        url: String,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A host that may not be asked, or cannot be asked as the site says.
    #[error(transparent)]
    Net(#[from] NetError),
    /// A tree that is not laid out as the definition says.
    #[error("find {wanted} in {what}: {found}")]
    Layout {
        /// What was looked for.
        wanted: String,
        /// The source.
        what: String,
        /// What is there.
        found: String,
    },
    /// An unpacked tree that is not the kernel's header set.
    #[error("read the header set")]
    Tree(#[from] TreeError),
    /// A tree that is not one of exposed headers for the kernel.
    #[error(transparent)]
    HostTree(#[from] HostTreeError),
    /// Exposed headers that cannot be collected.
    #[error(transparent)]
    Collect(#[from] CollectError),
    /// A header set that cannot be imported.
    #[error(transparent)]
    Import(#[from] ImportError),
    /// What is kept beside the images.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A kernel image that cannot be read, or is another kernel's.
    #[error(transparent)]
    KernelImage(#[from] KernelImageError),
    /// A file of this machine.
    #[error("{action} {path}")]
    Io {
        /// What was done.
        action: &'static str,
        /// To what.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// With `--offline`, what was never put where it could be had.
    #[error(
        "find {what}: neither the cache nor the registry's store has it, and --offline forbids to ask any other host"
    )]
    NotKept {
        /// What is missing.
        what: String,
        /// What to do.
        hint: &'static str,
        /// How asking upstream ended.
        #[source]
        source: Box<FetchError>,
    },
    /// There is no registry to keep anything in.
    #[error("store it beside the images: no registry was named")]
    NoStore,
    /// A tree that cannot be packed for the store.
    #[error("pack for the store")]
    Pack(#[from] PayloadError),
    /// The work was cut short because the program is ending.
    #[error("fetching was interrupted")]
    Interrupted,
}

impl FetchError {
    /// Whether the same thing may work in a moment without anybody changing anything.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Program { transient, .. } => *transient,
            Self::Truncated { .. } => true,
            Self::Transfer { source, .. } => fault(source.as_ref()) == Fault::Connection,
            Self::Net(error) => error.is_transient(),
            Self::NotKept { source, .. } => source.is_transient(),
            Self::Store(error) => error.is_transient(),
            Self::Status { status, .. } => *status >= 500 || matches!(status, 408 | 425 | 429),
            Self::Cache(_)
            | Self::NoStore
            | Self::Pack(_)
            | Self::Unpack { .. }
            | Self::Start { .. }
            | Self::NoAptSource { .. }
            | Self::Value { .. }
            | Self::NoPackage { .. }
            | Self::Checksum { .. }
            | Self::Layout { .. }
            | Self::Tree(_)
            | Self::HostTree(_)
            | Self::Collect(_)
            | Self::Import(_)
            | Self::KernelImage(_)
            | Self::Io { .. }
            | Self::Interrupted => false,
        }
    }

    /// Is it what the command or a definition names that is wrong, rather than the world?
    pub fn is_usage(&self) -> bool {
        match self {
            Self::Net(NetError::Offline { .. })
            | Self::KernelImage(_)
            | Self::HostTree(_)
            | Self::Tree(_) => true,
            Self::Import(error) => error.is_usage(),
            Self::Collect(error) => matches!(
                error,
                CollectError::Absent { .. }
                    | CollectError::Path { .. }
                    | CollectError::Elsewhere { .. }
                    | CollectError::Kind { .. }
            ),
            // The archive is not what it should be; the others are of this machine.
            Self::Unpack { source, .. } => !matches!(
                source,
                UnpackError::Write { .. } | UnpackError::Start { .. } | UnpackError::Open { .. }
            ),
            _ => false,
        }
    }

    /// Is it about what lies upstream, so that somebody else may have fetched it?
    pub(super) fn is_upstream(&self) -> bool {
        matches!(
            self,
            Self::Net(_)
                | Self::NoAptSource { .. }
                | Self::NoPackage { .. }
                | Self::Program { .. }
                | Self::Transfer { .. }
                | Self::Status { .. }
                | Self::Truncated { .. }
        )
    }

    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        let text = match self {
            Self::Start { program, source } if source.kind() == std::io::ErrorKind::NotFound => {
                return Some(format!("install {program}, or put it in the search path"));
            }
            Self::Tree(error) => error.remedy(),
            Self::HostTree(error) => error.remedy(),
            Self::Collect(error) => return error.remedy(),
            Self::Net(error) => return error.hint(),
            Self::Transfer { source, .. } => return fault(source.as_ref()).hint("the server"),
            Self::Import(error) => return error.remedy(),
            Self::KernelImage(error) => error.remedy(),
            Self::Store(error) => return error.hint(),
            Self::Pack(error) => return error.hint(),
            Self::NotKept { hint, .. } => hint,
            Self::NoStore => "name one with --registry",
            Self::NoAptSource { .. } => "set `mirror` and `signedBy` beside `suites`",
            Self::NoPackage { .. } => "check the package's name, the suites and the components",
            Self::Checksum { .. } => {
                "the file is damaged or was replaced: fetch it again, or correct the sha256 if it is the right one"
            }
            Self::Io { action: "find", source, .. } if source.kind() == std::io::ErrorKind::NotFound => {
                "put it there, or name another place in the definition; a relative path starts in the definitions \
                 directory"
            }
            Self::Status { status: 401 | 403, .. } => "the server wants credentials or refuses this client",
            Self::Status { status: 404 | 410, .. } => "check the address",
            Self::Cache(e) if e.source.kind() == std::io::ErrorKind::StorageFull => FULL,
            Self::Io { source, .. } if source.kind() == std::io::ErrorKind::StorageFull => FULL,
            Self::Unpack { source: UnpackError::Write { source, .. }, .. }
                if source.kind() == std::io::ErrorKind::StorageFull =>
            {
                FULL
            }
            Self::Unpack { source: UnpackError::Start { program: "bsdtar", .. }, .. } => {
                "install libarchive-tools, whose bsdtar reads RPM packages"
            }
            Self::Unpack { source: UnpackError::Start { .. }, .. } => {
                "install it, or put it in the search path"
            }
            Self::Unpack { source: UnpackError::Outside(_) | UnpackError::ThroughLink(_), .. } => {
                "no honest archive has such entries: look where it came from; nothing of it was used"
            }
            Self::Unpack { source: UnpackError::Kind(..), .. } => {
                "only files, directories and links are unpacked: make the archive again without it"
            }
            Self::Unpack { source: UnpackError::Limit(_), .. } => {
                "the archive is larger than any header set or source: make it of what is needed only (of a kernel's \
                 build tree: tar --exclude='*.o' --exclude=.git), or give the directory itself"
            }
            Self::Unpack { source: UnpackError::Unsupported(_), .. } => {
                "unpack it, and name the directory as a `path` source"
            }
            Self::Unpack {
                source: UnpackError::Damaged(_) | UnpackError::Truncated { .. } | UnpackError::Sum { .. },
                ..
            } => "the archive is incomplete or not an archive: fetch it again",
            Self::Truncated { .. } => {
                "the server, or a proxy before it, ends the transfer early: run farrier again, or bring the file as a `path` source"
            }
            Self::Program { message, .. } => return program_hint(message),
            _ => return None,
        };
        Some(text.to_owned())
    }
}

/// What every program says of a full disk.
pub(super) const DISK_FULL: &str = "No space left on device";

const FULL: &str = "the disk is full: free some room; the cache directory can be deleted at any time";

fn program_hint(message: &str) -> Option<String> {
    let hint = if message.contains(DISK_FULL) {
        FULL
    } else if message.contains("does not have a Release file") {
        "the mirror does not have this suite: check `suites`, or set `mirror` and `signedBy` beside it"
    } else if message.contains("NO_PUBKEY") || message.contains("is not signed") {
        "the archive's key is not known: set `signedBy` to its keyring"
    } else {
        return None;
    };
    Some(hint.to_owned())
}
