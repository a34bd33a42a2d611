//! Parses and validates base images.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::{Descriptor, Digest, ImageError, ImageManifest, manifest::from_json, media_type};

/// A base image whose manifest and configuration are consistent with each other.
#[derive(Clone, Debug)]
pub struct Base {
    /// Digest of the manifest.
    pub digest: Digest,
    /// The layers, lowest first, with OCI media types.
    pub layers: Vec<Descriptor>,
    /// The configuration.
    pub config: Map<String, Value>,
    /// Digests of the uncompressed layers, lowest first.
    pub diff_ids: Vec<String>,
}

impl Base {
    /// Whether the image has a layer with this digest.
    pub fn contains(&self, layer: &Digest) -> bool {
        self.layers.iter().any(|descriptor| descriptor.digest == *layer)
    }

    /// Parses untrusted bytes of a manifest and a configuration. Checks that they are consistent, and that the architecture is `arch`.
    ///
    /// Docker's media types become OCI media types, because the layers' bytes are the same.
    pub fn parse(manifest: &[u8], config: &[u8], arch: &str) -> Result<Self, ImageError> {
        const WHAT: &str = "base image";
        let parsed = ImageManifest::parse(manifest)?;
        let actual = Digest::of(config);
        if actual != parsed.config.digest {
            let expected = parsed.config.digest;
            let reason = format!("configuration is {actual}, but the manifest names {expected}");
            return Err(ImageError::unusable(WHAT, reason));
        }
        let config: Map<String, Value> = from_json("base image's configuration", config)?;
        for (key, expected) in [("architecture", arch), ("os", "linux")] {
            let actual = config.get(key).and_then(Value::as_str).unwrap_or_default();
            if actual != expected {
                let reason = format!("its {key} is {actual:?}, the target's is {expected:?}");
                return Err(ImageError::unusable(WHAT, reason));
            }
        }
        let diff_ids = diff_ids(&config)
            .filter(|ids| ids.len() == parsed.layers.len())
            .ok_or_else(|| ImageError::unusable(WHAT, "its configuration does not describe the layers"))?;
        let layers = parsed.layers.into_iter().map(with_oci_media_type).collect::<Result<_, _>>()?;
        Ok(Self { digest: Digest::of(manifest), layers, config, diff_ids })
    }
}

/// Returns the architecture in an image's configuration (untrusted bytes), in Go's spelling.
pub fn architecture_of(config: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Config {
        architecture: String,
    }
    from_json("image configuration", config).ok().map(|Config { architecture }| architecture)
}

fn with_oci_media_type(layer: Descriptor) -> Result<Descriptor, ImageError> {
    if let Some(media_type) = media_type::oci_layer(&layer.media_type) {
        Ok(Descriptor { media_type: media_type.to_owned(), ..layer })
    } else {
        let kind: String = layer.media_type.chars().filter(|c| !c.is_control()).take(120).collect();
        Err(ImageError::unusable("base image", format!("a layer's media type is {kind:?}")))
    }
}

/// Parses the digests in `rootfs.diff_ids`. Returns `None` if the field is missing or an entry is no digest.
pub(super) fn diff_ids(config: &Map<String, Value>) -> Option<Vec<String>> {
    let ids = config.get("rootfs")?.get("diff_ids")?.as_array()?;
    ids.iter().map(|id| Some(id.as_str()?.parse::<Digest>().ok()?.to_string())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn architectures_of_configurations() {
        let found = architecture_of(br#"{"os":"linux","architecture":"arm64","config":{"Cmd":[]}}"#);
        assert_eq!(found.as_deref(), Some("arm64"));
        for invalid in ["{}", r#"{"architecture":1}"#, "<html>"] {
            assert_eq!(architecture_of(invalid.as_bytes()), None, "{invalid}");
        }
    }
}
