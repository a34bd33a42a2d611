//! Inputs of a plan: the definitions with their resolved values, the cluster, and the facts from the registry and from earlier
//! reconciles.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::{
    Announcements, BuildProducts, Cell, ClusterSnapshot, Instance, Manifests, NamedInputs, SignedWith,
    SkipReason,
};
use crate::{
    definition::checked::PackageToInstall,
    image::{
        CheckSpec, Definitions, Digest, DriverImage, DriverImageSpec, ImageName, ImageReference, InputHash,
        Memory, Period, ReferenceError, Repository, Version,
    },
    kernel::{
        Architecture, Compiler, KernelFamily, KernelTarget, NodeSystem, Toolchain, UNKNOWN_SYSTEM, family_for,
    },
    kmod::Verdict,
    oci::ImageFacts,
    site::{SiteCheck, SiteSpec},
};

/// Inputs of a plan that are known before the first round of lookups.
#[derive(Clone, Copy, Debug)]
pub struct PlanInputs<'a> {
    /// The definitions, with their resolved values.
    pub cells: CellInputs<'a>,
    /// The cluster.
    pub snapshot: &'a ClusterSnapshot,
    /// Announced kernels, computed from the same snapshot.
    pub announced: &'a Announcements,
    /// DaemonSets of the directories that `file` rollouts name, by the path in the definition.
    pub manifests: &'a Manifests,
    /// Name of this farrier instance, where a cluster has several.
    pub instance: &'a Instance,
    /// Architecture of the machine whose sandbox compiles; `None` for an engine that may have machines of other
    /// architectures.
    pub machine: Option<Architecture>,
    /// Whether a daemon (Docker or Podman) is available to build whole images.
    pub has_daemon: bool,
    /// Time of the plan.
    pub now: jiff::Timestamp,
}

impl<'a> PlanInputs<'a> {
    /// Returns the definitions.
    pub fn definitions(&self) -> &'a Definitions {
        self.cells.definitions
    }
}

/// Answers of the registry and the cache to the lookups of each round, and the contents of images in use. A lookup
/// without an answer counts as failed, never as absence.
#[derive(Clone, Debug, Default)]
pub struct Observed {
    /// Image that the registry has under each name.
    pub published: BTreeMap<ImageReference, Published>,
    /// Inputs of published images that conflict with a cell, by the image's digest.
    pub inputs: BTreeMap<Digest, NamedInputs>,
    /// Build products in the sources of images that conflict with a published image.
    pub products: BTreeMap<ImageName, BuildProducts>,
    /// Names that the registry does not have.
    pub absent: BTreeSet<ImageReference>,
    /// Names whose lookup failed, with the error.
    pub unreachable: BTreeMap<ImageReference, String>,
    /// Whether the registry did not answer a lookup, or had a fault. A refusal is an answer.
    pub is_registry_down: bool,
    /// Last failure of each input hash; `None` where the build never failed.
    pub failures: BTreeMap<InputHash, Option<Failure>>,
    /// Known facts about the headers of kernels.
    pub headers: BTreeMap<KernelTarget, HeaderState>,
    /// Contents of the images that DaemonSets and pods use now. An image without an entry is not farrier's, or its
    /// contents are unknown.
    pub contents: BTreeMap<String, ImageContents>,
    /// Signature states of published images, where the site requires signatures.
    pub signatures: BTreeMap<Digest, SignatureState>,
}

impl Observed {
    /// Whether the name was looked up in the registry.
    pub fn knows(&self, reference: &ImageReference) -> bool {
        self.published.contains_key(reference)
            || self.absent.contains(reference)
            || self.unreachable.contains_key(reference)
    }

    /// Returns the reason why the registry's image under a name is unknown; `None` where the registry answered.
    pub(super) fn lookup_error(&self, reference: &ImageReference) -> Option<&str> {
        match self.unreachable.get(reference) {
            Some(error) => Some(error),
            None => (!self.knows(reference)).then_some("it was not looked up"),
        }
    }

    /// Returns the image for an architecture that is published under a name.
    pub(super) fn image(&self, reference: &ImageReference, architecture: Architecture) -> Option<&Published> {
        self.published.get(reference)?.for_architecture(architecture)
    }

    /// Returns the signature state of an image that is named by digest.
    pub(super) fn signature(&self, image: &ImageReference) -> Option<&SignatureState> {
        let Version::Digest(digest) = &image.version else { return None };
        self.signatures.get(digest)
    }
}

/// Known facts about a kernel's headers before they are fetched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HeaderState {
    /// The headers are available. Holds the compiler that built the kernel, if known.
    Available(Option<Compiler>),
    /// There are no headers. Holds a description of the search.
    Missing(String),
    /// The headers cannot be obtained, and a retry would not help. Holds the reason and the remedy.
    Refused(String),
    /// The lookup failed this time.
    Unknown,
}

/// Image that a registry has under a tag, as its manifest describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Published {
    /// Digest of the manifest.
    pub digest: Digest,
    /// Input hash; `None` for images that farrier did not build.
    #[serde(skip)]
    pub input_hash: Option<InputHash>,
    /// Input hash without the digests of inputs that only the registry's store vouched for; `None` where there were
    /// none.
    #[serde(skip)]
    pub declared_hash: Option<InputHash>,
    /// Digest of the headers that the image exposes to drivers compiled against it.
    #[serde(skip)]
    pub exposed: Option<Digest>,
    /// Verdict of the check report.
    pub verdict: Option<Verdict>,
    /// Kernel release that the image claims to be for.
    #[serde(skip)]
    pub kernel_release: Option<String>,
    /// Images by architecture, where the name points to an index, or to one image whose architecture is known. The
    /// other fields describe the manifest itself; for an index, only `digest` is set.
    #[serde(skip)]
    pub platforms: BTreeMap<Architecture, Self>,
}

impl Published {
    /// Returns the image for an architecture.
    pub fn for_architecture(&self, architecture: Architecture) -> Option<&Self> {
        if self.platforms.is_empty() { Some(self) } else { self.platforms.get(&architecture) }
    }

    /// Whether the image was built from the cell's declared inputs. The content of the registry's store at build time
    /// or now does not matter: writing to the store must not invalidate a published image.
    pub fn is_of(&self, cell: &Cell) -> bool {
        self.declared_hash.or(self.input_hash) == Some(cell.declared_hash)
    }

    /// Returns the reference that names exactly this image.
    pub(super) fn pinned(&self, reference: &ImageReference) -> ImageReference {
        let version = Version::Digest(self.digest.clone());
        ImageReference { repository: reference.repository.clone(), version }
    }
}

/// Failed attempt, kept so that the build is not repeated in vain.
#[serde_with::skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// Time of the failure.
    pub at: jiff::Timestamp,
    /// Error on one line.
    pub message: String,
    /// Whether the same inputs would fail again.
    pub permanent: bool,
    /// Check settings of the definition, where they caused the failure. With weaker settings the same inputs may
    /// succeed.
    pub under: Option<CheckSpec>,
    /// Check settings of the site, where they caused the failure.
    pub under_site: Option<SiteCheck>,
    /// Memory of the definition, where a limit stopped the build. With more memory the same inputs may succeed.
    pub memory: Option<Memory>,
    /// Deadline that stopped the build. With a longer deadline the same inputs may succeed.
    pub deadline: Option<Period>,
}

impl Failure {
    /// Whether the same inputs would fail again with the current check settings, memory and deadline.
    pub fn applies_to(&self, spec: &DriverImageSpec, site: &SiteSpec) -> bool {
        self.under.is_none_or(|under| under == spec.check)
            && self.under_site.is_none_or(|under| under == site.check)
            && self.memory.is_none_or(|memory| spec.build.memory <= memory)
            && self.deadline.is_none_or(|deadline| spec.build.deadline <= deadline)
    }
}

/// Contents of an image in use, from its manifest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImageContents {
    /// Exact releases of the kernels that the image has modules for.
    pub kernels: BTreeSet<String>,
    /// Image that each kernel's payload comes from: the image itself, where it is for a single kernel.
    pub members: BTreeMap<String, Digest>,
    /// Contents by architecture, where the image is an index; the other fields are then empty.
    pub platforms: BTreeMap<Architecture, Self>,
}

impl ImageContents {
    /// Reads the contents from the facts in a published image's manifest and from its digest.
    pub fn of(facts: &ImageFacts, digest: &Digest) -> Self {
        let mut members: BTreeMap<String, Digest> =
            facts.members.iter().map(|(kernel, digest)| (kernel.to_string(), digest.clone())).collect();
        if let (true, Some(kernel)) = (members.is_empty(), &facts.kernel_release) {
            members.insert(kernel.to_string(), digest.clone());
        }
        members.into()
    }

    /// Returns the contents for nodes of an architecture.
    pub(super) fn for_architecture(&self, architecture: Architecture) -> Option<&Self> {
        if self.platforms.is_empty() { Some(self) } else { self.platforms.get(&architecture) }
    }

    /// Whether the image has modules for a kernel.
    pub fn has(&self, architecture: Architecture, release: &str) -> bool {
        self.for_architecture(architecture).is_some_and(|image| image.kernels.contains(release))
    }
}

impl From<BTreeMap<String, Digest>> for ImageContents {
    fn from(members: BTreeMap<String, Digest>) -> Self {
        Self { kernels: members.keys().cloned().collect(), members, platforms: BTreeMap::new() }
    }
}

/// State of an image's signatures.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SignatureState {
    /// Whether the site's own key (`imageSigning`) signed the image, or the site has no key.
    pub ours: bool,
    /// Reason why the policy (`policy.requireSigned`) rejects the image; `None` where the policy accepts it or requires
    /// nothing.
    pub refused: Option<String>,
}

/// Inputs of cells.
#[derive(Clone, Copy, Debug)]
pub struct CellInputs<'a> {
    /// Images, families, templates.
    pub definitions: &'a Definitions,
    /// Resolved values of the definitions.
    pub resolved: &'a Resolved,
    /// Location where images are published.
    pub location: &'a ImageLocation,
}

/// Values that the definitions currently resolve to. Failed lookups are kept with their errors, because each concerns
/// only the cells that need the value.
#[derive(Clone, Debug, Default)]
pub struct Resolved {
    /// Facts that the nodes of each kernel target report about their system.
    pub systems: BTreeMap<KernelTarget, NodeSystem>,
    /// Versions, sources, patches and bases of the images.
    pub images: BTreeMap<ImageName, Result<ResolvedImage, String>>,
    /// Identities of the toolchains.
    pub toolchains: BTreeMap<ToolchainKey, Result<String, String>>,
    /// Digests of headers that users provide; `None` for headers from packages.
    pub headers: BTreeMap<KernelTarget, Result<Option<String>, SkipReason>>,
    /// Compilers that built the kernels, for kernels with user-provided headers that name the compiler.
    pub compilers: BTreeMap<KernelTarget, Compiler>,
    /// Kernels without headers whose family expects headers from users, with a description of the search.
    pub without_headers: BTreeMap<KernelTarget, String>,
    /// Results of an image's conditions on kernel headers ([`HeaderText`](crate::kernel::HeaderText)), by kernel and condition.
    pub header_texts: BTreeMap<(KernelTarget, String), Result<bool, String>>,
    /// Identities of sources that differ by kernel, and of packages for another architecture than the machine's.
    pub kernel_sources: BTreeMap<TreeKey, Result<String, String>>,
    /// Digests of trees that users provide as needs.
    pub trees: BTreeMap<TreeKey, Result<Digest, String>>,
    /// Header sets in the registry's store that neither a trusted key nor an archive vouches for.
    pub unverified_headers: BTreeMap<KernelTarget, Unverified>,
    /// Root file systems in the registry's store; `None` where a trusted key or an archive vouches for the file system.
    pub unverified_root_fs: BTreeMap<RootFsKey, Option<Unverified>>,
    /// Root file systems of packages that no store has and that cannot be created here, with the reason and the remedy.
    pub unbuildable_root_fs: BTreeMap<RootFsKey, String>,
    /// Whether an external system was unreachable.
    pub unreachable: bool,
}

impl Resolved {
    /// Returns the family of a kernel, taking the compiler of its headers into account where known.
    pub fn family<'a>(
        &self,
        families: &'a [KernelFamily],
        target: &KernelTarget,
    ) -> Option<&'a KernelFamily> {
        family_for(families, target, self.compilers.get(target).copied())
    }

    /// Returns the facts that the nodes of a kernel target report about their system.
    pub fn system(&self, target: &KernelTarget) -> &NodeSystem {
        self.systems.get(target).unwrap_or(&UNKNOWN_SYSTEM)
    }
}

/// Input in the registry's store that only its tag and annotations identify.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unverified {
    /// The site has no keys: the input is used, and its digest counts in the input hash.
    Content(Digest),
    /// No trusted key signed the input: nothing is built with it, for the given reason.
    Refused(String),
}

/// Key of a root file system: its kind (toolchain or base, see [`FetchedInputs`](super::FetchedInputs)), identity and
/// architecture. The kind is part of the key, because a toolchain and a base of the same packages are assembled
/// differently.
pub type RootFsKey = (&'static str, String, Architecture);

/// Key of a toolchain: the kernel family, and the packages that images add. If the toolchain image or the distribution version
/// differs between kernels, the key also has the image or version.
pub type ToolchainKey = (ImageName, Vec<PackageToInstall>, Option<String>);

/// Returns the key of the toolchain that compiles an image for a kernel of a family.
pub fn toolchain_key(
    image: &DriverImage,
    family: &KernelFamily,
    target: &KernelTarget,
    system: &NodeSystem,
) -> ToolchainKey {
    let kernel_specific = match &family.spec.toolchain {
        Toolchain::Image(image) if image.contains("{{") => {
            let resolved = family.spec.image_for(image, target, system);
            // The text for a missing image also names the kernel, so it is a usable key.
            Some(resolved.map_or_else(|missing| missing, |image| image.to_string()))
        }
        // The repositories depend on the distribution's version.
        Toolchain::Rpm(_) => Some(target.repository_version().into_owned()),
        Toolchain::Image(_) | Toolchain::Bootstrap(_) => None,
    };
    (family.metadata.name.clone(), image.spec.build_packages.clone(), kernel_specific)
}

/// Key of a need or source for a kernel: the image, the name of the need or source, and the kernel target.
pub type TreeKey = (ImageName, ImageName, KernelTarget);

/// Values of one image that the definitions leave open and an adapter resolved.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResolvedImage {
    /// Version of the driver.
    pub version: String,
    /// Identity of each source by its name: package version and digest, or the file's digest.
    pub sources: BTreeMap<String, String>,
    /// SHA-256 of each patch by its index in `spec.patches`.
    pub patches: BTreeMap<usize, String>,
    /// Identity of the runtime base, where the image has one.
    pub base_identity: Option<String>,
    /// Architectures of the available `driver-entrypoint` binaries, where farrier adds one to the image. Empty: not
    /// looked up.
    pub entrypoints: BTreeSet<Architecture>,
    /// Signer of the modules, where they are signed.
    pub signed_with: Option<SignedWith>,
}

/// Location where images are published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageLocation {
    /// Prefix of repositories: `host[:port][/path]`; empty inside a layout directory.
    pub prefix: String,
    /// Whether nodes can pull from the location; false for a layout directory.
    pub pullable: bool,
}

impl ImageLocation {
    /// Returns the repository of an image.
    pub fn repository(&self, image: &ImageName) -> Result<Repository, ReferenceError> {
        match self.prefix.trim_end_matches('/') {
            "" => image.as_str().parse(),
            prefix => format!("{prefix}/{image}").parse(),
        }
    }
}
