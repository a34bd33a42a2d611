//! Warns of published modules that nodes with Secure Boot refuse, according to the modules' check reports.

use std::collections::BTreeMap;

use farrier_builder::{
    images::{CHECK_REPORT, StoredImage},
    services::BuildServices,
};
use farrier_core::{
    image::{Digest, ImageName, Repository},
    plan::{Outcome, Plan},
};
use futures::future::join_all;
use kmod::Rule;
use serde_json::Value;

/// Remedy for the warning.
pub const HINT: &str = "sign the modules with a key of those nodes: `moduleSigning` in site.yaml; nodes without Secure Boot need nothing";

/// Returns a warning that names the images of a plan whose modules are not signed with a key that the kernels trust. Reads one
/// report per image, because signing does not differ between kernels.
pub async fn warning(services: &BuildServices, plan: &Plan) -> Option<String> {
    if services.definitions.site.module_signing.is_some() {
        return None;
    }
    let mut published: BTreeMap<&ImageName, (&Repository, &Digest)> = BTreeMap::new();
    for planned in &plan.cells {
        if let Outcome::UpToDate { cell, published: found, .. } = &planned.outcome {
            published.insert(&planned.image, (&cell.reference.repository, &found.digest));
        }
    }
    let refused = published.into_iter().map(|(name, (repository, digest))| async move {
        let report =
            StoredImage { services, repository, digest }.find_document(&CHECK_REPORT).await.ok()??;
        has_untrusted_modules(&serde_json::from_slice(&report).ok()?).then_some(name.as_str())
    });
    let refused: Vec<&str> = join_all(refused).await.into_iter().flatten().collect();
    let names = refused.join(", ");
    (!refused.is_empty()).then(|| {
        format!("nodes with Secure Boot refuse the modules of {names}: no key that their kernels trust signed them")
    })
}

/// Whether the document of a report warns of a module whose signature is missing or unknown.
fn has_untrusted_modules(document: &Value) -> bool {
    let modules = document["report"]["modules"].as_array().into_iter().flatten();
    let mut findings = modules.filter_map(|module| module["findings"].as_array()).flatten();
    findings.any(|finding| finding["rule"] == Rule::Signature.as_str() && finding["verdict"] == "loads")
}
