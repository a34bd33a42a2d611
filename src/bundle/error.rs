//! Why a bundle was not written, read or taken over.

use std::{
    io,
    path::{Path, PathBuf},
};

use crate::{
    image::Digest,
    oci::ImageError,
    registry::{self, RegistryError},
};

/// What work on a bundle comes to.
pub type Result<T, E = BundleError> = std::result::Result<T, E>;

/// Why a bundle was not written, read or taken over.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the fields are")]
pub enum BundleError {
    /// A file that is no bundle: what it has or lacks.
    #[error("{0} is no bundle: {1}")]
    NotABundle(PathBuf, String),
    /// A bundle that is not whole, not as it was written, or in a form of later farriers; and what to do.
    #[error("{path} {message}")]
    Unusable { path: PathBuf, message: String, hint: &'static str },
    /// A delta whose base is not there.
    #[error(
        "{count} blobs, {first} first, are neither in the bundle nor in {registry}: \
         the bundle only adds to bundle {base}, made from {from}"
    )]
    BaseMissing { count: usize, first: Digest, registry: String, base: Digest, from: String },
    /// What is to go into the bundle is not there.
    #[error("{0} is not in the registry")]
    Absent(String),
    /// Nothing was found that could go into the bundle.
    #[error("nothing to export: {0}")]
    Nothing(String),
    /// The bundle to write is there already.
    #[error("{0} exists already")]
    Exists(PathBuf),
    /// Another farrier writes the same bundle.
    #[error("another farrier writes {0}")]
    Busy(PathBuf),
    /// A previous bundle's index that cannot be read: the file, and what is wrong.
    #[error("read the index of the previous bundle in {0}: {1}")]
    Since(PathBuf, String),
    /// Files of a directory that definitions from the bundle would replace.
    #[error("definitions: {files} in {0} differ from those in the bundle", files = .1.join(", "))]
    Differs(PathBuf, Vec<String>),
    /// A file of the definitions that would not be where its name says, and why.
    #[error("definitions: {0} {1}")]
    Outside(PathBuf, &'static str),
    /// Definitions that would run something new here, and what that is.
    #[error("the bundle's definitions bring commands or templates to {0}:\n{1}")]
    NotAccepted(PathBuf, String),
    /// A bundle that none of the given keys signed: the file, and why.
    #[error("{0} is not signed: {1}")]
    Unsigned(PathBuf, String),
    /// Definitions that cannot be unpacked.
    #[error("unpack the definitions")]
    Unpack(#[from] crate::archive::UnpackError),
    /// A manifest.
    #[error("{0} is not what it should be")]
    Manifest(String, #[source] ImageError),
    /// A file of this machine.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The registry.
    #[error(transparent)]
    Registry(#[from] RegistryError),
}

impl BundleError {
    pub(super) fn truncated(path: &Path, bytes: u64, reason: &str) -> Self {
        let message = format!("is truncated: it has {bytes} bytes and {reason}");
        let hint =
            "copy it again, or run the same `farrier bundle export` again: it goes on where it stopped";
        Self::Unusable { path: path.to_owned(), message, hint }
    }

    /// A part of it, which begins at that byte, is not as it was written.
    pub(super) fn damaged(path: &Path, at: u64, what: &str, reason: &str) -> Self {
        let message = format!("is damaged at byte {at}, in {what}: {reason}");
        let hint = "copy it again and compare its sha256; nothing was pushed";
        Self::Unusable { path: path.to_owned(), message, hint }
    }

    /// It was made with something missing or wrong in it.
    pub(super) fn inconsistent(path: &Path, reason: &str) -> Self {
        let hint = "export it again; nothing was pushed";
        Self::Unusable { path: path.to_owned(), message: format!("contradicts itself: {reason}"), hint }
    }

    /// What to do about it, where that is clear.
    pub fn hint(&self) -> Option<String> {
        let text = match self {
            Self::NotABundle(..) => "name a file that `farrier bundle export` has written",
            Self::Unusable { hint, .. } => hint,
            Self::BaseMissing { .. } => "import that bundle first, or export again without --since",
            Self::Absent(_) => {
                "publish it first: `farrier prebuild`, or `farrier plan` to see what is missing"
            }
            Self::Nothing(_) => {
                "publish images for the kernel first (`farrier prebuild --kernel ...`), or name another kernel or image"
            }
            Self::Exists(_) => "remove it, or write to another file with --to",
            Self::Busy(_) => "wait for it, or write to another file with --to",
            Self::Since(..) => "name a bundle, or what `farrier bundle inspect -o json` printed of it",
            Self::Differs(..) => {
                "name an empty directory and compare, or pass --overwrite to take those of the bundle"
            }
            Self::Outside(..) => {
                "take the file out where the bundle is exported, or name a directory without such a link; nothing was written"
            }
            Self::NotAccepted(..) => {
                "what they run has farrier's rights: read it, then give --accept; nothing was written or pushed"
            }
            Self::Unsigned(..) => {
                "bring the bundle's .sig file and give the public key of the site that exported it with --key (its \
                 imageSigning); --insecure-no-signature takes the bundle over unsigned; nothing was pushed"
            }
            Self::Io(source) if source.kind() == io::ErrorKind::StorageFull => {
                "free some space and run the same command again: it goes on after what is whole"
            }
            Self::Registry(error) => return registry::hint(error),
            Self::Io(_) | Self::Manifest(..) | Self::Unpack(_) => return None,
        };
        Some(text.to_owned())
    }

    /// Is an argument at fault, rather than what it leads to?
    pub fn is_usage(&self) -> bool {
        matches!(self, Self::Exists(_) | Self::Since(..) | Self::NotABundle(..))
    }
}
