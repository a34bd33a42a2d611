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
        let of = |container| RolloutForm { container: Some(container), ..form.clone() }.try_into();
        containers.into_iter().map(of).collect::<Result<_, _>>().map(Self)
    }
}

/// Adds `containers`, the alternative to `container`, to the schema of every strategy with a `container`.
pub(super) fn with_containers(schema: &mut Schema) {
    let variants = schema.get_mut("oneOf").and_then(Value::as_array_mut);
    for variant in variants.into_iter().flatten() {
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
        if let Some(required) = variant["required"].as_array_mut() {
            required.retain(|field| field != "container");
        }
        variant["oneOf"] = json!([{"required": ["container"]}, {"required": ["containers"]}]);
    }
}
