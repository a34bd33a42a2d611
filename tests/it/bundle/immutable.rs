//! Imports into a registry with immutable tags.

use farrier_bundle as bundle;
use farrier_bundle::{BundleError, ContentKind, Target, Verified};
use farrier_core::facts::media_type;
use farrier_store::registry::{RegistryLocation, RegistryOptions, connect};
use oci::{Descriptor, ImageManifest};

use super::{Silent, Site, content, image, verify};
use crate::support::scripted_registry::{Script, ScriptedRegistry};

async fn import(
    verified: &Verified,
    to: &Site,
    movable: &'static [&'static str],
) -> Result<bundle::ImportSummary, BundleError> {
    let script = Script { movable, lists_referrers: false };
    let scripted = ScriptedRegistry::start(&to.process.host, script).await;
    let location: RegistryLocation = format!("{}/drivers", scripted.host).parse().unwrap();
    let registry = connect(&location, &RegistryOptions::default());
    bundle::import(verified, &Target { location, registry }, false, &Silent).await
}

fn refused(imported: Result<bundle::ImportSummary, BundleError>, tag: &str) {
    let error = imported.unwrap_err();
    assert!(matches!(&error, BundleError::Immutable(named, _) if named.ends_with(tag)), "{error:?}");
    let hint = error.hint().unwrap();
    for tags in ["`sha256-*`", "`declared-*`", "`latest`", "all but `digest-*` in mirror/**", "`last-seen`"] {
        assert!(hint.contains(tags), "{hint}");
    }
}

#[tokio::test]
async fn a_tag_that_cannot_move_is_named_before_anything_is_sent() {
    let (from, to) = (Site::start(), Site::start());
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("bundle");
    let old = to.publish("sources", "declared-1", &[b"old"]).await;
    let new = from.publish("sources", "declared-1", &[b"new"]).await;
    from.export(&[content(ContentKind::Source, "sources", "declared-1", &new)], &file, None).await.unwrap();
    let verified = verify(&file).unwrap();
    let before = (to.process.requests("POST"), to.process.requests("PUT"));
    refused(import(&verified, &to, &[]).await, "sources:declared-1");
    assert_eq!((to.process.requests("POST"), to.process.requests("PUT")), before);
    assert_eq!(farrier_core::image::Digest::of(&to.manifest("sources", "declared-1").await.unwrap()), old);
    assert!(import(&verified, &to, &["declared-"]).await.unwrap().is_complete());
    assert_eq!(farrier_core::image::Digest::of(&to.manifest("sources", "declared-1").await.unwrap()), new);
}

/// docker-registry 2.8 has no referrers API, so the list of an image's referrers is a tag that moves.
#[tokio::test]
async fn a_list_that_cannot_move_leaves_every_image_without_its_tag() {
    let (from, to) = (Site::start(), Site::start());
    let one = from.publish("one", "1", &[b"one"]).await;
    from.refer("one", &one).await;
    let repository = from.location.repository("one").unwrap();
    let subject = from.manifest("one", "1").await.unwrap();
    let empty = || Descriptor::of(media_type::OCI_EMPTY, oci::EMPTY);
    from.registry.push_bytes(&repository, oci::EMPTY).await.unwrap();
    let second = ImageManifest {
        artifact_type: Some("example/second".to_owned()),
        subject: Some(Descriptor::of(media_type::OCI_MANIFEST, &subject)),
        ..ImageManifest::new(empty(), vec![empty()])
    };
    from.registry.push_referrer(&repository, &second.to_bytes().unwrap()).await.unwrap();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("bundle");
    from.export(&[image("one", "1", &one)], &file, None).await.unwrap();
    let verified = verify(&file).unwrap();
    refused(import(&verified, &to, &[]).await, &format!("one:sha256-{}", one.hex()));
    assert!(to.manifest("one", "1").await.is_none());
    assert!(import(&verified, &to, &["sha256-"]).await.unwrap().is_complete());
    assert!(to.manifest("one", "1").await.is_some());
}
