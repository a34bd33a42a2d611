//! The facts about a published image that decide whether it is garbage-collected.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    image::{Digest, Repository, Tag},
    oci::{AnyManifest, ImageFacts, annotations},
};

/// Image in the registry, with all its tags.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegistryImage {
    /// Repository of the image.
    pub repository: Repository,
    /// Digest of the manifest.
    pub digest: Digest,
    /// Tags that point to the manifest.
    pub tags: BTreeSet<Tag>,
    /// Kernels that the image has modules for; empty where farrier did not publish it.
    pub kernels: BTreeSet<String>,
    /// Images in the same repository that the image is assembled from; for an index, its entries.
    pub members: BTreeSet<Digest>,
    /// Base image.
    pub base: Option<Digest>,
    /// Blobs with their sizes, including the manifest.
    pub blobs: BTreeMap<Digest, u64>,
}

impl RegistryImage {
    /// Reads a manifest's bytes, which are untrusted input: an image whose manifest cannot be parsed is not farrier's.
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
        image.blobs.extend(manifest.blobs().map(|blob| (blob.digest.clone(), blob.size)));
        image.base = manifest.annotations.get(annotations::BASE_DIGEST).and_then(|text| text.parse().ok());
        let Ok(facts) = ImageFacts::from_annotations(&manifest.annotations) else { return image };
        // An artifact that refers to an image may name a kernel, but has no input hash.
        if facts.input_hash.is_some() && manifest.artifact_type.is_none() {
            let kernels = facts.members.keys().chain(&facts.kernel_release);
            image.kernels = kernels.map(ToString::to_string).collect();
            image.members = facts.members.into_values().collect();
        }
        image
    }

    /// Whether this is an index whose images have not been examined.
    pub fn is_index(&self) -> bool {
        self.kernels.is_empty() && !self.members.is_empty()
    }

    /// Gives an index the kernels of its images, where all of them are farrier's. Any other index has no kernels and is
    /// kept.
    pub fn add_kernels_of(&mut self, images: &[Self]) {
        let members = || images.iter().filter(|image| self.members.contains(&image.digest));
        if members().count() == self.members.len() && members().all(|image| !image.kernels.is_empty()) {
            self.kernels = members().flat_map(|image| image.kernels.iter().cloned()).collect();
        }
    }

    /// Returns the image's name for messages: its first tag, else its digest.
    pub fn reference(&self) -> String {
        match self.tags.first() {
            Some(tag) => format!("{}:{tag}", self.repository),
            None => format!("{}@{}", self.repository, self.digest),
        }
    }
}
