//! The outcome of one cell, from the registry's content and the results of earlier builds.

use std::sync::Arc;

use super::{
    BuildReason, Cell, Failure, FetchedInputs, HeaderState, Observed, Outcome, PlanInputs, SkipReason,
    changed_inputs, conflict_remedy,
};
use crate::{
    image::{DriverImage, ImageReference, OnConflict, Output, Reuse, UnknownPolicy},
    kernel::{cross_compile_blocker, missing_compiler, missing_headers_message},
    kmod::Verdict,
};

/// Returns the reason why the cell cannot be built for its kernel, found before any engine starts.
fn cannot_build(
    inputs: &PlanInputs<'_>,
    image: &DriverImage,
    cell: &Cell,
    headers: &HeaderState,
) -> Option<SkipReason> {
    let (families, spec) = (&inputs.definitions().families, &image.spec);
    let kernel_compiler = match headers {
        HeaderState::Missing(looked_for) => {
            let detail = missing_headers_message(families, &cell.target, looked_for);
            return Some(SkipReason::NoHeaders { detail });
        }
        HeaderState::Refused(detail) => return Some(SkipReason::Headers { detail: detail.clone() }),
        HeaderState::Available(compiler) => *compiler,
        HeaderState::Unknown => None,
    };
    let family = families.iter().find(|family| family.metadata.name == cell.family)?;
    if let Some(detail) = missing_compiler(family, kernel_compiler) {
        return Some(SkipReason::NoCompiler { detail });
    }
    let unbuildable = |kind: &'static str, identity: &str| {
        let key = (kind, identity.to_owned(), cell.target.arch);
        inputs.cells.resolved.unbuildable_root_fs.get(&key).cloned()
    };
    // A payload that can be reused or only signed again may need no compilation.
    let must_compile = spec.reuse == Reuse::Never && cell.unsigned_hash.is_none();
    if must_compile && let Some(detail) = unbuildable(FetchedInputs::TOOLCHAIN, &cell.toolchain) {
        return Some(SkipReason::Toolchain { family: cell.family.to_string(), detail });
    }
    let base = cell.fetched.base.as_deref();
    if let Some(detail) = base.and_then(|base| unbuildable(FetchedInputs::BASE, base)) {
        return Some(SkipReason::Unresolved { detail: format!("runtime base: {detail}") });
    }
    if spec.output == Output::Image {
        return (!inputs.has_daemon).then_some(SkipReason::NoDaemon);
    }
    let machine = inputs.machine.filter(|_| must_compile)?;
    let detail = cross_compile_blocker(family, &cell.target, machine, cell.fetched.headers.is_some())?;
    Some(SkipReason::ForeignArchitecture { detail })
}

/// Compares a cell with the registry. [`Outcome::Build`] is provisional until [`decide_build`] has confirmed it.
pub(super) fn compare(observed: &Observed, image: &DriverImage, cell: &Arc<Cell>) -> Outcome {
    let spec = &image.spec;
    let failed_lookup = |reference| Some((reference, observed.lookup_error(reference)?));
    if let Some((reference, message)) = cell.references().find_map(failed_lookup) {
        return unknown_outcome(cell, reference, message);
    }

    let published_as = |reference: &ImageReference| observed.image(reference, cell.target.arch);
    let conflict = cell.references().find_map(|reference| {
        let published = published_as(reference).filter(|published| !published.is_of(cell))?;
        Some((reference, published))
    });
    if let (Some((reference, published)), OnConflict::Refuse) = (conflict, spec.on_conflict) {
        let (reference, theirs) = (reference.clone(), published.input_hash);
        let inputs = observed.inputs.get(&published.digest);
        let changed = inputs.map(|inputs| changed_inputs(inputs, cell)).unwrap_or_default();
        let products = observed.products.get(&cell.image).cloned().unwrap_or_default();
        let remedy = conflict_remedy(cell, &changed, &products);
        return Outcome::Conflict { cell: Arc::clone(cell), reference, theirs, changed, remedy };
    }

    if let Some(published) = cell.references().filter_map(published_as).find(|image| image.is_of(cell)) {
        let is_missing =
            |reference: &&ImageReference| !published_as(reference).is_some_and(|image| image.is_of(cell));
        let missing_tags = cell.references().filter(is_missing).cloned().collect();
        let denied = published.verdict == Some(Verdict::Unknown) && spec.check.unknown == UnknownPolicy::Deny;
        return Outcome::UpToDate {
            cell: Arc::clone(cell),
            published: published.clone(),
            denied,
            missing_tags,
        };
    }

    if let Some(why) = &cell.refused {
        return why.clone().into();
    }
    let why = match conflict {
        Some((_, published)) => BuildReason::Overwrite { theirs: published.input_hash },
        None => BuildReason::NotPublished,
    };
    Outcome::Build { cell: Arc::clone(cell), why, may_reuse: spec.reuse == Reuse::Compatible }
}

/// Decides whether a cell that is not published is built, from its headers and from earlier builds with the same inputs.
pub(super) fn decide_build(
    inputs: &PlanInputs<'_>,
    observed: &Observed,
    image: &DriverImage,
    cell: Arc<Cell>,
    why: BuildReason,
) -> Outcome {
    let Some(failure) = observed.failures.get(&cell.input_hash) else {
        return unknown_outcome(&cell, &cell.reference, "earlier failures of its build were not looked up");
    };
    let Some(headers) = observed.headers.get(&cell.target) else {
        return unknown_outcome(&cell, &cell.reference, "the kernel's headers were not looked up");
    };
    if let Some(why) = cannot_build(inputs, image, &cell, headers) {
        return why.into();
    }
    let applies = |failure: &&Failure| failure.applies_to(&image.spec, &inputs.definitions().site);
    let why = match failure.as_ref().filter(applies).cloned() {
        Some(Failure { at, message, permanent: true, .. }) => return Outcome::Failed { cell, at, message },
        Some(Failure { at, message, .. }) => BuildReason::RetryAfterFailure { at, detail: message },
        None => why,
    };
    Outcome::Build { cell, why, may_reuse: image.spec.reuse == Reuse::Compatible }
}

fn unknown_outcome(cell: &Arc<Cell>, reference: &ImageReference, message: &str) -> Outcome {
    let (reference, message) = (reference.clone(), message.to_owned());
    Outcome::Unknown { cell: Arc::clone(cell), reference, message }
}
