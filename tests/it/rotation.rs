//! docs/rotation.md: its commands as they stand there, in their order, and what a revoked key no longer does.
use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
};

use crate::{
    signatures::{P256, key, pinned, result, rows},
    support::{
        kernels,
        site::{Run, Site},
    },
};

/// Returns the commands under a heading of the page.
fn commands(heading: &str) -> String {
    let page = include_str!("../../docs/rotation.md");
    let section = page.split_once(&format!("\n## {heading}\n")).expect(heading).1;
    let section = section.split("\n## ").next().unwrap();
    let mut blocks = String::new();
    let (mut is_shell, mut indent) = (false, 0);
    for line in section.lines() {
        let text = line.trim_start();
        if text.starts_with("```") {
            is_shell = text == "```sh";
            indent = line.len() - text.len();
        } else if is_shell {
            blocks += line.get(indent..).unwrap_or_default();
            blocks.push('\n');
        }
    }
    assert!(!blocks.is_empty(), "{heading} has no commands");
    blocks
}

/// Runs the commands under a heading, offline.
fn play(site: &Site, heading: &str, variables: &[(&str, &str)]) -> Run {
    let farrier = site.command::<&str>(&[]);
    let mut bash = Command::new("bash");
    bash.args(["-euo", "pipefail", "-c", &commands(heading)]);
    bash.envs(farrier.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let programs = Path::new(farrier.get_program()).parent().unwrap().display().to_string();
    bash.env("PATH", format!("{programs}:{}", std::env::var("PATH").unwrap()));
    bash.envs(variables.iter().copied()).env("KEYS", site.path("")).env("CARRY", site.path(""));
    bash.env("FARRIER_OFFLINE", "true").current_dir(site.path(""));
    bash.stdin(Stdio::null()).stdout(Stdio::piped());
    Run::of(bash.stderr(Stdio::piped()).spawn().unwrap())
}

/// Writes `site.yaml` with the first key, which signs and is required.
fn use_first_key(site: &Site) {
    site.define(
        "site.yaml",
        "apiVersion: farrier.dev/v1alpha1\nkind: Site\nmetadata: {name: plant}\nspec:\n  \
         imageSigning: {key: {file: keys/images.key}, publicKey: keys/images.pub}\n  \
         policy: {requireSigned: [keys/images.pub]}\n",
    );
}

#[test]
fn the_page_on_rotation_replaces_a_key_and_revokes_it() {
    let kernel = kernels::newest().newer;
    let site = Site::new();
    site.define("keys/README", "");
    key(&site, "keys/images", P256);
    let keys = site.definitions().join("keys");
    fs::rename(keys.join("images.pem"), keys.join("images.pub")).unwrap();
    use_first_key(&site);
    site.build("hello", &kernel, &["--push"]).exits(0);
    let image = pinned(&site, &kernel);
    let old = site.definitions().join("keys/images.pub").display().to_string();
    let new = site.definitions().join("keys/images-2.pub").display().to_string();
    let variables = [("IMAGE", image.as_str()), ("KERNEL", kernel.as_str())];

    let said = play(&site, "Replace the key for images", &variables).exits(0);
    assert!(said.line(&format!("{}/hello@", site.location)).starts_with("signed "), "{said}");
    // The new key alone suffices for the image and for each document.
    for check in rows(&site, &["--key", &new, &image], 0) {
        assert_eq!(check.1, "ok", "{check:?}");
    }
    let again = site.farrier(&["rotate", "-o", "json", "--offline"]).exits(0).json();
    let outcomes: Vec<_> = again.as_array().unwrap().iter().map(|artifact| &artifact["outcome"]).collect();
    assert!(!outcomes.is_empty() && outcomes.iter().all(|outcome| *outcome == "present"), "{again:#}");
    site.build("hello", &kernel, &["--push"]).exits(0).line("up to date");
    play(&site, "Replace the key of bundles", &variables).exits(0);

    // An image that only the old key signed.
    let site_yaml = fs::read_to_string(site.definitions().join("site.yaml")).unwrap();
    use_first_key(&site);
    site.edit("images/hello.yaml", "1.0", "1.1");
    site.build("hello", &kernel, &["--push"]).exits(0);
    let name = format!("hello:1.1-{kernel}-debian12-amd64");
    let other = format!("{}/hello@{}", site.location, site.inspect(&name)["Digest"].as_str().unwrap());
    site.define("site.yaml", &site_yaml.replace("images-2.pub]", "images-2.pub, keys/images.pub]"));
    rows(&site, &[&other], 0);

    play(&site, "Revoke a key for images", &variables).exits(0);
    let said = result(&rows(&site, &[&other], 1), "signature").1.to_owned();
    assert!(said.contains("it is signed by keys/images.pub, revoked since 2026-11-28T00:00:00Z"), "{said}");
    rows(&site, &[&image], 0);
    site.farrier(&["verify", "--key", &old, &image]).exits(2).line("is revoked since 2026-11-28T00:00:00Z");
    let report = site.farrier(&["rotate", "-o", "json"]).exits(0).json();
    let artifacts = report.as_array().unwrap();
    let of_other = artifacts.iter().find(|artifact| artifact["reference"] == other).unwrap();
    assert_eq!(of_other["outcome"], "untrusted");
    assert!(of_other["why"].as_str().unwrap().contains("revoked since"), "{of_other}");
    let bundle = site.path("site.bundle").display().to_string();
    let refused = site.farrier(&["bundle", "import", &bundle, "--key", &old]).exits(2);
    refused.line("is revoked since 2026-11-28T00:00:00Z");
    let doctor = site.farrier(&["doctor", "-o", "json"]);
    let named = |text: &str| doctor.stdout.lines().any(|line| line.contains(text));
    assert!(named("policy.requireSigned keys/images.pub: its key (sha256:"), "{doctor}");

    // A revoked key signs nothing, and the fingerprint of any encoding revokes as the file does.
    use_first_key(&site);
    let [fingerprint, compressed] = ["uncompressed", "compressed"].map(|form| {
        let args = ["ec", "-pubin", "-conv_form", form, "-outform", "DER", "-in", &old];
        farrier_core::image::Digest::of(&Command::new("openssl").args(args).output().unwrap().stdout)
    });
    assert_ne!(fingerprint, compressed);
    let revoked = format!("revoked: [{{fingerprint: '{compressed}', since: 2026-11-28T00:00:00Z}}]");
    site.edit("site.yaml", "policy: {requireSigned: [keys/images.pub]}", &revoked);
    let run = site.build("hello", &kernel, &["--push", "--force"]).exits(2);
    run.line(&format!("imageSigning: its key ({fingerprint}) is revoked since 2026-11-28T00:00:00Z"));
}
