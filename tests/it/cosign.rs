//! farrier and `cosign` 2 and 3 verify each other's signatures, with one key and with several.
use std::{fs, path::PathBuf, process::Command};

use crate::{
    signatures::{P256, RSA, SIGNING, curl, key, pinned, result, rows, site_yaml},
    support::{
        cosign::{Cosign, THREE, TWO},
        kernels,
        site::Site,
    },
};

const PREDICATES: [&str; 4] =
    ["cyclonedx", "spdxjson", "slsaprovenance1", "https://farrier.dev/check-report/v1"];
/// Media type of check reports.
const REPORT: &str = "application/vnd.farrier.check-report.v1+json";

fn home(site: &Site) -> PathBuf {
    let home = site.path("home");
    fs::create_dir_all(&home).unwrap();
    home
}

/// Returns the referrers of an image.
fn referrers(site: &Site, image: &str) -> Vec<serde_json::Value> {
    let tag = image.split_once('@').unwrap().1.replace(':', "-");
    site.inspect_raw(&format!("hello:{tag}"))["manifests"].as_array().unwrap().clone()
}

/// cosign 2.x and 3.x verify the image and each attestation that farrier signs, for both types of keys. cosign 2.x finds
/// signatures and attestations by tag, and 3.x in bundles.
#[test]
fn cosign_2_and_3_accept_what_farrier_signs() {
    let kernel = kernels::newest().newer;
    for (kind, options) in [("ecdsa", P256), ("rsa", RSA)] {
        let site = Site::new();
        key(&site, "site", options);
        key(&site, "other", P256);
        site_yaml(&site, SIGNING);
        site.build("hello", &kernel, &["--push"]).exits(0);
        let image = pinned(&site, &kernel);
        let pem = |name: &str| site.definitions().join(format!("{name}.pem")).display().to_string();
        for (version, claim) in
            [(&TWO, "cosign container image signature"), (&THREE, "https://sigstore.dev/cosign/sign/v1")]
        {
            let cosign = Cosign::of(version, &home(&site));
            let said = cosign.accepts(&["verify", "--key", &pem("site"), &image]);
            assert!(said.contains(&format!("\"type\":\"{claim}\"")), "{kind}: {said}");
            for predicate in PREDICATES {
                let said = cosign.accepts(&[
                    "verify-attestation",
                    "--key",
                    &pem("site"),
                    "--type",
                    predicate,
                    &image,
                ]);
                assert!(said.contains("application/vnd.in-toto+json"), "{kind} {predicate}: {said}");
            }
            let refused = cosign.run(&["verify", "--key", &pem("other"), &image]);
            assert!(!refused.status.success(), "{kind}: another key must not verify the image");
        }

        // Verify with farrier, with the site's key, an explicit key and a wrong key.
        let all = rows(&site, &["--deep", &image], 0);
        assert!(all.iter().all(|(_, result, _)| result == "ok"), "{all:?}");
        assert!(result(&all, "bill of materials").1.contains("components, signed"), "{all:?}");
        rows(&site, &["--key", &pem("site"), &image], 0);
        let wrong = rows(&site, &["--key", &pem("other"), &image], 1);
        assert_eq!(result(&wrong, "signature").0, "failed");
        assert_eq!(result(&wrong, "provenance"), ("failed", "it is not signed with an accepted key"));
        let table = site.farrier(&["verify", "--key", &pem("other"), &image]).exits(1);
        table.line("hint (signature)");
        table.line("NOT verified");

        // The bundles suffice without cosign 2.x's tags, and farrier signs nothing twice.
        let listed = referrers(&site, &image).len();
        site.build("hello", &kernel, &["--push", "--force"]).exits(0);
        assert_eq!((pinned(&site, &kernel), referrers(&site, &image).len()), (image.clone(), listed));
        let digest = image.split_once('@').unwrap().1.replace(':', "-");
        for end in ["sig", "att"] {
            site.registry.lose_tag("drivers/hello", &format!("{digest}.{end}"));
        }
        let all = rows(&site, &[&image], 0);
        assert!(result(&all, "provenance").1.ends_with(", signed"), "{all:?}");
    }
}

/// The signature of a bundle covers its index, as `zstd -dc | tar -x` unpacks it.
#[test]
fn cosign_2_verifies_a_bundle_as_a_blob() {
    let kernel = kernels::newest().newer;
    let site = Site::new();
    key(&site, "site", P256);
    site_yaml(&site, SIGNING);
    site.build("hello", &kernel, &["--push"]).exits(0);
    let digest = pinned(&site, &kernel);
    let reference = format!("hello@{}", digest.split_once('@').unwrap().1);
    let bundle = site.path("site.bundle").display().to_string();
    let words =
        ["bundle", "export", "--registry", &site.location, "--reference", &reference, "--to", &bundle];
    site.farrier(&words).exits(0);
    let unpack = format!("zstd -dc '{bundle}' | tar -x -C '{}' farrier-bundle.json", home(&site).display());
    assert!(Command::new("bash").args(["-c", &unpack]).status().unwrap().success());
    let (index, signature) = (home(&site).join("farrier-bundle.json"), format!("{bundle}.sig"));
    let pem = site.definitions().join("site.pem").display().to_string();
    let words = ["verify-blob", "--key", &pem, "--signature", &signature, index.to_str().unwrap()];
    Cosign::of(&TWO, &home(&site)).accepts(&words);
}

/// The site requires signatures by two of three keys. The release teams sign with `cosign` 3.x and 2.x.
#[test]
fn a_rollout_waits_for_two_signers() {
    let kernel = kernels::newest().newer;
    let site = Site::new();
    site.canary(&kernel);
    let home = home(&site);
    let (two, three) = (Cosign::of(&TWO, &home), Cosign::of(&THREE, &home));
    for (cosign, name) in [(&two, "release"), (&three, "security")] {
        let prefix = site.definitions().join(name).display().to_string();
        cosign.accepts(&["generate-key-pair", "--output-key-prefix", &prefix]);
    }
    key(&site, "site", P256);
    let private = |name: &str| site.definitions().join(format!("{name}.key")).display().to_string();
    site_yaml(
        &site,
        &format!(
            "{SIGNING}  policy: {{requireSigned: {{atLeast: 2, keys: [site.pem, release.pub, security.pub]}}}}\n"
        ),
    );
    let before = site.manifests();
    let held = site.run_once().exits(1);
    held.line("1 of 2 required keys have signed: site.pem (sha256:");
    held.line("; missing: release.pub (sha256:");
    assert_eq!(site.manifests(), before);
    let image = pinned(&site, &kernel);
    let (checks, held) = (rows(&site, &[&image], 1), "1 of 2 required keys have signed: site.pem");
    assert!(result(&checks, "signature").1.starts_with(held), "{checks:?}");
    assert_eq!(result(&checks, "check report").0, "ok", "one key suffices for the attestations");

    // A signed attestation does not count as a signature of the image.
    let report = referrers(&site, &image).into_iter().find(|entry| entry["artifactType"] == REPORT).unwrap();
    let report = site.inspect_raw(&format!("hello@{}", report["digest"].as_str().unwrap()));
    let blob = report["layers"][0]["digest"].as_str().unwrap();
    let file = site.path("report.json").display().to_string();
    let url = format!("http://{}/v2/drivers/hello/blobs/{blob}", site.registry.host);
    curl(&["-L", "-o", &file, &url]);
    let attest = ["attest", "--predicate", &file, "--type", "https://farrier.dev/check-report/v1"];
    three.signs(&[&attest[..], &["--key", &private("security"), &image]].concat());
    assert!(result(&rows(&site, &[&image], 1), "signature").1.starts_with(held));
    let public = site.definitions().join("security.pub").display().to_string();
    let checks = rows(&site, &["--key", &public, &image], 1);
    assert_eq!(result(&checks, "signature").0, "failed", "{checks:?}");
    assert!(result(&checks, "check report").1.ends_with(", signed"), "{checks:?}");

    three.signs(&["sign", "--key", &private("security"), &image]);
    let checks = rows(&site, &[&image], 0);
    let said = result(&checks, "signature").1;
    assert!(said.starts_with("by site.pem (sha256:") && said.contains(", security.pub (sha256:"), "{said}");
    assert!(said.contains("; missing: release.pub (sha256:"), "{said}");
    site.run_once().exits(0).line("rewrote");
    assert_eq!(site.image(), image, "the image is the same");

    // All three keys are trusted on the command line. Attestations by other signers did not replace farrier's.
    let release = site.definitions().join("release.pub").display().to_string();
    let named = ["--key", &release, "--key", &public, "--at-least", "2", &image];
    assert!(
        result(&rows(&site, &named, 1), "signature").1.contains("missing: "),
        "only one of the keys signed"
    );
    two.signs(&["sign", "--key", &private("release"), &image]);
    // Both keys signed the image; only the site signed the attestations.
    let checks = rows(&site, &named, 1);
    assert_eq!(result(&checks, "signature").0, "ok", "{checks:?}");
    let twice = ["verify", "--key", &release, "--key", &release, "--at-least", "2", &image];
    site.farrier(&twice).exits(2).line("2 different keys must sign, but only 1 are named");
}
