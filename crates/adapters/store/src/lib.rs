//! Stores the inputs of builds as OCI artifacts beside the images, for the crate that fetches inputs and for `farrier mirror`.
//!
//! The inputs are header sets, sources, root file systems and definitions.
//!
//! Each input is a manifest with one layer, under a descriptive tag that never changes its content. A tag derived from a
//! definition ([`Store::move_tag`]) moves to the latest content. Tags and annotations are untrusted, because anyone with
//! write access to the registry can set them. If the site has keys, farrier signs the inputs that it stores, and
//! [`Store::find_trusted`] only returns signed inputs.
#![forbid(unsafe_code)]

mod definitions;
mod error;
pub mod registry;
mod tag;
mod trust;

use std::{collections::BTreeMap, path::Path, sync::Arc};

pub use definitions::{PackedDefinitions, pack_definitions};
pub use error::StoreError;
use farrier_core::{
    facts::{RegistryRecord as _, media_type},
    image::{Digest, Repository, Tag, Version},
    plan::{BuildTimes, KernelRecord},
    provenance::is_cosign_tag,
};
use oci::{Descriptor, ImageManifest, MIRROR_PREFIX, subject_of_tag};
pub use tag::{header_tag, key_tag, platform_header_tag};
pub use trust::{SignatureStatus, Trust, TrustFault};

use crate::registry::{Registry, RegistryLocation};

/// Kind of a stored input. Each kind has a separate repository next to the image repositories.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum InputKind {
    /// A kernel's header set.
    Headers,
    /// A source of a driver image.
    Source,
    /// A root file system made from packages: a toolchain or a runtime base.
    RootFs,
    /// A definitions directory.
    Definitions,
}

impl InputKind {
    pub const ALL: [Self; 4] = [Self::Headers, Self::Source, Self::RootFs, Self::Definitions];

    /// Returns the repository's name below the registry's prefix. No driver image can have this name.
    pub fn repository(self) -> &'static str {
        match self {
            Self::Headers => "headers",
            Self::Source => "sources",
            Self::RootFs => "rootfs",
            Self::Definitions => "definitions",
        }
    }

    /// Returns the manifest's `artifactType`.
    pub fn media_type(self) -> &'static str {
        match self {
            Self::Headers => media_type::HEADERS,
            Self::Source => media_type::SOURCE,
            Self::RootFs => media_type::ROOT_FS,
            Self::Definitions => media_type::DEFINITIONS,
        }
    }
}

/// Whether farrier reserves the repository name for its own data. No driver image can have such a name.
pub fn is_reserved(name: &str) -> bool {
    InputKind::ALL.iter().any(|kind| kind.repository() == name) || OTHER_REPOSITORIES.contains(&name)
}

/// Repositories below the prefix that hold neither driver images nor stored inputs: root file systems as images, the parent of
/// mirrored images, records of when kernels were seen and how long builds took, and [`BUILDS`].
const OTHER_REPOSITORIES: [&str; 4] = ["farrier-rootfs", "mirror", "kernels", BUILDS];

/// Repository with the images of builds that run in pods.
pub const BUILDS: &str = "builds";

/// Whether farrier moves this tag of a repository below the prefix to newer content over time. These tags move: `latest` of the
/// definitions, the [`DECLARED`] tags of sources and root file systems, the tags of records in `kernels`, the tags of copied
/// images in `mirror`, and [`TRIAL`] of `farrier doctor`. The tag of a copy that was referenced by digest is fixed, and so are the
/// tags for referrers and signatures.
pub fn is_moving_tag(repository: &str, tag: &Tag) -> bool {
    let text = tag.as_str();
    match repository {
        "definitions" => text == LATEST,
        "sources" | "rootfs" => text.starts_with(DECLARED),
        "kernels" => [BuildTimes::TAG, KernelRecord::TAG].contains(&text),
        _ if repository.starts_with(MIRROR_PREFIX) => {
            !text.starts_with(DIGEST_TAG_PREFIX) && subject_of_tag(tag).is_none()
        }
        _ => text == TRIAL,
    }
}

/// Tag that `farrier doctor` moves to test whether the registry lets tags move.
pub const TRIAL: &str = "farrier-doctor";
/// Tag of the newest definitions.
pub const LATEST: &str = "latest";
/// Prefix of the tags that are derived from the definition of a source or root file system.
pub const DECLARED: &str = "declared-";

/// Prefix of the tag of a copied image that is referenced by digest.
pub const DIGEST_TAG_PREFIX: &str = "digest-";

/// A stored input: an artifact in the registry from which images are made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredInput {
    pub kind: InputKind,
    /// Repository of the artifact.
    pub repository: Repository,
    /// Digest of the manifest.
    pub digest: Digest,
    /// The only layer.
    pub layer: Descriptor,
    /// Annotations of the manifest.
    pub annotations: BTreeMap<String, String>,
    /// Whether a trusted key signed the artifact, so that its annotations are trusted. Only [`Store::find_trusted`]
    /// verifies signatures.
    pub is_signed: bool,
}

impl StoredInput {
    /// Returns a required annotation.
    pub fn annotation(&self, key: &str) -> Result<&str, StoreError> {
        let annotation = self.annotations.get(key).map(String::as_str);
        annotation.ok_or_else(|| self.invalid(&format!("it has no annotation {key}")))
    }

    /// Creates the error for an artifact that is not a valid farrier artifact.
    pub fn invalid(&self, reason: &str) -> StoreError {
        let reference = format!("{}@{}", self.repository, self.digest);
        StoreError::NotAnArtifact(reference, reason.to_owned())
    }
}

/// A file to be stored.
#[derive(Clone, Debug)]
pub struct NewInput<'a> {
    pub kind: InputKind,
    /// Tag of the artifact; see [`header_tag`], [`platform_header_tag`] and [`key_tag`].
    pub tag: &'a Tag,
    pub file: &'a Path,
    /// Digest and size of the file.
    pub layer: &'a Descriptor,
    /// Annotations of the manifest.
    pub annotations: BTreeMap<String, String>,
    /// Whether to replace other content under the tag.
    pub replace: bool,
}

/// The artifacts in one registry. A clone shares the connections.
#[derive(Clone, derive_more::Debug)]
pub struct Store {
    location: RegistryLocation,
    #[debug(skip)]
    registry: Arc<dyn Registry>,
    #[debug(skip)]
    trust: Option<Arc<dyn Trust>>,
}

impl Store {
    /// Creates a store in the registry that holds the images.
    pub fn new(location: RegistryLocation, registry: Arc<dyn Registry>) -> Self {
        Self { location, registry, trust: None }
    }

    /// Sets the site's keys.
    #[must_use]
    pub fn trusting(self, trust: Arc<dyn Trust>) -> Self {
        Self { trust: Some(trust), ..self }
    }

    /// Returns the input under this tag, if any, for use in a build. If the site has keys, one of them must have signed
    /// the input.
    pub async fn find_trusted(&self, kind: InputKind, tag: &Tag) -> Result<Option<StoredInput>, StoreError> {
        let Some(found) = self.find(kind, tag).await? else { return Ok(None) };
        match self.signature_status(&found).await? {
            SignatureStatus::Signed => Ok(Some(StoredInput { is_signed: true, ..found })),
            SignatureStatus::NoKeys => Ok(Some(found)),
            SignatureStatus::Refused(why) => {
                let reference = format!("{}:{tag} ({})", found.repository, found.digest);
                Err(StoreError::Untrusted(reference, why))
            }
        }
    }

    /// Returns whether a trusted key signed a stored input.
    pub async fn signature_status(&self, stored: &StoredInput) -> Result<SignatureStatus, StoreError> {
        match &self.trust {
            Some(trust) => Ok(trust.signature_status(&stored.repository, &stored.digest).await?),
            None => Ok(SignatureStatus::NoKeys),
        }
    }

    /// Returns the artifact under this tag, if any, whether it is signed or not. Use it for listing, replacing, or verifying by a
    /// known digest.
    pub async fn find(&self, kind: InputKind, tag: &Tag) -> Result<Option<StoredInput>, StoreError> {
        let repository = self.repository(kind)?;
        let Some(found) = self.registry.manifest(&repository, &Version::Tag(tag.clone())).await? else {
            return Ok(None);
        };
        let invalid =
            |reason: &str| StoreError::NotAnArtifact(format!("{repository}:{tag}"), reason.to_owned());
        let manifest = ImageManifest::parse(&found.bytes).map_err(|error| invalid(&error.to_string()))?;
        if manifest.artifact_type.as_deref() != Some(kind.media_type()) {
            return Err(invalid(&format!("its artifactType is not {}", kind.media_type())));
        }
        let [layer] = &manifest.layers[..] else { return Err(invalid("it does not have exactly one layer")) };
        let (layer, annotations) = (layer.clone(), manifest.annotations.clone());
        Ok(Some(StoredInput { kind, repository, digest: found.digest, layer, annotations, is_signed: false }))
    }

    /// Fetches the layer into a file, atomically and verified.
    pub async fn fetch(&self, stored: &StoredInput, to: &Path) -> Result<(), StoreError> {
        let StoredInput { repository, layer, .. } = stored;
        Ok(self.registry.fetch_blob(repository, &layer.digest, layer.size, to).await?)
    }

    /// Stores a file, unless the tag already has the same content. Other content under the tag is an error unless
    /// `replace` is set. Signs the artifact if the site has a signing key.
    pub async fn put(&self, item: &NewInput<'_>) -> Result<StoredInput, StoreError> {
        let NewInput { kind, tag, file, layer, annotations, replace } = item;
        let repository = self.repository(*kind)?;
        let pairs = annotations.iter().map(|(key, value)| (key.as_str(), value.clone()));
        let manifest = ImageManifest::artifact(kind.media_type(), vec![(*layer).clone()], pairs);
        let bytes = manifest.to_bytes()?;
        let digest = Digest::of(&bytes);
        if let Some(found) = self.find(*kind, tag).await? {
            if found.digest == digest {
                return self.sign(found, tag).await;
            }
            if !replace {
                let reference = format!("{repository}:{tag}");
                return Err(StoreError::Taken(reference, found.digest));
            }
        }
        self.registry.push_blob(&repository, &layer.digest, file).await?;
        self.registry.push_bytes(&repository, oci::EMPTY).await?;
        let version = Version::Tag((*tag).clone());
        self.registry.push_manifest(&repository, &version, media_type::OCI_MANIFEST, &bytes).await?;
        let (kind, layer, annotations) = (*kind, (*layer).clone(), annotations.clone());
        self.sign(StoredInput { kind, repository, digest, layer, annotations, is_signed: false }, tag).await
    }

    /// Signs an input if the site has a signing key. The input must come from this machine or be signed by a trusted key.
    pub async fn sign(&self, stored: StoredInput, tag: &Tag) -> Result<StoredInput, StoreError> {
        let Some(trust) = &self.trust else { return Ok(stored) };
        let name = format!("{}:{tag}", stored.kind.repository());
        let is_signed = trust.sign(&stored.repository, &stored.digest, &name).await?;
        Ok(StoredInput { is_signed, ..stored })
    }

    /// Moves a tag derived from a definition to a stored input. Returns whether the tag changed.
    pub async fn move_tag(&self, stored: &StoredInput, tag: &Tag) -> Result<bool, StoreError> {
        let StoredInput { repository, digest, .. } = stored;
        let version = Version::Tag(tag.clone());
        let current = self.registry.manifest(repository, &version).await?;
        if current.is_some_and(|current| current.digest == *digest) {
            return Ok(false);
        }
        let missing =
            || StoreError::NotAnArtifact(format!("{repository}@{digest}"), "it no longer exists".to_owned());
        let by_digest = Version::Digest(digest.clone());
        let found = self.registry.manifest(repository, &by_digest).await?.ok_or_else(missing)?;
        self.registry.push_manifest(repository, &version, &found.media_type, &found.bytes).await?;
        Ok(true)
    }

    /// Lists the tags of one kind, except signature tags. Returns an empty list if there are none.
    pub async fn tags(&self, kind: InputKind) -> Result<Vec<Tag>, StoreError> {
        let mut tags = self.registry.tags(&self.repository(kind)?).await?;
        tags.retain(|tag| !is_referrer_or_signature(tag));
        Ok(tags)
    }

    pub fn repository(&self, kind: InputKind) -> Result<Repository, StoreError> {
        Ok(self.location.repository(kind.repository())?)
    }
}

/// Whether a tag belongs to a signature or a referrers list.
pub fn is_referrer_or_signature(tag: &Tag) -> bool {
    is_cosign_tag(tag) || oci::is_referrers_tag(tag)
}

#[cfg(test)]
mod tests;
