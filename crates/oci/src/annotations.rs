//! Annotation keys from the OCI image specification and from tools that extend it.

/// RFC 3339 creation time (OCI image spec, `annotations.md`, which defines all `org.opencontainers` keys).
pub const CREATED: &str = "org.opencontainers.image.created";
/// Human-readable title.
pub const TITLE: &str = "org.opencontainers.image.title";
/// Version of the packaged software.
pub const VERSION: &str = "org.opencontainers.image.version";
/// Digest of the base image's manifest.
pub const BASE_DIGEST: &str = "org.opencontainers.image.base.digest";
/// Predicate type of an attestation, signed or unsigned (in-toto attestation framework).
pub const PREDICATE_TYPE: &str = "in-toto.io/predicate-type";
/// Name of a manifest in the index of a layout directory.
pub const REF_NAME: &str = "org.opencontainers.image.ref.name";
