//! Maps each field of another tool's file to its counterpart in a definition.

use std::{borrow::Cow, collections::BTreeSet};

use farrier_core::text::is_deceptive;
use farrier_yaml::{Node, Value};
use serde::Serialize;

/// Maximum number of fields that [`leaves`] returns.
const MAX_FIELDS: usize = 200;
/// Maximum length of a field's name, in characters.
const MAX_NAME_LENGTH: usize = 120;

/// The counterpart of a field, with a remark for the user.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Remark {
    /// The object or file that contains the field.
    pub origin: String,
    /// The field's path.
    pub field: String,
    /// The counterpart in a definition; `None` if there is none.
    pub becomes: Option<&'static str>,
    /// Remark for the user.
    pub says: Cow<'static, str>,
}

impl Remark {
    /// Makes a remark about a field of a drafted image.
    pub fn of_image(image: &str, field: &str, becomes: &'static str, says: String) -> Self {
        let (origin, field) = (format!("images/{image}.yaml"), field.to_owned());
        Self { origin, field, becomes: Some(becomes), says: says.into() }
    }
}

/// Makes a remark for each field, from the line of `table` with the longest path that matches the field or a
/// parent. A line has the form `PATH | COUNTERPART | REMARK`. Fields that match the same path share one
/// remark. The line with an empty path matches all other fields. A line without counterpart and remark
/// (`PATH | |`) suppresses the remark.
pub fn remarks(
    origin: &str,
    prefix: &str,
    fields: impl IntoIterator<Item = String>,
    table: &'static str,
) -> Vec<Remark> {
    let lines = table.lines().filter(|line| !line.starts_with('#'));
    let lines: Vec<Vec<&str>> = lines.map(|line| line.splitn(3, '|').map(str::trim).collect()).collect();
    let mut remarks: Vec<Remark> = Vec::new();
    for field in fields {
        let is_at_or_below = |path: &str| {
            let suffix = field.strip_prefix(path);
            path.is_empty()
                || suffix.is_some_and(|suffix| suffix.is_empty() || suffix.starts_with(['.', '[']))
        };
        let line = lines.iter().filter(|line| is_at_or_below(line[0])).max_by_key(|line| line[0].len());
        let (path, becomes, says) = match line.map(Vec::as_slice) {
            Some([_, "", ""]) => continue,
            Some([path, becomes, says]) => (*path, *becomes, *says),
            _ => ("", "", "farrier does not know this field"),
        };
        let field = format!("{prefix}{}", if path.is_empty() { &field } else { path });
        if !remarks.iter().any(|remark| remark.field == field) {
            let (origin, becomes) = (origin.to_owned(), Some(becomes).filter(|becomes| !becomes.is_empty()));
            remarks.push(Remark { origin, field, becomes, says: says.into() });
        }
    }
    remarks
}

/// Returns the paths of all fields with a value, with `[]` for list entries.
pub fn leaves(node: &Node) -> BTreeSet<String> {
    let mut leaves = BTreeSet::new();
    collect(node, String::new(), &mut leaves);
    leaves
}

fn collect(node: &Node, path: String, leaves: &mut BTreeSet<String>) {
    if leaves.len() >= MAX_FIELDS {
        return;
    }
    match node.value() {
        Value::Map(entries) => {
            for (key, value) in entries {
                let key = key.scalar().map_or("?", |key| key.text.as_str());
                let key: String = key.chars().filter(|c| !is_deceptive(*c)).take(MAX_NAME_LENGTH).collect();
                let dot = if path.is_empty() { "" } else { "." };
                collect(value, format!("{path}{dot}{key}"), leaves);
            }
        }
        Value::List(items) => items.iter().for_each(|item| collect(item, format!("{path}[]"), leaves)),
        Value::Null | Value::Removed => {}
        Value::Scalar(_) => drop(leaves.insert(path)),
    }
}

/// Follows a path of keys to a value that is not null.
pub fn value_at(node: &Node, path: &str) -> Option<Node> {
    path.split('.').try_fold(node.clone(), |node, key| node.get(key).filter(|value| !value.is_null()))
}

/// Returns the non-empty text of a scalar, even where YAML would parse another type.
pub fn text_at(node: &Node, path: &str) -> Option<String> {
    Some(value_at(node, path)?.scalar()?.text.clone()).filter(|text| !text.is_empty())
}

/// Returns the texts of a list.
pub fn texts_at(node: &Node, path: &str) -> Vec<String> {
    let items = value_at(node, path);
    let items = items.iter().filter_map(Node::items).flatten();
    items.filter_map(|item| Some(item.scalar()?.text.clone())).collect()
}
