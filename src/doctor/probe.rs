//! Trial writes to a registry: pushes a small image with a document, moves its tag, and deletes both.

use farrier_core::{
    facts::media_type,
    image::{Digest, Repository, Version},
};
use farrier_store::TRIAL;
use oci::{client::Registry, subject_of_tag};
use serde_json::{Value, json};

use super::Diagnosis;

/// Type of the trial documents.
const ARTIFACT_TYPE: &str = "application/vnd.farrier.doctor.v1";
const EMPTY: &[u8] = b"{}";

impl Diagnosis {
    /// Pushes an image with a document, moves its tag, and deletes all that again.
    pub(super) async fn probe_writes(&mut self, registry: &dyn Registry, repository: &Repository) {
        let Ok(tag) = TRIAL.parse().map(Version::Tag) else { return };
        if let Err(error) = registry.push_bytes(repository, EMPTY).await {
            return self.add_result("trial image", Err(error));
        }
        let push = |bytes| registry.push_manifest(repository, &tag, media_type::OCI_MANIFEST, bytes);
        let (first, second) = (manifest("first", None), manifest("second", None));
        let subject = match push(&first).await {
            Err(error) => return self.add_result("trial image", Err(error)),
            Ok(digest) => digest,
        };
        self.add_ok("trial image", format!("{repository} accepts manifests"));
        let mut written = vec![subject.clone()];
        match push(&second).await.map(|digest| written.push(digest)) {
            Ok(()) => self.add_ok("trial tag", "tags may move"),
            Err(error) => self.add_error(
                "trial tag",
                &error.into(),
                "let farrier move tags: docs/registries.md says which",
            ),
        }
        let target = json!({"mediaType": media_type::OCI_MANIFEST, "digest": subject, "size": first.len()});
        let pushed = registry.push_referrer(repository, &manifest("document", Some(target))).await;
        let referrers = registry.referrers(repository, &subject, Some(ARTIFACT_TYPE)).await;
        match pushed.and_then(|digest| Ok((digest, referrers?))) {
            Err(error) => self.add_result("trial referrer", Err(error)),
            Ok((digest, referrers)) => {
                written.push(digest);
                let says = format!("documents of an image that are found: {} of 1", referrers.len());
                if referrers.len() == 1 {
                    self.add_ok("trial referrer", says);
                } else {
                    self.add_problem("trial referrer", says, "docs/registries.md names what registries lack");
                }
            }
        }
        // The registry lists or keeps the document under these tags.
        let tags = registry.tags(repository).await.unwrap_or_default();
        for tag in tags.into_iter().filter(|tag| subject_of_tag(tag).as_ref() == Some(&subject)) {
            let manifest = registry.manifest(repository, &Version::Tag(tag)).await;
            written.extend(manifest.ok().flatten().map(|manifest| manifest.digest));
        }
        let mut undeleted = Vec::new();
        for digest in written {
            undeleted.extend(
                registry.delete_manifest(repository, &digest).await.err().map(|_| digest.to_string()),
            );
        }
        self.add_ok(
            "trial deletion",
            match undeleted[..] {
                [] => "nothing is left".to_owned(),
                _ => format!("left in {repository}, with the tag {TRIAL}: {}", undeleted.join(", ")),
            },
        );
    }
}

/// Returns a manifest without content.
fn manifest(name: &str, subject: Option<Value>) -> Vec<u8> {
    let empty = json!({"mediaType": "application/vnd.oci.empty.v1+json", "digest": Digest::of(EMPTY),
        "size": EMPTY.len()});
    let mut manifest = json!({"schemaVersion": 2, "mediaType": media_type::OCI_MANIFEST, "artifactType": ARTIFACT_TYPE,
        "config": empty, "layers": [empty], "annotations": {"dev.farrier.doctor": name}});
    if let Some(subject) = subject {
        manifest["subject"] = subject;
    }
    manifest.to_string().into_bytes()
}
