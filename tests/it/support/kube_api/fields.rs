//! Field sets: ownership of an object's paths by manager, and the difference between two versions of an object.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use super::{kinds::Kind, schema};

/// A path with `fieldsV1` elements: `f:spec`, `k:{"name":"c"}`, `v:"x"`.
pub type Path = Vec<String>;

/// Paths owned by one manager.
pub type FieldSet = BTreeSet<Path>;

/// The difference between two versions of an object.
#[derive(Debug, Default)]
pub struct Difference {
    /// Paths with a new or changed value.
    pub set: FieldSet,
    /// Paths that were removed.
    pub removed: FieldSet,
}

/// Returns the part of an object that managers can own: no identity or bookkeeping, and either the status or the rest.
pub fn managed_part(object: &Value, kind: &Kind, subresource: Option<&str>) -> Value {
    let mut part = object.clone();
    let Some(map) = part.as_object_mut() else { return part };
    map.remove("apiVersion");
    map.remove("kind");
    if subresource == Some("status") {
        map.retain(|key, _| key == "status");
        return part;
    }
    if kind.status {
        map.remove("status");
    }
    if let Some(metadata) = map.get_mut("metadata").and_then(Value::as_object_mut) {
        for name in [
            "name",
            "namespace",
            "uid",
            "resourceVersion",
            "generation",
            "creationTimestamp",
            "managedFields",
            "selfLink",
            "deletionTimestamp",
            "deletionGracePeriodSeconds",
        ] {
            metadata.remove(name);
        }
    }
    part
}

/// Returns all leaves of a value, and the items of keyed lists.
pub fn leaves(kind: &Kind, value: &Value) -> FieldSet {
    let mut found = FieldSet::new();
    collect(kind, value, &mut Vec::new(), &mut found);
    found
}

fn collect(kind: &Kind, value: &Value, path: &mut Path, found: &mut FieldSet) {
    let children = children(kind, path, value);
    if let Some(children) = children.filter(|children| !children.is_empty()) {
        for (element, child) in children {
            let item = !element.starts_with("f:");
            path.push(element);
            if item {
                found.insert(path.clone());
            }
            collect(kind, child, path, found);
            path.pop();
        }
    } else if !path.is_empty() && !path.last().is_some_and(|element| element.starts_with("k:")) {
        found.insert(path.clone());
    }
}

/// Returns the children of a non-atomic map or keyed list by path element.
fn children<'a>(kind: &Kind, path: &Path, value: &'a Value) -> Option<BTreeMap<String, &'a Value>> {
    match value {
        Value::Object(map) if !schema::is_atomic_map(kind, path) => {
            Some(map.iter().map(|(name, child)| (format!("f:{name}"), child)).collect())
        }
        Value::Array(items) => match schema::list(kind, path) {
            schema::List::Atomic => None,
            schema::List::Set => Some(items.iter().map(|item| (format!("v:{item}"), item)).collect()),
            schema::List::Keyed(keys) => Some(items.iter().map(|item| (key_of(item, keys), item)).collect()),
        },
        _ => None,
    }
}

/// Returns an item's key element, such as `k:{"name":"c"}`.
pub fn key_of(item: &Value, keys: &[&str]) -> String {
    let value = |key: &str| match (item.get(key), key) {
        (Some(value), _) => value.clone(),
        (None, "protocol") => json!("TCP"),
        (None, _) => Value::Null,
    };
    let key: Map<String, Value> = keys.iter().map(|key| ((*key).to_owned(), value(key))).collect();
    format!("k:{}", Value::Object(key))
}

/// Returns the difference from `old` to `new`.
pub fn difference(kind: &Kind, old: &Value, new: &Value) -> Difference {
    let mut found = Difference::default();
    compare(kind, Some(old), Some(new), &mut Vec::new(), &mut found);
    found
}

fn compare(kind: &Kind, old: Option<&Value>, new: Option<&Value>, path: &mut Path, found: &mut Difference) {
    if old == new {
        return;
    }
    let below = |value: Option<&Value>, into: &mut FieldSet| {
        if let Some(value) = value {
            collect(kind, value, &mut path.clone(), into);
            if path.last().is_some_and(|element| element.starts_with("k:")) {
                into.insert(path.clone());
            }
        }
    };
    let (Some(before), Some(after)) = (old, new) else {
        below(new, &mut found.set);
        below(old, &mut found.removed);
        return;
    };
    let (Some(before), Some(after)) = (children(kind, path, before), children(kind, path, after)) else {
        let (mut gone, mut set) = (FieldSet::new(), FieldSet::new());
        below(old, &mut gone);
        below(new, &mut set);
        found.removed.extend(gone.difference(&set).cloned());
        found.set.extend(set);
        return;
    };
    let names: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
    for name in names {
        path.push(name.clone());
        compare(kind, before.get(name).copied(), after.get(name).copied(), path, found);
        path.pop();
    }
}

/// Encodes a set as `fieldsV1`.
pub fn encode(set: &FieldSet) -> Value {
    let mut root = json!({});
    for path in set {
        let mut node = &mut root;
        for element in path {
            node = &mut node[element.as_str()];
            if node.is_null() {
                *node = json!({});
            }
        }
    }
    // A path with children that is also a member needs a `.` entry.
    for path in set {
        let mut node = &mut root;
        for element in path {
            node = &mut node[element.as_str()];
        }
        if let Some(map) = node.as_object_mut().filter(|map| !map.is_empty()) {
            map.insert(".".to_owned(), json!({}));
        }
    }
    root
}

/// Decodes `fieldsV1`.
pub fn decode(fields: &Value) -> FieldSet {
    let mut found = FieldSet::new();
    read(fields, &mut Vec::new(), &mut found);
    found
}

fn read(node: &Value, path: &mut Path, found: &mut FieldSet) {
    let Some(map) = node.as_object() else { return };
    if !path.is_empty() && (map.is_empty() || map.contains_key(".")) {
        found.insert(path.clone());
    }
    for (element, child) in map.iter().filter(|(element, _)| *element != ".") {
        path.push(element.clone());
        read(child, path, found);
        path.pop();
    }
}

/// Formats a path like the server's conflict messages: `.spec.template.spec.containers[name="c"].image`.
pub fn display(path: &Path) -> String {
    let mut told = String::new();
    for element in path {
        if let Some(name) = element.strip_prefix("f:") {
            told.push('.');
            told.push_str(name);
        } else if let Some(key) = element.strip_prefix("k:") {
            let key: Map<String, Value> = serde_json::from_str(key).unwrap();
            let key: Vec<String> = key.iter().map(|(name, value)| format!("{name}={value}")).collect();
            told.extend(["[", &key.join(","), "]"]);
        } else {
            told.extend(["[", element.trim_start_matches("v:"), "]"]);
        }
    }
    told
}
