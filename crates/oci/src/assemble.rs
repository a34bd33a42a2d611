//! Assembles an image from a base and payload layers: writes the configuration and the manifest.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::{Base, Descriptor, Digest, ImageError, ImageManifest, Layer, annotations, media_type, to_json};

/// Creation time of every image. Constant, so that the same inputs give the same digest.
pub const CREATED: &str = "1970-01-01T00:00:00Z";

/// `created_by` of the history entries for payload layers. Union images find payloads by this value.
pub const PAYLOAD_HISTORY: &str = "farrier: payload";

/// `created_by` of the history entry for the `driver-entrypoint` layer. Union images find the layer by this value.
pub const ENTRYPOINT_HISTORY: &str = "farrier: driver-entrypoint";

/// Fields of configurations by Docker's engine that describe the build and not the image.
const BUILD_LEFTOVERS: [&str; 4] = ["container", "container_config", "docker_version", "id"];

/// Inputs of an image.
#[derive(Clone, Debug)]
pub struct Assembly<'a> {
    /// The base image. Without a base, the image consists of the given layers only.
    pub base: Option<&'a Base>,
    /// The layer with `driver-entrypoint`, between the base and the payload. Images for different kernels share it and
    /// differ only in the payload layers.
    pub entrypoint_layer: Option<&'a Layer>,
    /// The payload layers, lowest first.
    pub layers: &'a [Layer],
    /// The entrypoint. If empty, the image keeps the base's entrypoint and arguments.
    pub entrypoint: &'a [String],
    /// Environment variables. A variable of the base with the same name is replaced.
    pub env: &'a BTreeMap<String, String>,
    /// Labels. A label of the base with the same key is replaced.
    pub labels: &'a BTreeMap<String, String>,
    /// Annotations of the manifest. [`assemble`] adds the digest of the base.
    pub annotations: &'a BTreeMap<String, String>,
    /// Architecture in Go's spelling.
    pub architecture: &'a str,
}

/// An assembled image without its layers' bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assembled {
    /// The configuration's bytes.
    pub config: Vec<u8>,
    /// The configuration's digest.
    pub config_digest: Digest,
    /// The manifest's bytes; its media type is [`media_type::OCI_MANIFEST`].
    pub manifest: Vec<u8>,
    /// The image's digest, which is the manifest's digest.
    pub digest: Digest,
}

/// Writes the configuration and the manifest of an image.
pub fn assemble(assembly: &Assembly<'_>) -> Result<Assembled, ImageError> {
    let config = to_json("image configuration", &configuration(assembly))?;
    let config_digest = Digest::of(&config);

    let mut layers: Vec<_> = assembly.base.map(|base| base.layers.clone()).unwrap_or_default();
    let upper_layers = assembly.entrypoint_layer.into_iter().chain(assembly.layers);
    // The payload must come last, as `ImageManifest::payload_layer` expects.
    layers.extend(upper_layers.map(Layer::descriptor));

    let mut annotations = assembly.annotations.clone();
    if let Some(base) = assembly.base {
        annotations.entry(annotations::BASE_DIGEST.to_owned()).or_insert_with(|| base.digest.to_string());
    }
    let descriptor = Descriptor::of(media_type::OCI_CONFIG, &config);
    let manifest = ImageManifest { annotations, ..ImageManifest::new(descriptor, layers) }.to_bytes()?;
    let digest = Digest::of(&manifest);
    Ok(Assembled { config, config_digest, manifest, digest })
}

/// Returns the base's configuration with the payload's changes. Keeps fields that farrier does not know, such as health checks, stop
/// signals and volumes.
fn configuration(assembly: &Assembly<'_>) -> Value {
    let &Assembly { base, entrypoint_layer, layers, entrypoint, env, labels, annotations: _, architecture } =
        assembly;
    let mut config = base.map(|base| base.config.clone()).unwrap_or_default();
    for key in BUILD_LEFTOVERS {
        config.remove(key);
    }
    config.insert("created".to_owned(), CREATED.into());
    config.insert("architecture".to_owned(), architecture.into());
    config.insert("os".to_owned(), "linux".into());

    let mut diff_ids = base.map(|base| base.diff_ids.clone()).unwrap_or_default();
    let history = history(&config, diff_ids.len(), entrypoint_layer.is_some(), layers.len());
    diff_ids.extend(entrypoint_layer.into_iter().chain(layers).map(|layer| layer.diff_id.to_string()));
    config.insert("rootfs".to_owned(), json!({"type": "layers", "diff_ids": diff_ids}));
    config.insert("history".to_owned(), history.into());

    let mut runtime_config = match config.remove("config") {
        Some(Value::Object(object)) => object,
        _ => Map::new(),
    };
    if !entrypoint.is_empty() {
        runtime_config.insert("Entrypoint".to_owned(), json!(entrypoint));
        // As in a Dockerfile, a new entrypoint discards the base's arguments.
        runtime_config.remove("Cmd");
    }
    if !env.is_empty() {
        let merged = merge_env(runtime_config.get("Env"), env);
        runtime_config.insert("Env".to_owned(), merged.into());
    }
    if !labels.is_empty() {
        let mut merged = match runtime_config.remove("Labels") {
            Some(Value::Object(merged)) => merged,
            _ => Map::new(),
        };
        merged.extend(labels.iter().map(|(key, value)| (key.clone(), value.as_str().into())));
        runtime_config.insert("Labels".to_owned(), merged.into());
    }
    config.insert("config".to_owned(), runtime_config.into());
    // Sort the keys at every level, whether or not serde_json is built with `preserve_order`.
    let mut config = Value::Object(config);
    config.sort_all_objects();
    config
}

/// Returns the base's variables in their order, with overridden values, followed by the new variables.
fn merge_env(base: Option<&Value>, env: &BTreeMap<String, String>) -> Vec<Value> {
    let old = base.and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let name = |entry: &str| entry.split('=').next().unwrap_or_default().to_owned();
    let mut added = env.clone();
    let mut merged: Vec<Value> = Vec::new();
    for entry in old.iter().filter_map(Value::as_str) {
        let name = name(entry);
        match added.remove(&name) {
            Some(value) => merged.push(format!("{name}={value}").into()),
            None => merged.push(entry.into()),
        }
    }
    merged.extend(added.into_iter().map(|(name, value)| Value::from(format!("{name}={value}"))));
    merged
}

/// Returns one history entry for each layer. Replaces the base's history by generic entries if it does not match the layers.
fn history(
    config: &Map<String, Value>,
    base_layers: usize,
    entrypoint: bool,
    payload_layers: usize,
) -> Vec<Value> {
    let entry = |created_by: &str| json!({"created": CREATED, "created_by": created_by});
    let layers_of = |entries: &[Value]| {
        entries.iter().filter(|e| !e.get("empty_layer").and_then(Value::as_bool).unwrap_or(false)).count()
    };
    let mut entries = match config.get("history") {
        Some(Value::Array(base_history)) if layers_of(base_history) == base_layers => base_history.clone(),
        _ => vec![entry("base image"); base_layers],
    };
    entries.extend(entrypoint.then(|| entry(ENTRYPOINT_HISTORY)));
    entries.extend(vec![entry(PAYLOAD_HISTORY); payload_layers]);
    entries
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(name: &str) -> Layer {
        Layer {
            digest: Digest::of(name.as_bytes()),
            diff_id: Digest::of(format!("{name}.tar").as_bytes()),
            size: 10,
            media_type: media_type::OCI_LAYER_GZIP,
        }
    }

    /// A base image as Docker's engine writes it.
    fn docker_base(change: impl FnOnce(&mut Value, &mut Value)) -> Result<Base, ImageError> {
        let lower = layer("lower");
        let mut config = json!({
            "architecture": "amd64", "os": "linux", "docker_version": "20.10",
            "container_config": {"Cmd": ["x"]}, "created": "2026-01-01T00:00:00Z",
            "config": {
                "Env": ["PATH=/bin", "A=old"], "Cmd": ["bash"], "Labels": {"b": "base", "k": "base"},
                "Healthcheck": {"Test": ["NONE"]}
            },
            "history": [{"created_by": "ADD"}, {"created_by": "CMD", "empty_layer": true}],
            "rootfs": {"type": "layers", "diff_ids": [lower.diff_id.as_str()]},
        });
        let mut manifest = json!({
            "schemaVersion": 2, "mediaType": media_type::DOCKER_MANIFEST,
            "config": {"mediaType": "application/vnd.docker.container.image.v1+json", "size": 1, "digest": ""},
            "layers": [
                {"mediaType": media_type::DOCKER_LAYER_GZIP, "size": 10, "digest": lower.digest.as_str()}
            ],
        });
        change(&mut manifest, &mut config);
        let config = serde_json::to_vec(&config).unwrap();
        if manifest["config"]["digest"] == "" {
            manifest["config"]["digest"] = Digest::of(&config).as_str().into();
        }
        Base::parse(&serde_json::to_vec(&manifest).unwrap(), &config, "amd64")
    }

    fn texts(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
    }

    #[test]
    fn a_payload_is_assembled_on_a_docker_base() {
        let base = docker_base(|_, _| ()).unwrap();
        let assembled = assemble(&Assembly {
            base: Some(&base),
            entrypoint_layer: None,
            layers: &[layer("payload")],
            entrypoint: &["driver-entrypoint".to_owned(), "mofed".to_owned()],
            env: &texts(&[("A", "new"), ("B", "added")]),
            labels: &texts(&[("k", "ours")]),
            annotations: &texts(&[("farrier.dev/os", "debian-12")]),
            architecture: "amd64",
        })
        .unwrap();
        let pretty = |bytes: &[u8]| {
            serde_json::to_string_pretty(&serde_json::from_slice::<Value>(bytes).unwrap()).unwrap()
        };
        insta::assert_snapshot!("docker_base_config", pretty(&assembled.config));
        insta::assert_snapshot!("docker_base_manifest", pretty(&assembled.manifest));
        assert_eq!(assembled.digest, Digest::of(&assembled.manifest));
        assert_eq!(assembled.config_digest, Digest::of(&assembled.config));
    }

    #[test]
    fn an_image_is_assembled_without_base() {
        let empty = BTreeMap::new();
        let assembly = Assembly {
            base: None,
            entrypoint_layer: None,
            layers: &[layer("a"), layer("b")],
            entrypoint: &[],
            env: &empty,
            labels: &empty,
            annotations: &empty,
            architecture: "arm64",
        };
        let assembled = assemble(&assembly).unwrap();
        assert_eq!(assembled, assemble(&assembly).unwrap());
        let config: Value = serde_json::from_slice(&assembled.config).unwrap();
        assert_eq!(config["architecture"], "arm64");
        assert_eq!(config["rootfs"]["diff_ids"].as_array().unwrap().len(), 2);
        assert_eq!(config["history"].as_array().unwrap().len(), 2);
    }

    #[test]
    fn inconsistent_bases_are_rejected() {
        let error = |change: fn(&mut Value, &mut Value)| docker_base(change).unwrap_err().to_string();
        let other_arch = error(|_, config| config["architecture"] = "arm64".into());
        insta::assert_snapshot!(other_arch, @r#"base image: its architecture is "arm64", the target's is "amd64""#);
        let no_layers = error(|_, config| config["rootfs"]["diff_ids"] = json!([]));
        insta::assert_snapshot!(no_layers, @"base image: its configuration does not describe the layers");
        let foreign = error(|manifest, _| {
            manifest["layers"][0]["mediaType"] =
                "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip".into();
        });
        insta::assert_snapshot!(foreign, @r#"base image: a layer's media type is "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip""#);
        let lie = error(|manifest, _| manifest["config"]["digest"] = Digest::of(b"x").as_str().into());
        assert!(lie.starts_with("base image: configuration is sha256:"), "{lie}");
    }
}
