//! The head of a bundle: its contents and blobs, both in farrier's format and as the index of an OCI layout.

use std::collections::{BTreeMap, BTreeSet};

use farrier_core::{
    facts::{annotations::REF_NAME, media_type},
    image::{Digest, Repository},
    kernel::KernelRelease,
};
use oci::{Descriptor, ImageError, ImageIndex, MAX_MANIFEST};
use serde::{Deserialize, Serialize};

use super::{contents::Content, license::License, order::Order};

/// Format version that this farrier writes, and the newest that it reads.
pub const FORMAT: u32 = 2;
/// Name of the bundle index in the tar.
pub(super) const INDEX_NAME: &str = "farrier-bundle.json";
/// Maximum size of an index in bytes.
pub(super) const MAX_INDEX: u64 = 64 << 20;
/// Annotation for the kind of content in the layout's index.
const KIND: &str = "farrier.dev/kind";
/// Content of the file `oci-layout`.
const LAYOUT: &[u8] = br#"{"imageLayoutVersion":"1.0.0"}"#;

/// Contents of a bundle, as stored at its head and printed by `farrier bundle inspect -o json`.
#[serde_with::skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BundleIndex {
    /// Format version ([`FORMAT`]).
    pub format_version: u32,
    /// farrier version that wrote the bundle.
    pub made_by: String,
    /// Registry that the bundle was exported from.
    pub from: String,
    /// Position among the exporter's bundles; `None` for bundles of format 1.
    pub order: Option<Order>,
    /// Fingerprint of the exporter's signing key. Only the signature proves it.
    pub signer: Option<Digest>,
    /// The bundle that this delta extends.
    pub base: Option<Base>,
    /// Licenses of the images and sources.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub licenses: BTreeSet<License>,
    /// Contents, in the order in which a site needs them.
    pub contents: Vec<Listed>,
    /// The manifests, then the other blobs, each sorted by digest. This is their order in the file.
    pub blobs: Vec<Blob>,
}

/// The bundle that a delta extends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Base {
    /// ID of the bundle: the digest of its index.
    pub id: Digest,
    /// Registry that the bundle was exported from.
    pub from: String,
}

/// A content with details for listings.
#[serde_with::skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Listed {
    #[serde(flatten)]
    pub content: Content,
    /// Type of an artifact; `None` for an image.
    pub artifact_type: Option<String>,
    /// Kernel that the content is for.
    pub kernel: Option<KernelRelease>,
    /// Size in bytes of the manifest and everything that it names. Shared blobs count for each content.
    pub size: u64,
}

/// A blob or a manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Blob {
    pub digest: Digest,
    /// Size in bytes.
    pub size: u64,
    /// Media type of a manifest; `None` for other blobs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub manifest: Option<String>,
    /// Repositories that need the blob, below the registry's prefix.
    pub repositories: BTreeSet<String>,
    /// Repositories that have the blob from the base. If there are any, the bundle omits the blob.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub base: BTreeSet<String>,
}

impl Blob {
    /// Whether the bundle contains the blob, instead of relying on its base.
    pub(crate) fn is_carried(&self) -> bool {
        self.base.is_empty()
    }
}

impl BundleIndex {
    /// Serializes the index. Equal indexes give equal bytes.
    pub fn to_bytes(&self) -> Result<Vec<u8>, ImageError> {
        oci::to_json("bundle index", self)
    }

    /// Blobs that the bundle contains, in the order of the file.
    pub fn carried(&self) -> impl Iterator<Item = &Blob> {
        self.blobs.iter().filter(|blob| blob.is_carried())
    }

    /// Returns the blobs that a site has after the import of this bundle and its bases, with their repositories.
    pub fn known(&self) -> BTreeMap<&Digest, &BTreeSet<String>> {
        let without_manifests = self.blobs.iter().filter(|blob| blob.manifest.is_none());
        without_manifests.map(|blob| (&blob.digest, &blob.repositories)).collect()
    }

    /// Size in bytes of the blobs in the bundle, and of the blobs that only its base has. Shared blobs count once.
    pub fn bytes(&self) -> (u64, u64) {
        let sum = |carried: bool| {
            self.blobs.iter().filter(|blob| blob.is_carried() == carried).map(|blob| blob.size).sum()
        };
        (sum(true), sum(false))
    }

    /// First entries of the tar: the files that make it an OCI layout, then this index.
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

    /// Index of the layout, which lists each content by name.
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

    /// Checks the index and returns the problem, if any. Covers every property that readers rely on and that digests do
    /// not guarantee.
    pub(crate) fn find_problem(&self) -> Option<String> {
        if let Some(problem) = self.order.as_ref().and_then(Order::problem) {
            return Some(problem.to_owned());
        }
        let sort_key = |blob: &Blob| (blob.manifest.is_none(), blob.digest.clone());
        if !self.blobs.is_sorted_by(|a, b| sort_key(a) < sort_key(b)) {
            return Some("its blobs are not sorted, or named twice".to_owned());
        }
        if !self.contents.is_sorted_by(|a, b| a.content < b.content) {
            return Some("its contents are not sorted, or named twice".to_owned());
        }
        let is_relative =
            |repository: &String| repository.parse::<Repository>().is_ok_and(|r| r.host().is_none());
        for Blob { digest, size, manifest, repositories, base } in &self.blobs {
            let problem = if repositories.is_empty() || !repositories.iter().chain(base).all(is_relative) {
                "has no repository, or one with an invalid name"
            } else if manifest.as_deref().is_some_and(|kind| !media_type::MANIFESTS.contains(&kind)) {
                "is a manifest of an unknown kind"
            } else if manifest.is_some() && (*size > MAX_MANIFEST as u64 || !base.is_empty()) {
                "is a manifest that is too large or omitted"
            } else if *size > MAX_BLOB {
                "is larger than the limit for blobs"
            } else if !base.is_empty() && self.base.is_none() {
                "is omitted, and no base is named"
            } else {
                continue;
            };
            return Some(format!("blob {digest} {problem}"));
        }
        let manifests = self.manifests();
        if let Some(problem) = manifests_problem(manifests.values().map(|blob| blob.size).sum()) {
            return Some(problem);
        }
        let mut names = BTreeSet::new();
        for Listed { content: Content { kind: _, repository, tag, digest }, .. } in &self.contents {
            if !manifests.get(digest).is_some_and(|blob| blob.repositories.contains(repository)) {
                return Some(format!("the manifest {digest} of {repository} is missing"));
            }
            if let Some(tag) = tag
                && !names.insert((repository, tag))
            {
                return Some(format!("{repository}:{tag} is named twice"));
            }
        }
        None
    }
}

/// Returns the problem with manifests of this total size, if any: writers and readers keep all of them in memory.
pub(super) fn manifests_problem(bytes: u64) -> Option<String> {
    (bytes > MAX_MANIFESTS)
        .then(|| format!("its manifests have {bytes} bytes in total; the limit is {MAX_MANIFESTS} bytes"))
}

/// Maximum size of all manifests in bytes. A manifest usually has a few KiB.
const MAX_MANIFESTS: u64 = 1 << 30;
/// 1 TiB: larger than registries accept, and small enough that sums of sizes do not overflow.
const MAX_BLOB: u64 = 1 << 40;
