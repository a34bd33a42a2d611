//! Server-side apply, and the ownership that other writes record (`metadata.managedFields`).

use serde_json::{Map, Value, json};

use super::{
    answer::Failure,
    fields::{self, FieldSet, Path},
    kinds::Kind,
    schema,
};

/// The writer of a change.
#[derive(Clone, Copy, Debug)]
pub struct Author<'a> {
    pub manager: &'a str,
    pub subresource: Option<&'a str>,
}

/// One entry of `managedFields`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    manager: String,
    operation: String,
    api_version: String,
    subresource: Option<String>,
    time: String,
    set: FieldSet,
}

impl Entry {
    fn new(author: Author<'_>, operation: &str, kind: &Kind) -> Self {
        Self {
            manager: author.manager.to_owned(),
            operation: operation.to_owned(),
            api_version: kind.api_version(),
            subresource: author.subresource.map(str::to_owned),
            time: jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
            set: FieldSet::new(),
        }
    }

    fn is_of(&self, author: Author<'_>, operation: &str) -> bool {
        self.manager == author.manager
            && self.operation == operation
            && self.subresource.as_deref() == author.subresource
    }

    fn read(value: &Value) -> Self {
        let text = |name: &str| value[name].as_str().unwrap_or_default().to_owned();
        Self {
            manager: text("manager"),
            operation: text("operation"),
            api_version: text("apiVersion"),
            subresource: value["subresource"].as_str().map(str::to_owned),
            time: text("time"),
            set: fields::decode(&value["fieldsV1"]),
        }
    }

    fn write(&self) -> Value {
        let mut value = json!({
            "manager": self.manager, "operation": self.operation, "apiVersion": self.api_version,
            "time": self.time, "fieldsType": "FieldsV1", "fieldsV1": fields::encode(&self.set),
        });
        if let Some(subresource) = &self.subresource {
            value["subresource"] = json!(subresource);
        }
        value
    }
}

fn entries(object: &Value) -> Vec<Entry> {
    object["metadata"]["managedFields"].as_array().into_iter().flatten().map(Entry::read).collect()
}

fn set_entries(object: &mut Value, mut entries: Vec<Entry>) {
    entries.retain(|entry| !entry.set.is_empty());
    let Some(metadata) = object["metadata"].as_object_mut() else { return };
    if entries.is_empty() {
        metadata.remove("managedFields");
    } else {
        metadata.insert("managedFields".to_owned(), entries.iter().map(Entry::write).collect());
    }
}

/// Returns `live` after a manager has applied `config`, or an unchanged `live` if that changes nothing.
pub fn apply(
    kind: &Kind,
    live: &Value,
    config: &Value,
    author: Author<'_>,
    force: bool,
) -> Result<Value, Failure> {
    let before = fields::managed_part(live, kind, author.subresource);
    let config = fields::managed_part(config, kind, author.subresource);
    require_list_keys(kind, &config, &mut Path::new())?;
    let wanted = fields::leaves(kind, &config);
    let (mine, mut others): (Vec<Entry>, Vec<Entry>) =
        entries(live).into_iter().partition(|entry| entry.is_of(author, "Apply"));
    let mut entry = mine.into_iter().next().unwrap_or_else(|| Entry::new(author, "Apply", kind));

    let mut after = before.clone();
    merge(kind, &mut after, &config, &mut Path::new());
    let kept: FieldSet = others.iter().flat_map(|other| &other.set).chain(&wanted).cloned().collect();
    let given_up = |path: &&Path| !kept.iter().any(|owned| owned.starts_with(path));
    for path in entry.set.iter().filter(given_up) {
        remove(&mut after, path);
    }

    let difference = fields::difference(kind, &before, &after);
    let mut conflicts: Vec<(String, Path)> = Vec::new();
    for other in &mut others {
        let taken: Vec<Path> = other.set.intersection(&difference.set).cloned().collect();
        for path in taken {
            if force {
                other.set.remove(&path);
            } else {
                conflicts.push((holder(other), path));
            }
        }
        other.set.retain(|path| !difference.removed.contains(path));
    }
    if !conflicts.is_empty() {
        return Err(conflict(&conflicts));
    }
    let unchanged = entry.set == wanted && before == after;
    if unchanged {
        return Ok(live.clone());
    }
    entry.set = wanted;
    entry.time = Entry::new(author, "Apply", kind).time;
    others.push(entry);
    let mut object = with_part(live, &after, kind, author.subresource);
    set_entries(&mut object, others);
    Ok(object)
}

/// Returns `new` with the ownership that writing it over `live` records.
pub fn update(kind: &Kind, live: &Value, new: &Value, author: Author<'_>) -> Value {
    let before = fields::managed_part(live, kind, author.subresource);
    let after = fields::managed_part(new, kind, author.subresource);
    let difference = fields::difference(kind, &before, &after);
    let (mine, mut others): (Vec<Entry>, Vec<Entry>) =
        entries(live).into_iter().partition(|entry| entry.is_of(author, "Update"));
    let mut entry = mine.into_iter().next().unwrap_or_else(|| Entry::new(author, "Update", kind));
    if !(difference.set.is_empty() && difference.removed.is_empty()) {
        entry.time = Entry::new(author, "Update", kind).time;
    }
    for other in &mut others {
        other.set.retain(|path| !difference.set.contains(path) && !difference.removed.contains(path));
    }
    entry.set.extend(difference.set);
    entry.set.retain(|path| !difference.removed.contains(path));
    others.push(entry);
    let mut object = with_part(live, &after, kind, author.subresource);
    set_entries(&mut object, others);
    object
}

/// Returns `live` with its managed part replaced.
fn with_part(live: &Value, part: &Value, kind: &Kind, subresource: Option<&str>) -> Value {
    let mut object = live.clone();
    let old_part = fields::managed_part(live, kind, subresource);
    let (Some(map), Some(part)) = (object.as_object_mut(), part.as_object()) else { return object };
    for name in old_part.as_object().into_iter().flat_map(Map::keys).filter(|name| *name != "metadata") {
        map.remove(name);
    }
    for (name, value) in part.iter().filter(|(name, _)| *name != "metadata") {
        map.insert(name.clone(), value.clone());
    }
    if subresource == Some("status") {
        return object;
    }
    if let Some(metadata) = map.get_mut("metadata").and_then(Value::as_object_mut) {
        for name in old_part["metadata"].as_object().into_iter().flat_map(Map::keys) {
            metadata.remove(name);
        }
        let new = part.get("metadata").and_then(Value::as_object);
        metadata.extend(new.into_iter().flatten().map(|(name, value)| (name.clone(), value.clone())));
        for name in ["annotations", "labels", "ownerReferences", "finalizers"] {
            let empty = |value: &Value| {
                value.as_object().is_some_and(Map::is_empty) || value.as_array().is_some_and(Vec::is_empty)
            };
            if metadata.get(name).is_some_and(empty) {
                metadata.remove(name);
            }
        }
    }
    object
}

fn merge(kind: &Kind, live: &mut Value, config: &Value, path: &mut Path) {
    match (live, config) {
        (Value::Object(live), Value::Object(config)) if !schema::is_atomic_map(kind, path) => {
            for (name, value) in config.iter().filter(|(_, value)| !value.is_null()) {
                path.push(format!("f:{name}"));
                merge(kind, live.entry(name.clone()).or_insert(Value::Null), value, path);
                path.pop();
            }
        }
        (Value::Array(live), Value::Array(config)) => match schema::list(kind, path) {
            schema::List::Atomic => live.clone_from(config),
            schema::List::Set => {
                for item in config {
                    if !live.contains(item) {
                        live.push(item.clone());
                    }
                }
            }
            schema::List::Keyed(keys) => {
                for item in config {
                    let key = fields::key_of(item, keys);
                    path.push(key.clone());
                    match live.iter_mut().find(|live| fields::key_of(live, keys) == key) {
                        Some(live) => merge(kind, live, item, path),
                        None => live.push(item.clone()),
                    }
                    path.pop();
                }
            }
        },
        (live, config) => *live = config.clone(),
    }
}

/// Requires the keys of items in keyed lists.
fn require_list_keys(kind: &Kind, value: &Value, path: &mut Path) -> Result<(), Failure> {
    match value {
        Value::Object(map) => {
            for (name, value) in map {
                path.push(format!("f:{name}"));
                require_list_keys(kind, value, path)?;
                path.pop();
            }
        }
        Value::Array(items) => {
            let schema::List::Keyed(keys) = schema::list(kind, path) else { return Ok(()) };
            for (index, item) in items.iter().enumerate() {
                let missing = |key: &&&str| item.get(**key).is_none() && **key != "protocol";
                if let Some(key) = keys.iter().find(missing) {
                    let list = fields::display(path);
                    let message = format!(
                        "failed to create typed patch object: {list}: element {index}: associative list with keys \
                         has an element that omits key field \"{key}\" (and doesn't have default value)"
                    );
                    return Err(Failure::new(500, "", message, json!({})));
                }
                path.push(fields::key_of(item, keys));
                require_list_keys(kind, item, path)?;
                path.pop();
            }
        }
        _ => {}
    }
    Ok(())
}

fn remove(value: &mut Value, path: &[String]) {
    let Some((element, rest)) = path.split_first() else { return };
    if let (Some(name), Value::Object(map)) = (element.strip_prefix("f:"), &mut *value) {
        if rest.is_empty() {
            map.remove(name);
        } else if let Some(child) = map.get_mut(name) {
            remove(child, rest);
        }
    } else if let Value::Array(items) = value {
        let wanted = |item: &Value| match element.strip_prefix("k:") {
            Some(key) => {
                let key: Map<String, Value> = serde_json::from_str(key).unwrap_or_default();
                let keys: Vec<&str> = key.keys().map(String::as_str).collect();
                fields::key_of(item, &keys) == *element
            }
            None => format!("v:{item}") == *element,
        };
        if rest.is_empty() {
            items.retain(|item| !wanted(item));
        } else if let Some(item) = items.iter_mut().find(|item| wanted(item)) {
            remove(item, rest);
        }
    }
}

fn holder(entry: &Entry) -> String {
    let Entry { manager, api_version, subresource, .. } = entry;
    let subresource = subresource.as_ref().map(|name| format!(" with subresource \"{name}\""));
    format!("\"{manager}\"{} using {api_version}", subresource.unwrap_or_default())
}

fn conflict(conflicts: &[(String, Path)]) -> Failure {
    let causes: Vec<Value> = conflicts
        .iter()
        .map(|(holder, path)| {
            json!({
                "reason": "FieldManagerConflict", "message": format!("conflict with {holder}"),
                "field": fields::display(path),
            })
        })
        .collect();
    let summary = if let [(holder, path)] = conflicts {
        format!("1 conflict: conflict with {holder}: {}", fields::display(path))
    } else {
        let mut summary = format!("{} conflicts:", conflicts.len());
        let mut last = "";
        for (holder, path) in conflicts {
            if holder != last {
                summary.extend([" conflicts with ", holder, ":"]);
                last = holder;
            }
            summary.extend(["\n- ", &fields::display(path)]);
        }
        summary
    };
    Failure::new(409, "Conflict", format!("Apply failed with {summary}"), json!({"causes": causes}))
}
