//! Images from other registries, copied below the prefix of the site's registry. Both registries are real.
use std::{fs, os::unix::fs::PermissionsExt as _};

use farrier_core::{
    facts::media_type,
    image::{Digest, Repository, Version},
};
use farrier_store::registry::{Registry as _, RegistryOptions, RemoteRegistry};

use crate::{
    signatures::{P256, key, site_yaml},
    support::{
        registry_process::{RegistryProcess, Wants},
        scripted_registry::{HARBOR, ScriptedRegistry},
        site::{Site, with_immutable_tags},
    },
};
use serde_json::{Value, json};

const KERNEL: &str = "6.1.192-acme";

/// A kernel whose headers are in the definitions, and whose toolchain is an image in another registry.
const FAMILY: &str = r#"apiVersion: farrier.dev/v1alpha1
kind: KernelFamily
metadata: {name: acme}
spec:
  match: {release: '.*-acme'}
  headers: {tarball: {path: "headers/{{release}}"}}
  toolchain: {image: "HOST/build/gcc:12"}
"#;

/// Digests of a tagged image with two platforms.
struct Published {
    index: Digest,
    manifests: Vec<Digest>,
    blobs: Vec<Digest>,
}

fn remote() -> RemoteRegistry {
    RemoteRegistry::new("copies".to_owned(), &RegistryOptions::default())
}

fn repository(text: &str) -> Repository {
    text.parse().unwrap()
}

fn tag(text: &str) -> Version {
    Version::Tag(text.parse().unwrap())
}

/// Publishes an image whose content depends on its name and its platforms.
async fn publish(place: &Repository, version: &str) -> Published {
    let registry = remote();
    let (mut parts, mut manifests, mut blobs) = (Vec::new(), Vec::new(), Vec::new());
    for arch in ["amd64", "arm64"] {
        let config =
            json!({"architecture": arch, "os": "linux", "rootfs": {"type": "layers", "diff_ids": []}});
        let (config, layer) = (config.to_string().into_bytes(), format!("{place} for {arch}").into_bytes());
        let described = |kind: &str, bytes: &[u8]| json!({"mediaType": kind, "digest": Digest::of(bytes).as_str(), "size": bytes.len()});
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": media_type::OCI_MANIFEST,
            "config": described(media_type::OCI_CONFIG, &config),
            "layers": [described(media_type::OCI_LAYER, &layer)],
        });
        let manifest = manifest.to_string().into_bytes();
        for bytes in [&config, &layer] {
            registry.push_bytes(place, bytes).await.unwrap();
            blobs.push(Digest::of(bytes));
        }
        let digest = Digest::of(&manifest);
        let own = Version::Digest(digest.clone());
        registry.push_manifest(place, &own, media_type::OCI_MANIFEST, &manifest).await.unwrap();
        let mut part = described(media_type::OCI_MANIFEST, &manifest);
        part["platform"] = json!({"architecture": arch, "os": "linux"});
        parts.push(part);
        manifests.push(digest);
    }
    let index =
        json!({"schemaVersion": 2, "mediaType": media_type::OCI_INDEX, "manifests": parts}).to_string();
    let index =
        registry.push_manifest(place, &tag(version), media_type::OCI_INDEX, index.as_bytes()).await.unwrap();
    Published { index, manifests, blobs }
}

/// Writes the minimal build tree of a fictional kernel.
fn write_headers(site: &Site) {
    let build = format!("headers/{KERNEL}");
    let text = format!("#define UTS_RELEASE \"{KERNEL}\"\n");
    site.define(&format!("{build}/include/generated/utsrelease.h"), &text);
    site.define(
        &format!("{build}/include/config/auto.conf"),
        "CONFIG_CC_VERSION_TEXT=\"gcc (GCC) 12.2.0\"\nCONFIG_X86_64=y\nCONFIG_64BIT=y\n",
    );
    site.define(&format!("{build}/Module.symvers"), "0x12345678\tprintk\tvmlinux\tEXPORT_SYMBOL\t\n");
    site.define(&format!("{build}/Makefile"), "VERSION = 6\n");
    for tool in ["scripts/basic/fixdep", "scripts/mod/modpost"] {
        site.define(&format!("{build}/{tool}"), "\u{7f}ELF\u{2}\u{1}\u{1}");
        let executable = fs::Permissions::from_mode(0o755);
        fs::set_permissions(site.definitions().join(&build).join(tool), executable).unwrap();
    }
}

/// Defines an image whose toolchain and runtime base are in the registry at `host`.
fn define_image(site: &Site, host: &str) {
    site.define("kernels/00-acme.yaml", &FAMILY.replace("HOST", host));
    write_headers(site);
    fs::remove_file(site.definitions().join("images/broken.yaml")).unwrap();
    let hello = fs::read_to_string(site.definitions().join("images/hello.yaml")).unwrap();
    let (head, _rollout) = hello.split_once("  rollout:").unwrap();
    let base = format!("  runtime: {{base: {{image: \"{host}/base:1\"}}, entrypoint: [insmod]}}\n");
    site.define("images/hello.yaml", &format!("{head}{base}"));
}

/// Returns the reports of `farrier mirror`.
#[track_caller]
fn mirror(site: &Site) -> Vec<Value> {
    let target = ["--kernel", KERNEL, "--os", "debian", "--os-version", "12", "--arch", "amd64"];
    let run = site.farrier(&[&["mirror", "-o", "json"][..], &target].concat()).exits(0);
    run.json().as_array().unwrap().clone()
}

/// Returns the reports of `farrier mirror` about copied images.
#[track_caller]
fn mirrored(site: &Site) -> Vec<Value> {
    mirror(site).into_iter().filter(|report| report["kind"] == "mirror").collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn images_with_all_their_platforms_are_copied_and_stand_in_for_a_registry_that_is_gone() {
    let mut origin = RegistryProcess::start(Wants::default());
    let host = origin.host.clone();
    let toolchain = publish(&repository(&format!("{host}/build/gcc")), "12").await;
    let base = publish(&repository(&format!("{host}/base")), "1").await;
    let pinned = publish(&repository(&format!("{host}/pinned")), "1").await;

    let site = Site::new();
    site.define("kernels/00-acme.yaml", &FAMILY.replace("HOST", &host));
    write_headers(&site);
    fs::remove_file(site.definitions().join("images/broken.yaml")).unwrap();
    let hello = fs::read_to_string(site.definitions().join("images/hello.yaml")).unwrap();
    let (head, _rollout) = hello.split_once("  rollout:").unwrap();
    let runtime =
        |base: &str| format!("{head}  runtime: {{base: {{image: \"{base}\"}}, entrypoint: [insmod]}}\n");
    site.define("images/hello.yaml", &runtime(&format!("{host}/base:1")));
    let other = runtime(&format!("{host}/pinned@{}", pinned.index))
        .replace("name: hello}\nspec", "name: other}\nspec");
    site.define("images/other.yaml", &other.replace("farrier_hello]", "farrier_other]"));
    site.manifest("edge-2.yaml", KERNEL);

    let copies = mirrored(&site);
    assert_eq!(copies.len(), 3, "{copies:#?}");
    assert!(copies.iter().all(|copy| copy["new"] == true), "{copies:#?}");
    assert!(mirrored(&site).iter().all(|copy| copy["new"] == false));

    // What only an index names has a tag, too, and survives the registry's garbage collection.
    site.registry.delete_untagged();
    // All images were copied by tag. An image referenced by digest gets a tag derived from the digest.
    let below = format!("{}/mirror/{}", site.location, host.replace(':', "-"));
    let digest_tag = format!("digest-{}", pinned.index.hex());
    for (name, version, original) in
        [("build/gcc", "12", &toolchain), ("base", "1", &base), ("pinned", digest_tag.as_str(), &pinned)]
    {
        let place = repository(&format!("{below}/{name}"));
        let found = remote().manifest(&place, &tag(version)).await.unwrap().unwrap();
        assert_eq!((&found.digest, found.media_type.as_str()), (&original.index, media_type::OCI_INDEX));
        for part in &original.manifests {
            assert!(remote().manifest(&place, &Version::Digest(part.clone())).await.unwrap().is_some());
        }
        for blob in &original.blobs {
            assert!(remote().has_blob(&place, blob).await.unwrap(), "{name}: {blob}");
        }
    }

    // `--offline` gives the same plan after the other registry is gone; without it, planning fails.
    let hashes = |plan: &Value| -> Vec<Value> {
        let builds = plan["builds"].as_array().unwrap();
        assert_eq!(builds.len(), 2, "{plan:#}");
        builds.iter().map(|build| build["cell"]["inputHash"].clone()).collect()
    };
    let before = site.farrier(&["plan", "-o", "json"]).exits(0).json();
    origin.stop();
    let offline = site.farrier(&["plan", "--offline", "-o", "json"]).exits(0).json();
    assert_eq!(hashes(&offline), hashes(&before));
    assert!(hashes(&before).iter().all(Value::is_string), "{before:#}");
    let online = site.farrier(&["plan", "-o", "json"]);
    assert_eq!(online.code, Some(3), "{online}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_follows_a_tag_that_moves_also_where_tags_are_immutable() {
    let origin = RegistryProcess::start(Wants::default());
    publish(&repository(&format!("{}/build/gcc", origin.host)), "12").await;
    let place = repository(&format!("{}/base", origin.host));
    let base = publish(&place, "1").await;
    let mut site = Site::new();
    let scripted = ScriptedRegistry::start(&site.registry.host, HARBOR).await;
    site.location = format!("{}/drivers", scripted.host);
    site.define("site.yaml", &with_immutable_tags(&scripted.host, ""));
    define_image(&site, &origin.host);
    mirror(&site);

    let moved = &base.manifests[0];
    let image = remote().manifest(&place, &Version::Digest(moved.clone())).await.unwrap().unwrap();
    remote().push_manifest(&place, &tag("1"), &image.media_type, &image.bytes).await.unwrap();
    let copies = mirrored(&site);
    let copy = copies.iter().find(|copy| copy["digest"] == moved.as_str()).unwrap();
    assert_eq!(copy["new"], true, "{copies:#?}");
    let mut tags = site.tags(copy["repository"].as_str().unwrap());
    tags.sort();
    assert_eq!(tags, ["1", "1.0000000001"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn mirror_adds_the_sites_signature_to_that_of_another_trusted_key_and_rotate_to_all() {
    let origin = RegistryProcess::start(Wants::default());
    publish(&repository(&format!("{}/build/gcc", origin.host)), "12").await;
    publish(&repository(&format!("{}/base", origin.host)), "1").await;
    let site = Site::new();
    define_image(&site, &origin.host);
    for name in ["first", "second", "third"] {
        key(&site, name, P256);
    }
    let uses = |own: &str, accepted: &str| {
        site_yaml(
            &site,
            &format!(
                "  imageSigning: {{key: {{file: {own}.key}}}}\n  policy: {{requireSigned: [{accepted}]}}\n"
            ),
        );
    };
    let signers = async |report: &Value| {
        let digest: Digest = report["digest"].as_str().unwrap().parse().unwrap();
        let place = format!("{}/{}", site.location, report["repository"].as_str().unwrap());
        let signature = tag(&format!("sha256-{}.sig", digest.hex()));
        let found = remote().manifest(&repository(&place), &signature).await.unwrap().expect(&place);
        let manifest: Value = serde_json::from_slice(&found.bytes).unwrap();
        manifest["layers"].as_array().unwrap().len()
    };
    uses("first", "first.pem");
    let inputs = |reports: Vec<Value>| -> Vec<Value> {
        // The definitions change with site.yaml.
        let is_input = |report: &Value| report["kind"] != "mirror" && report["kind"] != "definitions";
        reports.into_iter().filter(is_input).collect()
    };
    let stored = inputs(mirror(&site));
    assert!(stored.len() >= 2, "{stored:#?}");
    uses("second", "second.pem, first.pem");
    let puts = site.registry.requests_to("PUT", "drivers/headers");
    for report in inputs(mirror(&site)) {
        assert_eq!((&report["new"], signers(&report).await), (&json!(false), 2), "{report:#}");
    }
    assert!(site.registry.requests_to("PUT", "drivers/headers") > puts);
    let puts = site.registry.requests_to("PUT", "drivers/headers");
    mirror(&site);
    assert_eq!(
        site.registry.requests_to("PUT", "drivers/headers"),
        puts,
        "an existing signature is made again"
    );

    uses("third", "third.pem, second.pem");
    let rotated = site.farrier(&["rotate", "--offline", "-o", "json"]).exits(0).json();
    let of = |kind: &str| {
        let is_of = |artifact: &&Value| artifact["reference"].as_str().unwrap().contains(kind);
        rotated.as_array().unwrap().iter().filter(is_of).map(|artifact| artifact["outcome"].clone()).collect()
    };
    let (headers, definitions): (Vec<Value>, Vec<Value>) = (of("/headers@"), of("/definitions@"));
    assert_eq!(headers, ["signed"]);
    // The first key alone signed the first definitions.
    assert!(
        definitions.contains(&json!("signed")) && definitions.contains(&json!("untrusted")),
        "{rotated:#}"
    );
    for report in &stored {
        assert_eq!(signers(report).await, 3, "{report:#}");
    }
}
