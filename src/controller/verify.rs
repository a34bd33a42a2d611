//! Adapter: checks a published image with all that belongs to it: blobs, signature, check report, bill of materials,
//! provenance.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;

use super::{
    Controller, TargetError,
    documents::{BILL, CHECK_REPORT, Document, Kind, PROVENANCE},
    retry::chain,
    signatures::read_keys,
};
use crate::{
    image::{Digest, ImageReference, Repository, UnknownPolicy},
    oci::{Descriptor, ImageFacts, ImageManifest},
    provenance::{self, CHECK_REPORT_PREDICATE, CYCLONEDX_PREDICATE, PublicKey, SLSA_PREDICATE, Statement},
    registry::RegistryError,
};

/// How a check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckResult {
    /// As it should be.
    Ok,
    /// Not as it should be.
    Failed,
    /// There is nothing to check.
    Absent,
    /// Not asked for.
    Skipped,
}

impl CheckResult {
    /// The word in tables.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Failed => "FAILED",
            Self::Absent => "ABSENT",
            Self::Skipped => "skipped",
        }
    }
}

/// One check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VerifyCheck {
    /// What was checked.
    pub check: &'static str,
    /// How it ended.
    pub result: CheckResult,
    /// What was found.
    pub message: String,
    /// What to do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hint: Option<&'static str>,
}

/// All checks of one image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VerifyReport {
    /// The image, by digest where it is there.
    pub image: String,
    /// Did no check fail, and was everything there?
    pub verified: bool,
    /// The checks.
    pub checks: Vec<VerifyCheck>,
}

/// Collects the checks.
#[derive(Default)]
struct Checks(Vec<VerifyCheck>);

impl Checks {
    fn add(&mut self, check: &'static str, result: CheckResult, message: impl Into<String>) {
        self.0.push(VerifyCheck { check, result, message: message.into(), hint: None });
    }

    fn fails(
        &mut self,
        check: &'static str,
        result: CheckResult,
        message: impl Into<String>,
        hint: &'static str,
    ) {
        self.0.push(VerifyCheck { check, result, message: message.into(), hint: Some(hint) });
    }

    fn report(self, image: String) -> VerifyReport {
        let fine = |check: &VerifyCheck| matches!(check.result, CheckResult::Ok | CheckResult::Skipped);
        VerifyReport { image, verified: self.0.iter().all(fine), checks: self.0 }
    }
}

const PUSH_AGAIN: &str = "build it again with --push --force, or copy it again from where it is whole";
const SIGN: &str = "with the key in site.yaml (imageSigning), `farrier build --push` or `farrier run` signs what is \
                    published; or give the key that did sign with --key";
const BUILD_AGAIN: &str =
    "images of older versions of farrier have none: raise the version, or delete the tag, and build";
const NOT_AS_STORED: &str = "what the registry gives is not what was pushed: copy the image again from where it is whole, or \
                             build it again with --push --force";
const ALLOW: &str = "images of which it is not known whether they load pass where --definitions has the driver image, and that \
                     says `check: {unknown: allow}` (the default); `farrier check` says what would settle it";

/// What an image is checked against.
struct Subject<'a> {
    repository: &'a Repository,
    digest: Digest,
    facts: ImageFacts,
    /// Do the definitions here let an image pass of which it is not known whether it loads?
    unknown: bool,
    keys: &'a [PublicKey],
    /// What the keys signed.
    statements: Vec<Statement>,
}

impl Controller {
    /// The keys that images are checked with where none is named: those that the policy asks for, else the site's own.
    pub async fn verification_keys(
        &self,
        named: &[std::path::PathBuf],
    ) -> Result<Vec<PublicKey>, TargetError> {
        if !named.is_empty() {
            return read_keys(named.to_vec()).await;
        }
        let required = self.required_keys().await?;
        if !required.is_empty() {
            return Ok(required);
        }
        Ok(self.own_key().await?.into_iter().collect())
    }

    /// Checks an image. What is wrong with it is in the report; an error is a registry that does not answer.
    pub async fn verify(
        &self,
        reference: &ImageReference,
        keys: &[PublicKey],
        deep: bool,
    ) -> Result<VerifyReport, TargetError> {
        let mut checks = Checks::default();
        let ImageReference { repository, version } = reference;
        let registry = self.registry_of(repository);
        let stored = registry.manifest(repository, version).await?;
        let Some(stored) = stored else {
            checks.fails("manifest", CheckResult::Absent, format!("there is no {reference}"), PUSH_AGAIN);
            return Ok(checks.report(reference.to_string()));
        };
        let image = format!("{repository}@{}", stored.digest);
        let manifest = match ImageManifest::parse(&stored.bytes) {
            Ok(manifest) => manifest,
            Err(error) => {
                let hint = "give an image that farrier published, not an index of several";
                checks.fails("manifest", CheckResult::Failed, chain(&error), hint);
                return Ok(checks.report(image));
            }
        };
        checks.add("manifest", CheckResult::Ok, stored.digest.to_string());
        self.check_blobs(repository, &manifest, deep, &mut checks).await?;
        let facts = check_annotations(&manifest, &mut checks);
        let statements = self.attested(repository, &stored.digest, keys).await?;
        let unknown = self.accepts_unknown(repository);
        let subject = Subject { repository, digest: stored.digest, facts, unknown, keys, statements };
        self.check_signature(&subject, &mut checks).await?;
        if subject.facts.members.is_empty() {
            self.check_document(&subject, &CHECK_REPORT, CHECK_REPORT_PREDICATE, report_fits, &mut checks)
                .await?;
        } else {
            self.check_members(&subject, &mut checks).await?;
        }
        self.check_document(&subject, &BILL, CYCLONEDX_PREDICATE, bill_fits, &mut checks).await?;
        self.check_document(&subject, &PROVENANCE, SLSA_PREDICATE, provenance_fits, &mut checks).await?;
        Ok(checks.report(image))
    }

    /// Does the driver image's definition, as it is here, let `unknown` pass? It is the same word that decides about
    /// rollouts. Verification goes by the repository: what the image says of itself is what is to be verified.
    fn accepts_unknown(&self, repository: &Repository) -> bool {
        let name = repository.as_str().rsplit('/').next().unwrap_or_default();
        let image = self.definitions.images.values().find(|image| image.metadata.name.as_str() == name);
        image.is_some_and(|image| image.spec.check.unknown == UnknownPolicy::Allow)
    }

    /// A document beside the image. What cannot be read of it, as the registry has something else under its digest, is a
    /// finding, and not a fault.
    async fn found_document(
        &self,
        subject: &Subject<'_>,
        about: &Digest,
        kind: &Kind,
    ) -> Result<Result<Option<Document>, String>, TargetError> {
        match self.document(subject.repository, about, kind).await {
            Ok(found) => Ok(Ok(found)),
            Err(error @ (TargetError::Registry(_) | TargetError::Image(_))) if !error.is_unreachable() => {
                Ok(Err(format!("it cannot be read: {}", chain(&error))))
            }
            Err(error) => Err(error),
        }
    }

    /// Are all blobs there, and with `deep`, are they what their digests say?
    async fn check_blobs(
        &self,
        repository: &Repository,
        manifest: &ImageManifest,
        deep: bool,
        checks: &mut Checks,
    ) -> Result<(), TargetError> {
        let registry = self.registry_of(repository);
        let blobs: Vec<&Descriptor> = std::iter::once(&manifest.config).chain(&manifest.layers).collect();
        let mut wrong = Vec::new();
        for blob in &blobs {
            let digest = &blob.digest;
            if !registry.has_blob(repository, digest).await? {
                wrong.push(format!("{digest} is missing"));
            } else if deep {
                let work = self.cache.scratch()?;
                let file = work.path().join("blob");
                match registry.fetch_blob(repository, digest, &file).await {
                    Ok(()) => {}
                    Err(error @ RegistryError::Cancelled) => return Err(error.into()),
                    Err(error) if error.is_unreachable() => return Err(error.into()),
                    Err(error) => wrong.push(chain(&error)),
                }
            }
        }
        let bytes: u64 = blobs.iter().map(|blob| blob.size).sum();
        let how = if deep { "read and right" } else { "there" };
        if wrong.is_empty() {
            let said = format!("{} blobs of {bytes} bytes are {how}", blobs.len());
            checks.add("blobs", CheckResult::Ok, said);
        } else {
            checks.fails("blobs", CheckResult::Failed, wrong.join("; "), PUSH_AGAIN);
        }
        Ok(())
    }

    async fn check_signature(&self, subject: &Subject<'_>, checks: &mut Checks) -> Result<(), TargetError> {
        let Subject { repository, digest, keys, .. } = subject;
        if keys.is_empty() {
            let why = "no key is named: give --key, or imageSigning or policy.requireSigned in site.yaml";
            checks.add("signature", CheckResult::Skipped, why);
            return Ok(());
        }
        match self.signed_by(repository, digest, keys).await? {
            Ok(key) => checks.add("signature", CheckResult::Ok, format!("by key {}", key.fingerprint())),
            Err(why) if why == "it has no signature" => {
                checks.fails("signature", CheckResult::Absent, why, SIGN);
            }
            Err(why) => checks.fails("signature", CheckResult::Failed, why, SIGN),
        }
        Ok(())
    }

    /// A document: is it there, about this image, does it say what it must, and is it signed where keys are named?
    async fn check_document(
        &self,
        subject: &Subject<'_>,
        kind: &Kind,
        predicate_type: &str,
        fits: fn(&Value, &Subject<'_>) -> Result<String, Misfit>,
        checks: &mut Checks,
    ) -> Result<(), TargetError> {
        let name = kind.name;
        let found = match self.found_document(subject, &subject.digest, kind).await? {
            Ok(found) => found,
            Err(why) => {
                checks.fails(name, CheckResult::Failed, why, NOT_AS_STORED);
                return Ok(());
            }
        };
        let Some(found) = found else {
            checks.fails(
                name,
                CheckResult::Absent,
                format!("there is no {name} beside the image"),
                BUILD_AGAIN,
            );
            return Ok(());
        };
        let Ok(mut predicate) = serde_json::from_slice::<Value>(&found.content) else {
            checks.fails(name, CheckResult::Failed, "it is no JSON", BUILD_AGAIN);
            return Ok(());
        };
        if *kind == PROVENANCE {
            let statement = Statement::parse(&found.content);
            match statement.map(|one| (provenance::is_about(&one, &subject.digest), one.predicate)) {
                Ok((true, inner)) => predicate = inner,
                Ok((false, _)) => {
                    checks.fails(name, CheckResult::Failed, "it is about another image", BUILD_AGAIN);
                    return Ok(());
                }
                Err(error) => {
                    checks.fails(name, CheckResult::Failed, chain(&error), BUILD_AGAIN);
                    return Ok(());
                }
            }
        }
        let said = match fits(&predicate, subject) {
            Ok(said) => said,
            Err(Misfit { why, hint }) => {
                checks.fails(name, CheckResult::Failed, why, hint);
                return Ok(());
            }
        };
        if subject.keys.is_empty() {
            checks.add(name, CheckResult::Ok, said);
            return Ok(());
        }
        let of_kind = |one: &&Statement| one.predicate_type == predicate_type;
        let mut signed = subject.statements.iter().filter(of_kind).peekable();
        if signed.peek().is_none() {
            checks.fails(name, CheckResult::Failed, "no accepted key has signed it", SIGN);
        } else if signed.any(|statement| statement.predicate == predicate) {
            checks.add(name, CheckResult::Ok, format!("{said}, signed"));
        } else {
            let why = "what is signed differs from what stands beside the image";
            checks.fails(name, CheckResult::Failed, why, SIGN);
        }
        Ok(())
    }

    /// An image for several kernels has the check reports of its members.
    async fn check_members(&self, subject: &Subject<'_>, checks: &mut Checks) -> Result<(), TargetError> {
        let name = CHECK_REPORT.name;
        let (mut wrong, mut unknown) = (Vec::new(), Vec::new());
        let mut hint = BUILD_AGAIN;
        for (kernel, digest) in &subject.facts.members {
            let found = match self.found_document(subject, digest, &CHECK_REPORT).await? {
                Ok(found) => found,
                Err(why) => {
                    hint = NOT_AS_STORED;
                    wrong.push(format!("that of {kernel}: {why}"));
                    continue;
                }
            };
            let report = found.and_then(|found| serde_json::from_slice::<Value>(&found.content).ok());
            match report.as_ref().map(|report| report["report"]["verdict"].as_str().unwrap_or("none")) {
                Some("loads") => {}
                Some("unknown") if subject.unknown => unknown.push(kernel.to_string()),
                Some("unknown") => {
                    hint = ALLOW;
                    wrong.push(format!("that of {kernel} says unknown"));
                }
                Some(other) => wrong.push(format!("that of {kernel} says {other}")),
                None => wrong.push(format!("the image for {kernel} has none")),
            }
        }
        if wrong.is_empty() {
            let count = subject.facts.members.len();
            let said = match unknown.len() {
                0 => format!("those of {count} kernels say loads"),
                _ => {
                    format!(
                        "those of {count} kernels say loads or, which is allowed, unknown: {}",
                        unknown.join(", ")
                    )
                }
            };
            checks.add(name, CheckResult::Ok, said);
        } else {
            checks.fails(name, CheckResult::Failed, wrong.join("; "), hint);
        }
        Ok(())
    }
}

/// Are farrier's notes there and readable?
fn check_annotations(manifest: &ImageManifest, checks: &mut Checks) -> ImageFacts {
    const NAME: &str = "annotations";
    let hint = "farrier verifies images that farrier published";
    match ImageFacts::from_annotations(&manifest.annotations) {
        Ok(facts) => {
            let kernels: Vec<String> = match (&facts.kernel_release, facts.members.is_empty()) {
                (Some(kernel), _) => vec![kernel.to_string()],
                (None, _) => facts.members.keys().map(ToString::to_string).collect(),
            };
            match (facts.input_hash, kernels.is_empty()) {
                (Some(hash), false) => {
                    let said = format!("inputs {}, for {}", hash.short(), kernels.join(", "));
                    checks.add(NAME, CheckResult::Ok, said);
                }
                _ => checks.fails(NAME, CheckResult::Absent, "no input hash or no kernel is noted", hint),
            }
            facts
        }
        Err(error) => {
            checks.fails(NAME, CheckResult::Failed, chain(&error), hint);
            ImageFacts::default()
        }
    }
}

/// Why a document does not do.
#[derive(Debug)]
struct Misfit {
    why: String,
    hint: &'static str,
}

impl From<String> for Misfit {
    fn from(why: String) -> Self {
        Self { why, hint: BUILD_AGAIN }
    }
}

fn report_fits(document: &Value, subject: &Subject<'_>) -> Result<String, Misfit> {
    let report = &document["report"];
    let (kernel, verdict) = (report["kernel"].as_str(), report["verdict"].as_str().unwrap_or("nothing"));
    let wanted = subject.facts.kernel_release.as_ref().map(ToString::to_string);
    if kernel != wanted.as_deref() {
        return Err(format!("it is about kernel {}", kernel.unwrap_or("of no name")).into());
    }
    let kernel = kernel.unwrap_or_default();
    let noted = subject.facts.verdict.map(crate::kmod::Verdict::as_str);
    match (verdict, noted) {
        ("loads", Some("loads")) => Ok(format!("loads on {kernel}")),
        ("unknown", Some("unknown")) if subject.unknown => Ok(format!(
            "unknown on {kernel}, which the definition allows{}",
            subject.facts.check_summary.as_ref().map(|words| format!(" ({words})")).unwrap_or_default()
        )),
        ("unknown", Some("unknown")) => {
            Err(Misfit { why: "it says unknown, and nothing here allows that".to_owned(), hint: ALLOW })
        }
        (said, Some(noted)) if said != noted => {
            Err(format!("it says {said}, and the image's annotation {noted}").into())
        }
        (said, _) => Err(format!("it says {said}").into()),
    }
}

fn bill_fits(bill: &Value, subject: &Subject<'_>) -> Result<String, Misfit> {
    let component = &bill["metadata"]["component"];
    if component["hashes"][0]["content"].as_str() != Some(subject.digest.hex()) {
        return Err("it is about another image".to_owned().into());
    }
    let mut properties = BTreeMap::new();
    for property in component["properties"].as_array().into_iter().flatten() {
        properties.insert(property["name"].as_str().unwrap_or_default(), property["value"].as_str());
    }
    let hash = properties.get("farrier:input-hash").copied().flatten();
    same_inputs(hash, subject)?;
    let count = bill["components"].as_array().map_or(0, Vec::len);
    Ok(format!("CycloneDX {}, {count} components", bill["specVersion"].as_str().unwrap_or_default()))
}

fn provenance_fits(predicate: &Value, subject: &Subject<'_>) -> Result<String, Misfit> {
    let definition = &predicate["buildDefinition"];
    same_inputs(definition["internalParameters"]["inputHash"].as_str(), subject)?;
    let kernel = definition["externalParameters"]["kernel"]["release"].as_str();
    let noted = subject.facts.kernel_release.as_ref().map(ToString::to_string);
    if kernel != noted.as_deref() {
        return Err(format!("it is about kernel {}", kernel.unwrap_or("of no name")).into());
    }
    let count = definition["resolvedDependencies"].as_array().map_or(0, Vec::len);
    let builder = &predicate["runDetails"]["builder"]["version"]["farrier"];
    Ok(format!("SLSA v1, {count} inputs, farrier {}", builder.as_str().unwrap_or("of no version")))
}

fn same_inputs(hash: Option<&str>, subject: &Subject<'_>) -> Result<(), String> {
    let noted = subject.facts.input_hash.map(|hash| hash.to_string());
    if hash.is_some() && hash == noted.as_deref() {
        return Ok(());
    }
    Err("its input hash is not that of the image's annotation".to_owned())
}

#[cfg(test)]
#[path = "verify_tests.rs"]
mod tests;
