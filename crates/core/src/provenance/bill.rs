//! The bill of materials, as CycloneDX 1.6 (ECMA-424) in JSON.
//!
//! CycloneDX is used instead of SPDX 2.3 for three reasons. A time and a unique namespace are optional, so the same inputs can
//! give the same bytes. It separates the image's content from its build inputs (`scope`). It has a type for device drivers.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::{
    Material, ModuleFile, Package, Provenance, Role,
    materials::{oci_url, package_url, without_nulls},
};
use crate::image::Digest;

/// The predicate type of a bill as a signed statement, as `cosign` defines it.
pub const CYCLONEDX_PREDICATE: &str = "https://cyclonedx.org/bom";
/// The image's `bom-ref`.
const IMAGE: &str = "image";

/// Returns the bill of materials of one image.
pub fn bill(provenance: &Provenance) -> Value {
    let Provenance { subject, farrier, build_format: _, materials, modules, confinement: _ } = provenance;
    let mut components = Components::default();
    for material in materials {
        components.material(material);
    }
    for module in modules {
        components.module(module);
    }
    let refs: Vec<Value> = components.all.iter().map(|one| one["bom-ref"].clone()).collect();
    let mut properties = vec![property("input-hash", &subject.input_hash.to_string())];
    properties.push(property("architecture", subject.architecture.as_str()));
    if let Some(target) = &subject.target {
        properties.push(property("kernel-release", target.release.as_str()));
        properties.push(property("os", &format!("{} {}", target.os, target.os_version)));
    }
    json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": serial(&subject.digest),
        "version": 1,
        "metadata": {
            "tools": {"components": [{"type": "application", "name": "farrier", "version": farrier}]},
            "component": {
                "type": "container",
                "bom-ref": IMAGE,
                "name": subject.name,
                "version": subject.version,
                "purl": oci_url(&subject.name, &subject.digest),
                "hashes": hashes(&subject.digest),
                "properties": properties,
            },
        },
        "components": components.all,
        "dependencies": [{"ref": IMAGE, "dependsOn": refs}],
    })
}

/// A UUID (RFC 9562, version 8) derived from the image's digest. The specification requires a UUID for each bill, and each image
/// has one bill.
fn serial(image: &Digest) -> String {
    let hex: String = Digest::of(format!("bill of materials of {image}").as_bytes()).hex().to_owned();
    let part = |from: usize, to: usize| hex.get(from..to).unwrap_or_default();
    // The first digit of the variant must be 8, 9, a or b.
    format!("urn:uuid:{}-{}-8{}-8{}-{}", part(0, 8), part(8, 12), part(12, 15), part(15, 18), part(18, 30))
}

#[derive(Default)]
struct Components {
    all: Vec<Value>,
    /// Number of components that share a reference.
    taken: BTreeMap<String, usize>,
}

impl Components {
    fn material(&mut self, material: &Material) {
        let Material { role, name, version, digest, uri, packages } = material;
        let (purl, url) = match uri.as_deref() {
            Some(uri) if uri.starts_with("pkg:") => (Some(uri), None),
            url => (None, url),
        };
        let is_certificate = *role == Role::ModuleCertificate;
        let fields = json!({
            "type": kind(*role),
            "name": name,
            "version": version,
            "hashes": digest.as_ref().map(hashes),
            "purl": purl,
            "externalReferences": url.map(|url| json!([{"type": "distribution", "url": url}])),
            "cryptoProperties": is_certificate.then(|| json!({"assetType": "certificate"})),
        });
        self.add(*role, name, version.as_deref(), fields);
        for package in packages {
            self.package(*role, package);
        }
    }

    fn package(&mut self, role: Role, package: &Package) {
        let Package { name, version, architecture, licenses } = package;
        let licenses: Option<Value> =
            (!licenses.is_empty()).then(|| licenses.iter().map(|name| license(name)).collect());
        let fields = json!({
            "type": "library",
            "name": name,
            "version": version,
            "purl": package_url(name, version, Some(architecture)),
            "licenses": licenses,
        });
        self.add(role, name, Some(version), fields);
    }

    fn module(&mut self, module: &ModuleFile) {
        let ModuleFile { path, name, version, license: named, srcversion, digest } = module;
        let mut properties = vec![property("role", "module"), property("path", path)];
        properties.extend(srcversion.as_ref().map(|value| property("srcversion", value)));
        self.all.push(without_nulls(json!({
            "type": "device-driver",
            "name": name,
            "version": version,
            "hashes": hashes(digest),
            "licenses": named.as_ref().map(|named| json!([license(named)])),
            "scope": "required",
            "properties": properties,
            "bom-ref": format!("module:{path}"),
        })));
    }

    /// Adds a component with a unique reference and its role.
    fn add(&mut self, role: Role, name: &str, version: Option<&str>, mut fields: Value) {
        let version = version.map(|version| format!("@{version}")).unwrap_or_default();
        let plain = format!("{}:{name}{version}", role.as_str());
        let taken = self.taken.entry(plain.clone()).or_default();
        let reference = if *taken == 0 { plain } else { format!("{plain}#{taken}") };
        *taken += 1;
        fields["bom-ref"] = json!(reference);
        fields["scope"] = json!(if role.is_in_image() { "required" } else { "excluded" });
        fields["properties"] = json!([property("role", role.as_str())]);
        self.all.push(without_nulls(fields));
    }
}

fn kind(role: Role) -> &'static str {
    match role {
        Role::Source => "device-driver",
        Role::Patch | Role::Recipe => "file",
        Role::Headers | Role::Need => "library",
        Role::Toolchain | Role::Base => "operating-system",
        Role::Entrypoint => "application",
        Role::ModuleCertificate => "cryptographic-asset",
        Role::ReusedImage | Role::Member => "container",
    }
}

/// Keeps the license name as given: `MODULE_LICENSE` and Debian's copyright files have their own names, which are not SPDX
/// identifiers.
fn license(name: &str) -> Value {
    json!({"license": {"name": name}})
}

fn hashes(digest: &Digest) -> Value {
    json!([{"alg": "SHA-256", "content": digest.hex()}])
}

fn property(name: &str, value: &str) -> Value {
    json!({"name": format!("farrier:{name}"), "value": value})
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::provenance::testing::provenance;

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
        let refs: BTreeSet<&str> = components.iter().map(|one| one["bom-ref"].as_str().unwrap()).collect();
        // Modules are files of one tree, so their paths are unique.
        assert_eq!(refs.len(), components.len());
        assert_eq!(bill["dependencies"][0]["dependsOn"].as_array().unwrap().len(), components.len());
    }

    #[test]
    fn the_serial_number_is_an_uuid_that_follows_from_the_image() {
        let number = serial(&Digest::of(b"a"));
        let form =
            regex::Regex::new("^urn:uuid:[0-9a-f]{8}-[0-9a-f]{4}-8[0-9a-f]{3}-8[0-9a-f]{3}-[0-9a-f]{12}$");
        assert!(form.unwrap().is_match(&number), "{number}");
        assert_ne!(number, serial(&Digest::of(b"b")));
        assert_eq!(number, serial(&Digest::of(b"a")));
    }
}
