//! The API's protobuf encoding, limited to the kinds for which `kubectl create` uses it: Namespaces, ConfigMaps and Secrets.
//!
//! Field numbers come from the generated `.proto` files of k8s.io/api and k8s.io/apimachinery.

use base64::{Engine as _, prelude::BASE64_STANDARD};
use serde_json::{Map, Value, json};

/// Decodes the object in a request's body; `None` if the body is not protobuf.
pub fn object(body: &[u8]) -> Option<Value> {
    let unknown = fields(body.strip_prefix(b"k8s\0")?)?;
    let types = fields(of(&unknown, 1).next()?)?;
    let (api_version, kind) = (text(&types, 1)?, text(&types, 2)?);
    let raw = fields(of(&unknown, 2).next()?)?;
    let metadata = fields(of(&raw, 1).next()?)?;
    let mut object = json!({
        "apiVersion": api_version, "kind": kind, "metadata": {"name": text(&metadata, 1)?},
    });
    if let Some(namespace) = text(&metadata, 3).filter(|namespace| !namespace.is_empty()) {
        object["metadata"]["namespace"] = json!(namespace);
    }
    let data = || of(&raw, 2).filter_map(entry);
    match kind.as_str() {
        "ConfigMap" => {
            let texts = data().map(|(key, value)| (key, json!(String::from_utf8_lossy(value))));
            object["data"] = Value::Object(texts.collect::<Map<_, _>>());
        }
        "Secret" => {
            let encoded = data().map(|(key, value)| (key, json!(BASE64_STANDARD.encode(value))));
            object["data"] = Value::Object(encoded.collect::<Map<_, _>>());
            object["type"] = json!(text(&raw, 3)?);
        }
        _ => {}
    }
    Some(object)
}

/// Decodes a map entry.
fn entry(bytes: &[u8]) -> Option<(String, &[u8])> {
    let parts = fields(bytes)?;
    let key = text(&parts, 1)?;
    let value = parts.iter().find(|(number, _)| *number == 2).map_or(&b""[..], |(_, value)| *value);
    Some((key, value))
}

/// Returns the length-delimited fields of a message: messages, strings and bytes.
fn fields(mut bytes: &[u8]) -> Option<Vec<(u64, &[u8])>> {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes)?;
        match key & 7 {
            0 => drop(varint(&mut bytes)?),
            2 => {
                let length = usize::try_from(varint(&mut bytes)?).ok()?;
                let (value, rest) = bytes.split_at_checked(length)?;
                found.push((key >> 3, value));
                bytes = rest;
            }
            _ => return None,
        }
    }
    Some(found)
}

fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (first, rest) = bytes.split_first()?;
        *bytes = rest;
        value |= u64::from(first & 0x7f) << shift;
        if first & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

fn of<'a>(fields: &'a [(u64, &'a [u8])], wanted: u64) -> impl Iterator<Item = &'a [u8]> {
    fields.iter().filter(move |(number, _)| *number == wanted).map(|(_, value)| *value)
}

fn text(fields: &[(u64, &[u8])], wanted: u64) -> Option<String> {
    of(fields, wanted).next().map(|bytes| String::from_utf8_lossy(bytes).into_owned())
}
