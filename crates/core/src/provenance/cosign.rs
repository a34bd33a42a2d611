//! Cosign 2's storage of signatures and attestations (sigstore/cosign, `SIGNATURE_SPEC.md` and `ATTESTATION_SPEC.md`). They are
//! layers of one manifest, under a tag that is derived from the image's digest.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde_json::{Value, json};

use crate::{
    image::{Digest, Tag},
    oci::{Descriptor, ImageError, ImageManifest, media_type},
};

use super::dsse::DSSE;

/// The media type of the signed statement.
pub const SIMPLE_SIGNING: &str = "application/vnd.dev.cosign.simplesigning.v1+json";
/// The `type` of the signed statement.
const PAYLOAD_TYPE: &str = "cosign container image signature";
/// Annotation of a layer: the signature over its bytes in base64. Empty on an attestation, which contains its own signature.
const SIGNATURE: &str = "dev.cosignproject.cosign/signature";
/// Annotation of an attestation's layer: its predicate type.
const PREDICATE_TYPE: &str = "predicateType";

/// Returns the tag of an image's signatures.
pub fn signature_tag(image: &Digest) -> Option<Tag> {
    format!("sha256-{}.sig", image.hex()).parse().ok()
}

/// Returns the tag of an image's attestations.
pub fn attestation_tag(image: &Digest) -> Option<Tag> {
    format!("sha256-{}.att", image.hex()).parse().ok()
}

/// Whether `cosign` creates tags of this form (`.sig`, `.att`, `.sbom`).
pub fn is_cosign_tag(tag: &Tag) -> bool {
    let parts = tag.as_str().strip_prefix("sha256-").and_then(|rest| rest.split_once('.'));
    parts.is_some_and(|(hex, end)| {
        hex.len() == 64
            && hex.bytes().all(|byte| byte.is_ascii_hexdigit())
            && ["sig", "att", "sbom"].contains(&end)
    })
}

/// Returns the signed document of an image ("simple signing", containers/image `atomic-signature.md`): its name at the time of
/// signing, and its digest.
pub fn simple_signing(repository: &str, image: &Digest) -> Vec<u8> {
    let document = json!({
        "critical": {
            "identity": {"docker-reference": repository},
            "image": {"docker-manifest-digest": image.as_str()},
            "type": PAYLOAD_TYPE,
        },
        "optional": null,
    });
    document.to_string().into_bytes()
}

/// Returns the digest of the image in a signed document, which is untrusted input.
pub fn signed_digest(payload: &[u8]) -> Option<Digest> {
    let payload: Value = serde_json::from_slice(payload).ok()?;
    let text = |path: &str| payload.pointer(path).and_then(Value::as_str);
    let digest = text("/critical/image/docker-manifest-digest")?;
    if text("/critical/type")? == PAYLOAD_TYPE { digest.parse().ok() } else { None }
}

/// Returns the layer for a signed document.
pub fn signature_layer(payload: &[u8], signature: &[u8]) -> Descriptor {
    let mut layer = Descriptor::of(SIMPLE_SIGNING, payload);
    layer.annotations.insert(SIGNATURE.to_owned(), STANDARD.encode(signature));
    layer
}

/// A manifest of signatures or attestations, with its configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CosignManifest {
    /// The configuration's bytes.
    pub config: Vec<u8>,
    /// The manifest's bytes; its media type is [`media_type::OCI_MANIFEST`].
    pub manifest: Vec<u8>,
}

/// Adds layers to the manifest of a tag. Existing layers of other signers are kept. Fails if the manifest would have more layers than
/// readers accept.
pub fn add_layers(before: Option<&ImageManifest>, new: &[Descriptor]) -> Result<CosignManifest, ImageError> {
    let mut layers = before.map(|manifest| manifest.layers.clone()).unwrap_or_default();
    for layer in new {
        if !layers.contains(layer) {
            layers.push(layer.clone());
        }
    }
    let digests: Vec<&str> = layers.iter().map(|layer| layer.digest.as_str()).collect();
    let config = json!({
        "architecture": "",
        "os": "",
        "config": {},
        "created": "0001-01-01T00:00:00Z",
        "rootfs": {"type": "layers", "diff_ids": digests},
    });
    let config = config.to_string().into_bytes();
    let manifest = ImageManifest {
        annotations: before.map(|manifest| manifest.annotations.clone()).unwrap_or_default(),
        ..ImageManifest::new(Descriptor::of(media_type::OCI_CONFIG, &config), layers)
    };
    let manifest = manifest.to_bytes()?;
    ImageManifest::parse(&manifest)?;
    Ok(CosignManifest { config, manifest })
}

/// Returns the layer for a signed statement.
pub fn attestation_layer(envelope: &[u8], predicate_type: &str) -> Descriptor {
    let mut layer = Descriptor::of(DSSE, envelope);
    layer.annotations.insert(SIGNATURE.to_owned(), String::new());
    layer.annotations.insert(PREDICATE_TYPE.to_owned(), predicate_type.to_owned());
    layer
}

/// Returns the predicate type in the annotation of an attestation's layer.
pub fn layer_predicate_type(layer: &Descriptor) -> Option<&str> {
    layer.annotations.get(PREDICATE_TYPE).map(String::as_str)
}

/// Returns the signature in the annotation of a [`SIMPLE_SIGNING`] layer.
pub fn layer_signature(layer: &Descriptor) -> Option<Vec<u8>> {
    if layer.media_type != SIMPLE_SIGNING {
        return None;
    }
    STANDARD.decode(layer.annotations.get(SIGNATURE)?).ok().filter(|bytes| !bytes.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_payload_names_its_image() {
        let image = Digest::of(b"image");
        let payload = simple_signing("registry.test/drivers/x", &image);
        let text = String::from_utf8(payload.clone()).unwrap();
        insta::assert_snapshot!(text.replace(image.as_str(), "DIGEST"), @r#"{"critical":{"identity":{"docker-reference":"registry.test/drivers/x"},"image":{"docker-manifest-digest":"DIGEST"},"type":"cosign container image signature"},"optional":null}"#);
        assert_eq!(signed_digest(&payload), Some(image));
        assert_eq!(signed_digest(text.replace("cosign", "other").as_bytes()), None);
        assert_eq!(signed_digest(b"{}"), None);
    }

    #[test]
    fn signatures_are_added_and_none_is_lost_or_doubled() {
        let (one, two) = (signature_layer(b"a", b"1"), signature_layer(b"a", b"2"));
        let first = add_layers(None, std::slice::from_ref(&one)).unwrap();
        let read = ImageManifest::parse(&first.manifest).unwrap();
        assert_eq!(layer_signature(&read.layers[0]).unwrap(), b"1");
        let both = add_layers(Some(&read), std::slice::from_ref(&two)).unwrap();
        let both_read = ImageManifest::parse(&both.manifest).unwrap();
        assert_eq!(both_read.layers, [one.clone(), two]);
        assert_eq!(add_layers(Some(&both_read), &[one]).unwrap(), both);
        assert_eq!(read.config.digest, Digest::of(&first.config));
        let many: Vec<Descriptor> =
            (0..500_u32).map(|number| signature_layer(b"b", &number.to_be_bytes())).collect();
        assert!(add_layers(None, &many).is_ok());
        assert!(add_layers(Some(&read), &many).is_err(), "no reader accepts 501 layers");
    }

    #[test]
    fn tags() {
        let image = Digest::of(b"image");
        for tag in [signature_tag(&image).unwrap(), attestation_tag(&image).unwrap()] {
            assert!(is_cosign_tag(&tag), "{tag}");
        }
        for tag in ["1.0", "sha256-1.sig", &format!("sha256-{}", image.hex())] {
            assert!(!is_cosign_tag(&tag.parse().unwrap()), "{tag}");
        }
    }
}
