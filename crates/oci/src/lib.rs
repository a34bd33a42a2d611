//! Reads, assembles and writes OCI images.
//!
//! Without features, this crate only converts references, layers, configurations and manifests from and to bytes. The feature
//! `client` adds clients for registries and layout directories.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod annotations;
mod artifact;
mod assemble;
mod base;
#[cfg(feature = "client")]
pub mod client;
pub mod docker_archive;
mod entry;
mod error_chain;
mod layer;
mod manifest;
pub mod media_type;
mod reference;
mod scan;

pub use artifact::{Artifact, EMPTY, is_referrers_tag, keep_tag, referrers_tag, subject_of_tag};
pub use assemble::{Assembled, Assembly, CREATED, ENTRYPOINT_HISTORY, PAYLOAD_HISTORY, assemble};
pub use base::{Base, architecture_of};
pub use entry::{Extensions, MAX_NAME, NameError, Names, each_entry};
pub use error_chain::{error_causes, error_chain};
pub use layer::{EntryKind, Hashing, Layer, LayerError, LayerWriter, TreeDigester, compress, compress_at};
pub use manifest::{
    AnyManifest, Descriptor, ImageError, ImageIndex, ImageManifest, MAX_MANIFEST, Platform, to_json,
};
pub use reference::{
    Digest, ImageReference, MIRROR_PREFIX, ReferenceError, Repository, Tag, Version, is_docker_hub,
    mirror_name, names_host,
};
pub use scan::{LayerReader, TopLevel, Whiteout, plain_path, top_level_entry};
