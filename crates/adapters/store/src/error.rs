//! Errors of the store.

use farrier_core::image::{Digest, ReferenceError};
use oci::{ImageError, LayerError};

use super::TrustFault;
use crate::registry::{self, RegistryError};

/// Reason why an operation on the store failed.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The tag already has other content, with this digest.
    #[error("{0} already exists with other content: {1}")]
    Taken(String, Digest),
    /// The content of the reference is not a valid farrier artifact, for this reason.
    #[error("{0} is not a valid farrier artifact: {1}")]
    NotAnArtifact(String, String),
    /// The artifact is not signed by one of the site's keys, for this reason.
    #[error("{0} in the store is not signed with a key of this site: {1}")]
    Untrusted(String, String),
    /// Signing keys cannot be read, or a signature cannot be made or looked up.
    #[error(transparent)]
    Trust(#[from] TrustFault),
    /// The kernel release or the key of the stored input does not fit into a tag.
    #[error("{0:?} is too long for a tag")]
    Tag(String),
    /// The registry's prefix is too long to append a repository name.
    #[error(transparent)]
    Reference(#[from] ReferenceError),
    /// A manifest cannot be written.
    #[error(transparent)]
    Manifest(#[from] ImageError),
    /// A definitions directory cannot be packed.
    #[error("cannot pack definitions")]
    Pack(#[from] std::io::Error),
    /// A file of a definitions directory cannot be packed.
    #[error("cannot pack definitions")]
    Layer(#[from] LayerError),
    /// A registry request failed.
    #[error(transparent)]
    Registry(#[from] RegistryError),
}

impl StoreError {
    /// Whether a retry of the same operation may succeed.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Registry(error) => error.is_transient(),
            Self::Trust(fault) => fault.is_transient,
            _ => false,
        }
    }

    /// Returns a remedy, if there is a known one.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Taken(reference, _) => Some(format!(
                "a published tag never changes: delete {reference} in the registry if the new content is right"
            )),
            Self::NotAnArtifact(reference, _) => {
                Some(format!("delete {reference} in the registry, or use another prefix with --registry"))
            }
            Self::Untrusted(..) => Some(
                "store the input again at the site that made it, with the key of imageSigning: run `farrier \
                 mirror`, or `farrier headers import --replace`; if another team stored the input, name that \
                 team's key in policy.requireSigned"
                    .to_owned(),
            ),
            Self::Trust(fault) => fault.hint.clone(),
            Self::Registry(error) => registry::hint(error),
            Self::Pack(_) | Self::Layer(_) | Self::Tag(_) | Self::Reference(_) | Self::Manifest(_) => None,
        }
    }
}
