use super::*;
use crate::{Assembly, assemble, media_type};

fn version(tag: &str) -> Version {
    Version::Tag(tag.parse().unwrap())
}

fn image(variant: &str) -> crate::Assembled {
    let empty = BTreeMap::new();
    let labels = BTreeMap::from([("variant".to_owned(), variant.to_owned())]);
    assemble(&Assembly {
        base: None,
        entrypoint_layer: None,
        layers: &[],
        entrypoint: &[],
        env: &empty,
        labels: &labels,
        annotations: &empty,
        architecture: "amd64",
    })
    .unwrap()
}

async fn push(layout: &LayoutRegistry, repository: &Repository, tag: &str, variant: &str) -> Digest {
    let image = image(variant);
    layout.push_bytes(repository, &image.config).await.unwrap();
    let version = version(tag);
    layout.push_manifest(repository, &version, media_type::OCI_MANIFEST, &image.manifest).await.unwrap()
}

#[tokio::test]
async fn repositories_and_tags_are_separate() {
    let directory = tempfile::tempdir().unwrap();
    let layout = LayoutRegistry::new(directory.path().join("images"));
    let (a, b): (Repository, Repository) = ("drivers/a".parse().unwrap(), "drivers/a-b".parse().unwrap());
    assert!(layout.tags(&a).await.unwrap().is_empty());
    assert!(layout.manifest(&a, &version("1")).await.unwrap().is_none());

    let one = push(&layout, &a, "1", "x").await;
    assert_eq!(push(&layout, &a, "2", "x").await, one);
    let other = push(&layout, &b, "1", "y").await;
    assert_ne!(push(&layout, &a, "1", "z").await, one, "the tag moves");

    let tags = layout.tags(&a).await.unwrap();
    assert_eq!(tags.iter().map(Tag::as_str).collect::<Vec<_>>(), ["2", "1"]);
    assert_eq!(layout.manifest(&a, &version("2")).await.unwrap().unwrap().digest, one);
    assert!(layout.manifest(&a, &Version::Digest(one)).await.unwrap().is_some());
    assert!(layout.manifest(&a, &Version::Digest(other)).await.unwrap().is_none());
}

#[tokio::test]
async fn blobs_are_verified_when_pushed_and_fetched() {
    let directory = tempfile::tempdir().unwrap();
    let layout = LayoutRegistry::new(directory.path().join("images"));
    let repository: Repository = "x".parse().unwrap();
    let file = directory.path().join("blob");
    fs::write(&file, "content").unwrap();
    let (right, wrong) = (Digest::of(b"content"), Digest::of(b"other"));

    let error = layout.push_blob(&repository, &wrong, &file).await.unwrap_err();
    assert!(matches!(error, RegistryError::Digest { .. }), "{error}");
    assert!(!layout.has_blob(&repository, &wrong).await.unwrap());
    assert_eq!(layout.push_blob(&repository, &right, &file).await.unwrap(), Upload::Sent(7));
    assert_eq!(layout.push_blob(&repository, &right, &file).await.unwrap(), Upload::Present);

    let out = directory.path().join("out");
    layout.fetch_blob(&repository, &right, u64::MAX, &out).await.unwrap();
    assert_eq!(fs::read(&out).unwrap(), b"content");
    fs::write(layout.blob(&right), "changed").unwrap();
    fs::remove_file(&out).unwrap();
    let error = layout.fetch_blob(&repository, &right, u64::MAX, &out).await.unwrap_err();
    assert!(matches!(error, RegistryError::Digest { .. }), "{error}");
    assert!(!out.exists());
    let names = fs::read_dir(directory.path()).unwrap().count();
    assert_eq!(names, 2, "a temporary file was left");
}

/// After a power failure a file can have lost its content.
#[tokio::test]
async fn a_truncated_blob_is_pushed_again() {
    let directory = tempfile::tempdir().unwrap();
    let layout = LayoutRegistry::new(directory.path().join("images"));
    let repository: Repository = "x".parse().unwrap();
    layout.push_bytes(&repository, b"content").await.unwrap();
    let blob = layout.blob(&Digest::of(b"content"));
    fs::write(&blob, "").unwrap();
    assert!(!layout.has_blob(&repository, &Digest::of(b"content")).await.unwrap());
    assert!(!layout.mount_blob(&repository, &Digest::of(b"content"), &repository).await.unwrap());
    assert_eq!(layout.push_bytes(&repository, b"content").await.unwrap(), Upload::Sent(7));
    assert_eq!(fs::read(&blob).unwrap(), b"content");
    layout.push_bytes(&repository, b"").await.unwrap();
    assert!(layout.has_blob(&repository, &Digest::of(b"")).await.unwrap());
}

#[tokio::test]
async fn a_manifest_with_a_truncated_blob_is_rejected() {
    let directory = tempfile::tempdir().unwrap();
    let layout = LayoutRegistry::new(directory.path().join("images"));
    let repository: Repository = "x".parse().unwrap();
    let image = image("x");
    layout.push_bytes(&repository, &image.config).await.unwrap();
    fs::write(layout.blob(&Digest::of(&image.config)), &image.config[..1]).unwrap();
    let kind = media_type::OCI_MANIFEST;
    let error = layout.push_manifest(&repository, &version("1"), kind, &image.manifest).await.unwrap_err();
    let expected = format!("is missing or does not have {} bytes", image.config.len());
    assert!(error.to_string().ends_with(&expected), "{error}");
}

#[tokio::test]
async fn a_manifest_without_its_blobs_is_rejected() {
    let directory = tempfile::tempdir().unwrap();
    let layout = LayoutRegistry::new(directory.path().join("images"));
    let repository: Repository = "x".parse().unwrap();
    let bytes = image("x").manifest;
    let pushed = layout.push_manifest(&repository, &version("1"), media_type::OCI_MANIFEST, &bytes).await;
    let error = pushed.unwrap_err().to_string();
    assert!(error.contains("blob ") && error.contains("is missing or "), "{error}");
    let garbage = layout.push_manifest(&repository, &version("1"), media_type::OCI_MANIFEST, b"<html>").await;
    assert!(matches!(garbage, Err(RegistryError::Protocol { .. })));
}

/// Other tools store manifests that farrier does not read, such as artifact manifests of ORAS.
#[tokio::test]
async fn beside_an_unreadable_manifest_no_blob_is_deleted() {
    let directory = tempfile::tempdir().unwrap();
    let layout = LayoutRegistry::new(directory.path().join("images"));
    let repository: Repository = "x".parse().unwrap();
    let deleted = push(&layout, &repository, "1", "x").await;
    let config = Digest::of(&image("x").config);
    let kind = "application/vnd.oci.artifact.manifest.v1+json";
    let artifact = format!(r#"{{"mediaType":"{kind}","blobs":[{{"digest":"{config}"}}]}}"#);
    layout.push_bytes(&repository, artifact.as_bytes()).await.unwrap();
    let mut index = layout.index().unwrap();
    index.manifests.push(Descriptor::of(kind, artifact.as_bytes()));
    layout.write_index(&index, "add an artifact").unwrap();

    assert!(layout.delete_manifest(&repository, &deleted).await.unwrap());
    assert!(layout.manifest(&repository, &version("1")).await.unwrap().is_none());
    assert!(layout.has_blob(&repository, &config).await.unwrap());

    layout.write_index(&ImageIndex::empty(), "delete the artifact").unwrap();
    let other = push(&layout, &repository, "1", "x").await;
    assert!(layout.delete_manifest(&repository, &other).await.unwrap());
    assert!(!layout.has_blob(&repository, &config).await.unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_writers_keep_each_others_images() {
    let directory = tempfile::tempdir().unwrap();
    let repository: Repository = "x".parse().unwrap();
    let writers = (0..8).map(|number| {
        let layout = LayoutRegistry::new(directory.path().join("images"));
        let repository = repository.clone();
        tokio::spawn(async move { push(&layout, &repository, &format!("t{number}"), "v").await })
    });
    for writer in writers.collect::<Vec<_>>() {
        writer.await.unwrap();
    }
    let layout = LayoutRegistry::new(directory.path().join("images"));
    assert_eq!(layout.tags(&repository).await.unwrap().len(), 8);
}
