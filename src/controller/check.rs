//! Adapter: check: what the kernel's loader says about a payload, and what the definition makes of it.

use std::path::{Path, PathBuf};

use super::{Controller, Stage, TargetError, needs::Needed, retry::with_retry, signing::Signing};
use crate::{
    blocking::blocking,
    headers::{HeaderSet, KernelImageLookup},
    image::{DriverImage, UnknownPolicy},
    kernel::{KernelFamily, KernelTarget},
    kmod::{self, BootReport, CheckReport, CheckRequest, KernelFacts, Verdict},
    oci::ModuleSignerFact,
    payload,
    plan::Cell,
};

/// A boot check to make.
#[derive(Clone, Debug)]
pub struct BootCheck<'a> {
    /// The kernel to boot.
    pub target: &'a KernelTarget,
    /// Its family, which says where its image comes from.
    pub family: &'a KernelFamily,
    /// The payload.
    pub payload: &'a Path,
    /// The modules to load, as paths relative to `payload`, in load order.
    pub modules: Vec<String>,
    /// Directories with modules of needed images, which are there before.
    pub needed: &'a [PathBuf],
}

/// Boots kernels in throwaway virtual machines and loads modules there.
#[async_trait::async_trait]
pub trait BootChecker: Send + Sync {
    /// What became of the modules. That the kernel refuses one is in the report, and no error; that its image is
    /// missing, or that no virtual machine can be started, is one.
    async fn boot_check(&self, check: &BootCheck<'_>) -> Result<BootReport, TargetError>;
}

impl Controller {
    /// Finds out before the work that the check which the definition asks for cannot be made.
    pub(super) fn can_check(&self, image: &DriverImage) -> Result<(), TargetError> {
        if image.spec.check.boot && self.boot_checker.is_none() {
            return Err(TargetError::NoBootChecker { image: image.metadata.name.to_string() });
        }
        Ok(())
    }

    /// Checks a payload against its kernel's header set, signs its modules where the site has them signed, and, where the
    /// definition asks for it, loads them in a virtual machine. Returns the report of a payload that may be published. `previous`
    /// signed a payload that was taken over.
    pub(super) async fn check(
        &self,
        cell: &Cell,
        (image, family): (&DriverImage, &KernelFamily),
        (headers, previous): (&HeaderSet, Option<&ModuleSignerFact>),
        needed: &Needed,
        tree: &Path,
    ) -> Result<CheckReport, TargetError> {
        self.reporter.stage(&cell.subject(), Stage::Check);
        let signing = self.signing(cell, image, headers, previous).await?;
        let signing = signing.as_ref();
        let report = self.static_check(cell, (image, family), (headers, signing), needed, tree).await?;
        accept(&report, image.spec.check.unknown)?;
        self.sign(cell, signing, tree).await?;
        let report = self.boot(cell, (image, family), needed, tree, report).await?;
        accept(&report, image.spec.check.unknown)?;
        Ok(report)
    }

    /// What the headers say about the payload. What they leave open, the kernel's own image is asked, where the
    /// family names one: a download of 70 MB, so not before. Modules that are about to be signed count as signed.
    pub(super) async fn static_check(
        &self,
        cell: &Cell,
        (image, family): (&DriverImage, &KernelFamily),
        (headers, signing): (&HeaderSet, Option<&Signing>),
        needed: &Needed,
        tree: &Path,
    ) -> Result<CheckReport, TargetError> {
        let report = static_check(image, (&headers.facts, signing), needed, tree).await?;
        if report.verdict != Verdict::Unknown || family.spec.kernel_image.is_none() {
            return Ok(report);
        }
        let root = &self.definitions.root;
        let fetch = || self.fetcher.kernel_image(family, root, &cell.target);
        let KernelImageLookup::Found(kernel) = with_retry("fetch kernel image", &self.cancel, fetch).await?
        else {
            return Ok(report);
        };
        let beyond_headers = self.fetcher.kernel_facts(&kernel).await?;
        let facts = KernelFacts { beyond_headers, ..headers.facts.clone() };
        static_check(image, (&facts, signing), needed, tree).await
    }

    /// Adds what a boot shows, where the definition asks for one.
    pub(super) async fn boot(
        &self,
        cell: &Cell,
        (image, family): (&DriverImage, &KernelFamily),
        needed: &Needed,
        tree: &Path,
        report: CheckReport,
    ) -> Result<CheckReport, TargetError> {
        if !image.spec.check.boot {
            return Ok(report);
        }
        let missing = || TargetError::NoBootChecker { image: image.metadata.name.to_string() };
        let checker = self.boot_checker.as_ref().ok_or_else(missing)?;
        self.reporter.stage(&cell.subject(), Stage::Boot);
        let check = BootCheck {
            target: &cell.target,
            family,
            payload: tree,
            modules: in_load_order(&report),
            needed: &needed.modules,
        };
        // The virtual machine ends with the future that waits for it.
        tokio::select! {
            biased;
            () = self.cancel.cancelled() => Err(TargetError::Cancelled),
            booted = checker.boot_check(&check) => Ok(report.with_boot(booted?)),
        }
    }
}

/// Reads the payload's modules and says what the kernel would say.
async fn static_check(
    image: &DriverImage,
    (facts, signing): (&KernelFacts, Option<&Signing>),
    needed: &Needed,
    tree: &Path,
) -> Result<CheckReport, TargetError> {
    let (tree, mut facts): (PathBuf, _) = (tree.to_owned(), facts.clone());
    let signing = signing.cloned();
    let (required, needs) = (image.spec.modules.clone(), needed.tables.clone());
    blocking(move || {
        let mut modules = payload::read_modules(&tree)?;
        if let Some(signing) = signing {
            signing.anticipate(&mut modules, &mut facts);
        }
        Ok(kmod::check(&CheckRequest {
            kernel: &facts,
            needs: &needs,
            modules: &modules,
            required: &required,
            // Firmware may come with the base image or the node.
            files: None,
        }))
    })
    .await
}

/// The modules' files in load order.
fn in_load_order(report: &CheckReport) -> Vec<String> {
    let places = report.places_in_load_order().into_iter();
    places.filter_map(|place| report.modules.get(place)).map(|module| module.path.clone()).collect()
}

/// May a payload with this report be published?
fn accept(report: &CheckReport, unknown: UnknownPolicy) -> Result<(), TargetError> {
    let table = || kmod::table(report);
    match (report.verdict, unknown) {
        (Verdict::Loads, _) | (Verdict::Unknown, UnknownPolicy::Allow) => Ok(()),
        (Verdict::Unknown, UnknownPolicy::Deny) => Err(TargetError::Unknown {
            summary: report.summary(),
            settle: report.remedies(Verdict::Unknown),
            report: table(),
        }),
        (Verdict::Refused, _) => Err(match report.boot.as_ref().and_then(BootReport::failure) {
            Some(summary) => TargetError::BootRefused { summary, report: table() },
            None => TargetError::Refused { summary: report.summary(), report: table() },
        }),
    }
}

#[cfg(test)]
#[path = "check_tests.rs"]
mod tests;
