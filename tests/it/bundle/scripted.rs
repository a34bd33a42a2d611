//! Imports into scripted stand-ins for zot and Harbor, where they behave differently from docker-registry 2.8.

use farrier_bundle as bundle;
use farrier_bundle::{BundleError, ContentKind, ImportOutcome};
use farrier_core::{
    facts::media_type,
    image::{Digest, Tag, Version},
};
use farrier_store::registry::{RegistryLocation, RegistryOptions, connect};
use oci::ImageIndex;

use super::{Silent, Site, content, filled, verify};
use crate::support::{
    registry_process::{RegistryProcess, Wants},
    scripted_registry::{HARBOR, Script, ScriptedRegistry, ZOT},
};

async fn start(script: Script) -> (Site, ScriptedRegistry) {
    let process = RegistryProcess::start(Wants { deletion: true, ..Wants::default() });
    let scripted = ScriptedRegistry::start(&process.host, script).await;
    let location: RegistryLocation = format!("{}/drivers", scripted.host).parse().unwrap();
    let registry = connect(&location, &RegistryOptions::default());
    (Site { process, location, registry }, scripted)
}

/// The registry lists the referrers itself, so an import writes no list that moves, and an immutable tag stops nothing. The garbage
/// collection deletes untagged manifests, but not those that belong to an image.
#[tokio::test]
async fn imported_images_survive_the_garbage_collection_of_zot_and_harbor() {
    let (from, contents, report) = filled().await;
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("site.bundle");
    from.export(&contents, &file, None).await.unwrap();
    let verified = verify(&file).unwrap();
    for script in [ZOT, HARBOR] {
        let (to, scripted) = start(script).await;
        let imported = bundle::import(&verified, &to.target(), false, &Silent).await.unwrap();
        assert!(imported.contents.iter().all(|new| new.outcome == ImportOutcome::Pushed), "{imported:?}");
        let one = &contents[0].digest;
        let repository = to.location.repository("one").unwrap();
        let tags = to.registry.tags(&repository).await.unwrap();
        let mut tags: Vec<&str> = tags.iter().map(Tag::as_str).collect();
        tags.sort_unstable();
        assert_eq!(tags, ["1", &format!("sha256-{}.sig", one.hex())], "no tag for referrers is needed");

        let garbage = ImageIndex::empty().to_bytes().unwrap();
        let version = Version::Digest(Digest::of(&garbage));
        to.registry.push_manifest(&repository, &version, media_type::OCI_INDEX, &garbage).await.unwrap();
        let deleted = scripted.collect_garbage().await;
        assert_eq!(deleted, [Digest::of(&garbage).to_string()]);
        let listed = to.registry.referrers(&repository, one, None).await.unwrap();
        assert_eq!(listed.iter().map(|found| &found.digest).collect::<Vec<_>>(), [&report]);
        let again = bundle::import(&verified, &to.target(), false, &Silent).await.unwrap();
        assert!(again.contents.iter().all(|new| new.outcome == ImportOutcome::Present), "{again:?}");
        assert_eq!(again.sent_bytes, 0);
    }
}

/// Harbor refuses to move the tag of a floating source, before the import has sent anything.
#[tokio::test]
async fn harbor_keeps_the_tag_of_a_floating_source_and_zot_moves_it() {
    let from = Site::start();
    let new = from.publish("sources", "declared-1", &[b"new"]).await;
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("bundle");
    from.export(&[content(ContentKind::Source, "sources", "declared-1", &new)], &file, None).await.unwrap();
    let verified = verify(&file).unwrap();
    for (script, is_refused) in [(HARBOR, true), (ZOT, false)] {
        let (to, _scripted) = start(script).await;
        let old = to.publish("sources", "declared-1", &[b"old"]).await;
        let imported = bundle::import(&verified, &to.target(), false, &Silent).await;
        assert_eq!(matches!(&imported, Err(BundleError::Immutable(..))), is_refused, "{imported:?}");
        let held = to.manifest("sources", "declared-1").await.unwrap();
        let expected = if is_refused { &old } else { &new };
        assert_eq!(Digest::of(&held), *expected);
    }
}
