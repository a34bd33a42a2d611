use farrier_core::kernel::{Architecture, KernelTarget};

use super::*;
use crate::registry::{self, RegistryOptions};

fn store(root: &Path) -> Store {
    let location = RegistryLocation::Layout(root.join("layout"));
    let registry = registry::connect(&location, &RegistryOptions::default());
    Store::new(location, registry)
}

async fn put(store: &Store, root: &Path, tag: &str, content: &[u8]) -> Result<StoredInput, StoreError> {
    let file = root.join("file");
    std::fs::write(&file, content).unwrap();
    let layer = Descriptor::new(media_type::OCI_LAYER_GZIP, Digest::of(content), content.len() as u64);
    let tag = tag.parse().unwrap();
    let annotations = BTreeMap::from([("a".to_owned(), "b".to_owned())]);
    store
        .put(&NewInput {
            kind: InputKind::Source,
            tag: &tag,
            file: &file,
            layer: &layer,
            annotations,
            replace: false,
        })
        .await
}

#[tokio::test]
async fn what_is_put_is_found_and_never_changes() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    let tag = "x".parse().unwrap();
    assert_eq!(store.find(InputKind::Source, &tag).await.unwrap(), None);
    let first = put(&store, dir.path(), "x", b"one").await.unwrap();
    assert_eq!(put(&store, dir.path(), "x", b"one").await.unwrap().digest, first.digest);
    let refused = put(&store, dir.path(), "x", b"two").await.unwrap_err();
    assert!(matches!(&refused, StoreError::Taken(_, holds) if *holds == first.digest), "{refused}");
    assert!(refused.hint().unwrap().contains("never changes"));
    let found = store.find(InputKind::Source, &tag).await.unwrap().unwrap();
    assert_eq!((&found.digest, &found.annotations["a"]), (&first.digest, &"b".to_owned()));
    let to = dir.path().join("back");
    store.fetch(&found, &to).await.unwrap();
    assert_eq!(std::fs::read(to).unwrap(), b"one");
    assert_eq!(store.tags(InputKind::Source).await.unwrap(), [tag]);
    assert_eq!(store.tags(InputKind::Headers).await.unwrap(), []);
}

#[test]
fn no_two_releases_share_a_tag() {
    let tag = |release: &str| {
        header_tag(&release.parse().unwrap(), Architecture::Amd64).unwrap().as_str().to_owned()
    };
    assert_eq!(tag("6.1.0-47-amd64"), "6.1.0-47-amd64-amd64");
    assert_eq!(tag("6.1.192-ACME+"), "6.1.192-ACME_2b-amd64");
    let mut tags = ["6.1.0+", "6.1.0_", "6.1.0__", "6.1.0_2b", "6.1.0"].map(tag).to_vec();
    tags.sort();
    tags.dedup();
    assert_eq!(tags.len(), 5, "{tags:?}");
    let target = KernelTarget {
        os: "ubuntu".parse().unwrap(),
        os_version: "24.04".parse().unwrap(),
        release: "6.8.0-31-generic".parse().unwrap(),
        arch: Architecture::Amd64,
    };
    assert_eq!(platform_header_tag(&target).unwrap().as_str(), "6.8.0-31-generic-amd64-ubuntu-24.04");
}

#[test]
fn no_driver_image_can_have_the_name_of_a_repository_of_ours() {
    for name in ["headers", "sources", "rootfs", "definitions", "farrier-rootfs", "mirror"] {
        assert!(is_reserved(name), "{name}");
    }
    assert!(!is_reserved("driver"));
}

#[test]
fn tags_of_copied_images_move_unless_they_name_a_digest() {
    let moves = |repository: &str, tag: &str| is_moving_tag(repository, &tag.parse().unwrap());
    let copy = "mirror/docker.io/library/debian";
    assert!(moves(copy, "12") && !moves("debian", "12"));
    let hex = Digest::of(b"x").hex().to_owned();
    for fixed in [format!("digest-{hex}"), format!("sha256-{hex}"), format!("sha256-{hex}.sig")] {
        assert!(!moves(copy, &fixed), "{fixed}");
    }
}
