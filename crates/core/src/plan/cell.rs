//! One driver image for one kernel target: its names, Dockerfile and input hash.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{AnnouncedBy, NamedInputs, SkipReason};
use crate::{
    image::{Digest, HostOutput, ImageName, ImageReference, InputHash},
    kernel::{KernelTarget, NodeSystem},
    site::Signed,
};

/// farrier's build format. Change it when the same inputs would give other bytes, for example because layers are packed
/// differently.
pub const BUILD_FORMAT: &str = "farrier.dev/build/1";
/// Version of `driver-entrypoint`'s behavior, part of the input hash of images that include it. The program's bytes are
/// not part of the hash, or every new farrier would rebuild every fleet: an image keeps the entrypoint of the farrier
/// that built it. Change this version when existing images should be rebuilt with the new entrypoint.
pub const ENTRYPOINT_FORMAT: &str = "farrier.dev/entrypoint/1";
/// Version of the module signing method, part of the input hash of images with signed modules. Change it when the same
/// key would give other signatures.
pub const SIGNING_FORMAT: &str = "farrier.dev/signing/1";

/// Signer of an image's modules. The digest that is signed is not part of the input hash: it follows from the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SignedWith {
    /// SHA-256 of the certificate.
    pub certificate: Digest,
    /// Treatment of modules that are already signed.
    pub signed: Signed,
}

impl SignedWith {
    /// Returns the first digits of the certificate's fingerprint, for tags and messages.
    pub fn short(&self) -> &str {
        self.certificate.short()
    }
}

/// Exposed headers that a cell is compiled against.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, derive_more::Display)]
#[serde(rename_all = "camelCase")]
#[display("{name}@sha256:{}", exposed.short())]
pub struct CellNeed {
    /// Name of the need's directory below `needs/`.
    pub name: ImageName,
    /// Version of the needed image; for a tree, the first digits of its digest.
    pub version: String,
    /// Digest of the content, part of the input hash.
    pub exposed: Digest,
    /// Image that exposes the headers, by digest; `None` for a tree that the user provides.
    pub image: Option<ImageReference>,
}

/// A patch that applies to the cell's kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CellPatch {
    /// Index in `spec.patches`.
    #[serde(skip)]
    pub index: usize,
    /// File name in the build context, below `patches/`: `001-foo.patch`.
    pub name: String,
    /// SHA-256 of the content, part of the input hash.
    pub sha256: String,
}

/// Hashed inputs that a build fetches itself. A build that gets different inputs fails, because it would not be a build
/// of this cell.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FetchedInputs {
    /// Digest of headers that the user provides; `None` for headers from packages.
    pub headers: Option<String>,
    /// Identity of each source, by its name.
    pub sources: BTreeMap<String, String>,
    /// Identity of the runtime base, where the image has one that is not a need.
    pub base: Option<String>,
    /// Digests of inputs whose only source is unsigned content in the registry's store, by kind. Also one digest over the
    /// inputs that depend on facts about the nodes' system.
    pub unverified: BTreeMap<&'static str, Digest>,
}

impl FetchedInputs {
    /// Key of the header set in `unverified`.
    pub const HEADERS: &str = "headers";
    /// Key of the toolchain in `unverified`.
    pub const TOOLCHAIN: &str = "toolchain";
    /// Key of the runtime base in `unverified`.
    pub const BASE: &str = "base";
    /// Key of the digest over toolchain and headers that depend on facts about the nodes' system.
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
    /// Identity of the toolchain.
    pub toolchain: String,
    /// Primary name: the image is published and looked up under it.
    pub reference: ImageReference,
    /// Additional names of the same image.
    pub further: Vec<ImageReference>,
    /// Hash over everything that can change the image.
    pub input_hash: InputHash,
    /// Input hash without the digests in [`FetchedInputs::unverified`]. A published image with the same declared hash is
    /// up to date.
    #[serde(skip)]
    pub declared_hash: InputHash,
    /// Input hash without module signing, for signed images. An image with the same unsigned hash has the same payload,
    /// signed with another key or not signed. A base from `runtime.base: need` is excluded too: it is not part of the
    /// payload, and changes whenever the key changes.
    #[serde(skip)]
    pub unsigned_hash: Option<InputHash>,
    /// Signer of the modules, where they are signed.
    #[serde(skip)]
    pub signed_with: Option<SignedWith>,
    /// Hash over the same inputs, except for inputs that differ between kernels (release, headers, toolchain). Images
    /// with the same recipe may reuse each other's payload.
    #[serde(skip)]
    pub recipe: InputHash,
    /// Inputs of the declared hash by name, for the provenance.
    #[serde(skip)]
    pub inputs: NamedInputs,
    /// The rendered Dockerfile.
    #[serde(skip)]
    pub dockerfile: String,
    /// Engine's local name of the image with toolchain and header set.
    #[serde(skip)]
    pub base_name: String,
    /// Patches that apply, in order.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub patches: Vec<CellPatch>,
    /// Reason for not building the cell: an input is unknown or not signed as the site requires. A published image
    /// stays as it is.
    #[serde(skip)]
    pub refused: Option<SkipReason>,
    /// Facts that the cell's nodes report about their system.
    #[serde(skip)]
    pub system: NodeSystem,
    /// Inputs that a build fetches itself.
    #[serde(skip)]
    pub fetched: FetchedInputs,
    /// Needs that the cell is compiled against, in the definition's order.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub needs: Vec<CellNeed>,
    /// Outputs that a build publishes beside the image.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub outputs: Vec<HostOutput>,
    /// Names of the nodes that call for the cell; empty for announced kernels.
    pub nodes: Vec<String>,
    /// Images that call for the cell because they are compiled against it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub needed_by: Vec<ImageName>,
    /// Origins of the kernel's announcement.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub announced_by: Vec<AnnouncedBy>,
}

impl Cell {
    /// Returns the cell's name for messages: `<image> for <kernel release>`.
    pub fn subject(&self) -> String {
        format!("{} for {}", self.image, self.target.release)
    }

    /// Returns all names of the image.
    pub fn references(&self) -> impl Iterator<Item = &ImageReference> {
        std::iter::once(&self.reference).chain(&self.further)
    }

    /// Describes the input that differs from an earlier state of this cell; `None` where the input hash is the same.
    pub fn changed_since(&self, before: &Self) -> Option<&'static str> {
        if self.input_hash == before.input_hash {
            return None;
        }
        let (now, then) = (&self.fetched, &before.fetched);
        let inputs = [
            ("the kernel's headers", now.headers != then.headers),
            ("a source", now.sources != then.sources),
            ("a patch", self.patches != before.patches),
            ("the toolchain", self.toolchain != before.toolchain),
            ("an image it is compiled against", self.needs != before.needs),
            ("the runtime base", now.base != then.base),
            (
                "an unverified input in the registry's store or the nodes' system",
                now.unverified != then.unverified,
            ),
            ("the key that signs modules", self.signed_with != before.signed_with),
        ];
        let changed = inputs.iter().find(|(_, differs)| *differs);
        Some(changed.map_or("its definition", |(input, _)| input))
    }
}
