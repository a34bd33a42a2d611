//! Node affinity of a pod template, and the nodes that it admits (Kubernetes API, `NodeSelectorTerm`).

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use super::reach::LabelState;

/// Required part of a pod's node affinity.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum NodeAffinity {
    /// No affinity: every node is admitted.
    #[default]
    Any,
    /// A node must satisfy at least one of these terms.
    Terms(Vec<SelectorTerm>),
    /// Affinity that farrier does not understand, with a description. Nothing is rewritten then.
    Unsupported(String),
}

/// One term: a node must satisfy all of its requirements. An empty term admits no node. Serialized in the API's format.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SelectorTerm {
    /// `matchExpressions`, over labels.
    #[serde(rename = "matchExpressions", deserialize_with = "list", skip_serializing_if = "Vec::is_empty")]
    pub expressions: Vec<Requirement>,
    /// `matchFields`; only `metadata.name` exists.
    #[serde(rename = "matchFields", deserialize_with = "list", skip_serializing_if = "Vec::is_empty")]
    pub fields: Vec<Requirement>,
}

/// One requirement of a term.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Requirement {
    /// Key of the label, or name of the field.
    pub key: String,
    /// Comparison operator.
    pub operator: Operator,
    /// Values to compare with.
    #[serde(default, deserialize_with = "list", skip_serializing_if = "Vec::is_empty")]
    pub values: Vec<String>,
}

/// Comparison operator of a requirement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Operator {
    /// The label has one of the values.
    In,
    /// The label has none of the values, or is absent.
    NotIn,
    /// The label is present.
    Exists,
    /// The label is absent.
    DoesNotExist,
    /// The label is an integer above the value.
    Gt,
    /// The label is an integer below the value.
    Lt,
}

/// Reads a list; a null list is empty.
fn list<'de, T: Deserialize<'de>, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<T>, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

impl Requirement {
    fn admits(&self, label: LabelState<'_>) -> bool {
        let value = match label {
            LabelState::Unknown => return true,
            LabelState::Present(value) => Some(value),
            LabelState::Absent => None,
        };
        let is_listed = |value: &str| self.values.iter().any(|listed| listed == value);
        match self.operator {
            Operator::In => value.is_some_and(is_listed),
            Operator::NotIn => !value.is_some_and(is_listed),
            Operator::Exists => value.is_some(),
            Operator::DoesNotExist => value.is_none(),
            Operator::Gt => self.integers(value).is_some_and(|(value, bound)| value > bound),
            Operator::Lt => self.integers(value).is_some_and(|(value, bound)| value < bound),
        }
    }

    fn integers(&self, value: Option<&str>) -> Option<(i64, i64)> {
        let [bound] = self.values.as_slice() else { return None };
        Some((value?.parse().ok()?, bound.parse().ok()?))
    }
}

impl SelectorTerm {
    fn admits<'a>(&self, name: &'a str, label: impl Fn(&str) -> LabelState<'a>) -> bool {
        let Self { expressions, fields } = self;
        let field = |key: &str| {
            if key == "metadata.name" { LabelState::Present(name) } else { LabelState::Absent }
        };
        !(expressions.is_empty() && fields.is_empty())
            && expressions.iter().all(|expression| expression.admits(label(&expression.key)))
            && fields.iter().all(|requirement| requirement.admits(field(&requirement.key)))
    }
}

impl NodeAffinity {
    /// Reads the required part of a node affinity in the API's format.
    pub fn required(affinity: &Value) -> Self {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Required {
            #[serde(default, deserialize_with = "list")]
            node_selector_terms: Vec<SelectorTerm>,
        }
        let required = &affinity["requiredDuringSchedulingIgnoredDuringExecution"];
        if required.is_null() {
            return Self::Any;
        }
        match Required::deserialize(required) {
            // The API server rejects an empty list, so the author's intent is unclear.
            Ok(Required { node_selector_terms }) if node_selector_terms.is_empty() => {
                Self::Unsupported("no nodeSelectorTerms".to_owned())
            }
            Ok(Required { node_selector_terms }) => Self::Terms(node_selector_terms),
            Err(error) => Self::Unsupported(error.to_string()),
        }
    }

    /// Whether the affinity admits a node of this name and with these labels. An affinity that is not understood admits
    /// no node.
    pub(super) fn admits<'a>(&self, name: &'a str, label: impl Fn(&str) -> LabelState<'a>) -> bool {
        match self {
            Self::Any => true,
            Self::Unsupported(_) => false,
            Self::Terms(terms) => terms.iter().any(|term| term.admits(name, &label)),
        }
    }

    /// Whether the affinity selects nodes by name.
    pub(crate) fn names_nodes(&self) -> bool {
        matches!(self, Self::Terms(terms) if terms.iter().any(|term| !term.fields.is_empty()))
    }

    /// Returns the label keys that the affinity uses.
    pub fn label_keys(&self) -> impl Iterator<Item = &str> {
        let terms = match self {
            Self::Terms(terms) => terms.as_slice(),
            Self::Any | Self::Unsupported(_) => &[],
        };
        terms.iter().flat_map(|term| &term.expressions).map(|requirement| requirement.key.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn requirement(key: &str, operator: Operator, values: &[&str]) -> Requirement {
        Requirement {
            key: key.to_owned(),
            operator,
            values: values.iter().map(|v| (*v).to_owned()).collect(),
        }
    }

    fn term(expressions: Vec<Requirement>) -> SelectorTerm {
        SelectorTerm { expressions, fields: Vec::new() }
    }

    /// Whether the affinity admits node `n1`.
    fn admits(affinity: &NodeAffinity) -> bool {
        affinity.admits("n1", |key| match key {
            "zone" => LabelState::Present("a"),
            "cores" => LabelState::Present("16"),
            _ => LabelState::Absent,
        })
    }

    #[test]
    fn operators_compare_as_the_scheduler_does() {
        let cases = [
            (requirement("zone", Operator::In, &["b", "a"]), true),
            (requirement("zone", Operator::In, &["b"]), false),
            (requirement("none", Operator::In, &["b"]), false),
            (requirement("zone", Operator::NotIn, &["a"]), false),
            (requirement("none", Operator::NotIn, &["a"]), true),
            (requirement("zone", Operator::Exists, &[]), true),
            (requirement("zone", Operator::DoesNotExist, &[]), false),
            (requirement("none", Operator::DoesNotExist, &[]), true),
            (requirement("cores", Operator::Gt, &["8"]), true),
            (requirement("cores", Operator::Lt, &["16"]), false),
            (requirement("zone", Operator::Gt, &["8"]), false),
            (requirement("cores", Operator::Gt, &["8", "9"]), false),
        ];
        for (requirement, expected) in cases {
            let affinity = NodeAffinity::Terms(vec![term(vec![requirement.clone()])]);
            assert_eq!(admits(&affinity), expected, "{requirement:?}");
        }
    }

    #[test]
    fn terms_are_alternatives_and_requirements_are_not() {
        let a = requirement("zone", Operator::In, &["a"]);
        let b = requirement("zone", Operator::In, &["b"]);
        let both = NodeAffinity::Terms(vec![term(vec![a.clone(), b.clone()])]);
        let either = NodeAffinity::Terms(vec![term(vec![b]), term(vec![a])]);
        assert_eq!((admits(&both), admits(&either)), (false, true));
    }

    #[test]
    fn empty_terms_admit_nothing() {
        assert!(!admits(&NodeAffinity::Terms(Vec::new())));
        assert!(!admits(&NodeAffinity::Terms(vec![SelectorTerm::default()])));
    }

    #[test]
    fn only_the_name_is_a_field() {
        let by_field = |key: &str, operator| {
            NodeAffinity::Terms(vec![SelectorTerm {
                expressions: Vec::new(),
                fields: vec![requirement(key, operator, &["n1"])],
            }])
        };
        assert!(admits(&by_field("metadata.name", Operator::In)));
        assert!(!admits(&by_field("metadata.name", Operator::NotIn)));
        assert!(!admits(&by_field("metadata.uid", Operator::In)));
        assert!(admits(&by_field("metadata.uid", Operator::NotIn)));
    }

    #[test]
    fn an_affinity_is_read_in_the_form_of_the_api() {
        let affinity = |operator: &str| {
            NodeAffinity::required(&serde_json::json!({
                "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
                    {"matchExpressions": [{"key": "zone", "operator": operator, "values": ["a"]}]},
                ]},
            }))
        };
        assert!(admits(&affinity("In")));
        let NodeAffinity::Unsupported(why) = affinity("Near") else { panic!("understood") };
        assert!(why.contains("Near") && !admits(&affinity("Near")), "{why}");
        assert_eq!(NodeAffinity::required(&Value::Null), NodeAffinity::Any);
        let empty = serde_json::json!({"requiredDuringSchedulingIgnoredDuringExecution": {}});
        assert!(matches!(NodeAffinity::required(&empty), NodeAffinity::Unsupported(_)));
    }
}
