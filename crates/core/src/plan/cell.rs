//! Pure: one driver image for one kernel target: its names, Dockerfile and input hash.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{AnnouncedBy, SkipReason};
use crate::{
    image::{Digest, ImageName, ImageReference, InputHash},
    kernel::{KernelTarget, NodeSystem},
    site::Signed,
};

/// farrier's build format. It changes when the same inputs would give other bytes, for example because
/// layers are packed differently.
pub const BUILD_FORMAT: &str = "farrier.dev/build/1";
/// Names what `driver-entrypoint` does in an image, and counts in the input hash of images that hold it. Its bytes do not,
/// or every new farrier would rebuild every fleet: an image has the one of the farrier that built it. To be changed when
/// images that are there should be built again because of it.
pub const ENTRYPOINT_FORMAT: &str = "farrier.dev/entrypoint/1";
/// Names how modules are signed, and counts in the input hash of images with signed modules. To be changed when the same key
/// would give other signatures.
pub const SIGNING_FORMAT: &str = "farrier.dev/signing/1";

/// Who signs the modules of an image. The digest that is signed does not count in the input hash: it follows from the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SignedWith {
    /// sha256 over the certificate.
    pub certificate: Digest,
    /// What becomes of modules that are signed already.
    pub signed: Signed,
}

impl SignedWith {
    /// The first digits of the fingerprint, for tags and people.
    pub fn short(&self) -> &str {
        self.certificate.short()
    }
}

/// Exposed headers that a cell is compiled against.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, derive_more::Display)]
#[serde(rename_all = "camelCase")]
#[display("{name}@sha256:{}", exposed.short())]
pub struct CellNeed {
    /// Its directory under `needs/`.
    pub name: ImageName,
    /// The needed image's version; of a tree the first digits of its digest.
    pub version: String,
    /// Digest over its content, which counts in the input hash.
    pub exposed: Digest,
    /// The image that exposes it, by digest; `None` for a tree that the user brings.
    pub image: Option<ImageReference>,
}

/// A patch that applies to the cell's kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CellPatch {
    /// Its index in `spec.patches`.
    #[serde(skip)]
    pub index: usize,
    /// Its name in the build context, below `patches/`: `001-foo.patch`.
    pub name: String,
    /// sha256 over its content, which counts in the input hash.
    pub sha256: String,
}

/// The inputs in the hash that a build fetches by itself. A build that gets other ones is not the build of its cell.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FetchedInputs {
    /// Digest of the headers that a user brings; `None` for those of packages.
    pub headers: Option<String>,
    /// Each source's identity by its name.
    pub sources: BTreeMap<String, String>,
    /// Identity of the runtime base, where the image has one that is no need.
    pub base: Option<String>,
    /// Digests of those that only the registry's store vouches for, by what they are, and one over those that the nodes' system
    /// names.
    pub unverified: BTreeMap<&'static str, Digest>,
}

impl FetchedInputs {
    /// The header set, among those digests.
    pub const HEADERS: &str = "headers";
    /// The toolchain.
    pub const TOOLCHAIN: &str = "toolchain";
    /// The runtime base.
    pub const BASE: &str = "base";
    /// Toolchain and headers of images that the nodes' system names.
    pub const SYSTEM: &str = "system";
}

/// One driver image for one kernel target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Cell {
    /// The image.
    pub image: ImageName,
    /// The driver's version.
    pub version: String,
    /// The kernel target.
    pub target: KernelTarget,
    /// The kernel family.
    pub family: ImageName,
    /// The toolchain's identity.
    pub toolchain: String,
    /// The name that it is published and looked up under.
    pub reference: ImageReference,
    /// Further names for the same image.
    pub further: Vec<ImageReference>,
    /// Over everything that can change the image.
    pub input_hash: InputHash,
    /// The same without the digests that only the registry's store, or the nodes' system, gives. It decides whether a published image
    /// is this one.
    #[serde(skip)]
    pub declared_hash: InputHash,
    /// The same without the signing of modules, where they are signed: an image with it has the same payload, signed with
    /// another key or not at all. The base of `runtime.base: need` is left out as well, which is no part of the payload: it has
    /// changed too when the key has.
    #[serde(skip)]
    pub unsigned_hash: Option<InputHash>,
    /// Who signs the modules, where they are signed.
    #[serde(skip)]
    pub signed_with: Option<SignedWith>,
    /// Over the same without what tells one kernel from another (release, headers, toolchain): images of one
    /// recipe may take each other's payload.
    #[serde(skip)]
    pub recipe: InputHash,
    /// The rendered Dockerfile.
    #[serde(skip)]
    pub dockerfile: String,
    /// The engine's local name of the image with toolchain and header set.
    #[serde(skip)]
    pub base_name: String,
    /// The patches that apply, in order.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub patches: Vec<CellPatch>,
    /// Why it is not built: an input is not signed as the site asks, or not known any more. What is published stays as it is.
    #[serde(skip)]
    pub refused: Option<SkipReason>,
    /// What its nodes say of their system.
    #[serde(skip)]
    pub system: NodeSystem,
    /// What a build fetches by itself.
    #[serde(skip)]
    pub fetched: FetchedInputs,
    /// What it is compiled against beside the kernel, in the definition's order.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub needs: Vec<CellNeed>,
    /// Names of the nodes that call for it; empty for announced kernels.
    pub nodes: Vec<String>,
    /// Images that call for it because they are compiled against it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub needed_by: Vec<ImageName>,
    /// Who announces its kernel.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub announced_by: Vec<AnnouncedBy>,
}

impl Cell {
    /// For messages: `<image> for <kernel release>`.
    pub fn subject(&self) -> String {
        format!("{} for {}", self.image, self.target.release)
    }

    /// All its names.
    pub fn references(&self) -> impl Iterator<Item = &ImageReference> {
        std::iter::once(&self.reference).chain(&self.further)
    }

    /// The input that differs from an earlier state of this cell, for people; `None` where the input hash is the same.
    pub fn changed_since(&self, before: &Self) -> Option<&'static str> {
        if self.input_hash == before.input_hash {
            return None;
        }
        let (now, then) = (&self.fetched, &before.fetched);
        let parts = [
            ("the kernel's headers", now.headers != then.headers),
            ("a source", now.sources != then.sources),
            ("a patch", self.patches != before.patches),
            ("the toolchain", self.toolchain != before.toolchain),
            ("what it is compiled against", self.needs != before.needs),
            ("the runtime base", now.base != then.base),
            (
                "what the registry's store, or the nodes' system, has of its inputs",
                now.unverified != then.unverified,
            ),
            ("the key that signs modules", self.signed_with != before.signed_with),
        ];
        let changed = parts.iter().find(|(_, differs)| *differs);
        Some(changed.map_or("its definition", |(what, _)| what))
    }
}
