//! Creates a cell from the definitions and their resolved values.

use std::{borrow::Cow, collections::BTreeMap, path::Path};

use super::{
    BUILD_FORMAT, Cell, CellInputs, CellNeed, CellPatch, FetchedInputs, ResolvedImage, SignedWith,
    SkipReason, Unverified,
    cell_hash::{HashInputs, canonical, input_hasher, named_inputs, recipe, unsigned_hash},
    toolchain_key,
};
use crate::{
    definition::checked::SYSTEM_PLACEHOLDERS,
    image::{
        Digest, DriverImage, FieldHasher, ImageReference, InputHash, PatchSpec, SourceOrigin, SourceSpec,
        TagInputs, Version, commit_in, render_tags,
    },
    kernel::{HeaderText, KernelFamily, KernelTarget, Toolchain, missing_headers_message, uname_script},
    template::{TemplateContext, Templates, fetching_add},
};

/// Renders the Dockerfile of one image for one kernel target. The needs do not have to be available.
pub fn dockerfile_for(
    inputs: &CellInputs<'_>,
    image: &DriverImage,
    target: &KernelTarget,
) -> Result<String, SkipReason> {
    let request = CellRequest { inputs: *inputs, image, target };
    request.rendered(&mut Templates::default()).map(|rendered| rendered.dockerfile)
}

/// Request for the cell of one image for one kernel target.
#[derive(Clone, Copy)]
pub(super) struct CellRequest<'a, 't> {
    pub(super) inputs: CellInputs<'a>,
    pub(super) image: &'a DriverImage,
    pub(super) target: &'t KernelTarget,
}

/// Cell without the contents of its needs.
pub(super) struct CellDraft<'a> {
    rendered: RenderedCell<'a>,
    pub(super) references: Vec<ImageReference>,
}

impl CellDraft<'_> {
    /// Returns the version of the driver.
    pub(super) fn version(&self) -> &str {
        &self.rendered.inputs.resolved.version
    }
}

/// Resolved values of an image, and the toolchain and headers of a kernel.
struct ResolvedInputs<'a> {
    resolved: Cow<'a, ResolvedImage>,
    toolchain: &'a str,
    /// Toolchain as it counts in the declared hash.
    declared_toolchain: &'a str,
    /// Canonical `headers` section of the family, followed by the headers' digest.
    headers: String,
    headers_digest: Option<String>,
    /// Digest over toolchain and headers that depend on facts about the nodes' system. Another system version with the same
    /// kernel has another toolchain and headers, which give the same modules (decision 0002).
    system_digest: Option<Digest>,
    /// Facts about the nodes' system that are unknown.
    unknown: Option<String>,
}

/// Parts of a cell that do not depend on the content of its needs.
struct RenderedCell<'a> {
    family: &'a KernelFamily,
    inputs: ResolvedInputs<'a>,
    base_name: String,
    patches: Vec<CellPatch>,
    dockerfile: String,
}

impl<'a> CellRequest<'a, '_> {
    /// Returns the kernel's family, if the image is meant for the kernel.
    pub(super) fn family(&self) -> Result<&'a KernelFamily, SkipReason> {
        if let Some(range) = self.image.spec.range_excluding(self.target) {
            return Err(SkipReason::KernelOutOfRange { range });
        }
        let CellInputs { definitions, resolved, .. } = self.inputs;
        resolved.family(&definitions.families, self.target).ok_or(SkipReason::NoFamily)
    }

    fn resolved_inputs(&self, family: &'a KernelFamily) -> Result<ResolvedInputs<'a>, SkipReason> {
        let Self { inputs: CellInputs { definitions, resolved, .. }, target, .. } = *self;
        let mut headers = canonical("headers", &family.spec.headers)?;
        let headers_depend_on_system = names_system(&headers);
        let provided_headers = resolved.headers.get(target);
        let toolchain_pattern = match &family.spec.toolchain {
            Toolchain::Image(image) if names_system(image) => Some(image.as_str()),
            _ => None,
        };
        // Imported headers need no image name.
        let headers_pattern =
            if matches!(provided_headers, Some(Ok(Some(_)))) { "" } else { headers.as_str() };
        let patterns = [toolchain_pattern.unwrap_or_default(), headers_pattern];
        let unknown = family.spec.unresolved(&patterns, target, resolved.system(target));
        // Lookups cannot succeed without the unknown facts. `unverified` reports these facts, not the failed lookups.
        if unknown.is_none()
            && let Some(looked_for) = resolved.without_headers.get(target)
        {
            let detail = missing_headers_message(&definitions.families, target, looked_for);
            return Err(SkipReason::NoHeaders { detail });
        }
        let resolved_image = self.resolved_image()?;
        let toolchain = self.toolchain(family, toolchain_pattern.filter(|_| unknown.is_some()))?;
        let headers_digest = match provided_headers {
            Some(Ok(digest)) => digest.clone(),
            Some(Err(why)) if unknown.is_none() => return Err(why.clone()),
            Some(Err(_)) | None => None,
        };
        let digest = headers_digest.as_deref().unwrap_or_default();
        let system_digest = (toolchain_pattern.is_some() || headers_depend_on_system)
            .then(|| Digest::of(format!("{toolchain} {digest}").as_bytes()));
        if !headers_depend_on_system {
            headers.push_str(digest);
        }
        if family.spec.btf {
            headers.push_str(" btf");
        }
        Ok(ResolvedInputs {
            resolved: resolved_image,
            toolchain,
            declared_toolchain: toolchain_pattern.unwrap_or(toolchain),
            headers,
            headers_digest,
            system_digest,
            unknown,
        })
    }

    /// Returns the identity of the toolchain, or else `fallback`.
    fn toolchain(&self, family: &KernelFamily, fallback: Option<&'a str>) -> Result<&'a str, SkipReason> {
        let Self { inputs: CellInputs { resolved, .. }, image, target } = *self;
        let key = toolchain_key(image, family, target, resolved.system(target));
        match (looked_up(&resolved.toolchains, &key, "it was not looked up"), fallback) {
            (Ok(identity), _) => Ok(identity.as_str()),
            (Err(_), Some(fallback)) => Ok(fallback),
            (Err(detail), None) => {
                Err(SkipReason::Toolchain { family: family.metadata.name.to_string(), detail })
            }
        }
    }

    /// Returns the resolved values of the image, with the identities of the sources that differ by kernel.
    fn resolved_image(&self) -> Result<Cow<'a, ResolvedImage>, SkipReason> {
        let Self { inputs: CellInputs { resolved, .. }, image, target } = *self;
        let values = looked_up(&resolved.images, &image.metadata.name, "its sources were not looked up")
            .map_err(|detail| SkipReason::Unresolved { detail })?;
        let mut values = Cow::Borrowed(values);
        let key = |source: &SourceSpec| (image.metadata.name.clone(), source.name.clone(), target.clone());
        let is_kernel_specific = |source: &SourceSpec| {
            let is_package = matches!(source.from, SourceOrigin::Apt(_));
            source.differs_by_kernel() || is_package && resolved.kernel_sources.contains_key(&key(source))
        };
        for source in image.spec.sources.iter().filter(|source| is_kernel_specific(source)) {
            let key = key(source);
            let identity =
                looked_up(&resolved.kernel_sources, &key, "it was not looked up").map_err(|detail| {
                    SkipReason::Unresolved { detail: format!("source {}: {detail}", source.name) }
                })?;
            values.to_mut().sources.insert(source.name.to_string(), identity.clone());
        }
        Ok(values)
    }

    /// Returns the reason why a site that signs modules does not sign modules from these sources: a third party
    /// compiled the modules, and neither a trusted key nor an explicit setting approves them.
    fn unvouched(&self, resolved: &ResolvedImage) -> Option<SkipReason> {
        if resolved.signed_with.is_none() && self.inputs.definitions.site.image_signing.is_none() {
            return None;
        }
        let mut sources = self.image.spec.sources.iter();
        let source = sources
            .find(|source| matches!(&source.from, SourceOrigin::Image(image) if image.is_untrusted()))?;
        let detail = format!(
            "source {}: this site signs modules, but those of a third party's image are untrusted: name its \
             signer's key (`signedBy`), or let the site sign them anyway (`adoptUnsigned: true`)",
            source.name
        );
        Some(SkipReason::Unvouched { detail })
    }

    fn rendered(&self, templates: &mut Templates) -> Result<RenderedCell<'a>, SkipReason> {
        let Self { inputs: CellInputs { resolved, .. }, image, target } = *self;
        let family = self.family()?;
        let inputs = self.resolved_inputs(family)?;
        let base_name = base_name(inputs.declared_toolchain, &inputs.headers, target);
        let header_matches = |text: &HeaderText| {
            let key = (target.clone(), text.to_string());
            let result = looked_up(&resolved.header_texts, &key, "they were not looked up");
            result.copied().map_err(|detail| SkipReason::Headers { detail })
        };
        let mut patches = Vec::new();
        for index in image.spec.patches_for(target, header_matches)? {
            let Some(patch) = image.spec.patches.get(index) else { continue };
            let name = patch_name(index, patch);
            let unresolved = || SkipReason::Unresolved { detail: format!("patch {name} was not looked up") };
            let sha256 = inputs.resolved.patches.get(&index).cloned().ok_or_else(unresolved)?;
            patches.push(CellPatch { index, name, sha256 });
        }
        let mut context = image.template_context(&base_name, &inputs.resolved.version, target);
        context.patches = patches.iter().map(|patch| patch.name.clone()).collect();
        context.vars.extend(image.spec.vars_for(target, header_matches)?);
        if family.spec.btf {
            context.enable_btf();
        }
        templates.render_vars(&mut context).map_err(|detail| SkipReason::Template { detail })?;
        let dockerfile = self.dockerfile(templates, &context)?;
        Ok(RenderedCell { family, inputs, base_name, patches, dockerfile })
    }

    /// Renders the Dockerfile and the names of the cell, given the versions of its needs.
    pub(super) fn draft(
        &self,
        templates: &mut Templates,
        need_versions: &BTreeMap<&str, String>,
    ) -> Result<CellDraft<'a>, SkipReason> {
        let rendered = self.rendered(templates)?;
        let references = self.references(templates, &rendered.inputs.resolved, need_versions)?;
        Ok(CellDraft { rendered, references })
    }

    /// Creates the cell with the given needs and without any nodes.
    pub(super) fn cell(&self, draft: CellDraft<'a>, needs: Vec<CellNeed>) -> Result<Cell, SkipReason> {
        let Self { inputs, image, target } = *self;
        let CellDraft { rendered, references } = draft;
        let mut references = references.into_iter();
        let reference = references.next().ok_or(SkipReason::NoTags)?;
        let (unverified, refused) = self.unverified(&rendered.inputs);
        let refused = refused.or_else(|| self.unvouched(&rendered.inputs.resolved));
        let RenderedCell { family, inputs: resolved_inputs, base_name, patches, dockerfile } = rendered;
        let ResolvedInputs {
            resolved,
            toolchain,
            declared_toolchain,
            headers,
            headers_digest,
            system_digest: _,
            unknown: _,
        } = resolved_inputs;
        let system = inputs.resolved.system(target);
        let resolved = resolved.as_ref();
        let spec = &image.spec;
        let inputs = HashInputs {
            spec,
            resolved,
            patches: &patches,
            needs: &needs,
            toolchain: declared_toolchain,
            headers: &headers,
            target,
        };
        let hasher = input_hasher(&inputs, &dockerfile)?;
        let without_base = dockerfile.replace(&base_name, "toolchain");
        let named_inputs = named_inputs(&hasher, spec, &self.inputs.definitions.templates, &without_base)?;
        let declared_hash = hasher.finish();
        let unsigned_hash =
            resolved.signed_with.as_ref().map(|_| unsigned_hash(&inputs, &dockerfile)).transpose()?;
        let recipe = recipe(&inputs, &family.metadata.name, &without_base)?;
        let input_hash = with_digests(declared_hash, &unverified);
        // The engine may have a base image with the same declared inputs but other content, so name the base after the
        // exact digests.
        let (dockerfile, base_name) =
            match [FetchedInputs::HEADERS, FetchedInputs::TOOLCHAIN, FetchedInputs::SYSTEM]
                .map(|input| unverified.get(input))
            {
                [None, None, None] => (dockerfile, base_name),
                [headers_content, toolchain_content, system_content] => {
                    let exact = |text: &str, digest: Option<&Digest>| match digest {
                        Some(digest) => format!("{text} {digest}"),
                        None => text.to_owned(),
                    };
                    let toolchain = exact(declared_toolchain, toolchain_content);
                    let headers = exact(&exact(&headers, headers_content), system_content);
                    let name = self::base_name(&toolchain, &headers, target);
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
            further: references.collect(),
            input_hash,
            declared_hash,
            unsigned_hash,
            signed_with: resolved.signed_with.clone(),
            recipe,
            inputs: named_inputs,
            dockerfile,
            base_name,
            patches,
            refused,
            system: system.clone(),
            fetched: FetchedInputs {
                headers: headers_digest,
                sources: resolved.sources.clone(),
                base: resolved.base_identity.clone(),
                unverified,
            },
            needs,
            outputs: spec.outputs.iter().filter(|output| output.is_for(family)).copied().collect(),
            nodes: Vec::new(),
            needed_by: Vec::new(),
            announced_by: Vec::new(),
        })
    }

    /// Returns the digests of inputs that only the registry's store vouches for, or that depend on facts about the nodes'
    /// system. Also returns the reason why one of these inputs is unknown or must not be used.
    fn unverified(
        &self,
        inputs: &ResolvedInputs<'_>,
    ) -> (BTreeMap<&'static str, Digest>, Option<SkipReason>) {
        let Self { inputs: CellInputs { resolved, .. }, target, .. } = *self;
        let root_fs = |kind: &'static str, identity: &str| {
            resolved.unverified_root_fs.get(&(kind, identity.to_owned(), target.arch))?.as_ref()
        };
        let base = inputs.resolved.base_identity.as_deref();
        let system = inputs.system_digest.clone().map(|digest| (FetchedInputs::SYSTEM, digest));
        let mut digests: BTreeMap<_, _> = system.into_iter().collect();
        let mut refused = inputs.unknown.clone().map(|detail| SkipReason::UnknownSystem { detail });
        for (name, input) in [
            (FetchedInputs::HEADERS, resolved.unverified_headers.get(target)),
            (FetchedInputs::TOOLCHAIN, root_fs(FetchedInputs::TOOLCHAIN, inputs.toolchain)),
            (FetchedInputs::BASE, base.and_then(|base| root_fs(FetchedInputs::BASE, base))),
        ] {
            match input {
                None => {}
                Some(Unverified::Content(digest)) => drop(digests.insert(name, digest.clone())),
                Some(Unverified::Refused(why)) => {
                    let detail = format!("{name}: {why}");
                    refused = refused.or(Some(SkipReason::Untrusted { detail }));
                }
            }
        }
        (digests, refused)
    }

    fn dockerfile(&self, templates: &mut Templates, context: &TemplateContext) -> Result<String, SkipReason> {
        let (definitions, spec) = (self.inputs.definitions, &self.image.spec);
        let text = definitions
            .templates
            .get(spec.template.as_str())
            .ok_or_else(|| SkipReason::NoTemplate { template: spec.template.to_string() })?;
        let template_error = |detail: String| SkipReason::Template { detail };
        let dockerfile = templates
            .render(&spec.template, text, context)
            .map_err(|error| template_error(error.to_string()))?;
        match fetching_add(&dockerfile) {
            None => Ok(dockerfile),
            Some((line, source)) => Err(template_error(format!(
                "template {} gives a Dockerfile in whose line {line} ADD takes {source}, which is not a \
                 plain path in the build context: the engine would download it; add it to the image's \
                 `sources`, and COPY it",
                spec.template
            ))),
        }
    }

    fn references(
        &self,
        templates: &mut Templates,
        resolved: &ResolvedImage,
        need_versions: &BTreeMap<&str, String>,
    ) -> Result<Vec<ImageReference>, SkipReason> {
        let Self { inputs: CellInputs { location, .. }, image, target } = *self;
        let system = self.inputs.resolved.system(target);
        let repository = location
            .repository(&image.metadata.name)
            .map_err(|error| SkipReason::Repository { detail: error.to_string() })?;
        let needs = need_versions.iter().map(|(need, version)| (*need, version.as_str())).collect();
        let signer = resolved.signed_with.as_ref().map(SignedWith::short);
        let commits = resolved.sources.iter();
        let commits =
            commits.filter_map(|(name, identity)| Some((name.as_str(), commit_in(identity)?))).collect();
        let tags = TagInputs { version: &resolved.version, target, system, needs, commits, signer };
        let tags = render_tags(templates, &image.spec.tags, &tags)
            .map_err(|error| SkipReason::Tag { detail: error.to_string() })?;
        let reference = |tag| ImageReference { repository: repository.clone(), version: Version::Tag(tag) };
        Ok(tags.into_iter().map(reference).collect())
    }
}

/// Whether the text has a placeholder for a fact about the nodes' system.
fn names_system(text: &str) -> bool {
    SYSTEM_PLACEHOLDERS.iter().any(|placeholder| text.contains(placeholder))
}

/// Adds the digests to the declared hash. Without any, the declared hash itself is the input hash.
fn with_digests(declared: InputHash, unverified: &BTreeMap<&'static str, Digest>) -> InputHash {
    if unverified.is_empty() {
        return declared;
    }
    let mut hasher = FieldHasher::new(BUILD_FORMAT);
    hasher.add("declared", declared.to_string());
    for (name, digest) in unverified {
        hasher.add(name, digest.as_str());
    }
    hasher.finish()
}

/// Returns the resolved value of this key, or the reason why there is none.
pub(super) fn looked_up<'a, K: Ord, T>(
    results: &'a BTreeMap<K, Result<T, String>>,
    key: &K,
    missing: &str,
) -> Result<&'a T, String> {
    results.get(key).ok_or_else(|| missing.to_owned())?.as_ref().map_err(Clone::clone)
}

/// Returns the local name of the base image. The Dockerfile contains the name, so the input hash also covers
/// everything that is hashed here. The prefix `localhost/` keeps engines from looking for the image in a registry.
fn base_name(toolchain: &str, headers: &str, target: &KernelTarget) -> String {
    let mut hasher = FieldHasher::new(BUILD_FORMAT);
    hasher
        .add("toolchain", toolchain)
        .add("headers", headers)
        .add("release", target.release.as_str())
        .add("arch", target.arch.as_str())
        .add("uname", uname_script(target.release.as_str(), target.arch.gnu_name()));
    let hash = hasher.finish().to_string();
    format!("localhost/farrier/base:{}", &hash[..24])
}

/// Returns a patch's name in the build context. The number keeps the order and distinguishes files of the same name.
/// The result is safe in a shell word, whatever the file is called.
fn patch_name(index: usize, patch: &PatchSpec) -> String {
    let file = patch.path.file_name().map(Path::new).map(Path::to_string_lossy).unwrap_or_default();
    let safe = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' };
    format!("{:03}-{}", index + 1, file.chars().map(safe).collect::<String>())
}
