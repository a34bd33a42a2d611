//! Decides which of two DaemonSets a node belongs to. A label on the node selects the copy. A requirement in the original
//! DaemonSet (the fence) excludes nodes with that label.
//!
//! One write of the label to a node moves the node from the original to its kernel's copy, or back, so that at every
//! moment exactly one of the two DaemonSets selects the node.

use crate::{
    image::FieldHasher,
    plan::{
        NodeAffinity, NodeFacts, Operator, PodCount, Requirement, SelectorTerm,
        labels::{HANDOVER_LABEL_PREFIX, operator_upgrade_in_progress},
    },
};

/// Value of the handover label on a node that belongs to a copy.
pub(in crate::plan) const HANDED_OVER: &str = "handed-over";

/// Returns the key of the label that marks nodes of a copy of this DaemonSet. A DaemonSet's name can have 253
/// characters and a label key 63, hence the hash.
pub fn handover_label(namespace: &str, daemon_set: &str) -> String {
    format!("{HANDOVER_LABEL_PREFIX}{}", short_hash(&[namespace, daemon_set]))
}

/// Returns a hash of eight hexadecimal digits that distinguishes names.
pub(in crate::plan) fn short_hash(parts: &[&str]) -> String {
    let mut hasher = FieldHasher::new("farrier.dev/name/1");
    for part in parts {
        hasher.add("part", part);
    }
    hasher.finish().short()[..8].to_owned()
}

/// Whether the node has the handover label.
pub(super) fn is_handed_over(node: &NodeFacts, label: &str) -> bool {
    node.labels.contains_key(label)
}

/// Whether every term that admits nodes requires the label's absence.
pub(super) fn is_fenced(affinity: &NodeAffinity, label: &str) -> bool {
    match affinity {
        NodeAffinity::Terms(terms) => terms
            .iter()
            .filter(|term| !admits_none(term))
            .all(|term| term.expressions.iter().any(is_fence(label))),
        NodeAffinity::Any | NodeAffinity::Unsupported(_) => false,
    }
}

/// Returns the affinity with the fence in every term.
pub(super) fn fenced(affinity: &NodeAffinity, label: &str) -> NodeAffinity {
    let fence = Requirement { key: label.to_owned(), operator: Operator::DoesNotExist, values: Vec::new() };
    match without_fence(affinity, label) {
        NodeAffinity::Any => {
            NodeAffinity::Terms(vec![SelectorTerm { expressions: vec![fence], fields: Vec::new() }])
        }
        NodeAffinity::Terms(mut terms) => {
            for term in &mut terms {
                term.expressions.push(fence.clone());
            }
            NodeAffinity::Terms(terms)
        }
        other @ NodeAffinity::Unsupported(_) => other,
    }
}

/// Returns the affinity without the fence, as its owner wrote it. Drops empty terms: an empty term admits no node, but
/// would admit nodes once the fence is added. A term that holds only the fence therefore means that there was no affinity.
pub(super) fn without_fence(affinity: &NodeAffinity, label: &str) -> NodeAffinity {
    let NodeAffinity::Terms(terms) = affinity else { return affinity.clone() };
    let mut unfenced = Vec::new();
    for term in terms.iter().filter(|term| !admits_none(term)) {
        let mut term = term.clone();
        term.expressions.retain(|requirement| !is_fence(label)(requirement));
        if admits_none(&term) {
            return NodeAffinity::Any;
        }
        unfenced.push(term);
    }
    NodeAffinity::Terms(unfenced)
}

fn admits_none(term: &SelectorTerm) -> bool {
    term.expressions.is_empty() && term.fields.is_empty()
}

fn is_fence(label: &str) -> impl Fn(&Requirement) -> bool {
    move |requirement| requirement.key == label && requirement.operator == Operator::DoesNotExist
}

/// Whether the node is under maintenance: cordoned, or in an operator's driver upgrade.
pub(super) fn is_in_maintenance(node: &NodeFacts) -> bool {
    node.unschedulable || operator_upgrade_in_progress(&node.labels).is_some()
}

/// Returns how many of `desired` pods may be unavailable at once. A percentage is rounded up, as by the DaemonSet
/// controller. Zero is valid in a DaemonSet with a surge, but counts as one: otherwise no pod could ever be replaced.
pub(super) fn unavailable_limit(count: PodCount, desired: usize) -> usize {
    match count {
        PodCount::Number(number) => number,
        PodCount::Percent(share) => desired.saturating_mul(share).div_ceil(100),
    }
    .max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{UPGRADE_STATE_LABELS, reach::LabelState};

    fn requirement(key: &str, operator: Operator) -> Requirement {
        Requirement { key: key.to_owned(), operator, values: Vec::new() }
    }

    fn term(expressions: Vec<Requirement>) -> SelectorTerm {
        SelectorTerm { expressions, fields: Vec::new() }
    }

    #[test]
    fn a_fence_goes_into_every_term_and_comes_out_again() {
        let label = handover_label("kube-system", "driver");
        let by_name = SelectorTerm {
            expressions: Vec::new(),
            fields: vec![requirement("metadata.name", Operator::In)],
        };
        let affinities = [
            NodeAffinity::Any,
            NodeAffinity::Terms(vec![term(vec![requirement("a", Operator::Exists)]), by_name]),
        ];
        for affinity in affinities {
            assert!(!is_fenced(&affinity, &label));
            let fenced_once = fenced(&affinity, &label);
            assert!(is_fenced(&fenced_once, &label));
            assert_eq!(fenced(&fenced_once, &label), fenced_once);
            assert_eq!(without_fence(&fenced_once, &label), affinity);
        }
    }

    #[test]
    fn an_empty_term_never_begins_to_admit_nodes() {
        let label = handover_label("kube-system", "driver");
        let affinity =
            NodeAffinity::Terms(vec![term(Vec::new()), term(vec![requirement("a", Operator::Exists)])]);
        let admits = |affinity: &NodeAffinity| affinity.admits("n", |_| LabelState::Absent);
        assert!(!admits(&affinity) && !admits(&fenced(&affinity, &label)));
        let nothing = NodeAffinity::Terms(vec![term(Vec::new())]);
        assert!(!admits(&fenced(&nothing, &label)));
        assert!(is_fenced(&nothing, &label), "there is nothing to keep it off from");
    }

    #[test]
    fn the_label_is_one_for_each_daemon_set_and_within_limits() {
        let label = handover_label("kube-system", "driver");
        insta::assert_snapshot!(label, @"farrier.dev/driver.65a82f45");
        assert_ne!(label, handover_label("kube", "system-driver"));
        assert_eq!(handover_label(&"n".repeat(63), &"d".repeat(253)).len(), label.len());
    }

    #[test]
    fn shares_are_rounded_up() {
        let share = |share, wanted| unavailable_limit(PodCount::Percent(share), wanted);
        assert_eq!([share(10, 5), share(10, 20), share(100, 7), share(0, 7)], [1, 2, 7, 1]);
        assert_eq!(
            [unavailable_limit(PodCount::Number(3), 1), unavailable_limit(PodCount::Number(0), 9)],
            [3, 1]
        );
    }

    #[test]
    fn nodes_that_somebody_works_on() {
        let with = |key: &str, value: &str| NodeFacts {
            labels: [(key.to_owned(), value.to_owned())].into(),
            ..NodeFacts::default()
        };
        let [ofed, gpu] = UPGRADE_STATE_LABELS;
        assert!(is_in_maintenance(&with(ofed, "drain-required")));
        assert!(is_in_maintenance(&with(gpu, "pod-restart-required")));
        assert!(is_in_maintenance(&NodeFacts { unschedulable: true, ..NodeFacts::default() }));
        assert!(!is_in_maintenance(&with(ofed, "upgrade-done")));
        assert!(!is_in_maintenance(&with(ofed, "upgrade-failed")), "a failed upgrade is at rest");
        assert!(!is_in_maintenance(&with(gpu, "upgrade-required")), "a request is no work");
        assert!(!is_in_maintenance(&with(gpu, "")));
    }
}
