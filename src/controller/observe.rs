//! Adapter: the look-ups before a plan: what sources, patches and bases are at this moment, and what the
//! registry holds.

use std::collections::{BTreeMap, BTreeSet};

use futures::{StreamExt, stream};

use super::{
    Controller, TargetError,
    retry::{chain, with_retry},
};
use crate::{
    headers::bootstrap_key,
    image::{Definitions, Digest, DriverImage, ImageName, ImageReference, RuntimeBase, VersionSpec},
    kernel::{Architecture, KernelFamily, KernelTarget, Toolchain, match_family},
    oci::ImageFacts,
    plan::{
        CellInputs, EntrypointBinary, ImageContents, ImageLocation, Published, ResolvedImage, SignatureState,
        TreeKey,
    },
};

/// Requests that are under way at once: a registry answers these in parallel, and few enough not to be
/// taken for an attack.
pub(super) const AT_ONCE: usize = 16;

/// What definitions amount to at this moment.
#[derive(Clone, Debug, Default)]
pub struct Resolved {
    /// Versions, sources, patches and bases of the images, or why they are not known.
    pub images: BTreeMap<ImageName, Result<ResolvedImage, String>>,
    /// Identities of the families' toolchains, or why they are not known.
    pub toolchains: BTreeMap<ImageName, Result<String, String>>,
    /// Digests of the headers that users bring, nothing for those of packages, or why it is not known.
    pub headers: BTreeMap<KernelTarget, Result<Option<String>, String>>,
    /// Digests of the trees that users bring as needs, or why they are not known.
    pub trees: BTreeMap<TreeKey, Result<Digest, String>>,
    /// Was an outside system out of reach?
    pub unreachable: bool,
}

/// What was found out, kept from one pass of the loop to the next: a change in the cluster asks nothing again that
/// was answered a moment ago. What is not in it is looked up.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    pub(super) resolved: Resolved,
    pub(super) lookups: Lookups,
    /// What images in use hold, by digest.
    pub(super) contents: BTreeMap<String, ImageContents>,
    /// What is known of images' signatures.
    pub(super) signatures: BTreeMap<Digest, SignatureState>,
}

impl Resolved {
    /// What cells are made from, with what the registry answered.
    pub(super) fn cell_inputs<'a>(
        &'a self,
        definitions: &'a Definitions,
        lookups: &'a Lookups,
        location: &'a ImageLocation,
    ) -> CellInputs<'a> {
        let Self { images, toolchains, headers, trees, unreachable: _ } = self;
        let published = &lookups.published;
        CellInputs { definitions, resolved: images, toolchains, headers, published, trees, location }
    }
}

impl Memory {
    /// Forgets what could not be found out, so that it is tried again.
    pub fn forget_faults(&mut self) {
        let Self { resolved, lookups, contents: _, signatures } = self;
        signatures.retain(|_, state| *state == SignatureState { ours: true, refused: None });
        resolved.images.retain(|_, outcome| outcome.is_ok());
        resolved.toolchains.retain(|_, outcome| outcome.is_ok());
        resolved.headers.retain(|_, outcome| outcome.is_ok());
        resolved.trees.retain(|_, outcome| outcome.is_ok());
        resolved.unreachable = false;
        lookups.failed.clear();
        lookups.unreachable = false;
    }

    /// Is there something that could not be found out?
    pub fn has_faults(&self) -> bool {
        let Self { resolved, lookups, contents: _, signatures: _ } = self;
        resolved.images.values().any(Result::is_err)
            || resolved.toolchains.values().any(Result::is_err)
            || resolved.headers.values().any(Result::is_err)
            || !lookups.failed.is_empty()
    }

    /// Forgets what the registry said about these names.
    pub fn forget<'a>(&mut self, references: impl IntoIterator<Item = &'a ImageReference>) {
        for reference in references {
            self.lookups.published.remove(reference);
            self.lookups.absent.remove(reference);
            self.lookups.failed.remove(reference);
        }
    }
}

/// What the registry answered.
#[derive(Clone, Debug, Default)]
pub struct Lookups {
    /// What it holds.
    pub published: BTreeMap<ImageReference, Published>,
    /// References that it does not have.
    pub absent: BTreeSet<ImageReference>,
    /// References that could not be looked up, and why.
    pub failed: BTreeMap<ImageReference, String>,
    /// Was it out of reach?
    pub unreachable: bool,
}

impl Controller {
    /// Looks up what the given images, and the families of the given targets, amount to.
    pub(super) async fn resolve(
        &self,
        images: &[&DriverImage],
        targets: &BTreeSet<KernelTarget>,
    ) -> Resolved {
        let mut resolved = Resolved::default();
        self.resolve_more(images, targets, &mut resolved).await;
        resolved
    }

    /// The same for those that are not known yet.
    pub(super) async fn resolve_more(
        &self,
        images: &[&DriverImage],
        targets: &BTreeSet<KernelTarget>,
        resolved: &mut Resolved,
    ) {
        let known = &resolved.images;
        let all = images;
        // Collected, because a closure that is kept over an `await` keeps the future from being `Send`.
        let images: Vec<_> = images
            .iter()
            .copied()
            .filter(|image| !known.contains_key(&image.metadata.name))
            .map(|image| async move { (image.metadata.name.clone(), self.resolve_image(image).await) })
            .collect();
        for (name, outcome) in stream::iter(images).buffered(AT_ONCE).collect::<Vec<_>>().await {
            resolved.unreachable |= outcome.as_ref().is_err_and(TargetError::is_unreachable);
            resolved.images.insert(name, outcome.map_err(|error| with_hint(&error)));
        }
        self.resolve_trees(all, targets, &mut resolved.trees).await;
        for family in targets.iter().filter_map(|target| match_family(&self.definitions.families, target)) {
            let name = &family.metadata.name;
            if resolved.toolchains.contains_key(name) {
                continue;
            }
            let outcome = self.toolchain_identity(family).await;
            resolved.unreachable |= outcome.as_ref().is_err_and(TargetError::is_unreachable);
            resolved.toolchains.insert(name.clone(), outcome.map_err(|error| chain(&error)));
        }
        for target in targets {
            if resolved.headers.contains_key(target) {
                continue;
            }
            let Some(family) = match_family(&self.definitions.families, target) else { continue };
            let source = &family.spec.headers;
            let look = || self.fetcher.header_identity(source, &self.definitions.root, target);
            let outcome = with_retry("look up headers", &self.cancel, look).await;
            resolved.unreachable |= outcome.as_ref().is_err_and(TargetError::is_unreachable);
            resolved.headers.insert(target.clone(), outcome.map_err(|error| with_hint(&error)));
        }
    }

    async fn resolve_image(&self, image: &DriverImage) -> Result<ResolvedImage, TargetError> {
        let root = &self.definitions.root;
        let spec = &image.spec;
        let mut sources = BTreeMap::new();
        let mut versions = BTreeMap::new();
        for source in &spec.sources {
            let identity =
                with_retry("look up source", &self.cancel, || self.fetcher.source_identity(source, root))
                    .await?;
            versions.insert(source.name.as_str(), identity.version);
            sources.insert(source.name.to_string(), identity.identity);
        }
        let version = match &spec.version {
            VersionSpec::Literal(version) => version.clone(),
            VersionSpec::FromSource { source } => {
                versions.remove(source.as_str()).flatten().ok_or_else(|| TargetError::NoVersion {
                    image: image.metadata.name.to_string(),
                    source_name: source.clone(),
                })?
            }
        };
        let mut patches = BTreeMap::new();
        for (index, patch) in spec.patches.iter().enumerate() {
            let path = root.join(&patch.path);
            let bytes = tokio::fs::read(&path).await.map_err(|source| TargetError::Input { path, source })?;
            patches.insert(index, Digest::of(&bytes).hex().to_owned());
        }
        let base_identity = match &spec.runtime.base {
            // The image that it is counts with the needs.
            None | Some(RuntimeBase::Need(_)) => None,
            // The specification alone: the architecture is hashed with the target.
            Some(RuntimeBase::Bootstrap(base)) => {
                Some(bootstrap_key(&base.for_version(&version), Architecture::Amd64))
            }
            Some(RuntimeBase::Minimal(base)) => Some(
                with_retry("look up busybox", &self.cancel, || self.fetcher.minimal_identity(base)).await?,
            ),
            Some(RuntimeBase::Image(reference)) => Some(self.resolve_reference(reference).await?.to_string()),
        };
        let entrypoint = if spec.holds_entrypoint() {
            let binary = self.entrypoint.binary().await?;
            Some(EntrypointBinary { arch: binary.arch })
        } else {
            None
        };
        let signed_with = self.signed_with(image);
        Ok(ResolvedImage { version, sources, patches, base_identity, entrypoint, signed_with })
    }

    async fn toolchain_identity(&self, family: &KernelFamily) -> Result<String, TargetError> {
        match &family.spec.toolchain {
            // The specification alone: the architecture is hashed with the target.
            Toolchain::Bootstrap(spec) => Ok(bootstrap_key(spec, Architecture::Amd64)),
            Toolchain::Image(reference) => Ok(self.resolve_reference(reference).await?.to_string()),
        }
    }

    /// Asks the registry for those of the references about which it has not been asked. Says whether there were any.
    pub(super) async fn look_up_more<'a>(
        &self,
        references: impl IntoIterator<Item = &'a ImageReference>,
        lookups: &mut Lookups,
    ) -> bool {
        let known = |reference: &&ImageReference| {
            lookups.published.contains_key(*reference)
                || lookups.absent.contains(*reference)
                || lookups.failed.contains_key(*reference)
        };
        let references: Vec<ImageReference> =
            references.into_iter().filter(|reference| !known(reference)).cloned().collect();
        if references.is_empty() {
            return false;
        }
        let found = stream::iter(references)
            .map(|reference| async move {
                let published = self.look_up(&reference).await;
                (reference, published)
            })
            .buffer_unordered(AT_ONCE)
            .collect::<Vec<_>>()
            .await;
        for (reference, outcome) in found {
            match outcome {
                Ok(None) => {
                    lookups.absent.insert(reference);
                }
                Ok(Some(published)) => {
                    lookups.published.insert(reference, published);
                }
                Err(error) => {
                    lookups.unreachable |= error.is_unreachable();
                    lookups.failed.insert(reference, with_hint(&error));
                }
            }
        }
        true
    }

    /// What the registry holds under one reference.
    pub(super) async fn look_up(&self, reference: &ImageReference) -> Result<Option<Published>, TargetError> {
        let manifest =
            self.shelf(&reference.repository).manifest(&reference.repository, &reference.version).await?;
        Ok(manifest.map(|manifest| {
            // A manifest that is not ours, or not even one, has no input hash: the plan reports a conflict.
            let facts = ImageFacts::from_manifest(&manifest.bytes).unwrap_or_default();
            Published {
                digest: manifest.digest,
                input_hash: facts.input_hash,
                exposed: facts.exposed_digest,
                verdict: facts.verdict,
                kernel_release: facts.kernel_release.map(|release| release.to_string()),
            }
        }))
    }
}

/// A fault as the plan tells it: what failed, why, and what to do.
fn with_hint(error: &TargetError) -> String {
    let hint = error.hint().map(|hint| format!(" ({hint})")).unwrap_or_default();
    format!("{}{hint}", chain(error))
}
