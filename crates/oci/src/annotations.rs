//! Annotations that the OCI image specification and its users define.

/// RFC 3339 time of creation (OCI image spec, `annotations.md`, as all of `org.opencontainers`).
pub const CREATED: &str = "org.opencontainers.image.created";
/// Title for people.
pub const TITLE: &str = "org.opencontainers.image.title";
/// Version of the packaged software.
pub const VERSION: &str = "org.opencontainers.image.version";
/// Digest of the base image's manifest.
pub const BASE_DIGEST: &str = "org.opencontainers.image.base.digest";
/// Reference of the base image.
pub const BASE_NAME: &str = "org.opencontainers.image.base.name";
/// On a signed or unsigned statement: what it claims (in-toto attestation framework).
pub const PREDICATE_TYPE: &str = "in-toto.io/predicate-type";
/// In a layout's index: the name that a manifest goes by.
pub const REF_NAME: &str = "org.opencontainers.image.ref.name";
