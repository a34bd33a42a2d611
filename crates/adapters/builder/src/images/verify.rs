//! Verifies a published image: blobs, signature, check report, bill of materials, provenance.

use std::collections::{BTreeMap, BTreeSet};

use farrier_core::{
    facts::ImageFacts,
    image::{Definitions, Digest, ImageReference, Repository, UnknownPolicy, Version},
    provenance::{self, PublicKey, RequiredSigners, Statement},
};
use kmod::Verdict;
use oci::{AnyManifest, Descriptor, ImageIndex, ImageManifest, error_chain};
use serde::Serialize;
use serde_json::Value;

use super::{
    documents::{BILL_OF_MATERIALS, CHECK_REPORT, DocumentKind, PROVENANCE, SPDX},
    signatures::StoredImage,
};
use crate::services::{BuildError, BuildServices, ImageAccess, Result};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckResult {
    /// The check passed.
    Ok,
    /// The check found a problem.
    Failed,
    /// The object to check does not exist.
    Absent,
    /// The check was not requested.
    Skipped,
}

impl CheckResult {
    /// Result as shown in tables.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Failed => "FAILED",
            Self::Absent => "ABSENT",
            Self::Skipped => "skipped",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VerifyCheck {
    /// Name of the check.
    pub check: &'static str,
    pub result: CheckResult,
    /// Details of the result.
    pub message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hint: Option<&'static str>,
}

/// All checks of one image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VerifyReport {
    /// The image, by digest if it exists.
    pub image: String,
    /// Whether the image is complete, passes all checks, and is signed by an accepted key.
    pub verified: bool,
    pub checks: Vec<VerifyCheck>,
    /// Aspects that were not checked, with the reason or the remedy.
    pub not_looked_at: Vec<&'static str>,
    /// For an index, the reports of its images.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub platforms: Vec<Self>,
}

impl VerifyReport {
    /// Whether no check found a problem. Skipped checks count as passed here, but not for `verified`.
    pub fn has_no_problems(&self) -> bool {
        self.checks.iter().all(|check| matches!(check.result, CheckResult::Ok | CheckResult::Skipped))
            && self.platforms.iter().all(Self::has_no_problems)
    }
}

/// A problem that a check found.
#[derive(Debug)]
struct FailedCheck {
    result: CheckResult,
    why: String,
    hint: &'static str,
}

impl FailedCheck {
    fn failed(why: impl Into<String>, hint: &'static str) -> Self {
        Self { result: CheckResult::Failed, why: why.into(), hint }
    }

    fn absent(why: impl Into<String>, hint: &'static str) -> Self {
        Self { result: CheckResult::Absent, why: why.into(), hint }
    }
}

impl From<String> for FailedCheck {
    fn from(why: String) -> Self {
        Self::failed(why, BUILD_AGAIN)
    }
}

/// Details of a passed check, or the problem.
type Outcome = Result<String, FailedCheck>;

/// Collects the results of checks.
#[derive(Default)]
struct Checks {
    done: Vec<VerifyCheck>,
    not_looked_at: Vec<&'static str>,
}

impl Checks {
    fn add(&mut self, check: &'static str, outcome: Outcome) {
        let (result, message, hint) = match outcome {
            Ok(message) => (CheckResult::Ok, message, None),
            Err(FailedCheck { result, why, hint }) => (result, why, Some(hint)),
        };
        self.done.push(VerifyCheck { check, result, message, hint });
    }

    fn report(self, image: String) -> VerifyReport {
        let Self { done: checks, not_looked_at } = self;
        let verified = checks.iter().all(|check| check.result == CheckResult::Ok);
        VerifyReport { image, verified, checks, not_looked_at, platforms: Vec::new() }
    }
}

const LISTED_BUT_GONE: &str = "listed, but gone: the registry deleted its manifest";

// Hints of failed checks.
const USE_PUBLISHED_IMAGE: &str = "give an image that farrier published";
const PUSH_AGAIN: &str = "build it again with --push --force, or copy it again from an intact registry";
const SIGN: &str = "pass the key that signed it with --key, or sign it with imageSigning in site.yaml and \
    `farrier build --push --force`; `skopeo copy` drops signatures: use `oras cp -r` or a bundle";
const BUILD_AGAIN: &str = "`skopeo copy` drops documents: use `oras cp -r` or a bundle; an image of an older farrier has \
    none: raise its version and build it";
const NOT_AS_STORED: &str = "the registry returns other content than was pushed: copy the image again from \
    an intact registry, or build it again with --push --force";
const ALLOW: &str = "the verdict `unknown` is accepted if --definitions has the driver image with `check: \
    {unknown: allow}` (the default); run `farrier check` to see what would settle it";

// Aspects that were not checked.
const UNCHECKED_SIGNATURES: &str = "the signatures of the image and of its documents: anyone may have pushed it \
    (--insecure-no-signature)";
const UNCHECKED_CONTENT: &str =
    "the content of the blobs: the registry has their digests (pass --deep to read them)";
const UNCHECKED_MEMBERS: &str = "the signatures of its members' check reports (verify each member)";

/// The image and the facts to check it against.
struct Subject<'a> {
    image: StoredImage<'a>,
    facts: ImageFacts,
    /// Whether the local definition allows the verdict `unknown`.
    allows_unknown: bool,
    /// Required signers; `None` if the caller gave no key.
    signers: Option<&'a RequiredSigners>,
    /// Statements signed by any of the keys.
    statements: Vec<Statement>,
}

/// Verifies an image. Without `signers`, signatures are not checked. Problems of the image are in the report; an error means
/// that the registry could not be read.
pub async fn verify(
    services: &BuildServices,
    reference: &ImageReference,
    signers: Option<&RequiredSigners>,
    deep: bool,
) -> Result<VerifyReport> {
    verify_manifest(services, reference, signers, deep, false).await
}

async fn verify_manifest(
    services: &BuildServices,
    reference: &ImageReference,
    signers: Option<&RequiredSigners>,
    deep: bool,
    is_entry: bool,
) -> Result<VerifyReport> {
    let mut checks = Checks::default();
    checks.not_looked_at.extend(signers.is_none().then_some(UNCHECKED_SIGNATURES));
    checks.not_looked_at.extend((!deep).then_some(UNCHECKED_CONTENT));
    let repository = &reference.repository;
    let Some(stored) = services.images.manifest(reference).await? else {
        checks.add("manifest", Err(FailedCheck::absent(format!("there is no {reference}"), PUSH_AGAIN)));
        return Ok(checks.report(reference.to_string()));
    };
    let name = format!("{repository}@{}", stored.digest);
    let manifest = match AnyManifest::parse(&stored.bytes) {
        Ok(AnyManifest::Image(manifest)) => manifest,
        Ok(AnyManifest::Index(index)) => {
            if is_entry || has_repeated_entry(&index) || !index.is_canonical(&stored.bytes) {
                let reason =
                    "farrier did not write this index, and other programs may find other images in it";
                checks.add("manifest", Err(FailedCheck::failed(reason.to_owned(), USE_PUBLISHED_IMAGE)));
                return Ok(checks.report(name));
            }
            let report = Checks::default().report(name);
            return verify_index(services, repository, &index, signers, deep, report).await;
        }
        Err(error) => {
            checks.add("manifest", Err(FailedCheck::failed(error_chain(&error), USE_PUBLISHED_IMAGE)));
            return Ok(checks.report(name));
        }
    };
    checks.add("manifest", Ok(stored.digest.to_string()));
    checks.add("blobs", check_blobs(&services.images, repository, &manifest, deep).await?);
    let (facts, annotations) = check_annotations(&manifest);
    checks.add("annotations", annotations);
    let keys: Vec<&PublicKey> = signers.into_iter().flat_map(RequiredSigners::keys).collect();
    let image = StoredImage { services, repository, digest: &stored.digest };
    let statements = if keys.is_empty() { Vec::new() } else { image.all_statements(&keys).await? };
    let allows_unknown = accepts_unknown(&services.definitions, repository);
    let subject = Subject { image, facts, allows_unknown, signers, statements };
    check_signature(&subject, &mut checks).await?;
    if subject.facts.members.is_empty() {
        checks.add(CHECK_REPORT.name, check_document(&subject, &CHECK_REPORT, check_report).await?);
    } else {
        checks.add(CHECK_REPORT.name, check_members(&subject).await?);
        checks.not_looked_at.extend(signers.is_some().then_some(UNCHECKED_MEMBERS));
    }
    checks.add(BILL_OF_MATERIALS.name, check_document(&subject, &BILL_OF_MATERIALS, check_bill).await?);
    checks.add(SPDX.name, check_document(&subject, &SPDX, check_spdx).await?);
    checks.add(PROVENANCE.name, check_document(&subject, &PROVENANCE, check_provenance).await?);
    Ok(checks.report(name))
}

/// Whether an index lists a manifest twice. Repeated or nested indexes would multiply the work.
fn has_repeated_entry(index: &ImageIndex) -> bool {
    let digests: BTreeSet<&Digest> = index.manifests.iter().map(|entry| &entry.digest).collect();
    digests.len() < index.manifests.len()
}

/// Verifies each image of an index. The caller has checked that farrier can have written the index.
async fn verify_index(
    services: &BuildServices,
    repository: &Repository,
    index: &ImageIndex,
    signers: Option<&RequiredSigners>,
    deep: bool,
    mut report: VerifyReport,
) -> Result<VerifyReport> {
    for entry in &index.manifests {
        let version = Version::Digest(entry.digest.clone());
        let reference = ImageReference { repository: repository.clone(), version };
        report.platforms.push(Box::pin(verify_manifest(services, &reference, signers, deep, true)).await?);
    }
    report.verified = !report.platforms.is_empty() && report.platforms.iter().all(|image| image.verified);
    let result = if report.platforms.is_empty() { CheckResult::Absent } else { CheckResult::Ok };
    let message = format!("an index of {} images", index.manifests.len());
    report.checks.push(VerifyCheck { check: "manifest", result, message, hint: None });
    Ok(report)
}

/// Whether the local definition of the driver image allows the verdict `unknown`. Rollouts use the same field. The
/// repository's name selects the definition, because the image's own annotations are not trusted yet.
fn accepts_unknown(definitions: &Definitions, repository: &Repository) -> bool {
    let name = repository.as_str().rsplit('/').next().unwrap_or_default();
    definitions.images.get(name).is_some_and(|image| image.spec.check.unknown == UnknownPolicy::Allow)
}

/// Checks that all blobs exist; with `deep`, also verifies their digests.
async fn check_blobs(
    access: &ImageAccess,
    repository: &Repository,
    manifest: &ImageManifest,
    deep: bool,
) -> Result<Outcome> {
    let registry = access.registry_of(repository);
    // A hostile manifest can name a large blob 500 times.
    let mut seen = BTreeSet::new();
    let blobs: Vec<&Descriptor> =
        manifest.blobs().filter(|blob| seen.insert((&blob.digest, blob.size))).collect();
    let mut problems = Vec::new();
    for blob in &blobs {
        let digest = &blob.digest;
        if !registry.has_blob(repository, digest).await? {
            problems.push(format!("{digest} is missing"));
        } else if deep {
            let work = access.cache.scratch()?;
            match registry.fetch_blob(repository, digest, blob.size, &work.path().join("blob")).await {
                Ok(()) => {}
                Err(error) if error.is_unreachable() => return Err(error.into()),
                Err(error) => problems.push(error_chain(&error)),
            }
        }
    }
    if !problems.is_empty() {
        return Ok(Err(FailedCheck::failed(problems.join("; "), PUSH_AGAIN)));
    }
    let bytes = blobs.iter().fold(0, |sum: u64, blob| sum.saturating_add(blob.size));
    let state = if deep { "verified" } else { "there" };
    Ok(Ok(format!("{} blobs with {bytes} bytes in total are {state}", blobs.len())))
}

/// Checks that farrier's annotations exist and can be parsed.
fn check_annotations(manifest: &ImageManifest) -> (ImageFacts, Outcome) {
    let hint = "farrier verifies images that farrier published";
    let facts = match ImageFacts::from_annotations(&manifest.annotations) {
        Ok(facts) => facts,
        Err(error) => return (ImageFacts::default(), Err(FailedCheck::failed(error_chain(&error), hint))),
    };
    let kernels: Vec<String> = match &facts.kernel_release {
        Some(kernel) => vec![kernel.to_string()],
        None => facts.members.keys().map(ToString::to_string).collect(),
    };
    let outcome = match (facts.input_hash, kernels.is_empty()) {
        (Some(hash), false) => Ok(format!("inputs {}, for {}", hash.short(), kernels.join(", "))),
        _ => Err(FailedCheck::absent("no input hash or no kernel is recorded", hint)),
    };
    (facts, outcome)
}

async fn check_signature(subject: &Subject<'_>, checks: &mut Checks) -> Result<()> {
    let Subject { image, signers, .. } = subject;
    let Some(signers) = signers else {
        let (result, message) = (CheckResult::Skipped, "no key given".to_owned());
        checks.done.push(VerifyCheck { check: "signature", result, message, hint: None });
        return Ok(());
    };
    let keys: Vec<&PublicKey> = signers.keys().collect();
    // Read all signatures, so that a damaged signature is reported even if the others suffice.
    let found = image.find_signatures(&keys, &|_| false).await?;
    let signer_check = signers.check(&found);
    let revoked = if signer_check.is_enough() { String::new() } else { image.revoked_signers_note().await? };
    let is_deleted = found.is_empty() && image.is_referrer_deleted(provenance::SIGSTORE_BUNDLE).await?;
    checks.add(
        "signature",
        match (signer_check.is_enough(), found.unread()) {
            (true, None) => Ok(signer_check.to_string()),
            (true, Some(why)) => {
                Err(FailedCheck::failed(format!("its signature cannot be read: {why}"), NOT_AS_STORED))
            }
            (false, _) if is_deleted => Err(FailedCheck::absent(format!("it is {LISTED_BUT_GONE}"), SIGN)),
            (false, _) if found.is_empty() => Err(FailedCheck::absent(signer_check.to_string(), SIGN)),
            (false, _) => Err(FailedCheck::failed(format!("{signer_check}{revoked}"), SIGN)),
        },
    );
    Ok(())
}

/// Reads a document about an image. Unreadable content is a failed check and not an error, for example content that
/// does not match its digest.
async fn read_document(
    image: StoredImage<'_>,
    kind: &DocumentKind,
) -> Result<Result<Option<Vec<u8>>, FailedCheck>> {
    let document = image.find_document(kind).await;
    if matches!(document, Ok(None)) && image.is_referrer_deleted(kind.media_type).await? {
        return Ok(Err(FailedCheck::absent(format!("the {} is {LISTED_BUT_GONE}", kind.name), PUSH_AGAIN)));
    }
    match document {
        Ok(document) => Ok(Ok(document)),
        Err(error @ (BuildError::Registry(_) | BuildError::Image(_))) if !error.is_unreachable() => {
            Ok(Err(FailedCheck::failed(format!("it cannot be read: {}", error_chain(&error)), NOT_AS_STORED)))
        }
        Err(error) => Err(error),
    }
}

/// Checks that a document exists, is about this image and has the expected content. With required signers, also checks
/// that the document is signed.
async fn check_document(
    subject: &Subject<'_>,
    kind: &DocumentKind,
    check: fn(&Value, &Subject<'_>) -> Outcome,
) -> Result<Outcome> {
    let content = read_document(subject.image, kind).await?;
    Ok(content.and_then(|content| match content {
        Some(content) => judge_document(subject, kind, &content, check),
        None => Err(FailedCheck::absent(format!("the image has no {}", kind.name), BUILD_AGAIN)),
    }))
}

fn judge_document(
    subject: &Subject<'_>,
    kind: &DocumentKind,
    content: &[u8],
    check: fn(&Value, &Subject<'_>) -> Outcome,
) -> Outcome {
    let mut predicate: Value = serde_json::from_slice(content).map_err(|_| "it is not JSON".to_owned())?;
    if *kind == PROVENANCE {
        let statement = Statement::parse(content).map_err(|error| error_chain(&error))?;
        if !provenance::is_about(&statement, subject.image.digest) {
            return Err("it is about another image".to_owned().into());
        }
        predicate = statement.predicate;
    }
    let summary = check(&predicate, subject)?;
    if subject.signers.is_none() {
        return Ok(summary);
    }
    let of_kind = |statement: &&Statement| statement.predicate_type == kind.predicate_type;
    let mut signed = subject.statements.iter().filter(of_kind).peekable();
    if signed.peek().is_none() {
        return Err(FailedCheck::failed("it is not signed with an accepted key", SIGN));
    }
    if !signed.any(|statement| statement.predicate == predicate) {
        return Err(FailedCheck::failed("the signed document differs from the attached document", SIGN));
    }
    Ok(format!("{summary}, signed"))
}

/// Checks the reports of a union image's members, which are images for single kernels. The union image has no report.
async fn check_members(subject: &Subject<'_>) -> Result<Outcome> {
    let (mut problems, mut unknown) = (Vec::new(), Vec::new());
    let mut hint = BUILD_AGAIN;
    for (kernel, digest) in &subject.facts.members {
        let member = StoredImage { digest, ..subject.image };
        let content = match read_document(member, &CHECK_REPORT).await? {
            Ok(content) => content,
            Err(failed) => {
                hint = failed.hint;
                problems.push(format!("report for {kernel}: {}", failed.why));
                continue;
            }
        };
        let report = content.and_then(|content| serde_json::from_slice::<Value>(&content).ok());
        match report.as_ref().map(|report| report["report"]["verdict"].as_str().unwrap_or("none")) {
            Some("loads") => {}
            Some("unknown") if subject.allows_unknown => unknown.push(kernel.to_string()),
            Some(verdict) => {
                if verdict == "unknown" {
                    hint = ALLOW;
                }
                problems.push(format!("report for {kernel}: verdict {verdict}"));
            }
            None => problems.push(format!("report for {kernel} is missing")),
        }
    }
    if !problems.is_empty() {
        return Ok(Err(FailedCheck::failed(problems.join("; "), hint)));
    }
    let count = subject.facts.members.len();
    Ok(Ok(match unknown.len() {
        0 => format!("reports for {count} kernels: verdict loads"),
        _ => format!(
            "reports for {count} kernels: verdict loads, or unknown, which the definition allows: {}",
            unknown.join(", ")
        ),
    }))
}

fn about_other_kernel(kernel: Option<&str>) -> String {
    kernel.map_or_else(|| "it names no kernel".to_owned(), |kernel| format!("it is about kernel {kernel}"))
}

fn check_report(document: &Value, subject: &Subject<'_>) -> Outcome {
    let report = &document["report"];
    let (kernel, verdict) = (report["kernel"].as_str(), report["verdict"].as_str().unwrap_or("nothing"));
    let recorded_kernel = subject.facts.kernel_release.as_ref().map(ToString::to_string);
    if kernel != recorded_kernel.as_deref() {
        return Err(about_other_kernel(kernel).into());
    }
    let kernel = kernel.unwrap_or_default();
    let recorded = subject.facts.verdict.map(Verdict::as_str);
    match (verdict, recorded) {
        ("loads", Some("loads")) => Ok(format!("loads on {kernel}")),
        ("unknown", Some("unknown")) if subject.allows_unknown => Ok(format!(
            "unknown on {kernel}, which the definition allows{}",
            subject.facts.check_summary.as_ref().map(|summary| format!(" ({summary})")).unwrap_or_default()
        )),
        ("unknown", Some("unknown")) => {
            Err(FailedCheck::failed("verdict unknown, which no definition allows", ALLOW))
        }
        (_, Some(recorded)) if verdict != recorded => {
            Err(format!("verdict {verdict}, but the image's annotation says {recorded}").into())
        }
        _ => Err(format!("verdict {verdict}").into()),
    }
}

fn check_bill(bill: &Value, subject: &Subject<'_>) -> Outcome {
    let component = &bill["metadata"]["component"];
    if component["hashes"][0]["content"].as_str() != Some(subject.image.digest.hex()) {
        return Err("it is about another image".to_owned().into());
    }
    let mut properties = BTreeMap::new();
    for property in component["properties"].as_array().into_iter().flatten() {
        properties.insert(property["name"].as_str().unwrap_or_default(), property["value"].as_str());
    }
    let hash = properties.get("farrier:input-hash").copied().flatten();
    check_input_hash(hash, subject)?;
    let count = bill["components"].as_array().map_or(0, Vec::len);
    Ok(format!("CycloneDX {}, {count} components", bill["specVersion"].as_str().unwrap_or_default()))
}

/// SPDX has no property for the input hash, so the document is compared with the image's digest only.
fn check_spdx(document: &Value, subject: &Subject<'_>) -> Outcome {
    let packages = document["packages"].as_array().map_or(&[][..], Vec::as_slice);
    let described = packages.iter().find(|package| package["SPDXID"] == provenance::SPDX_IMAGE);
    let digest = described.and_then(|image| image["checksums"][0]["checksumValue"].as_str());
    if digest != Some(subject.image.digest.hex()) {
        return Err("it is about another image".to_owned().into());
    }
    let version = document["spdxVersion"].as_str().unwrap_or_default();
    Ok(format!("{version}, {} packages", packages.len()))
}

fn check_provenance(predicate: &Value, subject: &Subject<'_>) -> Outcome {
    let definition = &predicate["buildDefinition"];
    check_input_hash(definition["internalParameters"]["inputHash"].as_str(), subject)?;
    let kernel = definition["externalParameters"]["kernel"]["release"].as_str();
    let recorded = subject.facts.kernel_release.as_ref().map(ToString::to_string);
    if kernel != recorded.as_deref() {
        return Err(about_other_kernel(kernel).into());
    }
    let count = definition["resolvedDependencies"].as_array().map_or(0, Vec::len);
    let builder = &predicate["runDetails"]["builder"]["version"]["farrier"];
    Ok(format!("SLSA v1, {count} inputs, farrier {}", builder.as_str().unwrap_or("without a version")))
}

fn check_input_hash(hash: Option<&str>, subject: &Subject<'_>) -> Result<(), String> {
    let recorded = subject.facts.input_hash.map(|hash| hash.to_string());
    if hash.is_some() && hash == recorded.as_deref() {
        return Ok(());
    }
    Err("its input hash differs from the image's annotation".to_owned())
}

#[cfg(test)]
#[path = "verify_tests.rs"]
mod tests;
