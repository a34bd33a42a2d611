//! Resolves sources, patches, bases, headers and toolchains to their current identities, before a plan is made.

mod tracked;

use std::collections::{BTreeMap, BTreeSet};

use futures::{StreamExt, stream};

use farrier_core::{
    image::{
        Digest, DriverImage, DriverImageSpec, Need, Output, RuntimeBase, SourceOrigin, SourceSpec,
        VersionSpec, checked::HeadersPath, ended_branch,
    },
    kernel::{HeaderText, KernelFamily, KernelTarget, NodeSystem, Toolchain, match_family},
    plan::{Resolved, ResolvedImage, SignedWith, SkipReason, TreeKey, Unverified, toolchain_key},
};
use farrier_definitions::read_patch;
use farrier_inputs::{
    FetchError, Fetcher, HeaderIdentity, HostTreeLookup, Lookup, PackageRoot, dkms_conf_warnings,
};
use oci::error_chain;
pub use tracked::tracked_kernels;

use crate::{
    images::base_root,
    services::{BuildError, BuildServices, BuildTools, MAX_CONCURRENT_REQUESTS, ProblemKind, Result},
};

/// Resolves the given images, and the families of the given targets.
pub async fn resolve(
    services: &BuildServices,
    images: &[&DriverImage],
    targets: &BTreeSet<KernelTarget>,
) -> Resolved {
    let mut resolved = Resolved::default();
    resolve_more(services, images, targets, &mut resolved).await;
    resolved
}

/// Resolves the given images and targets that are not in `resolved` yet.
pub async fn resolve_more(
    services: &BuildServices,
    images: &[&DriverImage],
    targets: &BTreeSet<KernelTarget>,
    resolved: &mut Resolved,
) {
    let known = &resolved.images;
    // Collect the lookups, because a closure that is held across an `await` makes the future not `Send`.
    let lookups: Vec<_> = images
        .iter()
        .copied()
        .filter(|image| !known.contains_key(&image.metadata.name))
        .map(|image| async move { (image.metadata.name.clone(), resolve_image(services, image).await) })
        .collect();
    for (name, outcome) in concurrently(lookups).await {
        resolved.unreachable |= outcome.as_ref().is_err_and(BuildError::is_unanswered);
        resolved.images.insert(name, outcome.map_err(|error| with_hint(&error)));
    }
    resolve_trees(services, images, targets, &mut resolved.trees).await;
    resolve_headers(services, targets, resolved).await;
    resolve_toolchains(services, images, targets, resolved).await;
    resolve_header_texts(services, images, targets, resolved).await;
}

/// Awaits lookups that send requests to a registry, and returns their outcomes in order.
async fn concurrently<F: Future>(lookups: Vec<F>) -> Vec<F::Output> {
    stream::iter(lookups).buffered(MAX_CONCURRENT_REQUESTS).collect().await
}

async fn resolve_headers(
    services: &BuildServices,
    targets: &BTreeSet<KernelTarget>,
    resolved: &mut Resolved,
) {
    let mut lookups = Vec::new();
    for target in targets {
        let Some(family) = match_family(&services.definitions.families, target) else { continue };
        if !resolved.headers.contains_key(target) {
            let source = family.spec.headers_for(target, resolved.system(target));
            lookups.push(async move {
                let look = || services.fetcher.headers().identity(&source, target);
                (target.clone(), services.process.retry("look up headers", look).await)
            });
        }
    }
    for (target, outcome) in concurrently(lookups).await {
        record_headers(resolved, target, outcome);
    }
}

fn record_headers(resolved: &mut Resolved, target: KernelTarget, outcome: Result<HeaderIdentity>) {
    let headers = match outcome {
        Ok(HeaderIdentity { identity, unverified, compiler, refused, missing }) => {
            resolved.compilers.remove(&target);
            resolved.compilers.extend(compiler.map(|compiler| (target.clone(), compiler)));
            resolved.without_headers.extend(missing.map(|looked_for| (target.clone(), looked_for)));
            let refused = refused.map(Unverified::Refused);
            let unverified = refused.or_else(|| unverified.map(Unverified::Content));
            resolved.unverified_headers.extend(unverified.map(|unverified| (target.clone(), unverified)));
            Ok(identity)
        }
        Err(error) => {
            resolved.unreachable |= error.is_unanswered();
            let detail = with_hint(&error);
            Err(match error {
                // The store failed, so it is unknown whether the headers exist.
                BuildError::Fetch(FetchError::Store(_)) => SkipReason::Unresolved { detail },
                _ => SkipReason::Headers { detail },
            })
        }
    };
    resolved.headers.insert(target, headers);
}

/// Resolves the toolchains. Must run after the headers are resolved, because the compiler that the headers name can select
/// the kernel family and thus the toolchain.
async fn resolve_toolchains(
    services: &BuildServices,
    images: &[&DriverImage],
    targets: &BTreeSet<KernelTarget>,
    resolved: &mut Resolved,
) {
    for target in targets {
        let Some(family) = resolved.family(&services.definitions.families, target) else { continue };
        let system = resolved.system(target).clone();
        for image in images {
            let key = toolchain_key(image, family, target, &system);
            if !resolved.toolchains.contains_key(&key) {
                let outcome = match image.spec.toolchain(family) {
                    Ok(toolchain) => {
                        let identity =
                            toolchain_identity(services, &toolchain, family, target, &system).await;
                        identity.map_err(|error| {
                            resolved.unreachable |= error.is_unanswered();
                            with_hint(&error)
                        })
                    }
                    Err(why) => Err(why),
                };
                resolved.toolchains.insert(key, outcome);
            }
        }
    }
}

/// Fetches the headers of kernels and searches them for the texts that the images' conditions name.
async fn resolve_header_texts(
    services: &BuildServices,
    images: &[&DriverImage],
    targets: &BTreeSet<KernelTarget>,
    resolved: &mut Resolved,
) {
    let mut lookups = Vec::new();
    for target in targets.iter().filter(|target| !resolved.without_headers.contains_key(*target)) {
        let Some(family) = match_family(&services.definitions.families, target) else { continue };
        let is_new =
            |text: &HeaderText| !resolved.header_texts.contains_key(&(target.clone(), text.to_string()));
        let texts: Vec<HeaderText> =
            images.iter().flat_map(|image| image.spec.header_conditions(target)).filter(is_new).collect();
        if !texts.is_empty() {
            let source = family.spec.headers_for(target, resolved.system(target));
            lookups.push(async move {
                let look = || services.fetcher.headers().contain_texts(&source, target, &texts);
                let outcome = services.process.retry("look into headers", look).await;
                (target, texts, outcome)
            });
        }
    }
    for (target, texts, outcome) in concurrently(lookups).await {
        resolved.unreachable |= outcome.as_ref().is_err_and(BuildError::is_unanswered);
        let answers: Vec<Result<bool, String>> = match outcome {
            Ok(Lookup::Found(contained)) => contained.into_iter().map(Ok).collect(),
            Ok(Lookup::Missing { looked_for, hint }) => {
                vec![Err(format!("there is no {looked_for}: {hint}")); texts.len()]
            }
            Err(error) => vec![Err(with_hint(&error)); texts.len()],
        };
        let keys = texts.iter().map(|text| (target.clone(), text.to_string()));
        resolved.header_texts.extend(keys.zip(answers));
    }
}

async fn resolve_image(services: &BuildServices, image: &DriverImage) -> Result<ResolvedImage> {
    let spec = &image.spec;
    let mut sources = BTreeMap::new();
    let mut versions = BTreeMap::new();
    // Sources that differ between kernels are looked up for each kernel.
    for source in spec.sources.iter().filter(|source| !source.differs_by_kernel()) {
        let identity =
            services.process.retry("look up source", || services.fetcher.sources().identity(source)).await;
        let identity = identity.map_err(|error| with_position(services, image, source, error))?;
        if let Some(warning) = services.fetcher.sources().warning(source).await? {
            services.process.reporter.note(image.metadata.name.as_str(), &warning);
        }
        versions.insert(source.name.as_str(), identity.version);
        sources.insert(source.name.to_string(), identity.identity);
    }
    for warning in dkms_conf_warnings(&services.definitions.root, spec).await? {
        services.process.reporter.note(image.metadata.name.as_str(), &format!("warning: {warning}"));
    }
    let version = match &spec.version {
        VersionSpec::Literal(version) => version.to_string(),
        VersionSpec::FromSource { source } => {
            versions.remove(source.as_str()).flatten().ok_or_else(|| {
                let name = &image.metadata.name;
                let message =
                    format!("image {name}: source {source} has no version; only apt sources have one");
                BuildError::problem(ProblemKind::Usage, message, None)
            })?
        }
    };
    if let Some(warning) = ended_branch(spec.template.as_str(), &version) {
        services.process.reporter.note(image.metadata.name.as_str(), &format!("warning: {warning}"));
    }
    let mut patches = BTreeMap::new();
    for (index, patch) in spec.patches.iter().enumerate() {
        let bytes = read_patch(&services.definitions, &patch.path).await?;
        patches.insert(index, Digest::of(&bytes).hex().to_owned());
    }
    let base_identity = base_identity(services, spec, &version).await?;
    let entrypoints = if spec.contains_entrypoint() {
        services.tools.entrypoint.architectures().await?
    } else {
        BTreeSet::new()
    };
    let signed_with = signed_with(&services.tools, image);
    Ok(ResolvedImage { version, sources, patches, base_identity, entrypoints, signed_with })
}

/// Adds the position in the definition to the error about a source path that does not exist.
fn with_position(
    services: &BuildServices,
    image: &DriverImage,
    source: &SourceSpec,
    error: BuildError,
) -> BuildError {
    match (&source.from, &error) {
        (SourceOrigin::Path { path, .. }, BuildError::Fetch(FetchError::Absent(_))) => {
            let key = (image.metadata.name.clone(), path.to_path_buf());
            let position = services.definitions.source_positions.get(&key);
            let position = position.map_or("a definition", String::as_str);
            let message = format!("{position}: {}", error_chain(&error));
            BuildError::problem(ProblemKind::Usage, message, error.hint())
        }
        _ => error,
    }
}

/// Returns the identity of the runtime base. A base that is another image is hashed with the needs instead.
async fn base_identity(
    services: &BuildServices,
    spec: &DriverImageSpec,
    version: &str,
) -> Result<Option<String>> {
    let Some(base) = &spec.runtime.base else { return Ok(None) };
    match base {
        RuntimeBase::Need(_) => Ok(None),
        RuntimeBase::Bootstrap(_) | RuntimeBase::Runfile(_) => {
            let root = base_root(services, base, &spec.sources, version).await?;
            Ok(root.map(|root| root.identity()))
        }
        RuntimeBase::Minimal(minimal) => {
            let look = || services.fetcher.root_fs().minimal_identity(minimal);
            services.process.retry("look up busybox", look).await.map(Some)
        }
        RuntimeBase::Image(reference) => Ok(Some(services.resolve_reference(reference).await?.to_string())),
    }
}

async fn toolchain_identity(
    services: &BuildServices,
    toolchain: &Toolchain,
    family: &KernelFamily,
    target: &KernelTarget,
    system: &NodeSystem,
) -> Result<String> {
    if let Toolchain::Image(image) = toolchain {
        let image = family.spec.image_for(image, target, system).map_err(|missing| {
            BuildError::unmet(format!("there is no {missing}"), "set it in the kernel family")
        })?;
        return Ok(services.resolve_reference(&image.to_string()).await?.to_string());
    }
    // The identity covers only the specification: the architecture is part of the target, which is hashed separately.
    let root = PackageRoot::of_toolchain(toolchain, target);
    root.map(|root| root.identity()).ok_or_else(|| {
        let message = "the source of the toolchain's RPM packages is not defined".to_owned();
        BuildError::unmet(message, "set `from` in the kernel family")
    })
}

/// Returns the signer of an image's modules; `None` for an image that the engine builds as a whole (`output: image`), because
/// farrier does not sign the modules of such an image.
fn signed_with(tools: &BuildTools, image: &DriverImage) -> Option<SignedWith> {
    let signer = tools.module_signer.as_ref().filter(|_| image.spec.output == Output::Payload)?;
    Some(SignedWith { certificate: signer.fingerprint(), signed: signer.signed() })
}

/// Resolves the host trees of these images for these kernels. A missing or unusable tree prevents the build.
pub(crate) async fn resolve_trees(
    services: &BuildServices,
    images: &[&DriverImage],
    targets: &BTreeSet<KernelTarget>,
    trees: &mut BTreeMap<TreeKey, Result<Digest, String>>,
) {
    for image in images {
        for need in &image.spec.needs {
            for target in targets {
                let key = (image.metadata.name.clone(), need.name().clone(), target.clone());
                if let Need::Tree { tree, .. } = need
                    && !trees.contains_key(&key)
                {
                    trees.insert(key, digest_of_tree(&services.fetcher, tree, target).await);
                }
            }
        }
    }
}

async fn digest_of_tree(
    fetcher: &Fetcher,
    tree: &HeadersPath,
    target: &KernelTarget,
) -> Result<Digest, String> {
    match fetcher.host_tree(tree, target).await {
        Ok(HostTreeLookup::Found(tree)) => Ok(tree.digest),
        Ok(HostTreeLookup::Missing { looked_for, hint }) => Err(format!("there is no {looked_for}: {hint}")),
        Err(error) => {
            let hint = error.hint().map(|hint| format!(": {hint}")).unwrap_or_default();
            Err(format!("{}{hint}", error_chain(&error)))
        }
    }
}

/// Formats an error for the plan: what failed, why, and the remedy.
pub fn with_hint(error: &BuildError) -> String {
    let hint = error.hint().map(|hint| format!(" ({hint})")).unwrap_or_default();
    format!("{}{hint}", error_chain(error))
}
