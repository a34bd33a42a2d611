//! Adapter: what a site carries to another one that nothing outside can reach: one file, an OCI layout in a tar, in zstd.
//!
//! The file is a row of zstd frames, one for each entry of the tar: `oci-layout`, `index.json`, `farrier-bundle.json`, the
//! manifests, the other blobs, the tar's end. A skippable frame with the frames' lengths closes it. So `zstd -dc | tar -x`
//! gives a layout, and farrier reads any blob without the others. Every byte follows from the index and from the blobs,
//! whose digests the index has, and the index's digest stands at the end.

mod collect;
pub mod contents;
mod definitions;
mod entry;
mod error;
mod export;
mod frame;
mod import;
mod index;
mod meter;
mod read;
mod referrers;
mod review;
mod signature;
mod since;
mod trailer;
mod verify;
mod write;

pub use collect::{Collection, Wanted, collect};
pub use contents::{Content, ContentKind, Needed, needed};
pub use definitions::write_definitions;
pub use error::{BundleError, Result};
pub use export::{Exported, export};
pub use import::{Imported, Taken, Target, import};
pub use index::{Base, Blob, BundleIndex, FORMAT, Listed};
pub use meter::{Meter, Phase};
pub use read::Bundle;
pub use referrers::with_referrers;
pub use since::Since;
pub use verify::Verified;

#[cfg(test)]
mod tests;
