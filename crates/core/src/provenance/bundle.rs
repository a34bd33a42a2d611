//! Sigstore bundles (sigstore/protobuf-specs, `sigstore_bundle.proto`; sigstore/cosign, `specs/BUNDLE_SPEC.md`). Each bundle
//! contains one signed statement and is an artifact that refers to the image. `cosign` 3 writes and expects this form.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    PublicKey,
    dsse::{Envelope, EnvelopeError, EnvelopeJson},
};
use crate::{
    image::Digest,
    oci::{Artifact, Descriptor, ImageError, ImageManifest},
};

/// The media type of a bundle: of the artifact, of its layer and of the document itself.
pub const SIGSTORE_BUNDLE: &str = "application/vnd.dev.sigstore.bundle.v0.3+json";
/// Predicate type of the statement with which `cosign` 3 signs an image. Statements of other types are not image signatures.
pub const SIGNED_PREDICATE: &str = "https://sigstore.dev/cosign/sign/v1";
/// Annotation of the artifact: kind of the bundle's content.
const CONTENT: &str = "dev.sigstore.bundle.content";
/// Annotation of the artifact: predicate type of the statement.
const PREDICATE_TYPE: &str = "dev.sigstore.bundle.predicateType";

/// Creates a bundle as a referrer of the image whose manifest is `subject`. It names no transparency log and no certificate: the
/// verifier already has the key, and the hint only distinguishes keys.
pub fn bundle(
    subject: &[u8],
    envelope: &[u8],
    key: &PublicKey,
    predicate_type: &str,
) -> Result<Artifact, ImageError> {
    let envelope: Value =
        serde_json::from_slice(envelope).map_err(|source| ImageError::Json("signed statement", source))?;
    let hint = hex::decode(key.fingerprint().hex()).unwrap_or_default();
    let content = json!({
        "mediaType": SIGSTORE_BUNDLE,
        "verificationMaterial": {"publicKey": {"hint": STANDARD.encode(hint)}},
        "dsseEnvelope": envelope,
    });
    let notes = [(CONTENT, "dsse-envelope"), (PREDICATE_TYPE, predicate_type)];
    Artifact::about(subject, SIGSTORE_BUNDLE, content.to_string().into_bytes(), &notes)
}

/// Whether a referrer may be a bundle with a statement of one of these predicate types. The annotation with the type is optional.
pub fn may_be_bundle(referrer: &Descriptor, predicate_types: &[&str]) -> bool {
    let predicate_type = referrer.annotations.get(PREDICATE_TYPE);
    referrer.artifact_type.as_deref() == Some(SIGSTORE_BUNDLE)
        && predicate_type.is_none_or(|annotated| predicate_types.contains(&annotated.as_str()))
}

/// Returns the layer with the bundle, if the manifest has one and refers to the image.
pub fn bundle_layer<'a>(manifest: &'a ImageManifest, image: &Digest) -> Option<&'a Descriptor> {
    let is_about = manifest.subject.as_ref().is_some_and(|subject| subject.digest == *image);
    manifest.layers.iter().find(|layer| is_about && layer.media_type == SIGSTORE_BUNDLE)
}

impl Envelope {
    /// Reads the untrusted bytes of a bundle. Its claims about keys, certificates and logs are ignored.
    pub fn of_bundle(bytes: &[u8]) -> Result<Self, EnvelopeError> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Bundle {
            media_type: String,
            dsse_envelope: EnvelopeJson,
        }
        let bundle: Bundle = serde_json::from_slice(bytes).map_err(EnvelopeError::Json)?;
        if bundle.media_type != SIGSTORE_BUNDLE {
            return Err(EnvelopeError::Type(bundle.media_type.chars().take(80).collect()));
        }
        Self::from_json(&bundle.dsse_envelope)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        oci::media_type,
        provenance::{
            ImageSignature, Statement,
            testing::{COSIGN_3_BUNDLE, COSIGN_3_KEY},
        },
    };

    /// Created by `cosign sign --key` of Debian's cosign 3.1.1.
    #[test]
    fn a_bundle_of_cosign_3() {
        let envelope = Envelope::of_bundle(COSIGN_3_BUNDLE).unwrap();
        let statement = Statement::parse(&envelope.payload).unwrap();
        assert_eq!(statement.predicate_type, SIGNED_PREDICATE);
        let image: Digest = format!("sha256:{}", statement.subjects[0]).parse().unwrap();
        let key = PublicKey::image_key_from_pem(COSIGN_3_KEY).unwrap();
        let signature = ImageSignature::Statement(envelope.clone());
        assert!(signature.is_by(&image, &key));
        assert!(!signature.is_by(&Digest::of(b"other"), &key));

        // farrier's bundle is the same except for the order of its fields.
        let text = json!({"payloadType": "application/vnd.in-toto+json", "payload": STANDARD.encode(&envelope.payload),
            "signatures": serde_json::from_slice::<Value>(COSIGN_3_BUNDLE).unwrap()["dsseEnvelope"]["signatures"]});
        let ours = bundle(b"{}", text.to_string().as_bytes(), &key, SIGNED_PREDICATE).unwrap();
        let parse = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).unwrap();
        assert_eq!(parse(&ours.content), parse(COSIGN_3_BUNDLE));
        let manifest = ImageManifest::parse(&ours.manifest).unwrap();
        assert!(bundle_layer(&manifest, &Digest::of(b"{}")).is_some());
        assert!(bundle_layer(&manifest, &image).is_none(), "the bundle refers to another image");
    }

    #[test]
    fn only_referrers_that_may_be_bundles_are_read() {
        let listed = |kind: Option<&str>, predicate: Option<&str>| Descriptor {
            artifact_type: kind.map(str::to_owned),
            annotations: predicate
                .map(|said| (PREDICATE_TYPE.to_owned(), said.to_owned()))
                .into_iter()
                .collect(),
            ..Descriptor::of(media_type::OCI_MANIFEST, b"")
        };
        let is_read = |kind, predicate| may_be_bundle(&listed(kind, predicate), &[SIGNED_PREDICATE]);
        assert!(
            is_read(Some(SIGSTORE_BUNDLE), None) && is_read(Some(SIGSTORE_BUNDLE), Some(SIGNED_PREDICATE))
        );
        assert!(!is_read(Some(SIGSTORE_BUNDLE), Some("https://slsa.dev/provenance/v1")));
        assert!(!is_read(Some(media_type::CYCLONEDX), None));
        assert!(!is_read(Some(media_type::OCI_EMPTY), None) && !is_read(None, None));
        assert!(may_be_bundle(&listed(Some(SIGSTORE_BUNDLE), Some("other")), &["one", "other"]));
    }

    #[test]
    fn other_content_is_rejected() {
        let with = |from: &str, to: &str| {
            let text = String::from_utf8(COSIGN_3_BUNDLE.to_vec()).unwrap();
            assert!(text.contains(from));
            Envelope::of_bundle(text.replacen(from, to, 1).as_bytes())
        };
        assert!(matches!(with("v0.3", "v9"), Err(EnvelopeError::Type(_))));
        assert!(matches!(with("dsseEnvelope", "messageSignature"), Err(EnvelopeError::Json(_))));
        assert!(matches!(with("in-toto", "other"), Err(EnvelopeError::Type(_))));
    }

    proptest! {
        #[test]
        fn nothing_panics(at in 0..COSIGN_3_BUNDLE.len(), byte: u8) {
            let mut bytes = COSIGN_3_BUNDLE.to_vec();
            bytes[at] = byte;
            let _ = Envelope::of_bundle(&bytes).map(|envelope| Statement::parse(&envelope.payload));
        }
    }
}
