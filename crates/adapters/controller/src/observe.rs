//! Makes the lookups of a plan that [`LookupCache`](super::LookupCache) lacks.

use std::collections::BTreeSet;

use farrier_builder::{
    images::{StoredImage, build_products, look_up_signatures},
    known_failures,
    resolve::with_hint,
    services::{BuildServices, MAX_CONCURRENT_REQUESTS, Result},
};
use farrier_core::{
    image::{ImageReference, Version},
    kernel::{KernelTarget, NodeSystem, match_family},
    plan::{HeaderState, Matrix, Observed, Outcome, Plan, PlanInputs, Resolved, RolloutWarning},
};
use farrier_inputs::{FetchError, Lookup};
use futures::{StreamExt, stream};
use oci::error_chain;

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
                observed.is_registry_down |= error.is_unreachable();
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
