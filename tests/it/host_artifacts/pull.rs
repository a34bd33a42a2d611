//! Outputs that are published beside images, signed, carried and fetched.
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use farrier_core::image::Digest;
use serde_json::Value;

use crate::{
    signatures::{P256, SIGNING, key, pinned, site_yaml},
    support::{
        cosign::{Cosign, THREE, TWO},
        kernels,
        packages::run,
        site::{self, Run, Site},
    },
};

const DEB: &str = "application/vnd.farrier.deb.v1";
/// Documents of an output, as `cosign` names their types.
const DOCUMENT_TYPES: [&str; 3] = ["cyclonedx", "spdxjson", "slsaprovenance1"];
const MODULES: &str = "  modules: [farrier_hello]\n";
/// Platform of the images, which may not be this machine's.
const PLATFORM: [&str; 6] = ["--os", "debian", "--os-version", "12", "--arch", "amd64"];

pub fn ask_for(site: &Site, outputs: &str) {
    site.edit("images/hello.yaml", MODULES, &format!("{MODULES}  outputs: {outputs}\n"));
}

/// Returns the types and digests of the referrers of an image or output.
fn beside(site: &Site, digest: &str) -> BTreeSet<(String, String)> {
    let listed = site.inspect_raw(&format!("hello:{}", digest.replace(':', "-")));
    let text = |one: &Value, field: &str| one[field].as_str().unwrap().to_owned();
    let referrers = listed["manifests"].as_array().unwrap().iter();
    referrers.map(|one| (text(one, "artifactType"), text(one, "digest"))).collect()
}

/// Returns the packages of an image: their manifests' digests.
fn published(site: &Site, image: &str) -> Vec<String> {
    let listed = beside(site, image.split_once('@').unwrap().1);
    listed.into_iter().filter(|(kind, _)| kind == DEB).map(|(_, digest)| digest).collect()
}

/// Runs `farrier pull` for the kernel, with the file `x.deb` of the site as its target.
pub fn pull(site: &Site, kernel: &str, args: &[&str]) -> (Run, PathBuf) {
    pull_output(site, "deb", kernel, args)
}

pub fn pull_output(site: &Site, output: &str, kernel: &str, args: &[&str]) -> (Run, PathBuf) {
    let file = site.path("x.deb");
    let words = ["pull", output, "hello", "--kernel", kernel, "-o", "json", "--to", file.to_str().unwrap()];
    let run = site.farrier(&[&words[..], &PLATFORM, args].concat());
    (run, file)
}

#[test]
fn a_package_is_published_signed_carried_and_fetched() {
    let kernel = kernels::newest().newer;
    let site = Site::new();
    for name in ["site", "other"] {
        key(&site, name, P256);
    }
    site_yaml(&site, SIGNING);
    site.build("hello", &kernel, &["--push"]).exits(0);
    let image = pinned(&site, &kernel);
    // An older image has no package: farrier makes it from the image.
    let (run, file) = pull(&site, &kernel, &[]);
    let made = run.exits(0).json();
    assert_eq!((&made["published"], &made["verified"]), (&false.into(), &true.into()), "{made}");
    let content = fs::read(&file).unwrap();
    assert_eq!(made["digest"], Digest::of(&content).as_str());

    ask_for(&site, "[deb]");
    let built = site.build("hello", &kernel, &["--push", "-o", "json"]).exits(0).json();
    assert_eq!(built["outcome"], "up-to-date", "outputs change no input hash");
    let packages = published(&site, &image);
    assert_eq!(packages, [made["artifact"].as_str().unwrap()]);
    fs::remove_file(&file).unwrap();
    let pem = |name: &str| site.definitions().join(format!("{name}.pem")).display().to_string();
    let (run, _) = pull(&site, &kernel, &["--key", &pem("site")]);
    let fetched = run.exits(0).json();
    assert_eq!((&fetched["published"], &fetched["digest"]), (&true.into(), &made["digest"]), "{fetched}");
    assert!(fs::read(&file).unwrap() == content);

    // The modules are the image's.
    let (tree, layers) = (tempfile::tempdir().unwrap(), site::unpacked(&image));
    run_dpkg_deb(&file, tree.path());
    let modules = format!("lib/modules/{kernel}");
    let of_image = layers.path().join("tree").join(&modules).join("extra/farrier_hello.ko");
    let of_package = tree.path().join(&modules).join("updates/farrier-hello/extra/farrier_hello.ko");
    assert!(fs::read(of_image).unwrap() == fs::read(of_package).unwrap());

    // cosign accepts the package's signature and documents; farrier refuses another key, and a package that anyone pushed.
    let home = site.path("home");
    fs::create_dir_all(&home).unwrap();
    let package = format!("{}/hello@{}", site.location, packages[0]);
    for version in [&TWO, &THREE] {
        let cosign = Cosign::of(version, &home);
        cosign.accepts(&["verify", "--key", &pem("site"), &package]);
        for kind in DOCUMENT_TYPES {
            cosign.accepts(&["verify-attestation", "--key", &pem("site"), "--type", kind, &package]);
        }
    }
    let listed = beside(&site, &packages[0]);
    for kind in ["application/vnd.cyclonedx+json", "application/spdx+json", "application/vnd.in-toto+json"] {
        assert_eq!(listed.iter().filter(|(found, _)| found == kind).count(), 1, "{kind}: {listed:?}");
    }
    let (run, _) = pull(&site, &kernel, &["--key", &pem("other")]);
    run.exits(1).line("has no deb with an accepted signature");
    let (run, _) = pull(&site, &kernel, &["--insecure-no-signature"]);
    assert_eq!(run.exits(0).json()["verified"], false);

    // A bundle carries the package with its signature and documents.
    let to = Site::new();
    let bundle = site.path("site.bundle").display().to_string();
    let reference = format!("hello:1.0-{kernel}-debian12-amd64");
    site.farrier(&["bundle", "export", "--reference", &reference, "--to", &bundle]).exits(0);
    to.farrier(&["bundle", "import", "--key", &pem("site"), &bundle]).exits(0);
    let (run, file) = pull(&to, &kernel, &["--key", &pem("site")]);
    assert_eq!(run.exits(0).json()["published"], true);
    assert!(fs::read(file).unwrap() == content);
    assert_eq!(beside(&to, &packages[0]), listed);

    // A second publication adds nothing, and garbage collection takes nothing.
    site.build("hello", &kernel, &["--push"]).exits(0);
    assert_eq!(beside(&site, &packages[0]), listed);
    let collected = site.farrier(&["gc", "--delete", "-o", "json"]).exits(0).json();
    assert_eq!(collected["leftovers"], serde_json::json!([]), "{collected}");
    assert_eq!(beside(&site, &packages[0]), listed);

    // After a rotation, the new key signs the package and its documents, too.
    key(&site, "new", P256);
    site_yaml(
        &site,
        "  imageSigning: {key: {file: new.key}}\n  policy: {requireSigned: {atLeast: 1, keys: [site.pem, new.pem]}}\n",
    );
    site.farrier(&["rotate"]).exits(0);
    let (run, _) = pull(&site, &kernel, &["--key", &pem("new")]);
    assert_eq!(run.exits(0).json()["published"], true);
    for kind in DOCUMENT_TYPES {
        let words = ["verify-attestation", "--key", &pem("new"), "--type", kind, &package];
        Cosign::of(&THREE, &home).accepts(&words);
    }
}

/// A host keeps an extension with its signatures, and verifies both at each boot.
#[test]
fn a_stored_extension_is_verified_without_the_registry() {
    let kernel = kernels::newest().newer;
    let site = Site::new();
    for name in ["site", "other"] {
        key(&site, name, P256);
    }
    site_yaml(&site, SIGNING);
    let store = site.path("store").display().to_string();
    let from_store = format!("oci:{store}");
    let file = site.path("x.raw");
    let pull = |key: &str, options: &[&str]| {
        let (key, file) = (site.definitions().join(format!("{key}.pem")), file.to_str().unwrap().to_owned());
        let words = ["pull", "sysext", "hello", "--kernel", &kernel, "-o", "json", "--to", &file];
        site.farrier(&[&words[..], &PLATFORM, &["--key", key.to_str().unwrap()], options].concat())
    };
    site.build("hello", &kernel, &["--push"]).exits(0);
    let refused = pull("site", &["--store", &store]).exits(1);
    refused.line("has no sysext in the registry to store");
    refused.line("hint: publish it");
    assert!(!file.exists(), "a host would make the extension again and again");
    ask_for(&site, "[sysext]");
    site.build("hello", &kernel, &["--push"]).exits(0);
    let published = pull("site", &["--store", &store]).exits(0).json();
    let content = fs::read(&file).unwrap();

    let stored = pull("site", &["--registry", &from_store, "--offline"]).exits(0).json();
    assert_eq!((&stored["digest"], &stored["verified"]), (&published["digest"], &true.into()));
    assert!(fs::read(&file).unwrap() == content);
    pull("other", &["--registry", &from_store]).exits(1).line("has no sysext with an accepted signature");

    let digest = published["digest"].as_str().unwrap().trim_start_matches("sha256:");
    let blob = site.path("store").join("blobs/sha256").join(digest);
    // A host links the extension: the link is verified in place, and never written through.
    fs::remove_file(&file).unwrap();
    fs::hard_link(&blob, &file).unwrap();
    pull("site", &["--registry", &from_store]).exits(0);
    let mut altered = content;
    altered[1 << 20] ^= 1;
    fs::write(&blob, altered).unwrap();
    let altered = pull("site", &["--registry", &from_store]);
    assert_ne!(altered.code, Some(0), "an altered extension: {altered}");
}

/// A tag and the annotations of an image's manifest are not signed: a signed output of another kernel stays one of that kernel.
#[test]
fn a_signed_output_for_another_kernel_is_refused() {
    let kernels::Kernels { older, newer } = kernels::newest();
    let site = Site::new();
    key(&site, "site", P256);
    site_yaml(&site, SIGNING);
    ask_for(&site, "[sysext]");
    site.build("hello", &older, &["--push"]).exits(0);
    let image = pinned(&site, &older);
    let image = site.inspect_raw(image.rsplit_once('/').unwrap().1);
    let pem = site.definitions().join("site.pem").display().to_string();
    let (run, file) = pull_output(&site, "sysext", &older, &["--key", &pem]);
    let fetched = run.exits(0).json();
    let title = format!("farrier-hello-{older}.raw");
    fs::remove_file(&file).unwrap();
    // An attacker who may push gives the image's manifest the annotation of the newer kernel, and makes it name the image.
    let mut relabeled = image.clone();
    relabeled["artifactType"] = "application/vnd.farrier.sysext.v1".into();
    relabeled["annotations"]["farrier.dev/kernel-release"] = newer.clone().into();
    let digest = fetched["image"].as_str().unwrap().split_once('@').unwrap().1;
    let length = image.to_string().len();
    relabeled["subject"] =
        serde_json::json!({"mediaType": image["mediaType"], "digest": digest, "size": length});
    let (host, path) = site.location.split_once('/').unwrap();
    let body = site.path("relabeled.json");
    fs::write(&body, relabeled.to_string()).unwrap();
    let kind = format!("content-type: {}", image["mediaType"].as_str().unwrap());
    let url = format!("http://{host}/v2/{path}/hello/manifests/relabeled");
    let body = format!("@{}", body.display());
    run_curl(&["--request", "PUT", "--header", &kind, "--data-binary", &body, &url]);

    let (run, file) = pull_output(&site, "sysext", &newer, &["--key", &pem]);
    run.exits(1).line(&format!("it is {title}"));
    assert!(!file.exists());
}

fn run_curl(words: &[&str]) {
    run(Command::new("curl").args(["--fail", "--silent", "--show-error"]).args(words));
}

/// A file that has the output's bytes stays as it is, so that a host verifies a link to its store and needs no space for a copy.
#[test]
fn of_two_versions_the_newest_is_pulled_and_a_current_file_stays() {
    let kernel = kernels::newest().newer;
    let site = Site::new();
    site.build("hello", &kernel, &["--push"]).exits(0);
    site.edit("images/hello.yaml", "version: \"1.0\"", "version: \"1.10\"");
    site.build("hello", &kernel, &["--push"]).exits(0);
    site.edit("images/hello.yaml", "version: \"1.10\"", "version: \"1.9\"");
    site.build("hello", &kernel, &["--push"]).exits(0);
    let pull = || pull(&site, &kernel, &["--insecure-no-signature"]);
    let (run, file) = pull();
    let newest = format!("/hello:1.10-{kernel}-debian12-amd64");
    let digest = run.exits(0).json()["image"].as_str().unwrap().split_once('@').unwrap().1.to_owned();
    assert_eq!(site.inspect(newest.trim_start_matches('/'))["Digest"], digest.as_str());
    let inode = || std::os::unix::fs::MetadataExt::ino(&fs::metadata(&file).unwrap());
    let before = inode();
    ask_for(&site, "[deb]");
    site.edit("images/hello.yaml", "version: \"1.9\"", "version: \"1.10\"");
    site.build("hello", &kernel, &["--push"]).exits(0);
    let (run, _) = pull();
    assert_eq!(run.exits(0).json()["published"], true);
    assert_eq!(inode(), before, "the published output has the same bytes");
    fs::write(&file, "other").unwrap();
    pull().0.exits(0);
    assert_ne!(fs::read(&file).unwrap(), b"other");
}

pub fn run_dpkg_deb(package: &Path, tree: &Path) {
    run(Command::new("dpkg-deb").arg("--extract").args([package, tree]));
}

#[test]
fn what_cannot_be_pulled() {
    let kernel = kernels::newest().newer;
    let site = Site::new();
    let (run, _) = pull(&site, &kernel, &["--insecure-no-signature"]);
    run.exits(1).line("has no image for kernel");
    let words = ["pull", "deb", "hello", "--insecure-no-signature"];
    site.farrier(&words).exits(2).line("hint: give NAME:TAG");
    let (run, _) = pull(&site, &kernel, &[]);
    run.exits(2).line("no key to verify the image with");
    let words = ["pull", "deb", "hello", "--os", "debian"];
    site.farrier(&words).exits(2).line("--os-version <VERSION>");
}
