//! Media types (OCI image spec `media-types.md`; Docker's `manifest-v2-2.md`).

/// An OCI image manifest.
pub const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
/// An OCI image index.
pub const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";
/// An OCI image configuration.
pub const OCI_CONFIG: &str = "application/vnd.oci.image.config.v1+json";
/// A layer: tar.
pub const OCI_LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
/// A layer: tar, compressed with gzip.
pub const OCI_LAYER_GZIP: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
/// A layer: tar, compressed with zstd.
pub const OCI_LAYER_ZSTD: &str = "application/vnd.oci.image.layer.v1.tar+zstd";
/// The empty configuration of an artifact (image spec, `manifest.md`, "Guidance for an Empty Descriptor").
pub const OCI_EMPTY: &str = "application/vnd.oci.empty.v1+json";
/// Docker's image manifest.
pub const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
/// Docker's manifest list.
pub const DOCKER_LIST: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
/// Docker's layer: tar.
pub const DOCKER_LAYER: &str = "application/vnd.docker.image.rootfs.diff.tar";
/// Docker's layer: tar, compressed with gzip.
pub const DOCKER_LAYER_GZIP: &str = "application/vnd.docker.image.rootfs.diff.tar.gzip";

/// Manifest types of a single image.
pub const IMAGES: [&str; 2] = [OCI_MANIFEST, DOCKER_MANIFEST];
/// Types of indexes.
pub const INDEXES: [&str; 2] = [OCI_INDEX, DOCKER_LIST];
/// All manifest types that farrier reads, in order of preference.
pub const MANIFESTS: [&str; 4] = [OCI_MANIFEST, DOCKER_MANIFEST, OCI_INDEX, DOCKER_LIST];

/// Whether a media type states a foreign layer, which has its own URL and which registries do not store (image spec, `layer.md`,
/// "Non-Distributable Layers").
pub fn is_foreign_layer(media_type: &str) -> bool {
    media_type.contains(".nondistributable.") || media_type.contains(".foreign.")
}

/// Returns the OCI media type of a layer with the same bytes. Returns `None` for unsupported types, such as foreign layers.
pub fn oci_layer(media_type: &str) -> Option<&'static str> {
    match media_type {
        OCI_LAYER | DOCKER_LAYER => Some(OCI_LAYER),
        OCI_LAYER_GZIP | DOCKER_LAYER_GZIP => Some(OCI_LAYER_GZIP),
        OCI_LAYER_ZSTD => Some(OCI_LAYER_ZSTD),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_layers_are_told_from_layers_of_unknown_types() {
        assert!(is_foreign_layer("application/vnd.oci.image.layer.nondistributable.v1.tar+gzip"));
        assert!(is_foreign_layer("application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"));
        for stored in
            [OCI_LAYER_ZSTD, DOCKER_LAYER_GZIP, "application/vnd.oci.image.layer.v1.tar+gzip+encrypted"]
        {
            assert!(!is_foreign_layer(stored), "{stored}");
        }
    }
}
