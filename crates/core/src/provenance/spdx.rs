//! The bill of materials, as SPDX 2.3 in JSON. Scanners read each SPDX package as content of the image, so the document has no
//! inputs of the build, patches or base image.

use serde_json::{Value, json};

use super::{
    Provenance,
    bill::uuid_of,
    components::{Component, Components, Kind},
    materials::without_nulls,
    purl,
};
use crate::{image::Digest, oci::CREATED};

/// The predicate type of an SPDX document as a signed statement, as `cosign` defines it.
pub const SPDX_PREDICATE: &str = "https://spdx.dev/Document";
const DOCUMENT: &str = "SPDXRef-DOCUMENT";
const IMAGE: &str = "SPDXRef-image";

/// Returns the bill of materials of one image.
pub fn spdx(provenance: &Provenance) -> Value {
    let subject = &provenance.subject;
    let image = Component {
        kind: Kind::Image,
        reference: String::new(),
        name: &subject.name,
        version: Some(&subject.version),
        digest: Some(&subject.digest),
        purl: Some(purl::of_image(&subject.name, &subject.digest, None)),
        url: None,
        licenses: Vec::new(),
        supplier: None,
        properties: Vec::new(),
    };
    let mut packages = vec![package(&image, "CONTAINER", IMAGE)];
    let mut relationships = vec![relationship(DOCUMENT, "DESCRIBES", IMAGE)];
    for component in &Components::of(provenance).shipped {
        let Some(purpose) = component.kind.purpose() else { continue };
        let id = format!("SPDXRef-{}", packages.len());
        packages.push(package(component, purpose, &id));
        relationships.push(relationship(IMAGE, "CONTAINS", &id));
    }
    let mut document = json!({
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": DOCUMENT,
        "name": format!("{} {}", subject.name, subject.version),
        "creationInfo": {"created": CREATED, "creators": ["Tool: farrier"]},
        "packages": packages,
        "relationships": relationships,
    });
    document["documentNamespace"] = json!(format!("https://farrier.dev/spdx/{}", uuid_of(&document)));
    document
}

fn relationship(from: &str, kind: &str, to: &str) -> Value {
    json!({"spdxElementId": from, "relationshipType": kind, "relatedSpdxElement": to})
}

fn package(component: &Component<'_>, purpose: &str, id: &str) -> Value {
    const UNKNOWN: &str = "NOASSERTION";
    let Component {
        kind: _,
        reference: _,
        name,
        version,
        digest,
        purl,
        url,
        licenses,
        supplier,
        properties: _,
    } = component;
    let checksum = |digest: &Digest| json!([{"algorithm": "SHA256", "checksumValue": digest.hex()}]);
    let reference = |url: &String| json!([{"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": url}]);
    let comments = (!licenses.is_empty()).then(|| format!("The component states: {}", licenses.join(", ")));
    without_nulls(json!({
        "SPDXID": id,
        "name": name,
        "versionInfo": version,
        "supplier": supplier.map_or_else(|| UNKNOWN.to_owned(), |name| format!("Organization: {name}")),
        "downloadLocation": url.unwrap_or(UNKNOWN),
        "filesAnalyzed": false,
        "checksums": digest.map(checksum),
        "externalRefs": purl.as_ref().map(reference),
        "licenseConcluded": UNKNOWN,
        "licenseDeclared": UNKNOWN,
        "licenseComments": comments,
        "copyrightText": UNKNOWN,
        "primaryPackagePurpose": purpose,
    }))
}

impl Kind {
    fn purpose(self) -> Option<&'static str> {
        match self {
            Self::Application => Some("APPLICATION"),
            Self::Image => Some("CONTAINER"),
            Self::Library => Some("LIBRARY"),
            Self::OperatingSystem => Some("OPERATING-SYSTEM"),
            Self::Base | Self::Certificate | Self::File => None,
        }
    }
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
