//! Referrers of an image (image spec 1.1, `manifest.md`, `subject`): its check report and other documents.

use super::{AnyManifest, Descriptor, Digest, ImageError, ImageManifest, Tag, annotations, media_type};

/// Configuration of artifacts, which need none.
pub const EMPTY: &[u8] = b"{}";

/// An artifact's manifest with the content that the manifest names. The configuration is [`EMPTY`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Artifact {
    /// Content of the only layer.
    pub content: Vec<u8>,
    /// The manifest's bytes; its media type is [`media_type::OCI_MANIFEST`].
    pub manifest: Vec<u8>,
    /// The manifest's digest.
    pub digest: Digest,
}

impl Artifact {
    /// Creates an artifact of type `kind` whose subject is the image with the manifest bytes `subject`.
    pub fn about(
        subject: &[u8],
        kind: &'static str,
        content: Vec<u8>,
        annotations: &[(&str, &str)],
    ) -> Result<Self, ImageError> {
        let media_type = match AnyManifest::parse(subject) {
            Ok(AnyManifest::Index(_)) => media_type::OCI_INDEX,
            Ok(AnyManifest::Image(_)) | Err(_) => media_type::OCI_MANIFEST,
        };
        let annotations = annotations.iter().map(|(key, value)| (*key, (*value).to_owned()));
        let manifest = ImageManifest {
            subject: Some(Descriptor::of(media_type, subject)),
            ..ImageManifest::artifact(kind, vec![Descriptor::of(kind, &content)], annotations)
        }
        .to_bytes()?;
        Ok(Self { content, digest: Digest::of(&manifest), manifest })
    }
}

impl ImageManifest {
    /// Creates the manifest of an artifact of type `kind`. The same layers and annotations always give the same manifest.
    pub fn artifact<'a>(
        kind: &str,
        layers: Vec<Descriptor>,
        annotations: impl IntoIterator<Item = (&'a str, String)>,
    ) -> Self {
        let annotations = annotations.into_iter().chain([(annotations::CREATED, super::CREATED.to_owned())]);
        Self {
            artifact_type: Some(kind.to_owned()),
            annotations: annotations.map(|(key, value)| (key.to_owned(), value)).collect(),
            ..Self::new(Descriptor::of(media_type::OCI_EMPTY, EMPTY), layers)
        }
    }

    /// Returns the descriptor in a list of referrers (distribution spec, "Listing Referrers"), with the manifest's artifact type and
    /// annotations.
    pub fn as_referrer(&self, bytes: &[u8]) -> Descriptor {
        let artifact_type = self.artifact_type.clone().unwrap_or_else(|| self.config.media_type.clone());
        Descriptor {
            artifact_type: Some(artifact_type),
            annotations: self.annotations.clone(),
            ..Descriptor::of(media_type::OCI_MANIFEST, bytes)
        }
    }
}

/// Returns the fallback tag of a manifest's list of referrers, for a registry without referrers API (distribution spec, "Referrers
/// Tag Schema").
pub fn referrers_tag(subject: &Digest) -> Option<Tag> {
    format!("sha256-{}", subject.hex()).parse().ok()
}

/// Number of hexadecimal digits of a manifest's digest in its [`keep_tag`]. A tag has at most 128 characters.
const KEEP_DIGITS: usize = 32;

/// Returns a tag that protects a manifest without another tag from a garbage collection of untagged manifests. `subject` is the
/// manifest to which a referrer refers. An image of an index is its own subject.
pub fn keep_tag(subject: &Digest, manifest: &Digest) -> Option<Tag> {
    format!("sha256-{}-{}", subject.hex(), manifest.hex().get(..KEEP_DIGITS)?).parse().ok()
}

/// Returns the digest of the subject that a tag names. Returns `None` for other tags. Three kinds of tags name a subject:
///
/// - the tag of a fallback list of referrers (`sha256-<hex>`),
/// - the tag of a signature or attestation of cosign, which has a suffix (`sha256-<hex>.sig`),
/// - a [`keep_tag`].
pub fn subject_of_tag(tag: &Tag) -> Option<Digest> {
    let text = tag.as_str().strip_prefix("sha256-")?;
    let hex = text.split_once(['.', '-']).map_or(text, |(hex, _)| hex);
    format!("sha256:{hex}").parse().ok()
}

/// Whether `tag` is a fallback tag as [`referrers_tag`] returns it, or a [`keep_tag`].
pub fn is_referrers_tag(tag: &Tag) -> bool {
    let is_hex = |hex: &str, length| hex.len() == length && hex.bytes().all(|byte| byte.is_ascii_hexdigit());
    tag.as_str().strip_prefix("sha256-").is_some_and(|text| match text.split_once('-') {
        Some((subject, manifest)) => is_hex(subject, 64) && is_hex(manifest, KEEP_DIGITS),
        None => is_hex(text, 64),
    })
}
