//! Why the store did not do what it was asked.

use super::TrustFault;
use crate::{
    image::{Digest, ReferenceError},
    oci::{ImageError, LayerError},
    registry::{self, RegistryError},
};

/// Why the store did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The tag holds something else: its digest.
    #[error("{0} is taken: it holds {1}")]
    Taken(String, Digest),
    /// What stands under the reference is not what farrier keeps there, and why.
    #[error("{0} is not what it should be: {1}")]
    NotAnArtifact(String, String),
    /// What stands under the reference is not signed with a key of this site, and why.
    #[error("{0} in the store is not signed with a key of this site: {1}")]
    Untrusted(String, String),
    /// Keys that cannot be read, or a signature that cannot be made or looked up.
    #[error(transparent)]
    Trust(#[from] TrustFault),
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
    #[error("pack definitions")]
    Pack(#[from] std::io::Error),
    /// A file of a definitions directory that cannot be packed.
    #[error("pack definitions")]
    Layer(#[from] LayerError),
    /// The registry.
    #[error(transparent)]
    Registry(#[from] RegistryError),
}

impl StoreError {
    /// May the same thing work in a moment without any change?
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Registry(error) => error.is_transient(),
            Self::Trust(fault) => fault.is_transient,
            _ => false,
        }
    }

    /// What to do about it, where that is clear.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Taken(reference, _) => Some(format!(
                "a published tag never changes: delete {reference} in the registry if the new content is right"
            )),
            Self::NotAnArtifact(reference, _) => {
                Some(format!("delete {reference} in the registry, or use another prefix with --registry"))
            }
            Self::Untrusted(..) => Some(
                "store it again where its source is, with the key of imageSigning: `farrier mirror` does that, or `farrier \
                 headers import --replace`; if another team stored it, name its key in policy.requireSigned"
                    .to_owned(),
            ),
            Self::Trust(fault) => fault.hint.clone(),
            Self::Registry(error) => registry::hint(error),
            Self::Pack(_) | Self::Layer(_) | Self::Tag(_) | Self::Reference(_) | Self::Manifest(_) => None,
        }
    }
}
