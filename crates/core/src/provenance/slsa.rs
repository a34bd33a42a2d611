//! SLSA provenance, version 1: how and from what an image or an output was made (`slsa.dev/spec/v1.0/provenance`).

use serde::Deserialize as _;
use serde_json::{Value, json};

use super::{Confinement, Material, Package, Provenance, materials::without_nulls, purl};
use crate::plan::NamedInputs;

/// The predicate type.
pub const SLSA_PREDICATE: &str = "https://slsa.dev/provenance/v1";
/// Identifies how to interpret `buildDefinition` (docs/bill-of-materials.md).
const BUILD_TYPE: &str = "https://farrier.dev/driver-image/v1";
/// Identifies how to interpret the `buildDefinition` of an output.
const OUTPUT_BUILD_TYPE: &str = "https://farrier.dev/host-output/v1";
/// Identifies the builder. The compiling engine is omitted, because it does not change the result.
const BUILDER: &str = "https://farrier.dev/builder/v1";

/// Identifies the record of the sandbox's confinement. A resource descriptor must have an address, a digest or content.
const CANARY: &str = "https://farrier.dev/canary/v1";

/// Returns the predicate. External parameters are the user's choices; everything else follows from the dependencies.
pub fn slsa(provenance: &Provenance) -> Value {
    let Provenance { subject, farrier, build_format, inputs, materials, modules: _, confinement } =
        provenance;
    let kernel = subject.target.as_ref().map(|target| {
        json!({
            "release": target.release.as_str(),
            "os": target.os.to_string(),
            "osVersion": target.os_version.to_string(),
        })
    });
    let external = without_nulls(json!({
        "image": subject.name,
        "version": subject.version,
        "architecture": subject.architecture.as_str(),
        "kernel": kernel,
        "output": subject.output.map(|output| output.to_string()),
    }));
    let dependencies: Vec<Value> = materials.iter().map(dependency).collect();
    let Confinement { refused, landlock, limits } = confinement;
    let byproducts = (!refused.is_empty()).then(|| {
        let measured = json!({"refused": refused, "landlock": landlock, "limits": limits});
        json!([{"name": "canary", "uri": CANARY, "annotations": measured}])
    });
    json!({
        "buildDefinition": {
            "buildType": if subject.output.is_some() { OUTPUT_BUILD_TYPE } else { BUILD_TYPE },
            "externalParameters": external,
            "internalParameters": {
                "buildFormat": build_format,
                "inputHash": subject.input_hash.to_string(),
                "inputs": inputs,
            },
            "resolvedDependencies": dependencies,
        },
        "runDetails": without_nulls(json!({
            "builder": {"id": BUILDER, "version": {"farrier": farrier}},
            "byproducts": byproducts,
        })),
    })
}

/// Returns a material as a resource descriptor (in-toto attestation framework, `resource_descriptor.md`), which must have an
/// address or a digest. The packages of a root file system are annotations, because the digest of the whole covers them.
fn dependency(material: &Material) -> Value {
    let Material { role, name, version, digest, commit, uri, packages, distribution, terms: _ } = material;
    let url = |Package { name, version, architecture, licenses: _ }: &Package| {
        purl::of_package(name, version, Some(architecture), distribution.as_ref())
    };
    let packages: Option<Value> = (!packages.is_empty()).then(|| packages.iter().map(url).collect());
    // The content of a toolchain is unknown if only the engine has the toolchain.
    let is_unknown = digest.is_none() && commit.is_none();
    let uri = uri.clone().or_else(|| is_unknown.then(|| purl::of_software(name, version.as_deref(), None)));
    without_nulls(json!({
        "name": name,
        "uri": uri,
        "digest": match commit {
            Some(commit) => Some(json!({"gitCommit": commit})),
            None => digest.as_ref().map(|digest| json!({"sha256": digest.hex()})),
        },
        "annotations": without_nulls(json!({"role": role.as_str(), "version": version, "packages": packages})),
    }))
}

/// Reads the named inputs of the build from a predicate. Empty if it has none.
pub fn named_inputs(predicate: &Value) -> NamedInputs {
    NamedInputs::deserialize(&predicate["buildDefinition"]["internalParameters"]["inputs"])
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        image::HostOutput,
        provenance::{Role, testing::provenance},
    };

    #[test]
    fn the_predicate() {
        insta::assert_snapshot!(serde_json::to_string_pretty(&slsa(&provenance())).unwrap());
    }

    #[test]
    fn an_output_is_made_from_its_image() {
        let mut made = provenance();
        made.subject.output = Some(HostOutput::Deb);
        made.materials = vec![Material::new(Role::DriverImage, "mft")];
        let definition = &slsa(&made)["buildDefinition"];
        assert_eq!(definition["buildType"], "https://farrier.dev/host-output/v1");
        assert_eq!(definition["externalParameters"]["output"], "deb");
        assert_eq!(definition["resolvedDependencies"][0]["annotations"], json!({"role": "driver-image"}));
    }

    #[test]
    fn what_the_canary_was_refused_is_a_byproduct() {
        assert_eq!(slsa(&provenance())["runDetails"].get("byproducts"), None);
        let confinement = Confinement {
            refused: vec!["a mount".to_owned()],
            landlock: 7,
            limits: [("memory", "cgroup v2")].into(),
        };
        let looked = Provenance { confinement, ..provenance() };
        let byproducts = &slsa(&looked)["runDetails"]["byproducts"];
        let found = json!({"refused": ["a mount"], "landlock": 7, "limits": {"memory": "cgroup v2"}});
        assert_eq!(*byproducts, json!([{"name": "canary", "uri": CANARY, "annotations": found}]));
    }

    #[test]
    fn every_dependency_has_a_digest_or_an_address() {
        let mut made = provenance();
        made.materials.push(Material::new(Role::Toolchain, "bookworm, of the engine"));
        let predicate = slsa(&made);
        let all = predicate["buildDefinition"]["resolvedDependencies"].as_array().unwrap();
        assert_eq!(all.len(), made.materials.len());
        assert_eq!(all.last().unwrap()["uri"], "pkg:generic/bookworm%2C%20of%20the%20engine");
        for one in all {
            assert!(one["digest"].is_object() || one["uri"].is_string(), "{one}");
        }
    }
}
