//! Writes, verifies and imports bundles for `farrier bundle`, and mirrors inputs for `farrier mirror`.
//!
//! A bundle carries images and their inputs to an air-gapped site. It is one file: an OCI layout in a tar, compressed
//! with zstd.
//!
//! The file is a sequence of zstd frames, one for each entry of the tar: `oci-layout`, `index.json`,
//! `farrier-bundle.json`, the manifests, the other blobs, the tar's end. The last frame is a skippable one that
//! contains the lengths of all frames. `zstd -dc | tar -x` therefore unpacks a layout, and farrier reads each blob
//! without the others.
//!
//! The index and the blobs determine every byte. The index contains the blobs' digests, and the end of the file
//! contains the index's digest.
#![forbid(unsafe_code)]

mod collect;
pub mod contents;
mod definitions;
mod entry;
mod error;
mod export;
mod frame;
mod import;
mod index;
mod license;
mod meter;
mod mirror;
mod moving;
mod order;
mod previous;
mod read;
mod received;
mod referrers;
mod review;
mod signature;
mod trailer;
mod verify;
mod volume;
mod write;

pub use collect::{Collection, ContentRequest, collect};
pub use contents::{Content, ContentKind, Needed, Selection, needed};
pub use definitions::{check_definitions, write_definitions};
pub use error::{BundleError, Result};
pub use export::{Exported, earlier_order, export, find_finished, is_complete};
pub use import::{ImportOutcome, ImportSummary, Imported, Target, import};
pub use index::{Base, Blob, BundleIndex, FORMAT, Listed};
pub use license::{License, ensure_exportable, licenses};
pub use meter::{Meter, Phase};
pub use mirror::{FoundInputs, MirrorReport, MirroredInput, MissingInput, find_inputs, mirror_inputs};
pub use order::{Older, Order};
pub use previous::PreviousBundle;
pub use read::Bundle;
pub use referrers::with_referrers;
pub use verify::Verified;

#[cfg(test)]
mod tests;
