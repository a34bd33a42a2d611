//! The bill of materials, as SPDX 2.3 in JSON. Scanners read each SPDX package as content of the image, so the document has no
//! inputs of the build, patches or base image.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::{
    Provenance,
    bill::uuid_of,
    components::{Component, Components},
    materials::without_nulls,
};
use crate::{image::Digest, oci::CREATED};

/// The predicate type of an SPDX document as a signed statement, as `cosign` defines it.
pub const SPDX_PREDICATE: &str = "https://spdx.dev/Document";
const DOCUMENT: &str = "SPDXRef-DOCUMENT";
/// ID of the package that describes the image or output.
pub const SPDX_IMAGE: &str = "SPDXRef-image";

/// Returns the bill of materials of one image or output.
pub fn spdx(provenance: &Provenance) -> Value {
    let subject = &provenance.subject;
    let image = Component::of_subject(subject);
    let mut packages = vec![package(&image, image.kind.spdx.unwrap_or_default(), SPDX_IMAGE)];
    let mut licenses: Vec<&str> = image.license.into_iter().collect();
    let mut relationships = vec![relationship(DOCUMENT, "DESCRIBES", SPDX_IMAGE)];
    let Components { shipped, .. } = Components::of(provenance);
    for component in &shipped {
        licenses.extend(component.license);
        let Some(purpose) = component.kind.spdx else { continue };
        let id = format!("SPDXRef-{}", packages.len());
        packages.push(package(component, purpose, &id));
        relationships.push(relationship(SPDX_IMAGE, "CONTAINS", &id));
    }
    let mut document = json!({
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": DOCUMENT,
        "name": format!("{} {}", subject.name, subject.version),
        "creationInfo": {"created": CREATED, "creators": ["Tool: farrier"]},
        "packages": packages,
        "hasExtractedLicensingInfos": extracted_licenses(&licenses),
        "relationships": relationships,
    });
    document["documentNamespace"] = json!(format!("https://farrier.dev/spdx/{}", uuid_of(&document)));
    document
}

/// Returns a text for each license without an SPDX identifier, as SPDX requires.
fn extracted_licenses(licenses: &[&str]) -> Vec<Value> {
    let words = licenses.iter().flat_map(|license| license.split(['(', ')', ' ', '+']));
    let names: BTreeSet<&str> = words.filter(|word| word.starts_with("LicenseRef-")).collect();
    let text = "The supplier's own license, which farrier does not have.";
    names.into_iter().map(|name| json!({"licenseId": name, "extractedText": text})).collect()
}

fn relationship(from: &str, kind: &str, to: &str) -> Value {
    json!({"spdxElementId": from, "relationshipType": kind, "relatedSpdxElement": to})
}

fn package(component: &Component<'_>, purpose: &str, id: &str) -> Value {
    const UNKNOWN: &str = "NOASSERTION";
    let checksum = |digest: &Digest| json!([{"algorithm": "SHA256", "checksumValue": digest.hex()}]);
    let reference = |url: &String| json!([{"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": url}]);
    let comments = (!component.licenses.is_empty())
        .then(|| format!("The component states: {}", component.licenses.join(", ")));
    without_nulls(json!({
        "SPDXID": id,
        "name": component.name,
        "versionInfo": component.version,
        "supplier": component.supplier.map_or_else(|| UNKNOWN.to_owned(), |name| format!("Organization: {name}")),
        "downloadLocation": component.url.unwrap_or(UNKNOWN),
        "filesAnalyzed": false,
        "checksums": component.digest.map(checksum),
        "externalRefs": component.purl.as_ref().map(reference),
        "licenseConcluded": UNKNOWN,
        "licenseDeclared": component.license.unwrap_or(UNKNOWN),
        "licenseComments": comments,
        "copyrightText": UNKNOWN,
        "primaryPackagePurpose": purpose,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::provenance::testing::provenance;

    #[test]
    fn the_spdx_document() {
        insta::assert_snapshot!(serde_json::to_string_pretty(&spdx(&provenance())).unwrap());
    }
}
