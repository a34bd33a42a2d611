//! Assembles a union image. Manifests and configurations of several images go in, one manifest and configuration come out.

use serde_json::{Value, json};

use oci::{
    Assembled, Assembly, Base, CREATED, Descriptor, ENTRYPOINT_HISTORY, ImageError, ImageManifest,
    PAYLOAD_HISTORY, assemble,
};

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

/// Stacks the payload layers of the parts, in their order, on the last part's base and `driver-entrypoint`. Entrypoint, environment
/// and labels also come from the last part, as its definition set them.
///
/// Each kernel's modules are in a separate directory. Of any other file that several parts contain, the last part's copy is
/// visible. Layers are not read: their descriptors suffice.
pub fn assemble_union(parts: &[UnionPart], metadata: &UnionMetadata<'_>) -> Result<Assembled, ImageError> {
    let Some((last, _)) = parts.split_last() else {
        return Err(ImageError::unusable(WHAT, "it has no members"));
    };
    let last_split = SplitImage::of(last, metadata.architecture)?;
    let mut union = last_split.base.clone();
    let mut verdict = Verdict::Loads;
    for part in parts {
        let split = SplitImage::of(part, metadata.architecture)?;
        if !split.can_share_base(&last_split) {
            let reason = format!(
                "the images for {} and {} have different bases: set another pattern in `tags` to build both again",
                part.kernel, last.kernel
            );
            return Err(ImageError::unusable(WHAT, reason));
        }
        verdict = verdict.max(split.verdict);
        for (layer, diff_id) in split.payload {
            // Several parts can have the payload of one driver image as their base. A second copy would hide files of the parts
            // between the two.
            if !union.layers.contains(&layer) {
                union.layers.push(layer);
                union.diff_ids.push(diff_id);
            }
        }
    }
    if union.layers.len() > MAX_LAYERS {
        let reason = format!("{} layers, at most {MAX_LAYERS} can be stacked", union.layers.len());
        return Err(ImageError::unusable(WHAT, reason));
    }
    let payload_layers = union.layers.len() - last_split.base.layers.len();
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

/// The image of a part, split into its base and its payload layers.
struct SplitImage {
    /// The image without its payload layers.
    base: Base,
    /// Layers of the base except the upper `driver-entrypoint`, which differs between versions of farrier.
    below_entrypoint: Vec<Digest>,
    /// Payload layers, each with the digest of its uncompressed content.
    payload: Vec<(Descriptor, String)>,
    recipe: Option<InputHash>,
    verdict: Verdict,
}

impl SplitImage {
    /// Validates and splits an image. Its history has an entry for each layer, because farrier writes it.
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
        let Base { digest, layers, mut config, diff_ids } = image;
        let mut origins: Vec<Value> = Vec::new();
        if let Some(Value::Array(history)) = config.get_mut("history") {
            let of_layers = history.iter().filter(|entry| entry["empty_layer"] != true);
            origins = of_layers.map(|entry| entry["created_by"].clone()).collect();
            history.retain(|entry| entry["created_by"] != PAYLOAD_HISTORY);
        }
        // Layers of other origins may change files of the payloads below them. Such payloads are a fixed part of the base.
        let is_other = |origin: &Value| *origin != PAYLOAD_HISTORY && *origin != ENTRYPOINT_HISTORY;
        let fixed_layers = origins.iter().rposition(is_other).map_or(0, |index| index + 1);
        origins[..fixed_layers].fill(Value::Null);
        let digest = annotations.get(BASE_DIGEST).and_then(|text| text.parse().ok()).unwrap_or(digest);
        let mut base = Base { digest, layers: Vec::new(), config, diff_ids: Vec::new() };
        let (mut below_entrypoint, mut payload) = (Vec::new(), Vec::new());
        let is_complete = origins.len() == layers.len();
        for ((layer, diff_id), origin) in layers.into_iter().zip(diff_ids).zip(origins) {
            if origin == PAYLOAD_HISTORY {
                payload.push((layer, diff_id));
                continue;
            }
            if origin != ENTRYPOINT_HISTORY {
                below_entrypoint.push(layer.digest.clone());
            }
            base.layers.push(layer);
            base.diff_ids.push(diff_id);
        }
        if payload.is_empty() || !is_complete {
            return Err(unusable("has no separate payload layer (an engine built the whole image)"));
        }
        Ok(Self { base, below_entrypoint, payload, recipe: facts.recipe, verdict })
    }

    /// Whether the payload may be stacked on the other image's base. Equal recipes name equal inputs of the base, which two
    /// versions of farrier can write as different layers.
    fn can_share_base(&self, other: &Self) -> bool {
        self.below_entrypoint == other.below_entrypoint
            || (self.recipe.is_some() && self.recipe == other.recipe)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::oci::{Layer, media_type};

    fn layer(name: &str) -> Layer {
        Layer {
            digest: Digest::of(name.as_bytes()),
            diff_id: Digest::of(format!("{name}.tar").as_bytes()),
            size: 10,
            media_type: media_type::OCI_LAYER_GZIP,
        }
    }

    fn part(base: Option<&Base>, kernel: &str, change: impl FnOnce(&mut ImageFacts)) -> UnionPart {
        part_with_entrypoint(base, None, kernel, change)
    }

    fn part_with_entrypoint(
        base: Option<&Base>,
        entrypoint: Option<&str>,
        kernel: &str,
        change: impl FnOnce(&mut ImageFacts),
    ) -> UnionPart {
        let mut facts = ImageFacts {
            kernel_release: Some(kernel.parse().unwrap()),
            verdict: Some(Verdict::Loads),
            ..ImageFacts::default()
        };
        change(&mut facts);
        let none = BTreeMap::new();
        let made = assemble(&Assembly {
            base,
            entrypoint_layer: entrypoint.map(layer).as_ref(),
            layers: &[layer(kernel)],
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

    fn layers(made: &Assembled) -> Vec<Digest> {
        let manifest = ImageManifest::parse(&made.manifest).unwrap();
        manifest.layers.into_iter().map(|layer| layer.digest).collect()
    }

    fn named<const N: usize>(names: [&str; N]) -> [Digest; N] {
        names.map(|name| Digest::of(name.as_bytes()))
    }

    /// Each part's image has the `driver-entrypoint` layer; the union image has it once.
    #[test]
    fn driver_entrypoint_is_there_once() {
        let below = base("1.0");
        let whole = |kernel: &str| part_with_entrypoint(Some(&below), Some("entrypoint"), kernel, |_| ());
        let made = union(&[whole("6.1.0-1"), whole("6.1.0-2")]).unwrap();
        assert_eq!(layers(&made), named(["1.0", "entrypoint", "6.1.0-1", "6.1.0-2"]));
        let config: Value = serde_json::from_slice(&made.config).unwrap();
        let history: Vec<_> =
            config["history"].as_array().unwrap().iter().map(|e| e["created_by"].clone()).collect();
        assert_eq!(history, ["ADD", "farrier: driver-entrypoint", PAYLOAD_HISTORY, PAYLOAD_HISTORY]);
    }

    /// A newer farrier has another `driver-entrypoint`, and can write the same base as other layers.
    #[test]
    fn parts_of_two_versions_of_farrier_get_the_last_ones_base() {
        let (old, new) = (base("1.0"), base("1.1"));
        let whole = |base: &Base, entrypoint: &str, kernel: &str, recipe: Option<&str>| {
            let recipe = recipe.map(|digits| digits.repeat(32).parse().unwrap());
            part_with_entrypoint(Some(base), Some(entrypoint), kernel, |facts| facts.recipe = recipe)
        };
        let parts = [whole(&old, "e1", "6.1.0-1", Some("ab")), whole(&old, "e2", "6.1.0-2", Some("cd"))];
        assert_eq!(layers(&union(&parts).unwrap()), named(["1.0", "e2", "6.1.0-1", "6.1.0-2"]));
        let parts = [whole(&old, "e1", "6.1.0-1", Some("ab")), whole(&new, "e2", "6.1.0-2", Some("ab"))];
        assert_eq!(layers(&union(&parts).unwrap()), named(["1.1", "e2", "6.1.0-1", "6.1.0-2"]));
        let parts = [whole(&old, "e1", "6.1.0-1", Some("ab")), whole(&new, "e2", "6.1.0-2", Some("cd"))];
        assert!(union(&parts).unwrap_err().to_string().contains("have different bases"));

        // The base is itself a driver image, which the earlier version built.
        let needed = whole(&old, "e1", "5.10.0-1", None);
        let needed = Base::parse(&needed.manifest, &needed.config, "amd64").unwrap();
        let parts = [whole(&needed, "e2", "6.1.0-1", None), whole(&old, "e2", "6.1.0-2", None)];
        assert_eq!(layers(&union(&parts).unwrap()), named(["1.0", "e2", "5.10.0-1", "6.1.0-1", "6.1.0-2"]));
    }

    /// Each kernel gets the modules of its image: neither the base's payload nor another part hides them.
    #[test]
    fn the_payload_of_a_common_base_stays_below() {
        let driver = part_with_entrypoint(Some(&base("1.0")), Some("e1"), "5.10.0-1", |_| ());
        let driver = Base::parse(&driver.manifest, &driver.config, "amd64").unwrap();
        let stacked = |base: &Base| {
            let whole = |kernel: &str| part_with_entrypoint(Some(base), Some("e2"), kernel, |_| ());
            layers(&union(&[whole("6.1.0-1"), whole("6.1.0-2")]).unwrap())
        };
        assert_eq!(stacked(&driver), named(["1.0", "e1", "e2", "5.10.0-1", "6.1.0-1", "6.1.0-2"]));

        // A Dockerfile changed files of the driver image.
        let mut changed = driver;
        changed.layers.push(layer("changed").descriptor());
        changed.diff_ids.push(layer("changed").diff_id.to_string());
        changed.config["history"].as_array_mut().unwrap().push(json!({"created_by": "RUN"}));
        let expected = named(["1.0", "e1", "5.10.0-1", "changed", "e2", "6.1.0-1", "6.1.0-2"]);
        assert_eq!(stacked(&changed), expected);
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
