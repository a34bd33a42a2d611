//! Adapter: images of other registries, and their copies below the prefix of the registry where images go.

use super::{Controller, NeedsFrom, TargetError};
use crate::{
    image::{ImageReference, Repository, Tag, Version, mirror_name},
    oci::{AnyManifest, Descriptor, media_type},
    registry::{Registry, RegistryLocation, StoredManifest},
};

/// A copy that stands in the registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Copied {
    /// Where, by tag.
    pub(super) reference: ImageReference,
    /// The digest, which is the original's.
    pub(super) digest: crate::image::Digest,
    /// Was anything sent?
    pub(super) new: bool,
}

impl Controller {
    /// Where the copy of an image stands, or would; `None` for what lies below the registry's prefix itself.
    pub(super) fn place_of_copy(
        &self,
        reference: &ImageReference,
    ) -> Result<Option<Repository>, TargetError> {
        let location = match &self.needs_from {
            // It holds images to compile against; nothing else is read from it.
            Some(NeedsFrom { location: RegistryLocation::Layout(_), .. }) => return Ok(None),
            Some(NeedsFrom { location, .. }) => location,
            None => &self.location,
        };
        if location.name_of(&reference.repository).is_some() {
            return Ok(None);
        }
        Ok(Some(location.repository(&mirror_name(&reference.repository))?))
    }

    /// The copy's manifest, where there is a copy.
    pub(super) async fn copy_of(
        &self,
        reference: &ImageReference,
    ) -> Result<Option<(Repository, StoredManifest)>, TargetError> {
        let Some(place) = self.place_of_copy(reference)? else { return Ok(None) };
        let found = self.shelf(&place).manifest(&place, &reference.version).await?;
        Ok(found.map(|found| (place, found)))
    }

    /// Where an image is fetched from: its copy, if the registry has one, since one digest has one content.
    pub(super) async fn at_hand(&self, reference: ImageReference) -> Result<ImageReference, TargetError> {
        Ok(match self.copy_of(&reference).await? {
            Some((repository, found)) => {
                ImageReference { repository, version: Version::Digest(found.digest) }
            }
            None => reference,
        })
    }

    /// Copies an image with all of its platforms, unless that was done.
    pub(super) async fn copy_image(&self, text: &str) -> Result<Copied, TargetError> {
        let wanted: ImageReference = text.parse()?;
        let pinned = self.resolve_reference(text).await?;
        let Version::Digest(digest) = &pinned.version else {
            return Err(TargetError::BaseMissing(text.to_owned()));
        };
        let Some(place) = self.place_of_copy(&wanted)? else {
            return Ok(Copied { digest: digest.clone(), reference: wanted, new: false });
        };
        let tag = copy_tag(&wanted)?;
        let version = Version::Tag(tag);
        let copy = ImageReference { repository: place.clone(), version: version.clone() };
        let named = self.registry.manifest(&place, &version).await?;
        if named.is_some_and(|named| named.digest == *digest) {
            return Ok(Copied { reference: copy, digest: digest.clone(), new: false });
        }
        self.may_write()?;
        self.copy_manifest(&pinned, &place, &version).await?;
        Ok(Copied { reference: copy, digest: digest.clone(), new: true })
    }

    /// Copies a manifest after what it names.
    async fn copy_manifest(
        &self,
        from: &ImageReference,
        place: &Repository,
        version: &Version,
    ) -> Result<(), TargetError> {
        let ImageReference { repository, version: original } = from;
        let source = self.registry_of(repository);
        let found = source.manifest(repository, original).await?;
        let found = found.ok_or_else(|| TargetError::BaseMissing(from.to_string()))?;
        match AnyManifest::parse(&found.bytes)? {
            AnyManifest::Index(index) => {
                for part in index.manifests {
                    let version = Version::Digest(part.digest);
                    let from = ImageReference { repository: repository.clone(), version: version.clone() };
                    Box::pin(self.copy_manifest(&from, place, &version)).await?;
                }
            }
            AnyManifest::Image(image) => {
                for blob in std::iter::once(&image.config).chain(&image.layers) {
                    self.copy_blob(source, repository, place, blob).await?;
                }
            }
        }
        self.registry.push_manifest(place, version, &found.media_type, &found.bytes).await?;
        Ok(())
    }

    async fn copy_blob(
        &self,
        source: &dyn Registry,
        from: &Repository,
        place: &Repository,
        blob: &Descriptor,
    ) -> Result<(), TargetError> {
        let Descriptor { media_type, digest, .. } = blob;
        // Layers that nobody may hand on have an address of their own, and no registry holds them.
        let is_layer = media_type.contains(".layer.") || media_type.contains(".rootfs.");
        if is_layer && media_type::oci_layer(media_type).is_none() {
            tracing::warn!(%from, %digest, media_type, "layer is not copied: no registry holds it");
            return Ok(());
        }
        let there = self.registry.has_blob(place, digest).await?;
        if there {
            return Ok(());
        }
        let scratch = self.cache.scratch()?;
        let file = scratch.path().join("blob");
        source.fetch_blob(from, digest, &file).await?;
        self.registry.push_blob(place, digest, &file).await?;
        Ok(())
    }
}

/// The tag of a copy: the original's, and for one that goes by its digest a tag of its own, so that no registry takes it
/// for something that nobody wants.
pub(super) fn copy_tag(reference: &ImageReference) -> Result<Tag, TargetError> {
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
        controller::testing::Bench,
        image::Digest,
        net::{Net, NetOptions},
        oci::{ImageIndex, ImageManifest},
        registry::{RegistryOptions, RemoteRegistry, connect},
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
        bench.controller.remote = connect(&elsewhere, &options).unwrap();
        let (repository, text) = ("other.test:5000/base".parse().unwrap(), "other.test:5000/base:1");
        let digest = publish(bench.controller.remote.as_ref(), &repository).await;

        let copied = bench.controller.copy_image(text).await.unwrap();
        assert_eq!((&copied.digest, copied.new), (&digest, true));
        assert_eq!(copied.reference.to_string(), "mirror/other.test-5000/base:1");
        assert!(!bench.controller.copy_image(text).await.unwrap().new);

        // Nobody is there any more.
        bench.controller.remote = Arc::new(RemoteRegistry::new("none".to_owned(), &options));
        let offline = Net::new(NetOptions { offline: true, ..NetOptions::default() }).unwrap();
        bench.controller.fetcher = bench.controller.fetcher.clone().with_net(offline);
        let resolved = bench.controller.resolve_reference(text).await.unwrap();
        assert_eq!(resolved.to_string(), format!("other.test:5000/base@{digest}"));
        let at_hand = bench.controller.at_hand(resolved).await.unwrap();
        assert_eq!(at_hand.to_string(), format!("mirror/other.test-5000/base@{digest}"));
        let AnyManifest::Index(index) = AnyManifest::parse(
            &bench
                .controller
                .registry
                .manifest(&at_hand.repository, &at_hand.version)
                .await
                .unwrap()
                .unwrap()
                .bytes,
        )
        .unwrap() else {
            panic!("an index")
        };
        let part = Version::Digest(index.manifests[0].digest.clone());
        assert!(bench.controller.registry.manifest(&at_hand.repository, &part).await.unwrap().is_some());
        assert!(
            bench.controller.registry.has_blob(&at_hand.repository, &Digest::of(b"layer")).await.unwrap()
        );
    }
}
