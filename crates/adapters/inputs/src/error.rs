//! Errors of fetching, with their remedies and whether a retry may help.

use std::{error::Error, io, path::PathBuf};

use ::oci::client::connection_problem;
use farrier_local::{
    archive::UnpackError,
    cache::{CacheError, FULL_DISK, is_full_disk},
};
use farrier_net::{NetError, connection_hint};
use farrier_payload::PayloadError;
use farrier_store::{StoreError, registry};
use oci::LayerError;

use super::{header_tree::TreeError, process::exceeds_memory};

pub type Result<T, E = FetchError> = std::result::Result<T, E>;

/// An error while fetching. Missing headers are not an error: see [`Lookup`](super::Lookup).
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// The cache directory cannot be used.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// An archive cannot be unpacked.
    #[error("cannot unpack {0}")]
    Unpack(String, #[source] UnpackError),
    /// A program cannot be started.
    #[error("cannot start {0}")]
    Start(&'static str, #[source] io::Error),
    /// A program failed; `message` is its output. `transient` is set if the output points to a temporary fault of the network or
    /// a mirror.
    #[error("cannot {action}: {message}")]
    Program { action: String, message: String, transient: bool },
    /// The host's apt configuration has no entry from which a suite's address can be derived.
    #[error("cannot find an apt source for suite {0}: the host has no entry for it")]
    NoAptSource(String),
    /// No mirror is configured for a placeholder address: the address, and its suites.
    #[error("cannot find an apt source for {1}: no `mirrors` of site.yaml map {0}")]
    NoMirror(String, String),
    /// A definition's value, cut to 200 characters, that is not allowed in an apt source, a package name or a path.
    #[error("cannot use {value:?} as {what}: {why}")]
    Value { what: &'static str, value: String, why: &'static str },
    /// No suite has a package: its name (with the version if one was requested), and the suites.
    #[error("cannot find package {0} in {1}")]
    NoPackage(String, String),
    /// A checksum differs.
    #[error("cannot verify {what}: its checksum is {actual}, wanted {expected}")]
    Checksum { what: String, actual: String, expected: String },
    /// A signature is missing or made with another key.
    #[error("cannot verify the signature of {what} with the keys in {keys}: {reason}")]
    Signature { what: String, keys: String, reason: String },
    /// A repository's metadata cannot be parsed.
    #[error("cannot read the repository metadata {0}")]
    Metadata(String, #[source] MetadataError),
    /// A download ended too early; sizes in bytes.
    #[error("cannot download {url}: {received} bytes arrived, {announced} were announced")]
    Truncated { url: String, received: u64, announced: u64 },
    /// A server refused a download: the address, and the HTTP status.
    #[error("cannot download {0}: the server answers {1}")]
    Status(String, u16),
    /// A download failed.
    #[error("cannot download {0}")]
    Transfer(String, #[source] Box<dyn Error + Send + Sync>),
    /// A host must not be contacted, or cannot be contacted in the way that the site configures.
    #[error(transparent)]
    Net(#[from] NetError),
    /// A tree has another layout than the definition states. The text names the expected path, the tree, and the existing names.
    #[error("cannot find {0}")]
    Layout(String),
    /// An unpacked tree is not the kernel's header set.
    #[error("cannot read the header set")]
    Tree(#[from] TreeError),
    /// A file or tree named by the command or a definition is unusable, with a remedy.
    #[error("{message}")]
    Unusable { message: String, hint: String },
    /// A file named by the command or a definition does not exist.
    #[error("cannot find {}: there is no such file or directory", .0.display())]
    Absent(PathBuf),
    /// The store in the registry failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A header set in the store does not match its annotations or is gone, with a remedy.
    #[error("{message}")]
    StoredHeaders { message: String, hint: String },
    /// A local file operation failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// With `--offline`, neither the cache nor the store has an input. `hint` is a remedy, and `source` the upstream error.
    #[error(
        "cannot find {what}: it is neither in the cache nor in the registry's store, and --offline forbids other \
         hosts"
    )]
    UnavailableOffline { what: String, hint: &'static str, source: Box<FetchError> },
    /// No registry is configured as a store.
    #[error("cannot store the input beside the images: no registry was named")]
    NoStore,
    /// A tree cannot be packed.
    #[error("cannot pack the tree")]
    Pack(#[from] PayloadError),
    /// A layer cannot be written.
    #[error("cannot pack the tree")]
    Layer(#[from] LayerError),
    /// The work was canceled because the program is shutting down.
    #[error("fetching was interrupted")]
    Interrupted,
}

impl From<walkdir::Error> for FetchError {
    fn from(error: walkdir::Error) -> Self {
        Self::Io(error.into())
    }
}

/// Reason why metadata cannot be parsed: not XML, another structure, or an exceeded limit.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct MetadataError(pub(super) String);

impl FetchError {
    /// Creates an error about a definition's value.
    pub(super) fn value(what: &'static str, value: &str, why: &'static str) -> Self {
        Self::Value { what, value: value.chars().take(200).collect(), why }
    }

    /// Creates an error about something that the command or a definition names.
    pub(super) fn unusable(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Unusable { message: message.into(), hint: hint.into() }
    }

    /// Creates an error about a choice of packages or a program that would fail again.
    pub(super) fn permanent(action: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Program { action: action.into(), message: message.into(), transient: false }
    }

    /// Creates an error about a file or package with another SHA-256; both are hexadecimal digits.
    pub(super) fn sha256(what: impl Into<String>, actual: &str, expected: &str) -> Self {
        let [actual, expected] = [actual, expected].map(|hex| format!("sha256:{hex}"));
        Self::Checksum { what: what.into(), actual, expected }
    }

    /// Whether a retry may succeed with nothing changed.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Program { transient, .. } => *transient,
            Self::Truncated { .. } => true,
            Self::Transfer(_, source) => connection_problem(source.as_ref()).is_transient(),
            Self::Net(error) => error.is_transient(),
            Self::UnavailableOffline { source, .. } => source.is_transient(),
            Self::Store(error) => error.is_transient(),
            Self::Status(_, status) => *status >= 500 || matches!(status, 408 | 425 | 429),
            _ => false,
        }
    }

    /// Whether a registry or another host refused the request (401, 403), so that it is unknown whether the input exists.
    pub fn is_refusal(&self) -> bool {
        matches!(
            self,
            Self::Status(_, 401 | 403)
                | Self::Store(StoreError::Registry(
                    registry::RegistryError::Denied { .. } | registry::RegistryError::TokenServer { .. }
                ))
        )
    }

    /// Whether the error is in what the command or a definition names, rather than in the environment.
    pub fn is_usage(&self) -> bool {
        match self {
            Self::Net(NetError::Offline { .. }) | Self::Unusable { .. } | Self::Tree(_) => true,
            // A malformed archive is a usage error; the other faults are on this machine.
            Self::Unpack(_, source) => !matches!(source, UnpackError::Io(_) | UnpackError::Start(..)),
            _ => false,
        }
    }

    /// Whether the error concerns an upstream host, so that another site may have fetched the input.
    pub(super) fn is_upstream(&self) -> bool {
        match self {
            Self::Net(_)
            | Self::NoAptSource(_)
            | Self::NoMirror(..)
            | Self::NoPackage(..)
            | Self::Program { .. }
            | Self::Transfer(..)
            | Self::Status(..)
            | Self::Truncated { .. }
            | Self::Metadata(..) => true,
            // A registry other than the store's.
            Self::Store(StoreError::Registry(error)) => registry::is_forbidden(error),
            _ => false,
        }
    }

    /// Returns a remedy, if there is a known one.
    pub fn hint(&self) -> Option<String> {
        if is_full_disk(self) {
            return Some(FULL_DISK.to_owned());
        }
        let text = match self {
            Self::Start("repo2solv" | "testsolv", source) if source.kind() == io::ErrorKind::NotFound => {
                "install libsolv-tools, which chooses RPM packages"
            }
            Self::Start(program, source) if source.kind() == io::ErrorKind::NotFound => {
                return Some(format!("install {program}, or put it in the search path"));
            }
            Self::Tree(error) => error.remedy(),
            Self::Net(error) => return error.hint(),
            Self::Transfer(_, source) => {
                return connection_hint(connection_problem(source.as_ref()), "the server");
            }
            Self::Store(error) => return error.hint(),
            Self::Pack(error) => return error.hint(),
            Self::Unusable { hint, .. } | Self::StoredHeaders { hint, .. } => hint,
            Self::UnavailableOffline { hint, .. } => hint,
            Self::NoStore => "name one with --registry",
            Self::NoAptSource(_) => "set `mirror` and `signedBy` beside `suites`",
            Self::NoMirror(..) => {
                "name a mirror: `mirrors: [{from: \"https://ubuntu.invalid/\", to: [...]}]`"
            }
            Self::NoPackage(..) => "check the package's name, the suites and the components",
            Self::Signature { .. } => {
                "check the file's origin; if the distribution has a new key, add the key to the key file"
            }
            Self::Metadata(..) => {
                "the mirror is damaged, or the address is not an RPM repository: check the address"
            }
            Self::Checksum { .. } => {
                "the file is damaged or was replaced: fetch it again, or correct the sha256 in the definition"
            }
            Self::Absent(_) => {
                "create it, or name another path in the definition; relative paths are resolved against the \
                 definitions directory"
            }
            Self::Status(_, 401 | 403) => {
                "the server requires credentials or rejects this client: set `login` of the host in site.yaml"
            }
            Self::Status(_, 407) => "the proxy requires credentials: set `proxy.login` in site.yaml",
            Self::Status(_, 404 | 410) => "check the address",
            Self::Unpack(_, source) => return unpack_hint(source).map(str::to_owned),
            Self::Truncated { .. } => {
                "the server, or a proxy in front of it, ended the transfer early: run farrier again, or \
                 provide the file as a `path` source"
            }
            Self::Program { message, .. } => return program_hint(message).map(str::to_owned),
            _ => return None,
        };
        Some(text.to_owned())
    }
}

fn unpack_hint(error: &UnpackError) -> Option<&'static str> {
    Some(match error {
        UnpackError::Start("rpm2archive", _) => "install rpm2cpio, whose rpm2archive reads RPM packages",
        UnpackError::Start(..) => "install it, or put it in the search path",
        UnpackError::Outside(_) | UnpackError::ThroughLink(_) => {
            "legitimate archives have no such entries: check the archive's origin; farrier did not use it"
        }
        UnpackError::Kind(..) => {
            "only files, directories and links are unpacked: create the archive again without this entry"
        }
        UnpackError::Limit(_) => {
            "the archive is larger than any header set or source: put into it only what is needed (of a kernel's \
             build tree: tar --exclude='*.o' --exclude=.git), or name the directory itself"
        }
        UnpackError::Unsupported(_) => "unpack it, and name the directory as a `path` source",
        UnpackError::Damaged(_) | UnpackError::Truncated { .. } | UnpackError::Checksum { .. } => {
            "the archive is incomplete or not an archive: fetch it again"
        }
        UnpackError::Io(_) => return None,
    })
}

fn program_hint(message: &str) -> Option<&'static str> {
    if message.contains("does not have a Release file") {
        Some("the mirror does not have this suite: check `suites`, or set `mirror` and `signedBy` beside it")
    } else if ["401  Unauthorized", "403  Forbidden"].iter().any(|status| message.contains(status)) {
        // apt then also calls the archive unsigned.
        Some("the server requires credentials or rejects this client: add the host to /etc/apt/auth.conf")
    } else if message.contains(" is not valid yet (invalid for") {
        Some("the clock of this machine is behind: correct it")
    } else if message.contains("NO_PUBKEY") || message.contains("is not signed") {
        Some("the archive's key is unknown: set `signedBy` to its keyring")
    } else if message.contains(" is expired (invalid since") {
        Some(
            "the mirror is outdated, or the clock is wrong; for a mirror that is frozen on purpose, add \
             `[check-valid-until=no]` to its line in /etc/apt/sources.list.d",
        )
    } else if message.contains("nothing provides ")
        || message.starts_with("package ") && message.contains(" does not exist")
    {
        Some(
            "correct the package's name, or add the repository with the missing package to the family's \
             `from`; for a repository without a mirror, name one in site.yaml (`mirrors`)",
        )
    } else if exceeds_memory(message) {
        Some(
            "an object of the repository needs more than the 2 GiB of memory that git may use: name an archive of the commit \
             as a `url` or `path` source",
        )
    } else if message.contains("The requested URL returned error: 30") {
        Some(
            "the Git server redirects, which farrier does not follow: name the repository's own address, often the one with `.git` at its end",
        )
    } else if message.contains("could not read Username") || message.contains("Authentication failed") {
        Some("set the credentials for the Git server: `login` of the host in site.yaml")
    } else if message.contains("Host key verification failed") {
        Some("add the SSH key of the Git server to the file named by `knownHosts` of the host in site.yaml")
    } else if message.contains("Permission denied (publickey") {
        Some("name a key that the Git server accepts: `sshKey` of the host in site.yaml")
    } else if message.contains("[remote rejected]") {
        Some("allow farrier to push to the branch, or set `proposals` in the rollout, for pull requests")
    } else {
        None
    }
}
