//! Pure: one driver image for one kernel target: its names, Dockerfile and input hash.

use std::{collections::BTreeMap, fmt, path::Path};

use serde::Serialize;

use super::{AnnouncedBy, Published, SkipReason, needs, text};
use crate::{
    image::{
        Definitions, Digest, DriverImage, DriverImageSpec, ImageName, ImageReference, InputHash, InputHasher,
        PatchSpec, ReferenceError, Repository, RuntimeSpec, SourceSpec, TagInputs, Version, render_tags,
    },
    kernel::{Architecture, KernelFamily, KernelLabel, KernelTarget, match_family},
    template::{TemplateContext, Templates},
};

/// farrier's build format. It changes when the same inputs would give other bytes, for example because
/// layers are packed differently.
pub const BUILD_FORMAT: &str = "farrier.dev/build/1";

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
}

/// The `driver-entrypoint` at hand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EntrypointBinary {
    /// Digest of its bytes.
    pub digest: Digest,
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
    /// Digests of the header files that users bring, by kernel target; packages need none.
    pub headers: &'a BTreeMap<KernelTarget, String>,
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
    #[serde(serialize_with = "text::one")]
    pub name: ImageName,
    /// Digest over its content, which counts in the input hash.
    #[serde(serialize_with = "text::one")]
    pub exposed: Digest,
    /// The image that exposes it, by digest; `None` for a tree that the user brings.
    #[serde(serialize_with = "text::optional")]
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
    #[serde(serialize_with = "text::one")]
    pub image: ImageName,
    /// The driver's version.
    pub version: String,
    /// The kernel target.
    #[serde(serialize_with = "text::target")]
    pub target: KernelTarget,
    /// The kernel family.
    #[serde(serialize_with = "text::one")]
    pub family: ImageName,
    /// The toolchain's identity.
    pub toolchain: String,
    /// The name that it is published and looked up under.
    #[serde(serialize_with = "text::one")]
    pub reference: ImageReference,
    /// Further names for the same image.
    #[serde(serialize_with = "text::many")]
    pub further: Vec<ImageReference>,
    /// Over everything that can change the image.
    #[serde(serialize_with = "text::one")]
    pub input_hash: InputHash,
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
    #[serde(skip_serializing_if = "Vec::is_empty", serialize_with = "text::many")]
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
    cell_with(inputs, &mut Templates::default(), image, target, Vec::new()).map(|cell| cell.dockerfile)
}

/// Is the image meant for the kernel at all?
pub(super) fn family_for<'a>(
    definitions: &'a Definitions,
    image: &DriverImage,
    target: &KernelTarget,
) -> Result<&'a KernelFamily, SkipReason> {
    if let Some(range) = &image.spec.kernels
        && !range.matches(&target.release.version())
    {
        return Err(SkipReason::KernelOutOfRange { range: range.to_string() });
    }
    match_family(&definitions.families, target).ok_or(SkipReason::NoFamily)
}

/// [`cell_for`], with what the image is compiled against.
pub(super) fn cell_with(
    inputs: &CellInputs<'_>,
    templates: &mut Templates,
    image: &DriverImage,
    target: &KernelTarget,
    needs: Vec<CellNeed>,
) -> Result<Cell, SkipReason> {
    let CellInputs {
        definitions,
        resolved,
        toolchains,
        headers: header_files,
        published: _,
        trees: _,
        location,
    } = inputs;
    let name = &image.metadata.name;
    let spec = &image.spec;
    let family = family_for(definitions, image, target)?;
    let unresolved = |detail: String| SkipReason::Unresolved { detail };
    let resolved = match resolved.get(name) {
        Some(Ok(resolved)) => resolved,
        Some(Err(detail)) => return Err(unresolved(detail.clone())),
        None => return Err(unresolved("its sources were not looked up".to_owned())),
    };
    let toolchain = toolchain_identity(toolchains, family)?;
    let mut headers = canonical("headers", &family.spec.headers)?;
    if let Some(digest) = header_files.get(target) {
        headers.push_str(digest);
    }
    let base_name = base_name(toolchain, &headers, target);

    let patches: Vec<CellPatch> = spec
        .patches
        .iter()
        .enumerate()
        .filter(|(_, patch)| patch.kernels.as_ref().is_none_or(|r| r.matches(&target.release.version())))
        .map(|(index, patch)| CellPatch { index, name: patch_name(index, patch) })
        .collect();

    let dockerfile = dockerfile(definitions, templates, (image, resolved), &patches, &base_name, target)?;
    let (reference, further) = references(location, templates, (image, resolved), target)?;
    let inputs =
        HashInputs { spec, resolved, patches: &patches, needs: &needs, toolchain, headers: &headers, target };
    let input_hash = input_hash(&inputs, &dockerfile)?;
    let recipe = recipe(&inputs, &family.metadata.name, &dockerfile.replace(&base_name, "toolchain"))?;
    Ok(Cell {
        image: name.clone(),
        version: resolved.version.clone(),
        target: target.clone(),
        family: family.metadata.name.clone(),
        toolchain: toolchain.to_owned(),
        reference,
        further,
        input_hash,
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
) -> Result<(ImageReference, Vec<ImageReference>), SkipReason> {
    let repository = location
        .repository(&image.metadata.name)
        .map_err(|error| SkipReason::Repository { detail: error.to_string() })?;
    let tags = render_tags(templates, &image.spec.tags, &TagInputs { version: &resolved.version, target })
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

struct HashInputs<'a> {
    spec: &'a DriverImageSpec,
    resolved: &'a ResolvedImage,
    patches: &'a [CellPatch],
    needs: &'a [CellNeed],
    toolchain: &'a str,
    headers: &'a str,
    target: &'a KernelTarget,
}

fn input_hash(inputs: &HashInputs<'_>, dockerfile: &str) -> Result<InputHash, SkipReason> {
    let HashInputs { spec: _, resolved, patches: _, needs: _, toolchain, headers, target } = inputs;
    let KernelTarget { os, os_version, release, arch } = target;
    let mut hasher = InputHasher::new(BUILD_FORMAT);
    hasher
        .add("dockerfile", dockerfile)
        .add("os", os.as_str())
        .add("os-version", os_version.as_str())
        .add("release", release.as_str())
        .add("arch", arch.as_str())
        .add("headers", headers)
        .add("toolchain", toolchain)
        .add("version", &resolved.version);
    add_definition(&mut hasher, inputs)?;
    Ok(hasher.finish())
}

/// The Dockerfile comes without the base's name. The release and label that the template wrote into it do not
/// count; what it wrote because of them, such as another step for another kernel, does.
fn recipe(inputs: &HashInputs<'_>, family: &ImageName, dockerfile: &str) -> Result<InputHash, SkipReason> {
    let HashInputs { spec: _, resolved, patches: _, needs: _, toolchain: _, headers: _, target } = inputs;
    let KernelTarget { os, os_version, release, arch } = target;
    let mut dockerfile = dockerfile.replace(release.as_str(), "{{kernel.release}}");
    if let Some(label) = KernelLabel::of(release) {
        dockerfile = dockerfile.replace(label.as_str(), "{{kernel.label}}");
    }
    let mut hasher = InputHasher::new(BUILD_FORMAT);
    hasher
        .add("recipe", dockerfile)
        .add("os", os.as_str())
        .add("os-version", os_version.as_str())
        .add("arch", arch.as_str())
        .add("family", family.as_str())
        .add("version", &resolved.version);
    add_definition(&mut hasher, inputs)?;
    Ok(hasher.finish())
}

/// Adds what the definition says and what it was resolved to.
fn add_definition(hasher: &mut InputHasher, inputs: &HashInputs<'_>) -> Result<(), SkipReason> {
    let HashInputs { spec, resolved, patches, needs, toolchain: _, headers: _, target } = inputs;
    // Everything is named here, so that a new field cannot be forgotten. Those ignored with `_` choose
    // or name what is built and do not change it, or are in the Dockerfile (`template`, `vars`).
    let DriverImageSpec {
        version: _,
        template: _,
        vars: _,
        sources,
        patches: _,
        needs: _,
        exposes,
        nodes: _,
        kernels: _,
        modules,
        check: _,
        reuse: _,
        runtime,
        output,
        build: _,
        tags: _,
        on_conflict: _,
        rollout: _,
    } = spec;
    let RuntimeSpec { base, entrypoint, env } = runtime;
    hasher
        .add("modules", canonical("modules", modules)?)
        .add("output", canonical("output", output)?)
        .add("entrypoint", canonical("runtime.entrypoint", entrypoint)?)
        .add("env", canonical("runtime.env", env)?);
    // Absent lists add nothing, so that images without them keep their hash.
    if !exposes.is_empty() {
        hasher.add("exposes", canonical("exposes", exposes)?);
    }
    for SourceSpec { name, from: _, unpack, subdir } in sources {
        let identity = resolved
            .sources
            .get(name.as_str())
            .ok_or_else(|| SkipReason::Unresolved { detail: format!("source {name} was not looked up") })?;
        hasher
            .add("source", name.as_str())
            .add("identity", identity)
            .add("unpack", canonical("unpack", unpack)?)
            .add("subdir", canonical("subdir", subdir)?);
    }
    for CellPatch { index, name } in *patches {
        let sha256 = resolved
            .patches
            .get(index)
            .ok_or_else(|| SkipReason::Unresolved { detail: format!("patch {name} was not looked up") })?;
        hasher.add("patch", name).add("sha256", sha256);
    }
    // What the image was exposed by does not count: one that exposes the same is as good.
    for CellNeed { name, exposed, image: _ } in *needs {
        hasher.add("need", name.as_str()).add("exposed", exposed.to_string());
    }
    match (base, &resolved.base_identity) {
        (None, _) => {}
        (Some(_), Some(identity)) => {
            hasher.add("base", identity);
        }
        (Some(_), None) => {
            return Err(SkipReason::Unresolved { detail: "the runtime base was not looked up".to_owned() });
        }
    }
    // Images without it keep their hash.
    if spec.holds_entrypoint() {
        hasher.add("driver-entrypoint", entrypoint_digest(resolved, target.arch)?.as_str());
    }
    Ok(())
}

/// The binary that goes into an image of this architecture.
fn entrypoint_digest(resolved: &ResolvedImage, arch: Architecture) -> Result<&Digest, SkipReason> {
    let unresolved = |detail| Err(SkipReason::Unresolved { detail });
    match &resolved.entrypoint {
        Some(binary) if binary.arch == arch => Ok(&binary.digest),
        Some(binary) => unresolved(format!(
            "the driver-entrypoint at hand is for {}, and the target is {arch} (build it with `cargo build --profile \
             entrypoint` in entrypoint/ for {arch}, and name it with --entrypoint)",
            binary.arch
        )),
        None => unresolved("driver-entrypoint was not looked up".to_owned()),
    }
}

/// The canonical form of a part of a definition: JSON with fields in the order of their declaration and
/// maps in the order of their keys.
fn canonical(part: &str, value: &impl Serialize) -> Result<String, SkipReason> {
    serde_json::to_string(value)
        .map_err(|error| SkipReason::Definition { detail: format!("{part} cannot be hashed: {error}") })
}
