//! Tests with an attacker who can write to the registry. The attacker replaces the content under the tags of header
//! sets, toolchains and bases, with any annotations.

use std::{fs, io::Write as _};

use farrier_core::{
    facts::{annotations, media_type},
    image::{Digest, ImageReference, RuntimeBase, Version},
    kernel::{Architecture, BootstrapSpec, HeaderSource, KernelTarget, Toolchain},
    plan::FetchedInputs,
};
use farrier_inputs::{FetchOptions, Fetcher, PackageRoot};
use farrier_local::cache::Cache;
use farrier_signing::testing::{EC_256, OpensslDir};
use farrier_store::{
    InputKind, NewInput, Store, StoredInput, header_tag, key_tag, platform_header_tag,
    registry::{RegistryOptions, connect},
};
use oci::{Descriptor, ImageManifest, error_chain};
use serde_json::json;

use super::*;
use crate::{
    images::{self, runtime_base, store_of},
    testing::{Bench, K9, K10, SYMBOLS, module},
};

/// Message of a refusal.
const NOT_SIGNED: &str = "is not signed with a key of this site";
/// The only file in the root file systems of these tests.
const COMPILER: &str = "usr/bin/make";

/// Switches to another machine of the site, with a separate cache.
fn machine(bench: &mut Bench, name: &str) {
    let cache = Cache::open(bench.root().join(name)).unwrap();
    let options = FetchOptions { apt_dir: bench.root().join("no-apt"), ..FetchOptions::default() };
    bench.services.cache = cache.clone();
    bench.services.images.cache = cache.clone();
    bench.services.fetcher = Fetcher::new(cache, options).with_definitions(bench.root().to_owned());
    let registry = connect(&bench.services.images.location, &RegistryOptions::default());
    let store = store_of(&bench.services, bench.services.images.location.clone(), registry);
    bench.services.fetcher = bench.services.fetcher.clone().with_store(store);
}

fn bench(with_keys: bool, spec: &serde_json::Value) -> Bench {
    let mut bench = Bench::new(spec);
    if with_keys {
        let openssl_dir = OpensslDir::new();
        openssl_dir.key(EC_256);
        bench.sign_images_with(&openssl_dir);
    }
    machine(&mut bench, "first");
    bench
}

/// The attacker's access to the registry: no key, but any content and any annotations.
fn attacker(bench: &Bench) -> Store {
    Store::new(
        bench.services.images.location.clone(),
        connect(&bench.services.images.location, &RegistryOptions::default()),
    )
}

async fn replace(bench: &Bench, stored: &StoredInput, tag: &farrier_core::image::Tag, layer: &[u8]) {
    let file = bench.root().join("evil");
    fs::write(&file, layer).unwrap();
    let layer = Descriptor { digest: Digest::of(layer), size: layer.len() as u64, ..stored.layer.clone() };
    let item = NewInput {
        kind: stored.kind,
        tag,
        file: &file,
        layer: &layer,
        annotations: stored.annotations.clone(),
        replace: true,
    };
    attacker(bench).put(&item).await.unwrap();
}

fn source(bench: &Bench) -> HeaderSource {
    bench.definition().1.spec.headers.clone()
}

/// Moves a kernel's headers into the store, so that they exist nowhere else.
async fn mirror_headers(bench: &mut Bench, release: &str) -> StoredInput {
    let root = bench.root().to_owned();
    let kept = bench.services.fetcher.headers().keep(&source(bench), &Bench::target(release)).await.unwrap();
    let farrier_inputs::Lookup::Found(kept) = kept else { panic!("no headers") };
    fs::rename(root.join(format!("headers-{release}")), root.join(format!("away-{release}"))).unwrap();
    machine(bench, &format!("after-{release}"));
    kept.stored
}

/// Replaces the stored headers with another configuration of the same release. The stored claims stay the same.
async fn replace_headers(bench: &Bench, release: &str, stored: &StoredInput, notes: &[(&str, &str)]) {
    bench.headers_with(release, SYMBOLS, "CONFIG_EVIL=y\n");
    let root = bench.root().to_owned();
    let other = Cache::open(root.join(format!("evil-{release}"))).unwrap();
    let evil =
        Fetcher::new(other, FetchOptions::default()).with_definitions(root.clone()).with_store(Store::new(
            farrier_store::registry::RegistryLocation::Layout(root.join(format!("evil-layout-{release}"))),
            connect(
                &farrier_store::registry::RegistryLocation::Layout(
                    root.join(format!("evil-layout-{release}")),
                ),
                &RegistryOptions::default(),
            ),
        ));
    let kept = evil.headers().keep(&source(bench), &Bench::target(release)).await.unwrap();
    let farrier_inputs::Lookup::Found(kept) = kept else { panic!("no headers") };
    let layer = root.join("evil-layer");
    let _ = fs::remove_file(&layer);
    evil.store().unwrap().fetch(&kept.stored, &layer).await.unwrap();
    fs::remove_dir_all(root.join(format!("headers-{release}"))).unwrap();
    let mut claimed = stored.clone();
    // Claim the real content digest, because otherwise the layer is not even unpacked.
    let content = kept.stored.annotations[annotations::HEADERS_CONTENT].clone();
    claimed.annotations.insert(annotations::HEADERS_CONTENT.to_owned(), content);
    claimed.annotations.extend(notes.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())));
    let tag = platform_header_tag(&Bench::target(release)).unwrap();
    replace(bench, &claimed, &tag, &fs::read(&layer).unwrap()).await;
}

#[tokio::test]
async fn a_header_set_that_no_key_of_the_site_signed_is_not_built_with() {
    let mut bench = bench(true, &json!({}));
    let stored = mirror_headers(&mut bench, K9).await;
    let before = bench.cell(K9).await;
    assert_eq!((&before.refused, before.input_hash), (&None, before.declared_hash));
    let built = bench.publish(K9, &[&module()]).await.unwrap();
    let other = mirror_headers(&mut bench, K10).await;
    replace_headers(&bench, K9, &stored, &[]).await;
    replace_headers(&bench, K10, &other, &[]).await;

    machine(&mut bench, "another");
    // An unpublished image cannot be built, and the plan reports the reason.
    let cell = bench.cell(K10).await;
    let why = cell.refused.unwrap().to_string();
    assert!(why.contains(NOT_SIGNED) && why.contains("farrier mirror"), "{why}");
    let error = error_chain(&bench.publish(K10, &[&module()]).await.unwrap_err());
    assert!(error.contains(NOT_SIGNED), "{error}");
    assert!(!bench.root().join("another/headers").exists());
    // A published image stays valid.
    let cell = bench.cell(K9).await;
    let found = bench.services.look_up(&cell.reference).await.unwrap().unwrap();
    assert!(found.is_of(&cell) && found.digest == built.digest);

    // Once `farrier mirror` has stored the headers again on a machine with the source, they are trusted.
    fs::rename(bench.root().join(format!("away-{K10}")), bench.root().join(format!("headers-{K10}")))
        .unwrap();
    mirror_headers(&mut bench, K10).await;
    assert_eq!(bench.cell(K10).await.refused, None);
    bench.publish(K10, &[&module()]).await.unwrap();
}

#[tokio::test]
async fn without_keys_a_stored_header_set_counts_for_its_content() {
    let mut bench = bench(false, &json!({}));
    // The image is published with headers that a user provided. Afterwards only the store has those headers.
    bench.publish(K9, &[&module()]).await.unwrap();
    let plain = bench.cell(K9).await;
    let stored = mirror_headers(&mut bench, K9).await;
    let cell = bench.cell(K9).await;
    assert_eq!((plain.input_hash, plain.declared_hash), (cell.declared_hash, cell.declared_hash));
    let content = |cell: &Cell| cell.fetched.unverified[FetchedInputs::HEADERS].to_string();
    assert_eq!(content(&cell), stored.annotations[annotations::HEADERS_CONTENT]);
    assert_ne!(cell.input_hash, cell.declared_hash);
    let found = bench.services.look_up(&cell.reference).await.unwrap().unwrap();
    assert!(found.is_of(&cell), "an image published with the old hash stays valid");

    replace_headers(&bench, K9, &stored, &[]).await;
    machine(&mut bench, "another");
    let evil = bench.cell(K9).await;
    assert_ne!((content(&evil), evil.input_hash), (content(&cell), cell.input_hash));
    assert_ne!(evil.base_name, cell.base_name, "no engine has the replaced base under the old name");
    // A build planned with the original headers does not use the replaced ones.
    let build = crate::cell_build::CellBuild::of(&bench.services, &cell).unwrap();
    let error = crate::headers::fetch(&build).await.unwrap_err();
    assert!(matches!(error, BuildError::Outdated(_)), "{error}");
    // The annotations and the provenance record the headers that were used.
    bench.lose(&evil.reference);
    bench.publish(K9, &[&module()]).await.unwrap();
    let annotations = bench.annotations(K9).await;
    assert_eq!(annotations[annotations::INPUT_HASH], evil.input_hash.to_string());
    assert_eq!(annotations[annotations::DECLARED_HASH], plain.input_hash.to_string());
    // With the original source back, the first image is up to date.
    fs::rename(bench.root().join(format!("away-{K9}")), bench.root().join(format!("headers-{K9}"))).unwrap();
    let found = bench.services.look_up(&plain.reference).await.unwrap().unwrap();
    assert!(found.is_of(&plain));
}

#[tokio::test]
async fn a_root_file_system_that_a_power_loss_damaged_is_fetched_again() {
    let bench = bench(false, &json!({}));
    let root = PackageRoot::Toolchain(bootstrap());
    made_here(&bench, &root, b"cc");
    let root_file_systems = bench.services.fetcher.root_fs();
    root_file_systems.keep_bootstrap(&root, Architecture::Amd64).await.unwrap();
    let made = root_file_systems.bootstrap(&root, Architecture::Amd64).await.unwrap();
    fs::write(made.file.with_file_name("layer.json"), "").unwrap();
    let fetched = root_file_systems.bootstrap(&root, Architecture::Amd64).await.unwrap();
    assert_eq!(fetched.layer, made.layer);
}

/// Distributions can have kernels of the same release, such as Ubuntu's GA kernel and the HWE kernel of an earlier Ubuntu.
#[tokio::test]
async fn each_platform_has_its_own_stored_headers() {
    let mut bench = bench(false, &json!({}));
    mirror_headers(&mut bench, K9).await;
    let ubuntu = KernelTarget { os: "ubuntu".parse().unwrap(), ..Bench::target(K9) };
    bench.headers_with(K9, &format!("{SYMBOLS}0x00000002\tkfree\tvmlinux\tEXPORT_SYMBOL\t\n"), "");
    let headers = source(&bench);
    bench.services.fetcher.headers().keep(&headers, &ubuntu).await.unwrap();
    fs::remove_dir_all(bench.root().join(format!("headers-{K9}"))).unwrap();
    machine(&mut bench, "another");
    for (target, symbols) in [(Bench::target(K9), 2), (ubuntu, 3)] {
        let found = bench.services.fetcher.headers().find(&headers, &target).await.unwrap();
        let farrier_inputs::Lookup::Found(set) = found else { panic!("no headers of {target}") };
        assert_eq!(set.facts.symbols.as_ref().unwrap().len(), symbols, "{target}");
    }
}

#[tokio::test]
async fn headers_of_a_release_that_no_key_signed_do_not_hide_those_of_the_platform() {
    let mut bench = bench(true, &json!({}));
    let stored = mirror_headers(&mut bench, K9).await;
    let target = Bench::target(K9);
    replace(&bench, &stored, &header_tag(&target.release, target.arch).unwrap(), b"unsigned").await;
    let found = bench.services.fetcher.headers().find(&source(&bench), &target).await.unwrap();
    assert!(matches!(found, farrier_inputs::Lookup::Found(_)), "{found:?}");
}

#[tokio::test]
async fn stored_headers_of_a_release_count_where_the_archive_has_dropped_them() {
    let mut bench = bench(false, &json!({}));
    let mut stored = mirror_headers(&mut bench, K9).await;
    stored.annotations.remove(annotations::OS);
    let ubuntu = KernelTarget { os: "ubuntu".parse().unwrap(), ..Bench::target(K9) };
    let tag = header_tag(&ubuntu.release, ubuntu.arch).unwrap();
    replace(&bench, &stored, &tag, b"headers").await;
    let kept = bench.services.fetcher.headers().keep(&source(&bench), &ubuntu).await.unwrap();
    let farrier_inputs::Lookup::Found(kept) = kept else { panic!("no headers") };
    assert_eq!((kept.new, kept.tags), (false, vec![tag]));
}

fn bootstrap() -> BootstrapSpec {
    serde_json::from_value(json!({"suite": "bookworm", "include": ["make"]})).unwrap()
}

/// Returns a layer with this content: its bytes, and the digest of the uncompressed archive.
fn layer_of(content: &[u8]) -> (Vec<u8>, Digest) {
    let mut tar = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_size(content.len() as u64);
    header.set_mode(0o644);
    tar.append_data(&mut header, COMPILER, content).unwrap();
    let bytes = tar.into_inner().unwrap();
    let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gz.write_all(&bytes).unwrap();
    (gz.finish().unwrap(), Digest::of(&bytes))
}

/// Puts a root file system into the cache, as if this machine had bootstrapped it.
fn made_here(bench: &Bench, root: &PackageRoot, content: &[u8]) {
    let (layer, diff_id) = layer_of(content);
    let place = bench.services.cache.entry_path("packages-root", &root.key(Architecture::Amd64)).unwrap();
    fs::create_dir_all(&place).unwrap();
    let record = json!({
        "digest": Digest::of(&layer).hex(), "diff_id": diff_id.hex(), "size": layer.len(),
    });
    fs::write(place.join("layer.json"), record.to_string()).unwrap();
    fs::write(place.join("layer.tar.gz"), layer).unwrap();
}

/// Returns the reference under which the root file system is published.
fn published_as(bench: &Bench, root: &PackageRoot) -> ImageReference {
    let repository = bench.services.images.location.repository("farrier-rootfs").unwrap();
    let tag = root.key(Architecture::Amd64)[..32].parse().unwrap();
    ImageReference { repository, version: Version::Tag(tag) }
}

/// Changes that an attacker makes to a published root file system.
#[derive(Clone, Copy)]
enum Change {
    Layer,
    FurtherLayer,
    Variable,
    /// A key that only parsers that ignore case find, such as Go's.
    Hidden,
    /// A configuration above the size limit.
    Large,
}

/// Replaces a published root file system, changing only what the attack requires. Returns the digest of the changed
/// part.
async fn replace_root_fs(bench: &Bench, root: &PackageRoot, change: Change) -> Digest {
    let ImageReference { repository, version } = published_as(bench, root);
    let registry = &bench.services.images.registry;
    let found = registry.manifest(&repository, &version).await.unwrap().unwrap();
    let mut manifest = ImageManifest::parse(&found.bytes).unwrap();
    let config = bench.services.images.blob_file(&repository, &manifest.config).await.unwrap();
    let mut config: serde_json::Value = serde_json::from_slice(&fs::read(config).unwrap()).unwrap();
    let (evil, diff_id) = layer_of(b"evil");
    let of_layer =
        Descriptor { digest: Digest::of(&evil), size: evil.len() as u64, ..manifest.layers[0].clone() };
    let changed = match change {
        Change::Layer => {
            manifest.layers = vec![of_layer];
            config["rootfs"]["diff_ids"] = json!([diff_id.as_str()]);
            config["config"]["Env"].as_array_mut().unwrap().truncate(1);
            config.as_object_mut().unwrap().remove("Config");
            Digest::of(&evil)
        }
        Change::FurtherLayer => {
            manifest.layers.push(of_layer);
            config["rootfs"]["diff_ids"].as_array_mut().unwrap().push(json!(diff_id.as_str()));
            Digest::of(&evil)
        }
        Change::Variable => {
            config["config"]["Env"].as_array_mut().unwrap().push(json!("KCFLAGS=-DEVIL"));
            Digest::of(config.to_string().as_bytes())
        }
        Change::Large => {
            config["comment"] = json!("x".repeat(5 << 20));
            Digest::of(b"")
        }
        Change::Hidden => {
            config["Config"] = json!({"Env": ["KCFLAGS=-DEVIL"]});
            Digest::of(config.to_string().as_bytes())
        }
    };
    let config = config.to_string().into_bytes();
    manifest.config = Descriptor::of(media_type::OCI_CONFIG, &config);
    for blob in [&evil, &config] {
        registry.push_bytes(&repository, blob).await.unwrap();
    }
    let bytes = manifest.to_bytes().unwrap();
    registry.push_manifest(&repository, &version, media_type::OCI_MANIFEST, &bytes).await.unwrap();
    changed
}

/// Gives the family's toolchain, or the image's base, a definition made of packages.
fn with_bootstrap(bench: &mut Bench, is_base: bool) -> PackageRoot {
    if is_base {
        bench.image().spec.runtime.base = Some(RuntimeBase::Bootstrap(bootstrap()));
        PackageRoot::RuntimeBase(bootstrap())
    } else {
        bench.services.definitions.families[0].spec.toolchain = Toolchain::Bootstrap(bootstrap());
        PackageRoot::Toolchain(bootstrap())
    }
}

/// Returns the root file system that a build of this cell gets. A daemon gets the toolchain as a layer and a sandbox as
/// a tree, and both must have the same content.
async fn taken_for(bench: &Bench, root: &PackageRoot, cell: &Cell) -> Result<Digest, BuildError> {
    let services = &bench.services;
    match root {
        PackageRoot::RuntimeBase(spec) => {
            let base = runtime_base(services, &RuntimeBase::Bootstrap(spec.clone()), &[], cell).await?;
            Ok(base.image.layers[0].digest.clone())
        }
        PackageRoot::RpmToolchain(_) | PackageRoot::Runfile(..) => {
            unreachable!("not used in this file")
        }
        PackageRoot::Toolchain(spec) => {
            let in_place = images::toolchain_tree(services, &Toolchain::Bootstrap(spec.clone()), cell).await;
            let layer = images::root_fs_layer(services, root, cell).await;
            assert_eq!(in_place.is_ok(), layer.is_ok());
            let (tree, image) = in_place?;
            let (digest, layer) = layer?;
            let layer = fs::read(layer).unwrap();
            assert_eq!(digest, Digest::of(&layer));
            assert_eq!(image.image.layers[0].digest, Digest::of(&layer));
            assert_eq!(layer_of(&fs::read(tree.join(COMPILER)).unwrap()).0, layer);
            Ok(Digest::of(&layer))
        }
    }
}

/// Returns the root file system that a build of the current cell gets.
async fn taken(bench: &Bench, root: &PackageRoot) -> Result<Digest, BuildError> {
    taken_for(bench, root, &bench.cell(K9).await).await
}

async fn root_fs_that_is_not_signed(is_base: bool) {
    let mut bench = bench(true, &json!({}));
    let root = with_bootstrap(&mut bench, is_base);
    made_here(&bench, &root, b"the compiler");
    let good = taken(&bench, &root).await.unwrap();
    machine(&mut bench, "second");
    assert_eq!(taken(&bench, &root).await.unwrap(), good, "another machine of the site accepts it");
    let cell = bench.cell(K9).await;
    assert_eq!((cell.refused, cell.input_hash), (None, cell.declared_hash));

    for change in [Change::Variable, Change::Hidden, Change::Layer] {
        replace_root_fs(&bench, &root, change).await;
        for name in ["first", "second", "third"] {
            machine(&mut bench, name);
            let error = taken(&bench, &root).await.unwrap_err();
            let said = error_chain(&error);
            assert!(said.contains(NOT_SIGNED) && error.hint().unwrap().contains("delete the tag"), "{said}");
            let after = bench.cell(K9).await;
            let why = after.refused.unwrap().to_string();
            assert!(why.contains(NOT_SIGNED), "{why}");
            assert_eq!(after.declared_hash, cell.declared_hash, "published images stay valid");
        }
    }
    assert!(!bench.root().join("third/trees").exists(), "nothing was unpacked");

    // The same attack on the store artifact, from which a site without the archive makes the image.
    let key = root.key(Architecture::Amd64);
    bench.lose(&published_as(&bench, &root));
    let tag = key_tag(&key).unwrap();
    let evil = StoredInput {
        kind: InputKind::RootFs,
        repository: attacker(&bench).repository(InputKind::RootFs).unwrap(),
        digest: Digest::of(b""),
        layer: Descriptor::new(media_type::OCI_LAYER_GZIP, Digest::of(b""), 0),
        annotations: [(annotations::IDENTITY, key.as_str()), (annotations::DIFF_ID, good.as_str())]
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into(),
        is_signed: true,
    };
    replace(&bench, &evil, &tag, b"evil").await;
    let said = error_chain(&taken(&bench, &root).await.unwrap_err());
    assert!(said.contains(NOT_SIGNED), "{said}");
    // `farrier mirror` on the machine that made the root file system replaces the artifact with a signed one.
    machine(&mut bench, "first");
    bench.services.fetcher.root_fs().keep_bootstrap(&root, Architecture::Amd64).await.unwrap();
    machine(&mut bench, "fourth");
    assert_eq!(taken(&bench, &root).await.unwrap(), good);
}

#[tokio::test]
async fn a_toolchain_that_no_key_of_the_site_signed_is_not_built_with() {
    Box::pin(root_fs_that_is_not_signed(false)).await;
}

#[tokio::test]
async fn a_base_that_no_key_of_the_site_signed_is_not_built_with() {
    Box::pin(root_fs_that_is_not_signed(true)).await;
}

/// A signature is valid for one root file system, not for any tag that the image is put under.
#[tokio::test]
async fn a_signed_toolchain_is_not_another_one() {
    let mut bench = bench(true, &json!({}));
    let root = with_bootstrap(&mut bench, false);
    made_here(&bench, &root, b"the compiler");
    taken(&bench, &root).await.unwrap();
    let ImageReference { repository, version } = published_as(&bench, &root);
    let found = bench.services.images.registry.manifest(&repository, &version).await.unwrap().unwrap();
    let include = BootstrapSpec { include: vec!["gcc".parse().unwrap()], ..bootstrap() };
    // Neither a toolchain with other packages nor a base with the same packages.
    for other in [PackageRoot::Toolchain(include), PackageRoot::RuntimeBase(bootstrap())] {
        let elsewhere = published_as(&bench, &other).version;
        let registry = &bench.services.images.registry;
        registry.push_manifest(&repository, &elsewhere, &found.media_type, &found.bytes).await.unwrap();
        let error = taken(&bench, &other).await.unwrap_err();
        assert!(error_chain(&error).contains("another root file system"), "{error}");
    }
}

#[tokio::test]
async fn without_keys_a_toolchain_counts_for_its_content() {
    for is_base in [false, true] {
        let mut bench = bench(false, &json!({}));
        let root = with_bootstrap(&mut bench, is_base);
        made_here(&bench, &root, b"the compiler");
        let before = bench.cell(K9).await;
        let good = taken(&bench, &root).await.unwrap();
        // The machine that made the toolchain knows its content, so the input hash of its images stays the same.
        assert_eq!(bench.cell(K9).await.input_hash, before.input_hash);
        assert_eq!(before.input_hash, before.declared_hash);
        machine(&mut bench, "second");
        let name = if is_base { FetchedInputs::BASE } else { FetchedInputs::TOOLCHAIN };
        let mut planned = bench.cell(K9).await;
        assert_eq!((planned.declared_hash, &planned.fetched.unverified[name]), (before.input_hash, &good));
        assert_eq!(taken_for(&bench, &root, &planned).await.unwrap(), good);
        for change in [Change::FurtherLayer, Change::Variable, Change::Hidden, Change::Layer] {
            let evil = replace_root_fs(&bench, &root, change).await;
            // A build planned with one root file system does not use another, on any machine.
            for machine_name in ["first", "second"] {
                machine(&mut bench, machine_name);
                let error = taken_for(&bench, &root, &planned).await.unwrap_err();
                assert!(matches!(error, BuildError::Outdated(_)), "{error}");
            }
            let changed = bench.cell(K9).await;
            assert_eq!(changed.declared_hash, before.input_hash);
            assert_ne!(changed.input_hash, planned.input_hash);
            assert!(changed.changed_since(&planned).unwrap().contains("store"));
            if let Change::Layer = change {
                assert_eq!(changed.fetched.unverified[name], evil);
            }
            planned = changed;
        }
        // The root file system that is used is the one in the input hash.
        let used = taken_for(&bench, &root, &planned).await.unwrap();
        assert_eq!(used, planned.fetched.unverified[name]);
    }
}

#[tokio::test]
async fn a_large_configuration_is_not_read() {
    let mut bench = bench(false, &json!({}));
    let root = with_bootstrap(&mut bench, false);
    made_here(&bench, &root, b"the compiler");
    taken(&bench, &root).await.unwrap();
    machine(&mut bench, "second");
    let planned = bench.cell(K9).await;
    replace_root_fs(&bench, &root, Change::Large).await;
    let said = error_chain(&taken_for(&bench, &root, &planned).await.unwrap_err());
    assert!(said.contains("the limit is 4194304 bytes"), "{said}");
}

/// A toolchain and a base differ even with the same packages, so each has a separate digest.
#[tokio::test]
async fn a_toolchain_and_a_base_of_the_same_packages_count_apart() {
    let mut bench = bench(false, &json!({}));
    let mut good = Vec::new();
    for is_base in [false, true] {
        let root = with_bootstrap(&mut bench, is_base);
        made_here(&bench, &root, if is_base { b"to run" } else { b"to compile" });
        good.push(taken(&bench, &root).await.unwrap());
    }
    machine(&mut bench, "second");
    let found = bench.cell(K9).await.fetched.unverified;
    assert_eq!([&found[FetchedInputs::TOOLCHAIN], &found[FetchedInputs::BASE]], [&good[0], &good[1]]);
    assert_ne!(good[0], good[1]);
}
