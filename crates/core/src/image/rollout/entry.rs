//! Entries of the list `rollout`, which may name several containers.

use schemars::Schema;
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};

use super::{RolloutForm, RolloutSpec};

/// Reads a list of rollouts. An entry with `containers` becomes one rollout for each container.
pub(in super::super) fn rollouts<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<RolloutSpec>, D::Error> {
    let entries = Vec::<RolloutEntry>::deserialize(deserializer)?;
    Ok(entries.into_iter().flat_map(|entry| entry.0).collect())
}

/// The rollouts of one entry.
#[derive(Deserialize)]
#[serde(try_from = "RolloutForm")]
struct RolloutEntry(Vec<RolloutSpec>);

impl TryFrom<RolloutForm> for RolloutEntry {
    type Error = String;

    fn try_from(mut form: RolloutForm) -> Result<Self, Self::Error> {
        let Some(containers) = form.containers.take() else { return Ok(Self(vec![form.try_into()?])) };
        if form.container.is_some() {
            return Err("`container` and `containers` exclude each other".to_owned());
        }
        if containers.is_empty() {
            return Err("`containers` is empty".to_owned());
        }
        let rollout = |container| RolloutForm { container: Some(container), ..form.clone() }.try_into();
        containers.into_iter().map(rollout).collect::<Result<_, _>>().map(Self)
    }
}

/// Adds alternatives to `container`, which flattened enums cannot express, to the schema: a list `containers`, and for targets
/// in manifests an operator's resource.
pub(super) fn with_alternatives(schema: &mut Schema) {
    let variants = schema.get_mut("oneOf").and_then(Value::as_array_mut);
    let Some(variants) = variants else { return };
    let custom_resource =
        variants.iter().find(|variant| variant["properties"]["strategy"]["const"] == "custom-resource");
    let [resource, name] = ["resource", "name"]
        .map(|key| custom_resource.map_or(Value::Null, |variant| variant["properties"][key].clone()));
    for variant in variants {
        let Some(mut item) = variant.pointer("/properties/container").cloned() else { continue };
        if let Some(item) = item.as_object_mut() {
            item.remove("description");
        }
        variant["properties"]["containers"] = json!({
            "description": "Several containers or init containers that get the same image, instead of `container`.",
            "type": "array",
            "items": item,
            "minItems": 1,
        });
        let in_manifests = variant["properties"].get("path").is_some();
        let no_longer_required =
            if in_manifests { &["namespace", "daemonSet", "container"][..] } else { &["container"] };
        if let Some(required) = variant["required"].as_array_mut() {
            required.retain(|field| !no_longer_required.iter().any(|optional| field == optional));
        }
        if in_manifests {
            (variant["properties"]["resource"], variant["properties"]["name"]) =
                (resource.clone(), name.clone());
            variant["oneOf"] = json!([
                {"required": ["namespace", "daemonSet", "container"]},
                {"required": ["namespace", "daemonSet", "containers"]},
                {"required": ["resource", "name"]},
            ]);
        } else {
            variant["oneOf"] = json!([{"required": ["container"]}, {"required": ["containers"]}]);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    #[test]
    fn containers_stand_for_one_rollout_each() {
        let mut spec = json!([{
            "strategy": "per-kernel", "namespace": "n", "daemonSet": "d", "containers": ["a", "b"], "retireAfter": "1h",
        }]);
        let rollouts = super::rollouts(&spec).unwrap();
        let names: Vec<&str> =
            rollouts.iter().map(|spec| spec.daemon_set().unwrap().container.as_str()).collect();
        assert_eq!(names, ["a", "b"]);
        for (containers, expected) in [(json!([]), "`containers` is empty"), (json!(["A"]), "A")] {
            spec[0]["containers"] = containers;
            let error = super::rollouts(&spec).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        spec[0]["containers"] = json!(["a"]);
        spec[0]["container"] = "a".into();
        assert!(super::rollouts(&spec).unwrap_err().to_string().contains("exclude each other"));
    }
}
