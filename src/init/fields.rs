//! Pure: what becomes of each field of another tool's form.

use std::collections::BTreeSet;

use serde::Serialize;

use crate::{
    text::is_deceptive,
    yaml::{Node, Value},
};

/// More fields of one form are not told of one by one.
const MOST: usize = 200;
/// Characters of a field's name.
const NAME: usize = 120;

/// What becomes of a field.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Remark {
    /// Where it stands.
    pub origin: String,
    /// The field.
    pub field: String,
    /// What it becomes here; nothing where it has no counterpart.
    pub becomes: Option<&'static str>,
    /// What there is to say of it.
    pub says: &'static str,
}

/// Every field, or one that it stands below, by the line of a table whose path fits most of its own. The lines: a path, what becomes
/// of the field, what there is to say of it. One without a path is for all other fields; of one with nothing else nothing is said.
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
        let fits = |path: &str| {
            let rest = field.strip_prefix(path);
            path.is_empty() || rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
        };
        let line = lines.iter().filter(|line| fits(line[0])).max_by_key(|line| line[0].len());
        let (path, becomes, says) = match line.map(Vec::as_slice) {
            Some([_, "", ""]) => continue,
            Some([path, becomes, says]) => (*path, *becomes, *says),
            _ => ("", "", "farrier does not know this field"),
        };
        let field = format!("{prefix}{}", if path.is_empty() { &field } else { path });
        if !remarks.iter().any(|known| known.field == field) {
            let (origin, becomes) = (origin.to_owned(), Some(becomes).filter(|becomes| !becomes.is_empty()));
            remarks.push(Remark { origin, field, becomes, says });
        }
    }
    remarks
}

/// The paths of all fields that say something, `[]` for the entries of lists.
pub fn leaves(node: &Node) -> BTreeSet<String> {
    let mut leaves = BTreeSet::new();
    collect(node, String::new(), &mut leaves);
    leaves
}

fn collect(node: &Node, path: String, leaves: &mut BTreeSet<String>) {
    if leaves.len() >= MOST {
        return;
    }
    match node.value() {
        Value::Map(entries) => {
            for (key, value) in entries {
                let key = key.scalar().map_or("?", |key| key.text.as_str());
                let key: String = key.chars().filter(|c| !is_deceptive(*c)).take(NAME).collect();
                let dot = if path.is_empty() { "" } else { "." };
                collect(value, format!("{path}{dot}{key}"), leaves);
            }
        }
        Value::List(items) => items.iter().for_each(|item| collect(item, format!("{path}[]"), leaves)),
        Value::Null | Value::Removed => {}
        Value::Scalar(_) => drop(leaves.insert(path)),
    }
}

/// Follows keys as far as there is something.
pub fn at(node: &Node, path: &str) -> Option<Node> {
    path.split('.').try_fold(node.clone(), |node, key| node.get(key).filter(|value| !value.is_null()))
}

/// A text, whatever a reader would take it for.
pub fn text_at(node: &Node, path: &str) -> Option<String> {
    Some(at(node, path)?.scalar()?.text.clone()).filter(|text| !text.is_empty())
}

/// The texts of a list.
pub fn texts_at(node: &Node, path: &str) -> Vec<String> {
    let items = at(node, path);
    let items = items.iter().filter_map(Node::items).flatten();
    items.filter_map(|item| Some(item.scalar()?.text.clone())).collect()
}
