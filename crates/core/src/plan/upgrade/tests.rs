mod failures;
mod fleet;
mod others;
mod unload_forecast;

use std::collections::BTreeSet;

use proptest::prelude::*;
use serde_json::json;

use self::fleet::{Fleet, ROLLOUT, draining};
use super::*;
use crate::plan::{UPGRADE, UPGRADE_CHECKED};

/// Returns the states that a node goes through until nothing more happens.
fn states_of(fleet: &mut Fleet, name: &str) -> Vec<String> {
    let mut states = vec![fleet.state(name).to_owned()];
    for _ in 0..200 {
        fleet.pass_time(10);
        fleet.reconcile(usize::MAX);
        let state = fleet.state(name);
        if states.last().is_some_and(|last| last != state) {
            states.push(state.to_owned());
        }
    }
    states
}

fn stage(plan: &PlannedUpgrade, node: &str) -> UpgradeStage {
    plan.nodes.iter().find(|node_upgrade| node_upgrade.node == node).unwrap().stage
}

fn waits(plan: &PlannedUpgrade, node: &str) -> String {
    let node_upgrade = plan.nodes.iter().find(|node_upgrade| node_upgrade.node == node).unwrap();
    node_upgrade.waits.as_ref().map(ToString::to_string).unwrap_or_default()
}

#[test]
fn a_node_goes_through_its_states_and_is_given_back() {
    let mut fleet = Fleet::new(1, draining(json!({})));
    assert_eq!(
        states_of(&mut fleet, "n0"),
        ["", "cordoned", "drained", "driver-restarted", "checked", "uncordoned"]
    );
    let node = &fleet.nodes["n0"];
    assert!(!node.facts.unschedulable);
    assert_eq!(node.driver.as_ref().unwrap().image, "v2");
    let plan = fleet.plan();
    assert_eq!((stage(&plan, "n0"), plan.forecast.done, plan.forecast.ends), (UpgradeStage::Done, 1, None));
}

#[test]
fn without_a_drain_no_node_is_cordoned() {
    let mut fleet = Fleet::new(1, json!({}));
    let plan = fleet.reconcile(usize::MAX);
    assert_eq!(plan.changes().count(), 1);
    assert!(!fleet.nodes["n0"].facts.unschedulable);
    assert_eq!(fleet.state("n0"), "drained");
    fleet.settle();
    assert_eq!(fleet.nodes["n0"].users.len(), 1, "its user stayed");
    assert_eq!(fleet.nodes["n0"].driver.as_ref().unwrap().image, "v2");
}

#[test]
fn some_nodes_go_first() {
    let mut fleet = Fleet::new(4, draining(json!({"canary": 1, "maxParallel": 3})));
    let plan = fleet.reconcile(usize::MAX);
    assert_eq!((stage(&plan, "n0"), stage(&plan, "n1")), (UpgradeStage::Begins, UpgradeStage::Waits));
    assert_eq!(waits(&plan, "n1"), "waits for the canary nodes");
    let mut most = 0;
    for _ in 0..500 {
        fleet.pass_time(10);
        fleet.reconcile(usize::MAX);
        most = most.max(fleet.down().0);
        assert!(fleet.state("n0") == "uncordoned" || fleet.down().0 == 1);
    }
    assert_eq!(most, 3, "then up to the limit");

    let mut fleet = Fleet::new(3, json!({"canary": {"matchLabels": {"name": "n2"}}, "maxParallel": 3}));
    let plan = fleet.reconcile(usize::MAX);
    assert_eq!((stage(&plan, "n2"), stage(&plan, "n0")), (UpgradeStage::Begins, UpgradeStage::Waits));
    assert_eq!(fleet.settle().forecast.done, 3);
    let fleet = Fleet::new(2, json!({"canary": {"matchLabels": {"name": "n7"}}}));
    assert_eq!(waits(&fleet.plan(), "n0"), "no node has the labels of `canary`");
}

/// Without the labels of NFD, the DaemonSet does not select the node.
#[test]
fn a_canary_node_that_lost_its_labels_and_its_pod_is_not_done() {
    let mut fleet = Fleet::new(2, json!({"canary": {"matchLabels": {"name": "n1"}}, "maxParallel": 2}));
    let node = fleet.nodes.get_mut("n1").unwrap();
    (node.is_known, node.driver) = (false, None);
    let plan = fleet.plan();
    assert_eq!((stage(&plan, "n1"), stage(&plan, "n0")), (UpgradeStage::Skipped, UpgradeStage::Waits));
    assert_eq!(waits(&plan, "n0"), "waits for the canary nodes");
}

#[test]
fn nodes_are_begun_in_the_window_and_one_after_the_other() {
    // The clock starts at 1970-01-12T14:03:20Z.
    let window = json!({"opens": "0 15 * * * UTC", "duration": "1h"});
    let mut fleet = Fleet::new(2, json!({"window": window, "between": "10m"}));
    assert_eq!(waits(&fleet.plan(), "n0"), "the window opens at 1970-01-12T15:00:00Z");
    fleet.pass_time(3000);
    assert_eq!(fleet.plan().changes().count(), 0);
    fleet.pass_time(1000);
    fleet.reconcile(usize::MAX);
    assert_eq!(fleet.state("n0"), "drained");
    while fleet.state("n0") != "uncordoned" {
        fleet.pass_time(10);
        fleet.reconcile(usize::MAX);
    }
    let plan = fleet.plan();
    assert!(
        waits(&plan, "n1").starts_with("the next node starts at 1970-01-12T15:"),
        "{}",
        waits(&plan, "n1")
    );
    fleet.pass_time(3600);
    assert!(
        waits(&fleet.plan(), "n1").starts_with("the window opens at 1970-01-13T15:"),
        "the window has closed"
    );
    fleet.paused = true;
    assert!(waits(&fleet.plan(), "n1").starts_with("the upgrade is paused"));
}

#[test]
fn pods_that_do_not_leave_do_not_keep_a_node_cordoned() {
    let mut fleet = Fleet::new(2, draining(json!({})));
    fleet.held = true;
    for _ in 0..40 {
        fleet.pass_time(10);
        fleet.reconcile(usize::MAX);
    }
    assert_eq!(fleet.state("n0"), "not-drained");
    assert!(!fleet.nodes["n0"].facts.unschedulable);
    assert_eq!(fleet.nodes["n0"].driver.as_ref().unwrap().image, "v1");
    let plan = fleet.plan();
    assert!(waits(&plan, "n0").ends_with("pods left on the node after 5m: 1"), "{}", waits(&plan, "n0"));
    assert_eq!(stage(&plan, "n1"), UpgradeStage::UnderWay, "the other nodes get their turn");
    fleet.held = false;
    assert_eq!(fleet.settle().forecast.done, 2, "and the node is retried");
}

#[test]
fn a_driver_that_does_not_work_stops_the_upgrade() {
    let mut fleet = Fleet::new(3, draining(json!({"onFailure": "stop"})));
    fleet.broken.insert("v2".to_owned());
    let plan = fleet.settle();
    let (node, why) = plan.failure().unwrap();
    assert_eq!((node, why), ("n0", "its new driver was not ready within 150s: driver: no such device"));
    assert_eq!(waits(&plan, "n1"), "stopped, because node n0 failed");
    assert!(fleet.nodes.values().all(|node| !node.facts.unschedulable));

    // Another version is not affected by the failure, and starts with the node that does not work.
    fleet.image = "v3".to_owned();
    assert_eq!(stage(&fleet.plan(), "n0"), UpgradeStage::Begins);
    assert_eq!(fleet.settle().forecast.done, 3);
}

#[test]
fn after_a_resume_a_node_that_works_by_now_counts() {
    let mut fleet = Fleet::new(2, draining(json!({})));
    fleet.broken.insert("v2".to_owned());
    fleet.settle();
    fleet.broken.clear();
    assert_eq!(stage(&fleet.settle(), "n0"), UpgradeStage::Failed, "the node was not checked");
    let facts: Vec<_> = fleet.nodes.values().map(|node| node.facts.clone()).collect();
    for mark in clear_failures(&facts, ROLLOUT) {
        fleet.make(&mark);
    }
    assert_eq!(fleet.settle().forecast.done, 2);
}

#[test]
fn a_check_must_say_yes() {
    let mut fleet = Fleet::new(2, draining(json!({"waitFor": {"job": "smoke"}, "maxParallel": 2})));
    fleet.settle_until(|fleet| fleet.jobs.len() == 2);
    let names: Vec<String> = fleet.jobs.keys().cloned().collect();
    assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), 2, "one for each node");
    fleet.jobs.insert(names[0].clone(), JobState::Succeeded);
    fleet.jobs.insert(names[1].clone(), JobState::Failed("exit code 3".to_owned()));
    let plan = fleet.settle();
    assert_eq!(plan.failure().unwrap().1, "its check failed: exit code 3");
    assert_eq!(plan.forecast.done, 1);

    let mut fleet = Fleet::new(1, draining(json!({"waitFor": {"job": "not-there"}})));
    fleet.new_job = None;
    let plan = fleet.settle();
    let why = "its check could not be run: see CronJob not-there of drivers";
    assert_eq!((plan.failure().unwrap().1, plan.fault()), (why, None), "the image is not to blame");
    assert!(!fleet.nodes["n0"].facts.unschedulable);

    let mut fleet = Fleet::new(1, draining(json!({"waitFor": {"job": "smoke"}})));
    fleet.new_job = Some(JobState::WithoutPod);
    let plan = fleet.settle();
    let why = plan.failure().unwrap().1;
    assert!(why.ends_with("of drivers has no pod, see its Events"), "{why}");
    assert_eq!(plan.fault(), None, "the image is not to blame");

    let mut fleet = Fleet::new(1, draining(json!({"waitFor": "annotation"})));
    fleet.settle_until(|fleet| waits(&fleet.plan(), "n0").contains("annotation"));
    let node = fleet.nodes.get_mut("n0").unwrap();
    node.facts.annotations.insert(UPGRADE_CHECKED.to_owned(), "v1".to_owned());
    assert_eq!(fleet.plan().changes().count(), 0, "the annotation names the previous image");
    fleet.nodes.get_mut("n0").unwrap().facts.annotations.insert(UPGRADE_CHECKED.to_owned(), "v2".to_owned());
    assert_eq!(fleet.settle().forecast.done, 1);
}

#[test]
fn a_cordon_by_someone_else_stays() {
    let mut fleet = Fleet::new(2, draining(json!({})));
    fleet.cordon("n0", true);
    let plan = fleet.settle();
    assert_eq!(waits(&plan, "n0"), "another actor cordoned the node");
    assert_eq!((stage(&plan, "n0"), stage(&plan, "n1")), (UpgradeStage::Skipped, UpgradeStage::Done));

    // Another actor cordons the node between the plan and the write.
    let mut fleet = Fleet::new(1, draining(json!({})));
    let plan = fleet.plan();
    fleet.cordon("n0", true);
    plan.changes().for_each(|change| fleet.make(change));
    assert_eq!(fleet.state("n0"), "");
    assert!(fleet.nodes["n0"].facts.unschedulable);

    // Another actor removes farrier's cordon and later cordons the node itself, during the upgrade.
    let mut fleet = Fleet::new(1, draining(json!({})));
    fleet.reconcile(usize::MAX);
    fleet.cordon("n0", false);
    fleet.reconcile(usize::MAX);
    fleet.cordon("n0", true);
    assert_eq!(fleet.settle().forecast.done, 1);
    assert!(fleet.nodes["n0"].facts.unschedulable);
}

#[test]
fn a_node_that_is_away_is_passed_over_and_one_that_dies_in_its_turn_has_failed() {
    let mut fleet = Fleet::new(3, draining(json!({"maxParallel": 2})));
    fleet.away("n0", true);
    let plan = fleet.reconcile(usize::MAX);
    assert_eq!(waits(&plan, "n0"), "it is not Ready");
    assert_eq!((stage(&plan, "n0"), stage(&plan, "n1")), (UpgradeStage::Skipped, UpgradeStage::Begins));
    assert_eq!(waits(&plan, "n2"), "nodes without a working driver, or not Ready: 2; maxParallel: 2");
    fleet.settle_until(|fleet| fleet.state("n1") == "drained");
    fleet.reconcile(usize::MAX);
    fleet.away("n1", true);
    fleet.away("n0", false);
    fleet.pass_time(60);
    let plan = fleet.plan();
    assert_eq!((stage(&plan, "n0"), stage(&plan, "n2")), (UpgradeStage::Begins, UpgradeStage::Waits));
    let plan = fleet.settle();
    let (node, why) = plan.failure().unwrap();
    assert_eq!((node, why), ("n1", "the node is not Ready; its driver's pod was not replaced within 5m"));
    assert!(fleet.nodes.values().all(|node| !node.facts.unschedulable));
}

#[test]
fn a_node_that_dies_with_its_old_driver_says_nothing_about_the_image() {
    for state in ["cordoned", "drained"] {
        let mut fleet = Fleet::new(1, draining(json!({})));
        fleet.held = state == "cordoned";
        fleet.settle_until(|fleet| fleet.state("n0") == state);
        fleet.away("n0", true);
        let plan = fleet.settle();
        assert_eq!((fleet.state("n0"), plan.failure()), ("not-drained", None), "{state}");
        assert_eq!(
            (stage(&plan, "n0"), waits(&plan, "n0").as_str()),
            (UpgradeStage::Skipped, "it is not Ready")
        );
        assert_eq!(fleet.nodes["n0"].driver.as_ref().unwrap().image, "v1");
        fleet.held = false;
        fleet.away("n0", false);
        assert_eq!(fleet.settle().forecast.done, 1, "and the node is retried");
    }
}

/// The DaemonSet controller leaves a pod on a node with a new `NoSchedule` taint, and creates no other there.
#[test]
fn no_driver_is_taken_from_a_node_whose_taint_keeps_the_next_one_off() {
    let taint = |fleet: &mut Fleet, taint: Option<&str>| {
        let taint = taint.map(|key| Taint {
            key: key.to_owned(),
            effect: "NoSchedule".to_owned(),
            ..Taint::default()
        });
        fleet.nodes.get_mut("n0").unwrap().taint = taint;
    };
    for state in ["", "cordoned", "drained"] {
        let mut fleet = Fleet::new(1, draining(json!({})));
        fleet.settle_until(|fleet| fleet.state("n0") == state);
        taint(&mut fleet, Some("maintenance"));
        let plan = fleet.settle();
        let why = "its driver pod does not tolerate its taint maintenance:NoSchedule";
        assert_eq!(
            (stage(&plan, "n0"), waits(&plan, "n0").as_str()),
            (UpgradeStage::Skipped, why),
            "{state}"
        );
        let node = &fleet.nodes["n0"];
        assert_eq!((node.driver.as_ref().unwrap().image.as_str(), node.facts.unschedulable), ("v1", false));
        taint(&mut fleet, None);
        assert_eq!(fleet.settle().forecast.done, 1);
    }

    // The taint comes when the old driver is gone.
    let mut fleet = Fleet::new(2, draining(json!({})));
    fleet.settle_until(|fleet| fleet.state("n0") == "drained");
    fleet.reconcile(usize::MAX);
    taint(&mut fleet, Some("maintenance"));
    let plan = fleet.settle();
    let why = "its new driver was not ready within 150s: taint maintenance:NoSchedule keeps its pod off";
    assert_eq!((plan.failure(), plan.fault()), (Some(("n0", why)), None));
    assert_eq!(fleet.nodes["n1"].driver.as_ref().unwrap().image, "v1", "no other node is started");
}

#[test]
fn pods_that_cannot_be_seen_are_not_taken_for_none() {
    let mut fleet = Fleet::new(1, draining(json!({})));
    fleet.cannot_list_pods = Some("farrier may not list pods".to_owned());
    fleet.settle_until(|fleet| fleet.state("n0") == "not-drained");
    assert!(waits(&fleet.plan(), "n0").ends_with("its pods cannot be listed: farrier may not list pods"));
    assert!(!fleet.nodes["n0"].facts.unschedulable);
    assert_eq!(fleet.nodes["n0"].driver.as_ref().unwrap().image, "v1");
    fleet.cannot_list_pods = None;
    assert_eq!(fleet.settle().forecast.done, 1);
}

#[test]
fn a_node_that_boots_another_kernel_is_given_back() {
    for state in ["cordoned", "drained", "driver-restarted"] {
        let mut fleet = Fleet::new(1, draining(json!({})));
        fleet.modules.insert("v2".to_owned(), ["k1".to_owned()].into());
        fleet.settle_until(|fleet| fleet.state("n0") == state);
        fleet.reboot("n0", "k2", true);
        fleet.settle();
        assert!(!fleet.nodes["n0"].facts.unschedulable, "{state}");
        assert_eq!(fleet.state("n0"), "", "{state}: nothing is known against the image");
    }
    let mut fleet = Fleet::new(1, draining(json!({})));
    fleet.reboot("n0", "k2", false);
    assert_eq!(
        waits(&fleet.plan(), "n0"),
        "its kernel, or whether the new image has modules for it, is unknown"
    );
}

#[test]
fn a_note_that_cannot_be_read_says_nothing() {
    for hostile in ["", "{}", "[]", r#"{"state": "cordoned"}"#, "\u{1b}[2J"] {
        let mut fleet = Fleet::new(1, draining(json!({})));
        let node = fleet.nodes.get_mut("n0").unwrap();
        node.facts.annotations.insert(UPGRADE.to_owned(), hostile.to_owned());
        assert_eq!(fleet.settle().forecast.done, 1, "{hostile:?}");
    }
    let mut fleet = Fleet::new(1, draining(json!({})));
    let future = r#"{"rollout": "drivers/mft", "state": "cordoned", "since": "2999-01-01T00:00:00Z",
        "began": "2999-01-01T00:00:00Z", "to": "v2", "cordoned": false}"#;
    let node = fleet.nodes.get_mut("n0").unwrap();
    node.facts.annotations.insert(UPGRADE.to_owned(), future.to_owned());
    assert_eq!(fleet.settle().forecast.done, 1, "the clock has jumped");
}

#[test]
fn the_plan_is_readable_before_it_starts() {
    let mut fleet = Fleet::new(5, draining(json!({"canary": 1, "maxParallel": 2, "between": "1m"})));
    fleet.cordon("n4", true);
    fleet.settle_until(|fleet| fleet.state("n0") == "uncordoned");
    fleet.pass_time(60);
    fleet.reconcile(usize::MAX);
    let plan = fleet.plan();
    insta::assert_snapshot!(format!("{}\n\n{}", plan.summary(), crate::plan::text(&upgrade_table(&plan))));
    insta::assert_snapshot!(serde_json::to_string_pretty(&plan).unwrap());
}

/// Event in a fleet.
#[derive(Clone, Debug)]
enum Event {
    Vanish(usize),
    Join(usize, bool),
    Reboot(usize, bool, bool),
    Cordon(usize, bool),
    DeleteDriver(usize),
    Away(usize, bool),
    Operator(usize, bool),
    NewImage(usize),
    Hold(bool),
    Pause(bool),
    JobEnds(bool),
    Time(i64),
}

fn events() -> impl Strategy<Value = Event> {
    prop_oneof![
        (0..6_usize).prop_map(Event::Vanish),
        (0..6_usize, any::<bool>()).prop_map(|(node, kernel)| Event::Join(node, kernel)),
        (0..6_usize, any::<bool>(), any::<bool>())
            .prop_map(|(node, kernel, known)| Event::Reboot(node, kernel, known)),
        (0..6_usize, any::<bool>()).prop_map(|(node, on)| Event::Cordon(node, on)),
        (0..6_usize).prop_map(Event::DeleteDriver),
        (0..6_usize, any::<bool>()).prop_map(|(node, on)| Event::Away(node, on)),
        (0..6_usize, any::<bool>()).prop_map(|(node, on)| Event::Operator(node, on)),
        (1..5_usize).prop_map(Event::NewImage),
        any::<bool>().prop_map(Event::Hold),
        any::<bool>().prop_map(Event::Pause),
        any::<bool>().prop_map(Event::JobEnds),
        (0..400_i64).prop_map(Event::Time),
    ]
}

fn happen(fleet: &mut Fleet, event: &Event) {
    let name = |number: &usize| format!("n{number}");
    let kernel = |other: &bool| if *other { "k2" } else { "k1" };
    match event {
        Event::Vanish(node) => drop(fleet.nodes.remove(&name(node))),
        Event::Join(node, other) if !fleet.nodes.contains_key(&name(node)) => {
            fleet.join(&name(node), kernel(other));
        }
        Event::Join(..) => {}
        Event::Reboot(node, other, is_known) => fleet.reboot(&name(node), kernel(other), *is_known),
        Event::Cordon(node, on) => fleet.cordon(&name(node), *on),
        Event::DeleteDriver(node) => fleet.delete_driver(&name(node)),
        Event::Away(node, on) => fleet.away(&name(node), *on),
        Event::Operator(node, on) => fleet.operate(&name(node), *on),
        Event::NewImage(version) => fleet.image = format!("v{version}"),
        Event::Hold(on) => fleet.held = *on,
        Event::Pause(on) => fleet.paused = *on,
        Event::JobEnds(well) => end_jobs(fleet, *well),
        Event::Time(seconds) => fleet.pass_time(*seconds),
    }
}

fn end_jobs(fleet: &mut Fleet, well: bool) {
    for job in fleet.jobs.values_mut().filter(|job| **job == JobState::Running) {
        *job = if well { JobState::Succeeded } else { JobState::Failed("no".to_owned()) };
    }
}

fn end_operators(fleet: &mut Fleet) {
    (0..6).for_each(|number| fleet.operate(&format!("n{number}"), false));
}

/// `v3` has no modules for `k2`, and `v4` never works.
fn eventful(most: u32, nodes: usize, kind: usize) -> Fleet {
    let mut upgrade = match kind {
        0 => json!({}),
        1 => draining(json!({"canary": 1})),
        2 => draining(json!({"waitFor": {"job": "smoke"}, "onFailure": "stop", "between": "1m"})),
        3 => draining(json!({"canary": {"matchLabels": {"name": "n0"}}})),
        _ => draining(json!({"drain": "device-users", "forecast": "forecast"})),
    };
    upgrade["maxParallel"] = most.into();
    let mut fleet = Fleet::new(nodes, upgrade);
    fleet.modules.insert("v3".to_owned(), ["k1".to_owned()].into());
    fleet.broken.insert("v4".to_owned());
    fleet
}

/// Reconciles once, killed after this many steps. Nodes may only start within `maxParallel`.
fn look(
    fleet: &mut Fleet,
    most: usize,
    steps: usize,
    meanwhile: Option<&Event>,
) -> Result<(), TestCaseError> {
    let plan = fleet.plan();
    let (taken, down) = fleet.down();
    let begun = plan.nodes.iter().filter(|node_upgrade| node_upgrade.stage == UpgradeStage::Begins);
    let works = |node_upgrade: &&PlannedNodeUpgrade| {
        let node = &fleet.nodes[&node_upgrade.node];
        node.driver.as_ref().is_some_and(|driver| fleet.is_ready(node, driver))
    };
    let (begun, more_down) = (begun.clone().count(), begun.filter(works).count());
    prop_assert!(begun == 0 || taken + begun <= most, "{taken} are in progress, and {begun} more");
    prop_assert!(more_down == 0 || down + more_down <= most, "{down} are down, and {more_down} more");
    for node_upgrade in plan.nodes.iter().filter(|node_upgrade| node_upgrade.stage == UpgradeStage::Done) {
        prop_assert!(
            !fleet.unchecked.contains(&node_upgrade.node),
            "{} has a driver that was not checked",
            node_upgrade.node
        );
    }
    if let Some(event) = meanwhile {
        happen(fleet, event);
    }
    let names: Vec<String> = plan.nodes.iter().map(|node_upgrade| node_upgrade.node.clone()).collect();
    prop_assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len());
    for change in plan.changes().take(steps) {
        fleet.make(change);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// farrier is killed between any two steps, while nodes vanish, reboot, and are cordoned by people. The invariants:
    ///
    /// - At no moment are more nodes in progress than allowed.
    /// - No node loses its driver for one that does not fit, or while an operator upgrades it (see `Fleet::evict`).
    /// - No node loses another actor's cordon (`Fleet::mark`).
    /// - No node whose old driver farrier ended is done before its new driver was checked.
    /// - When the events stop, all nodes are as before, and those that can have the new driver have it.
    #[test]
    fn no_node_stays_cordoned_and_never_too_many_are_down(
        most in 1..4_u32,
        nodes in 1..6_usize,
        kind in 0..5_usize,
        looks in prop::collection::vec((prop::option::of(events()), 0..4_usize, 0..60_i64), 0..60),
        meanwhile in prop::option::of((0..6_usize, any::<bool>())),
    ) {
        let limit = usize::try_from(most).unwrap();
        let mut fleet = eventful(most, nodes, kind);
        let cordon = meanwhile.map(|(node, on)| Event::Cordon(node, on));
        for (event, steps, seconds) in &looks {
            fleet.pass_time(*seconds);
            look(&mut fleet, limit, *steps, cordon.as_ref())?;
            if let Some(event) = event {
                happen(&mut fleet, event);
            }
        }
        (fleet.held, fleet.paused) = (false, false);
        for node in fleet.nodes.values_mut() {
            node.is_known = true;
            node.facts.not_ready = false;
        }
        fleet.new_job = Some(JobState::Succeeded);
        end_operators(&mut fleet);
        end_jobs(&mut fleet, true);
        fleet.settle();
        let facts: Vec<_> = fleet.nodes.values().map(|node| node.facts.clone()).collect();
        for mark in clear_failures(&facts, ROLLOUT) {
            fleet.make(&mark);
        }
        let plan = fleet.settle();
        prop_assert_eq!(fleet.down().0, 0, "nothing is in progress any more");
        for (name, node) in &fleet.nodes {
            prop_assert_eq!(node.facts.unschedulable, node.by_person, "{} is cordoned", name);
        }
        // Excludes an image that never works, nodes that do not work for another reason, and canary nodes that cannot
        // be upgraded.
        let is_stopped = fleet.image == "v4" || fleet.down().1 >= limit || (kind == 3 && !done(&plan, "n0"));
        for node_upgrade in plan.nodes.iter().filter(|_| !is_stopped) {
            prop_assert!(matches!(node_upgrade.stage, UpgradeStage::Done | UpgradeStage::Skipped), "{:?}", node_upgrade);
        }
    }

    /// An upgrade that is removed from the definition halfway leaves nothing behind.
    #[test]
    fn an_upgrade_that_is_given_up_leaves_no_cordon(
        looks in prop::collection::vec((prop::option::of(events()), 0..4_usize, 0..60_i64), 0..30),
    ) {
        let mut fleet = eventful(2, 4, 1);
        for (event, steps, seconds) in &looks {
            fleet.pass_time(*seconds);
            look(&mut fleet, 2, *steps, None)?;
            if let Some(event) = event {
                happen(&mut fleet, event);
            }
        }
        for _ in 0..2 {
            let facts: Vec<_> = fleet.nodes.values().map(|node| node.facts.clone()).collect();
            for mark in release_uncovered(&facts, |_, note| note.rollout != ROLLOUT) {
                fleet.make(&mark);
            }
            end_operators(&mut fleet);
        }
        prop_assert_eq!(fleet.down().0, 0);
        for node in fleet.nodes.values() {
            prop_assert_eq!(node.facts.unschedulable, node.by_person);
        }
    }
}

/// Whether the node has the new driver.
fn done(plan: &PlannedUpgrade, name: &str) -> bool {
    plan.nodes
        .iter()
        .any(|node_upgrade| node_upgrade.node == name && node_upgrade.stage == UpgradeStage::Done)
}
