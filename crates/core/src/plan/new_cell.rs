//! Pure: makes a cell from definitions and what was found out about them.

use std::{collections::BTreeMap, path::Path};

use super::{
    BUILD_FORMAT, Cell, CellInputs, CellNeed, CellPatch, FetchedInputs, ImageLocation, Resolved,
    ResolvedImage, SignedWith, SkipReason, Unverified,
    cell_hash::{HashInputs, canonical, input_hash, recipe, unsigned_hash},
    toolchain_key,
};
use crate::{
    image::{
        Definitions, Digest, DriverImage, DriverImageSpec, ImageReference, InputHash, InputHasher, PatchSpec,
        TagInputs, Version, render_tags,
    },
    kernel::{HeaderText, KernelFamily, KernelTarget, match_family, without_headers},
    template::{TemplateContext, Templates, fetching_add},
};

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
    if let Some(range) = image.spec.range_without(target) {
        return Err(SkipReason::KernelOutOfRange { range });
    }
    match_family(&definitions.families, target).ok_or(SkipReason::NoFamily)
}

/// What does not depend on the needs' content.
struct Rendered<'a> {
    family: &'a KernelFamily,
    resolved: &'a ResolvedImage,
    toolchain: &'a str,
    /// What the definition says of the headers, then their digest.
    headers: String,
    headers_digest: Option<String>,
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
    let CellInputs { definitions, resolved, published: _, location: _ } = *inputs;
    let family = family_for(definitions, image, target)?;
    if let Some(looked_for) = resolved.without_headers.get(target) {
        let detail = without_headers(&definitions.families, target, looked_for);
        return Err(SkipReason::NoHeaders { detail });
    }
    let image_found = looked_up(&resolved.images, &image.metadata.name, "its sources were not looked up")
        .map_err(|detail| SkipReason::Unresolved { detail })?;
    let toolchain = looked_up(&resolved.toolchains, &toolchain_key(image, family), "it was not looked up")
        .map_err(|detail| SkipReason::Toolchain { family: family.metadata.name.to_string(), detail })?;
    let mut headers = canonical("headers", &family.spec.headers)?;
    let headers_digest = match resolved.headers.get(target) {
        Some(Ok(digest)) => digest.clone(),
        Some(Err(detail)) => return Err(SkipReason::Headers { detail: detail.clone() }),
        None => None,
    };
    headers.push_str(headers_digest.as_deref().unwrap_or_default());
    if family.spec.btf {
        headers.push_str(" btf");
    }
    let base_name = base_name(toolchain, &headers, target);
    let says = |text: &HeaderText| {
        let key = (target.clone(), text.to_string());
        let found = looked_up(&resolved.header_texts, &key, "they were not looked at");
        found.copied().map_err(|detail| SkipReason::Headers { detail })
    };
    let patches = image.spec.patches_for(target, says)?;
    let patches = patches.into_iter().filter_map(|index| Some((index, image.spec.patches.get(index)?)));
    let patches = patches
        .map(|(index, patch)| {
            let name = patch_name(index, patch);
            let sha256 = image_found.patches.get(&index).cloned().ok_or_else(|| SkipReason::Unresolved {
                detail: format!("patch {name} was not looked up"),
            })?;
            Ok(CellPatch { index, name, sha256 })
        })
        .collect::<Result<Vec<_>, SkipReason>>()?;
    let mut context = image.template_context(&base_name, &image_found.version, target);
    context.patches = patches.iter().map(|patch| patch.name.clone()).collect();
    context.vars.extend(image.spec.vars_for(target, says)?);
    if family.spec.btf {
        context.with_btf();
    }
    let dockerfile = dockerfile(definitions, templates, &image.spec, &context)?;
    let resolved = image_found;
    Ok(Rendered { family, resolved, toolchain, headers, headers_digest, base_name, patches, dockerfile })
}

/// Works out one image for one kernel target, with what it is compiled against; no node calls for it yet.
pub(super) fn cell_with(
    inputs: &CellInputs<'_>,
    templates: &mut Templates,
    image: &DriverImage,
    target: &KernelTarget,
    needs: Vec<CellNeed>,
) -> Result<Cell, SkipReason> {
    let rendered = rendered(inputs, templates, image, target)?;
    let (unverified, refused) = unverified(inputs.resolved, &rendered, target);
    let Rendered { family, resolved, toolchain, headers, headers_digest, base_name, patches, dockerfile } =
        rendered;
    let (reference, further) = references(inputs.location, templates, (image, resolved), target, &needs)?;
    let spec = &image.spec;
    let inputs =
        HashInputs { spec, resolved, patches: &patches, needs: &needs, toolchain, headers: &headers, target };
    let declared_hash = input_hash(&inputs, &dockerfile)?;
    let unsigned_hash =
        resolved.signed_with.as_ref().map(|_| unsigned_hash(&inputs, &dockerfile)).transpose()?;
    let recipe = recipe(&inputs, &family.metadata.name, &dockerfile.replace(&base_name, "toolchain"))?;
    let input_hash = with_digests(declared_hash, &unverified);
    // What an engine has of the same declared inputs may have other content.
    let (dockerfile, base_name) =
        match (unverified.get(FetchedInputs::HEADERS), unverified.get(FetchedInputs::TOOLCHAIN)) {
            (None, None) => (dockerfile, base_name),
            (of_headers, of_toolchain) => {
                let exact = |text: &str, digest: Option<&Digest>| match digest {
                    Some(digest) => format!("{text} {digest}"),
                    None => text.to_owned(),
                };
                let name =
                    self::base_name(&exact(toolchain, of_toolchain), &exact(&headers, of_headers), target);
                (dockerfile.replace(&base_name, &name), name)
            }
        };
    Ok(Cell {
        image: image.metadata.name.clone(),
        version: resolved.version.clone(),
        target: target.clone(),
        family: family.metadata.name.clone(),
        toolchain: toolchain.to_owned(),
        reference,
        further,
        input_hash,
        declared_hash,
        unsigned_hash,
        signed_with: resolved.signed_with.clone(),
        recipe,
        dockerfile,
        base_name,
        patches,
        refused,
        fetched: FetchedInputs {
            headers: headers_digest,
            sources: resolved.sources.clone(),
            base: resolved.base_identity.clone(),
            unverified,
        },
        needs,
        nodes: Vec::new(),
        needed_by: Vec::new(),
        announced_by: Vec::new(),
    })
}

/// The inputs that only the registry's store vouches for: their digests, and why one of them may not be used.
fn unverified(
    found: &Resolved,
    rendered: &Rendered<'_>,
    target: &KernelTarget,
) -> (BTreeMap<&'static str, Digest>, Option<String>) {
    let root_fs = |what: &'static str, identity: &str| {
        found.unverified_root_fs.get(&(what, identity.to_owned(), target.arch))?.as_ref()
    };
    let base = rendered.resolved.base_identity.as_deref();
    let (mut digests, mut refused) = (BTreeMap::new(), None);
    for (name, input) in [
        (FetchedInputs::HEADERS, found.unverified_headers.get(target)),
        (FetchedInputs::TOOLCHAIN, root_fs(FetchedInputs::TOOLCHAIN, rendered.toolchain)),
        (FetchedInputs::BASE, base.and_then(|base| root_fs(FetchedInputs::BASE, base))),
    ] {
        match input {
            None => {}
            Some(Unverified::Content(digest)) => drop(digests.insert(name, digest.clone())),
            Some(Unverified::Refused(why)) => refused = refused.or_else(|| Some(format!("{name}: {why}"))),
        }
    }
    (digests, refused)
}

/// The declared hash itself where everything is vouched for.
fn with_digests(declared: InputHash, unverified: &BTreeMap<&'static str, Digest>) -> InputHash {
    if unverified.is_empty() {
        return declared;
    }
    let mut hasher = InputHasher::new(BUILD_FORMAT);
    hasher.add("declared", declared.to_string());
    for (name, digest) in unverified {
        hasher.add(name, digest.as_str());
    }
    hasher.finish()
}

/// What was found out about this key, or why it was not.
pub(super) fn looked_up<'a, K: Ord, T>(
    found: &'a BTreeMap<K, Result<T, String>>,
    key: &K,
    missing: &str,
) -> Result<&'a T, String> {
    found.get(key).ok_or_else(|| missing.to_owned())?.as_ref().map_err(Clone::clone)
}

fn dockerfile(
    definitions: &Definitions,
    templates: &mut Templates,
    spec: &DriverImageSpec,
    context: &TemplateContext,
) -> Result<String, SkipReason> {
    let text = definitions
        .templates
        .get(spec.template.as_str())
        .ok_or_else(|| SkipReason::NoTemplate { template: spec.template.to_string() })?;
    let refused = |detail: String| SkipReason::Template { detail };
    let dockerfile =
        templates.render(&spec.template, text, context).map_err(|error| refused(error.to_string()))?;
    match fetching_add(&dockerfile) {
        None => Ok(dockerfile),
        Some((line, source)) => Err(refused(format!(
            "template {} gives a Dockerfile in whose line {line} ADD takes {source}, which is no plain path of the build \
             context: the engine would fetch it; name it in the image's `sources`, and COPY it",
            spec.template
        ))),
    }
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
