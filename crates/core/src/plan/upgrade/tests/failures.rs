//! Tests of drivers that do not start, or not as expected.

use serde_json::json;

use super::{
    super::UpgradeStage,
    fleet::{Fleet, draining},
    stage, waits,
};
use crate::plan::PullFailure;

/// Returns a fleet whose node's driver is evicted a moment before the timeout of its state.
fn evicted_late() -> Fleet {
    let mut fleet = Fleet::new(1, draining(json!({})));
    fleet.settle_until(|fleet| fleet.state("n0") == "drained");
    fleet.pass_time(295);
    fleet.reconcile(usize::MAX);
    fleet.pass_time(10);
    fleet.reconcile(usize::MAX);
    fleet
}

#[test]
fn a_driver_that_is_evicted_late_is_followed_by_one_that_is_checked() {
    let mut fleet = evicted_late();
    assert_eq!(fleet.state("n0"), "driver-restarted", "there is no old driver to return to");
    assert_eq!(fleet.settle().forecast.done, 1);
    assert_eq!(fleet.state("n0"), "uncordoned");

    let mut fleet = evicted_late();
    fleet.broken.insert("v2".to_owned());
    assert_eq!(stage(&fleet.settle(), "n0"), UpgradeStage::Failed);
}

#[test]
fn a_pod_that_gets_another_image_is_not_evicted_forever() {
    let mut fleet = Fleet::new(2, draining(json!({})));
    fleet.rewritten = Some("mirror/v2".to_owned());
    let plan = fleet.settle();
    assert_eq!(plan.failure(), Some(("n0", "its new pod has image mirror/v2, not v2")));
    assert_eq!(fleet.nodes["n1"].driver.as_ref().unwrap().image, "v1", "no other node is started");

    // The DaemonSet gets another image while the pod is created: that is not a failure of the image.
    let mut fleet = Fleet::new(1, draining(json!({})));
    fleet.settle_until(|fleet| fleet.state("n0") == "drained");
    fleet.reconcile(usize::MAX);
    for _ in 0..3 {
        fleet.pass_time(10);
    }
    assert_eq!(fleet.nodes["n0"].driver.as_ref().unwrap().image, "v2");
    fleet.image = "v3".to_owned();
    assert_eq!(fleet.settle().forecast.done, 1);
}

#[test]
fn an_old_pod_from_a_clock_that_is_ahead_is_evicted() {
    let mut fleet = Fleet::new(1, draining(json!({})));
    fleet.settle_until(|fleet| fleet.state("n0") == "drained");
    let ahead = fleet.now + 20;
    fleet.nodes.get_mut("n0").unwrap().driver.as_mut().unwrap().created = ahead;
    let plan = fleet.settle();
    assert_eq!((plan.forecast.done, plan.failure()), (1, None));
}

#[test]
fn what_failed_and_does_not_work_waits_for_no_window_and_no_other_node() {
    let mut fleet = Fleet::new(3, draining(json!({})));
    fleet.broken.insert("v2".to_owned());
    fleet.settle();
    assert_eq!(fleet.state("n0"), "failed");
    fleet.image = "v1".to_owned();
    fleet.spec = serde_json::from_value(draining(json!({
        "canary": {"matchLabels": {"name": "n7"}},
        "between": "10h",
        "window": {"opens": "0 3 * * * UTC", "duration": "1h"},
    })))
    .unwrap();
    assert_eq!(stage(&fleet.plan(), "n0"), UpgradeStage::Begins);
    fleet.broken.clear();
    assert!(
        waits(&fleet.plan(), "n0").starts_with("the window opens"),
        "its driver works by now, so it waits"
    );
    fleet.broken.insert("v2".to_owned());
    fleet.paused = true;
    assert!(waits(&fleet.plan(), "n0").starts_with("the upgrade is paused"));
}

#[test]
fn a_node_that_boots_a_kernel_that_its_image_lacks_waits_for_no_window() {
    let window = json!({"opens": "0 3 * * * UTC", "duration": "1h"});
    let mut fleet =
        Fleet::new(2, draining(json!({"window": window, "canary": {"matchLabels": {"name": "n1"}}})));
    fleet.modules.insert("v1".to_owned(), ["k1".to_owned()].into());
    fleet.reboot("n0", "k2", true);
    let plan = fleet.plan();
    assert_eq!((stage(&plan, "n0"), stage(&plan, "n1")), (UpgradeStage::Begins, UpgradeStage::Waits));
    fleet.paused = true;
    assert!(waits(&fleet.plan(), "n0").starts_with("the upgrade is paused"));
}

/// A registry that does not answer says nothing about the image.
#[test]
fn an_outage_of_the_registry_fails_no_driver() {
    for (failure, is_registry_down) in [(PullFailure::Unanswered, false), (PullFailure::Refused, true)] {
        let mut fleet = Fleet::new(2, draining(json!({})));
        fleet.broken.insert("v2".to_owned());
        (fleet.pull_failure, fleet.is_registry_down) = (Some(failure), is_registry_down);
        for _ in 0..360 {
            fleet.pass_time(10);
            fleet.reconcile(usize::MAX);
        }
        let plan = fleet.plan();
        assert_eq!((fleet.state("n0"), plan.failure()), ("driver-restarted", None));
        let why =
            "waits for the registry, which does not deliver its new driver's image: driver: no such device";
        assert_eq!(waits(&plan, "n0"), why);
        assert_eq!(fleet.nodes["n1"].driver.as_ref().unwrap().image, "v1", "no other node is started");
        (fleet.pull_failure, fleet.is_registry_down) = (None, false);
        fleet.pass_time(60);
        fleet.reconcile(usize::MAX);
        assert_eq!(fleet.state("n0"), "driver-restarted", "the driver has time to start");
        fleet.broken.clear();
        assert_eq!(fleet.settle().forecast.done, 2);
    }
}

#[test]
fn a_registry_that_refuses_the_node_or_is_down_for_too_long_fails_the_driver() {
    for (failure, hours) in [(PullFailure::Refused, 1), (PullFailure::Unanswered, 13)] {
        let mut fleet = Fleet::new(1, draining(json!({})));
        fleet.broken.insert("v2".to_owned());
        fleet.pull_failure = Some(failure);
        for _ in 0..hours * 60 {
            fleet.pass_time(60);
            fleet.reconcile(usize::MAX);
        }
        assert_eq!(fleet.state("n0"), "failed", "{failure:?}");
        assert!(!fleet.nodes["n0"].facts.unschedulable);
    }
}
