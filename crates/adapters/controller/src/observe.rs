//! Makes the lookups of a plan, and caches their results across reconciles.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use farrier_builder::{
    images::{StoredImage, build_products, look_up_signatures},
    known_failures,
    resolve::with_hint,
    services::{BuildServices, MAX_CONCURRENT_REQUESTS, Result},
};
use farrier_core::{
    image::{GitLocation, ImageReference, Version},
    kernel::{KernelTarget, NodeSystem, match_family},
    plan::{
        Cell, HeaderState, ManifestFacts, Matrix, Observed, Outcome, Plan, PlanInputs, Resolved,
        RolloutWarning, SignatureState, TreeKey, Unverified,
    },
};
use farrier_inputs::{FetchError, Lookup};
use futures::{StreamExt, stream};
use oci::error_chain;
use tokio::time::Instant;

/// Lookup results that are kept from one reconcile to the next, so that a change in the cluster repeats no recent lookup.
#[derive(Clone, Debug, Default)]
pub struct LookupCache {
    pub(super) resolved: Resolved,
    pub(super) observed: Observed,
    /// Whether the registry was unreachable.
    pub(super) unreachable: bool,
    /// Contents of Git repositories, with the time of each lookup.
    pub(super) repositories: BTreeMap<GitLocation, (Instant, Result<ManifestFacts, String>)>,
    /// Prebuilt images that are absent or were rejected, with the time of the lookup.
    refused_sources: BTreeMap<TreeKey, Instant>,
    /// Whether the registry refuses anonymous pulls, if already asked.
    pub(super) refuses_anonymous: Option<bool>,
}

/// Interval between reads of a Git repository. A repository does not notify farrier of changes.
const REPOSITORY_READ_INTERVAL: Duration = Duration::from_secs(30);

/// Interval between lookups of a prebuilt image that is absent or was rejected. Its registry belongs to a third party
/// and may limit the request rate.
const PREBUILT_LOOKUP_INTERVAL: Duration = Duration::from_mins(5);

impl LookupCache {
    /// Drops all cached lookups for a resync. Keeps recent negative results for prebuilt images.
    pub(super) fn reset(&mut self) {
        let Self { resolved: Resolved { mut kernel_sources, .. }, refused_sources, .. } =
            std::mem::take(self);
        kernel_sources.retain(|key, _| refused_sources.contains_key(key));
        self.resolved.kernel_sources = kernel_sources;
        self.refused_sources = refused_sources;
    }

    /// Records prebuilt images that are absent or were rejected.
    pub(super) fn record_refused(&mut self, sources: Vec<TreeKey>) {
        self.refused_sources.extend(sources.into_iter().map(|source| (source, Instant::now())));
    }

    /// Drops failed lookups, so that the next plan retries them.
    pub(crate) fn forget_faults(&mut self) {
        let Self { resolved, observed, unreachable, repositories: _, refused_sources, refuses_anonymous: _ } =
            self;
        let Resolved {
            systems: _,
            images,
            toolchains,
            headers,
            compilers,
            without_headers,
            header_texts,
            kernel_sources,
            trees,
            unverified_headers,
            unverified_root_fs,
            unbuildable_root_fs,
            unreachable: unresolved,
        } = resolved;
        let is_refused = |unverified: &Unverified| matches!(unverified, Unverified::Refused(_));
        images.retain(|_, outcome| outcome.is_ok());
        toolchains.retain(|_, outcome| outcome.is_ok());
        headers.retain(|target, outcome| {
            outcome.is_ok() && !unverified_headers.get(target).is_some_and(is_refused)
        });
        unverified_headers.retain(|_, unverified| !is_refused(unverified));
        headers.retain(|target, _| !without_headers.contains_key(target));
        without_headers.clear();
        compilers.retain(|target, _| headers.contains_key(target));
        header_texts.retain(|_, outcome| outcome.is_ok());
        refused_sources.retain(|_, answered_at| answered_at.elapsed() < PREBUILT_LOOKUP_INTERVAL);
        kernel_sources.retain(|key, outcome| outcome.is_ok() || refused_sources.contains_key(key));
        trees.retain(|_, outcome| outcome.is_ok());
        unverified_root_fs.retain(|key, unverified| {
            !unverified.as_ref().is_some_and(is_refused) && !unbuildable_root_fs.contains_key(key)
        });
        unbuildable_root_fs.clear();
        observed.signatures.retain(|_, state| *state == SignatureState { ours: true, refused: None });
        observed.headers.retain(|_, state| matches!(state, HeaderState::Available(_)));
        observed.unreachable.clear();
        (*unreachable, *unresolved) = (false, false);
    }

    /// Updates the systems of the nodes, and drops the lookups of targets whose system changed.
    pub(super) fn set_systems(&mut self, systems: BTreeMap<KernelTarget, NodeSystem>) {
        let Resolved { systems: known, headers, without_headers, header_texts, .. } = &mut self.resolved;
        let is_same = |target: &KernelTarget| known.get(target) == systems.get(target);
        headers.retain(|target, _| is_same(target));
        without_headers.retain(|target, _| is_same(target));
        header_texts.retain(|(target, _), _| is_same(target));
        self.observed.headers.retain(|target, _| is_same(target));
        *known = systems;
    }

    /// Drops the lookups that a build made stale: the cell's references, which the build may have published, and its headers. If
    /// the build found a changed input, also drops all resolved inputs.
    pub(super) fn forget_build(&mut self, cell: &Cell, outdated: bool) {
        self.forget(cell.references());
        self.observed.headers.remove(&cell.target);
        if outdated {
            self.resolved = Resolved::default();
        }
    }

    /// Returns the time of the next read of a Git repository.
    pub(super) fn repositories_due(&self) -> Option<Instant> {
        self.repositories.values().map(|(read_at, _)| *read_at + REPOSITORY_READ_INTERVAL).min()
    }

    /// Returns the cached contents of a Git repository, unless they are stale.
    pub(super) fn repository(&self, repository: &GitLocation) -> Option<&Result<ManifestFacts, String>> {
        let (read_at, contents) = self.repositories.get(repository)?;
        (read_at.elapsed() < REPOSITORY_READ_INTERVAL).then_some(contents)
    }

    /// Drops cached registry lookups for these references.
    pub fn forget<'a>(&mut self, references: impl IntoIterator<Item = &'a ImageReference>) {
        for reference in references {
            self.observed.published.remove(reference);
            self.observed.absent.remove(reference);
            self.observed.unreachable.remove(reference);
        }
    }
}

/// Makes the rounds of lookups and then the plan. Skips lookups whose results `observed` already contains. Sets `unreachable` if
/// an image cannot be looked up.
pub(super) async fn look_up_and_plan(
    services: &BuildServices,
    inputs: &PlanInputs<'_>,
    observed: &mut Observed,
    unreachable: &mut bool,
) -> Result<Plan> {
    let matrix = Matrix::of(inputs);
    look_up_images(services, matrix.images_to_look_up(), observed, unreachable).await;
    let compared = matrix.compare(observed);
    look_up_conflicts(services, compared.conflicts_to_look_up(observed), observed).await;
    let image_names = compared.products_to_look_up().into_iter();
    let images = image_names.filter_map(|name| Some((name, services.definitions.images.get(name)?)));
    observed.products = images.map(|(name, image)| (name.clone(), build_products(services, image))).collect();
    observed.failures.extend(known_failures(&services.cache, compared.failures_to_look_up())?);
    look_up_signatures(services, &compared.signatures_to_look_up(), &mut observed.signatures).await;
    look_up_headers(services, compared.headers_to_look_up(), inputs.cells.resolved, observed).await;
    let decided = compared.decide(observed);
    look_up_images(services, decided.unions_to_look_up(), observed, unreachable).await;
    let signatures = decided.union_signatures_to_look_up(observed);
    look_up_signatures(services, &signatures, &mut observed.signatures).await;
    Ok(decided.plan(observed))
}

/// Removes warnings about missing pull secrets, unless the registry refuses an anonymous pull of the rollout's image. Caches the
/// answer in `refuses`.
pub(super) async fn confirm_warnings(services: &BuildServices, plan: &mut Plan, refuses: &mut Option<bool>) {
    let needs_secret = |warning: &RolloutWarning| warning.code == RolloutWarning::PULL_SECRETS;
    let Plan { cells, rollouts, .. } = plan;
    for rollout in rollouts.iter_mut().filter(|rollout| rollout.warnings.iter().any(needs_secret)) {
        let published = cells.iter().find_map(|planned| match &planned.outcome {
            Outcome::UpToDate { cell, .. } if cell.image == rollout.image => Some(&cell.reference),
            _ => None,
        });
        if let (None, Some(image)) = (&refuses, published) {
            *refuses = Some(services.refuses_anonymous(image).await);
        }
        if *refuses != Some(true) {
            rollout.warnings.retain(|warning| !needs_secret(warning));
        }
    }
}

async fn look_up_images(
    services: &BuildServices,
    mut images: BTreeSet<ImageReference>,
    observed: &mut Observed,
    unreachable: &mut bool,
) {
    images.retain(|reference| !observed.knows(reference));
    let outcomes = stream::iter(images)
        .map(|reference| async move {
            let published = services.look_up(&reference).await;
            (reference, published)
        })
        .buffer_unordered(MAX_CONCURRENT_REQUESTS)
        .collect::<Vec<_>>()
        .await;
    for (reference, outcome) in outcomes {
        match outcome {
            Ok(None) => drop(observed.absent.insert(reference)),
            Ok(Some(published)) => drop(observed.published.insert(reference, published)),
            Err(error) => {
                *unreachable = true;
                observed.unreachable.insert(reference, with_hint(&error));
            }
        }
    }
}

/// Looks up the inputs of images that conflict with a cell. If a lookup fails, the conflict does not name the changed inputs.
async fn look_up_conflicts(
    services: &BuildServices,
    images: BTreeSet<ImageReference>,
    observed: &mut Observed,
) {
    for ImageReference { repository, version } in &images {
        let Version::Digest(digest) = version else { continue };
        if observed.inputs.contains_key(digest) {
            continue;
        }
        match (StoredImage { services, repository, digest }).named_inputs().await {
            Ok(inputs) => drop(observed.inputs.insert(digest.clone(), inputs)),
            Err(error) => {
                tracing::debug!(%repository, %digest, error = error_chain(&error), "cannot look up the inputs");
            }
        }
    }
}

async fn look_up_headers(
    services: &BuildServices,
    mut headers: BTreeSet<KernelTarget>,
    resolved: &Resolved,
    observed: &mut Observed,
) {
    headers.retain(|target| !observed.headers.contains_key(target));
    let systems = headers.into_iter().map(|target| (resolved.system(&target).clone(), target));
    let states = stream::iter(systems.collect::<Vec<_>>());
    let states = states
        .map(|(system, target)| header_state(services, target, system))
        .buffer_unordered(MAX_CONCURRENT_REQUESTS);
    observed.headers.extend(states.collect::<Vec<_>>().await);
}

/// Looks up the state of a kernel's headers. The state after a transient fault is `Unknown`, which does not prevent a build.
async fn header_state(
    services: &BuildServices,
    target: KernelTarget,
    system: NodeSystem,
) -> (KernelTarget, HeaderState) {
    let Some(family) = match_family(&services.definitions.families, &target) else {
        return (target, HeaderState::Unknown);
    };
    let source = family.spec.headers_for(&target, &system);
    let state = match services.fetcher.headers().look(&source, &target).await {
        Ok(Lookup::Found(compiler)) => HeaderState::Available(compiler),
        Ok(Lookup::Missing { looked_for, hint: _ }) => HeaderState::Missing(looked_for),
        Err(error) if error.is_transient() || matches!(error, FetchError::Interrupted) => {
            tracing::warn!(%target, error = error_chain(&error), "cannot determine whether headers exist");
            HeaderState::Unknown
        }
        Err(error) => HeaderState::Refused(with_hint(&error.into())),
    };
    (target, state)
}
