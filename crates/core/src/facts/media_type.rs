//! Media types of the artifacts that farrier publishes.

pub use oci::media_type::*;

/// A check report: whether the kernel's loader accepts an image's modules.
pub const CHECK_REPORT: &str = "application/vnd.farrier.check-report.v1+json";
/// A bill of materials: CycloneDX in JSON.
pub const CYCLONEDX: &str = "application/vnd.cyclonedx+json";
/// A bill of materials: SPDX in JSON.
pub const SPDX: &str = "application/spdx+json";
/// A statement about an image, such as its provenance.
pub const IN_TOTO: &str = "application/vnd.in-toto+json";
/// A kernel's header set: one layer, a tree rooted at `/`.
pub const HEADERS: &str = "application/vnd.farrier.headers.v1";
/// A source of a driver image: one layer, which is the published file or a directory packed as an archive.
pub const SOURCE: &str = "application/vnd.farrier.source.v1";
/// The layer of a source that is a single file, unchanged from its publisher.
pub const SOURCE_FILE: &str = "application/octet-stream";
/// A root file system built from packages: one layer.
pub const ROOT_FS: &str = "application/vnd.farrier.rootfs.v1";
/// A definitions directory: one layer.
pub const DEFINITIONS: &str = "application/vnd.farrier.definitions.v1";
/// The kernel record: a manifest with an annotation that says when each kernel was last seen.
pub const KERNEL_RECORD: &str = "application/vnd.farrier.kernel-record.v1";
/// The build record: a manifest with an annotation that says how long builds took.
pub const BUILD_TIMES: &str = "application/vnd.farrier.build-times.v1";
