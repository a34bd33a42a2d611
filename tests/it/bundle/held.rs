//! Imports into registries that already hold content, and the order in which an import writes.

use std::fs;

use farrier_bundle as bundle;
use farrier_bundle::{Content, ContentKind, ImportOutcome};
use farrier_core::{facts::media_type, image::Digest};
use oci::{Descriptor, ImageIndex, ImageManifest};

use super::{Silent, Site, farrier, filled, image, text, verify};
use crate::support::cutting_proxy::{Cut, CuttingProxy};

#[tokio::test]
async fn a_tag_with_other_content_keeps_it_and_the_others_are_taken() {
    let (from, contents, _) = filled().await;
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("site.bundle");
    from.export(&contents, &file, None).await.unwrap();
    let to = Site::start();
    let other = to.publish("one", "1", &[b"of the site itself"]).await;
    let registry = to.location.to_string();
    let output = farrier(&[
        "bundle",
        "import",
        "--insecure-no-signature",
        file.to_str().unwrap(),
        "--registry",
        &registry,
        "-o",
        "json",
    ]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let conflicts: Vec<&serde_json::Value> =
        report["contents"].as_array().unwrap().iter().filter(|row| row["outcome"] == "conflict").collect();
    let [conflict] = conflicts[..] else { panic!("{report}") };
    assert_eq!((&conflict["repository"], &conflict["holds"]), (&"one".into(), &other.as_str().into()));
    assert!(to.manifest("two", "2").await.is_some());
    assert_eq!(Digest::of(&to.manifest("one", "1").await.unwrap()), other);
    let said = text(&output.stderr);
    assert!(said.contains("hint: a published tag never changes"), "{said}");
}

#[tokio::test]
async fn a_blob_that_the_registry_lost_is_sent_again() {
    let (from, contents, _) = filled().await;
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("site.bundle");
    from.export(&contents, &file, None).await.unwrap();
    let (to, verified) = (Site::start(), verify(&file).unwrap());
    bundle::import(&verified, &to.target(), false, &Silent).await.unwrap();
    let image = ImageManifest::parse(&to.manifest("two", "2").await.unwrap()).unwrap();
    let lost = &image.layers[1].digest;
    to.process.lose_blob(lost);
    let again = bundle::import(&verified, &to.target(), false, &Silent).await.unwrap();
    assert!(again.contents.iter().all(|new| new.outcome == ImportOutcome::Present), "{again:?}");
    assert_eq!(again.sent_blobs, 1);
    assert!(to.process.stores(lost.as_str()));
}

/// The proxy needs a thread beside the one that waits for farrier.
#[tokio::test(flavor = "multi_thread")]
async fn an_import_survives_broken_connections() {
    let (from, contents, _) = filled().await;
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("site.bundle");
    from.export(&contents, &file, None).await.unwrap();
    let to = Site::start();
    // The first blob, and a manifest.
    let cuts = [Cut::Request("PUT", 0), Cut::Request("PUT /v2/drivers/two/manifests", 0)];
    let proxy = CuttingProxy::before(&to.process.host, &cuts).await;
    let registry = format!("{}/drivers", proxy.host);
    let words = ["bundle", "import", "--insecure-no-signature", file.to_str().unwrap()];
    let output = farrier(&[&words[..], &["--registry", &registry]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(proxy.has_cut_all());
    assert!(to.manifest("two", "2").await.is_some());
}

/// `farrier gc` would delete a referrer whose subject is missing as a leftover.
#[tokio::test]
async fn an_image_is_there_before_what_refers_to_it_and_its_tag_comes_last() {
    let (from, contents, report) = filled().await;
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("site.bundle");
    from.export(&contents, &file, None).await.unwrap();
    let to = Site::start();
    bundle::import(&verify(&file).unwrap(), &to.target(), false, &Silent).await.unwrap();
    let log = fs::read_to_string(to.process.storage().parent().unwrap().join("log")).unwrap();
    let puts: Vec<&str> = log
        .lines()
        .filter_map(|line| line.split_once("\"PUT /v2/drivers/one/manifests/"))
        .filter_map(|(_, rest)| rest.split(' ').next())
        .collect();
    let digest = contents[0].digest.as_str();
    let at =
        |name: &str| puts.iter().position(|put| *put == name).unwrap_or_else(|| panic!("{name}: {puts:?}"));
    assert_eq!((at(digest), at("1")), (0, puts.len() - 1), "{puts:?}");
    let signature = format!("sha256-{}.sig", contents[0].digest.hex());
    assert!(at(report.as_str()) > 0 && at(&signature) > 0);
    assert_eq!(puts.iter().filter(|put| **put == digest).count(), 1, "{puts:?}");
}

/// Returns the layers of the manifest under a tag.
async fn layers(site: &Site, tag: &str) -> Vec<Descriptor> {
    ImageManifest::parse(&site.manifest("one", tag).await.unwrap()).unwrap().layers
}

#[tokio::test]
async fn signatures_are_added_to_those_that_are_held() {
    let (from, to) = (Site::start(), Site::start());
    let one = from.publish("one", "1", &[b"one"]).await;
    let directory = tempfile::tempdir().unwrap();
    for end in ["sig", "att"] {
        let tag = format!("sha256-{}.{end}", one.hex());
        let bundle = async |name: &str, layers: &[&[u8]]| {
            let digest = from.publish("one", &tag, layers).await;
            let file = directory.path().join(format!("{name}.{end}"));
            from.export(&[image("one", "1", &one)], &file, None).await.unwrap();
            (verify(&file).unwrap(), digest)
        };
        let import = async |verified| {
            let imported = bundle::import(verified, &to.target(), false, &Silent).await.unwrap();
            assert!(imported.is_complete(), "{imported:?}");
            let found = imported.contents.into_iter().find(|new| {
                new.content.kind == ContentKind::Signature
                    && new.content.tag.as_ref().is_some_and(|held| held.as_str() == tag)
            });
            (found.unwrap().outcome, imported.sent_blobs)
        };
        let (first, older) = bundle("first", &[b"theirs"]).await;
        assert_eq!(import(&first).await.0, ImportOutcome::Pushed);
        // The source has one more signature: the tag gets the source's manifest.
        let (second, newer) = bundle("second", &[b"theirs", b"another"]).await;
        assert_eq!(import(&second).await.0, ImportOutcome::Moved { previous: older });
        assert_eq!(Digest::of(&to.manifest("one", &tag).await.unwrap()), newer);
        assert_eq!(import(&first).await, (ImportOutcome::Present, 0));

        // The receiving site adds its own signature.
        let held = to.publish("one", &tag, &[b"theirs", b"another", b"of the site"]).await;
        assert_eq!(import(&second).await, (ImportOutcome::Present, 0));
        let (third, _) = bundle("third", &[b"theirs", b"a third one"]).await;
        assert_eq!(import(&third).await.0, ImportOutcome::Moved { previous: held });
        let joined = layers(&to, &tag).await;
        assert_eq!(joined.len(), 4);
        let repository = to.location.repository("one").unwrap();
        for layer in layers(&from, &tag).await {
            assert!(
                joined.contains(&layer) && to.registry.has_blob(&repository, &layer.digest).await.unwrap()
            );
        }
        assert_eq!(import(&third).await, (ImportOutcome::Present, 0));
    }
}

#[tokio::test]
async fn what_are_no_signatures_is_not_added_to() {
    let (from, to) = (Site::start(), Site::start());
    let one = from.publish("one", "1", &[b"one"]).await;
    let [signatures, bill] = ["sig", "sbom"].map(|end| format!("sha256-{}.{end}", one.hex()));
    for tag in [&signatures, &bill] {
        from.publish("one", tag, &[b"theirs"]).await;
    }
    let list = ImageIndex::empty().to_bytes().unwrap();
    let index = to.put("one", &signatures, media_type::OCI_INDEX, &list).await;
    let other = to.publish("one", &bill, &[b"of the site"]).await;
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("site.bundle");
    from.export(&[image("one", "1", &one)], &file, None).await.unwrap();
    let imported = bundle::import(&verify(&file).unwrap(), &to.target(), false, &Silent).await.unwrap();
    let taken = |tag: &str| {
        let has_tag = |content: &Content| content.tag.as_ref().is_some_and(|held| held.as_str() == tag);
        imported.contents.iter().find(|new| has_tag(&new.content)).unwrap().outcome.clone()
    };
    assert_eq!(taken(&signatures), ImportOutcome::Conflict { holds: index });
    assert_eq!(taken(&bill), ImportOutcome::Conflict { holds: other });
    assert_eq!(taken("1"), ImportOutcome::Pushed);
}
