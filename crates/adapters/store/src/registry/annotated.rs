//! Data that farrier keeps in an annotation of a manifest without content, under a tag.

use std::fmt::Display;

use farrier_core::{
    facts::media_type,
    image::{Repository, Version},
};
use oci::{Descriptor, ImageManifest};

use super::{Registry, RegistryError};

/// Reads an annotation of a manifest; `None` if the registry does not have the manifest.
pub async fn read_annotation<T, E: Display>(
    registry: &dyn Registry,
    (repository, version): (&Repository, &Version),
    annotation: &str,
    parse: impl FnOnce(&str) -> Result<T, E> + Send,
) -> Result<Option<T>, RegistryError> {
    let Some(stored) = registry.manifest(repository, version).await? else { return Ok(None) };
    let unusable = |reason: String| {
        let action = format!("read the record in {repository}{version}");
        RegistryError::protocol(registry.describe(), action, reason)
    };
    let manifest = ImageManifest::parse(&stored.bytes).map_err(|error| unusable(error.to_string()))?;
    let text = manifest.annotations.get(annotation);
    let text = text.ok_or_else(|| unusable(format!("it has no annotation {annotation}")))?;
    parse(text).map(Some).map_err(|error| unusable(error.to_string()))
}

/// Writes a manifest of type `kind` with these annotations.
pub async fn write_annotations<'a>(
    registry: &dyn Registry,
    (repository, version): (&Repository, &Version),
    kind: &str,
    annotations: impl IntoIterator<Item = (&'a str, String)>,
) -> Result<(), RegistryError> {
    let empty = Descriptor::of(media_type::OCI_EMPTY, oci::EMPTY);
    let bytes = ImageManifest::artifact(kind, vec![empty], annotations).to_bytes()?;
    registry.push_bytes(repository, oci::EMPTY).await?;
    registry.push_manifest(repository, version, media_type::OCI_MANIFEST, &bytes).await?;
    Ok(())
}
