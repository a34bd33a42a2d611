//! The order of bundles: an older one does not move tags back unnoticed.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use farrier_bundle as bundle;
use farrier_bundle::{
    Bundle, BundleError, Content, ContentKind, ContentRequest, Order, PreviousBundle, Target,
};
use farrier_core::{
    facts::{annotations::IDENTITY, media_type},
    image::Digest,
};
use farrier_store::registry::{RegistryLocation, RegistryOptions, connect};
use oci::{Descriptor, ImageManifest};

use super::{Silent, Site, content, farrier, image, text, verify};
use crate::support::scripted_registry::{ScriptedRegistry, ZOT};

const ORIGIN: &str = "a.example/drivers";

/// Stores a source under a tag that moves.
async fn source(site: &Site, identity: &str) -> Content {
    let repository = site.location.repository("sources").unwrap();
    for bytes in [identity.as_bytes(), oci::EMPTY] {
        site.registry.push_bytes(&repository, bytes).await.unwrap();
    }
    let layer = Descriptor::of(media_type::OCI_LAYER, identity.as_bytes());
    let config = Descriptor::of(media_type::OCI_EMPTY, oci::EMPTY);
    let annotations = [(IDENTITY.to_owned(), identity.to_owned())].into();
    let manifest = ImageManifest { annotations, ..ImageManifest::new(config, vec![layer]) };
    let bytes = manifest.to_bytes().unwrap();
    let digest = site.put("sources", "declared-1", media_type::OCI_MANIFEST, &bytes).await;
    content(ContentKind::Source, "sources", "declared-1", &digest)
}

/// Exports one content with an order, as `farrier bundle export` does.
async fn export(
    site: &Site,
    content: Content,
    origin: &str,
    to: &Path,
    since: Option<&PreviousBundle>,
) -> Order {
    export_all(site, vec![content], origin, to, since).await
}

async fn export_all(
    site: &Site,
    contents: Vec<Content>,
    origin: &str,
    to: &Path,
    since: Option<&PreviousBundle>,
) -> Order {
    let wanted: Vec<ContentRequest> = contents
        .into_iter()
        .map(|content| ContentRequest {
            repository: site.location.repository(&content.repository).unwrap(),
            registry: Arc::clone(&site.registry),
            content,
        })
        .collect();
    let mut collection = bundle::collect(&wanted, ORIGIN, since).await.unwrap();
    assert!(collection.assign_order(&site.target(), origin, since).await.unwrap().is_none());
    bundle::export(collection, to, None, Arc::new(Silent)).await.unwrap();
    Bundle::open(to).unwrap().index().order.clone().unwrap()
}

/// Imports a bundle from a machine that has imported none before. Returns the exit code and standard error.
fn import(to: &Site, file: &Path, more: &[&str]) -> (Option<i32>, String) {
    let (file, registry) = (file.to_str().unwrap(), to.location.to_string());
    let words = ["bundle", "import", "--insecure-no-signature", file, "--registry", &registry];
    let output = farrier(&[&words[..], more].concat());
    (output.status.code(), text(&output.stderr))
}

async fn declared(site: &Site) -> Digest {
    Digest::of(&site.manifest("sources", "declared-1").await.unwrap())
}

#[tokio::test]
async fn an_older_bundle_is_refused_and_says_what_goes_back() {
    let (from, to) = (Site::start(), Site::start());
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str| -> PathBuf { directory.path().join(name) };
    let old = source(&from, "mstflint 4.33").await;
    let unordered = file("unordered.bundle");
    from.export(std::slice::from_ref(&old), &unordered, None).await.unwrap();
    let first = export(&from, old.clone(), ORIGIN, &file("old.bundle"), None).await;
    let new = source(&from, "mstflint 4.34").await;
    let second = export(&from, new.clone(), ORIGIN, &file("new.bundle"), None).await;
    assert!(first.counter < second.counter, "{first:?} {second:?}");

    assert_eq!(import(&to, &unordered, &[]).0, Some(0), "nothing is newer yet");
    for name in ["old.bundle", "new.bundle", "new.bundle"] {
        assert_eq!(import(&to, &file(name), &[]).0, Some(0), "{name}");
    }
    let short = |content: &Content| content.digest.short().to_owned();
    let back = format!(
        "these tags move back: sources:declared-1 from mstflint 4.34 (sha256:{}) to mstflint 4.33 (sha256:{})",
        short(&new),
        short(&old)
    );
    let (code, said) = import(&to, &file("old.bundle"), &[]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains(&format!("number {} of {ORIGIN}", first.counter)), "{said}");
    assert!(said.contains(&format!("accepted (number {} of {ORIGIN}", second.counter)), "{said}");
    assert!(said.contains(&back) && said.contains("pass --allow-older"), "{said}");
    let (code, said) = import(&to, &unordered, &[]);
    assert!(code == Some(1) && said.contains("has no order, because an older farrier made it"), "{said}");
    assert_eq!(declared(&to).await, new.digest);

    let (code, said) = import(&to, &file("old.bundle"), &["--allow-older"]);
    assert!(code == Some(0) && said.contains(&back), "{said}");
    assert_eq!(declared(&to).await, old.digest);
    // The site remembers the newest order that it ever accepted.
    let (code, said) = import(&to, &file("old.bundle"), &[]);
    assert!(code == Some(1) && said.contains("no tag moves back"), "{said}");
    assert_eq!(import(&to, &file("new.bundle"), &[]).0, Some(0));
    assert_eq!(declared(&to).await, new.digest);
}

#[tokio::test]
async fn a_newer_bundle_that_arrives_during_an_import_is_not_undone() {
    let (from, to) = (Site::start(), Site::start());
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str| -> PathBuf { directory.path().join(name) };
    let old = source(&from, "mstflint 4.33").await;
    export(&from, old, ORIGIN, &file("old.bundle"), None).await;
    let new = source(&from, "mstflint 4.34").await;
    export(&from, new.clone(), ORIGIN, &file("new.bundle"), None).await;
    let verified = verify(&file("old.bundle")).unwrap();
    assert_eq!(to.target().older(&verified).await.unwrap(), None);
    assert_eq!(import(&to, &file("new.bundle"), &[]).0, Some(0));
    let error = bundle::import(&verified, &to.target(), false, &Silent).await.unwrap_err();
    assert!(matches!(&error, BundleError::Older(_)), "{error}");
    assert_eq!(declared(&to).await, new.digest);
}

#[tokio::test]
async fn a_newer_bundle_that_arrives_between_two_tags_is_not_undone() {
    let (from, to) = (Site::start(), Site::start());
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str| -> PathBuf { directory.path().join(name) };
    let one = image("one", "1", &from.publish("one", "1", &[b"one"]).await);
    let old = source(&from, "mstflint 4.33").await;
    export_all(&from, vec![one, old], ORIGIN, &file("old.bundle"), None).await;
    let new = source(&from, "mstflint 4.34").await;
    export(&from, new.clone(), ORIGIN, &file("new.bundle"), None).await;
    let verified = verify(&file("old.bundle")).unwrap();
    let scripted = ScriptedRegistry::start(&to.process.host, ZOT).await;
    scripted.hold("1");
    let location: RegistryLocation = format!("{}/drivers", scripted.host).parse().unwrap();
    let registry = connect(&location, &RegistryOptions::default());
    let target = Target { location, registry };
    let (imported, ()) = tokio::join!(bundle::import(&verified, &target, false, &Silent), async {
        scripted.reached().await;
        assert_eq!(import(&to, &file("new.bundle"), &[]).0, Some(0));
        scripted.release();
    });
    assert!(matches!(&imported, Err(BundleError::Older(_))), "{imported:?}");
    assert_eq!(declared(&to).await, new.digest);
}

#[tokio::test]
async fn the_tag_of_a_copied_image_moves_in_order() {
    let (from, to) = (Site::start(), Site::start());
    let directory = tempfile::tempdir().unwrap();
    for layer in ["older", "newer"] {
        let digest = from.publish("mirror/debian", "12", &[layer.as_bytes()]).await;
        let copy = content(ContentKind::Mirror, "mirror/debian", "12", &digest);
        let file = directory.path().join(layer);
        export(&from, copy, ORIGIN, &file, None).await;
        let (code, said) = import(&to, &file, &[]);
        assert_eq!(code, Some(0), "{said}");
        assert_eq!(Digest::of(&to.manifest("mirror/debian", "12").await.unwrap()), digest);
    }
    let (code, said) = import(&to, &directory.path().join("older"), &[]);
    assert!(code == Some(1) && said.contains("these tags move back: mirror/debian:12 from"), "{said}");
}

#[tokio::test]
async fn other_exporters_are_not_blocked_and_deltas_go_in_order() {
    let (from, to) = (Site::start(), Site::start());
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str| -> PathBuf { directory.path().join(name) };
    let old = source(&from, "one").await;
    export(&from, old.clone(), "b.example", &file("other"), None).await;
    export(&from, old, ORIGIN, &file("base"), None).await;
    let since = PreviousBundle::read(&file("base")).unwrap();
    let two = source(&from, "two").await;
    export(&from, two, ORIGIN, &file("delta"), Some(&since)).await;
    let three = source(&from, "three").await;
    export(&from, three.clone(), ORIGIN, &file("next"), Some(&PreviousBundle::read(&file("delta")).unwrap()))
        .await;
    for name in ["base", "delta", "next"] {
        assert_eq!(import(&to, &file(name), &[]).0, Some(0), "{name}");
    }
    let (code, said) = import(&to, &file("delta"), &[]);
    assert!(code == Some(1) && said.contains("is older than"), "{said}");
    assert_eq!(declared(&to).await, three.digest);
    assert_eq!(import(&to, &file("other"), &[]).0, Some(0), "it is of another exporter");
}

#[tokio::test]
async fn the_same_contents_have_the_same_order_and_a_lost_record_does_not_restart_it() {
    let from = Site::start();
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str| -> PathBuf { directory.path().join(name) };
    let one = source(&from, "one").await;
    let first = export(&from, one.clone(), ORIGIN, &file("1"), None).await;
    assert_eq!(export(&from, one.clone(), ORIGIN, &file("again"), None).await, first);
    assert!(fs::read(file("1")).unwrap() == fs::read(file("again")).unwrap());
    let two = source(&from, "two").await;
    let second = export(&from, two, ORIGIN, &file("2"), None).await;
    let third = export(&from, one, ORIGIN, &file("3"), None).await;
    assert!(first.counter < second.counter && second.counter < third.counter, "going back is an export, too");

    // Another registry has no record; the base of a delta still comes first.
    let other = Site::start();
    let two = source(&other, "two").await;
    let since = PreviousBundle::read(&file("3")).unwrap();
    let delta = export(&other, two, ORIGIN, &file("4"), Some(&since)).await;
    assert!(delta.counter > third.counter, "{delta:?}");
}

/// The base comes back on a medium that was at the other side.
#[tokio::test]
async fn a_forged_base_does_not_use_up_the_counters() {
    let from = Site::start();
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str| -> PathBuf { directory.path().join(name) };
    let old = source(&from, "mstflint 4.33").await;
    let first = export(&from, old, ORIGIN, &file("base"), None).await;
    let mut since = PreviousBundle::read(&file("base")).unwrap();
    since.index.order.as_mut().unwrap().counter = i64::MAX.unsigned_abs() - 1;
    let new = source(&from, "mstflint 4.34").await;
    let second = export(&from, new, ORIGIN, &file("delta"), Some(&since)).await;
    assert!(first.counter < second.counter && second.counter < 1 << 40, "{second:?}");
}

/// Exports without a record of the counter can have the same one, and neither is newer.
#[tokio::test]
async fn another_bundle_with_the_same_counter_is_refused() {
    let (from, to) = (Site::start(), Site::start());
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str| -> PathBuf { directory.path().join(name) };
    let old = source(&from, "mstflint 4.33").await;
    let order = export(&from, old, ORIGIN, &file("1"), None).await;
    let new = source(&from, "mstflint 4.34").await;
    let repository = from.location.repository(&new.repository).unwrap();
    let wanted = ContentRequest { repository, registry: Arc::clone(&from.registry), content: new.clone() };
    let mut collection = bundle::collect(&[wanted], ORIGIN, None).await.unwrap();
    collection.index.order = Some(order);
    bundle::export(collection, &file("2"), None, Arc::new(Silent)).await.unwrap();

    for _ in 0..2 {
        assert_eq!(import(&to, &file("1"), &[]).0, Some(0));
    }
    let (code, said) = import(&to, &file("2"), &[]);
    assert!(
        code == Some(1) && said.contains("has the number of another bundle that this site accepted"),
        "{said}"
    );
    assert_eq!(import(&to, &file("2"), &["--allow-older"]).0, Some(0));
    assert_eq!(declared(&to).await, new.digest);
}
