//! Finds a published payload that makes a compilation unnecessary. There are two kinds:
//!
//! - this kernel's own payload with other signatures, after a key rotation or after signing was enabled
//! - a payload that was built for another kernel

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use farrier_core::{
    facts::{ImageFacts, ReusedFrom, annotations},
    image::{Digest, Output, Reuse, Tag, Version},
    kernel::KernelRelease,
    plan::reuse::{by_numbers, can_re_sign, is_reusable, re_sign_candidate_tags, reuse_candidate_tags},
    provenance::Confinement,
};
use farrier_local::{blocking::blocking, cache::Scratch};
use farrier_payload as payload;
use farrier_payload::{DecompressionBudget, PayloadError};
use farrier_store::registry::RegistryError;
use futures::{StreamExt as _, stream};
use kmod::{BootReport, Verdict};
use oci::{ImageManifest, error_chain};

use super::{
    cell_build::{CellBuild, CheckedPayload, CompileInputs, Payload},
    check, sign,
};
use crate::{
    images::StoredImage,
    services::{BuildError, MAX_CONCURRENT_REQUESTS, Result, Stage},
};

/// Maximum number of tags to look up for one target.
const MAX_LOOKUPS: usize = 64;
/// Maximum number of tags to look up for re-signing. The lookups are sequential, the likeliest tag first.
const MAX_RESIGN_LOOKUPS: usize = 32;
/// Maximum number of payloads to fetch and check for one target. A payload may have hundreds of megabytes.
const MAX_TRIES: usize = 3;

/// A published image whose payload may be reused.
struct ReuseCandidate {
    digest: Digest,
    facts: ImageFacts,
    manifest: ImageManifest,
}

/// A reused payload of another kernel, or the reason why no payload is reused.
type ReuseOutcome = Result<CheckedPayload, String>;

/// Finds and checks a published payload. A missing payload or a registry failure is reported as a note and not as an
/// error, because the build can compile the payload instead.
pub(super) async fn find(
    build: &CellBuild<'_>,
    compile_inputs: &CompileInputs,
) -> Result<Option<CheckedPayload>> {
    match re_sign(build, compile_inputs).await? {
        Some(checked) => Ok(Some(checked)),
        None => reuse(build, compile_inputs).await,
    }
}

/// Re-signs the cell's own payload, if it is published with other signatures or with none.
async fn re_sign(build: &CellBuild<'_>, compile_inputs: &CompileInputs) -> Result<Option<CheckedPayload>> {
    if build.cell.unsigned_hash.is_none() {
        return Ok(None);
    }
    let candidate = match find_re_sign_candidate(build).await {
        Ok(Some(candidate)) => candidate,
        Ok(None) => return Ok(None),
        Err(error @ BuildError::Registry(_)) => {
            tracing::info!(
                subject = build.cell.subject(),
                reason = error_chain(&error),
                "nothing to re-sign"
            );
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    build.stage(Stage::Reuse);
    let work = match candidate.unpack(build, |_| Ok(())).await {
        Ok(Some(work)) => work,
        Ok(None) => return Ok(None),
        Err(why @ BuildError::Payload(_)) => {
            build.note(&format!("{} is not re-signed: {}", candidate.digest, error_chain(&why)));
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    let payload = Payload {
        exposed: candidate.facts.exposed_digest.clone(),
        ..candidate.payload(build, work, build.cell.target.release.clone())
    };
    check::check(build, compile_inputs, payload, candidate.facts.module_signer.as_ref()).await.map(Some)
}

/// Returns the first trusted image that holds the cell's own payload.
async fn find_re_sign_candidate(build: &CellBuild<'_>) -> Result<Option<ReuseCandidate>> {
    let tags = build.services.images.registry.tags(&build.cell.reference.repository).await?;
    for tag in re_sign_candidate_tags(build.cell, tags, MAX_RESIGN_LOOKUPS) {
        if let Some(candidate) = look_up(build, tag).await?
            && can_re_sign(build.cell, &candidate.facts)
            && candidate.is_trusted(build).await?
        {
            return Ok(Some(candidate));
        }
    }
    Ok(None)
}

/// Reuses another kernel's payload, if the definition allows reuse and a payload passes the checks.
async fn reuse(build: &CellBuild<'_>, compile_inputs: &CompileInputs) -> Result<Option<CheckedPayload>> {
    let spec = &build.image.spec;
    // Exposed headers depend on the kernel that they were made for, and on its configuration.
    if spec.reuse == Reuse::Never || spec.output == Output::Image || !spec.exposes.is_empty() {
        return Ok(None);
    }
    build.stage(Stage::Reuse);
    let reason = match try_candidates(build, compile_inputs).await {
        Ok(Ok(checked)) => return Ok(Some(checked)),
        Ok(Err(reason)) => reason,
        Err(error @ BuildError::Registry(_)) => error_chain(&error),
        Err(error) => return Err(error),
    };
    build.note(&format!("nothing to reuse: {reason}"));
    tracing::info!(subject = build.cell.subject(), %reason, "nothing to reuse");
    Ok(None)
}

/// Tries the candidates one after the other, the newest kernel first, and each payload once. Signatures are looked up
/// only for a candidate that is about to be tried. The returned reason is about the newest candidate.
async fn try_candidates(build: &CellBuild<'_>, compile_inputs: &CompileInputs) -> Result<ReuseOutcome> {
    let (mut first_reason, mut tried) = (None, BTreeSet::new());
    for (kernel, candidate) in reuse_candidates(build).await? {
        // Annotations, such as the one that `origin` reads, count only for trusted images.
        if tried.contains(candidate.origin()) || !candidate.is_trusted(build).await? {
            continue;
        }
        match try_candidate(build, compile_inputs, &kernel, &candidate).await? {
            Err(reason) => {
                tracing::info!(subject = build.cell.subject(), %reason, "not reused");
                first_reason.get_or_insert(reason);
            }
            reused @ Ok(_) => return Ok(reused),
        }
        tried.insert(candidate.origin().clone());
        if tried.len() == MAX_TRIES {
            break;
        }
    }
    Ok(Err(first_reason
        .unwrap_or_else(|| "no image of the same recipe is published for another kernel".to_owned())))
}

/// Returns the published images that qualify for reuse, the newest kernel first.
async fn reuse_candidates(build: &CellBuild<'_>) -> Result<Vec<(KernelRelease, ReuseCandidate)>> {
    let tags = build.services.images.registry.tags(&build.cell.reference.repository).await?;
    let lookups = stream::iter(reuse_candidate_tags(build.cell, tags, MAX_LOOKUPS))
        .map(|tag| look_up(build, tag))
        .buffered(MAX_CONCURRENT_REQUESTS)
        .collect::<Vec<_>>()
        .await;
    let mut candidates = Vec::new();
    for lookup in lookups {
        if let Some(candidate) = lookup?
            && is_reusable(build.cell, &candidate.facts)
            && let Some(kernel) = candidate.facts.kernel_release.clone()
        {
            candidates.push((kernel, candidate));
        }
    }
    candidates.sort_by(|(a, _), (b, _)| by_numbers(b.as_str(), a.as_str()));
    Ok(candidates)
}

/// Fetches a candidate's payload, moves it to this kernel's directory, and checks it for this kernel.
async fn try_candidate(
    build: &CellBuild<'_>,
    compile_inputs: &CompileInputs,
    kernel: &KernelRelease,
    candidate: &ReuseCandidate,
) -> Result<ReuseOutcome> {
    let (from, to) = (kernel.clone(), build.cell.target.release.clone());
    let unpacked = candidate.unpack(build, move |tree| payload::move_to_kernel(tree, &from, &to)).await;
    let no_modules = || PayloadError::NoModules(kernel.clone()).into();
    let work = match unpacked.and_then(|work| work.ok_or_else(no_modules)) {
        Ok(work) => work,
        Err(why @ BuildError::Payload(_)) => {
            return Ok(Err(format!("the payload of {kernel} cannot be used: {}", error_chain(&why))));
        }
        Err(error) => return Err(error),
    };
    let payload = candidate.payload(build, work, kernel.clone());

    let signing =
        sign::signing(build, &compile_inputs.headers, candidate.facts.module_signer.as_ref()).await?;
    let report = check::static_check(build, compile_inputs, signing.as_ref(), &payload).await?;
    if report.verdict != Verdict::Loads {
        let (verdict, summary) = (report.verdict, report.summary());
        return Ok(Err(format!("the payload of {kernel}: the check says {verdict}: {summary}")));
    }
    sign::sign(build, signing, &payload).await?;
    let report = check::boot_check(build, compile_inputs, &payload, report).await?;
    if report.verdict != Verdict::Loads {
        let summary = report.boot.as_ref().and_then(BootReport::failure);
        let summary = summary.unwrap_or_else(|| "not every module was tested".to_owned());
        return Ok(Err(format!("the payload of {kernel}: boot check: {summary}")));
    }
    Ok(Ok(CheckedPayload::of(payload, &compile_inputs.headers, report)))
}

/// Looks up a tag of the cell's repository. Returns `None` unless the tag is an image that farrier made.
async fn look_up(build: &CellBuild<'_>, tag: Tag) -> Result<Option<ReuseCandidate>> {
    let (repository, registry) = (&build.cell.reference.repository, &build.services.images.registry);
    let found = registry.image(repository, &Version::Tag(tag), build.cell.target.arch.as_str()).await;
    let stored = match found {
        Err(RegistryError::Image(_)) => None,
        found => found?,
    };
    Ok(stored.and_then(|stored| {
        let manifest = ImageManifest::parse(&stored.bytes).ok()?;
        let facts = ImageFacts::from_annotations(&manifest.annotations).ok()?;
        Some(ReuseCandidate { digest: stored.digest, facts, manifest })
    }))
}

impl ReuseCandidate {
    /// Digest of the image that the payload was built for. Several kernels may share the payload.
    fn origin(&self) -> &Digest {
        self.facts.reused_from.as_ref().unwrap_or(&self.digest)
    }

    /// Whether the image is trusted, so that its payload may be reused and signed. The image's own annotations prove
    /// nothing, because every writer to the registry can set them.
    async fn is_trusted(&self, build: &CellBuild<'_>) -> Result<bool> {
        let (repository, digest) = (&build.cell.reference.repository, &self.digest);
        let trusted = StoredImage { services: build.services, repository, digest }.check_trusted().await?;
        if let Err(why) = &trusted {
            build.note(&format!("the payload of {repository}@{digest} is not reused: {why}"));
        }
        Ok(trusted.is_ok())
    }

    /// Fetches the payload, unpacks it into directory `payload` of a scratch directory, and applies `transform` to that
    /// directory. Returns `None` if the image has no payload, and [`BuildError::Payload`] if the payload cannot be used.
    async fn unpack(
        &self,
        build: &CellBuild<'_>,
        transform: impl FnOnce(&std::path::Path) -> Result<(), PayloadError> + Send + 'static,
    ) -> Result<Option<Scratch>> {
        let Some(layer) = self.manifest.payload_layer() else { return Ok(None) };
        let work = build.services.cache.scratch()?;
        let (blob, tree) = (work.path().join("published"), work.path().join("payload"));
        let repository = &build.cell.reference.repository;
        build.services.images.registry.fetch_blob(repository, &layer.digest, layer.size, &blob).await?;
        fs_err::create_dir(&tree)?;
        blocking(move || payload::unpack_layer(&blob, &tree).and_then(|()| transform(&tree))).await?;
        Ok(Some(work))
    }

    /// Returns the unpacked payload, which was built for `kernel`.
    fn payload(&self, build: &CellBuild<'_>, work: Scratch, kernel: KernelRelease) -> Payload {
        let deadline = build.image.spec.build.deadline;
        let sources = self.manifest.annotations.get(annotations::SOURCES);
        Payload {
            tree: work.path().join("payload"),
            image: None,
            sources: sources.cloned().into_iter().collect(),
            toolchain: self.facts.toolchain.clone().unwrap_or_default(),
            exposed: None,
            reused_from: Some(ReusedFrom { kernel, digest: self.digest.clone() }),
            confinement: Confinement::default(),
            decompression: Arc::new(DecompressionBudget::of_build(deadline, Duration::ZERO)),
            work,
        }
    }
}

#[cfg(test)]
#[path = "resign_tests.rs"]
mod resign_tests;
#[cfg(test)]
#[path = "reuse_tests.rs"]
mod tests;
