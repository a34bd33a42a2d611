//! Pure: images in OCI form: layers, configuration, manifest, annotations. Bytes in, bytes out.

pub mod annotations;
mod artifact;
mod assemble;
mod base;
pub mod docker_archive;
mod layer;
mod manifest;
pub mod media_type;
mod module_signer;
mod scan;
mod union;

pub use annotations::{FactsError, ImageFacts};
pub use artifact::{
    Artifact, CheckReportDocument, EMPTY, ReusedFrom, is_referrers_tag, referrers_tag, subject_of_tag,
};
pub use assemble::{Assembled, Assembly, CREATED, assemble};
pub use base::Base;
pub use layer::{ArtifactWriter, EntryKind, Layer, LayerError, LayerWriter, TreeDigester, compress};
pub use manifest::{AnyManifest, Descriptor, ImageError, ImageIndex, ImageManifest, MAX_MANIFEST, Platform};
pub use module_signer::{ModuleSignerError, ModuleSignerFact};
pub use scan::{LayerReader, TopLevel, plain_path, top_level_entry};
pub use union::{UnionNotes, UnionPart, assemble_union};
