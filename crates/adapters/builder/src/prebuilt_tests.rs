//! Tests of sources that are images. An image published earlier stands in for a vendor's image.

use farrier_core::{
    image::SourceOrigin,
    kernel::{Architecture, KernelTarget},
};
use farrier_signing::testing::{EC_256, OpensslDir};
use oci::error_chain;
use serde_json::json;

use super::*;
use crate::{
    cell,
    testing::{Bench, K9, K10, module},
};

/// A bench with a signed image `x`, published for one kernel, and an image `y` that is built from `x`.
async fn bench(more: &str) -> (Bench, OpensslDir) {
    let (mut bench, openssl_dir) = (Bench::new(&json!({})), OpensslDir::new());
    openssl_dir.key(EC_256);
    bench.sign_images_with(&openssl_dir);
    bench.publish(K9, &[&module()]).await.unwrap();
    let source = format!(r#"{{"reference": "x:1.0-{{{{kernel_label}}}}-debian12-amd64"{more}}}"#);
    let source: serde_json::Value = serde_json::from_str(&source).unwrap();
    bench.add("y", &json!({"sources": [{"name": "vendor", "from": {"image": source}}]}));
    (bench, openssl_dir)
}

/// Returns the files and the origins of the sources, or the reason why there is nothing to build.
async fn look(bench: &Bench, kernel: &str) -> Result<(Vec<String>, Vec<String>), String> {
    let target = Bench::target(kernel);
    let cell = cell::plan_cell(&bench.services, &"y".parse().unwrap(), &target)
        .await
        .map_err(|why| error_chain(&why))?;
    let build = CellBuild::of(&bench.services, &cell).unwrap();
    let work = tempfile::tempdir().unwrap();
    let (context, origins) = build_context(&build, work.path()).await.map_err(|why| error_chain(&why))?;
    let files = walkdir::WalkDir::new(&context[0].from).sort_by_file_name().into_iter().map(Result::unwrap);
    let files = files.filter(|entry| entry.file_type().is_file());
    let names = files.map(|file| file.path().strip_prefix(&context[0].from).unwrap().display().to_string());
    Ok((names.collect(), origins))
}

#[tokio::test]
async fn an_image_that_a_named_key_signed_is_a_source() {
    let (bench, _) = bench(r#", "signedBy": ["images.pub"], "path": "/lib/modules/{{release}}""#).await;
    let (files, origins) = look(&bench, K9).await.unwrap();
    assert_eq!(files, ["extra/m.ko", "modules.dep"]);
    let digest = bench.cell(K9).await.reference;
    let digest = bench.services.images.manifest(&digest).await.unwrap().unwrap().digest;
    assert_eq!(origins, [format!("vendor: x {digest} path=/lib/modules/{K9}")]);
    let why = look(&bench, K10).await.unwrap_err();
    assert!(why.contains(&format!("source vendor: no prebuilt image x:1.0-{K10}-debian12-amd64 (")), "{why}");
}

#[tokio::test]
async fn what_nobody_vouches_for_is_not_taken() {
    let (unsigned, _) = bench("").await;
    let why = look(&unsigned, K9).await.unwrap_err();
    assert!(why.contains("source vendor: this site signs modules, but those of a third party"), "{why}");
    let (adopted, _) = bench(r#", "adoptUnsigned": true, "path": "/opt""#).await;
    let why = look(&adopted, K9).await.unwrap_err();
    assert!(why.contains("has no directory /opt"), "{why}");

    let (strange, _) = bench(r#", "signedBy": ["other.pub"]"#).await;
    let other = OpensslDir::new();
    other.key(EC_256);
    std::fs::copy(other.path("p.pem"), strange.root().join("other.pub")).unwrap();
    let why = look(&strange, K9).await.unwrap_err();
    assert!(
        why.contains("is not signed with a key of `signedBy`: it has signatures, but no accepted key"),
        "{why}"
    );
}

#[tokio::test]
async fn an_image_of_another_architecture_is_a_reason_in_the_plan() {
    let (mut bench, _) = bench(r#", "adoptUnsigned": true"#).await;
    let source = &mut bench.services.definitions.images.get_mut("y").unwrap().spec.sources[0];
    let SourceOrigin::Image(image) = &mut source.from else { panic!("an image") };
    image.reference = format!("x:1.0-{K9}-debian12-amd64").parse().unwrap();
    let target = KernelTarget { arch: Architecture::Arm64, ..Bench::target(K9) };
    let why = cell::plan_cell(&bench.services, &"y".parse().unwrap(), &target).await.unwrap_err();
    let why = error_chain(&why);
    assert!(
        why.contains("debian12-amd64 is not for linux/arm64: base image: its architecture is \"amd64\""),
        "{why}"
    );
}
