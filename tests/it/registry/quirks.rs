//! Registries that deviate from the specification: the rows of docs/registries.md that are marked "scripted". Lists of referrers that
//! other clients wrote.

use std::collections::BTreeSet;

use super::*;
use crate::support::registry_quirks::{Quirk, registry_with};

const REPORT: &str = "application/vnd.example.report";
const BILL: &str = "application/vnd.example.bill";

/// Returns a manifest that refers to an image.
fn referrer(subject: &oci::Descriptor, artifact_type: &str) -> Vec<u8> {
    let empty = serde_json::json!({"mediaType": "application/vnd.oci.empty.v1+json",
        "digest": Digest::of(b"{}"), "size": 2});
    let manifest = serde_json::json!({"schemaVersion": 2, "mediaType": media_type::OCI_MANIFEST,
        "artifactType": artifact_type, "config": empty, "layers": [empty], "subject": subject});
    serde_json::to_vec(&manifest).unwrap()
}

/// Pushes an image with two referrers through a registry with quirks, and reads them back.
async fn publish(quirks: &[Quirk]) {
    let server = RegistryProcess::start(Wants::default());
    let host = registry_with(&server.host, quirks).await;
    let repository = repository(&host, "drivers/x");
    let registry = plain();
    assert!(registry.manifest(&repository, &tag("1")).await.unwrap().is_none(), "{quirks:?}");
    assert!(registry.tags(&repository).await.unwrap().is_empty(), "{quirks:?}");

    let directory = tempfile::tempdir().unwrap();
    let (image, _) = push_two(registry.as_ref(), &repository, directory.path()).await.unwrap();
    registry.push_bytes(&repository, b"{}").await.unwrap();
    let subject = oci::Descriptor::of(media_type::OCI_MANIFEST, &image.manifest);
    let none = registry.referrers(&repository, &image.digest, None).await.unwrap();
    assert!(none.is_empty(), "{quirks:?}: {none:?}");
    for artifact_type in [REPORT, BILL] {
        registry.push_referrer(&repository, &referrer(&subject, artifact_type)).await.unwrap();
    }
    let found = registry.referrers(&repository, &image.digest, None).await.unwrap();
    let mut types: Vec<_> = found.iter().filter_map(|found| found.artifact_type.as_deref()).collect();
    types.sort_unstable();
    assert_eq!(types, [BILL, REPORT], "{quirks:?}");
    let reports = registry.referrers(&repository, &image.digest, Some(REPORT)).await.unwrap();
    assert_eq!(reports.len(), 1, "{quirks:?}");
}

#[tokio::test]
async fn any_refusal_of_the_referrers_api_means_that_there_is_none() {
    for status in [400, 404, 405, 406] {
        publish(&[Quirk::ReferrersStatus(status)]).await;
    }
}

#[tokio::test]
async fn gitlab_keeps_referrers_without_a_list() {
    publish(&[Quirk::PullNeedsRepository, Quirk::FallbackTagIsSubject]).await;
}

/// Pushes an image and a report about it. Returns the image, the report and a bill of materials that is not pushed.
async fn push_with_report(registry: &dyn Registry, repository: &Repository) -> (Digest, [Vec<u8>; 2]) {
    let directory = tempfile::tempdir().unwrap();
    let (image, _) = push_two(registry, repository, directory.path()).await.unwrap();
    registry.push_bytes(repository, b"{}").await.unwrap();
    let subject = oci::Descriptor::of(media_type::OCI_MANIFEST, &image.manifest);
    let (report, bill) = (referrer(&subject, REPORT), referrer(&subject, BILL));
    registry.push_referrer(repository, &report).await.unwrap();
    (image.digest, [report, bill])
}

/// Anyone who may push can write the tag of the list.
#[tokio::test]
async fn an_image_under_the_tag_of_the_list_hides_no_referrer() {
    let server = RegistryProcess::start(Wants::default());
    let (registry, repository) = (plain(), repository(&server.host, "drivers/x"));
    let (image, [report, bill]) = push_with_report(registry.as_ref(), &repository).await;
    let list = Version::Tag(oci::referrers_tag(&image).unwrap());
    registry.push_manifest(&repository, &list, media_type::OCI_MANIFEST, &report).await.unwrap();
    registry.push_referrer(&repository, &bill).await.unwrap();
    let found = registry.referrers(&repository, &image, None).await.unwrap();
    let found: BTreeSet<Digest> = found.into_iter().map(|referrer| referrer.digest).collect();
    assert_eq!(found, [report, bill].map(|manifest| Digest::of(&manifest)).into());
}

/// Other clients add entries that farrier cannot read, such as those with a digest of another algorithm.
#[tokio::test]
async fn a_list_with_an_unreadable_entry_stays_and_hides_no_referrer() {
    let server = RegistryProcess::start(Wants::default());
    let (registry, repository) = (plain(), repository(&server.host, "drivers/x"));
    let (image, [report, bill]) = push_with_report(registry.as_ref(), &repository).await;
    let mut list = oci::ImageIndex::empty();
    list.manifests.push(oci::Descriptor::of(media_type::OCI_MANIFEST, &report));
    let mut list = serde_json::to_value(&list).unwrap();
    list["manifests"][0]["platform"] = serde_json::json!({"os": "linux"});
    let (list, version) = (list.to_string(), Version::Tag(oci::referrers_tag(&image).unwrap()));
    registry.push_manifest(&repository, &version, media_type::OCI_INDEX, list.as_bytes()).await.unwrap();
    registry.push_referrer(&repository, &bill).await.unwrap();
    let stored = registry.manifest(&repository, &version).await.unwrap().unwrap();
    assert_eq!(stored.bytes, list.as_bytes());
    let found = registry.referrers(&repository, &image, None).await.unwrap();
    let found: BTreeSet<Digest> = found.into_iter().map(|referrer| referrer.digest).collect();
    assert_eq!(found, [report, bill].map(|manifest| Digest::of(&manifest)).into());
}

#[tokio::test]
async fn a_listed_manifest_that_does_not_refer_to_the_image_is_no_referrer() {
    let server = RegistryProcess::start(Wants::default());
    let (registry, repository) = (plain(), repository(&server.host, "drivers/x"));
    let directory = tempfile::tempdir().unwrap();
    let (image, _) = push_two(registry.as_ref(), &repository, directory.path()).await.unwrap();
    let subject = Digest::of(b"another image");
    let mut list = oci::ImageIndex::empty();
    list.manifests.push(oci::Descriptor {
        artifact_type: Some(REPORT.to_owned()),
        ..oci::Descriptor::of(media_type::OCI_MANIFEST, &image.manifest)
    });
    let version = Version::Tag(oci::referrers_tag(&subject).unwrap());
    let bytes = list.to_bytes().unwrap();
    registry.push_manifest(&repository, &version, media_type::OCI_INDEX, &bytes).await.unwrap();
    assert_eq!(registry.referrers(&repository, &subject, None).await.unwrap(), []);
}

#[tokio::test]
async fn quay_answers_for_a_repository_that_does_not_exist_yet() {
    publish(&[Quirk::PullNeedsRepository]).await;
}

#[tokio::test]
async fn a_missing_repository_at_ecr_comes_with_the_command_that_creates_it() {
    let server = RegistryProcess::start(Wants::default());
    let host = registry_with(&server.host, &[Quirk::PushNeedsRepository]).await;
    let repository = repository(&host, "drivers/x");
    let mount = plain().mount_blob(&repository, &Digest::of(b"{}"), &repository).await;
    assert!(matches!(mount, Err(RegistryError::NoRepository { .. })), "{mount:?}");
    let error = plain().push_bytes(&repository, b"{}").await.unwrap_err();
    assert!(!error.is_transient());
    let expected =
        format!("create the repository drivers/x at {host}, or allow pushes to create repositories");
    assert_eq!(hint(&error), Some(expected));
    let RegistryError::NoRepository { repository, action, .. } = error else { panic!("{error:?}") };
    let host = "123456789012.dkr.ecr.eu-central-1.amazonaws.com".to_owned();
    assert_eq!(
        hint(&RegistryError::NoRepository { host, repository, action }).as_deref(),
        Some("aws ecr create-repository --region eu-central-1 --repository-name drivers/x")
    );
}

#[tokio::test]
async fn a_proxy_that_limits_bodies_is_named() {
    let server = RegistryProcess::start(Wants::default());
    let host = registry_with(&server.host, &[Quirk::BodyLimit(1000)]).await;
    let error = plain().push_bytes(&repository(&host, "drivers/x"), &[7; 2000]).await.unwrap_err();
    let message = error.to_string();
    assert!(message.ends_with("accepts no request of 2000 bytes (nginx: client_max_body_size)"), "{message}");
}
