//! Operations on images in a registry: sign, verify and copy images, and combine several kernels in one image. Also records
//! builds, and finds the sources, root file systems and stored inputs of a build.

mod contents;
mod copies;
mod documents;
mod keys;
mod outputs;
mod record;
mod root_fs;
mod rotate;
mod shared_tags;
mod sign;
mod signatures;
mod sources;
mod stored_inputs;
mod union;
mod verify;

pub use contents::look_up_contents;
pub use copies::{ImageCopy, copy_artifact, copy_image, copy_tag};
pub(crate) use documents::Claim;
pub use documents::{BILL_OF_MATERIALS, CHECK_REPORT, Documents, PROVENANCE};
pub use keys::{ImageSigner, check_revoked_keys, named_keys, verification_keys};
pub(crate) use outputs::output_maker;
pub(crate) use record::record_build;
pub use record::{
    LastRecord, REPOSITORY as RECORDS, add_to_record, build_times, day, read_record, record_kernels,
};
pub(crate) use root_fs::{
    BaseImage, DEFAULT_PATH, base_image, layer_files, published_root_fs, runtime_base, toolchain_tree,
};
pub use root_fs::{base_root, root_fs_layer, root_fs_tag};
pub use rotate::{RotatedArtifact, RotationOutcome, rotate};
pub(crate) use shared_tags::tag_for_architecture;
pub use signatures::{StoredImage, look_up_signatures};
pub(crate) use sources::fetch_source;
pub use sources::{build_products, look_up_sources};
pub use stored_inputs::{look_up_root_fs, store_of};
pub use union::publish_union;
pub use verify::{CheckResult, VerifyCheck, VerifyReport, verify};

/// farrier's version, for the documents about images.
pub const FARRIER: &str = env!("CARGO_PKG_VERSION");
