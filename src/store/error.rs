//! Why the store did not do what it was asked.

use crate::{
    image::{Digest, ReferenceError},
    oci::ImageError,
    registry::RegistryError,
};

/// Why the store did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The tag holds something else.
    #[error("{reference} is taken: it holds {holds}")]
    Taken {
        /// Repository and tag.
        reference: String,
        /// What it holds.
        holds: Digest,
    },
    /// What stands there is not what farrier keeps there.
    #[error("{reference} is not what it should be: {reason}")]
    NotAnArtifact {
        /// Repository and tag.
        reference: String,
        /// What is wrong.
        reason: String,
    },
    /// A release or key that gives no tag.
    #[error("{0:?} is too long for a tag")]
    Tag(String),
    /// A registry whose prefix leaves no room for a repository.
    #[error(transparent)]
    Reference(#[from] ReferenceError),
    /// A manifest that cannot be written.
    #[error(transparent)]
    Manifest(#[from] ImageError),
    /// A definitions directory that cannot be packed.
    #[error("pack {path}")]
    Pack {
        /// The file or directory.
        path: std::path::PathBuf,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// The registry.
    #[error(transparent)]
    Registry(#[from] RegistryError),
}

impl StoreError {
    /// Whether the same thing may work in a moment without anybody changing anything.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Registry(error) if error.is_transient())
    }

    /// What to do about it, where that is clear.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Taken { reference, .. } => Some(format!(
                "a published tag never changes: delete {reference} in the registry if the new content is right"
            )),
            Self::NotAnArtifact { reference, .. } => {
                Some(format!("delete {reference} in the registry, or use another prefix with --registry"))
            }
            Self::Registry(error) => error.hint(),
            Self::Pack { .. } | Self::Tag(_) | Self::Reference(_) | Self::Manifest(_) => None,
        }
    }
}
