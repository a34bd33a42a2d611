//! Several clients that push the same content concurrently.

use super::*;
use serde_json::json;

/// docker-registry 2.8 writes its links in place. Without a retry, about one of thirty pushes fails.
#[tokio::test]
async fn two_that_push_the_same_at_once_both_get_through() {
    let server = RegistryProcess::start(Wants::default());
    let directory = tempfile::tempdir().unwrap();
    let repository = &repository(&server.host, "drivers/same");
    let [one, other] = [(); 2].map(|()| Retrying::new(plain(), CancellationToken::new()));
    let (_, layer) = layer(directory.path(), "same");
    let file = &directory.path().join("same");
    for round in 0..150 {
        let labels = BTreeMap::from([("round".to_owned(), round.to_string())]);
        let image = &labelled(None, std::slice::from_ref(&layer), &labels);
        let push = async |registry: &Retrying| {
            registry.push_blob(repository, &layer.digest, file).await?;
            registry.push_bytes(repository, &image.config).await?;
            let by_digest = Version::Digest(image.digest.clone());
            for version in [by_digest, tag(&round.to_string())] {
                registry
                    .push_manifest(repository, &version, media_type::OCI_MANIFEST, &image.manifest)
                    .await?;
            }
            Ok::<_, RegistryError>(())
        };
        let (first, second) = tokio::join!(push(&one), push(&other));
        first.and(second).unwrap();
    }
}

fn document(kind: &str, subject: &Assembled) -> String {
    let empty =
        json!({"mediaType": "application/vnd.oci.empty.v1+json", "digest": Digest::of(b"{}"), "size": 2});
    json!({
        "schemaVersion": 2, "mediaType": media_type::OCI_MANIFEST, "config": empty, "layers": [empty],
        "artifactType": format!("application/vnd.farrier.test.{kind}"),
        "subject": {"mediaType": media_type::OCI_MANIFEST, "digest": subject.digest, "size": subject.manifest.len()},
    })
    .to_string()
}

/// docker-registry 2.8 may answer 404 for the list of referrers while another client writes the list.
#[tokio::test]
async fn a_list_that_is_not_there_for_a_moment_keeps_what_was_just_added() {
    let image = assembled(None, &[]);
    let [one, two] = ["report", "bill"].map(|kind| document(kind, &image));
    let list = |documents: &[&String]| {
        let entry = |document: &&String| json!({"mediaType": media_type::OCI_MANIFEST, "digest": Digest::of(document.as_bytes()), "size": document.len()});
        let entries: Vec<_> = documents.iter().map(entry).collect();
        json!({"schemaVersion": 2, "mediaType": media_type::OCI_INDEX, "manifests": entries}).to_string()
    };
    let put = || answer(201, "");
    let fake = FakeHttp::start(vec![
        // The document, the tag that keeps it, and the list.
        put(),
        answer(404, ""),
        put(),
        answer(404, ""),
        put(),
        answer(200, list(&[&one])),
        put(),
        answer(404, ""),
        put(),
        answer(404, ""),
        put(),
        answer(200, list(&[&one, &two])),
    ])
    .await;
    let (registry, repository) = (plain(), repository(&fake.host, "drivers/x"));
    registry.push_referrer(&repository, one.as_bytes()).await.unwrap();
    registry.push_referrer(&repository, two.as_bytes()).await.unwrap();
    let written = String::from_utf8(fake.requests()[10].body.clone()).unwrap();
    for document in [&one, &two] {
        assert!(written.contains(Digest::of(document.as_bytes()).as_str()), "{written}");
    }
}

#[tokio::test]
async fn two_that_attach_the_same_documents_at_once_list_all_of_them() {
    let server = RegistryProcess::start(Wants::default());
    let repository = &repository(&server.host, "drivers/same");
    let [one, other] = [(); 2].map(|()| Retrying::new(plain(), CancellationToken::new()));
    one.push_bytes(repository, b"{}").await.unwrap();
    for round in 0..20 {
        let labels = BTreeMap::from([("round".to_owned(), round.to_string())]);
        let image = &labelled(None, &[], &labels);
        one.push_bytes(repository, &image.config).await.unwrap();
        let version = &Version::Digest(image.digest.clone());
        one.push_manifest(repository, version, media_type::OCI_MANIFEST, &image.manifest).await.unwrap();
        let documents = ["report", "bill", "provenance"].map(|kind| document(kind, image));
        let attach = async |registry: &Retrying| {
            for document in &documents {
                registry.push_referrer(repository, document.as_bytes()).await?;
            }
            Ok::<_, RegistryError>(())
        };
        let (first, second) = tokio::join!(attach(&one), attach(&other));
        first.and(second).unwrap();
        assert_eq!(one.referrers(repository, &image.digest, None).await.unwrap().len(), 3, "round {round}");
    }
}

/// The error code covers both transient and permanent causes, so farrier retries it like every other fault.
#[tokio::test]
async fn a_registry_that_misses_what_a_manifest_names_is_asked_again() {
    let missed = r#"{"errors":[{"code":"DIGEST_INVALID","message":"provided digest did not match uploaded content"},
        {"code":"MANIFEST_BLOB_UNKNOWN","message":"blob unknown to registry"}]}"#;
    let invalid = r#"{"errors":[{"code":"MANIFEST_INVALID","message":"no schema"}]}"#;
    let fake = FakeHttp::start(vec![answer(400, missed), answer(201, ""), answer(400, invalid)]).await;
    let repository = repository(&fake.host, "drivers/x");
    let registry = Retrying::new(plain(), CancellationToken::new());
    let image = assembled(None, &[]);
    let version = &tag("1");
    let put = || registry.push_manifest(&repository, version, media_type::OCI_MANIFEST, &image.manifest);
    assert_eq!(put().await.unwrap(), image.digest);
    let error = put().await.unwrap_err();
    assert!(error.to_string().ends_with("400, MANIFEST_INVALID: no schema"), "{error}");
    assert_eq!(fake.requests().len(), 3);
}
