//! Errors of writing, reading and importing bundles.

use std::{
    collections::BTreeSet,
    io,
    ops::Range,
    path::{Path, PathBuf},
};

use farrier_core::image::Digest;
use farrier_store::registry::{self, RegistryError};
use oci::ImageError;

use super::{Older, moving::MOVING};

/// Result of an operation on a bundle.
pub type Result<T, E = BundleError> = std::result::Result<T, E>;

/// Failure of an operation on a bundle.
#[derive(Debug, thiserror::Error)]
pub enum BundleError {
    /// The file is not a bundle: path and reason.
    #[error("{0} is not a bundle: {1}")]
    NotABundle(PathBuf, String),
    /// The bundle is truncated, damaged or in a newer format. Holds a remedy.
    #[error("{path} {message}")]
    Unusable { path: PathBuf, message: String, hint: &'static str },
    /// The base of a delta is missing in the registry.
    #[error(
        "{count} blobs, the first is {first}, are neither in the bundle nor in {registry}: the bundle is a \
         delta to bundle {base}, made from {from}"
    )]
    BaseMissing { count: usize, first: Digest, registry: String, base: Digest, from: String },
    /// The site accepted a newer bundle of the same exporter.
    #[error("{0}")]
    Older(Box<Older>),
    /// The registry refused to move a tag that must move.
    #[error("{0} cannot be moved: the registry may have immutable tags")]
    Immutable(String, #[source] RegistryError),
    /// Content for the bundle is not in the registry.
    #[error("{0} is not in the registry")]
    Absent(String),
    /// There is no content for the bundle.
    #[error("nothing to export: {0}")]
    Nothing(String),
    /// The site's policy does not let these images and sources leave the site.
    #[error("licenses forbid the bundle: {}", .0.iter().map(String::as_str).collect::<Vec<_>>().join("; "))]
    Restricted(BTreeSet<String>),
    #[error("{0} already exists")]
    Exists(PathBuf),
    #[error("another farrier is writing {0}")]
    Busy(PathBuf),
    /// The index of the previous bundle is unreadable: file and reason.
    #[error("cannot read the index of the previous bundle in {0}: {1}")]
    NoPreviousBundle(PathBuf, String),
    /// Definitions from the bundle would replace these files of a directory.
    #[error("definitions: {files} in {0} differ from the files in the bundle", files = .1.join(", "))]
    Differs(PathBuf, Vec<String>),
    /// A file of the definitions would be written outside the directory, or is forbidden: path and reason.
    #[error("definitions: {0} {1}")]
    Outside(PathBuf, &'static str),
    /// The definitions add commands or templates: directory and differences.
    #[error("the bundle's definitions add commands or templates to {0}:\n{1}")]
    NotAccepted(PathBuf, String),
    /// None of the given keys signed the bundle: path and reason.
    #[error("{0} is not signed: {1}")]
    Unsigned(PathBuf, String),
    /// The bundle names another key as its signer: path and fingerprint.
    #[error("{0} is signed by {1}, which is not among the given keys")]
    OtherSigner(PathBuf, Digest),
    /// The definitions cannot be unpacked.
    #[error("cannot unpack the definitions")]
    Unpack(#[from] farrier_local::archive::UnpackError),
    /// A manifest or index is invalid: name and cause.
    #[error("{0} is not valid")]
    Manifest(String, #[source] ImageError),
    #[error("cannot write the bundle's index")]
    Index(#[from] ImageError),
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Registry(#[from] RegistryError),
}

impl BundleError {
    pub(super) fn truncated(path: &Path, bytes: u64, reason: &str) -> Self {
        let message = format!("is truncated: it has {bytes} bytes and {reason}");
        let hint = "copy it again, or run the same `farrier bundle export` again to resume the export";
        Self::Unusable { path: path.to_owned(), message, hint }
    }

    /// Creates the error for damage to an entry, which is at these bytes of the file.
    pub(super) fn damaged(path: &Path, bytes: &Range<u64>, entry: &str, reason: &str) -> Self {
        let Range { start, end } = bytes;
        let message =
            format!("is damaged at bytes {start} to {}, in {entry}: {reason}", end.saturating_sub(1));
        let hint = "copy it again and compare its sha256; nothing was pushed";
        Self::Unusable { path: path.to_owned(), message, hint }
    }

    /// Creates the error for a bundle that was exported with missing or wrong content.
    pub(super) fn inconsistent(path: &Path, reason: &str) -> Self {
        let hint = "export it again; nothing was pushed";
        Self::Unusable { path: path.to_owned(), message: format!("is inconsistent: {reason}"), hint }
    }

    /// Suggested remedy, if one is known.
    pub fn hint(&self) -> Option<String> {
        let text = match self {
            Self::NotABundle(..) => "name a file that `farrier bundle export` wrote",
            Self::Unusable { hint, .. } => hint,
            Self::Older(_) => {
                "import the newest bundle of this exporter, or pass --allow-older to go back; no tag moved back"
            }
            Self::Immutable(..) => {
                return Some(format!(
                    "set `immutableTags: true` for this host in site.yaml, or exempt these tags from immutability: {MOVING}; then \
                     import again: content that the registry has is not sent again"
                ));
            }
            Self::BaseMissing { .. } => "import that bundle first, or export again without --since",
            Self::Absent(_) => {
                "publish it first: `farrier prebuild`, or `farrier plan` to see what is missing"
            }
            Self::Nothing(_) => {
                "publish images for the kernel first (`farrier prebuild --kernel ...`), or name another kernel or image"
            }
            Self::Restricted(_) => {
                "omit these images (--image); `redistribute: terms`: meet the license's terms, then add the image to policy.acceptTerms \
                 in site.yaml; with a permission, correct `redistribute` in the definition and publish the image with \
                 `farrier build --push --force`"
            }
            Self::Exists(_) => "remove it, or write to another file with --to",
            Self::Busy(_) => "wait for it, or write to another file with --to",
            Self::NoPreviousBundle(..) => {
                "name a bundle, or the output of `farrier bundle inspect -o json` for it"
            }
            Self::Differs(..) => {
                "name an empty directory and compare, or pass --overwrite to replace the files"
            }
            Self::Outside(..) => {
                "remove the file at the site that exports the bundle, or name a directory without such a \
                 link; nothing was written"
            }
            Self::NotAccepted(..) => {
                "they run with farrier's rights: review them, then pass --accept; nothing was written or \
                 pushed"
            }
            Self::OtherSigner(..) => {
                "pass the public key with this fingerprint with --key, if you trust its owner; nothing was pushed"
            }
            Self::Unsigned(..) => {
                "copy the bundle's .sig file as well, or name it with --signature, and pass the public key of the exporting site (its \
                 imageSigning) with --key; --insecure-no-signature imports the bundle unverified; nothing was pushed"
            }
            Self::Io(source) if source.kind() == io::ErrorKind::StorageFull => {
                "free some space and run the same command again: complete content is kept"
            }
            Self::Registry(error) => return registry::hint(error),
            Self::Io(_) | Self::Manifest(..) | Self::Index(_) | Self::Unpack(_) => return None,
        };
        Some(text.to_owned())
    }

    /// Whether a command-line argument is at fault, rather than the content of a file.
    pub fn is_usage(&self) -> bool {
        matches!(self, Self::Exists(_) | Self::NoPreviousBundle(..) | Self::NotABundle(..))
    }
}
