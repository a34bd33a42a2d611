//! A page for a kind of definition: every field of its JSON Schema with type, default and an example.

use std::{
    collections::{BTreeMap, VecDeque},
    fmt::Write as _,
};

use serde_json::{Map, Value};

/// A page in the making.
pub struct Page<'a> {
    definitions: &'a Map<String, Value>,
    /// First example of each field, by object type and field.
    examples: BTreeMap<(String, String), String>,
    /// Fields without an example.
    pub missing: Vec<String>,
    /// Object types whose fields are still to be written, with their titles.
    queue: VecDeque<(String, &'a Value)>,
    seen: Vec<String>,
}

impl<'a> Page<'a> {
    /// Collects the examples in these definitions.
    pub fn new(schema: &'a Value, kind: &'a str, examples: &[Value]) -> Self {
        let definitions = schema["$defs"].as_object().unwrap();
        let mut page = Self {
            definitions,
            examples: BTreeMap::new(),
            missing: Vec::new(),
            queue: VecDeque::from([(kind.to_owned(), schema)]),
            seen: vec![kind.to_owned()],
        };
        for example in examples {
            page.collect(kind, schema, example);
        }
        page
    }

    /// Returns the tables of all object types, in the order in which fields refer to them.
    pub fn text(&mut self) -> String {
        let mut text = String::new();
        while let Some((title, schema)) = self.queue.pop_front() {
            write!(text, "\n## {title}\n").unwrap();
            if let Some(description) = schema["description"].as_str() {
                write!(text, "\n{}\n", wrapped(description)).unwrap();
            }
            if schema["properties"].is_object() {
                self.fields(&title, schema, &mut text);
            }
            for variant in variants(schema).iter().filter(|_| schema["properties"].is_null()) {
                self.variant(&title, variant, &mut text);
            }
        }
        text
    }

    /// Writes one of an object's forms.
    fn variant(&mut self, title: &str, variant: &'a Value, text: &mut String) {
        let description = variant["description"].as_str().unwrap_or_default();
        let properties = self.resolved(variant).1["properties"].is_object();
        if !properties || variant["$ref"].is_string() {
            writeln!(text, "\n- {}: {}", self.kind_of(title, variant), cell(description)).unwrap();
            return;
        }
        let name = label(variant);
        write!(text, "\n### {title}: {name}\n\n{}\n", wrapped(description)).unwrap();
        self.fields(&format!("{title}: {name}"), variant, text);
    }

    /// Writes the table of an object's fields.
    fn fields(&mut self, owner: &str, schema: &'a Value, text: &mut String) {
        text.push_str("\n| field | type | default | meaning | example |\n|---|---|---|---|---|\n");
        let required = schema["required"].as_array().cloned().unwrap_or_default();
        for (name, field) in schema["properties"].as_object().unwrap() {
            let kind = self.kind_of(&format!("{owner}.{name}"), field);
            let example = self.examples.get(&(owner.to_owned(), name.clone())).cloned();
            if example.is_none() {
                self.missing.push(format!("{owner}.{name}"));
            }
            let is_required = required.iter().any(|required| required == name.as_str());
            let default = match &field["default"] {
                _ if is_required => "required".to_owned(),
                Value::Null => String::new(),
                default => code(&flow(default)),
            };
            let (_, schema) = self.resolved(field);
            let meaning =
                field["description"].as_str().or(schema["description"].as_str()).unwrap_or_default();
            let example = match example {
                // The tables of its fields have examples.
                Some(example) if example.len() > WIDTH && kind.contains("](#") => "its fields".to_owned(),
                example => example.map(|example| code(&example)).unwrap_or_default(),
            };
            let meaning = cell(meaning) + &values(schema);
            writeln!(text, "| `{name}` | {kind} | {default} | {meaning} | {example} |").unwrap();
        }
    }

    /// Describes the type of a value, and queues the object types in it. `place` names a type without a name.
    fn kind_of(&mut self, place: &str, schema: &'a Value) -> String {
        let (name, schema) = self.resolved(schema);
        let name = name.unwrap_or_else(|| place.to_owned());
        if has_fields(schema) {
            if !self.seen.contains(&name) {
                self.seen.push(name.clone());
                self.queue.push_back((name.clone(), schema));
            }
            return format!("[{name}](#{})", slug(&name));
        }
        if let Some(value) = schema.get("const") {
            return code(&flow(value));
        }
        let forms: Vec<&Value> = variants(schema).iter().filter(|form| form["type"] != "null").collect();
        if !forms.is_empty() && schema["properties"].is_null() {
            let mut kinds: Vec<String> = forms.into_iter().map(|form| self.kind_of(place, form)).collect();
            kinds.dedup();
            return kinds.join(" or ");
        }
        let kind = match &schema["type"] {
            Value::Array(kinds) => kinds.iter().find(|kind| *kind != "null").unwrap(),
            kind => kind,
        };
        match kind.as_str() {
            Some("array") => format!("list of {}", self.kind_of(place, &schema["items"])),
            Some("object") => format!("map of {}", self.kind_of(place, &schema["additionalProperties"])),
            Some(kind) => kind.to_owned(),
            None => "any value".to_owned(),
        }
    }

    /// Follows a reference to a named type, also where the value may be null.
    fn resolved(&self, schema: &'a Value) -> (Option<String>, &'a Value) {
        let forms = schema["anyOf"].as_array().map(Vec::as_slice).unwrap_or_default();
        let schema = match forms {
            [form, null] if null["type"] == "null" => form,
            _ => schema,
        };
        match schema["$ref"].as_str().and_then(|reference| reference.strip_prefix("#/$defs/")) {
            Some(name) => (Some(name.to_owned()), &self.definitions[name]),
            None => (None, schema),
        }
    }

    /// Notes the values of an example, by the types that they have.
    fn collect(&mut self, owner: &str, schema: &'a Value, value: &Value) {
        let (name, schema) = self.resolved(schema);
        let owner = name.unwrap_or_else(|| owner.to_owned());
        if schema["properties"].is_null()
            && let Some(form) = variants(schema).iter().find(|form| self.fits(form, value))
        {
            let owner =
                if form["properties"].is_object() { format!("{owner}: {}", label(form)) } else { owner };
            return self.collect(&owner, form, value);
        }
        for (key, value) in value.as_object().into_iter().flatten() {
            let properties = schema["properties"].as_object();
            if let Some(field) = properties.and_then(|properties| properties.get(key)) {
                self.note(&owner, key, value);
                self.collect(&format!("{owner}.{key}"), field, value);
            } else {
                self.collect(&owner, &schema["additionalProperties"], value);
            }
        }
        for value in value.as_array().into_iter().flatten() {
            self.collect(&owner, &schema["items"], value);
        }
    }

    /// Keeps the first example that fits a table, else the shortest one.
    fn note(&mut self, owner: &str, field: &str, value: &Value) {
        let example = flow(value);
        let known =
            self.examples.entry((owner.to_owned(), field.to_owned())).or_insert_with(|| example.clone());
        if known.chars().count() > WIDTH && example.len() < known.len() {
            *known = example;
        }
    }

    /// Whether a value has this form.
    fn fits(&self, form: &'a Value, value: &Value) -> bool {
        let (_, form) = self.resolved(form);
        if let Some(wanted) = form.get("const") {
            return wanted == value;
        }
        if let Some(properties) = form["properties"].as_object() {
            let Some(object) = value.as_object() else { return false };
            let required = form["required"].as_array().into_iter().flatten();
            return required.into_iter().all(|name| object.contains_key(name.as_str().unwrap()))
                && object.iter().all(|(name, value)| {
                    properties
                        .get(name)
                        .is_some_and(|field| field.get("const").is_none_or(|wanted| wanted == value))
                });
        }
        if !variants(form).is_empty() {
            return variants(form).iter().any(|form| self.fits(form, value));
        }
        match form["type"].as_str() {
            Some("array") => value.is_array(),
            Some("object") => value.is_object(),
            Some("string") => value.is_string(),
            Some("integer" | "number") => value.is_number(),
            Some("boolean") => value.is_boolean(),
            _ => false,
        }
    }
}

/// Longest example in a table, in characters.
const WIDTH: usize = 90;

/// Whether a type has fields, in any of its forms.
fn has_fields(schema: &Value) -> bool {
    let has = |form: &Value| form["properties"].is_object();
    has(schema) || variants(schema).iter().any(has)
}

/// Returns the anchor of a heading.
fn slug(title: &str) -> String {
    let kept = title.to_lowercase().replace(' ', "-");
    kept.chars().filter(|letter| letter.is_alphanumeric() || "-_".contains(*letter)).collect()
}

/// Describes the values of an enum, one a line.
fn values(schema: &Value) -> String {
    let values = variants(schema).iter().filter_map(|form| {
        let description = form["description"].as_str()?;
        Some(format!("<br>{}: {}", code(form["const"].as_str()?), cell(description)))
    });
    if variants(schema).len() < 2 { String::new() } else { values.collect() }
}

fn variants(schema: &Value) -> &[Value] {
    let forms = schema["oneOf"].as_array().or(schema["anyOf"].as_array());
    forms.map(Vec::as_slice).unwrap_or_default()
}

/// Names one form of an object: by its constant field, else by the fields that it must have.
fn label(form: &Value) -> String {
    let properties = form["properties"].as_object().unwrap();
    let constant = properties.values().find_map(|field| field["const"].as_str());
    let required = form["required"].as_array().into_iter().flatten();
    let required: Vec<&str> = required.filter_map(Value::as_str).collect();
    constant.map_or_else(|| required.join(" and "), str::to_owned)
}

/// Writes a value as YAML on one line.
fn flow(value: &Value) -> String {
    match value {
        Value::Object(object) => {
            // A map keeps its order or sorts its keys, depending on a feature that any crate may enable.
            let sorted: BTreeMap<_, _> = object.iter().collect();
            let entries = sorted.into_iter().map(|(key, value)| format!("{key}: {}", flow(value)));
            format!("{{{}}}", entries.collect::<Vec<_>>().join(", "))
        }
        Value::Array(list) => format!("[{}]", list.iter().map(flow).collect::<Vec<_>>().join(", ")),
        Value::String(text) if is_plain(text) => text.clone(),
        value => value.to_string(),
    }
}

/// Whether a text needs no quotes in YAML.
fn is_plain(text: &str) -> bool {
    text.parse::<f64>().is_err()
        && text.starts_with(|first: char| first.is_ascii_alphanumeric() || first == '/')
        && text.chars().all(|other| other.is_ascii_alphanumeric() || "-_./+ ".contains(other))
        && !["true", "false", "yes", "no", "on", "off", "null"].contains(&text)
}

/// Marks a text as code in a table, and cuts a long one.
fn code(text: &str) -> String {
    let cut: String = text.chars().take(WIDTH).collect();
    let dots = if cut.len() < text.len() { "..." } else { "" };
    format!("`{}{dots}`", cut.replace('|', "\\|"))
}

/// Puts a description into a cell of a table.
fn cell(text: &str) -> String {
    let mut lines = String::new();
    for line in text.lines() {
        match line.strip_prefix("- ") {
            Some(item) => write!(lines, "<br>{item}").unwrap(),
            None if lines.is_empty() => lines.push_str(line),
            None => write!(lines, " {}", line.trim()).unwrap(),
        }
    }
    lines.trim().replace('|', "\\|")
}

/// Puts a description into paragraphs.
fn wrapped(text: &str) -> String {
    text.lines().map(str::trim_end).collect::<Vec<_>>().join("\n")
}
