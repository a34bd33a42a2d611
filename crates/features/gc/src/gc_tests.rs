use farrier_builder::testing::Bench;
use farrier_core::{facts::media_type, provenance};
use oci::{Artifact, Descriptor};
use serde_json::json;

use super::*;

/// Another client publishes an image between the search for leftovers and the deletion. The image's signatures were published
/// before the image.
#[tokio::test]
async fn referrers_of_an_image_that_was_published_meanwhile_are_kept() {
    let bench = Bench::new(&json!({}));
    let (services, registry) = (&bench.services, &bench.services.images.registry);
    let (repository, image) = (services.images.location.repository("x").unwrap(), image());
    let digest = Digest::of(&image);
    let signed = provenance::add_layers(None, &[]).unwrap();
    let artifact = Artifact::about(&image, provenance::SIGSTORE_BUNDLE, b"{}".to_vec(), &[]).unwrap();
    for bytes in [oci::EMPTY, &signed.config, &artifact.content] {
        registry.push_bytes(&repository, bytes).await.unwrap();
    }
    let tag = Version::Tag(provenance::signature_tag(&digest).unwrap());
    registry.push_manifest(&repository, &tag, media_type::OCI_MANIFEST, &signed.manifest).await.unwrap();
    registry.push_referrer(&repository, &artifact.manifest).await.unwrap();
    let options = GcOptions { keep_days: 0, further: Vec::new(), delete: true, accept_stale_record: false };
    let contents = list_contents(services, &options).await.unwrap();
    assert_eq!(contents.leftovers, [(repository.clone(), digest.clone())].into());
    let report = async || {
        let plan = GcPlan { going: Vec::new(), kept: Vec::new(), bytes: 0 };
        let mut report = report_of(&services.images, &options, &contents, plan).await.unwrap();
        delete_all(services, &contents, &mut report).await.unwrap();
        report
    };
    let referrers_and_signatures = async || {
        let signatures = registry.manifest(&repository, &tag).await.unwrap();
        (signatures.is_some(), registry.referrers(&repository, &digest, None).await.unwrap().len())
    };

    let version = Version::Digest(digest.clone());
    registry.push_manifest(&repository, &version, media_type::OCI_MANIFEST, &image).await.unwrap();
    let with_image = report().await;
    assert!(with_image.leftovers.is_empty() && !with_image.failed());
    assert_eq!(referrers_and_signatures().await, (true, 1));

    // Without the image, its leftovers are deleted.
    registry.delete_manifest(&repository, &digest).await.unwrap();
    assert_eq!(report().await.leftovers[0].state, GcState::Deleted);
    assert_eq!(referrers_and_signatures().await, (false, 0));
}

fn image() -> Vec<u8> {
    let layer = Descriptor::of(media_type::OCI_LAYER, oci::EMPTY);
    ImageManifest::new(layer.clone(), vec![layer]).to_bytes().unwrap()
}

fn output_of(image: &[u8]) -> Artifact {
    Artifact::about(image, HostOutput::Deb.media_type(), b"deb".to_vec(), &[]).unwrap()
}

/// The signatures and documents of an output refer to the output, not to the image.
#[tokio::test]
async fn outputs_go_with_their_image_and_their_referrers_with_them() {
    let bench = Bench::new(&json!({}));
    let (services, registry) = (&bench.services, &bench.services.images.registry);
    let (repository, image) = (services.images.location.repository("x").unwrap(), image());
    let output = output_of(&image);
    let bundle = Artifact::about(&output.manifest, provenance::SIGSTORE_BUNDLE, b"{}".to_vec(), &[]).unwrap();
    let bill = Artifact::about(&output.manifest, media_type::CYCLONEDX, b"{}".to_vec(), &[]).unwrap();
    let signed = provenance::add_layers(None, &[]).unwrap();
    for bytes in [oci::EMPTY, &signed.config, &output.content, &bundle.content] {
        registry.push_bytes(&repository, bytes).await.unwrap();
    }
    let signature = provenance::signature_tag(&output.digest).unwrap();
    for (tag, manifest) in [("1".parse().unwrap(), &image), (signature, &signed.manifest)] {
        let kind = media_type::OCI_MANIFEST;
        registry.push_manifest(&repository, &Version::Tag(tag), kind, manifest).await.unwrap();
    }
    registry.push_referrer(&repository, &output.manifest).await.unwrap();
    registry.push_referrer(&repository, &bundle.manifest).await.unwrap();
    registry.push_referrer(&repository, &bill.manifest).await.unwrap();
    let options = GcOptions { keep_days: 0, further: Vec::new(), delete: true, accept_stale_record: false };
    let contents = list_contents(services, &options).await.unwrap();
    assert!(delete(services, &contents, &repository, &Digest::of(&image), Deletion::Image).await.unwrap());
    assert_eq!(registry.tags(&repository).await.unwrap(), []);
    for digest in [&output.digest, &bundle.digest, &bill.digest] {
        let version = Version::Digest(digest.clone());
        assert!(registry.manifest(&repository, &version).await.unwrap().is_none());
    }
}

#[tokio::test]
async fn an_output_with_a_separate_tag_is_kept() {
    let bench = Bench::new(&json!({}));
    let (services, registry) = (&bench.services, &bench.services.images.registry);
    let (repository, image) = (services.images.location.repository("x").unwrap(), image());
    let output = output_of(&image);
    for bytes in [oci::EMPTY, &output.content] {
        registry.push_bytes(&repository, bytes).await.unwrap();
    }
    for (tag, manifest) in [("1", &image), ("keep", &output.manifest)] {
        let version = Version::Tag(tag.parse().unwrap());
        registry.push_manifest(&repository, &version, media_type::OCI_MANIFEST, manifest).await.unwrap();
    }
    let options = GcOptions { keep_days: 0, further: Vec::new(), delete: true, accept_stale_record: false };
    let contents = list_contents(services, &options).await.unwrap();
    assert!(delete(services, &contents, &repository, &Digest::of(&image), Deletion::Image).await.unwrap());
    assert_eq!(registry.tags(&repository).await.unwrap(), ["keep".parse::<Tag>().unwrap()]);
}

/// Anyone who may push can give an image in use the tag of another image's signatures.
#[tokio::test]
async fn an_image_under_a_tag_that_names_another_subject_is_no_leftover() {
    let bench = Bench::new(&json!({}));
    let (services, registry) = (&bench.services, &bench.services.images.registry);
    let (repository, image) = (services.images.location.repository("x").unwrap(), image());
    registry.push_bytes(&repository, oci::EMPTY).await.unwrap();
    let tag = Version::Tag(provenance::signature_tag(&Digest::of(b"gone")).unwrap());
    registry.push_manifest(&repository, &tag, media_type::OCI_MANIFEST, &image).await.unwrap();
    let options = GcOptions { keep_days: 0, further: Vec::new(), delete: true, accept_stale_record: false };
    let contents = list_contents(services, &options).await.unwrap();
    assert!(contents.is_tagged(&repository, &Digest::of(&image)));
    assert_eq!(contents.leftovers, BTreeSet::new());
}

/// Anyone who may push can give a referrer or the signatures of an image in use the tag of a missing image's signatures.
#[tokio::test]
async fn manifests_of_an_image_in_use_are_kept_under_tags_that_name_a_missing_image() {
    let bench = Bench::new(&json!({}));
    let (services, registry) = (&bench.services, &bench.services.images.registry);
    let (repository, image) = (services.images.location.repository("x").unwrap(), image());
    let output = output_of(&image);
    let signed = provenance::add_layers(None, &[]).unwrap();
    for bytes in [oci::EMPTY, &output.content, &signed.config] {
        registry.push_bytes(&repository, bytes).await.unwrap();
    }
    registry.push_referrer(&repository, &output.manifest).await.unwrap();
    let signature = provenance::signature_tag(&Digest::of(&image)).unwrap();
    for (tag, manifest) in [
        ("1".parse().unwrap(), &image),
        (signature.clone(), &signed.manifest),
        (provenance::signature_tag(&Digest::of(b"gone")).unwrap(), &output.manifest),
        (provenance::attestation_tag(&Digest::of(b"gone")).unwrap(), &signed.manifest),
    ] {
        let kind = media_type::OCI_MANIFEST;
        registry.push_manifest(&repository, &Version::Tag(tag), kind, manifest).await.unwrap();
    }
    let options = GcOptions { keep_days: 0, further: Vec::new(), delete: true, accept_stale_record: false };
    let contents = list_contents(services, &options).await.unwrap();
    let plan = GcPlan { going: Vec::new(), kept: Vec::new(), bytes: 0 };
    let mut report = report_of(&services.images, &options, &contents, plan).await.unwrap();
    delete_all(services, &contents, &mut report).await.unwrap();
    let referrers = registry.referrers(&repository, &Digest::of(&image), None).await.unwrap();
    assert_eq!(referrers.len(), 1);
    assert!(registry.manifest(&repository, &Version::Tag(signature)).await.unwrap().is_some());
}
