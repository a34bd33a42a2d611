//! Why a bundle was not written, read or taken over.

use std::{io, path::PathBuf};

use crate::{
    image::Digest,
    oci::ImageError,
    registry::{self, RegistryError},
};

/// Why a bundle was not written, read or taken over.
#[derive(Debug, thiserror::Error)]
pub enum BundleError {
    /// A file that is no bundle.
    #[error("{path} is no bundle: {reason}")]
    NotABundle {
        /// The file.
        path: PathBuf,
        /// What it has or lacks.
        reason: String,
    },
    /// A bundle in a form of later farriers.
    #[error("{path} has format {version}, made by {made_by}; this farrier reads formats up to {known}")]
    Newer {
        /// The file.
        path: PathBuf,
        /// Its format.
        version: u64,
        /// Who made it.
        made_by: String,
        /// The newest format that is read.
        known: u32,
    },
    /// A bundle whose end is missing.
    #[error("{path} is truncated: it has {bytes} bytes and {reason}")]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Its length.
        bytes: u64,
        /// How that is known.
        reason: &'static str,
    },
    /// A bundle that is not as it was written.
    #[error("{path} is damaged at byte {at}, in {what}: {reason}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Where the part begins.
        at: u64,
        /// Which part.
        what: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A bundle that was made with something missing or wrong in it.
    #[error("{path} contradicts itself: {reason}")]
    Inconsistent {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A delta whose base is not there.
    #[error(
        "{count} blobs, {first} first, are neither in the bundle nor in {registry}: \
         the bundle only adds to bundle {base}, made from {from}"
    )]
    BaseMissing {
        /// How many.
        count: usize,
        /// One of them.
        first: Digest,
        /// Where they were looked for.
        registry: String,
        /// The base's identity.
        base: Digest,
        /// Where the base was made.
        from: String,
    },
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
    /// A previous bundle's index that cannot be read.
    #[error("read the index of the previous bundle in {path}: {reason}")]
    Since {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// Files that definitions from the bundle would replace.
    #[error("definitions: {} in {dir} differ from those in the bundle", files.join(", "))]
    Differs {
        /// The directory.
        dir: PathBuf,
        /// The files.
        files: Vec<String>,
    },
    /// Definitions that cannot be unpacked.
    #[error("unpack the definitions")]
    Unpack(#[from] crate::archive::UnpackError),
    /// A manifest.
    #[error("{reference} is not what it should be")]
    Manifest {
        /// Which.
        reference: String,
        /// Why.
        #[source]
        source: ImageError,
    },
    /// A file of this machine.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The registry.
    #[error(transparent)]
    Registry(#[from] RegistryError),
}

impl BundleError {
    /// What to do about it, where that is clear.
    pub fn hint(&self) -> Option<String> {
        let text = match self {
            Self::NotABundle { .. } => "name a file that `farrier bundle export` has written".to_owned(),
            Self::Newer { .. } => {
                "use a farrier that is at least as new as the one that made it, or export it again with this one"
                    .to_owned()
            }
            Self::Truncated { .. } => {
                "copy it again, or run the same `farrier bundle export` again: it goes on where it stopped".to_owned()
            }
            Self::Damaged { .. } => "copy it again and compare its sha256; nothing was pushed".to_owned(),
            Self::Inconsistent { .. } => "export it again; nothing was pushed".to_owned(),
            Self::BaseMissing { .. } => "import that bundle first, or export again without --since".to_owned(),
            Self::Absent(_) => {
                "publish it first: `farrier prebuild`, or `farrier plan` to see what is missing".to_owned()
            }
            Self::Nothing(_) => "publish images for the kernel first (`farrier prebuild --kernel ...`), or \
                                 name another kernel or image"
                .to_owned(),
            Self::Exists(_) => "remove it, or write to another file with --to".to_owned(),
            Self::Busy(_) => "wait for it, or write to another file with --to".to_owned(),
            Self::Since { .. } => {
                "name a bundle, or what `farrier bundle inspect -o json` printed of it".to_owned()
            }
            Self::Differs { .. } => {
                "name an empty directory and compare, or pass --overwrite to take those of the bundle".to_owned()
            }
            Self::Io(source) if source.kind() == io::ErrorKind::StorageFull => {
                "free some space and run the same command again: it goes on after what is whole".to_owned()
            }
            Self::Registry(error) => return registry::hint(error),
            Self::Io(_) | Self::Manifest { .. } | Self::Unpack(_) => return None,
        };
        Some(text)
    }

    /// Is an argument at fault, rather than what it leads to?
    pub fn is_usage(&self) -> bool {
        matches!(self, Self::Exists(_) | Self::Since { .. } | Self::NotABundle { .. })
    }
}
