//! The bill of materials, as CycloneDX 1.6 (ECMA-424) in JSON.
//!
//! `components` is the image's content. `formulation` has the build inputs that are not part of the image. Scanners ignore
//! `formulation`.

use serde_json::{Value, json};

use super::{
    Provenance,
    components::{CERTIFICATE, Component, Components, REDISTRIBUTE},
    materials::without_nulls,
};
use crate::{
    image::{Digest, Redistribute},
    oci::CREATED,
};

/// The predicate type of a bill as a signed statement, as `cosign` defines it.
pub const CYCLONEDX_PREDICATE: &str = "https://cyclonedx.org/bom";

/// Returns the bill of materials of one image or output.
pub fn bill(provenance: &Provenance) -> Value {
    let image = Component::of_subject(&provenance.subject);
    let Components { shipped, build, .. } = Components::of(provenance);
    let refs: Vec<&str> = shipped.iter().map(|component| component.reference.as_str()).collect();
    let formulation = (!build.is_empty()).then(
        || json!([{"bom-ref": "build", "components": build.iter().map(component_json).collect::<Value>()}]),
    );
    let required = |component: &Component<'_>| {
        let mut json = component_json(component);
        json["scope"] = json!("required");
        json
    };
    let mut bill = without_nulls(json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": without_nulls(json!({
            "timestamp": CREATED,
            "tools": {"components": [{"type": "application", "name": "farrier"}]},
            "supplier": provenance.subject.terms.supplier.as_ref().map(|name| json!({"name": name})),
            "component": component_json(&image),
        })),
        "components": shipped.iter().map(required).collect::<Value>(),
        "dependencies": [{"ref": image.reference, "dependsOn": refs}],
        "formulation": formulation,
    }));
    bill["serialNumber"] = json!(format!("urn:uuid:{}", uuid_of(&bill)));
    bill
}

/// Returns the components of a bill whose licenses restrict redistribution. The image itself counts as a component.
pub fn restricted_components(bill: &Value) -> Vec<(String, Redistribute)> {
    let components = bill["components"].as_array().into_iter().flatten();
    let restriction = |component: &Value| {
        let mut properties = component["properties"].as_array()?.iter();
        let property = properties.find(|property| property["name"] == format!("farrier:{REDISTRIBUTE}"))?;
        let redistribute: Redistribute = serde_json::from_value(property["value"].clone()).ok()?;
        Some((component["name"].as_str()?.to_owned(), redistribute))
    };
    let restrictions =
        std::iter::once(&bill["metadata"]["component"]).chain(components).filter_map(restriction);
    restrictions.filter(|(_, redistribute)| *redistribute != Redistribute::Allowed).collect()
}

/// Returns a UUID (RFC 9562, version 8) derived from a document's content.
pub(super) fn uuid_of(document: &Value) -> String {
    let hex: String = Digest::of(document.to_string().as_bytes()).hex().to_owned();
    let part = |from: usize, to: usize| hex.get(from..to).unwrap_or_default();
    // The first digit of the variant must be 8, 9, a or b.
    format!("{}-{}-8{}-8{}-{}", part(0, 8), part(8, 12), part(12, 15), part(15, 18), part(18, 30))
}

fn component_json(component: &Component<'_>) -> Value {
    let licenses: Vec<Value> = match component.license {
        Some(expression) => vec![json!({"expression": expression})],
        None => component.licenses.iter().map(|name| json!({"license": {"name": name}})).collect(),
    };
    without_nulls(json!({
        "type": component.kind.cyclonedx,
        "bom-ref": component.reference,
        "name": component.name,
        "version": component.version,
        "supplier": component.supplier.map(|name| json!({"name": name})),
        "hashes": component.digest.map(|digest| json!([{"alg": "SHA-256", "content": digest.hex()}])),
        "purl": component.purl,
        "externalReferences": component.url.map(|url| json!([{"type": reference_type(url), "url": url}])),
        "licenses": (!licenses.is_empty()).then_some(licenses),
        "cryptoProperties": (component.kind == CERTIFICATE).then(|| json!({"assetType": "certificate"})),
        "properties": component.properties.iter().map(property).collect::<Value>(),
    }))
}

fn reference_type(url: &str) -> &'static str {
    if url.starts_with("git+") { "vcs" } else { "distribution" }
}

fn property((name, value): &(&'static str, String)) -> Value {
    json!({"name": format!("farrier:{name}"), "value": value})
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::{
        image::HostOutput,
        provenance::{Material, Role, slsa, spdx, testing::provenance},
    };

    #[test]
    fn the_bill() {
        insta::assert_snapshot!(serde_json::to_string_pretty(&bill(&provenance())).unwrap());
    }

    #[test]
    fn references_are_unique_and_all_are_depended_on() {
        let mut twice = provenance();
        twice.materials.extend(provenance().materials);
        let bill = bill(&twice);
        let components = bill["components"].as_array().unwrap();
        let build = bill["formulation"][0]["components"].as_array().unwrap();
        let refs: BTreeSet<&str> =
            components.iter().chain(build).map(|one| one["bom-ref"].as_str().unwrap()).collect();
        // Modules are files of one tree, so their paths are unique.
        assert_eq!(refs.len(), components.len() + build.len());
        assert_eq!(bill["dependencies"][0]["dependsOn"].as_array().unwrap().len(), components.len());
        let systems = components.iter().filter(|one| one["type"] == "operating-system");
        assert_eq!(systems.count(), 1, "scanners take the first for the distribution");
    }

    #[test]
    fn the_serial_number_is_an_uuid_that_follows_from_the_content() {
        let number = bill(&provenance())["serialNumber"].as_str().unwrap().to_owned();
        let form =
            regex::Regex::new("^urn:uuid:[0-9a-f]{8}-[0-9a-f]{4}-8[0-9a-f]{3}-8[0-9a-f]{3}-[0-9a-f]{12}$");
        assert!(form.unwrap().is_match(&number), "{number}");
        let mut other = provenance();
        other.modules[0].version = None;
        assert_ne!(bill(&other)["serialNumber"], number);
    }

    /// The first build compiled with another toolchain, and did not take its headers from the registry's store.
    #[test]
    fn two_builds_of_one_image_give_one_bill() {
        let (first, second) = (&mut provenance(), &provenance());
        first.farrier = "0.0.9".to_owned();
        first.confinement.landlock = 7;
        first.materials.retain(|material| material.role != Role::StoredHeaders);
        for material in first.materials.iter_mut().filter(|material| material.role == Role::Toolchain) {
            material.digest = Some(Digest::of(b"other"));
            material.packages.clear();
        }
        assert_ne!(slsa(first), slsa(second));
        assert_eq!((bill(first), spdx(first)), (bill(second), spdx(second)));
    }

    #[test]
    fn the_certificate_ships_in_the_outputs_that_contain_it() {
        let mut made = provenance();
        made.materials.retain(|material| material.role == Role::ModuleCertificate);
        made.materials.insert(0, Material::new(Role::DriverImage, "mft"));
        for (output, count) in [
            (None, 0),
            (Some(HostOutput::Initramfs), 0),
            (Some(HostOutput::Deb), 1),
            (Some(HostOutput::Sysext), 1),
        ] {
            made.subject.output = output;
            let bill = bill(&made);
            let shipped = bill["components"].as_array().unwrap();
            let certificates = shipped.iter().filter(|one| one["type"] == CERTIFICATE.cyclonedx);
            assert_eq!((certificates.count(), shipped.len()), (count, count + 1), "{output:?}");
            let subject = &bill["metadata"]["component"]["type"];
            assert_eq!(subject, if output.is_some() { "file" } else { "container" });
        }
    }

    #[test]
    fn restricted_components_are_read_back() {
        let mut provenance = provenance();
        let of = |name: &str, redistribute| (name.to_owned(), redistribute);
        let found = restricted_components(&bill(&provenance));
        assert_eq!(found, [of("mft", Redistribute::Terms), of("mft-extra", Redistribute::Forbidden)]);
        provenance.subject.terms.redistribute = Some(Redistribute::Allowed);
        assert_eq!(restricted_components(&bill(&provenance)), [of("mft-extra", Redistribute::Forbidden)]);
        assert!(restricted_components(&json!([])).is_empty());
    }
}
