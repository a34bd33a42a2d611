//! Manifests and indexes, parsed from untrusted bytes and written deterministically.
//!
//! farrier has its own types with sorted maps, because the same inputs must give the same digest. oci-spec's types keep annotations
//! and labels in a `HashMap`, whose order changes from run to run.

use std::{collections::BTreeMap, fmt};

use serde::{
    Deserialize, Serialize,
    de::{IgnoredAny, SeqAccess, Visitor},
};

use super::{Digest, media_type};

/// Maximum size of a manifest in bytes. The distribution spec requires registries to accept this size.
pub const MAX_MANIFEST: usize = 4 << 20;
/// Maximum number of layers, as in overlayfs.
const MAX_LAYERS: usize = 500;

/// Reason why content is not a usable image.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// Larger than [`MAX_MANIFEST`]: description and size in bytes.
    #[error("{0} has {1} bytes; the limit is {MAX_MANIFEST} bytes")]
    TooLarge(&'static str, usize),
    /// JSON that cannot be parsed or written: description and cause.
    #[error("{0} is not valid")]
    Json(&'static str, #[source] serde_json::Error),
    /// Inconsistent or unsupported content: description and reason.
    #[error("{0}: {1}")]
    Unusable(&'static str, String),
}

impl ImageError {
    /// Creates [`Self::Unusable`].
    pub fn unusable(what: &'static str, reason: impl Into<String>) -> Self {
        Self::Unusable(what, reason.into())
    }
}

/// Reference to a blob or a manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    /// Media type of the content.
    pub media_type: String,
    /// Digest of the content.
    pub digest: Digest,
    /// Size of the content in bytes.
    pub size: u64,
    /// Type of the artifact, for an artifact's manifest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub artifact_type: Option<String>,
    /// Platform of the image, for a manifest in an index.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform: Option<Platform>,
    /// Annotations.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "null_is_empty")]
    pub annotations: BTreeMap<String, String>,
}

/// Platform of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Platform {
    /// Architecture in Go's spelling.
    pub architecture: String,
    /// Operating system, such as `linux`.
    pub os: String,
    /// Variant of the architecture, such as `v8`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub variant: Option<String>,
}

impl Platform {
    /// Linux on an architecture in Go's spelling.
    pub fn linux(architecture: &str) -> Self {
        Self { architecture: architecture.to_owned(), os: "linux".to_owned(), variant: None }
    }
}

/// An image manifest in OCI or Docker format.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImageManifest {
    /// Always 2.
    pub schema_version: u32,
    /// Media type of the manifest; optional in OCI.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub media_type: Option<String>,
    /// Type of the artifact. `None` for an image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub artifact_type: Option<String>,
    /// The configuration.
    pub config: Descriptor,
    /// The layers, lowest first.
    pub layers: Vec<Descriptor>,
    /// The manifest to which a referrer refers. `None` for other manifests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subject: Option<Descriptor>,
    /// Annotations.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "null_is_empty")]
    pub annotations: BTreeMap<String, String>,
}

/// An image index or a Docker manifest list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImageIndex {
    /// Always 2.
    pub schema_version: u32,
    /// Media type of the index; optional in OCI.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub media_type: Option<String>,
    /// The manifests.
    pub manifests: Vec<Descriptor>,
    /// Annotations.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "null_is_empty")]
    pub annotations: BTreeMap<String, String>,
}

/// An image manifest or an index. They are distinguished by their fields, because the media type is optional in both.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnyManifest {
    /// One image.
    Image(Box<ImageManifest>),
    /// Images for several platforms.
    Index(ImageIndex),
}

impl AnyManifest {
    /// Configuration and layers of an image; an index has none.
    pub fn blobs(&self) -> impl Iterator<Item = &Descriptor> {
        let image = match self {
            Self::Image(image) => Some(image),
            Self::Index(_) => None,
        };
        image.into_iter().flat_map(|image| image.blobs())
    }

    /// Manifests that an index lists.
    pub fn children(&self) -> &[Descriptor] {
        match self {
            Self::Image(_) => &[],
            Self::Index(index) => &index.manifests,
        }
    }

    /// Parses untrusted bytes.
    pub fn parse(bytes: &[u8]) -> Result<Self, ImageError> {
        match kind_of("manifest", bytes)? {
            Kind::Image => ImageManifest::from_checked(bytes).map(Box::new).map(Self::Image),
            Kind::Index => ImageIndex::from_checked(bytes).map(Self::Index),
        }
    }

    /// Parses untrusted bytes. For an index, returns its first image for Linux on an architecture (Go's spelling). For an image
    /// manifest, returns `None`. Attestations never match, because their platform is `unknown/unknown`.
    pub fn image_for_arch(bytes: &[u8], arch: &str) -> Result<Option<Descriptor>, ImageError> {
        let Self::Index(index) = Self::parse(bytes)? else { return Ok(None) };
        let is_match =
            |d: &Descriptor| d.platform.as_ref().is_some_and(|p| p.os == "linux" && p.architecture == arch);
        match index.manifests.into_iter().find(is_match) {
            None => Err(ImageError::unusable("image index", format!("contains no image for linux/{arch}"))),
            found => Ok(found),
        }
    }
}

/// What a manifest describes.
enum Kind {
    Image,
    Index,
}

/// Returns the kind of a manifest by its fields. Rejects content that has the fields of both kinds, or whose media type contradicts its
/// fields. Different programs could read such content differently under the same digest (CVE-2021-41190).
fn kind_of(what: &'static str, bytes: &[u8]) -> Result<Kind, ImageError> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Fields {
        media_type: Option<String>,
        config: Option<IgnoredAny>,
        layers: Option<IgnoredAny>,
        manifests: Option<IgnoredAny>,
    }
    let Fields { media_type, config, layers, manifests } = from_json(what, bytes)?;
    let is_index = manifests.is_some();
    if is_index && (config.is_some() || layers.is_some()) {
        return Err(ImageError::unusable(what, "has the fields of an image and of an index"));
    }
    let contradicting = if is_index { media_type::IMAGES } else { media_type::INDEXES };
    if let Some(declared) = media_type.as_deref().filter(|declared| contradicting.contains(declared)) {
        let kind = if is_index { "an index" } else { "an image" };
        let reason = format!("has media type {declared}, but the fields of {kind}");
        return Err(ImageError::unusable(what, reason));
    }
    Ok(if is_index { Kind::Index } else { Kind::Image })
}

impl Descriptor {
    /// Descriptor without optional fields.
    pub fn new(media_type: &str, digest: Digest, size: u64) -> Self {
        Self {
            media_type: media_type.to_owned(),
            digest,
            size,
            artifact_type: None,
            platform: None,
            annotations: BTreeMap::new(),
        }
    }

    /// Descriptor of these bytes.
    pub fn of(media_type: &str, bytes: &[u8]) -> Self {
        Self::new(media_type, Digest::of(bytes), bytes.len() as u64)
    }
}

impl ImageManifest {
    /// Configuration and layers.
    pub fn blobs(&self) -> impl Iterator<Item = &Descriptor> {
        std::iter::once(&self.config).chain(&self.layers)
    }

    /// OCI manifest without optional fields.
    pub fn new(config: Descriptor, layers: Vec<Descriptor>) -> Self {
        let media_type = Some(media_type::OCI_MANIFEST.to_owned());
        let annotations = BTreeMap::new();
        Self {
            schema_version: 2,
            media_type,
            artifact_type: None,
            config,
            layers,
            subject: None,
            annotations,
        }
    }

    /// Returns the payload layer of an image that farrier built for one kernel, which is the last layer. Returns `None` only for an
    /// image without layers.
    ///
    /// The layers below belong to the base and to `driver-entrypoint`, if present. [`super::assemble`] writes this order, and readers
    /// of published payloads rely on it.
    ///
    /// In other images, the last layer is not the whole payload. An image that an engine built (`output: image`) has no payload
    /// layer, and a union image has several.
    pub fn payload_layer(&self) -> Option<&Descriptor> {
        self.layers.last()
    }

    /// Parses untrusted bytes.
    pub fn parse(bytes: &[u8]) -> Result<Self, ImageError> {
        kind_of("image manifest", bytes)?;
        Self::from_checked(bytes)
    }

    /// Parses untrusted bytes after [`kind_of`].
    fn from_checked(bytes: &[u8]) -> Result<Self, ImageError> {
        let manifest: Self = from_json("image manifest", bytes)?;
        check_version("image manifest", manifest.schema_version)?;
        if manifest.layers.len() > MAX_LAYERS {
            let reason = format!("has {} layers; the limit is {MAX_LAYERS}", manifest.layers.len());
            return Err(ImageError::unusable("image manifest", reason));
        }
        Ok(manifest)
    }

    /// Serializes the manifest. Equal manifests give equal bytes.
    pub fn to_bytes(&self) -> Result<Vec<u8>, ImageError> {
        to_json("image manifest", self)
    }
}

impl ImageIndex {
    /// Index without manifests.
    pub fn empty() -> Self {
        Self {
            schema_version: 2,
            media_type: Some(media_type::OCI_INDEX.to_owned()),
            manifests: Vec::new(),
            annotations: BTreeMap::new(),
        }
    }

    /// Parses untrusted bytes.
    pub fn parse(bytes: &[u8]) -> Result<Self, ImageError> {
        kind_of("image index", bytes)?;
        Self::from_checked(bytes)
    }

    /// Parses untrusted bytes after [`kind_of`].
    fn from_checked(bytes: &[u8]) -> Result<Self, ImageError> {
        let index: Self = from_json("image index", bytes)?;
        check_version("image index", index.schema_version)?;
        Ok(index)
    }

    /// Parses an untrusted list of referrers. Omits entries that cannot be parsed, such as those with a digest of another algorithm,
    /// because other clients add entries, too.
    pub fn parse_referrers(bytes: &[u8]) -> Result<Self, ImageError> {
        const WHAT: &str = "list of referrers";
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct List {
            schema_version: u32,
            media_type: Option<String>,
            #[serde(deserialize_with = "valid_entries")]
            manifests: Vec<Descriptor>,
            #[serde(default, deserialize_with = "null_is_empty")]
            annotations: BTreeMap<String, String>,
        }
        kind_of(WHAT, bytes)?;
        let List { schema_version, media_type, manifests, annotations } = from_json(WHAT, bytes)?;
        check_version(WHAT, schema_version)?;
        Ok(Self { schema_version, media_type, manifests, annotations })
    }

    /// Serializes the index. Equal indexes give equal bytes.
    pub fn to_bytes(&self) -> Result<Vec<u8>, ImageError> {
        to_json("image index", self)
    }

    /// Whether `bytes`, from which this index was parsed, equal the output of [`Self::to_bytes`].
    ///
    /// Otherwise another parser may find other images under the same digest. For example, Go ignores the case of keys and uses the
    /// last one, so that `Manifests` overrides an earlier `manifests`.
    pub fn is_canonical(&self, bytes: &[u8]) -> bool {
        self.to_bytes().is_ok_and(|written| written == bytes)
    }
}

fn check_version(what: &'static str, version: u32) -> Result<(), ImageError> {
    if version == 2 {
        return Ok(());
    }
    Err(ImageError::unusable(what, format!("unsupported schema version {version}; expected 2")))
}

/// Deserializes JSON of at most [`MAX_MANIFEST`] bytes.
pub(super) fn from_json<'a, T: Deserialize<'a>>(
    what: &'static str,
    bytes: &'a [u8],
) -> Result<T, ImageError> {
    if bytes.len() > MAX_MANIFEST {
        return Err(ImageError::TooLarge(what, bytes.len()));
    }
    serde_json::from_slice(bytes).map_err(|source| ImageError::Json(what, source))
}

/// Serializes a value as JSON, in the form in which farrier publishes it.
pub fn to_json(what: &'static str, value: &impl Serialize) -> Result<Vec<u8>, ImageError> {
    serde_json::to_vec(value).map_err(|source| ImageError::Json(what, source))
}

/// Deserializes `null`, which Go writes for an empty map, as an empty map.
fn null_is_empty<'de, D: serde::Deserializer<'de>>(from: D) -> Result<BTreeMap<String, String>, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

/// Reads the entries of a list that can be parsed. Invalid ones are dropped at once: in a list of entries, each takes the memory of a
/// descriptor.
fn valid_entries<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Vec<Descriptor>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Entry {
        Valid(Descriptor),
        Invalid(IgnoredAny),
    }
    struct Entries;
    impl<'de> Visitor<'de> for Entries {
        type Value = Vec<Descriptor>;

        fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
            formatter.write_str("a list of descriptors")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut entries: A) -> Result<Self::Value, A::Error> {
            let mut valid = Vec::new();
            while let Some(entry) = entries.next_element::<Entry>()? {
                valid.extend(match entry {
                    Entry::Valid(descriptor) => Some(descriptor),
                    Entry::Invalid(IgnoredAny) => None,
                });
            }
            Ok(valid)
        }
    }
    from.deserialize_seq(Entries)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn descriptor(platform: Option<(&str, &str)>) -> Descriptor {
        Descriptor {
            media_type: media_type::OCI_MANIFEST.to_owned(),
            digest: Digest::of(format!("{platform:?}").as_bytes()),
            size: 7,
            artifact_type: None,
            platform: platform.map(|(os, architecture)| Platform {
                architecture: architecture.to_owned(),
                os: os.to_owned(),
                variant: None,
            }),
            annotations: BTreeMap::new(),
        }
    }

    #[test]
    fn index_gives_the_image_of_the_architecture() {
        let mut index = ImageIndex::empty();
        index.manifests = vec![
            descriptor(Some(("unknown", "unknown"))),
            descriptor(None),
            descriptor(Some(("windows", "amd64"))),
            descriptor(Some(("linux", "arm64"))),
            descriptor(Some(("linux", "amd64"))),
        ];
        let found = |index: &ImageIndex| AnyManifest::image_for_arch(&index.to_bytes().unwrap(), "amd64");
        assert_eq!(found(&index).unwrap().as_ref(), Some(&index.manifests[4]));
        index.manifests.truncate(4);
        insta::assert_snapshot!(found(&index).unwrap_err(), @"image index: contains no image for linux/amd64");
        let bytes = index.to_bytes().unwrap();
        assert_eq!(AnyManifest::parse(&bytes).unwrap(), AnyManifest::Index(index));
    }

    #[test]
    fn what_is_an_image_and_an_index_is_refused() {
        let digest = Digest::of(b"x");
        let blob = format!(r#"{{"mediaType":"x","digest":"{digest}","size":1}}"#);
        let (image, index) =
            (format!(r#""config":{blob},"layers":[{blob}]"#), format!(r#""manifests":[{blob}]"#));
        let made = |fields: &str| format!(r#"{{"schemaVersion":2,{fields}}}"#).into_bytes();
        let typed = |kind: &str, fields: &str| made(&format!(r#""mediaType":"{kind}",{fields}"#));
        for both in [
            made(&format!("{image},{index}")),
            made(&format!(r#"{image},"manifests":[]"#)),
            made(&format!(r#"{index},"layers":[]"#)),
            typed(media_type::OCI_MANIFEST, &format!("{image},{index}")),
            typed(media_type::OCI_INDEX, &image),
            typed(media_type::OCI_MANIFEST, &index),
        ] {
            let text = String::from_utf8_lossy(&both);
            assert!(matches!(AnyManifest::parse(&both), Err(ImageError::Unusable(..))), "{text}");
            assert!(ImageManifest::parse(&both).is_err() && ImageIndex::parse(&both).is_err(), "{text}");
        }
        assert!(ImageManifest::parse(&typed(media_type::OCI_MANIFEST, &image)).is_ok());
        // Go writes an empty list as `null`.
        assert!(ImageManifest::parse(&made(&format!(r#"{image},"manifests":null"#))).is_ok());
        assert!(ImageIndex::parse(&made(&format!(r#"{index},"layers":null"#))).is_ok());
    }

    #[test]
    fn an_unreadable_entry_hides_no_other_referrer() {
        let mut index = ImageIndex::empty();
        index.manifests = vec![descriptor(None)];
        let mut list = serde_json::to_value(&index).unwrap();
        for digest in ["sha512:00", "none"] {
            let entry =
                serde_json::json!({"mediaType": media_type::OCI_MANIFEST, "digest": digest, "size": 1});
            list["manifests"].as_array_mut().unwrap().insert(0, entry);
        }
        assert_eq!(ImageIndex::parse_referrers(list.to_string().as_bytes()).unwrap(), index);
        let image = r#"{"schemaVersion":2,"config":{},"layers":[]}"#;
        assert!(ImageIndex::parse_referrers(image.as_bytes()).is_err());
    }

    #[test]
    fn hostile_manifests() {
        assert!(matches!(AnyManifest::parse(b"<html>"), Err(ImageError::Json(..))));
        assert!(matches!(AnyManifest::parse(&vec![b' '; MAX_MANIFEST + 1]), Err(ImageError::TooLarge(..))));
        let deep = "[".repeat(100_000);
        assert!(AnyManifest::parse(deep.as_bytes()).is_err());
        let bad_digest = r#"{"schemaVersion":2,"config":{"mediaType":"x","digest":"sha256:../../etc","size":1},"layers":[]}"#;
        assert!(ImageManifest::parse(bad_digest.as_bytes()).is_err());
    }

    proptest! {
        #[test]
        fn never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = AnyManifest::parse(&bytes);
        }
    }
}
