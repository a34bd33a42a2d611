//! Adapter: copies images of other registries below the prefix of the registry where images go.

use crate::{
    image::{Digest, ImageReference, Repository, Tag, Version},
    oci::{AnyManifest, Descriptor, media_type},
    parts::{Parts, TargetError},
    registry::Registry,
};

/// A copy that stands in the registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ImageCopy {
    /// Where, by tag.
    pub(crate) reference: ImageReference,
    /// The digest, which is the original's.
    pub(crate) digest: Digest,
    /// Was anything sent?
    pub(crate) new: bool,
}

/// Copies an image with all of its platforms, unless that was done.
pub(crate) async fn copy_image(parts: &Parts, text: &str) -> Result<ImageCopy, TargetError> {
    let wanted: ImageReference = text.parse()?;
    let pinned = parts.resolve_reference(text).await?;
    let Version::Digest(digest) = &pinned.version else {
        return Err(TargetError::no_such_image(text));
    };
    let Some(place) = parts.place_of_copy(&wanted)? else {
        return Ok(ImageCopy { digest: digest.clone(), reference: wanted, new: false });
    };
    let tag = copy_tag(&wanted)?;
    let version = Version::Tag(tag);
    let copy = ImageReference { repository: place.clone(), version: version.clone() };
    let named = parts.registry.manifest(&place, &version).await?;
    if named.is_some_and(|named| named.digest == *digest) {
        return Ok(ImageCopy { reference: copy, digest: digest.clone(), new: false });
    }
    parts.may_write()?;
    copy_manifest(parts, &pinned, &place, &version).await?;
    Ok(ImageCopy { reference: copy, digest: digest.clone(), new: true })
}

/// Copies a manifest after what it names.
async fn copy_manifest(
    parts: &Parts,
    from: &ImageReference,
    place: &Repository,
    version: &Version,
) -> Result<(), TargetError> {
    let repository = &from.repository;
    let found = parts.existing_manifest(from).await?;
    match AnyManifest::parse(&found.bytes)? {
        AnyManifest::Index(index) => {
            for part in index.manifests {
                let version = Version::Digest(part.digest);
                let from = ImageReference { repository: repository.clone(), version: version.clone() };
                Box::pin(copy_manifest(parts, &from, place, &version)).await?;
            }
        }
        AnyManifest::Image(image) => {
            for blob in std::iter::once(&image.config).chain(&image.layers) {
                copy_blob(parts, parts.registry_of(repository), repository, place, blob).await?;
            }
        }
    }
    parts.registry.push_manifest(place, version, &found.media_type, &found.bytes).await?;
    Ok(())
}

async fn copy_blob(
    parts: &Parts,
    source: &dyn Registry,
    from: &Repository,
    place: &Repository,
    blob: &Descriptor,
) -> Result<(), TargetError> {
    let Descriptor { media_type, digest, size, .. } = blob;
    // Layers that may not be distributed have an address of their own, and no registry holds them.
    let is_layer = media_type.contains(".layer.") || media_type.contains(".rootfs.");
    if is_layer && media_type::oci_layer(media_type).is_none() {
        tracing::warn!(%from, %digest, media_type, "layer is not copied: no registry holds it");
        return Ok(());
    }
    if parts.registry.has_blob(place, digest).await? {
        return Ok(());
    }
    let scratch = parts.cache.scratch()?;
    let file = scratch.path().join("blob");
    source.fetch_blob(from, digest, *size, &file).await?;
    parts.registry.push_blob(place, digest, &file).await?;
    Ok(())
}

/// The tag of a copy: the original's, and for one that goes by its digest a tag of its own, so that no registry deletes it
/// as unused.
pub(crate) fn copy_tag(reference: &ImageReference) -> Result<Tag, TargetError> {
    match &reference.version {
        Version::Tag(tag) => Ok(tag.clone()),
        Version::Digest(digest) => Ok(format!("digest-{}", digest.hex()).parse()?),
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, sync::Arc};

    use serde_json::json;

    use super::*;
    use crate::{
        build::testing::Bench,
        net::{Net, NetOptions},
        oci::{ImageIndex, ImageManifest},
        registry::{RegistryLocation, RegistryOptions, RemoteRegistry, connect},
    };

    /// An index with one image, at another registry.
    async fn publish(registry: &dyn Registry, repository: &Repository) -> Digest {
        let (config, layer) = (b"{}".as_slice(), b"layer".as_slice());
        let blob = |kind: &str, bytes: &[u8]| Descriptor::new(kind, Digest::of(bytes), bytes.len() as u64);
        for bytes in [config, layer] {
            registry.push_bytes(repository, bytes).await.unwrap();
        }
        let image = ImageManifest {
            schema_version: 2,
            media_type: Some(media_type::OCI_MANIFEST.to_owned()),
            artifact_type: None,
            config: blob(media_type::OCI_CONFIG, config),
            layers: vec![blob(media_type::OCI_LAYER, layer)],
            subject: None,
            annotations: BTreeMap::new(),
        }
        .to_bytes()
        .unwrap();
        let version = Version::Digest(Digest::of(&image));
        registry.push_manifest(repository, &version, media_type::OCI_MANIFEST, &image).await.unwrap();
        let mut index = ImageIndex::empty();
        index.manifests.push(blob(media_type::OCI_MANIFEST, &image));
        let index = index.to_bytes().unwrap();
        let version = Version::Tag("1".parse().unwrap());
        registry.push_manifest(repository, &version, media_type::OCI_INDEX, &index).await.unwrap()
    }

    #[tokio::test]
    async fn a_copy_stands_in_for_a_registry_that_is_not_there() {
        let mut bench = Bench::new(&json!({}));
        let other = tempfile::tempdir().unwrap();
        let options = RegistryOptions::default();
        let elsewhere = RegistryLocation::Layout(other.path().join("layout"));
        bench.parts.remote = connect(&elsewhere, &options);
        let (repository, text) = ("other.test:5000/base".parse().unwrap(), "other.test:5000/base:1");
        let digest = publish(bench.parts.remote.as_ref(), &repository).await;

        let copied = copy_image(&bench.parts, text).await.unwrap();
        assert_eq!((&copied.digest, copied.new), (&digest, true));
        assert_eq!(copied.reference.to_string(), "mirror/other.test-5000/base:1");
        assert!(!copy_image(&bench.parts, text).await.unwrap().new);

        // The other registry is gone.
        bench.parts.remote = Arc::new(RemoteRegistry::new("none".to_owned(), &options));
        let offline = Net::new(NetOptions { offline: true, ..NetOptions::default() }).unwrap();
        bench.parts.fetcher = bench.parts.fetcher.clone().with_net(offline);
        let resolved = bench.parts.resolve_reference(text).await.unwrap();
        assert_eq!(resolved.to_string(), format!("other.test:5000/base@{digest}"));
        let nearest = bench.parts.nearest(resolved).await.unwrap();
        assert_eq!(nearest.to_string(), format!("mirror/other.test-5000/base@{digest}"));
        let AnyManifest::Index(index) = AnyManifest::parse(
            &bench
                .parts
                .registry
                .manifest(&nearest.repository, &nearest.version)
                .await
                .unwrap()
                .unwrap()
                .bytes,
        )
        .unwrap() else {
            panic!("an index")
        };
        let part = Version::Digest(index.manifests[0].digest.clone());
        assert!(bench.parts.registry.manifest(&nearest.repository, &part).await.unwrap().is_some());
        assert!(bench.parts.registry.has_blob(&nearest.repository, &Digest::of(b"layer")).await.unwrap());
    }
}
