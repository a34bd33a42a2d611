//! Adapter: operations on images in a registry: sign, verify, copy, garbage-collect, combine several kernels in one
//! image.

mod contents;
mod copies;
mod documents;
mod gc;
mod keys;
mod mirror;
mod record;
mod root_fs;
mod shared_tags;
mod sign;
mod signatures;
mod sources;
mod stored_inputs;
mod union;
mod verify;

pub(crate) use contents::contents;
pub(crate) use documents::{BILL, CHECK_REPORT, Claim, Documents, PROVENANCE};
pub use gc::{GcImage, GcOptions, GcReport, GcState, Leftover, StoredKind, gc};
pub(crate) use keys::can_sign_images;
pub use keys::{read_keys, sign_bytes, verification_keys};
pub use mirror::{MirrorReport, MirroredInput, MissingInput, Selection, find_inputs, mirror_inputs};
pub use record::REPOSITORY as RECORDS;
pub(crate) use record::{LastRecord, build_times, record_build, record_kernels};
pub(crate) use root_fs::{
    BaseImage, DEFAULT_PATH, base_image, layer_files, published_root_fs, root_fs_layer, runtime_base,
    toolchain_tree,
};
pub(crate) use shared_tags::tag_beside_others;
pub(crate) use signatures::{StoredImage, look_up_signatures};
pub(crate) use sources::{fetch_source, look_at_sources};
pub(crate) use stored_inputs::look_at_root_fs;
pub use stored_inputs::store_of;
pub use union::publish_union;
pub use verify::{CheckResult, VerifyCheck, VerifyReport, verify};

/// farrier's version, for the documents about images.
pub(crate) const FARRIER: &str = env!("CARGO_PKG_VERSION");
