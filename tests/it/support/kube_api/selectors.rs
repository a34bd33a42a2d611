//! Label and field selectors, and pods' node selection.

use std::collections::BTreeMap;

use serde_json::Value;

use super::kinds::Kind;

type Labels = BTreeMap<String, String>;

/// One requirement of a label selector.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Requirement {
    In(String, Vec<String>),
    NotIn(String, Vec<String>),
    Exists(String),
    DoesNotExist(String),
}

impl Requirement {
    fn matches(&self, labels: &Labels) -> bool {
        match self {
            Self::In(key, values) => labels.get(key).is_some_and(|value| values.contains(value)),
            Self::NotIn(key, values) => labels.get(key).is_none_or(|value| !values.contains(value)),
            Self::Exists(key) => labels.contains_key(key),
            Self::DoesNotExist(key) => !labels.contains_key(key),
        }
    }
}

/// `labelSelector` and `fieldSelector` of a list or watch.
#[derive(Clone, Debug, Default)]
pub struct Selector {
    labels: Vec<Requirement>,
    fields: Vec<(String, String, bool)>,
}

/// An object that selectors can match.
pub trait Selectable {
    fn labels(&self) -> &Labels;
    /// Returns the value of a field that [`is_selectable`] accepts.
    fn field(&self, name: &str) -> Option<&str>;
}

/// Returns whether this field can select objects of this kind.
fn is_selectable(kind: &Kind, field: &str) -> bool {
    const OBJECT: [&str; 7] =
        ["kind", "namespace", "name", "uid", "apiVersion", "resourceVersion", "fieldPath"];
    let of_object = |prefix: &str| field.strip_prefix(prefix).is_some_and(|field| OBJECT.contains(&field));
    if matches!(field, "metadata.name" | "metadata.namespace") {
        return true;
    }
    match (kind.group.as_str(), kind.kind.as_str()) {
        ("", "Event") => {
            of_object("involvedObject.")
                || matches!(field, "reason" | "reportingComponent" | "source" | "type")
        }
        ("events.k8s.io", "Event") => {
            of_object("regarding.") || matches!(field, "reason" | "reportingController" | "type")
        }
        ("", "Pod") => matches!(field, "spec.nodeName" | "spec.restartPolicy" | "status.phase"),
        _ => false,
    }
}

impl Selector {
    /// Parses selectors; `Err` contains the server's message.
    pub fn parse(kind: &Kind, labels: &str, fields: &str) -> Result<Self, String> {
        let mut selector = Self::default();
        for term in split_outside_parentheses(labels) {
            selector.labels.push(requirement(term.trim())?);
        }
        for term in fields.split(',').filter(|term| !term.is_empty()) {
            let (name, value, equal) = if let Some((name, value)) = term.split_once("!=") {
                (name, value, false)
            } else if let Some((name, value)) = term.split_once("==").or_else(|| term.split_once('=')) {
                (name, value, true)
            } else {
                return Err(format!("invalid field selector: {term}"));
            };
            if !is_selectable(kind, name) {
                return Err(format!("field label not supported: {name}"));
            }
            selector.fields.push((name.to_owned(), value.to_owned(), equal));
        }
        Ok(selector)
    }

    pub fn matches(&self, object: &impl Selectable) -> bool {
        self.labels.iter().all(|requirement| requirement.matches(object.labels()))
            && self
                .fields
                .iter()
                .all(|(name, value, equal)| (object.field(name) == Some(value.as_str())) == *equal)
    }
}

fn split_outside_parentheses(text: &str) -> Vec<&str> {
    let (mut depth, mut from, mut found) = (0, 0, Vec::new());
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            b'(' => depth += 1,
            b')' => depth -= 1,
            b',' if depth == 0 => {
                found.push(&text[from..at]);
                from = at + 1;
            }
            _ => {}
        }
    }
    found.push(&text[from..]);
    found.retain(|term| !term.trim().is_empty());
    found
}

fn requirement(term: &str) -> Result<Requirement, String> {
    let values = |list: &str| -> Vec<String> {
        list.trim().trim_matches(['(', ')']).split(',').map(|value| value.trim().to_owned()).collect()
    };
    let key = |key: &str| key.trim().to_owned();
    Ok(if let Some((name, list)) = term.split_once(" notin ") {
        Requirement::NotIn(key(name), values(list))
    } else if let Some((name, list)) = term.split_once(" in ") {
        Requirement::In(key(name), values(list))
    } else if let Some((name, value)) = term.split_once("!=") {
        Requirement::NotIn(key(name), vec![key(value)])
    } else if let Some((name, value)) = term.split_once("==").or_else(|| term.split_once('=')) {
        Requirement::In(key(name), vec![key(value)])
    } else if let Some(name) = term.strip_prefix('!') {
        Requirement::DoesNotExist(key(name))
    } else if term.contains(char::is_whitespace) {
        return Err(format!("unable to parse requirement: {term}"));
    } else {
        Requirement::Exists(key(term))
    })
}

/// Matches a `LabelSelector` object. An absent selector matches nothing, an empty one everything.
pub fn label_selector(selector: &Value, labels: &Labels) -> bool {
    let Some(selector) = selector.as_object() else { return false };
    let of = |name: &str| selector.get(name);
    let equal = of("matchLabels").and_then(Value::as_object).into_iter().flatten();
    let expressions = of("matchExpressions").and_then(Value::as_array).into_iter().flatten();
    equal.into_iter().all(|(key, value)| labels.get(key).map(String::as_str) == value.as_str())
        && expressions.into_iter().all(|term| expression(term, |key| labels.get(key).cloned()))
}

/// Returns whether `nodeSelector` and the required node affinity of a pod's spec allow the node.
pub fn node_allowed(pod: &Value, name: &str, labels: &Labels) -> bool {
    let selector = pod["nodeSelector"].as_object().into_iter().flatten();
    let selected =
        selector.into_iter().all(|(key, value)| labels.get(key).map(String::as_str) == value.as_str());
    let required = &pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
    let terms = required["nodeSelectorTerms"].as_array();
    selected && terms.is_none_or(|terms| terms.iter().any(|term| node_term(term, name, labels)))
}

/// Returns whether the pods of a DaemonSet tolerate all taints that would keep them off a node.
pub fn taints_tolerated(pod: &Value, taints: &Value) -> bool {
    let tolerations = pod["tolerations"].as_array().cloned().unwrap_or_default();
    let tolerated = |taint: &Value| {
        let of_state = taint["key"].as_str().is_some_and(|key| key.starts_with("node.kubernetes.io/"));
        of_state
            || tolerations.iter().any(|toleration| {
                let is = |field: &str| toleration[field].is_null() || toleration[field] == taint[field];
                is("key") && is("effect") && (toleration["operator"] == "Exists" || is("value"))
            })
    };
    let taints = taints.as_array().into_iter().flatten();
    taints.into_iter().filter(|taint| taint["effect"] != "PreferNoSchedule").all(tolerated)
}

fn node_term(term: &Value, name: &str, labels: &Labels) -> bool {
    let of = |list: &str| term[list].as_array().cloned().unwrap_or_default();
    let (expressions, fields) = (of("matchExpressions"), of("matchFields"));
    // An empty term matches no node.
    !(expressions.is_empty() && fields.is_empty())
        && expressions.iter().all(|term| expression(term, |key| labels.get(key).cloned()))
        && fields.iter().all(|term| expression(term, |key| (key == "metadata.name").then(|| name.to_owned())))
}

fn expression(term: &Value, value: impl Fn(&str) -> Option<String>) -> bool {
    let value = value(term["key"].as_str().unwrap_or_default());
    let values = term["values"].as_array().cloned().unwrap_or_default();
    let listed = |value: &String| values.iter().any(|listed| listed.as_str() == Some(value));
    let bound = || values.first().and_then(Value::as_str).and_then(|bound| bound.parse::<i64>().ok());
    let number = || value.as_ref().and_then(|value| value.parse::<i64>().ok());
    match term["operator"].as_str() {
        Some("In") => value.as_ref().is_some_and(listed),
        Some("NotIn") => !value.as_ref().is_some_and(listed),
        Some("Exists") => value.is_some(),
        Some("DoesNotExist") => value.is_none(),
        Some("Gt") => number().zip(bound()).is_some_and(|(number, bound)| number > bound),
        Some("Lt") => number().zip(bound()).is_some_and(|(number, bound)| number < bound),
        _ => false,
    }
}
