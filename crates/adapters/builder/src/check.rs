//! The check stage predicts whether the kernel's module loader accepts a payload, and applies the definition's policy.
//! Modules are signed between the static check and the boot check.

use std::sync::Arc;

use farrier_core::{
    facts::ModuleSignerFact,
    image::{DriverImage, UnknownPolicy, checked::to_strings},
    site::UnprovenPolicy,
};
use farrier_inputs::KernelImageLookup;
use farrier_local::blocking::blocking;
use farrier_payload as payload;
use farrier_yaml::similar;
use kmod::{self, BootReport, CheckReport, CheckRequest, ExtraKernelFacts, KernelFacts, Rule, Verdict};

use super::{
    cell_build::{CellBuild, CheckedPayload, CompileInputs, Payload},
    firmware,
    sign::{self, Signing},
};
use crate::services::{BootCheck, BuildError, BuildProblem, ProblemKind, Result, Stage};

/// Fails fast if the definition asks for a boot check that this farrier cannot run.
pub(super) async fn ensure_boot_check_is_possible(build: &CellBuild<'_>) -> Result<()> {
    if !build.image.spec.check.boot {
        return Ok(());
    }
    if let Some(checker) = &build.services.tools.boot_checker {
        return checker.ensure_can_boot(build.cell.target.arch).await;
    }
    let name = &build.image.metadata.name;
    Err(BuildError::unmet(
        format!(
            "image {name} asks for a boot check (check.boot: true), but this farrier cannot boot kernels"
        ),
        "remove check.boot, or run a farrier that can boot kernels",
    ))
}

/// Checks a payload against the kernel's header set. Signs the modules if the site signs modules, and runs the boot check if
/// the definition asks for one. `previous` is the signer of a reused payload.
pub(super) async fn check(
    build: &CellBuild<'_>,
    compile_inputs: &CompileInputs,
    payload: Payload,
    previous: Option<&ModuleSignerFact>,
) -> Result<CheckedPayload> {
    build.stage(Stage::Check);
    let signing = sign::signing(build, &compile_inputs.headers, previous).await?;
    let report = static_check(build, compile_inputs, signing.as_ref(), &payload).await?;
    ensure_publishable(build, &report)?;
    sign::sign(build, signing, &payload).await?;
    let report = boot_check(build, compile_inputs, &payload, report).await?;
    ensure_publishable(build, &report)?;
    Ok(CheckedPayload::of(payload, &compile_inputs.headers, report))
}

/// Checks modules with the given facts about the kernel. If the verdict is unknown, fetches the kernel's own image, if
/// there is one, and checks again. The image is fetched only when needed, because it is a download of about 70 MB.
pub async fn check_with_kernel_image<E, F: Future<Output = Result<CheckReport, E>>>(
    mut facts: KernelFacts,
    check: impl Fn(KernelFacts) -> F,
    kernel_image_facts: impl Future<Output = Result<Option<ExtraKernelFacts>, E>>,
) -> Result<CheckReport, E> {
    let report = check(facts.clone()).await?;
    if report.verdict != Verdict::Unknown {
        return Ok(report);
    }
    match kernel_image_facts.await? {
        Some(extra) => {
            facts.beyond_headers = extra;
            check(facts).await
        }
        None => Ok(report),
    }
}

/// Checks the payload against the headers and the kernel image. Modules that are about to be signed count as signed.
pub(super) async fn static_check(
    build: &CellBuild<'_>,
    compile_inputs: &CompileInputs,
    signing: Option<&Signing>,
    payload: &Payload,
) -> Result<CheckReport> {
    let (tree, budget) = (payload.tree.clone(), Arc::clone(&payload.decompression));
    let mut modules = blocking(move || payload::read_modules(&tree, &budget)).await?;
    let files = firmware::files(build, payload, &modules).await?;
    let signing_key_id = signing.map(|signing| signing.mark_as_signed(&mut modules));
    let modules = Arc::new(modules);
    let check = |mut facts: KernelFacts| {
        facts.beyond_headers.trusted_keys.extend(signing_key_id.clone());
        let modules = Arc::clone(&modules);
        let (required, needs) = (to_strings(&build.image.spec.modules), compile_inputs.needed.tables.clone());
        let (deny_unproven, files) = (denies_unproven(build), files.clone());
        blocking(move || {
            let report = kmod::check(&CheckRequest {
                kernel: &facts,
                needs: &needs,
                modules: &modules,
                required: &required,
                files: files.as_deref(),
            });
            Ok(if deny_unproven { report.deny_unproven() } else { report })
        })
    };
    check_with_kernel_image(compile_inputs.headers.facts.clone(), check, kernel_image_facts(build)).await
}

/// Returns facts from the kernel's own image, if the family names one.
async fn kernel_image_facts(build: &CellBuild<'_>) -> Result<Option<ExtraKernelFacts>> {
    let CellBuild { services, cell, family, .. } = build;
    if family.spec.kernel_image.is_none() {
        return Ok(None);
    }
    let fetch = || services.fetcher.kernel_images().find(family, &cell.target);
    match services.process.retry("fetch kernel image", fetch).await? {
        KernelImageLookup::Found(kernel) => Ok(Some(services.fetcher.kernel_images().facts(&kernel).await?)),
        KernelImageLookup::Missing { .. } => Ok(None),
    }
}

/// Adds the result of a boot check, if the definition asks for one.
pub(super) async fn boot_check(
    build: &CellBuild<'_>,
    compile_inputs: &CompileInputs,
    payload: &Payload,
    report: CheckReport,
) -> Result<CheckReport> {
    let Some(checker) = build.services.tools.boot_checker.as_ref().filter(|_| build.image.spec.check.boot)
    else {
        return Ok(report);
    };
    build.stage(Stage::Boot);
    let indices = report.load_order_indices().into_iter();
    let in_load_order = indices.filter_map(|index| report.modules.get(index));
    let check = BootCheck {
        target: &build.cell.target,
        family: build.family,
        payload: &payload.tree,
        modules: in_load_order.map(|module| module.path.clone()).collect(),
        needed: &compile_inputs.needed.modules,
        decompression: Arc::clone(&payload.decompression),
    };
    // Dropping the future stops the virtual machine.
    tokio::select! {
        biased;
        () = build.services.process.cancel.cancelled() => Err(BuildError::Canceled),
        booted = checker.boot_check(&check) => Ok(report.with_boot(booted?)),
    }
}

/// Whether the site denies modules for which the check has no proof that they fit the kernel.
fn denies_unproven(build: &CellBuild<'_>) -> bool {
    build.services.definitions.site.check.unproven == UnprovenPolicy::Deny
}

/// Fails if a payload with this report must not be published.
fn ensure_publishable(build: &CellBuild<'_>, report: &CheckReport) -> Result<()> {
    let unknown = build.image.spec.check.unknown;
    let has_denied_modules = denies_unproven(build) && report.unproven() > 0;
    let boot_failure = report.boot.as_ref().and_then(BootReport::failure);
    let (kind, message, hint) = match (report.verdict, boot_failure) {
        (Verdict::Loads, _) => return Ok(()),
        (Verdict::Unknown, _) if has_denied_modules => (
            ProblemKind::Unknown,
            format!("nothing proves that the modules fit, and check.unproven of site.yaml is deny: {}", report.summary()),
            format!(
                "to prove it: {}; or accept such modules with check: {{unproven: allow}} in site.yaml",
                report.remedies(Verdict::Unknown).join("; ")
            ),
        ),
        (Verdict::Unknown, _) if unknown == UnknownPolicy::Allow => return Ok(()),
        (Verdict::Unknown, _) => (
            ProblemKind::Unknown,
            format!(
                "the check cannot tell whether the modules load, and check.unknown is deny: {}",
                report.summary()
            ),
            format!(
                "to settle it: {}; or accept the verdict with check.unknown: allow",
                report.remedies(Verdict::Unknown).join("; ")
            ),
        ),
        (Verdict::Refused, Some(failure)) => (
            ProblemKind::BootRefused,
            format!("the boot check failed: {failure}"),
            "the kernel itself refuses the modules: see its messages above; farrier does not retry until an input changes".to_owned(),
        ),
        (Verdict::Refused, None) => (
            ProblemKind::Refused,
            format!("check refused the modules: {}", report.summary()),
            missing_modules_hint(build.image, report)
                .unwrap_or_else(|| "the modules do not fit this kernel: see the report above".to_owned()),
        ),
    };
    let detail = report.to_string().lines().map(str::to_owned).collect();
    Err(BuildProblem { kind, message, detail, hint: Some(hint) }.into())
}

/// Returns the hint for a report that is refused only because required modules are absent.
fn missing_modules_hint(image: &DriverImage, report: &CheckReport) -> Option<String> {
    let missing = report.findings.iter().find(|finding| finding.rule == Rule::RequiredModule)?;
    if report.modules.iter().any(|module| module.verdict == Verdict::Refused) {
        return None;
    }
    let built = report.modules.iter().map(|module| module.name.as_str());
    let fix = similar(&missing.subject, built).map_or_else(
        || "correct it, or let the template install the module under /out".to_owned(),
        |near| format!("did you mean {near}?"),
    );
    let (name, absent) = (&image.metadata.name, &missing.subject);
    Some(format!("`modules` of driver image {name} has {absent}, which was not built: {fix}"))
}

#[cfg(test)]
#[path = "check_tests.rs"]
mod tests;
