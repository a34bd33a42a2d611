//! Bills of materials and provenance of a real image: the formats' validators accept them, and syft lists what ships.
use std::{fs, path::Path, process::Command};

use farrier_core::image::Version;
use farrier_store::registry::{Registry as _, RegistryOptions, RemoteRegistry};
use oci::Artifact;
use serde_json::{Value, json};

use crate::{
    offline::MSTFLINT,
    signatures::{P256, SIGNING, key, site_yaml},
    support::{kept, kernels, packages::run, site::Site, tiny_image},
};

const CYCLONEDX: &str = "application/vnd.cyclonedx+json";
const SPDX: &str = "application/spdx+json";
const STATEMENT: &str = "application/vnd.in-toto+json";

/// Builds the image, publishes it, and returns its digest.
fn publish(site: &Site, kernel: &str, args: &[&str]) -> String {
    let built =
        site.build("mstflint", kernel, &[&["--engine", "sandbox", "--push", "-o", "json"], args].concat());
    built.exits(0).json()["digest"].as_str().unwrap().to_owned()
}

/// Returns the contents of an image's documents of one type.
fn documents(site: &Site, image: &str, kind: &str) -> Vec<Vec<u8>> {
    let beside = site.inspect_raw(&format!("mstflint:{}", image.replace(':', "-")));
    let of_kind = beside["manifests"].as_array().unwrap().iter().filter(|one| one["artifactType"] == kind);
    let content = |one: &Value| {
        let manifest = site.inspect_raw(&format!("mstflint@{}", one["digest"].as_str().unwrap()));
        site.registry.blob(manifest["layers"][0]["digest"].as_str().unwrap())
    };
    of_kind.map(content).collect()
}

/// Validates the documents, and returns what syft reads from the CycloneDX and the SPDX bill.
fn checked(site: &Site, image: &str) -> Value {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let state = kept("bills");
    // Tests run concurrently, each in a separate process; the first one installs the programs.
    let lock = fs::File::create(state.join("lock")).unwrap();
    lock.lock().unwrap();
    let script = "set -eu; state=$1; root=$2; . \"$root/ci/lib.sh\"; bill_tools";
    let python = run(Command::new("bash").args(["-c", script, "bash"]).arg(&state).arg(root));
    let mut command = Command::new(python.trim());
    command.arg(root.join("tests/it/support/check_bills.py"));
    for (name, kind) in [("bill.json", CYCLONEDX), ("spdx.json", SPDX), ("statement.json", STATEMENT)] {
        let found = documents(site, image, kind);
        assert_eq!(found.len(), 1, "{kind}");
        fs::write(site.path(name), &found[0]).unwrap();
        command.arg(site.path(name));
    }
    serde_json::from_str(&run(&mut command)).unwrap()
}

#[test]
fn syft_lists_what_ships_and_nothing_else() {
    let (site, kernel) = (Site::new(), kernels::newest().newer);
    site.define("images/mstflint.yaml", MSTFLINT);
    let image = publish(&site, &kernel, &[]);
    let bill: Value = serde_json::from_slice(&documents(&site, &image, CYCLONEDX)[0]).unwrap();
    let version = |role: &str| {
        let mut components = bill["components"].as_array().unwrap().iter();
        let found = components.find(|one| one["bom-ref"].as_str().unwrap().starts_with(role));
        found.unwrap_or_else(|| panic!("no {role} in {bill:#}"))["version"]
            .as_str()
            .unwrap_or_default()
            .to_owned()
    };
    let listed = json!({
        "distribution": "debian 12",
        "packages": [
            format!("busybox-static {}", version("runtime-base:")),
            format!("mstflint-dkms {}", version("source:")),
            format!("mstflint_access {}", version("module:")),
        ],
    });
    assert_eq!(checked(&site, &image), json!([listed, listed]));
    let purls = bill["components"].as_array().unwrap().iter().filter_map(|one| one["purl"].as_str());
    let debian: Vec<&str> = purls.filter(|purl| purl.starts_with("pkg:deb/debian/")).collect();
    assert!(debian.len() == 2 && debian.iter().all(|purl| purl.contains("distro=debian-")), "{debian:?}");
}

/// After `farrier mirror`, a build takes its inputs from the store. Its image is the same, and so are its bills.
#[test]
fn a_forced_build_after_mirror_adds_no_second_bill() {
    let (site, kernel) = (Site::new(), kernels::newest().newer);
    site.define("images/mstflint.yaml", MSTFLINT);
    key(&site, "site", P256);
    site_yaml(&site, SIGNING);
    let image = publish(&site, &kernel, &[]);
    let bills = [CYCLONEDX, SPDX].map(|kind| documents(&site, &image, kind));
    assert!(bills.iter().all(|of_kind| of_kind.len() == 1));
    let target = ["--kernel", &kernel, "--os", "debian", "--os-version", "12", "--arch", "amd64"];
    site.farrier(&[&["mirror", "--image", "mstflint"][..], &target].concat()).exits(0);
    assert_eq!(publish(&site, &kernel, &["--force"]), image);
    assert_eq!([CYCLONEDX, SPDX].map(|kind| documents(&site, &image, kind)), bills);
}

/// Attaches an OpenVEX document to an image, as `oras attach` does.
#[tokio::test]
async fn a_vex_statement_travels_with_its_image() {
    const OPENVEX: &str = "application/vnd.openvex+json";
    let (from, to) = (Site::new(), Site::new());
    let files = [("etc/hello".to_owned(), b"hello".to_vec())];
    let image = tiny_image::push_files(&from.registry.host, "drivers/mstflint", "1", &files).await;
    let (repository, digest) = image.split_once('@').unwrap();
    let document = json!({
        "@context": "https://openvex.dev/ns/v0.2.0",
        "@id": "https://example.test/vex/1",
        "author": "Acme",
        "timestamp": "2026-01-01T00:00:00Z",
        "version": 1,
        "statements": [{
            "vulnerability": {"name": "CVE-2026-0001"},
            "products": [{"@id": format!("pkg:oci/mstflint@{digest}")}],
            "status": "not_affected",
            "justification": "vulnerable_code_not_present",
        }],
    });
    let repository = repository.parse().unwrap();
    let registry = RemoteRegistry::new("test".to_owned(), &RegistryOptions::default());
    let version = Version::Digest(digest.parse().unwrap());
    let manifest = registry.manifest(&repository, &version).await.unwrap().unwrap();
    let vex = Artifact::about(&manifest.bytes, OPENVEX, document.to_string().into_bytes(), &[]).unwrap();
    registry.push_bytes(&repository, vex.config).await.unwrap();
    registry.push_bytes(&repository, &vex.content).await.unwrap();
    registry.push_referrer(&repository, &vex.manifest).await.unwrap();

    let bundle = from.path("vex.bundle").display().to_string();
    from.farrier(&["bundle", "export", "--reference", "mstflint:1", "--to", &bundle]).exits(0);
    to.farrier(&["bundle", "import", "--insecure-no-signature", &bundle]).exits(0);
    assert_eq!(documents(&to, digest, OPENVEX), [vex.content]);
}
