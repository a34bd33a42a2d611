//! Pure: images in OCI form: layers, configuration, manifest, annotations. Bytes in, bytes out.
