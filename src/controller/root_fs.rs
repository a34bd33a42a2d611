//! Adapter: root file systems made with mmdebstrap, kept in the registry as one-layer images, and the
//! bases that payloads are put on.

use std::{collections::BTreeMap, path::PathBuf};

use super::{Controller, TargetError, retry::with_retry};
use crate::{
    blocking::blocking,
    headers::bootstrap_key,
    image::{ImageReference, MinimalSpec, Repository, RuntimeBase, Tag, Version},
    kernel::{Architecture, BootstrapSpec},
    oci::{self, AnyManifest, Assembly, Base, Descriptor, ImageManifest, Layer, annotations, media_type},
    payload,
    plan::Cell,
};

/// The image below a payload.
pub(super) struct RuntimeBaseImage {
    /// Configuration and layers.
    pub image: Base,
    /// Where its blobs are.
    pub repository: Repository,
    /// Is `/lib` a link to `/usr/lib` in it?
    pub usr_merged: bool,
}

/// What a root file system is made of.
#[derive(Clone, Copy)]
enum RootFsSpec<'a> {
    Bootstrap(&'a BootstrapSpec),
    Minimal(&'a MinimalSpec),
}

/// Where bootstrapped root file systems are published, below the registry's prefix.
const ROOT_FS: &str = "farrier-rootfs";

/// The repository's name and the tag under which a root file system is published.
pub(super) fn root_fs_tag(key: &str) -> Result<(&'static str, Tag), TargetError> {
    Ok((ROOT_FS, key[..32].parse()?))
}

/// Says on a root file system's manifest whether `/lib` is a link, so that its layers need not be read.
const USR_MERGED: &str = "farrier.dev/usr-merged";

impl Controller {
    /// The runtime base of a cell's definition.
    pub(super) async fn runtime_base(
        &self,
        base: &RuntimeBase,
        cell: &Cell,
    ) -> Result<RuntimeBaseImage, TargetError> {
        let arch = cell.target.arch;
        match base {
            RuntimeBase::Need(name) => {
                let need = cell.needs.iter().find(|need| need.name == *name);
                let image = need.and_then(|need| need.image.as_ref());
                let image = image.ok_or_else(|| TargetError::BaseMissing(name.to_string()))?;
                self.base_image(image, arch).await
            }
            RuntimeBase::Bootstrap(spec) => {
                let spec = spec.for_version(&cell.version);
                let reference = self.published_root_fs(RootFsSpec::Bootstrap(&spec), arch).await?;
                self.base_image(&reference, arch).await
            }
            RuntimeBase::Minimal(spec) => {
                let reference = self.published_root_fs(RootFsSpec::Minimal(spec), arch).await?;
                self.base_image(&reference, arch).await
            }
            RuntimeBase::Image(text) => {
                let reference = self.at_hand(self.resolve_reference(text).await?).await?;
                self.base_image(&reference, arch).await
            }
        }
    }

    /// The layer file of a bootstrapped root file system: from the registry, else made now and published.
    pub(super) async fn root_fs_layer(
        &self,
        spec: &BootstrapSpec,
        arch: Architecture,
    ) -> Result<PathBuf, TargetError> {
        let reference = self.published_root_fs(RootFsSpec::Bootstrap(spec), arch).await?;
        let base = self.base_image(&reference, arch).await?;
        let layer =
            base.image.layers.first().ok_or_else(|| TargetError::BaseMissing(reference.to_string()))?;
        self.base_layer_file(&base, layer).await
    }

    /// Where a bootstrapped root file system is published.
    pub(super) fn bootstrap_reference(
        &self,
        spec: &BootstrapSpec,
        arch: Architecture,
    ) -> Result<ImageReference, TargetError> {
        self.root_fs_reference(&bootstrap_key(spec, arch))
    }

    fn root_fs_reference(&self, key: &str) -> Result<ImageReference, TargetError> {
        let (name, tag) = root_fs_tag(key)?;
        Ok(ImageReference { repository: self.location.repository(name)?, version: Version::Tag(tag) })
    }

    /// Makes sure that the registry has the root file system.
    async fn published_root_fs(
        &self,
        spec: RootFsSpec<'_>,
        arch: Architecture,
    ) -> Result<ImageReference, TargetError> {
        let reference = match spec {
            RootFsSpec::Bootstrap(spec) => self.bootstrap_reference(spec, arch)?,
            RootFsSpec::Minimal(spec) => {
                let key =
                    with_retry("look up busybox", &self.cancel, || self.fetcher.minimal_key(spec, arch));
                self.root_fs_reference(&key.await?)?
            }
        };
        let found = self.registry.manifest(&reference.repository, &reference.version).await?;
        if found.is_none() {
            self.publish_root_fs(spec, arch, &reference).await?;
        }
        Ok(reference)
    }

    async fn publish_root_fs(
        &self,
        spec: RootFsSpec<'_>,
        arch: Architecture,
        reference: &ImageReference,
    ) -> Result<(), TargetError> {
        let action = "make root file system";
        let (made, title) = match spec {
            RootFsSpec::Bootstrap(spec) => {
                let made = with_retry(action, &self.cancel, || self.fetcher.bootstrap(spec, arch)).await?;
                (made, format!("{} root file system", spec.suite))
            }
            RootFsSpec::Minimal(spec) => {
                let made = with_retry(action, &self.cancel, || self.fetcher.minimal(spec, arch)).await?;
                (made, format!("{} base", spec.package))
            }
        };
        let file = made.layer.clone();
        let usr_merged = blocking(move || payload::is_usr_merged(&[file])).await?;
        let layer = Layer {
            digest: made.digest,
            diff_id: made.diff_id,
            size: made.size,
            media_type: media_type::OCI_LAYER_GZIP,
        };
        let notes = BTreeMap::from([
            (annotations::TITLE.to_owned(), title),
            (USR_MERGED.to_owned(), usr_merged.to_string()),
        ]);
        let image = oci::assemble(&Assembly {
            base: None,
            entrypoint_layer: None,
            layers: std::slice::from_ref(&layer),
            entrypoint: &[],
            env: &BTreeMap::from([("PATH".to_owned(), DEFAULT_PATH.to_owned())]),
            labels: &BTreeMap::new(),
            annotations: &notes,
            architecture: arch.as_str(),
        })?;
        let ImageReference { repository, version } = reference;
        self.registry.push_blob(repository, &layer.digest, &made.layer).await?;
        self.registry.push_bytes(repository, &image.config).await?;
        self.registry.push_manifest(repository, version, media_type::OCI_MANIFEST, &image.manifest).await?;
        Ok(())
    }

    /// Reads an image's manifest and configuration, picking the architecture out of an index.
    pub(super) async fn base_image(
        &self,
        reference: &ImageReference,
        arch: Architecture,
    ) -> Result<RuntimeBaseImage, TargetError> {
        let missing = || TargetError::BaseMissing(reference.to_string());
        let registry = self.registry_of(&reference.repository);
        let ImageReference { repository, version } = reference;
        let stored = registry.manifest(repository, version).await?;
        let mut stored = stored.ok_or_else(missing)?;
        if let AnyManifest::Index(index) = AnyManifest::parse(&stored.bytes)? {
            let digest = index.for_architecture(arch.as_str())?.digest.clone();
            let version = Version::Digest(digest);
            let found = registry.manifest(repository, &version).await?;
            stored = found.ok_or_else(missing)?;
        }
        let manifest = ImageManifest::parse(&stored.bytes)?;
        let config = self.blob_file(repository, &manifest.config).await?;
        let config =
            tokio::fs::read(&config).await.map_err(|source| TargetError::Input { path: config, source })?;
        let image = Base::parse(&stored.bytes, &config, arch.as_str())?;
        let mut base = RuntimeBaseImage { image, repository: repository.clone(), usr_merged: false };
        base.usr_merged = match manifest.annotations.get(USR_MERGED) {
            Some(value) => value == "true",
            None => self.look_into_layers(&base).await?,
        };
        Ok(base)
    }

    /// Reads a foreign base's layers to learn whether it is usr-merged.
    async fn look_into_layers(&self, base: &RuntimeBaseImage) -> Result<bool, TargetError> {
        let mut files = Vec::new();
        for layer in &base.image.layers {
            files.push(self.base_layer_file(base, layer).await?);
        }
        Ok(blocking(move || payload::is_usr_merged(&files)).await?)
    }

    /// A layer of a base as a file in the cache.
    pub(super) async fn base_layer_file(
        &self,
        base: &RuntimeBaseImage,
        layer: &Descriptor,
    ) -> Result<PathBuf, TargetError> {
        self.blob_file(&base.repository, layer).await
    }

    /// A blob as a file in the cache, fetched when it is not there.
    async fn blob_file(&self, repository: &Repository, blob: &Descriptor) -> Result<PathBuf, TargetError> {
        let directory = self.cache.blobs();
        let path = directory.join(blob.digest.hex());
        if path.is_file() {
            return Ok(path);
        }
        tokio::fs::create_dir_all(&directory)
            .await
            .map_err(|source| TargetError::Input { path: directory, source })?;
        let registry = self.registry_of(repository);
        registry.fetch_blob(repository, &blob.digest, &path).await?;
        Ok(path)
    }
}

/// Debian's default for containers' processes.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
