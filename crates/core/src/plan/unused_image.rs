//! Images whose selector matches no node, with the most similar label of the nodes.

use std::collections::{BTreeMap, BTreeSet};

use farrier_yaml::similar;
use serde::Serialize;

use super::{NodeFacts, node::NodeGroup, skip_reason::serialize_reason};
use crate::image::{ImageName, NodeSelector};

/// Image whose `nodes` matches no node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct UnusedImage {
    /// Name of the image.
    pub image: ImageName,
    /// Reason why no node matches.
    #[serde(serialize_with = "serialize_reason")]
    pub why: NoNodeReason,
}

/// Reason why a selector matches no node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
#[serde(rename_all = "kebab-case", rename_all_fields = "camelCase", tag = "reason")]
pub enum NoNodeReason {
    /// No node has the label, with any value. `nearest` is a label that some nodes have.
    #[error("no node has label {label}{}", .nearest.as_ref().map(|near| format!("; nearest: {near} on {}", node_count(*.nodes))).unwrap_or_default())]
    NoLabel { label: String, nearest: Option<String>, nodes: usize },
    /// Nodes have the label with other values.
    #[error("no node has label {label}={value}; it is {found:?} on {}", node_count(*.nodes))]
    OtherValue { label: String, value: String, found: String, nodes: usize },
    /// Each label is on some node, but no node has all of them.
    #[error("no node has all of these labels: {}", .labels.join(", "))]
    NotTogether { labels: Vec<String> },
}

fn node_count(nodes: usize) -> String {
    format!("{nodes} {}", if nodes == 1 { "node" } else { "nodes" })
}

impl UnusedImage {
    /// Returns the reason if the selector matches no node; `None` if there are no nodes at all.
    pub(super) fn of(
        image: &ImageName,
        selector: &NodeSelector,
        groups: &[NodeGroup<'_>],
    ) -> Option<UnusedImage> {
        if groups.is_empty() || groups.iter().any(|group| selector.matches(&group.sample.labels)) {
            return None;
        }
        let required = selector.match_labels.iter().map(|(key, value)| (key.as_str(), value.as_str()));
        let missing = required.clone().find_map(|(key, value)| missing_label(key, value, groups));
        let labels = || required.map(|(key, value)| format!("{key}={value}")).collect();
        let why = missing.unwrap_or_else(|| NoNodeReason::NotTogether { labels: labels() });
        Some(UnusedImage { image: image.clone(), why })
    }
}

fn missing_label(key: &str, value: &str, groups: &[NodeGroup<'_>]) -> Option<NoNodeReason> {
    let mut values: BTreeMap<&str, usize> = BTreeMap::new();
    for group in groups {
        if let Some(found) = group.sample.labels.get(key) {
            *values.entry(found).or_default() += group.nodes.len();
        }
    }
    if values.contains_key(value) {
        return None;
    }
    if let Some((found, nodes)) = values.into_iter().max_by_key(|(_, nodes)| *nodes) {
        let (label, value, found) = (key.to_owned(), value.to_owned(), found.to_owned());
        return Some(NoNodeReason::OtherValue { label, value, found, nodes });
    }
    let nodes = || groups.iter().flat_map(|group| group.nodes.iter().copied());
    let labels: BTreeSet<&str> =
        nodes().flat_map(|node: &NodeFacts| node.labels.keys().map(String::as_str)).collect();
    let nearest = similar(key, labels);
    let count = nearest.map_or(0, |near| nodes().filter(|node| node.labels.contains_key(near)).count());
    Some(NoNodeReason::NoLabel { label: key.to_owned(), nearest: nearest.map(str::to_owned), nodes: count })
}

#[cfg(test)]
mod tests {
    use crate::plan::{Plan, testing::Fleet};

    fn reasons(plan: &Plan) -> Vec<String> {
        plan.unused_images.iter().map(|unused| format!("{}: {}", unused.image, unused.why)).collect()
    }

    #[test]
    fn a_selector_that_matches_no_node_is_reported_with_the_nearest_label() {
        let mut fleet = Fleet::new(&["6.1.0-47-amd64", "6.1.0-48-amd64"]);
        assert_eq!(reasons(&fleet.plan()), [""; 0]);
        for index in 0..2 {
            let value = fleet.node(index).labels.remove("pci").unwrap();
            fleet.node(index).labels.insert("pic".to_owned(), value);
        }
        assert_eq!(reasons(&fleet.plan()), ["mft: no node has label pci; nearest: pic on 2 nodes"]);
        fleet.node(0).labels.insert("pci".to_owned(), "no".to_owned());
        assert_eq!(reasons(&fleet.plan()), [r#"mft: no node has label pci=yes; it is "no" on 1 node"#]);
        fleet.node(1).labels.insert("pci".to_owned(), "yes".to_owned());
        assert_eq!(reasons(&fleet.plan()), [""; 0]);
    }
}
