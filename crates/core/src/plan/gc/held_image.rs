//! Pure: a published image, as far as the decision whether it goes depends on it.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    image::{Digest, Repository, Tag},
    oci::{AnyManifest, ImageFacts, annotations},
};

/// An image that the registry holds, with all its tags.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldImage {
    /// Where.
    pub repository: Repository,
    /// The manifest's digest.
    pub digest: Digest,
    /// Its tags.
    pub tags: BTreeSet<Tag>,
    /// The kernels that it has modules for; none where it is not farrier's.
    pub kernels: BTreeSet<String>,
    /// Images in the same repository that it is put together from; of an index those that it leads to.
    pub members: BTreeSet<Digest>,
    /// The image that it stands on.
    pub base: Option<Digest>,
    /// Its blobs with their sizes, and the manifest.
    pub blobs: BTreeMap<Digest, u64>,
}

impl HeldImage {
    /// From a manifest's bytes, which are not trusted: what cannot be read is not farrier's.
    pub fn new(repository: Repository, digest: Digest, tags: BTreeSet<Tag>, bytes: &[u8]) -> Self {
        let mut image = Self {
            repository,
            blobs: [(digest.clone(), bytes.len() as u64)].into(),
            digest,
            tags,
            kernels: BTreeSet::new(),
            members: BTreeSet::new(),
            base: None,
        };
        let manifest = match AnyManifest::parse(bytes) {
            Ok(AnyManifest::Image(manifest)) => manifest,
            Ok(AnyManifest::Index(index)) => {
                image.members = index.manifests.into_iter().map(|entry| entry.digest).collect();
                return image;
            }
            Err(_) => return image,
        };
        let named = std::iter::once(&manifest.config).chain(&manifest.layers);
        image.blobs.extend(named.map(|blob| (blob.digest.clone(), blob.size)));
        image.base = manifest.annotations.get(annotations::BASE_DIGEST).and_then(|text| text.parse().ok());
        let Ok(facts) = ImageFacts::from_annotations(&manifest.annotations) else { return image };
        // An artifact beside an image may say for which kernel, and has no input hash.
        if facts.input_hash.is_some() && manifest.artifact_type.is_none() {
            let kernels = facts.members.keys().chain(&facts.kernel_release);
            image.kernels = kernels.map(ToString::to_string).collect();
            image.members = facts.members.into_values().collect();
        }
        image
    }

    /// Is it an index whose images have not been looked at?
    pub fn is_index(&self) -> bool {
        self.kernels.is_empty() && !self.members.is_empty()
    }

    /// An index has the kernels of its images, where all of them are farrier's; else it stays.
    pub fn lead_to(&mut self, images: &[Self]) {
        let found = || images.iter().filter(|image| self.members.contains(&image.digest));
        if found().count() == self.members.len() && found().all(|image| !image.kernels.is_empty()) {
            self.kernels = found().flat_map(|image| image.kernels.iter().cloned()).collect();
        }
    }

    /// The name that people know it by: its first tag, else its digest.
    pub fn reference(&self) -> String {
        match self.tags.first() {
            Some(tag) => format!("{}:{tag}", self.repository),
            None => format!("{}@{}", self.repository, self.digest),
        }
    }
}
