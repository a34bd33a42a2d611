//! Adapter: what builds need, kept beside the images: header sets, sources and root file systems as OCI artifacts.
//!
//! Each is one manifest with one layer, under a tag that says what it is. Such a tag never changes its content; one made
//! from a definition ([`Store::name`]) names what that came to last. Neither tag nor annotations say what it is, because whoever
//! may write to the registry can set them: where the site has keys, what farrier stores is signed, and [`Store::take`] gives
//! nothing else.

mod definitions;
mod error;
mod tag;
mod trust;

use std::{collections::BTreeMap, path::Path, sync::Arc};

pub use definitions::{PackedDefinitions, pack_definitions};
pub use error::StoreError;
pub use tag::{header_tag, key_tag};
pub use trust::{Standing, Trust, TrustFault};

use crate::{
    image::{Digest, Repository, Tag, Version},
    oci::{self, Descriptor, ImageManifest, annotations, media_type},
    provenance::is_cosign_tag,
    registry::{Registry, RegistryLocation},
};

/// What kind of input is stored. Each has a repository of its own beside those of the images.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum InputKind {
    /// A kernel's header set.
    Headers,
    /// A source of a driver image.
    Source,
    /// A root file system made from packages: a toolchain, a runtime base.
    RootFs,
    /// A definitions directory.
    Definitions,
}

impl InputKind {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Headers, Self::Source, Self::RootFs, Self::Definitions];

    /// The repository's name below the registry's prefix. No driver image can have it.
    pub fn repository(self) -> &'static str {
        match self {
            Self::Headers => "headers",
            Self::Source => "sources",
            Self::RootFs => "rootfs",
            Self::Definitions => "definitions",
        }
    }

    /// The manifest's `artifactType`.
    pub fn media_type(self) -> &'static str {
        match self {
            Self::Headers => media_type::HEADERS,
            Self::Source => media_type::SOURCE,
            Self::RootFs => media_type::ROOT_FS,
            Self::Definitions => media_type::DEFINITIONS,
        }
    }
}

/// Does farrier keep something of its own in the repository of this name? No driver image can have it.
pub fn is_reserved(name: &str) -> bool {
    InputKind::ALL.iter().any(|kind| kind.repository() == name) || OTHERS.contains(&name)
}

/// Repositories below the prefix that hold neither driver images nor artifacts: root file systems as images, what copies
/// of other registries' images stand below, and the records of when kernels were seen and how long builds took.
const OTHERS: [&str; 3] = ["farrier-rootfs", "mirror", "kernels"];

/// A stored input: an artifact in the registry that images are made from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredInput {
    /// Its kind.
    pub kind: InputKind,
    /// Where it stands.
    pub repository: Repository,
    /// The manifest's digest.
    pub digest: Digest,
    /// The one layer.
    pub layer: Descriptor,
    /// What is noted of it.
    pub annotations: BTreeMap<String, String>,
    /// Did a key of this site sign it, so that its annotations can be believed? Only [`Store::take`] finds that out.
    pub is_signed: bool,
}

impl StoredInput {
    /// An annotation that it must have.
    pub fn note(&self, key: &str) -> Result<&str, StoreError> {
        let note = self.annotations.get(key).map(String::as_str);
        note.ok_or_else(|| self.is_not(&format!("it has no annotation {key}")))
    }

    /// That it is not what it stands for.
    pub fn is_not(&self, reason: &str) -> StoreError {
        let reference = format!("{}@{}", self.repository, self.digest);
        StoreError::NotAnArtifact(reference, reason.to_owned())
    }
}

/// A file that is to be stored.
#[derive(Clone, Debug)]
pub struct NewInput<'a> {
    /// What it is.
    pub kind: InputKind,
    /// Its tag; see [`header_tag`] and [`key_tag`].
    pub tag: &'a Tag,
    /// The file.
    pub file: &'a Path,
    /// The file's digest and size.
    pub layer: &'a Descriptor,
    /// What is to be noted of it.
    pub annotations: BTreeMap<String, String>,
    /// May it take the place of other content under its tag?
    pub replace: bool,
}

/// Artifacts in one registry. A clone shares its connections.
#[derive(Clone, derive_more::Debug)]
pub struct Store {
    location: RegistryLocation,
    #[debug(skip)]
    registry: Arc<dyn Registry>,
    #[debug(skip)]
    trust: Option<Arc<dyn Trust>>,
}

impl Store {
    /// The store in the registry where images go.
    pub fn new(location: RegistryLocation, registry: Arc<dyn Registry>) -> Self {
        Self { location, registry, trust: None }
    }

    /// The same with a site's keys.
    #[must_use]
    pub fn trusting(self, trust: Arc<dyn Trust>) -> Self {
        Self { trust: Some(trust), ..self }
    }

    /// What is kept under this tag, if anything, to build with. Where the site has keys, one of them signed it.
    pub async fn take(&self, kind: InputKind, tag: &Tag) -> Result<Option<StoredInput>, StoreError> {
        let Some(found) = self.find(kind, tag).await? else { return Ok(None) };
        match self.standing(&found).await? {
            Standing::Signed => Ok(Some(StoredInput { is_signed: true, ..found })),
            Standing::NoKeys => Ok(Some(found)),
            Standing::Refused(why) => {
                let reference = format!("{}:{tag} ({})", found.repository, found.digest);
                Err(StoreError::Untrusted(reference, why))
            }
        }
    }

    /// What the site's keys say of something in the store.
    pub async fn standing(&self, stored: &StoredInput) -> Result<Standing, StoreError> {
        match &self.trust {
            Some(trust) => Ok(trust.standing(&stored.repository, &stored.digest).await?),
            None => Ok(Standing::NoKeys),
        }
    }

    /// What stands under this tag, if anything, signed or not: to be listed, replaced, or verified by a digest that is known.
    pub async fn find(&self, kind: InputKind, tag: &Tag) -> Result<Option<StoredInput>, StoreError> {
        let repository = self.repository(kind)?;
        let Some(found) = self.registry.manifest(&repository, &Version::Tag(tag.clone())).await? else {
            return Ok(None);
        };
        let wrong =
            |reason: &str| StoreError::NotAnArtifact(format!("{repository}:{tag}"), reason.to_owned());
        let manifest = ImageManifest::parse(&found.bytes).map_err(|error| wrong(&error.to_string()))?;
        if manifest.artifact_type.as_deref() != Some(kind.media_type()) {
            return Err(wrong(&format!("its artifactType is not {}", kind.media_type())));
        }
        let [layer] = &manifest.layers[..] else { return Err(wrong("it has not exactly one layer")) };
        let (layer, annotations) = (layer.clone(), manifest.annotations.clone());
        Ok(Some(StoredInput { kind, repository, digest: found.digest, layer, annotations, is_signed: false }))
    }

    /// Fetches the layer into a file, which appears whole and verified or not at all.
    pub async fn fetch(&self, stored: &StoredInput, to: &Path) -> Result<(), StoreError> {
        let StoredInput { repository, layer, .. } = stored;
        Ok(self.registry.fetch_blob(repository, &layer.digest, layer.size, to).await?)
    }

    /// Keeps a file. The same content under the same tag is kept already; other content is refused, unless it may be
    /// replaced. What comes from a file of this machine is signed, where the site signs.
    pub async fn put(&self, item: &NewInput<'_>) -> Result<StoredInput, StoreError> {
        let NewInput { kind, tag, file, layer, annotations, replace } = item;
        let repository = self.repository(*kind)?;
        let manifest = manifest(*kind, layer, annotations);
        let bytes = manifest.to_bytes()?;
        let digest = Digest::of(&bytes);
        if let Some(found) = self.find(*kind, tag).await? {
            if found.digest == digest {
                return self.signed(found, tag).await;
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
        self.signed(StoredInput { kind, repository, digest, layer, annotations, is_signed: false }, tag).await
    }

    async fn signed(&self, stored: StoredInput, tag: &Tag) -> Result<StoredInput, StoreError> {
        let Some(trust) = &self.trust else { return Ok(stored) };
        let name = format!("{}:{tag}", stored.kind.repository());
        let is_signed = trust.sign(&stored.repository, &stored.digest, &name).await?;
        Ok(StoredInput { is_signed, ..stored })
    }

    /// Gives what is kept a further tag, one that is made from a definition: it names what that came to last, and loses
    /// what it named before. Says whether it did not name it already.
    pub async fn name(&self, stored: &StoredInput, tag: &Tag) -> Result<bool, StoreError> {
        let StoredInput { repository, digest, .. } = stored;
        let version = Version::Tag(tag.clone());
        let named = self.registry.manifest(repository, &version).await?;
        if named.is_some_and(|named| named.digest == *digest) {
            return Ok(false);
        }
        let gone = || {
            StoreError::NotAnArtifact(format!("{repository}@{digest}"), "it is not there any more".to_owned())
        };
        let by_digest = Version::Digest(digest.clone());
        let found = self.registry.manifest(repository, &by_digest).await?.ok_or_else(gone)?;
        self.registry.push_manifest(repository, &version, &found.media_type, &found.bytes).await?;
        Ok(true)
    }

    /// The tags of one kind, without those of signatures; empty where there are none.
    pub async fn tags(&self, kind: InputKind) -> Result<Vec<Tag>, StoreError> {
        let mut tags = self.registry.tags(&self.repository(kind)?).await?;
        tags.retain(|tag| !is_about_another(tag));
        Ok(tags)
    }

    /// Where a kind stands.
    pub fn repository(&self, kind: InputKind) -> Result<Repository, StoreError> {
        Ok(self.location.repository(kind.repository())?)
    }
}

/// Is it the tag of a signature, or of a list of what refers to a manifest?
pub(crate) fn is_about_another(tag: &Tag) -> bool {
    is_cosign_tag(tag) || oci::is_referrers_tag(tag)
}

/// The same layer and notes always give the same manifest.
fn manifest(kind: InputKind, layer: &Descriptor, notes: &BTreeMap<String, String>) -> ImageManifest {
    let mut annotations = notes.clone();
    annotations.insert(annotations::CREATED.to_owned(), oci::CREATED.to_owned());
    ImageManifest {
        artifact_type: Some(kind.media_type().to_owned()),
        annotations,
        ..ImageManifest::new(Descriptor::of(media_type::OCI_EMPTY, oci::EMPTY), vec![layer.clone()])
    }
}

#[cfg(test)]
mod tests;
