//! Pure: one driver image for one kernel target: its names, Dockerfile and input hash.

use std::{collections::BTreeMap, fmt, path::Path};

use serde::Serialize;

use super::{
    AnnouncedBy, Published, SkipReason,
    cell_hash::{HashInputs, canonical, input_hash, recipe, unsigned_hash},
    needs,
};
use crate::{
    image::{
        Definitions, Digest, DriverImage, ImageName, ImageReference, InputHash, InputHasher, PatchSpec,
        ReferenceError, Repository, TagInputs, Version, render_tags,
    },
    kernel::{Architecture, KernelFamily, KernelTarget, match_family},
    site::Signed,
    template::{TemplateContext, Templates},
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
    /// The `driver-entrypoint` that farrier puts into the image, where it does.
    pub entrypoint: Option<EntrypointBinary>,
    /// Who signs the modules, where they are signed.
    pub signed_with: Option<SignedWith>,
}

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
        let hex = self.certificate.hex();
        hex.get(..12).unwrap_or(hex)
    }
}

/// The `driver-entrypoint` at hand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntrypointBinary {
    /// What it runs on.
    pub arch: Architecture,
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

/// What a cell is made from. Failed look-ups are kept with their reasons: they concern the cells that
/// need them and no others.
#[derive(Clone, Copy, Debug)]
pub struct CellInputs<'a> {
    /// Images, families, templates.
    pub definitions: &'a Definitions,
    /// What was found out about each image.
    pub resolved: &'a BTreeMap<ImageName, Result<ResolvedImage, String>>,
    /// Each family's toolchain identity, by the family's name.
    pub toolchains: &'a BTreeMap<ImageName, Result<String, String>>,
    /// Digests of the headers that users bring, by kernel target, or why they are not known; packages need none.
    pub headers: &'a BTreeMap<KernelTarget, Result<Option<String>, String>>,
    /// What registries hold, as far as it was asked: where needed images are found with what they expose.
    pub published: &'a BTreeMap<ImageReference, Published>,
    /// Digests of the trees that users bring as needs, or why they are not known.
    pub trees: &'a BTreeMap<TreeKey, Result<Digest, String>>,
    /// Where images are kept.
    pub location: &'a ImageLocation,
}

/// Whose need it is, the need's name, and the kernel.
pub type TreeKey = (ImageName, ImageName, KernelTarget);

/// Exposed headers that a cell is compiled against.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
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

impl fmt::Display for CellNeed {
    /// `mofed@sha256:0123456789ab`: what is exposed, by the digits that people compare.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digest = self.exposed.hex();
        write!(f, "{}@sha256:{}", self.name, digest.get(..12).unwrap_or(digest))
    }
}

/// A patch that applies to the cell's kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CellPatch {
    /// Its index in `spec.patches`.
    pub index: usize,
    /// Its name in the build context, below `patches/`: `001-foo.patch`.
    pub name: String,
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
    #[serde(skip)]
    pub patches: Vec<CellPatch>,
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
}

/// Works out one image for one kernel target; no node calls for it yet. `templates` are parsed by the way. Needed images
/// must be published.
pub fn cell_for(
    inputs: &CellInputs<'_>,
    templates: &mut Templates,
    image: &DriverImage,
    target: &KernelTarget,
) -> Result<Cell, SkipReason> {
    let needs = needs::alone(inputs, templates, image, target, &mut Vec::new())?;
    cell_with(inputs, templates, image, target, needs)
}

/// The Dockerfile of one image for one kernel target. What it is compiled against need not be there.
pub fn dockerfile_for(
    inputs: &CellInputs<'_>,
    image: &DriverImage,
    target: &KernelTarget,
) -> Result<String, SkipReason> {
    rendered(inputs, &mut Templates::default(), image, target).map(|rendered| rendered.dockerfile)
}

/// Is the image meant for the kernel at all?
pub(super) fn family_for<'a>(
    definitions: &'a Definitions,
    image: &DriverImage,
    target: &KernelTarget,
) -> Result<&'a KernelFamily, SkipReason> {
    if let Some(range) = image.spec.range_without(&target.release) {
        return Err(SkipReason::KernelOutOfRange { range: range.to_string() });
    }
    match_family(&definitions.families, target).ok_or(SkipReason::NoFamily)
}

/// What does not depend on the needs' content.
struct Rendered<'a> {
    family: &'a KernelFamily,
    resolved: &'a ResolvedImage,
    toolchain: &'a str,
    headers: String,
    base_name: String,
    patches: Vec<CellPatch>,
    dockerfile: String,
}

fn rendered<'a>(
    inputs: &CellInputs<'a>,
    templates: &mut Templates,
    image: &DriverImage,
    target: &KernelTarget,
) -> Result<Rendered<'a>, SkipReason> {
    let CellInputs {
        definitions,
        resolved,
        toolchains,
        headers: header_files,
        published: _,
        trees: _,
        location: _,
    } = *inputs;
    let family = family_for(definitions, image, target)?;
    let unresolved = |detail: String| SkipReason::Unresolved { detail };
    let resolved = match resolved.get(&image.metadata.name) {
        Some(Ok(resolved)) => resolved,
        Some(Err(detail)) => return Err(unresolved(detail.clone())),
        None => return Err(unresolved("its sources were not looked up".to_owned())),
    };
    let toolchain = toolchain_identity(toolchains, family)?;
    let mut headers = canonical("headers", &family.spec.headers)?;
    match header_files.get(target) {
        Some(Ok(digest)) => headers.push_str(digest.as_deref().unwrap_or_default()),
        Some(Err(detail)) => return Err(SkipReason::Headers { detail: detail.clone() }),
        None => {}
    }
    let base_name = base_name(toolchain, &headers, target);
    let version = target.release.version();
    let patches = image.spec.patches.iter().enumerate();
    let patches: Vec<CellPatch> = patches
        .filter(|(_, patch)| patch.kernels.as_ref().is_none_or(|range| range.matches(&version)))
        .map(|(index, patch)| CellPatch { index, name: patch_name(index, patch) })
        .collect();
    let dockerfile = dockerfile(definitions, templates, (image, resolved), &patches, &base_name, target)?;
    Ok(Rendered { family, resolved, toolchain, headers, base_name, patches, dockerfile })
}

/// [`cell_for`], with what the image is compiled against.
pub(super) fn cell_with(
    inputs: &CellInputs<'_>,
    templates: &mut Templates,
    image: &DriverImage,
    target: &KernelTarget,
    needs: Vec<CellNeed>,
) -> Result<Cell, SkipReason> {
    let rendered = rendered(inputs, templates, image, target)?;
    let Rendered { family, resolved, toolchain, headers, base_name, patches, dockerfile } = rendered;
    let (reference, further) = references(inputs.location, templates, (image, resolved), target, &needs)?;
    let spec = &image.spec;
    let inputs =
        HashInputs { spec, resolved, patches: &patches, needs: &needs, toolchain, headers: &headers, target };
    let input_hash = input_hash(&inputs, &dockerfile)?;
    let unsigned_hash =
        resolved.signed_with.as_ref().map(|_| unsigned_hash(&inputs, &dockerfile)).transpose()?;
    let recipe = recipe(&inputs, &family.metadata.name, &dockerfile.replace(&base_name, "toolchain"))?;
    Ok(Cell {
        image: image.metadata.name.clone(),
        version: resolved.version.clone(),
        target: target.clone(),
        family: family.metadata.name.clone(),
        toolchain: toolchain.to_owned(),
        reference,
        further,
        input_hash,
        unsigned_hash,
        signed_with: resolved.signed_with.clone(),
        recipe,
        dockerfile,
        base_name,
        patches,
        needs,
        nodes: Vec::new(),
        needed_by: Vec::new(),
        announced_by: Vec::new(),
    })
}

fn toolchain_identity<'a>(
    toolchains: &'a BTreeMap<ImageName, Result<String, String>>,
    family: &KernelFamily,
) -> Result<&'a str, SkipReason> {
    let failed = |detail: &str| SkipReason::Toolchain {
        family: family.metadata.name.to_string(),
        detail: detail.to_owned(),
    };
    match toolchains.get(&family.metadata.name) {
        Some(Ok(identity)) => Ok(identity),
        Some(Err(detail)) => Err(failed(detail)),
        None => Err(failed("it was not looked up")),
    }
}

fn dockerfile(
    definitions: &Definitions,
    templates: &mut Templates,
    (image, resolved): (&DriverImage, &ResolvedImage),
    patches: &[CellPatch],
    base_name: &str,
    target: &KernelTarget,
) -> Result<String, SkipReason> {
    let spec = &image.spec;
    let text = definitions
        .templates
        .get(&spec.template)
        .ok_or_else(|| SkipReason::NoTemplate { template: spec.template.clone() })?;
    let mut context =
        TemplateContext::new(base_name, (image.metadata.name.as_str(), &resolved.version), target);
    context.modules.clone_from(&spec.modules);
    context.sources = spec.sources.iter().map(|source| source.name.to_string()).collect();
    context.needs = spec.needs.iter().map(|need| need.name().to_string()).collect();
    context.patches = patches.iter().map(|patch| patch.name.clone()).collect();
    context.vars.clone_from(&spec.vars);
    templates
        .render(&spec.template, text, &context)
        .map_err(|error| SkipReason::Template { detail: error.to_string() })
}

fn references(
    location: &ImageLocation,
    templates: &mut Templates,
    (image, resolved): (&DriverImage, &ResolvedImage),
    target: &KernelTarget,
    needs: &[CellNeed],
) -> Result<(ImageReference, Vec<ImageReference>), SkipReason> {
    let repository = location
        .repository(&image.metadata.name)
        .map_err(|error| SkipReason::Repository { detail: error.to_string() })?;
    let needs = needs.iter().map(|need| (need.name.as_str(), need.version.as_str())).collect();
    let signer = resolved.signed_with.as_ref().map(SignedWith::short);
    let tags = TagInputs { version: &resolved.version, target, needs, signer };
    let tags = render_tags(templates, &image.spec.tags, &tags)
        .map_err(|error| SkipReason::Tag { detail: error.to_string() })?;
    let reference = |tag| ImageReference { repository: repository.clone(), version: Version::Tag(tag) };
    let mut references = tags.into_iter().map(reference);
    let first = references.next().ok_or(SkipReason::NoTags)?;
    Ok((first, references.collect()))
}

/// `localhost/` keeps engines from looking for it in a registry.
fn base_name(toolchain: &str, headers: &str, target: &KernelTarget) -> String {
    let mut hasher = InputHasher::new(BUILD_FORMAT);
    hasher
        .add("toolchain", toolchain)
        .add("headers", headers)
        .add("release", target.release.as_str())
        .add("arch", target.arch.as_str());
    let hash = hasher.finish().to_string();
    format!("localhost/farrier/base:{}", &hash[..24])
}

/// The number keeps the order and tells files of one name apart. Whatever the file is called, its name
/// in the context is safe in a shell word.
fn patch_name(index: usize, patch: &PatchSpec) -> String {
    let file = patch.path.file_name().map(Path::new).map(Path::to_string_lossy).unwrap_or_default();
    let safe = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' };
    format!("{:03}-{}", index + 1, file.chars().map(safe).collect::<String>())
}
