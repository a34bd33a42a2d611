//! `farrier explain`: describes a field of a definition, from the JSON Schema.

use std::{collections::BTreeSet, fmt::Write as _};

use clap::{Args, ValueEnum as _};
use serde_json::{Map, Value};

use super::{
    CliError, Exit, Result, output,
    schema::{self, SchemaKind},
};

#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// Kind and field, such as driver-image.spec.runtime.base; `farrier schema` lists the kinds
    pub field: String,
}

/// Prints the schema's description of a field.
pub fn explain(args: &ExplainArgs) -> Result<Exit> {
    let mut path = args.field.split('.');
    let kind = path.next().unwrap_or_default();
    let schema = SchemaKind::from_str(kind, false).ok().and_then(schema::of);
    let schema = schema.ok_or_else(|| {
        CliError::hinted(
            format!("{:?} begins with no kind", args.field),
            "driver-image, kernel-family, announced-kernels, site or check-report, then fields: driver-image.spec.sources",
        )
    })?;
    let text = text(&schema, &args.field, &path.collect::<Vec<_>>()).map_err(|unknown| {
        let Unknown { field, known } = unknown;
        let known = if known.is_empty() {
            "it has no fields".to_owned()
        } else {
            format!("there is {}", known.join(", "))
        };
        CliError::hinted(format!("there is no field {field:?}"), known)
    })?;
    output::result(&text)?;
    Ok(Exit::Done)
}

/// An unknown field, with the known ones.
#[derive(Debug)]
struct Unknown {
    field: String,
    known: Vec<String>,
}

/// A field with its forms: one, unless the field can be written in several ways.
struct Field<'a> {
    description: &'a str,
    forms: Vec<&'a Map<String, Value>>,
}

/// Formats the page of the field at a path.
fn text(schema: &Value, name: &str, path: &[&str]) -> Result<String, Unknown> {
    let mut field = Field::of(schema, schema);
    for wanted in path {
        let fields = field.fields(schema);
        let found = fields.iter().find(|(name, _)| name == wanted);
        let unknown = || Unknown {
            field: (*wanted).to_owned(),
            known: fields.iter().map(|(name, _)| (*name).to_owned()).collect(),
        };
        field = Field::of(schema, found.ok_or_else(unknown)?.1);
    }
    let mut text = format!("{name} <{}>\n", field.kind(schema));
    text.push_str(&indented(field.description, "  "));
    let forms = field.entries(schema);
    for form in &forms {
        let alone = Field { description: "", forms: vec![form] };
        let fields = alone.fields(schema);
        let description = form.get("description").and_then(Value::as_str).unwrap_or_default();
        if forms.len() > 1 {
            let values = alone.values().unwrap_or_default();
            let _ = writeln!(text, "\none form: {}", [values.as_str(), description].concat().trim());
        }
        let required: Vec<&str> = form
            .get("required")
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .collect();
        for (name, value) in fields {
            let field = Field::of(schema, value);
            let required = if required.contains(&name) { ", required" } else { "" };
            let default =
                value.get("default").map(|default| format!(", {default} when absent")).unwrap_or_default();
            let _ = writeln!(text, "\n  {name} <{}{required}{default}>", field.kind(schema));
            text.push_str(&indented(field.description, "    "));
        }
    }
    Ok(text)
}

impl<'a> Field<'a> {
    /// Returns the field at a place of the schema, with references resolved.
    fn of(schema: &'a Value, place: &'a Value) -> Self {
        let mut forms = Vec::new();
        collect(schema, place, &mut forms);
        let words = |value: &'a Value| value.get("description").and_then(Value::as_str);
        let description = words(place).or_else(|| words(referred(schema, place)?)).unwrap_or_default();
        Self { description, forms }
    }

    /// Returns the field's forms; for a list, the forms of its entries.
    fn entries(&self, schema: &'a Value) -> Vec<&'a Map<String, Value>> {
        let entries = |form: &&'a Map<String, Value>| match form.get("items") {
            Some(items) => Field::of(schema, items).entries(schema),
            None => vec![*form],
        };
        self.forms.iter().flat_map(entries).collect()
    }

    /// Returns the field's fields; for a list, the fields of an entry.
    fn fields(&self, schema: &'a Value) -> Vec<(&'a str, &'a Value)> {
        let mut fields: Vec<(&'a str, &'a Value)> = Vec::new();
        for form in self.entries(schema) {
            let properties = form.get("properties").and_then(Value::as_object);
            fields.extend(properties.into_iter().flatten().map(|(name, value)| (name.as_str(), value)));
        }
        let mut seen = BTreeSet::new();
        fields.retain(|(name, _)| seen.insert(*name));
        fields
    }

    /// Returns the type in words: `string`, `list of object`, `image | per-kernel`.
    fn kind(&self, schema: &'a Value) -> String {
        let kind = |form: &&Map<String, Value>| {
            let own = Field { description: "", forms: vec![form] };
            if let Some(values) = own.values() {
                return values;
            }
            if let Some(items) = form.get("items") {
                return format!("list of {}", Field::of(schema, items).kind(schema));
            }
            let names = match form.get("type") {
                Some(Value::String(name)) => vec![name.as_str()],
                Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).collect(),
                _ => vec!["any"],
            };
            names.into_iter().filter(|name| *name != "null").collect::<Vec<_>>().join(" | ")
        };
        let mut kinds: Vec<String> = self.forms.iter().map(kind).collect();
        kinds.dedup();
        kinds.join(" | ")
    }

    /// Returns the allowed values, if the schema enumerates them.
    fn values(&self) -> Option<String> {
        let [form] = self.forms.as_slice() else { return None };
        let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        if let Some(value) = form.get("const") {
            return Some(text(value));
        }
        let values = form.get("enum").and_then(Value::as_array)?;
        Some(values.iter().filter(|value| !value.is_null()).map(text).collect::<Vec<_>>().join(" | "))
    }
}

/// Collects the forms at a place: resolves references and expands alternatives.
fn collect<'a>(schema: &'a Value, place: &'a Value, forms: &mut Vec<&'a Map<String, Value>>) {
    if let Some(referred) = referred(schema, place) {
        return collect(schema, referred, forms);
    }
    let several = ["oneOf", "anyOf", "allOf"].iter().find_map(|key| place.get(key)?.as_array());
    match (several, place.as_object()) {
        (Some(several), _) => several.iter().for_each(|form| collect(schema, form, forms)),
        (None, Some(form)) if form.get("type") != Some(&Value::from("null")) => forms.push(form),
        (None, _) => {}
    }
}

fn referred<'a>(schema: &'a Value, place: &Value) -> Option<&'a Value> {
    schema.pointer(place.get("$ref")?.as_str()?.strip_prefix('#')?)
}

fn indented(text: &str, by: &str) -> String {
    text.lines().flat_map(|line| [by, line, "\n"]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(field: &str) -> Result<String, Unknown> {
        let path: Vec<&str> = field.split('.').skip(1).collect();
        text(&schema::of(SchemaKind::DriverImage).unwrap(), field, &path)
    }

    #[test]
    fn fields_are_explained_as_the_schema_describes_them() {
        insta::assert_snapshot!(of("driver-image.spec.nodes").unwrap(), @"
        driver-image.spec.nodes <object>
          The nodes that the image is for.

          matchLabels <object, {} when absent>
            Every one of these labels must be there with this value.

          unlessLabels <object>
            Nodes that have a driver of their own, and are left alone: those of which one of these labels has one of its
            values.
        ");
        insta::assert_snapshot!(of("driver-image.spec.sources.from.url").unwrap(), @"
        driver-image.spec.sources.from.url <object>

          sha256 <string, required>
            sha256 of the file, hexadecimal.

          url <string, required>
            The address, `http` or `https`.
        ");
        insta::assert_snapshot!(of("driver-image.spec.check").unwrap(), @r#"
        driver-image.spec.check <object>
          What the load check does and accepts.

          boot <boolean, false when absent>
            Boot the kernel in a virtual machine and load the modules there, before anything is published.

          unknown <allow | deny, "allow" when absent>
            What becomes of a payload of which it is not known whether it loads.
        "#);
        let rollout = of("driver-image.spec.rollout").unwrap();
        assert!(
            rollout.contains("\none form: A DaemonSet of the cluster whose nodes share one kernel."),
            "{rollout}"
        );
    }

    #[test]
    fn an_unknown_field_names_those_that_there_are() {
        let Unknown { field, known } = of("driver-image.spec.nodes.labels").unwrap_err();
        assert_eq!(
            (field.as_str(), known),
            ("labels", vec!["matchLabels".to_owned(), "unlessLabels".to_owned()])
        );
        assert!(of("driver-image.spec.version.x.y").unwrap_err().known.contains(&"source".to_owned()));
    }

    /// Every field of every kind has a page, and no path through the fields is cyclic.
    #[test]
    fn every_field_has_a_page() {
        for kind in SchemaKind::value_variants() {
            let Some(schema) = schema::of(*kind) else { continue };
            let mut open = vec![(Field::of(&schema, &schema), vec!["top"])];
            while let Some((field, path)) = open.pop() {
                for (name, value) in field.fields(&schema) {
                    let inner = Field::of(&schema, value);
                    let path = [path.as_slice(), &[name]].concat();
                    assert!(path.len() < 12, "cyclic path: {path:?}");
                    assert!(!inner.forms.is_empty() && !inner.kind(&schema).is_empty(), "{kind:?} {path:?}");
                    open.push((inner, path));
                }
            }
        }
    }
}
