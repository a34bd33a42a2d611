use farrier_core::facts::media_type;
use kmod::Verdict;
use serde_json::json;

use super::*;
use crate::testing::Bench;

fn fits(verdict: Verdict, said: &str, allows_unknown: bool) -> Outcome {
    let repository = "registry.test/hello".parse().unwrap();
    let facts = ImageFacts {
        kernel_release: Some("6.1.0-18-amd64".parse().unwrap()),
        verdict: Some(verdict),
        check_summary: Some("1 unknown".to_owned()),
        ..ImageFacts::default()
    };
    let (bench, digest) = (Bench::new(&json!({})), Digest::of(b"image"));
    let image = StoredImage { services: &bench.services, repository: &repository, digest: &digest };
    let subject = Subject { image, facts, allows_unknown, signers: None, statements: Vec::new() };
    check_report(&json!({"report": {"kernel": "6.1.0-18-amd64", "verdict": said}}), &subject)
}

#[test]
fn unknown_passes_where_the_definition_allows_it() {
    let said = fits(Verdict::Unknown, "unknown", true).unwrap_or_else(|failed| panic!("{}", failed.why));
    assert_eq!(said, "unknown on 6.1.0-18-amd64, which the definition allows (1 unknown)");
    let failed = fits(Verdict::Unknown, "unknown", false).unwrap_err();
    assert_eq!(failed.why, "verdict unknown, which no definition allows");
    assert_eq!(failed.hint, ALLOW);
}

#[test]
fn what_report_and_annotation_say_must_be_the_same_and_load() {
    assert!(fits(Verdict::Loads, "loads", false).is_ok());
    for (noted, said) in
        [(Verdict::Loads, "unknown"), (Verdict::Unknown, "loads"), (Verdict::Refused, "refused")]
    {
        assert!(fits(noted, said, true).is_err(), "{noted:?} {said}");
    }
}

/// Pushes an index with these entries under a tag, and verifies it.
async fn verify_index_of(bench: &Bench, tag: &str, entries: Vec<Descriptor>) -> (Descriptor, VerifyReport) {
    let images = &bench.services.images;
    let repository = images.location.repository("x").unwrap();
    let mut index = ImageIndex::empty();
    index.manifests = entries;
    let (bytes, version) = (index.to_bytes().unwrap(), Version::Tag(tag.parse().unwrap()));
    images.registry.push_manifest(&repository, &version, media_type::OCI_INDEX, &bytes).await.unwrap();
    let reference = ImageReference { repository, version };
    let report = verify(&bench.services, &reference, None, false).await.unwrap();
    (Descriptor::of(media_type::OCI_INDEX, &bytes), report)
}

#[tokio::test]
async fn an_index_with_a_repeated_entry_or_an_index_is_refused() {
    let bench = Bench::new(&json!({}));
    let images = &bench.services.images;
    let repository = images.location.repository("x").unwrap();
    images.registry.push_bytes(&repository, oci::EMPTY).await.unwrap();
    let layer = Descriptor::of(media_type::OCI_LAYER, oci::EMPTY);
    let image = ImageManifest::new(layer.clone(), vec![layer]).to_bytes().unwrap();
    let version = Version::Digest(Digest::of(&image));
    images.registry.push_manifest(&repository, &version, media_type::OCI_MANIFEST, &image).await.unwrap();
    let image = Descriptor::of(media_type::OCI_MANIFEST, &image);

    let (_, repeated) = verify_index_of(&bench, "repeated", vec![image.clone(), image.clone()]).await;
    assert_eq!((repeated.checks[0].result, repeated.platforms.len()), (CheckResult::Failed, 0));
    let (index, single) = verify_index_of(&bench, "single", vec![image]).await;
    assert_eq!((single.checks[0].result, single.platforms.len()), (CheckResult::Ok, 1));
    let (_, nested) = verify_index_of(&bench, "nested", vec![index]).await;
    let [entry] = &nested.platforms[..] else { panic!("{nested:?}") };
    assert_eq!((entry.checks[0].result, entry.platforms.len()), (CheckResult::Failed, 0));
}

#[tokio::test]
async fn a_blob_that_is_named_often_is_looked_up_once_and_hostile_sizes_do_not_overflow() {
    let bench = Bench::new(&json!({}));
    let images = &bench.services.images;
    let repository = images.location.repository("x").unwrap();
    images.registry.push_bytes(&repository, oci::EMPTY).await.unwrap();
    let blob = |size| Descriptor::new(media_type::OCI_LAYER, Digest::of(oci::EMPTY), size);
    let check = async |sizes: [u64; 2]| {
        let manifest = ImageManifest::new(blob(2), sizes.map(blob).into());
        let outcome = check_blobs(images, &repository, &manifest, false).await.unwrap();
        outcome.unwrap_or_else(|failed| panic!("{}", failed.why))
    };
    assert_eq!(check([2, 2]).await, "1 blobs with 2 bytes in total are there");
    assert_eq!(check([u64::MAX, 3]).await, "3 blobs with 18446744073709551615 bytes in total are there");
}
