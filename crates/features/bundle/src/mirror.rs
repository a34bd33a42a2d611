//! Mirrors the inputs of images into the store of the destination registry, and lists everything that a site needs to
//! build and run them.

use std::{borrow::Cow, collections::BTreeSet};

use farrier_builder::{
    images::{ImageCopy, base_root, copy_image, copy_tag, root_fs_tag},
    resolve::resolve,
    services::{BuildError, BuildServices, ImageAccess, Result},
};
use farrier_core::{
    image::{DriverImage, ImageReference, MinimalSpec, RuntimeBase, SourceOrigin, SourceSpec, Tag, Version},
    kernel::{Architecture, HeaderSource, KernelTarget, Toolchain, UNKNOWN_SYSTEM, family_for},
    plan::Resolved,
};
use farrier_inputs::{self as inputs, FetchError, Fetcher, Lookup, PackageRoot, StoredUnder};
use farrier_store::{self as store, InputKind, StoredInput};
use oci::error_chain;
use serde::Serialize;

use crate::{Content, ContentKind, License, Needed, Selection, contents, contents::has_same_content, needed};

/// An input in the store.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MirroredInput {
    /// Human-readable description.
    pub what: String,
    /// Location in the registry.
    #[serde(flatten)]
    pub content: Content,
    /// Whether this run stored it.
    pub new: bool,
}

/// Outcome for one input.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase", tag = "outcome")]
pub enum MirrorReport {
    /// The registry has the input. `kept` is the published JSON name.
    #[serde(rename = "kept")]
    Stored(MirroredInput),
    /// The input could not be stored.
    Failed(MissingInput),
}

/// A missing input and the reason.
#[serde_with::skip_serializing_none]
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MissingInput {
    /// Human-readable description.
    pub what: String,
    /// Reason that the input is missing.
    pub error: String,
    /// Suggested remedy.
    pub hint: Option<String>,
    /// Whether an external system was unreachable.
    #[serde(skip)]
    pub unreachable: bool,
}

impl MissingInput {
    /// Creates the report for an input that the registry could have but lacks.
    pub fn absent(what: String, hint: impl Into<String>) -> Self {
        let error = "not in the registry".to_owned();
        Self { what, error, hint: Some(hint.into()), unreachable: false }
    }
}

/// Inputs of the selected images.
#[derive(Clone, Debug, Default)]
pub struct FoundInputs {
    /// Inputs in the registry.
    pub contents: Vec<Content>,
    /// Licenses of the sources among them.
    pub licenses: BTreeSet<License>,
    pub missing: Vec<MissingInput>,
}

/// A build input that the store can hold.
enum Input<'a> {
    Source(&'a SourceSpec),
    Packages(PackageRoot, Architecture),
    Minimal(&'a MinimalSpec, Architecture),
    Headers(&'a KernelTarget, Cow<'a, HeaderSource>),
    Copy(String),
}

/// Stores the inputs of the selected images one by one; a failure does not stop the others. Inputs that are already
/// stored are not sent again. Calls `on_report` with each outcome.
pub async fn mirror_inputs(
    services: &BuildServices,
    selection: &Selection,
    on_report: &mut (dyn FnMut(&MirrorReport) + Send),
) -> Vec<MirrorReport> {
    let needed = needed(&services.definitions, selection);
    // Resolve only the images' versions, which select the runtime bases. Each kernel's headers select the toolchain.
    let resolved = resolve(services, &needed.images, &BTreeSet::new()).await;
    let (inputs, missing) = list_inputs(services, &needed, &resolved).await;
    let mut reports: Vec<MirrorReport> = missing.into_iter().map(MirrorReport::Failed).collect();
    reports.iter().for_each(&mut *on_report);
    for input in &inputs {
        if services.process.cancel.is_cancelled() {
            return reports;
        }
        let report = match mirror_input(services, input).await {
            Ok(stored) => MirrorReport::Stored(stored),
            Err(error) => MirrorReport::Failed(missing_of(input.what(), &error)),
        };
        on_report(&report);
        reports.push(report);
    }
    if let Some(report) = keep_own_definitions(services).await {
        on_report(&report);
        reports.push(report);
    }
    reports
}

/// Finds which inputs of the selected images are in the registry and which are missing. The images themselves are not
/// included.
pub async fn find_inputs(services: &BuildServices, selection: &Selection) -> FoundInputs {
    let needed = needed(&services.definitions, selection);
    let resolved = resolve(services, &needed.images, &BTreeSet::new()).await;
    let (inputs, mut missing) = list_inputs(services, &needed, &resolved).await;
    let (mut found, mut carried) = (Vec::new(), Vec::new());
    for input in &inputs {
        match find_input(services, input).await {
            Ok(contents) if contents.is_empty() => {
                missing.push(MissingInput::absent(input.what(), "run `farrier mirror` to store it"));
            }
            Ok(contents) => {
                found.extend(contents);
                carried.push(input);
            }
            Err(error) => missing.push(missing_of(input.what(), &error)),
        }
    }
    match stored_definitions(services).await {
        Ok(definitions) => found.extend(definitions),
        Err(error) => missing.push(missing_of("definitions".to_owned(), &error)),
    }
    let is_carried =
        |source: &SourceSpec| carried.iter().any(|input| input.is_content_of(source, &selection.kernels));
    FoundInputs { contents: contents::sort_contents(found), licenses: needed.licenses(is_carried), missing }
}

/// Returns the inputs that the selected images need, each once, and those that cannot be determined.
async fn list_inputs<'a>(
    services: &BuildServices,
    needed: &'a Needed<'a>,
    resolved: &Resolved,
) -> (Vec<Input<'a>>, Vec<MissingInput>) {
    let mut list = InputList {
        inputs: needed.sources.iter().map(Input::Source).collect(),
        missing: needed.unmatched_kernels.iter().map(|kernel| without_family(kernel)).collect(),
        root_keys: BTreeSet::new(),
        copies: needed.foreign_images(),
    };
    list.add_toolchains(services, needed).await;
    list.add_bases(services, needed, resolved).await;
    let InputList { mut inputs, missing, copies, .. } = list;
    inputs.extend(copies.into_iter().map(Input::Copy));
    for &(kernel, family) in &needed.kernels {
        inputs.push(Input::Headers(kernel, family.spec.headers_for(kernel, &UNKNOWN_SYSTEM)));
    }
    (inputs, missing)
}

/// Result of [`list_inputs`] while it is assembled.
struct InputList<'a> {
    inputs: Vec<Input<'a>>,
    missing: Vec<MissingInput>,
    /// Keys of the root file systems in `inputs`.
    root_keys: BTreeSet<String>,
    /// References of images to copy.
    copies: BTreeSet<String>,
}

impl<'a> InputList<'a> {
    fn add_packages(&mut self, root: &PackageRoot, arch: Architecture) {
        if self.root_keys.insert(root.key(arch)) {
            self.inputs.push(Input::Packages(root.clone(), arch));
        }
    }

    /// Adds the toolchain of each kernel. As in a build, the kernel's headers select the toolchain.
    async fn add_toolchains(&mut self, services: &BuildServices, needed: &Needed<'_>) {
        for &(kernel, family) in &needed.kernels {
            let source = family.spec.headers_for(kernel, &UNKNOWN_SYSTEM);
            let found = services.fetcher.headers().identity(&source, kernel).await;
            let compiler = match found {
                Ok(found) => found.compiler,
                Err(error) => {
                    let what = format!("toolchain of {}", kernel.release);
                    self.missing.push(missing_of(what, &error.into()));
                    continue;
                }
            };
            let family = family_for(&services.definitions.families, kernel, compiler).unwrap_or(family);
            if let Toolchain::Image(image) = &family.spec.toolchain {
                // An invalid name is reported when the image is copied.
                let reference = family.spec.image_for(image, kernel, &UNKNOWN_SYSTEM);
                let reference = reference.map_or_else(|_| image.to_string(), |found| found.to_string());
                self.copies.insert(reference);
            }
            for image in &needed.images {
                if needed.kernels_of(image).any(|other| other == kernel)
                    && let Ok(toolchain) = image.spec.toolchain(family)
                    && let Some(root) = PackageRoot::of_toolchain(&toolchain, kernel)
                {
                    self.add_packages(&root, kernel.arch);
                }
            }
        }
    }

    /// Adds the runtime bases that farrier builds, for each architecture of the image's kernels.
    async fn add_bases(&mut self, services: &BuildServices, needed: &Needed<'a>, resolved: &Resolved) {
        for &(image, base) in &needed.bases {
            let arches: BTreeSet<Architecture> = needed.kernels_of(image).map(|kernel| kernel.arch).collect();
            match base {
                RuntimeBase::Minimal(spec) => {
                    self.inputs.extend(arches.into_iter().map(|arch| Input::Minimal(spec, arch)));
                }
                RuntimeBase::Bootstrap(_) | RuntimeBase::Runfile(_) => {
                    match packages_of_base(services, image, base, resolved).await {
                        Ok(Some(root)) => {
                            for arch in arches {
                                self.add_packages(&root, arch);
                            }
                        }
                        Ok(None) => {}
                        Err(missing) => self.missing.push(missing),
                    }
                }
                // A driver image is no input, and an image of another registry is among the copies.
                RuntimeBase::Need(_) | RuntimeBase::Image(_) => {}
            }
        }
    }
}

/// Returns the packages of an image's runtime base; `None` if the image was not resolved.
async fn packages_of_base(
    services: &BuildServices,
    image: &DriverImage,
    base: &RuntimeBase,
    resolved: &Resolved,
) -> Result<Option<PackageRoot>, MissingInput> {
    let what = format!("runtime base of {}", image.metadata.name);
    match resolved.images.get(&image.metadata.name) {
        Some(Ok(found)) => {
            let root = base_root(services, base, &image.spec.sources, &found.version).await;
            root.map_err(|error| missing_of(what, &error))
        }
        Some(Err(error)) => Err(MissingInput {
            what,
            error: error.clone(),
            unreachable: resolved.unreachable,
            ..MissingInput::default()
        }),
        None => Ok(None),
    }
}

async fn mirror_input(services: &BuildServices, input: &Input<'_>) -> Result<MirroredInput> {
    services.process.ensure_may_write()?;
    let action = "store input";
    let kept = match input {
        Input::Source(spec) => {
            let kept = services.process.retry(action, || services.fetcher.sources().keep(spec)).await?;
            if let Some(warning) = services.fetcher.sources().archive_warning(spec).await? {
                services.process.reporter.note("mirror", &warning);
            }
            kept
        }
        Input::Packages(root, arch) => {
            services.process.retry(action, || services.fetcher.root_fs().keep_bootstrap(root, *arch)).await?
        }
        Input::Minimal(spec, arch) => {
            services.process.retry(action, || services.fetcher.root_fs().keep_minimal(spec, *arch)).await?
        }
        Input::Headers(kernel, source) => {
            let put = || services.fetcher.headers().keep(source, kernel);
            match services.process.retry(action, put).await? {
                Lookup::Found(kept) => kept,
                Lookup::Missing { looked_for, hint } => {
                    return Err(BuildError::headers_missing(&looked_for, hint));
                }
            }
        }
        Input::Copy(text) => {
            let ImageCopy { reference, digest, new } = copy_image(services, text).await?;
            let tag = Some(copy_tag(&reference)?);
            let repository = name_of(&services.images, &reference);
            let content = Content { kind: ContentKind::Mirror, repository, tag, digest };
            return Ok(MirroredInput { what: input.what(), content, new });
        }
    };
    Ok(mirrored(&kept))
}

async fn keep_own_definitions(services: &BuildServices) -> Option<MirrorReport> {
    let root = &services.definitions.root;
    // Every farrier binary includes the built-in definitions.
    if root.as_os_str().is_empty() {
        return None;
    }
    let secrets = services.definitions.site.secret_files();
    Some(match services.fetcher.keep_definitions(root, secrets).await {
        Ok((kept, omitted_paths)) => {
            for path in &omitted_paths {
                let text = "contains a private key or credentials: not copied to the registry";
                services.process.reporter.note(&path.display().to_string(), text);
            }
            MirrorReport::Stored(mirrored(&kept))
        }
        Err(error) => MirrorReport::Failed(missing_of("definitions".to_owned(), &error.into())),
    })
}

/// Contents of an input in the registry; empty if it is missing.
async fn find_input(services: &BuildServices, input: &Input<'_>) -> Result<Vec<Content>> {
    let (kind, tags) = match input {
        Input::Source(spec) => (InputKind::Source, vec![inputs::source_tag(spec)?]),
        Input::Minimal(spec, arch) => (InputKind::RootFs, vec![inputs::minimal_tag(spec, *arch)?]),
        Input::Packages(root, arch) => {
            let tag = store::key_tag(&root.key(*arch)).map_err(FetchError::from)?;
            (InputKind::RootFs, vec![tag])
        }
        Input::Headers(kernel, _) => {
            let imported = store::header_tag(&kernel.release, kernel.arch).map_err(FetchError::from)?;
            let own = store::platform_header_tag(kernel).map_err(FetchError::from)?;
            (InputKind::Headers, vec![imported, own])
        }
        Input::Copy(text) => {
            let reference: ImageReference = text.parse()?;
            let Some(mirror) = services.images.mirror_repository(&reference)? else {
                let reference = services.resolve_reference(text).await?;
                return referenced_content(&services.images, ContentKind::Mirror, &reference).await;
            };
            let version = Version::Tag(copy_tag(&reference)?);
            let copy = ImageReference { repository: mirror, version };
            return referenced_content(&services.images, ContentKind::Mirror, &copy).await;
        }
    };
    let mut contents = Vec::new();
    for tag in tags {
        for content in tagged_content(&services.images, kind.into(), kind.repository(), tag.as_str()).await? {
            // The input has an immutable content tag as well as the moving tag.
            contents.extend(content_tag_of(&services.fetcher, kind, &content).await?);
            contents.push(content);
        }
    }
    if let Input::Packages(root, arch) = input {
        // The image that was published from this root file system.
        let (name, tag) = root_fs_tag(&root.key(*arch))?;
        contents.extend(tagged_content(&services.images, ContentKind::RootFs, name, tag.as_str()).await?);
    }
    Ok(contents)
}

/// The content under its immutable tag, if the store has one for it.
async fn content_tag_of(fetcher: &Fetcher, kind: InputKind, content: &Content) -> Result<Option<Content>> {
    let (Some(store), Some(tag)) = (fetcher.store(), &content.tag) else { return Ok(None) };
    let stored = store.find(kind, tag).await.map_err(FetchError::from)?;
    let Some(tag) = stored.and_then(|stored| inputs::content_tag(&stored)) else { return Ok(None) };
    Ok(Some(Content { tag: Some(tag), ..content.clone() }))
}

/// The newest definitions in the registry. A site that signs exports only definitions that a trusted key signed: the other side takes
/// the definitions of a signed bundle.
async fn stored_definitions(services: &BuildServices) -> Result<Vec<Content>> {
    let kind = InputKind::Definitions;
    let mut found = tagged_content(&services.images, kind.into(), kind.repository(), store::LATEST).await?;
    if let Some(signed) = services.fetcher.store()
        && services.definitions.site.image_signing.is_some()
    {
        let latest: Tag = store::LATEST.parse()?;
        let trusted = signed.find_trusted(kind, &latest).await.map_err(FetchError::from)?;
        found.retain(|content| trusted.as_ref().is_some_and(|trusted| trusted.digest == content.digest));
    }
    Ok(found)
}

/// Content under a tag of a repository below the prefix; empty if there is none.
async fn tagged_content(
    access: &ImageAccess,
    kind: ContentKind,
    name: &str,
    tag: &str,
) -> Result<Vec<Content>> {
    let repository = access.location.repository(name)?;
    referenced_content(access, kind, &ImageReference { repository, version: Version::Tag(tag.parse()?) })
        .await
}

async fn referenced_content(
    access: &ImageAccess,
    kind: ContentKind,
    reference: &ImageReference,
) -> Result<Vec<Content>> {
    let ImageReference { repository, version } = reference;
    let found = access.registry.manifest(repository, version).await?;
    let tag = match version {
        Version::Tag(tag) => Some(tag.clone()),
        Version::Digest(_) => None,
    };
    let content = |digest| Content { kind, repository: name_of(access, reference), tag: tag.clone(), digest };
    Ok(found.into_iter().map(|found| content(found.digest)).collect())
}

fn name_of(access: &ImageAccess, reference: &ImageReference) -> String {
    let repository = &reference.repository;
    access.location.name_of(repository).unwrap_or(repository.as_str()).to_owned()
}

impl Input<'_> {
    /// Whether this input is the source's content for one of the kernels.
    fn is_content_of(&self, source: &SourceSpec, kernels: &BTreeSet<KernelTarget>) -> bool {
        match (self, &source.from) {
            (Self::Source(spec), _) => has_same_content(spec, source),
            (Self::Copy(text), SourceOrigin::Image(image)) => {
                let is_copy = |kernel| {
                    image.for_kernel(kernel).is_ok_and(|(reference, _)| reference.to_string() == *text)
                };
                kernels.iter().any(is_copy)
            }
            _ => false,
        }
    }

    fn what(&self) -> String {
        match self {
            Self::Source(spec) => format!("source {}", spec.name),
            Self::Packages(root, arch) => {
                format!("root file system of {} ({arch})", root.package_source(*arch))
            }
            Self::Minimal(spec, arch) => format!("minimal base of {} ({arch})", spec.package),
            Self::Headers(kernel, _) => format!("headers of {} ({})", kernel.release, kernel.arch),
            Self::Copy(text) => format!("image {text}"),
        }
    }
}

fn mirrored(kept: &StoredUnder) -> MirroredInput {
    let StoredUnder { what, stored: StoredInput { kind, digest, .. }, tags, new } = kept;
    let content = Content {
        kind: (*kind).into(),
        repository: kind.repository().to_owned(),
        tag: tags.first().cloned(),
        digest: digest.clone(),
    };
    MirroredInput { what: what.clone(), content, new: *new }
}

fn without_family(kernel: &KernelTarget) -> MissingInput {
    MissingInput {
        what: format!("headers of {kernel}"),
        error: "no kernel family matches".to_owned(),
        hint: Some("add one to kernels/ of the definitions directory".to_owned()),
        unreachable: false,
    }
}

fn missing_of(what: String, error: &BuildError) -> MissingInput {
    MissingInput { what, error: error_chain(error), hint: error.hint(), unreachable: error.is_unreachable() }
}

#[cfg(test)]
mod tests {
    use farrier_builder::testing::{Bench, K9, K10};
    use serde_json::json;

    use super::*;

    #[tokio::test]
    async fn toolchain_selected_by_headers_is_copied() {
        let mut bench = Bench::new(&json!({}));
        let families = &mut bench.services.definitions.families;
        families[0].spec.built_with = vec!["gcc-11".parse().unwrap()];
        let packages = json!({"bootstrap": {"suite": "bookworm", "include": ["gcc-11", "make"]}});
        families[0].spec.toolchain = serde_json::from_value(packages).unwrap();
        let mut chosen = families[0].clone();
        chosen.spec.matches.fallback_for_compilers = vec!["gcc-12".parse().unwrap()];
        chosen.spec.built_with = chosen.spec.matches.fallback_for_compilers.clone();
        chosen.spec.toolchain = Toolchain::Image("registry.test/gcc:12".parse().unwrap());
        families.push(chosen);
        let kernels = [K9, K10].map(Bench::target).into();
        let images = ["x".parse().unwrap()].into();
        let selection = Selection { images, kernels, kernels_by_image: None };
        let needed = needed(&bench.services.definitions, &selection);
        let resolved = resolve(&bench.services, &needed.images, &BTreeSet::new()).await;
        let (inputs, missing) = list_inputs(&bench.services, &needed, &resolved).await;
        assert!(missing.is_empty(), "{missing:?}");
        let copies: Vec<String> =
            inputs.iter().map(Input::what).filter(|what| what.starts_with("image")).collect();
        assert_eq!(copies, ["image registry.test/gcc:12"]);
    }
}
