//! Assembles a union image. Manifests and configurations of several images go in, one manifest and configuration come out.

use serde_json::{Value, json};

use oci::{Assembled, Assembly, Base, CREATED, ImageError, ImageManifest, PAYLOAD_HISTORY, assemble};

use super::{
    ImageFacts,
    annotations::{self, BASE_DIGEST, TITLE, VERSION},
};
use crate::{
    image::{Digest, InputHash},
    kernel::{Architecture, KernelRelease},
    kmod::Verdict,
};

/// Name of the image in errors.
const WHAT: &str = "union image";
/// Number of layers that overlayfs stacks in every container runtime, minus one for the container's own layer.
const MAX_LAYERS: usize = 127;

/// An image for one kernel, as stored in the registry (untrusted bytes).
#[derive(Clone, Debug)]
pub struct UnionPart {
    /// The kernel.
    pub kernel: KernelRelease,
    /// The image's digest.
    pub digest: Digest,
    /// The manifest's bytes.
    pub manifest: Vec<u8>,
    /// The configuration's bytes.
    pub config: Vec<u8>,
}

/// Metadata of a union image.
#[derive(Clone, Debug)]
pub struct UnionMetadata<'a> {
    /// The driver image's name.
    pub title: &'a str,
    /// The driver's version.
    pub version: &'a str,
    /// Hash over the members.
    pub input_hash: InputHash,
    /// The architecture that the image runs on.
    pub architecture: Architecture,
}

/// Stacks the payload layers of the parts, in their order, on their common base. Entrypoint, environment and labels come from
/// the last part, as its definition set them.
///
/// Each kernel's modules are in a separate directory. Of any other file that several parts contain, the last part's copy is
/// visible. Layers are not read: their descriptors suffice.
pub fn assemble_union(parts: &[UnionPart], metadata: &UnionMetadata<'_>) -> Result<Assembled, ImageError> {
    let Some((last, _)) = parts.split_last() else {
        return Err(ImageError::unusable(WHAT, "it has no members"));
    };
    let mut union = SplitImage::of(last, metadata.architecture)?.into_base();
    let base_layers = union.layers.len();
    let mut verdict = Verdict::Loads;
    for part in parts {
        let split = SplitImage::of(part, metadata.architecture)?;
        if split.image.layers[..split.base_layers] != union.layers[..base_layers] {
            let reason = format!("the images for {} and {} have different bases", part.kernel, last.kernel);
            return Err(ImageError::unusable(WHAT, reason));
        }
        verdict = verdict.max(split.verdict);
        union.layers.extend_from_slice(&split.image.layers[split.base_layers..]);
        union.diff_ids.extend_from_slice(&split.image.diff_ids[split.base_layers..]);
    }
    if union.layers.len() > MAX_LAYERS {
        let reason = format!("{} layers, at most {MAX_LAYERS} can be stacked", union.layers.len());
        return Err(ImageError::unusable(WHAT, reason));
    }
    let payload_layers = union.layers.len() - base_layers;
    if let Some(Value::Array(history)) = union.config.get_mut("history") {
        history.extend(vec![json!({"created": CREATED, "created_by": PAYLOAD_HISTORY}); payload_layers]);
    }
    let facts = ImageFacts {
        input_hash: Some(metadata.input_hash),
        driver_version: Some(metadata.version.to_owned()),
        verdict: Some(verdict),
        check_summary: Some(format!("{} kernels: {verdict}", parts.len())),
        members: parts.iter().map(|part| (part.kernel.clone(), part.digest.clone())).collect(),
        ..ImageFacts::default()
    };
    let mut annotations = facts.to_annotations();
    let texts = [(TITLE, metadata.title), (VERSION, metadata.version), (annotations::CREATED, CREATED)];
    annotations.extend(texts.map(|(key, value)| (key.to_owned(), value.to_owned())));
    assemble(&Assembly {
        base: Some(&union),
        entrypoint_layer: None,
        layers: &[],
        entrypoint: &[],
        env: &std::collections::BTreeMap::new(),
        labels: &std::collections::BTreeMap::new(),
        annotations: &annotations,
        architecture: metadata.architecture.as_str(),
    })
}

/// The image of a part, split into the layers of its base and its payload layers.
struct SplitImage {
    image: Base,
    /// Number of layers that belong to the base.
    base_layers: usize,
    /// Digest of the base's manifest, if known.
    base_digest: Option<Digest>,
    verdict: Verdict,
}

impl SplitImage {
    /// Validates and splits an image. Its history has an entry for each payload layer, because farrier records these layers.
    fn of(part: &UnionPart, arch: Architecture) -> Result<Self, ImageError> {
        let unusable = |why: &str| ImageError::unusable(WHAT, format!("the image for {} {why}", part.kernel));
        if Digest::of(&part.manifest) != part.digest {
            return Err(unusable("does not match its digest"));
        }
        let image = Base::parse(&part.manifest, &part.config, arch.as_str())?;
        let annotations = ImageManifest::parse(&part.manifest)?.annotations;
        let facts = ImageFacts::from_annotations(&annotations)
            .map_err(|_| unusable("has annotations that farrier did not write"))?;
        if facts.kernel_release.as_ref() != Some(&part.kernel) {
            return Err(unusable("is declared for another kernel"));
        }
        let Some(verdict @ (Verdict::Loads | Verdict::Unknown)) = facts.verdict else {
            return Err(unusable("has no passing check report"));
        };
        let history = image.config.get("history").and_then(Value::as_array).into_iter().flatten();
        let payload_layers = history.filter(|entry| entry["created_by"] == PAYLOAD_HISTORY).count();
        if payload_layers == 0 || payload_layers > image.layers.len() {
            return Err(unusable("has no separate payload layer (an engine built the whole image)"));
        }
        let base_digest = annotations.get(BASE_DIGEST).and_then(|text| text.parse().ok());
        Ok(Self { base_layers: image.layers.len() - payload_layers, image, base_digest, verdict })
    }

    /// Returns the base alone, with this image's configuration.
    fn into_base(self) -> Base {
        let Base { digest, mut layers, mut config, mut diff_ids } = self.image;
        layers.truncate(self.base_layers);
        diff_ids.truncate(self.base_layers);
        if let Some(Value::Array(history)) = config.get_mut("history") {
            history.retain(|entry| entry["created_by"] != PAYLOAD_HISTORY);
        }
        Base { digest: self.base_digest.unwrap_or(digest), layers, config, diff_ids }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::oci::{Layer, media_type};

    fn part(base: Option<&Base>, kernel: &str, change: impl FnOnce(&mut ImageFacts)) -> UnionPart {
        let layer = Layer {
            digest: Digest::of(kernel.as_bytes()),
            diff_id: Digest::of(format!("{kernel}.tar").as_bytes()),
            size: 10,
            media_type: media_type::OCI_LAYER_GZIP,
        };
        let mut facts = ImageFacts {
            kernel_release: Some(kernel.parse().unwrap()),
            verdict: Some(Verdict::Loads),
            ..ImageFacts::default()
        };
        change(&mut facts);
        let none = BTreeMap::new();
        let made = assemble(&Assembly {
            base,
            entrypoint_layer: None,
            layers: &[layer],
            entrypoint: &["driver-entrypoint".to_owned()],
            env: &none,
            labels: &none,
            annotations: &facts.to_annotations(),
            architecture: "amd64",
        })
        .unwrap();
        UnionPart {
            kernel: kernel.parse().unwrap(),
            digest: made.digest,
            manifest: made.manifest,
            config: made.config,
        }
    }

    /// Each part's image has the `driver-entrypoint` layer; the union image has it once.
    #[test]
    fn driver_entrypoint_is_there_once() {
        let below = base("1.0");
        let whole = |kernel: &str| {
            let mut made = part(Some(&below), kernel, |_| ());
            let facts = ImageFacts {
                kernel_release: Some(kernel.parse().unwrap()),
                verdict: Some(Verdict::Loads),
                ..ImageFacts::default()
            };
            let layer = |name: &str| Layer {
                digest: Digest::of(name.as_bytes()),
                diff_id: Digest::of(format!("{name}.tar").as_bytes()),
                size: 10,
                media_type: media_type::OCI_LAYER_GZIP,
            };
            let none = BTreeMap::new();
            let assembled = assemble(&Assembly {
                base: Some(&below),
                entrypoint_layer: Some(&layer("entrypoint")),
                layers: &[layer(kernel)],
                entrypoint: &["driver-entrypoint".to_owned()],
                env: &none,
                labels: &none,
                annotations: &facts.to_annotations(),
                architecture: "amd64",
            })
            .unwrap();
            (made.digest, made.manifest, made.config) =
                (assembled.digest, assembled.manifest, assembled.config);
            made
        };
        let made = union(&[whole("6.1.0-1"), whole("6.1.0-2")]).unwrap();
        let layers = ImageManifest::parse(&made.manifest).unwrap().layers;
        let digests: Vec<_> = layers.iter().map(|layer| layer.digest.clone()).collect();
        let expected = ["1.0", "entrypoint", "6.1.0-1", "6.1.0-2"].map(|name| Digest::of(name.as_bytes()));
        assert_eq!(digests, expected);
        let config: Value = serde_json::from_slice(&made.config).unwrap();
        let history: Vec<_> =
            config["history"].as_array().unwrap().iter().map(|e| e["created_by"].clone()).collect();
        assert_eq!(history, ["ADD", "farrier: driver-entrypoint", PAYLOAD_HISTORY, PAYLOAD_HISTORY]);
    }

    fn base(name: &str) -> Base {
        let below = part(None, name, |_| ());
        Base::parse(&below.manifest, &below.config, "amd64")
            .map(|mut base| {
                base.config.insert("history".to_owned(), json!([{"created_by": "ADD"}]));
                base
            })
            .unwrap()
    }

    fn union(parts: &[UnionPart]) -> Result<Assembled, ImageError> {
        let notes = UnionMetadata {
            title: "mft",
            version: "4.33",
            input_hash: "ab".repeat(32).parse().unwrap(),
            architecture: Architecture::Amd64,
        };
        assemble_union(parts, &notes)
    }

    #[test]
    fn every_payload_is_a_layer_over_one_base() {
        let base = base("6.0.0");
        let parts = [
            part(Some(&base), "6.1.0-47-amd64", |_| ()),
            part(Some(&base), "6.1.0-48-amd64", |facts| facts.verdict = Some(Verdict::Unknown)),
        ];
        let made = union(&parts).unwrap();
        assert_eq!(made, union(&parts).unwrap());
        let pretty = |bytes: &[u8]| {
            serde_json::to_string_pretty(&serde_json::from_slice::<Value>(bytes).unwrap()).unwrap()
        };
        insta::assert_snapshot!("union_config", pretty(&made.config));
        insta::assert_snapshot!("union_manifest", pretty(&made.manifest));
        let again = Base::parse(&made.manifest, &made.config, "amd64").unwrap();
        assert_eq!(again.layers.len(), 3);
        let facts = ImageFacts::from_manifest(&made.manifest).unwrap();
        assert_eq!(facts.members.len(), 2);
        assert_eq!(facts.verdict, Some(Verdict::Unknown), "the worst");
    }

    #[test]
    fn parts_that_do_not_fit_together() {
        let (one, other) = (base("6.0.0"), base("6.0.1"));
        let good = part(Some(&one), "6.1.0-47-amd64", |_| ());
        let error = |parts: &[UnionPart]| union(parts).unwrap_err().to_string();
        let mut lie = good.clone();
        lie.manifest.push(b' ');
        let mut other_kernel = good.clone();
        other_kernel.kernel = "6.1.0-49-amd64".parse().unwrap();
        let errors = [
            error(&[]),
            error(&[lie]),
            error(&[other_kernel]),
            error(&[good.clone(), part(Some(&other), "6.1.0-48-amd64", |_| ())]),
            error(&[good.clone(), part(Some(&one), "6.1.0-48-amd64", |facts| facts.verdict = None)]),
            error(&[part(Some(&one), "6.1.0-48-amd64", |facts| facts.verdict = Some(Verdict::Refused))]),
        ];
        insta::assert_snapshot!(errors.join("\n"));
        let many: Vec<UnionPart> = (0..127).map(|n| part(Some(&one), &format!("6.1.{n}"), |_| ())).collect();
        insta::assert_snapshot!(error(&many), @"union image: 128 layers, at most 127 can be stacked");
    }
}
