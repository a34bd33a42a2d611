//! Pure: what a plan is made from: definitions with what was found out about them, the cluster, and what the registry
//! and earlier passes say.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::{Announcements, Cell, ClusterSnapshot, Instance, Manifests, SignedWith};
use crate::{
    definition::checked::PackageToInstall,
    image::{
        CheckSpec, Definitions, Digest, DriverImage, DriverImageSpec, ImageName, ImageReference, InputHash,
        Period, ReferenceError, Repository, Version,
    },
    kernel::{
        Architecture, Compiler, KernelFamily, KernelTarget, NodeSystem, Toolchain, UNKNOWN_SYSTEM, family_for,
    },
    kmod::Verdict,
    oci::ImageFacts,
};

/// What a plan is made from.
#[derive(Clone, Copy, Debug)]
pub struct PlanInputs<'a> {
    /// The definitions, with what was found out about them.
    pub cells: CellInputs<'a>,
    /// What the registry and earlier passes said.
    pub observed: &'a Observed,
    /// The cluster.
    pub snapshot: &'a ClusterSnapshot,
    /// Announced kernels, made from the same snapshot.
    pub announced: &'a Announcements,
    /// DaemonSets of the directories that `file` rollouts name, by the path in the definition.
    pub manifests: &'a Manifests,
    /// Which farrier plans, where a cluster has several.
    pub instance: &'a Instance,
    /// The architecture of the machine whose sandbox compiles; `None` for an engine that may have machines of others.
    pub machine: Option<Architecture>,
    /// Is there a daemon, which makes whole images?
    pub has_daemon: bool,
    /// The time of the plan.
    pub now: jiff::Timestamp,
}

impl<'a> PlanInputs<'a> {
    /// The definitions.
    pub fn definitions(&self) -> &'a Definitions {
        self.cells.definitions
    }
}

/// What the planner has to know before it can decide.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Questions {
    /// Does the registry hold these names, and which images?
    pub images: BTreeSet<ImageReference>,
    /// How are these published images signed? They are named by digest.
    pub signatures: BTreeSet<ImageReference>,
    /// Did these inputs fail before?
    pub failures: BTreeSet<InputHash>,
    /// Are there headers of these kernels, for which something is to be built?
    pub headers: BTreeSet<KernelTarget>,
}

impl Questions {
    /// Is nothing asked?
    pub fn is_empty(&self) -> bool {
        let Self { images, signatures, failures, headers } = self;
        images.is_empty() && signatures.is_empty() && failures.is_empty() && headers.is_empty()
    }
}

/// The answers to [`Questions`], and what images in use hold.
#[derive(Clone, Debug, Default)]
pub struct Observed {
    /// What the registry holds under each name that it was asked for.
    pub published: BTreeMap<ImageReference, Published>,
    /// Names that it does not have.
    pub absent: BTreeSet<ImageReference>,
    /// Names that could not be looked up, with the fault.
    pub unreachable: BTreeMap<ImageReference, String>,
    /// The last failure of these inputs; `None` where there is none.
    pub failures: BTreeMap<InputHash, Option<Failure>>,
    /// What is known of the headers of kernels.
    pub headers: BTreeMap<KernelTarget, HeaderState>,
    /// What images hold that DaemonSets and pods name now; absent where they are not farrier's, or not known.
    pub contents: BTreeMap<String, ImageContents>,
    /// What is known of the signatures of published images, where the site asks for it.
    pub signatures: BTreeMap<Digest, SignatureState>,
}

impl Observed {
    /// Was the registry asked for this name?
    pub fn knows(&self, reference: &ImageReference) -> bool {
        self.published.contains_key(reference)
            || self.absent.contains(reference)
            || self.unreachable.contains_key(reference)
    }

    /// The image for an architecture that is published under a name.
    pub(super) fn image(&self, reference: &ImageReference, architecture: Architecture) -> Option<&Published> {
        self.published.get(reference)?.for_architecture(architecture)
    }

    /// What is known of the signatures of an image that is named by digest.
    pub(super) fn signature(&self, image: &ImageReference) -> Option<&SignatureState> {
        let Version::Digest(digest) = &image.version else { return None };
        self.signatures.get(digest)
    }
}

/// What is known of a kernel's headers before they are fetched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HeaderState {
    /// They are there; with the compiler that built the kernel, where they say so already.
    There(Option<Compiler>),
    /// They are not: what was looked for.
    Missing(String),
    /// They cannot be had, and trying again changes nothing: why, and what to do.
    Refused(String),
    /// It could not be found out this time.
    Unknown,
}

/// An image that a registry holds under a tag, as its manifest describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Published {
    /// The manifest's digest.
    pub digest: Digest,
    /// Its input hash; `None` for images that are not farrier's.
    #[serde(skip)]
    pub input_hash: Option<InputHash>,
    /// The same without the digests of what only the registry vouched for; `None` where it had none.
    #[serde(skip)]
    pub declared_hash: Option<InputHash>,
    /// Digest over what it exposes to drivers that are compiled against it.
    #[serde(skip)]
    pub exposed: Option<Digest>,
    /// Its check report's verdict.
    pub verdict: Option<Verdict>,
    /// The kernel release that it says it is for.
    #[serde(skip)]
    pub kernel_release: Option<String>,
    /// The images by architecture, where the name leads to several, or to one of which it is known for which it is. The other fields
    /// are then those of the name: of an index only its digest.
    #[serde(skip)]
    pub platforms: BTreeMap<Architecture, Self>,
}

impl Published {
    /// The image for an architecture.
    pub fn for_architecture(&self, architecture: Architecture) -> Option<&Self> {
        if self.platforms.is_empty() { Some(self) } else { self.platforms.get(&architecture) }
    }

    /// Is it made from what the definitions say of this cell? What the registry's store had when it was made, or has now,
    /// does not make another image of it: nothing that someone writes there changes what is published.
    pub fn is_of(&self, cell: &Cell) -> bool {
        self.declared_hash.or(self.input_hash) == Some(cell.declared_hash)
    }

    /// The reference that names exactly this image.
    pub(super) fn pinned(&self, reference: &ImageReference) -> ImageReference {
        let version = Version::Digest(self.digest.clone());
        ImageReference { repository: reference.repository.clone(), version }
    }
}

/// A try that failed, kept so that it is not repeated for nothing.
#[serde_with::skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// When.
    pub at: jiff::Timestamp,
    /// How, in one line.
    pub message: String,
    /// Will the same inputs fail again?
    pub permanent: bool,
    /// What the definition asked of the check, where that made the failure: asked for less, they may not.
    pub under: Option<CheckSpec>,
    /// The deadline that stopped it: with a longer one it may not fail.
    pub deadline: Option<Period>,
}

impl Failure {
    /// Would the same inputs fail again under what the definition now asks of the check, and with its deadline?
    pub fn still_holds(&self, spec: &DriverImageSpec) -> bool {
        self.under.is_none_or(|under| under == spec.check)
            && self.deadline.is_none_or(|deadline| spec.build.deadline <= deadline)
    }
}

/// What an image that is in use holds, as its manifest says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImageContents {
    /// Exact releases of the kernels that it has modules for.
    pub kernels: BTreeSet<String>,
    /// The image whose payload it has for each of them: itself, where it is for one kernel only.
    pub members: BTreeMap<String, Digest>,
    /// The images by architecture, where it is an index; the other fields are empty then.
    pub platforms: BTreeMap<Architecture, Self>,
}

impl ImageContents {
    /// Of a published image, from what its manifest says and its digest.
    pub fn of(facts: &ImageFacts, digest: &Digest) -> Self {
        let mut members: BTreeMap<String, Digest> =
            facts.members.iter().map(|(kernel, digest)| (kernel.to_string(), digest.clone())).collect();
        if let (true, Some(kernel)) = (members.is_empty(), &facts.kernel_release) {
            members.insert(kernel.to_string(), digest.clone());
        }
        members.into()
    }

    /// What nodes of an architecture get of it.
    pub(super) fn for_architecture(&self, architecture: Architecture) -> Option<&Self> {
        if self.platforms.is_empty() { Some(self) } else { self.platforms.get(&architecture) }
    }

    /// Has it modules for a kernel?
    pub(super) fn has(&self, architecture: Architecture, release: &str) -> bool {
        self.for_architecture(architecture).is_some_and(|image| image.kernels.contains(release))
    }
}

impl From<BTreeMap<String, Digest>> for ImageContents {
    fn from(members: BTreeMap<String, Digest>) -> Self {
        Self { kernels: members.keys().cloned().collect(), members, platforms: BTreeMap::new() }
    }
}

/// What is known of an image's signatures.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SignatureState {
    /// Is it signed by the site's own key (`imageSigning`), or has the site none?
    pub ours: bool,
    /// Why the policy (`policy.requireSigned`) does not accept it; `None` where it does, or asks for nothing.
    pub refused: Option<String>,
}

/// What cells are made from.
#[derive(Clone, Copy, Debug)]
pub struct CellInputs<'a> {
    /// Images, families, templates.
    pub definitions: &'a Definitions,
    /// What was found out about them.
    pub resolved: &'a Resolved,
    /// What registries hold, as far as they were asked: where needed images are found with what they expose.
    pub published: &'a BTreeMap<ImageReference, Published>,
    /// Where images are kept.
    pub location: &'a ImageLocation,
}

/// What definitions amount to at this moment. Failed look-ups are kept with their reasons: they concern the cells that
/// need them and no others.
#[derive(Clone, Debug, Default)]
pub struct Resolved {
    /// What the nodes of each kernel target say of their system.
    pub systems: BTreeMap<KernelTarget, NodeSystem>,
    /// Versions, sources, patches and bases of the images.
    pub images: BTreeMap<ImageName, Result<ResolvedImage, String>>,
    /// Identities of the toolchains.
    pub toolchains: BTreeMap<ToolchainKey, Result<String, String>>,
    /// Digests of the headers that users bring, nothing for those of packages.
    pub headers: BTreeMap<KernelTarget, Result<Option<String>, String>>,
    /// What built the kernels whose headers users bring, where these say so.
    pub compilers: BTreeMap<KernelTarget, Compiler>,
    /// Families whose headers users bring, and kernels for which there are none: what was looked for.
    pub without_headers: BTreeMap<KernelTarget, String>,
    /// Whether a kernel's headers say what an image asks, by the question's text.
    pub header_texts: BTreeMap<(KernelTarget, String), Result<bool, String>>,
    /// Identities of the sources that are others for each kernel, and of packages for another architecture than the machine's.
    pub kernel_sources: BTreeMap<TreeKey, Result<String, String>>,
    /// Digests of the trees that users bring as needs.
    pub trees: BTreeMap<TreeKey, Result<Digest, String>>,
    /// Header sets in the registry's store that no key of the site signed and no archive vouches for.
    pub unverified_headers: BTreeMap<KernelTarget, Unverified>,
    /// The same of root file systems; nothing for those that are vouched for.
    pub unverified_root_fs: BTreeMap<RootFsKey, Option<Unverified>>,
    /// Why root file systems of packages that are not made yet cannot be made here, and what to do.
    pub unmakeable_root_fs: BTreeMap<RootFsKey, String>,
    /// Was an outside system out of reach?
    pub unreachable: bool,
}

impl Resolved {
    /// The family of a kernel, as far as its headers are known.
    pub fn family<'a>(
        &self,
        families: &'a [KernelFamily],
        target: &KernelTarget,
    ) -> Option<&'a KernelFamily> {
        family_for(families, target, self.compilers.get(target).copied())
    }

    /// What the nodes of a kernel target say of their system.
    pub fn system(&self, target: &KernelTarget) -> &NodeSystem {
        self.systems.get(target).unwrap_or(&UNKNOWN_SYSTEM)
    }
}

/// An input in the registry's store whose tag and annotations are all that says what it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unverified {
    /// The site has no keys: it counts for its content.
    Content(Digest),
    /// None of the site's keys signed it: nothing is built with it, and why.
    Refused(String),
}

/// Is it a toolchain or a base ([`FetchedInputs`](super::FetchedInputs)), of which identity? Both may be of the same packages,
/// and are made otherwise.
pub type RootFsKey = (&'static str, String, Architecture);

/// The kernel family, the packages that images add to its toolchain, and the image or the distribution's version that it is of,
/// where these differ between kernels.
pub type ToolchainKey = (ImageName, Vec<PackageToInstall>, Option<String>);

/// The key of the toolchain that an image is compiled with for a kernel of a family.
pub fn toolchain_key(
    image: &DriverImage,
    family: &KernelFamily,
    target: &KernelTarget,
    system: &NodeSystem,
) -> ToolchainKey {
    let of_kernel = match &family.spec.toolchain {
        Toolchain::Image(image) if image.contains("{{") => {
            let named = family.spec.image_for(image, target, system);
            // What is missing names the kernel, too.
            Some(named.map_or_else(|missing| missing, |image| image.to_string()))
        }
        // Its repositories are those of the distribution's version.
        Toolchain::Rpm(_) => Some(target.repository_version().into_owned()),
        Toolchain::Image(_) | Toolchain::Bootstrap(_) => None,
    };
    (family.metadata.name.clone(), image.spec.build_packages.clone(), of_kernel)
}

/// The image that has the need or source, its name there, and the kernel.
pub type TreeKey = (ImageName, ImageName, KernelTarget);

/// What the definitions leave open and an adapter found out about one image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResolvedImage {
    /// The driver's version.
    pub version: String,
    /// Each source's identity (package version and digest, or the file's digest) by its name.
    pub sources: BTreeMap<String, String>,
    /// Each patch's sha256 by its index in `spec.patches`.
    pub patches: BTreeMap<usize, String>,
    /// Identity of the runtime base, where the image has one.
    pub base_identity: Option<String>,
    /// What the `driver-entrypoint`s run on that farrier has for the image, where it puts one in. Empty: not looked up.
    pub entrypoints: BTreeSet<Architecture>,
    /// Who signs the modules, where they are signed.
    pub signed_with: Option<SignedWith>,
}

/// Where images are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageLocation {
    /// What repositories start with: `host[:port][/path]`; empty inside a layout directory.
    pub prefix: String,
    /// Can nodes pull from it? Not from a layout directory.
    pub pullable: bool,
}

impl ImageLocation {
    /// The repository of an image.
    pub fn repository(&self, image: &ImageName) -> Result<Repository, ReferenceError> {
        match self.prefix.trim_end_matches('/') {
            "" => image.as_str().parse(),
            prefix => format!("{prefix}/{image}").parse(),
        }
    }
}
