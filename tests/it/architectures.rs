//! One tag for two architectures in Debian's docker-registry: each published image adds an entry to the index, and every
//! operation that resolves tags handles the index.
use std::fs;

use farrier_core::{
    facts::media_type,
    image::{ImageReference, Version},
};
use farrier_store::registry::{Registry, RegistryOptions, RemoteRegistry};
use kmod::Verdict;
use oci::{Descriptor, ImageIndex, ImageManifest, Platform};
use serde_json::{Value, json};

use crate::page::Ui;
use crate::signatures::{P256, SIGNING, key, site_yaml};
use crate::support::{
    kube_api::objects::node,
    live::{DRIVER, Live, OLD_IMAGE},
    published::publish,
    registry_process::Wants,
    site::{Run, Site, skopeo},
};

/// A release that is the same for both architectures, like Ubuntu's.
const KERNEL: &str = "6.8.0-45-generic";
const TAG: &str = "hello:1.0-6.8.0-45-generic";

/// Arguments that plan for an engine with build machines of each architecture.
const ELSEWHERE: &[&str] = &["plan", "--engine", "kubernetes", "-o", "json"];

/// Creates a site with a DaemonSet and one node per architecture.
fn site() -> Site {
    let site = Site::with_registry(Wants { deletion: true, ..Wants::default() });
    site.edit(
        "images/hello.yaml",
        "  template: kbuild\n",
        "  template: kbuild\n  tags: ['{{version}}-{{kernel_label}}', '{{version}}-{{kernel_label}}-{{arch}}']\n",
    );
    site.define(
        "kernels/05-shared.yaml",
        "apiVersion: farrier.dev/v1alpha1\nkind: KernelFamily\nmetadata: {name: shared}\nspec:\n  match: {release: '.*-generic'}\n  \
         headers: {tarball: {path: 'headers/{{release}}'}}\n  toolchain: {bootstrap: {suite: bookworm, include: [gcc-12, make]}}\n",
    );
    headers(&site, KERNEL);
    site.canary(KERNEL);
    let node = fs::read_to_string(site.cluster().join("edge-2.yaml")).unwrap();
    let node = node.replace("amd64", "arm64").replace("edge-2", "edge-3");
    fs::write(site.cluster().join("edge-3.yaml"), node).unwrap();
    site
}

/// Defines headers that fit either architecture.
fn headers(site: &Site, kernel: &str) {
    for (file, text) in [
        ("Makefile", String::new()),
        (".config", "CONFIG_64BIT=y\nCONFIG_MODULES=y\nCONFIG_X86_64=y\nCONFIG_ARM64=y\n".to_owned()),
        ("include/generated/utsrelease.h", format!("#define UTS_RELEASE \"{kernel}\"\n")),
    ] {
        site.define(&format!("headers/{kernel}/{file}"), &text);
    }
}

/// Returns the planned cells of both architectures.
fn cells(site: &Site) -> [Value; 2] {
    // Headers from a file are used for builds on their own architecture only.
    let here = site.farrier(&["plan", "-o", "json"]).json();
    let skipped: Vec<&Value> = here["skipped"].as_array().unwrap().iter().collect();
    assert!(skipped.iter().any(|cell| cell["why"]["reason"] == "foreign-architecture"), "{here}");
    let plan = site.farrier(ELSEWHERE).json();
    let builds = plan["builds"].as_array().unwrap();
    ["amd64", "arm64"].map(|arch| {
        let cell = builds.iter().map(|build| &build["cell"]).find(|cell| cell["target"]["arch"] == arch);
        cell.unwrap_or_else(|| panic!("no build for {arch}: {plan}")).clone()
    })
}

fn digest(image: &str) -> &str {
    image.split_once('@').unwrap().1
}

/// Publishes both images: amd64 under the common tag, arm64 only under its architecture-specific tag.
fn published_apart(site: &Site) -> [String; 2] {
    let [amd64, mut arm64] = cells(site);
    let first = publish(&amd64, Verdict::Loads);
    assert_eq!(site.inspect_raw(TAG)["config"]["mediaType"], "application/vnd.oci.image.config.v1+json");
    assert_eq!(amd64["reference"], arm64["reference"]);
    arm64["reference"] = arm64["further"][0].clone();
    [first, publish(&arm64, Verdict::Loads)]
}

/// Publishes both images, then reconciles so that the common tag becomes an index of both.
fn shared(site: &Site) -> [String; 2] {
    let images = published_apart(site);
    site.run_once().exits(0);
    site.run_once().exits(0);
    images
}

#[test]
fn a_pass_adds_an_image_to_the_tag_and_rolls_the_index_out() {
    let site = site();
    let images = shared(&site);
    let index = site.inspect_raw(TAG);
    assert_eq!(index["mediaType"], "application/vnd.oci.image.index.v1+json");
    let entries: Vec<(&str, &str)> = index["manifests"]
        .as_array()
        .unwrap()
        .iter()
        .map(|entry| (entry["platform"]["architecture"].as_str().unwrap(), entry["digest"].as_str().unwrap()))
        .collect();
    assert_eq!(entries, [("amd64", digest(&images[0])), ("arm64", digest(&images[1]))]);
    let set = site.image();
    assert_eq!(site.inspect_raw(&set[set.rfind("hello@").unwrap()..]), index, "{set}");

    let (puts, run) = (site.registry.requests("PUT"), site.run_once().exits(0));
    assert_eq!((site.image(), site.registry.requests("PUT")), (set, puts), "{run}");
    let verified = site.farrier(&["verify", "--insecure-no-signature", TAG, "-o", "json"]).json();
    let found: Vec<(&str, &str)> = verified["platforms"]
        .as_array()
        .unwrap()
        .iter()
        .map(|image| {
            (digest(image["image"].as_str().unwrap()), image["checks"][1]["result"].as_str().unwrap())
        })
        .collect();
    assert_eq!(found, [(digest(&images[0]), "ok"), (digest(&images[1]), "ok")], "{verified}");
}

#[test]
fn another_architecture_keeps_the_rollout_waiting_and_is_no_conflict() {
    let site = site();
    publish(&cells(&site)[0], Verdict::Loads);
    let plan = site.farrier(ELSEWHERE).json();
    assert_eq!(plan["conflicts"], json!([]));
    assert_eq!(plan["builds"].as_array().unwrap().len(), 1, "{plan}");
    assert_eq!(plan["builds"][0]["cell"]["target"]["arch"], "arm64");
    assert_eq!(plan["rollouts"][0]["decision"], "pending", "{}", plan["rollouts"]);
}

/// Replaces the first image of the index with one that lacks farrier's annotations.
fn put_a_stranger_in(ImageReference { repository, version }: &ImageReference) {
    let registry = RemoteRegistry::new("registry".to_owned(), &RegistryOptions::default());
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
        let stored = registry.manifest(repository, version).await.unwrap().unwrap();
        let mut index = ImageIndex::parse(&stored.bytes).unwrap();
        let entry = &mut index.manifests[0];
        let own = Version::Digest(entry.digest.clone());
        let image = registry.manifest(repository, &own).await.unwrap().unwrap();
        let mut image = ImageManifest::parse(&image.bytes).unwrap();
        image.annotations.clear();
        let bytes = image.to_bytes().unwrap();
        let foreign = Descriptor {
            platform: entry.platform.clone(),
            ..Descriptor::of(media_type::OCI_MANIFEST, &bytes)
        };
        let by_digest = Version::Digest(foreign.digest.clone());
        registry.push_manifest(repository, &by_digest, media_type::OCI_MANIFEST, &bytes).await.unwrap();
        *entry = foreign;
        let bytes = index.to_bytes().unwrap();
        registry.push_manifest(repository, version, media_type::OCI_INDEX, &bytes).await.unwrap();
    });
}

fn conflicts(site: &Site) -> usize {
    site.farrier(ELSEWHERE).json()["conflicts"].as_array().unwrap().len()
}

#[test]
fn an_index_of_others_is_a_conflict() {
    let site = site();
    shared(&site);
    let tag: ImageReference = format!("{}/{TAG}", site.location).parse().unwrap();
    let index = ImageIndex::parse(site.inspect_raw(TAG).to_string().as_bytes()).unwrap();
    let ours = String::from_utf8(index.to_bytes().unwrap()).unwrap();
    // Go's JSON parser takes the last of two duplicate lists; farrier takes the one whose name has the exact case.
    let hidden = ours.replacen(r#","manifests":"#, r#","Manifests":[],"manifests":"#, 1);
    push_index(&tag, hidden.as_bytes());
    assert_eq!(conflicts(&site), 2);
    let said = site.farrier(&["verify", "--insecure-no-signature", TAG]).exits(1);
    said.line("farrier did not write this index");

    push_index(&tag, ours.as_bytes());
    assert_eq!(conflicts(&site), 0, "the original index was restored");
    put_a_stranger_in(&tag);
    assert_eq!(conflicts(&site), 2);
}

fn push_index(ImageReference { repository, version }: &ImageReference, bytes: &[u8]) {
    let registry = RemoteRegistry::new("registry".to_owned(), &RegistryOptions::default());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(registry.push_manifest(repository, version, media_type::OCI_INDEX, bytes)).unwrap();
}

/// farrier signs an index only when every image in the index carries a signature of the site's key.
#[test]
fn an_index_is_signed_where_the_site_signs_and_its_images_are() {
    let site = site();
    key(&site, "site", P256);
    site_yaml(&site, SIGNING);
    published_apart(&site);
    let apart = site.inspect_raw(TAG);
    site.run_once().exits(1).line("is not signed with a key of this site");
    assert_eq!(site.inspect_raw(TAG), apart);

    site_yaml(&site, "  imageSigning: {key: {file: site.key}, existing: sign}\n");
    site.run_once().exits(0);
    site.run_once().exits(0);
    let set = site.image();
    let signature = site.inspect_raw(&format!("hello:{}.sig", digest(&set).replace(':', "-")));
    let payload = &signature["layers"][0];
    assert_eq!(payload["mediaType"], "application/vnd.dev.cosign.simplesigning.v1+json", "{signature}");
}

#[test]
fn bundles_carry_the_index_and_the_clean_up_takes_it_away() {
    let site = site();
    let images = shared(&site);
    let (index, there) = (site.inspect_raw(TAG), |image: &str| {
        let reference = format!("docker://{image}");
        skopeo(&["inspect", "--raw", "--tls-verify=false", &reference]).status.success()
    });
    let file = site.path("site.bundle").display().to_string();
    let target = ["--kernel", KERNEL, "--os", "debian", "--os-version", "12", "--arch", "amd64"];
    let words =
        [&["bundle", "export", "--incomplete", "--image", "hello", "--to", &file], &target[..]].concat();
    site.farrier(&words).exits(0);
    let other = Site::new();
    other.farrier(&["bundle", "import", "--insecure-no-signature", &file]).exits(0);
    assert_eq!(other.inspect_raw(TAG), index);

    let gc = |site: &Site, words: &[&str]| -> Run {
        site.farrier(&[&["gc", "--keep-days", "0", "-o", "json"], words].concat()).exits(0)
    };
    assert_eq!(gc(&site, &["--delete"]).json()["images"], json!([]));
    assert!(images.iter().all(|image| there(image)));
    // Neither node runs that kernel any longer, and nothing references the image.
    for node in ["edge-2.yaml", "edge-3.yaml", "daemonset.yaml"] {
        fs::remove_file(site.cluster().join(node)).unwrap();
    }
    let gone = gc(&site, &["--delete"]).json();
    assert_eq!(gone["images"].as_array().unwrap().len(), 3, "{gone}");
    assert!(images.iter().all(|image| !there(image)));
    assert_eq!(site.tags("hello"), [""; 0]);
}

/// Pushes an index of two images under a tag, the only reference to them.
fn put_index(ImageReference { repository, version }: &ImageReference, images: &[String; 2]) {
    let registry = RemoteRegistry::new("registry".to_owned(), &RegistryOptions::default());
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
        let mut index = ImageIndex::empty();
        for (arch, image) in ["amd64", "arm64"].into_iter().zip(images) {
            let own = Version::Digest(digest(image).parse().unwrap());
            let stored = registry.manifest(repository, &own).await.unwrap().unwrap();
            let entry = Descriptor::of(media_type::OCI_MANIFEST, &stored.bytes);
            index.manifests.push(Descriptor { platform: Some(Platform::linux(arch)), ..entry });
        }
        let bytes = index.to_bytes().unwrap();
        registry.push_manifest(repository, version, media_type::OCI_INDEX, &bytes).await.unwrap();
    });
}

#[test]
fn a_registry_alone_shows_the_image_of_each_architecture() {
    let site = site();
    let images = cells(&site).map(|cell| publish(&cell, Verdict::Loads));
    put_index(&format!("{}/{TAG}", site.location).parse().unwrap(), &images);
    assert_eq!(site.tags("hello"), [TAG.split_once(':').unwrap().1]);
    let ui = Ui::of(&site);
    let fleet = ui.get("");
    for wanted in ["published 2", "debian 12, amd64", "debian 12, arm64"] {
        assert!(fleet.contains(wanted), "{wanted} is not in {fleet}");
    }
    let cells: Vec<String> = fleet
        .split("<a href=c/")
        .skip(1)
        .map(|rest| rest.split('>').next().unwrap())
        .map(|cell| ui.get(&format!("c/{cell}")))
        .collect();
    for image in &images {
        let digits = digest(image).split_once(':').unwrap().1;
        assert!(cells.iter().any(|cell| cell.contains(digits)), "{image}: {cells:?}");
    }
}

/// Returns a node of the other architecture.
fn arm64_node(name: &str, kernel: &str) -> Value {
    let mut node = node(name, kernel);
    node["metadata"]["labels"]["kubernetes.io/arch"] = "arm64".into();
    node["status"]["nodeInfo"]["architecture"] = "arm64".into();
    node
}

/// Returns the architecture and the kernels of each entry of an index.
fn kernels_of(site: &Site, index: &Value) -> Vec<(String, String)> {
    let entry = |entry: &Value| {
        let image = site.inspect_raw(&format!("{DRIVER}@{}", entry["digest"].as_str().unwrap()));
        let kernels = image["annotations"]["farrier.dev/kernels"].as_str().unwrap().to_owned();
        (entry["platform"]["architecture"].as_str().unwrap().to_owned(), kernels)
    };
    index["manifests"].as_array().unwrap_or_else(|| panic!("no index: {index}")).iter().map(entry).collect()
}

/// Both architectures share one of the kernels. Tags of single images contain the architecture; the union's tag does not.
#[test]
fn a_union_over_two_architectures_is_an_index_with_the_kernels_of_each() {
    const NEXT: &str = "6.8.0-47-generic";
    let nodes = [node("a", KERNEL), arm64_node("b", KERNEL), arm64_node("c", NEXT)];
    let mut live = Live::at(site(), nodes, "union");
    headers(&live.site, NEXT);
    let planned = live.command(ELSEWHERE).output().unwrap();
    let plan: Value = serde_json::from_slice(&planned.stdout).unwrap();
    let builds = plan["builds"].as_array().unwrap();
    assert_eq!(builds.len(), 3, "{plan}");
    for build in builds {
        publish(&build["cell"], Verdict::Loads);
    }
    live.start(&["--interval", "1"]);
    live.until("the DaemonSet has an index", |live| live.image(DRIVER) != OLD_IMAGE);
    let (site, image) = (&live.site, live.image(DRIVER));
    let index = site.inspect_raw(&image[image.rfind("driver@").unwrap()..]);
    let own = |arch: &str, kernels: &str| (arch.to_owned(), kernels.to_owned());
    assert_eq!(
        kernels_of(site, &index),
        [own("amd64", KERNEL), own("arm64", &format!("{KERNEL} {NEXT}"))],
        "{}",
        live.log()
    );
    let mut tags = site.tags(DRIVER);
    tags.retain(|tag| tag.starts_with("1.0-union-"));
    let [tag] = tags.as_slice() else { panic!("more or less than one tag: {tags:?}") };
    let tag = format!("{DRIVER}:{tag}");
    assert_eq!(site.inspect_raw(&tag), index);
    let verified = site.farrier(&["verify", "--insecure-no-signature", &tag, "-o", "json"]).json();
    let platforms = verified["platforms"].as_array().unwrap();
    let checks = platforms.iter().flat_map(|image| image["checks"].as_array().unwrap());
    // The stand-ins of single images have no check reports.
    let checks = checks.filter(|check| check["check"] != "check report");
    let wrong: Vec<&Value> =
        checks.filter(|check| !matches!(check["result"].as_str(), Some("ok" | "skipped"))).collect();
    assert!(platforms.len() == 2 && wrong.is_empty(), "{verified}");

    // The index's content is cached: the next reconciles write nothing.
    let (before, puts) = (live.reconciles(), site.registry.requests("PUT"));
    live.until("further reconciles", |live| live.reconciles() > before + 1);
    assert_eq!((live.image(DRIVER), site.registry.requests("PUT")), (image, puts), "{}", live.log());
    live.kill();

    let site = &live.site;
    let file = site.path("site.bundle").display().to_string();
    let target = ["--kernel", NEXT, "--os", "debian", "--os-version", "12", "--arch", "arm64"];
    let words =
        [&["bundle", "export", "--incomplete", "--image", DRIVER, "--to", &file], &target[..]].concat();
    site.farrier(&words).exits(0);
    let other = Site::new();
    other.farrier(&["bundle", "import", "--insecure-no-signature", &file]).exits(0);
    assert_eq!(other.inspect_raw(&tag), index);

    // The cluster in this directory lacks the kernel of `c`. `gc` deletes the index before the images that it references.
    let gone = site.farrier(&["gc", "--keep-days", "0", "--delete", "-o", "json"]).exits(0).json();
    let digests: Vec<&str> =
        gone["images"].as_array().unwrap().iter().map(|image| image["digest"].as_str().unwrap()).collect();
    let arm64 = index["manifests"][1]["digest"].as_str().unwrap();
    assert_eq!(digests.len(), 3, "{gone}");
    assert_eq!((digests[0], digests[1]), (self::digest(&live.image(DRIVER)), arm64), "{gone}");
    let left = site.inspect_raw(&format!("{DRIVER}@{}", index["manifests"][0]["digest"].as_str().unwrap()));
    assert_eq!(left["annotations"]["farrier.dev/kernels"], KERNEL);
}
