//! Messages of the commands for bundles.

use std::{fs, process::Command, sync::Arc};

use farrier_bundle as bundle;
use farrier_bundle::ContentRequest;

use super::{KERNEL, Silent, Site, command::definitions, farrier, image, text};

#[tokio::test]
async fn the_digest_of_the_file_is_printed_and_lies_beside_it() {
    let from = Site::start();
    from.publish("one", "1", &[b"one"]).await;
    let directory = tempfile::tempdir().unwrap();
    let (file, registry) = (directory.path().join("site.bundle"), from.location.to_string());
    let words = ["bundle", "export", "--registry", &registry, "--reference", "one:1", "--to"];
    let output = farrier(&[&words[..], &[file.to_str().unwrap()]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let sum = fs::read_to_string(directory.path().join("site.bundle.sha256")).unwrap();
    let printed = format!("sha256   {}", sum.split_once("  site.bundle\n").unwrap().0);
    assert!(text(&output.stdout).contains(&printed), "{}", text(&output.stdout));
    let mut check = Command::new("sha256sum");
    let checked = check.args(["-c", "site.bundle.sha256"]).current_dir(directory.path()).status().unwrap();
    assert!(checked.success());
}

#[tokio::test]
async fn an_incomplete_bundle_without_images_has_the_inputs() {
    let from = Site::start();
    from.publish("definitions", "latest", &[b"kind: Site"]).await;
    let directory = tempfile::tempdir().unwrap();
    let definitions = definitions(&directory.path().join("definitions"));
    let (file, registry) = (directory.path().join("site.bundle"), from.location.to_string());
    let mut words = vec!["bundle", "export", "--registry", &registry, "--definitions", &definitions];
    words.extend(["--kernel", KERNEL, "--os", "debian", "--os-version", "12", "--arch", "amd64"]);
    words.extend(["--to", file.to_str().unwrap()]);
    let output = farrier(&words);
    let said = text(&output.stderr);
    assert!(output.status.code() == Some(1) && said.contains("nothing to export"), "{said}");
    words.push("--incomplete");
    let output = farrier(&words);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("holds    1 definitions"), "{}", text(&output.stdout));
}

#[tokio::test]
async fn a_bundle_prints_no_line_of_its_own() {
    let from = Site::start();
    let digest = from.publish("one", "1", &[b"one"]).await;
    let request = ContentRequest {
        content: image("one", "1", &digest),
        repository: from.location.repository("one").unwrap(),
        registry: Arc::clone(&from.registry),
    };
    let origin = "a.example\nsigned   by you";
    let collection = bundle::collect(&[request], origin, None).await.unwrap();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("site.bundle");
    bundle::export(collection, &file, None, Arc::new(Silent)).await.unwrap();
    let output = farrier(&["bundle", "inspect", file.to_str().unwrap()]);
    let said = text(&output.stdout);
    assert!(output.status.success() && said.contains("from a.examplesigned   by you\n"), "{said}");
}

/// `skopeo copy` copies an image without its referrers.
#[tokio::test]
async fn verify_needs_no_registry_for_an_image_with_a_host_and_names_copies_with_referrers() {
    let site = Site::start();
    site.publish("one", "1", &[b"one"]).await;
    let image = format!("{}/one:1", site.location);
    let output = farrier(&["verify", &image, "--insecure-no-signature", "--offline"]);
    let said = text(&[&output.stdout[..], &output.stderr].concat());
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("the image has no check report"), "{said}");
    assert!(said.contains("`skopeo copy` drops documents: use `oras cp -r` or a bundle"), "{said}");
}
