//! Adapter: finds a published payload that makes a compilation unnecessary. It can be this kernel's own payload with
//! other signatures, after a key rotation or after signing was enabled. Or it was built for another kernel.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use farrier_core::{
    facts::{ImageFacts, ReusedFrom, annotations},
    image::{Digest, Output, Reuse, Tag, Version},
    kernel::KernelRelease,
    plan::reuse::{by_numbers, may_lend, may_resign, tags_to_resign, tags_to_try},
    provenance::Confinement,
};
use futures::{StreamExt as _, stream};
use kmod::{BootReport, Verdict};
use oci::{ImageManifest, client::chain as error_chain};

use super::{
    check,
    job::{CheckedPayload, CompileInputs, Job, Payload},
    sign,
};
use crate::{
    blocking::blocking,
    cache::Scratch,
    images::StoredImage,
    parts::{AT_ONCE, Result, Stage, TargetError},
    payload::{self, DecompressionBudget, PayloadError},
    registry::RegistryError,
};

/// Maximum number of tags to look up for one target.
const MAX_LOOKUPS: usize = 64;
/// Maximum number of tags to look up for re-signing. The lookups are sequential, the likeliest tag first.
const MAX_RESIGN_LOOKUPS: usize = 32;
/// Maximum number of payloads to fetch and check for one target: each may be hundreds of megabytes.
const MAX_TRIES: usize = 3;

/// A published image whose payload may be reused.
struct ReuseCandidate {
    digest: Digest,
    facts: ImageFacts,
    manifest: ImageManifest,
}

/// A checked payload, or the reason why the payload was not reused. In the latter case the payload is compiled.
type Borrowed = Result<CheckedPayload, String>;

/// Finds and checks a published payload. Neither a missing payload nor a registry failure is an error, because the
/// payload can be compiled instead; the reason is reported as a note.
pub(super) async fn find(job: &Job<'_>, against: &CompileInputs) -> Result<Option<CheckedPayload>> {
    match resign(job, against).await? {
        Some(checked) => Ok(Some(checked)),
        None => reuse(job, against).await,
    }
}

/// Re-signs the cell's own payload, if it is published with other signatures or with none.
async fn resign(job: &Job<'_>, against: &CompileInputs) -> Result<Option<CheckedPayload>> {
    if job.cell.unsigned_hash.is_none() {
        return Ok(None);
    }
    let lender = match find_to_resign(job).await {
        Ok(Some(lender)) => lender,
        Ok(None) => return Ok(None),
        Err(error @ TargetError::Registry(_)) => {
            tracing::info!(subject = job.cell.subject(), reason = error_chain(&error), "nothing to re-sign");
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    job.stage(Stage::Reuse);
    let Some(unpacked) = lender.unpack(job, |_| Ok(())).await? else { return Ok(None) };
    let work = match unpacked {
        Ok(work) => work,
        Err(why) => {
            job.note(&format!("{} is not re-signed: {}", lender.digest, error_chain(&why)));
            return Ok(None);
        }
    };
    let payload = Payload {
        exposed: lender.facts.exposed_digest.clone(),
        ..lender.payload(job, work, job.cell.target.release.clone())
    };
    check::check(job, against, payload, lender.facts.module_signer.as_ref()).await.map(Some)
}

/// Returns the first trusted image that holds the payload.
async fn find_to_resign(job: &Job<'_>) -> Result<Option<ReuseCandidate>> {
    let tags = job.parts.registry.tags(&job.cell.reference.repository).await?;
    for tag in tags_to_resign(job.cell, tags, MAX_RESIGN_LOOKUPS) {
        if let Some(lender) = look_up(job, tag).await?
            && may_resign(job.cell, &lender.facts)
            && lender.is_trusted(job).await?
        {
            return Ok(Some(lender));
        }
    }
    Ok(None)
}

/// Reuses another kernel's payload, if the definition allows that and one fits.
async fn reuse(job: &Job<'_>, against: &CompileInputs) -> Result<Option<CheckedPayload>> {
    let spec = &job.image.spec;
    // Exposed headers depend on the kernel that they were made for, and on its configuration.
    if spec.reuse == Reuse::Never || spec.output == Output::Image || !spec.exposes.is_empty() {
        return Ok(None);
    }
    job.stage(Stage::Reuse);
    let reason = match try_lenders(job, against).await {
        Ok(Ok(checked)) => return Ok(Some(checked)),
        Ok(Err(reason)) => reason,
        Err(error @ TargetError::Registry(_)) => error_chain(&error),
        Err(error) => return Err(error),
    };
    job.note(&format!("nothing to reuse: {reason}"));
    tracing::info!(subject = job.cell.subject(), %reason, "nothing to reuse");
    Ok(None)
}

/// Tries the candidates one after the other, the newest kernel first, and each payload once. Signatures are looked up
/// only for a candidate that is about to be tried. The returned reason is about the newest candidate.
async fn try_lenders(job: &Job<'_>, against: &CompileInputs) -> Result<Borrowed> {
    let (mut first, mut tried) = (None, BTreeSet::new());
    for (kernel, lender) in lenders(job).await? {
        // Only a trusted image's claim about its payload counts.
        if tried.contains(lender.origin()) || !lender.is_trusted(job).await? {
            continue;
        }
        match borrow(job, against, &kernel, &lender).await? {
            Ok(checked) => return Ok(Ok(checked)),
            Err(reason) => {
                tracing::info!(subject = job.cell.subject(), %reason, "not reused");
                first.get_or_insert(reason);
            }
        }
        tried.insert(lender.origin().clone());
        if tried.len() == MAX_TRIES {
            break;
        }
    }
    Ok(Err(first.unwrap_or_else(|| "no image of the same recipe is published for another kernel".to_owned())))
}

/// Returns the published images that qualify for reuse, the newest kernel first.
async fn lenders(job: &Job<'_>) -> Result<Vec<(KernelRelease, ReuseCandidate)>> {
    let tags = job.parts.registry.tags(&job.cell.reference.repository).await?;
    let found = stream::iter(tags_to_try(job.cell, tags, MAX_LOOKUPS))
        .map(|tag| look_up(job, tag))
        .buffered(AT_ONCE)
        .collect::<Vec<_>>()
        .await;
    let mut lenders = Vec::new();
    for lender in found {
        if let Some(lender) = lender?
            && may_lend(job.cell, &lender.facts)
            && let Some(kernel) = lender.facts.kernel_release.clone()
        {
            lenders.push((kernel, lender));
        }
    }
    lenders.sort_by(|(a, _), (b, _)| by_numbers(b.as_str(), a.as_str()));
    Ok(lenders)
}

/// Fetches a candidate's payload, moves it to this kernel's directory, and checks it for this kernel.
async fn borrow(
    job: &Job<'_>,
    against: &CompileInputs,
    kernel: &KernelRelease,
    lender: &ReuseCandidate,
) -> Result<Borrowed> {
    let (from, to) = (kernel.clone(), job.cell.target.release.clone());
    let kernel = || kernel.clone();
    let unpacked = lender.unpack(job, move |tree| payload::move_to_kernel(tree, &from, &to)).await?;
    let work = match unpacked.unwrap_or_else(|| Err(PayloadError::NoModules(kernel()))) {
        Ok(work) => work,
        Err(why) => {
            return Ok(Err(format!("the payload of {} cannot be used: {}", kernel(), error_chain(&why))));
        }
    };
    let payload = lender.payload(job, work, kernel());

    let signing = sign::signing(job, &against.headers, lender.facts.module_signer.as_ref()).await?;
    let report = check::static_check(job, against, signing.as_ref(), &payload).await?;
    if report.verdict != Verdict::Loads {
        let (verdict, summary) = (report.verdict, report.summary());
        return Ok(Err(format!("the payload of {}: the check says {verdict}: {summary}", kernel())));
    }
    sign::sign(job, signing, &payload).await?;
    let report = check::boot(job, against, &payload, report).await?;
    if report.verdict != Verdict::Loads {
        let summary = report.boot.as_ref().and_then(BootReport::failure);
        let summary = summary.unwrap_or_else(|| "not every module was reached".to_owned());
        return Ok(Err(format!("the payload of {}: boot check: {summary}", kernel())));
    }
    Ok(Ok(CheckedPayload::of(payload, &against.headers, report)))
}

/// Looks up a tag of the cell's repository. Returns `None` unless it is an image that farrier made.
async fn look_up(job: &Job<'_>, tag: Tag) -> Result<Option<ReuseCandidate>> {
    let (repository, registry) = (&job.cell.reference.repository, &job.parts.registry);
    let found = registry.image(repository, &Version::Tag(tag), job.cell.target.arch.as_str()).await;
    let found = match found {
        Err(RegistryError::Image(_)) => None,
        found => found?,
    };
    Ok(found.and_then(|stored| {
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

    /// Whether the image is trusted, so that its payload may be reused and signed. Its own annotations do not count.
    async fn is_trusted(&self, job: &Job<'_>) -> Result<bool> {
        let (repository, digest) = (&job.cell.reference.repository, &self.digest);
        let trusted = StoredImage { parts: job.parts, repository, digest }.trusted().await?;
        if let Err(why) = &trusted {
            job.note(&format!("the payload of {repository}@{digest} is not reused: {why}"));
        }
        Ok(trusted.is_ok())
    }

    /// Fetches the payload and unpacks it into `payload` of a scratch directory; `None` if the image has no payload.
    async fn unpack(
        &self,
        job: &Job<'_>,
        then: impl FnOnce(&std::path::Path) -> Result<(), PayloadError> + Send + 'static,
    ) -> Result<Option<Result<Scratch, PayloadError>>> {
        let Some(layer) = self.manifest.payload_layer() else { return Ok(None) };
        let work = job.parts.cache.scratch()?;
        let (blob, tree) = (work.path().join("published"), work.path().join("payload"));
        let repository = &job.cell.reference.repository;
        job.parts.registry.fetch_blob(repository, &layer.digest, layer.size, &blob).await?;
        fs_err::create_dir(&tree)?;
        let unpacked = blocking(move || payload::unpack_layer(&blob, &tree).and_then(|()| then(&tree))).await;
        Ok(Some(unpacked.map(|()| work)))
    }

    /// Returns the unpacked payload, which was built for `kernel`.
    fn payload(&self, job: &Job<'_>, work: Scratch, kernel: KernelRelease) -> Payload {
        let deadline = job.image.spec.build.deadline;
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
