//! Garbage collection of a real registry without the referrers API, which deletes every manifest without a tag.
use std::path::Path;

use farrier_store::registry::{Registry as _, RegistryOptions, RemoteRegistry};

use crate::{
    signatures::{DOCUMENTS, P256, SIGNING, key, pinned, result, rows, site_yaml},
    support::{kernels, site::Site},
};

/// Returns the tags of `hello` that keep manifests from the garbage collection.
async fn keep_tags(site: &Site) -> Vec<String> {
    let registry = RemoteRegistry::new("test".to_owned(), &RegistryOptions::default());
    let tags = registry.tags(&format!("{}/hello", site.location).parse().unwrap()).await.unwrap();
    let tags = tags.iter().map(ToString::to_string);
    tags.filter(|tag| tag.strip_prefix("sha256-").is_some_and(|rest| rest.contains('-'))).collect()
}

#[track_caller]
fn export(site: &Site, kernel: &str, to: &Path) -> String {
    let args =
        ["bundle", "export", "--incomplete", "--os", "debian", "--os-version", "12", "--image", "hello"];
    let to = to.display().to_string();
    site.farrier(&[&args[..], &["--kernel", kernel, "--to", &to]].concat()).exits(0).stderr
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_survives_the_deletion_of_untagged_manifests_and_is_signed_again_where_it_did_not() {
    let kernel = kernels::newest().newer;
    let site = Site::new();
    key(&site, "site", P256);
    site_yaml(&site, &format!("{SIGNING}  policy: {{requireSigned: [site.pem]}}\n"));
    site.build("hello", &kernel, &["--push"]).exits(0);
    let image = pinned(&site, &kernel);
    site.registry.delete_untagged();
    rows(&site, &[&image], 0);

    // An image that an older farrier published has no such tags.
    let tags = keep_tags(&site).await;
    assert!(tags.len() >= 3, "{tags:?}");
    let (_, below) = site.location.split_once('/').unwrap();
    for tag in &tags {
        site.registry.lose_tag(&format!("{below}/hello"), tag);
    }
    site.registry.delete_untagged();
    let checks = rows(&site, &[&image], 1);
    for document in DOCUMENTS {
        let (outcome, message) = result(&checks, document);
        assert_eq!(outcome, "absent");
        let expected = format!("the {document} is listed, but gone: the registry deleted its manifest");
        assert_eq!(message, expected);
    }
    let said = export(&site, &kernel, &site.path("gone.bundle"));
    assert!(said.contains("it is listed, but the registry has deleted it"), "{said}");

    site.build("hello", &kernel, &["--push", "--force"]).exits(0);
    assert_eq!(pinned(&site, &kernel), image);
    rows(&site, &[&image], 0);
    let said = export(&site, &kernel, &site.path("whole.bundle"));
    assert!(!said.contains("gone"), "{said}");
    site.registry.delete_untagged();
    rows(&site, &[&image], 0);
}
