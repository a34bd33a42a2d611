use farrier_inputs::{FetchOptions, Fetcher};
use oci::{EntryKind, LayerWriter, error_chain};
use serde_json::json;

use super::*;
use crate::{
    resolve::with_hint,
    testing::{Bench, K9},
};

/// Publishes an image of these layers (tar streams) to the bench's layout. Returns its reference by digest.
async fn publish_image(bench: &Bench, name: &str, layers: &[Vec<u8>]) -> String {
    let repository: Repository = name.parse().unwrap();
    let registry = &bench.services.images.registry;
    let mut packed = Vec::new();
    for tar in layers {
        let mut blob = Vec::new();
        packed.push(oci::compress(&tar[..], &mut blob).unwrap());
        registry.push_bytes(&repository, &blob).await.unwrap();
    }
    let image = oci::assemble(&Assembly {
        base: None,
        entrypoint_layer: None,
        layers: &packed,
        entrypoint: &[],
        env: &BTreeMap::from([("PATH".to_owned(), "/opt/bin".to_owned())]),
        labels: &BTreeMap::new(),
        annotations: &BTreeMap::new(),
        architecture: "amd64",
    })
    .unwrap();
    registry.push_bytes(&repository, &image.config).await.unwrap();
    let version = Version::Tag("1".parse().unwrap());
    registry.push_manifest(&repository, &version, media_type::OCI_MANIFEST, &image.manifest).await.unwrap();
    format!("{name}@{}", image.digest)
}

fn tar(files: &[(&str, &str)]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (name, text) in files {
        let mut header = tar::Header::new_gnu();
        header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
        header.set_mode(0o644);
        header.set_size(text.len() as u64);
        header.set_cksum();
        builder.append(&header, text.as_bytes()).unwrap();
    }
    builder.into_inner().unwrap()
}

async fn tree_of(bench: &Bench, reference: &str) -> Result<(PathBuf, BaseImage), BuildError> {
    let toolchain = Toolchain::Image(reference.parse().unwrap());
    let cell = Cell { toolchain: reference.to_owned(), ..bench.cell(K9).await };
    toolchain_tree(&bench.services, &toolchain, &cell).await
}

#[tokio::test]
async fn a_toolchain_image_becomes_one_tree() {
    let bench = Bench::new(&json!({}));
    let lower = tar(&[("usr/bin/cc", "old"), ("usr/bin/ld", "ld")]);
    let upper = tar(&[("usr/bin/cc", "new"), ("usr/bin/.wh.ld", "")]);
    let reference = publish_image(&bench, "toolchain", &[lower.clone(), upper.clone()]).await;
    let (tree, image) = tree_of(&bench, &reference).await.unwrap();
    assert_eq!(fs_err::read_to_string(tree.join("usr/bin/cc")).unwrap(), "new");
    assert!(!tree.join("usr/bin/ld").exists() && tree.starts_with(bench.root().join("cache/trees")));
    assert_eq!(image.image.config["config"]["Env"], json!(["PATH=/opt/bin"]));
    // Another image with the same layers shares the tree.
    fs_err::write(tree.join("mark"), "").unwrap();
    let same = publish_image(&bench, "other", &[lower, upper]).await;
    assert_eq!(tree_of(&bench, &same).await.unwrap().0, tree);
    assert!(tree.join("mark").exists());
}

/// A build step that escaped its sandbox may have changed the tree, and the layers from which the tree is rebuilt.
#[tokio::test]
async fn a_tree_that_was_changed_is_made_anew_from_verified_layers() {
    let bench = Bench::new(&json!({}));
    let layer = tar(&[("usr/bin/depmod", "good")]);
    let reference = publish_image(&bench, "toolchain", std::slice::from_ref(&layer)).await;
    let (tree, image) = tree_of(&bench, &reference).await.unwrap();
    let cache = &bench.services.cache;
    assert!(cache.is_tree_intact(&tree).await.unwrap());
    let depmod = tree.join("usr/bin/depmod");
    fs_err::write(&depmod, "evil").unwrap();
    assert!(!cache.is_tree_intact(&tree).await.unwrap());
    tree_of(&bench, &reference).await.unwrap();
    assert_eq!(fs_err::read_to_string(&depmod).unwrap(), "good");
    assert!(cache.is_tree_intact(&tree).await.unwrap());

    fs_err::write(&depmod, "evil").unwrap();
    assert!(!cache.is_tree_intact(&tree).await.unwrap());
    let mut evil = Vec::new();
    oci::compress(&tar(&[("usr/bin/depmod", "evil")])[..], &mut evil).unwrap();
    for file in layer_files(&bench.services.images, &image).await.unwrap() {
        fs_err::write(file, &evil).unwrap();
    }
    let error = tree_of(&bench, &reference).await.unwrap_err();
    assert!(error_chain(&error).contains("the cache was modified"), "{error:?}");
    assert!(!tree.exists());
}

#[tokio::test]
async fn a_layer_that_leads_out_or_is_another_leaves_nothing() {
    let bench = Bench::new(&json!({}));
    let hostile = publish_image(&bench, "hostile", &[tar(&[("../../../evil", "x")])]).await;
    let error = tree_of(&bench, &hostile).await.unwrap_err();
    assert_eq!(error.to_string(), format!("cannot unpack toolchain {hostile}"));
    // The registry returns other bytes under the layer's digest.
    let reference = publish_image(&bench, "changed", &[tar(&[("usr/bin/cc", "cc")])]).await;
    let mut writer = LayerWriter::new(Vec::new(), 0);
    writer.entry("evil".as_ref(), 0o644, EntryKind::Directory).unwrap();
    let other = writer.finish().unwrap().1;
    let (base, _) =
        read_image(&bench.services.images, &reference.parse().unwrap(), Architecture::Amd64).await.unwrap();
    let blob = bench.root().join("layout/blobs/sha256").join(base.image.layers[0].digest.hex());
    fs_err::write(&blob, other).unwrap();
    tree_of(&bench, &reference).await.unwrap_err();
    assert!(!bench.root().join("evil").exists());
    let trees = fs_err::read_dir(bench.root().join("cache/trees")).unwrap();
    assert_eq!(trees.count(), 0);
}

#[tokio::test]
async fn what_cannot_be_made_is_told_until_it_is_there() {
    let bench = Bench::new(&json!({}));
    let options = FetchOptions { apt_dir: bench.root().join("no-apt"), ..FetchOptions::default() };
    let fetcher =
        Fetcher::new(bench.services.cache.clone(), options).with_definitions(bench.root().to_owned());
    let services = BuildServices { fetcher, ..bench.services.clone() };
    let from = json!({"repositories": [{"url": "https://acme.invalid/os/"}], "signedBy": "acme.asc"});
    for (toolchain, told) in [
        (
            json!({"rpm": {"packages": ["gcc"], "from": from}}),
            "acme.asc with the keys of the distribution (add the",
        ),
        (
            json!({"bootstrap": {"suite": "noble", "include": ["make"]}}),
            "cannot find an apt source for noble: no `mirrors` of site.yaml map",
        ),
    ] {
        let toolchain: Toolchain = serde_json::from_value(toolchain).unwrap();
        let root = PackageRoot::of_toolchain(&toolchain, &Bench::target(K9)).unwrap();
        let why = unbuildable(&services, &root, Architecture::Amd64).await.unwrap().unwrap();
        assert!(with_hint(&why).contains(told), "{}", with_hint(&why));

        let (name, tag) = root_fs_tag(&root.key(Architecture::Amd64)).unwrap();
        publish_image(&bench, name, &[tar(&[("usr/bin/cc", "cc")])]).await;
        let (repository, version) = (name.parse().unwrap(), Version::Tag("1".parse().unwrap()));
        let made = services.images.registry.manifest(&repository, &version).await.unwrap().unwrap().bytes;
        let version = Version::Tag(tag);
        services
            .images
            .registry
            .push_manifest(&repository, &version, media_type::OCI_MANIFEST, &made)
            .await
            .unwrap();
        assert!(unbuildable(&services, &root, Architecture::Amd64).await.unwrap().is_none());
    }
}
