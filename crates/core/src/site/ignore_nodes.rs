//! Rules for nodes that farrier ignores.

use std::collections::BTreeMap;

use jiff::Timestamp;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    definition::{
        Period,
        checked::{DnsLabel, LabelKey, LabelValue},
    },
    image::has_labels,
    plan::{ClusterSnapshot, NodeFacts, Taint},
};

/// A rule for nodes that farrier ignores: nothing is built for them, and no rollout waits for them. A node must match every field
/// of the rule. A rule without fields ignores no node.
#[serde_with::skip_serializing_none]
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct IgnoreNodes {
    /// Labels that the node has, with these values.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<LabelKey, LabelValue>,
    /// Taints that the node has.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub taints: Vec<IgnoredTaint>,
    /// Operating systems (`status.nodeInfo.operatingSystem`), of which the node has one: `linux`, `windows`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub os: Vec<DnsLabel>,
    /// How long the node has not been ready. The node counts again as soon as it is ready.
    pub not_ready_for: Option<Period>,
}

/// A taint of an ignored node. Without a value or an effect, any matches.
#[serde_with::skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct IgnoredTaint {
    /// Key of the taint.
    pub key: LabelKey,
    /// Value of the taint.
    pub value: Option<LabelValue>,
    /// Effect of the taint: `NoSchedule`, `PreferNoSchedule` or `NoExecute`.
    pub effect: Option<TaintEffect>,
}

/// Effect of a taint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, strum::IntoStaticStr)]
pub enum TaintEffect {
    /// No new pods.
    NoSchedule,
    /// New pods only where no other node has room.
    PreferNoSchedule,
    /// No pods.
    NoExecute,
}

impl IgnoredTaint {
    fn matches(&self, taint: &Taint) -> bool {
        self.key.as_str() == taint.key
            && self.value.as_ref().is_none_or(|value| *value == taint.value.as_str())
            && self.effect.is_none_or(|effect| <&str>::from(effect) == taint.effect)
    }
}

impl IgnoreNodes {
    fn matches(&self, node: &NodeFacts, now: Timestamp) -> bool {
        let Self { labels, taints, os, not_ready_for } = self;
        let is_not_ready_for = |limit: &Period| {
            let since = node.ready_changed.filter(|_| node.not_ready);
            since.is_some_and(|since| now.duration_since(since) >= limit.signed_duration())
        };
        *self != Self::default()
            && has_labels(&node.labels, labels)
            && taints.iter().all(|rule| node.taints.iter().any(|taint| rule.matches(taint)))
            && (os.is_empty() || os.iter().any(|os| **os == *node.operating_system))
            && not_ready_for.as_ref().is_none_or(is_not_ready_for)
    }
}

/// Marks the nodes that a site ignores, each with the index of the first matching rule.
pub fn ignore_nodes(snapshot: &mut ClusterSnapshot, rules: &[IgnoreNodes], now: Timestamp) {
    for node in &mut snapshot.nodes {
        let ignored_by = rules.iter().position(|rule| rule.matches(node, now));
        // A mutable access copies the shared facts of the node, so unchanged nodes are not written.
        if node.ignored_by != ignored_by {
            node.ignored_by = ignored_by;
        }
    }
}

#[cfg(test)]
mod tests {
    use jiff::SignedDuration;

    use super::*;

    fn rule(rule: serde_json::Value) -> IgnoreNodes {
        serde_json::from_value(rule).unwrap()
    }

    #[test]
    fn every_field_of_a_rule_must_match() {
        let now: Timestamp = "2026-07-08T12:00:00Z".parse().unwrap();
        let taint = Taint { key: "a".to_owned(), value: "b".to_owned(), effect: "NoSchedule".to_owned() };
        let node = NodeFacts {
            labels: [("type".to_owned(), "virtual".to_owned())].into(),
            taints: vec![taint],
            operating_system: "windows".to_owned(),
            not_ready: true,
            ready_changed: Some("2026-07-01T12:00:00Z".parse().unwrap()),
            ..NodeFacts::default()
        };
        for (given, expected) in [
            (serde_json::json!({}), false),
            (serde_json::json!({"labels": {"type": "virtual"}}), true),
            (serde_json::json!({"labels": {"type": "real"}}), false),
            (serde_json::json!({"taints": [{"key": "a"}]}), true),
            (serde_json::json!({"taints": [{"key": "a", "value": "b", "effect": "NoSchedule"}]}), true),
            (serde_json::json!({"taints": [{"key": "a", "effect": "NoExecute"}]}), false),
            (serde_json::json!({"taints": [{"key": "a"}, {"key": "c"}]}), false),
            (serde_json::json!({"os": ["windows"]}), true),
            (serde_json::json!({"os": ["linux"]}), false),
            (serde_json::json!({"notReadyFor": "168h"}), true),
            (serde_json::json!({"notReadyFor": "169h"}), false),
            (serde_json::json!({"os": ["windows"], "notReadyFor": "169h"}), false),
        ] {
            assert_eq!(rule(given.clone()).matches(&node, now), expected, "{given}");
        }
    }

    #[test]
    fn a_node_that_is_ready_again_counts_again() {
        let since: Timestamp = "2026-07-01T12:00:00Z".parse().unwrap();
        let dead = NodeFacts { not_ready: true, ready_changed: Some(since), ..NodeFacts::default() };
        let mut snapshot = ClusterSnapshot { nodes: vec![dead.into()], ..ClusterSnapshot::default() };
        let rules =
            [rule(serde_json::json!({"os": ["plan9"]})), rule(serde_json::json!({"notReadyFor": "1h"}))];
        let at = |snapshot: &mut ClusterSnapshot, minutes| {
            ignore_nodes(snapshot, &rules, since + SignedDuration::from_mins(minutes));
            snapshot.nodes[0].ignored_by
        };
        assert_eq!((at(&mut snapshot, 59), at(&mut snapshot, 60)), (None, Some(1)));
        snapshot.nodes[0].not_ready = false;
        assert_eq!(at(&mut snapshot, 61), None);
    }
}
