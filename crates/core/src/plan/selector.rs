//! Pure: which nodes a pod template's node affinity admits (Kubernetes API, `NodeSelectorTerm`).

use std::collections::BTreeMap;

use serde::Serialize;

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
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SelectorTerm {
    /// `matchExpressions`, over labels.
    #[serde(rename = "matchExpressions", skip_serializing_if = "Vec::is_empty")]
    pub expressions: Vec<Requirement>,
    /// `matchFields`; only `metadata.name` exists.
    #[serde(rename = "matchFields", skip_serializing_if = "Vec::is_empty")]
    pub fields: Vec<Requirement>,
}

/// One requirement of a term.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Requirement {
    /// Key of the label, or name of the field.
    pub key: String,
    /// Comparison operator.
    pub operator: Operator,
    /// Values to compare with.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub values: Vec<String>,
}

/// Comparison operator of a requirement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, strum::EnumString)]
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

impl Requirement {
    fn admits(&self, found: Option<&str>) -> bool {
        let listed = |value: &str| self.values.iter().any(|v| v == value);
        match self.operator {
            Operator::In => found.is_some_and(listed),
            Operator::NotIn => !found.is_some_and(listed),
            Operator::Exists => found.is_some(),
            Operator::DoesNotExist => found.is_none(),
            Operator::Gt => self.integers(found).is_some_and(|(found, bound)| found > bound),
            Operator::Lt => self.integers(found).is_some_and(|(found, bound)| found < bound),
        }
    }

    fn integers(&self, found: Option<&str>) -> Option<(i64, i64)> {
        let [bound] = self.values.as_slice() else { return None };
        Some((found?.parse().ok()?, bound.parse().ok()?))
    }
}

impl SelectorTerm {
    /// Whether the term admits a node; `None` for a field that farrier does not know.
    fn admits(&self, name: &str, labels: &BTreeMap<String, String>) -> Option<bool> {
        let Self { expressions, fields } = self;
        if fields.iter().any(|field| field.key != "metadata.name") {
            return None;
        }
        let empty = expressions.is_empty() && fields.is_empty();
        Some(
            !empty
                && expressions.iter().all(|r| r.admits(labels.get(&r.key).map(String::as_str)))
                && fields.iter().all(|r| r.admits(Some(name))),
        )
    }
}

impl NodeAffinity {
    /// Whether the affinity admits a node of this name with these labels; `None` where the affinity is not understood.
    pub fn admits(&self, name: &str, labels: &BTreeMap<String, String>) -> Option<bool> {
        match self {
            Self::Any => Some(true),
            Self::Unsupported(_) => None,
            Self::Terms(terms) => {
                let answers: Option<Vec<bool>> = terms.iter().map(|term| term.admits(name, labels)).collect();
                answers.map(|answers| answers.contains(&true))
            }
        }
    }

    /// Whether the affinity selects nodes by name.
    pub fn names_nodes(&self) -> bool {
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
    fn admits(affinity: &NodeAffinity) -> Option<bool> {
        let labels = [("zone", "a"), ("cores", "16")].map(|(k, v)| (k.to_owned(), v.to_owned()));
        affinity.admits("n1", &labels.into())
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
            assert_eq!(admits(&affinity), Some(expected), "{requirement:?}");
        }
    }

    #[test]
    fn terms_are_alternatives_and_requirements_are_not() {
        let a = requirement("zone", Operator::In, &["a"]);
        let b = requirement("zone", Operator::In, &["b"]);
        let both = NodeAffinity::Terms(vec![term(vec![a.clone(), b.clone()])]);
        let either = NodeAffinity::Terms(vec![term(vec![b]), term(vec![a])]);
        assert_eq!((admits(&both), admits(&either)), (Some(false), Some(true)));
    }

    #[test]
    fn empty_terms_admit_nothing() {
        assert_eq!(admits(&NodeAffinity::Terms(Vec::new())), Some(false));
        assert_eq!(admits(&NodeAffinity::Terms(vec![SelectorTerm::default()])), Some(false));
    }

    #[test]
    fn fields_other_than_the_name_are_not_understood() {
        let by_field = |key: &str| {
            NodeAffinity::Terms(vec![SelectorTerm {
                expressions: Vec::new(),
                fields: vec![requirement(key, Operator::In, &["n1"])],
            }])
        };
        assert_eq!(admits(&by_field("metadata.name")), Some(true));
        assert_eq!(admits(&by_field("metadata.uid")), None);
        assert_eq!(admits(&NodeAffinity::Unsupported("x".to_owned())), None);
    }
}
