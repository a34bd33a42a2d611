//! Images signed as `cosign` accepts it, verified by farrier, and held where a signature is required and missing.
// clippy.toml allows these in test functions only, not in what the tests share.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::{fs, process::Command};

use serde_json::Value;
use support::{
    cosign::{accepts, cosign},
    kernels,
    site::Site,
};

/// Makes a key pair in the definitions directory: `NAME.key` and `NAME.pem`.
fn key(site: &Site, name: &str, options: &[&str]) {
    let private = site.definitions().join(format!("{name}.key"));
    let public = site.definitions().join(format!("{name}.pem"));
    let run = |args: &[&str]| {
        let output =
            Command::new("openssl").args(args).output().expect("run openssl (Debian package openssl)");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    let (private, public) = (private.display().to_string(), public.display().to_string());
    run(&[&["genpkey", "-out", &private], options].concat());
    run(&["pkey", "-in", &private, "-pubout", "-out", &public]);
}

const P256: &[&str] = &["-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"];
const RSA: &[&str] = &["-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:3072"];

fn site_yaml(site: &Site, spec: &str) {
    let head = "apiVersion: farrier.dev/v1alpha1\nkind: Site\nmetadata: {name: here}\nspec:\n";
    site.define("site.yaml", &format!("{head}{spec}"));
}

const SIGNING: &str = "  imageSigning: {key: {file: site.key}}\n";

/// The published image by digest.
fn pinned(site: &Site, kernel: &str) -> String {
    let name = format!("hello:1.0-{kernel}-debian12-amd64");
    format!("{}/hello@{}", site.location, site.inspect(&name)["Digest"].as_str().unwrap())
}

#[track_caller]
fn rows(site: &Site, args: &[&str], code: i32) -> Vec<(String, String, String)> {
    let report = site.farrier(&[&["verify", "-o", "json"], args].concat()).exits(code).json();
    assert_eq!(report["verified"], code == 0);
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let checks = report["checks"].as_array().unwrap().iter();
    checks.map(|row| (text(&row["check"]), text(&row["result"]), text(&row["message"]))).collect()
}

#[track_caller]
fn result<'a>(rows: &'a [(String, String, String)], check: &str) -> (&'a str, &'a str) {
    let (_, result, message) = rows.iter().find(|row| row.0 == check).expect(check);
    (result, message)
}

/// Both kinds of keys: what farrier signs, cosign verifies, the image and each of the statements about it.
#[test]
fn cosign_accepts_what_farrier_signs() {
    let kernel = kernels::newest().newer;
    for (kind, options) in [("ecdsa", P256), ("rsa", RSA)] {
        let site = Site::new();
        key(&site, "site", options);
        key(&site, "other", P256);
        site_yaml(&site, SIGNING);
        site.build("hello", &kernel, &["--push"]).exits(0);
        let image = pinned(&site, &kernel);
        let home = site.path("home");
        fs::create_dir_all(&home).unwrap();
        let public = site.definitions().join("site.pem").display().to_string();
        let verify =
            ["verify", "--key", &public, "--insecure-ignore-tlog", "--allow-insecure-registry", &image];
        let said = accepts(&home, &verify);
        assert!(said.contains("\"cosign container image signature\""), "{kind}: {said}");
        for predicate in ["cyclonedx", "slsaprovenance1", "https://farrier.dev/check-report/v1"] {
            let args = ["verify-attestation", "--key", &public, "--insecure-ignore-tlog"];
            let more = ["--allow-insecure-registry", "--type", predicate, &image];
            let said = accepts(&home, &[&args[..], &more].concat());
            assert!(said.contains("application/vnd.in-toto+json"), "{kind} {predicate}: {said}");
        }
        let other = site.definitions().join("other.pem").display().to_string();
        let refused =
            ["verify", "--key", &other, "--insecure-ignore-tlog", "--allow-insecure-registry", &image];
        assert!(!cosign(&home, &refused).status.success(), "{kind}: another key must not do");

        // farrier's own verification, with the site's key, a named one, and a wrong one.
        let all = rows(&site, &["--deep", &image], 0);
        assert!(all.iter().all(|(_, result, _)| result == "ok"), "{all:?}");
        assert!(result(&all, "bill of materials").1.contains("components, signed"), "{all:?}");
        rows(&site, &["--key", &public, &image], 0);
        let wrong = rows(&site, &["--key", &other, &image], 1);
        assert_eq!(result(&wrong, "signature").0, "failed");
        assert_eq!(result(&wrong, "provenance"), ("failed", "no accepted key has signed it"));
        let table = site.farrier(&["verify", "--key", &other, &image]).exits(1);
        table.line("hint (signature)");
        table.line("NOT verified");
    }
}

/// A key in site.yaml signs what is there without building; a second time nothing is written. What is not signed is not
/// rolled out where the policy asks for it, and says so.
#[test]
fn a_required_signature() {
    let kernel = kernels::newest().newer;
    let site = Site::new();
    site.canary(&kernel);
    key(&site, "site", P256);
    key(&site, "foreign", P256);
    site.build("hello", &kernel, &["--push"]).exits(0);
    let image = pinned(&site, &kernel);
    let plain = rows(&site, &[&image], 0);
    assert_eq!(result(&plain, "signature").0, "skipped");

    site_yaml(&site, "  policy: {requireSigned: [site.pem]}\n");
    let before = site.manifests();
    let held = site.run_once().exits(1);
    held.line("is not signed as policy.requireSigned asks: it has no signature");
    assert_eq!(site.manifests(), before);
    let status = site.farrier(&["plan", "-o", "json"]).json();
    assert_eq!(status["rollouts"][0]["reason"], "not-signed");
    assert_eq!(result(&rows(&site, &[&image], 1), "signature"), ("absent", "it has no signature"));

    site_yaml(&site, &format!("{SIGNING}  policy: {{requireSigned: [site.pem]}}\n"));
    site.farrier(&["plan"]).line("lacks the site's signature");
    let run = site.run_once().exits(0);
    run.line("signed    hello");
    run.line("rewrote");
    assert_eq!(site.image(), image, "signed as it is, not built again");
    rows(&site, &[&image], 0);
    let writes = site.registry.requests("PUT");
    site.run_once().exits(0).line("nothing to do");
    fs::remove_dir_all(site.cache().join("records/signed")).unwrap();
    site.build("hello", &kernel, &["--push"]).exits(0).line("up to date");
    assert_eq!(site.registry.requests("PUT"), writes, "a signature that is there is not made twice");

    // A good signature by a key that the policy does not name.
    site_yaml(&site, "  policy: {requireSigned: [foreign.pem]}\n");
    site.run_once().exits(1).line("its signature is not by an accepted key");
}

/// Without a key the pass asks nothing more than before.
#[test]
fn an_unsigned_site_asks_for_no_signatures() {
    let kernel = kernels::newest().newer;
    let site = Site::new();
    site.canary(&kernel);
    site.run_once().exits(0);
    let before = site.registry.requests("GET");
    site.run_once().exits(0).line("nothing to do");
    assert_eq!(site.registry.requests("GET") - before, 2, "what the tag names, and what the DaemonSet names");
    let image = site.image();
    let all = rows(&site, &[&image], 0);
    assert_eq!(result(&all, "check report").0, "ok");
    assert_eq!(result(&all, "bill of materials").0, "ok");
    assert_eq!(result(&all, "provenance").0, "ok");
    assert_eq!(
        result(&rows(&site, &["--registry", &site.location, "hello:none"], 1), "manifest").0,
        "absent"
    );
}

/// A key that cannot sign is found before anything is compiled.
#[test]
fn a_key_that_cannot_be_used() {
    let kernel = kernels::newest().newer;
    let site = Site::new();
    site_yaml(&site, SIGNING);
    let run = site.build("hello", &kernel, &["--push"]).exits(2);
    run.line("site.key");
    key(&site, "site", &["-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-384"]);
    let run = site.build("hello", &kernel, &["--push"]).exits(2);
    run.line("neither an ECDSA key over P-256 nor an RSA key");
    assert!(site.tags("hello").is_empty());
}
