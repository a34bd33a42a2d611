//! Tests of nodes on which another upgrade is in progress: an operator's, or an upgrade of another driver.

use serde_json::json;

use super::{
    super::release_uncovered,
    fleet::{Fleet, draining},
    waits,
};
use crate::plan::UPGRADE;

#[test]
fn operators_and_other_upgrades_come_first() {
    let mut fleet = Fleet::new(2, draining(json!({})));
    let labels = &mut fleet.nodes.get_mut("n0").unwrap().facts.labels;
    labels.insert("nvidia.com/gpu-driver-upgrade-state".to_owned(), "drain-required".to_owned());
    let other = r#"{"rollout": "drivers/gpu", "state": "drained", "since": "1970-01-01T00:00:00Z",
        "began": "1970-01-01T00:00:00Z", "to": "gpu:2", "cordoned": true}"#;
    let annotations = &mut fleet.nodes.get_mut("n1").unwrap().facts.annotations;
    annotations.insert(UPGRADE.to_owned(), other.to_owned());
    let plan = fleet.plan();
    assert_eq!(plan.changes().count(), 0);
    insta::assert_snapshot!(waits(&plan, "n0"), @"left to the operator's upgrade controller: nvidia.com/gpu-driver-upgrade-state=drain-required");
    insta::assert_snapshot!(waits(&plan, "n1"), @"the driver of drivers/gpu is upgraded first");
}

/// <https://github.com/NVIDIA/gpu-operator/issues/2509>: a request may stay for weeks.
#[test]
fn a_request_to_an_operator_holds_no_upgrade() {
    let mut fleet = Fleet::new(2, draining(json!({})));
    for node in ["n0", "n1"] {
        let labels = &mut fleet.nodes.get_mut(node).unwrap().facts.labels;
        labels.insert("nvidia.com/gpu-driver-upgrade-state".to_owned(), "upgrade-required".to_owned());
    }
    assert_eq!(fleet.settle().forecast.done, 2);
}

/// A node can hold only one note. Without the note of its failure, the other driver's upgrade would continue.
#[test]
fn the_failure_of_another_driver_is_kept_until_nobody_is_about_it() {
    let mut fleet = Fleet::new(1, draining(json!({})));
    let other = r#"{"rollout": "drivers/gpu", "state": "failed", "since": "1970-01-01T00:00:00Z",
        "began": "1970-01-01T00:00:00Z", "to": "gpu:2"}"#;
    let annotations = &mut fleet.nodes.get_mut("n0").unwrap().facts.annotations;
    annotations.insert(UPGRADE.to_owned(), other.to_owned());
    let plan = fleet.settle();
    assert_eq!(waits(&plan, "n0"), "the driver of drivers/gpu is upgraded first");
    assert_eq!(fleet.nodes["n0"].facts.annotations[UPGRADE], other);
    let facts = [fleet.nodes["n0"].facts.clone()];
    assert_eq!(release_uncovered(&facts, |_, _| true), []);
    for change in release_uncovered(&facts, |_, _| false) {
        fleet.make(&change);
    }
    assert_eq!(fleet.settle().forecast.done, 1);
}

/// Otherwise the first driver's upgrade would forget its canary, and the time between two nodes.
#[test]
fn the_end_of_an_upgrade_is_kept_when_another_driver_is_upgraded() {
    let mut fleet = Fleet::new(3, json!({"canary": 1, "between": "1h"}));
    fleet.settle_until(|fleet| fleet.state("n0") == "uncordoned");
    let ended = fleet.nodes["n0"].facts.annotations[UPGRADE].clone();
    (fleet.daemon_set, fleet.image) = ("gpu", "v3".to_owned());
    fleet.reconcile(usize::MAX);
    assert_eq!(fleet.state("n0"), "drained");

    (fleet.daemon_set, fleet.image) = ("mft", "v2".to_owned());
    let plan = fleet.plan();
    assert!(waits(&plan, "n1").starts_with("the next node starts at"), "{}", waits(&plan, "n1"));
    assert_eq!((plan.forecast.done, plan.forecast.seconds_per_node.is_some()), (1, true));

    let facts = [fleet.nodes["n0"].facts.clone()];
    for change in release_uncovered(&facts, |_, _| false) {
        fleet.make(&change);
    }
    assert_eq!(fleet.nodes["n0"].facts.annotations[UPGRADE], ended, "no note is about the other driver");
}

#[test]
fn an_operator_that_begins_meanwhile_is_left_to_it() {
    for state in ["cordoned", "drained", "driver-restarted", "checked"] {
        let mut fleet = Fleet::new(1, draining(json!({})));
        fleet.settle_until(|fleet| fleet.state("n0") == state);
        fleet.operate("n0", true);
        let plan = fleet.settle();
        insta::allow_duplicates! {
            insta::assert_snapshot!(waits(&plan, "n0"), @"left to the operator's upgrade controller: nvidia.com/ofed-driver-upgrade-state=drain-required");
        }
        assert_eq!(
            (fleet.state("n0"), fleet.nodes["n0"].facts.unschedulable),
            (state, true),
            "nothing moves"
        );
        let facts: Vec<_> = fleet.nodes.values().map(|node| node.facts.clone()).collect();
        assert_eq!(
            release_uncovered(&facts, |_, _| false),
            [],
            "{state}: nor where there is no upgrade any more"
        );
        fleet.operate("n0", false);
        assert_eq!(fleet.settle().forecast.done, 1, "{state}: its timeout restarts");
        assert!(!fleet.nodes["n0"].facts.unschedulable);
    }
}
