//! Adapter: a payload that was built for another kernel, published for this one without a build.

use std::{collections::BTreeSet, fs};

use futures::{StreamExt as _, stream};

use super::{
    Controller, Stage, TargetError,
    build::{Made, Origins, Payload},
    needs::Needed,
    observe::AT_ONCE,
    retry::chain,
};
use crate::{
    blocking::blocking,
    headers::HeaderSet,
    image::{Digest, DriverImage, Output, Reuse, Version},
    kernel::{KernelFamily, KernelRelease},
    kmod::{BootReport, Verdict},
    oci::{ImageFacts, ImageManifest, ReusedFrom, annotations},
    payload::{self, ReuseError},
    plan::{
        Cell,
        reuse::{by_numbers, may_lend, tags_to_try},
    },
};

/// Tags that are looked up for one target.
const MAX_LOOKUPS: usize = 64;
/// Payloads that are fetched and checked for one target: each may be hundreds of megabytes.
const MAX_TRIES: usize = 3;

/// An image that may lend its payload.
struct Lender {
    digest: Digest,
    kernel: KernelRelease,
    facts: ImageFacts,
    manifest: ImageManifest,
}

/// Why a payload was not reused; a normal build follows.
#[derive(Debug, thiserror::Error)]
enum NotReused {
    #[error("no image of the same recipe is published for another kernel")]
    NoLender,
    #[error("the payload of {kernel} cannot be used: {}", chain(.why))]
    Payload { kernel: KernelRelease, why: ReuseError },
    #[error("the payload of {kernel}: the check says {verdict}: {summary}")]
    Check { kernel: KernelRelease, verdict: Verdict, summary: String },
    #[error("the payload of {kernel}: in the boot check {summary}")]
    Boot { kernel: KernelRelease, summary: String },
}

impl Controller {
    /// A checked payload of another kernel, where the definition allows that and there is one. That there is
    /// none is told and no error; nor is a registry that does not answer, because a build needs none.
    pub(super) async fn reuse(
        &self,
        cell: &Cell,
        definition: (&DriverImage, &KernelFamily),
        headers: &HeaderSet,
        needed: &Needed,
    ) -> Result<Option<Made>, TargetError> {
        let spec = &definition.0.spec;
        // What is exposed was made for one kernel, its configuration included.
        if spec.reuse == Reuse::Never || spec.output == Output::Image || !spec.exposes.is_empty() {
            return Ok(None);
        }
        let subject = cell.subject();
        self.reporter.stage(&subject, Stage::Reuse);
        let reason = match self.try_lenders(cell, definition, headers, needed).await {
            Ok(Ok(made)) => return Ok(Some(made)),
            Ok(Err(reason)) => reason.to_string(),
            Err(error @ TargetError::Registry(_)) => chain(&error),
            Err(error) => return Err(error),
        };
        self.reporter.note(&subject, &format!("nothing to reuse: {reason}"));
        tracing::info!(%subject, %reason, "nothing to reuse");
        Ok(None)
    }

    /// Tries one after the other. The reason is that of the newest.
    async fn try_lenders(
        &self,
        cell: &Cell,
        definition: (&DriverImage, &KernelFamily),
        headers: &HeaderSet,
        needed: &Needed,
    ) -> Result<Result<Made, NotReused>, TargetError> {
        let mut first = None;
        for lender in self.lenders(cell).await? {
            match self.borrow(cell, definition, (headers, needed), &lender).await? {
                Ok(made) => return Ok(Ok(made)),
                Err(reason) => {
                    tracing::info!(subject = cell.subject(), %reason, "not reused");
                    first.get_or_insert(reason);
                }
            }
        }
        Ok(Err(first.unwrap_or(NotReused::NoLender)))
    }

    /// Published images that may lend, the newest kernel first, each payload once.
    async fn lenders(&self, cell: &Cell) -> Result<Vec<Lender>, TargetError> {
        let repository = &cell.reference.repository;
        let tags = self.registry.tags(repository).await?;
        let found = stream::iter(tags_to_try(cell, tags, MAX_LOOKUPS))
            .map(|tag| async move {
                let version = Version::Tag(tag);
                self.registry.manifest(repository, &version).await
            })
            .buffered(AT_ONCE)
            .collect::<Vec<_>>()
            .await;
        let mut lenders = Vec::new();
        for stored in found {
            let Some(stored) = stored? else { continue };
            // What is no image of farrier's cannot lend.
            let Ok(manifest) = ImageManifest::parse(&stored.bytes) else { continue };
            let Ok(facts) = ImageFacts::from_annotations(&manifest.annotations) else { continue };
            if let (true, Some(kernel)) = (may_lend(cell, &facts), facts.kernel_release.clone()) {
                lenders.push(Lender { digest: stored.digest, kernel, facts, manifest });
            }
        }
        lenders.sort_by(|a, b| by_numbers(b.kernel.as_str(), a.kernel.as_str()));
        let mut payloads = BTreeSet::new();
        lenders.retain(|lender| payloads.insert(lender.origin().clone()));
        lenders.truncate(MAX_TRIES);
        Ok(lenders)
    }

    /// Fetches a lender's payload, puts it under this kernel's name, and asks what this kernel says to it.
    async fn borrow(
        &self,
        cell: &Cell,
        definition: (&DriverImage, &KernelFamily),
        (headers, needed): (&HeaderSet, &Needed),
        lender: &Lender,
    ) -> Result<Result<Made, NotReused>, TargetError> {
        let kernel = || lender.kernel.clone();
        let Some(layer) = lender.manifest.payload_layer() else {
            let why = ReuseError::NoModules(kernel());
            return Ok(Err(NotReused::Payload { kernel: kernel(), why }));
        };
        let work = self.cache.scratch()?;
        let (blob, tree) = (work.path().join("lent"), work.path().join("payload"));
        self.registry.fetch_blob(&cell.reference.repository, &layer.digest, &blob).await?;
        let (place, from, to) = (tree.clone(), kernel(), cell.target.release.clone());
        let moved = blocking(move || {
            fs::create_dir(&place).map_err(|source| TargetError::Input { path: place.clone(), source })?;
            Ok::<_, TargetError>(
                payload::unpack_layer(&blob, &place)
                    .and_then(|()| payload::move_to_kernel(&place, &from, &to)),
            )
        })
        .await?;
        if let Err(why) = moved {
            return Ok(Err(NotReused::Payload { kernel: kernel(), why }));
        }

        let signing = self.signing(cell, definition.0, headers, lender.facts.module_signer.as_ref()).await?;
        let signing = signing.as_ref();
        let report = self.static_check(cell, definition, (headers, signing), needed, &tree).await?;
        if report.verdict != Verdict::Loads {
            let (verdict, summary) = (report.verdict, report.summary());
            return Ok(Err(NotReused::Check { kernel: kernel(), verdict, summary }));
        }
        self.sign(cell, signing, &tree).await?;
        let report = self.boot(cell, definition, needed, &tree, report).await?;
        if report.verdict != Verdict::Loads {
            let summary = report.boot.as_ref().and_then(BootReport::failure);
            let summary = summary.unwrap_or_else(|| "not every module was reached".to_owned());
            return Ok(Err(NotReused::Boot { kernel: kernel(), summary }));
        }
        let sources = lender.manifest.annotations.get(annotations::SOURCES);
        Ok(Ok(Made {
            payload: Payload { tree, image: None, work },
            report,
            origins: Origins {
                headers: headers.origin.clone(),
                sources: sources.cloned().into_iter().collect(),
                toolchain: lender.facts.toolchain.clone().unwrap_or_default(),
            },
            exposed: None,
            reused_from: Some(ReusedFrom { kernel: kernel(), digest: lender.digest.clone() }),
        }))
    }
}

impl Lender {
    /// The image that the payload was built for: several kernels may have it by now.
    fn origin(&self) -> &Digest {
        self.facts.reused_from.as_ref().unwrap_or(&self.digest)
    }
}

#[cfg(test)]
#[path = "reuse_tests.rs"]
mod tests;
