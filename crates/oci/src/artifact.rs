//! Pure: what is stored beside an image and refers to it (image spec 1.1, `manifest.md`, `subject`): its check
//! report, and documents of other kinds.

use super::{AnyManifest, Descriptor, Digest, ImageError, ImageManifest, Tag, annotations, media_type};

/// The configuration of an artifact without one.
pub const EMPTY: &[u8] = b"{}";

/// A manifest with the blobs that it names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Artifact {
    /// The one layer.
    pub content: Vec<u8>,
    /// The configuration, which says nothing.
    pub config: &'static [u8],
    /// The manifest's bytes; its media type is [`media_type::OCI_MANIFEST`].
    pub manifest: Vec<u8>,
    /// The manifest's digest.
    pub digest: Digest,
}

impl Artifact {
    /// A document of some kind about the image whose manifest is `subject`.
    pub fn about(
        subject: &[u8],
        kind: &'static str,
        content: Vec<u8>,
        notes: &[(&str, &str)],
    ) -> Result<Self, ImageError> {
        let created = (annotations::CREATED, super::CREATED);
        let media_type = match AnyManifest::parse(subject) {
            Ok(AnyManifest::Index(_)) => media_type::OCI_INDEX,
            Ok(AnyManifest::Image(_)) | Err(_) => media_type::OCI_MANIFEST,
        };
        let manifest = ImageManifest {
            artifact_type: Some(kind.to_owned()),
            subject: Some(Descriptor::of(media_type, subject)),
            annotations: notes
                .iter()
                .chain([&created])
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
                .collect(),
            ..ImageManifest::new(
                Descriptor::of(media_type::OCI_EMPTY, EMPTY),
                vec![Descriptor::of(kind, &content)],
            )
        }
        .to_bytes()?;
        Ok(Self { content, config: EMPTY, digest: Digest::of(&manifest), manifest })
    }
}

impl ImageManifest {
    /// The descriptor under which a manifest that refers to another is listed (distribution spec, "Listing
    /// Referrers"): with its kind and its notes.
    pub fn as_referrer(&self, bytes: &[u8]) -> Descriptor {
        let artifact_type = self.artifact_type.clone().unwrap_or_else(|| self.config.media_type.clone());
        Descriptor {
            artifact_type: Some(artifact_type),
            annotations: self.annotations.clone(),
            ..Descriptor::of(media_type::OCI_MANIFEST, bytes)
        }
    }
}

/// The tag that lists what refers to a manifest, where a registry does not do so itself (distribution spec,
/// "Referrers Tag Schema").
pub fn referrers_tag(subject: &Digest) -> Option<Tag> {
    format!("sha256-{}", subject.hex()).parse().ok()
}

/// The manifest that what stands under a tag is about, where the tag says so: a list of referrers, or with a suffix a
/// signature or attestation of cosign's (`sha256-<hex>.sig`).
pub fn subject_of_tag(tag: &Tag) -> Option<Digest> {
    let text = tag.as_str().strip_prefix("sha256-")?;
    let hex = text.split_once('.').map_or(text, |(hex, _)| hex);
    format!("sha256:{hex}").parse().ok()
}

/// Is this such a tag?
pub fn is_referrers_tag(tag: &Tag) -> bool {
    tag.as_str()
        .strip_prefix("sha256-")
        .is_some_and(|hex| hex.len() == 64 && hex.bytes().all(|byte| byte.is_ascii_hexdigit()))
}
