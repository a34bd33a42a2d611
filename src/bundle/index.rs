//! Pure: what stands at a bundle's head: its contents and blobs, and the same as an OCI layout's index.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::contents::Content;
use crate::{
    image::{Digest, Repository},
    kernel::KernelRelease,
    oci::{Descriptor, ImageError, ImageIndex, MAX_MANIFEST, annotations::REF_NAME, media_type},
};

/// The format that this farrier writes, and the newest that it reads.
pub const FORMAT: u32 = 1;
/// The name of farrier's own index in the tar.
pub(super) const INDEX_NAME: &str = "farrier-bundle.json";
/// More bytes than any index has.
pub(super) const MAX_INDEX: u64 = 64 << 20;
/// What the content is, in the layout's index.
const KIND: &str = "farrier.dev/kind";
/// What every layout has in `oci-layout`.
const LAYOUT: &[u8] = br#"{"imageLayoutVersion":"1.0.0"}"#;

/// What a bundle holds, as it stands at its head and as `farrier bundle inspect -o json` prints it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BundleIndex {
    /// [`FORMAT`].
    pub format_version: u32,
    /// The farrier that wrote it.
    pub made_by: String,
    /// The registry that it was made from.
    pub from: String,
    /// The bundle that it only adds to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<Base>,
    /// What a site gets, in the order in which it needs it.
    pub contents: Vec<Listed>,
    /// The manifests, then the other blobs, each sorted by digest: the order in which they stand in the file.
    pub blobs: Vec<Blob>,
}

/// The bundle that another one adds to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Base {
    /// The digest of its index, by which it is known.
    pub id: Digest,
    /// The registry that it was made from.
    pub from: String,
}

/// One of the contents.
#[serde_with::skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Listed {
    /// What and where.
    #[serde(flatten)]
    pub content: Content,
    /// What kind of artifact it is, for what is no image.
    pub artifact_type: Option<String>,
    /// The kernel that it is for.
    pub kernel: Option<KernelRelease>,
    /// Bytes of its manifest and of all that it names. What others name too is in theirs as well.
    pub size: u64,
}

/// A blob or a manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Blob {
    /// Its digest.
    pub digest: Digest,
    /// Its bytes.
    pub size: u64,
    /// For a manifest: its media type.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub manifest: Option<String>,
    /// The repositories that need it, below the registry's prefix.
    pub repositories: BTreeSet<String>,
    /// The repositories where the base has it; the bundle itself then lacks it.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub base: BTreeSet<String>,
}

impl Blob {
    /// Is it in the bundle, not only in its base?
    pub fn is_carried(&self) -> bool {
        self.base.is_empty()
    }
}

impl BundleIndex {
    /// Its bytes; the same for equal indexes.
    pub fn to_bytes(&self) -> Result<Vec<u8>, ImageError> {
        serde_json::to_vec(self).map_err(|source| ImageError::Json("bundle index", source))
    }

    /// The blobs that are in the bundle, in the order of the file.
    pub fn carried(&self) -> impl Iterator<Item = &Blob> {
        self.blobs.iter().filter(|blob| blob.is_carried())
    }

    /// What a site has that has taken this bundle over, and the bundles that it adds to.
    pub fn known(&self) -> BTreeMap<&Digest, &BTreeSet<String>> {
        let without_manifests = self.blobs.iter().filter(|blob| blob.manifest.is_none());
        without_manifests.map(|blob| (&blob.digest, &blob.repositories)).collect()
    }

    /// Bytes of its content; shared parts count once: the carried ones, and those that only its base has.
    pub fn bytes(&self) -> (u64, u64) {
        let sum = |carried: bool| {
            self.blobs.iter().filter(|blob| blob.is_carried() == carried).map(|blob| blob.size).sum()
        };
        (sum(true), sum(false))
    }

    /// The tar's first entries: what makes it an OCI layout, then this index.
    pub(super) fn head(&self) -> Result<[(&'static str, Vec<u8>); 3], ImageError> {
        Ok([
            ("oci-layout", LAYOUT.to_vec()),
            ("index.json", self.layout_index().to_bytes()?),
            (INDEX_NAME, self.to_bytes()?),
        ])
    }

    fn manifests(&self) -> BTreeMap<&Digest, &Blob> {
        let manifests = self.blobs.iter().filter(|blob| blob.manifest.is_some());
        manifests.map(|blob| (&blob.digest, blob)).collect()
    }

    /// The layout's index: each of the contents by its name.
    fn layout_index(&self) -> ImageIndex {
        let manifests = self.manifests();
        let descriptor = |listed: &Listed| {
            let Content { kind, repository, tag, digest } = &listed.content;
            let name = match tag {
                Some(tag) => format!("{repository}:{tag}"),
                None => format!("{repository}@{digest}"),
            };
            let blob = manifests.get(digest)?;
            let notes = [(REF_NAME.to_owned(), name), (KIND.to_owned(), kind.to_string())];
            Some(Descriptor {
                artifact_type: listed.artifact_type.clone(),
                annotations: notes.into(),
                ..Descriptor::new(blob.manifest.as_deref()?, digest.clone(), blob.size)
            })
        };
        ImageIndex { manifests: self.contents.iter().filter_map(descriptor).collect(), ..ImageIndex::empty() }
    }

    /// What is wrong with it, if anything: everything that others rely on and no digest can tell.
    pub fn contradiction(&self) -> Option<String> {
        let order = |blob: &Blob| (blob.manifest.is_none(), blob.digest.clone());
        if !self.blobs.is_sorted_by(|a, b| order(a) < order(b)) {
            return Some("its blobs are not in their order, or named twice".to_owned());
        }
        if !self.contents.is_sorted_by(|a, b| a.content < b.content) {
            return Some("its contents are not in their order, or named twice".to_owned());
        }
        let of_names =
            |repository: &String| repository.parse::<Repository>().is_ok_and(|r| r.host().is_none());
        for Blob { digest, size, manifest, repositories, base } in &self.blobs {
            let wrong = if repositories.is_empty() || !repositories.iter().chain(base).all(of_names) {
                "has no repository, or one with a name that is none"
            } else if manifest.as_deref().is_some_and(|kind| !media_type::MANIFESTS.contains(&kind)) {
                "is a manifest of an unknown kind"
            } else if manifest.is_some() && (*size > MAX_MANIFEST as u64 || !base.is_empty()) {
                "is a manifest that is too large or left out"
            } else if *size > MAX_BLOB {
                "is larger than any blob can be"
            } else if !base.is_empty() && self.base.is_none() {
                "is left out, and no base is named"
            } else {
                continue;
            };
            return Some(format!("blob {digest} {wrong}"));
        }
        let manifests = self.manifests();
        let mut names = BTreeSet::new();
        for Listed { content: Content { kind: _, repository, tag, digest }, .. } in &self.contents {
            if !manifests.get(digest).is_some_and(|held| held.repositories.contains(repository)) {
                return Some(format!("the manifest {digest} of {repository} is missing"));
            }
            if let Some(tag) = tag
                && !names.insert((repository, tag))
            {
                return Some(format!("{repository}:{tag} is two things"));
            }
        }
        None
    }
}

/// 1 TiB: more than registries take, less than what sums of sizes overflow at.
const MAX_BLOB: u64 = 1 << 40;
