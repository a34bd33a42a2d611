use serde_json::json;

use super::*;
use crate::{
    kmod::Verdict,
    plan::{
        Container, JobState, KERNEL_LABEL, PAUSED_ANNOTATION, RECORD_ANNOTATION, RolloutDecision, Taint,
        UPGRADE, WorkloadFacts,
        fixtures::{K47, K48, World, live_daemon_set, name, node},
    },
};

const OLD: &str = "registry.test/old:1";

/// Returns a world with three nodes that have a ready pod of the old image; the next image is published.
#[expect(clippy::needless_pass_by_value, reason = "callers pass a `json!` literal")]
fn world(upgrade: serde_json::Value) -> World {
    let mut world = World::live(&[K47, K47, K47]);
    world.now = "2026-07-01T12:00:00Z".parse().unwrap();
    world.image("mft").spec.rollout = vec![
        serde_json::from_value(json!({
            "strategy": "image", "namespace": "kube-system", "daemonSet": "mft", "container": "driver",
            "upgrade": upgrade,
        }))
        .unwrap(),
    ];
    world.snapshot.daemon_sets[0].live.as_mut().unwrap().update = UpdateStrategy::OnDelete;
    for node in ["n0", "n1", "n2"] {
        world.run_pod(node, true);
    }
    holds(&mut world, OLD, &[K47]);
    world.publish(Verdict::Loads);
    world
}

fn holds(world: &mut World, image: &str, kernels: &[&str]) {
    let kernels = kernels.iter().map(|kernel| (*kernel).to_owned()).collect();
    world.observed.contents.insert(image.to_owned(), ImageContents { kernels, ..ImageContents::default() });
}

/// Returns a world in which the DaemonSet has the new image, and no pod has it yet.
fn rewritten(upgrade: serde_json::Value) -> World {
    let mut world = world(upgrade);
    let planned = world.plan().rollouts.swap_remove(0);
    assert!(matches!(planned.decision, RolloutDecision::Rewrite { .. }), "{:?}", planned.decision);
    assert!(planned.upgrade.unwrap().changes().next().is_none(), "the DaemonSet comes first");
    for change in &planned.changes {
        world.apply(change).unwrap();
    }
    let image = world.image_of("driver").to_owned();
    holds(&mut world, &image, &[K47]);
    world
}

fn planned(world: &World) -> PlannedRollout {
    world.plan().rollouts.swap_remove(0)
}

/// Applies the changes of nodes; returns the names of the evicted pods.
fn make(world: &mut World) -> Vec<String> {
    let upgrade = planned(world).upgrade.unwrap();
    let mut evicted = Vec::new();
    for change in upgrade.changes() {
        match change {
            Change::Node(change) => {
                let nodes = &mut world.snapshot.nodes;
                let node = nodes.iter_mut().find(|node| node.name == change.name).unwrap();
                let text = change.annotations[UPGRADE].clone().unwrap();
                node.annotations.insert(UPGRADE.to_owned(), text);
                node.unschedulable = change.cordon.unwrap_or(node.unschedulable);
            }
            Change::Restart(pod) => evicted.push(pod.name.clone()),
            // Jobs are not simulated.
            Change::Check(_) => {}
            other => panic!("{other:?}"),
        }
    }
    evicted
}

fn later(world: &mut World, minutes: i64) {
    world.now += jiff::SignedDuration::from_mins(minutes);
}

#[test]
fn nodes_get_a_new_version_one_after_the_other() {
    let mut world = rewritten(json!({}));
    assert_eq!(make(&mut world), [""; 0], "the first node is marked");
    assert_eq!(make(&mut world), ["mft-n0"]);
    world.run_pod("n0", true);
    later(&mut world, 3);
    for _ in 0..4 {
        make(&mut world);
    }
    let upgrade = planned(&world).upgrade.unwrap();
    let stages: Vec<UpgradeStage> = upgrade.nodes.iter().map(|node_upgrade| node_upgrade.stage).collect();
    assert_eq!(stages, [UpgradeStage::UnderWay, UpgradeStage::Waits, UpgradeStage::Done]);
    assert!(planned(&world).changes.is_empty(), "no pod is restarted outside the upgrade");
    for node in ["n1", "n2"] {
        make(&mut world);
        world.run_pod(node, true);
        later(&mut world, 3);
        for _ in 0..4 {
            make(&mut world);
        }
    }
    let planned = planned(&world);
    let [Change::DaemonSet(noted)] = &planned.changes[..] else { panic!("{:?}", planned.changes) };
    assert!(noted.image_changes().is_empty(), "the image is recorded as good");
    assert!(!planned.is_rewrite(&world.snapshot), "and that does not count toward the rate limit");
    assert!(planned.upgrade.unwrap().forecast.is_over());
}

#[test]
fn the_plan_can_be_read_before_the_daemon_set_has_the_image() {
    let mut world = world(json!({}));
    let now = planned(&world);
    let RolloutDecision::Rewrite { to, .. } = &now.decision else { panic!("{:?}", now.decision) };
    let upgrade = now.upgrade.unwrap();
    assert_eq!((upgrade.changes().count(), upgrade.forecast.waiting), (0, 3));
    assert!(upgrade.forecast.ends.is_some());
    let read = |upgrade: &PlannedUpgrade| -> Vec<(String, String)> {
        let node_upgrades = upgrade.nodes.iter();
        node_upgrades
            .map(|node_upgrade| (node_upgrade.to.clone(), node_upgrade.waits.as_ref().unwrap().to_string()))
            .collect()
    };
    assert_eq!(read(&upgrade)[2], (to.to_string(), "waits until the DaemonSet has the new image".to_owned()));

    let live = world.snapshot.daemon_sets[0].live.as_mut().unwrap();
    live.annotations.insert(PAUSED_ANNOTATION.to_owned(), "true".to_owned());
    let paused = planned(&world);
    assert_eq!(paused.decision, RolloutDecision::Hold(HoldReason::Paused));
    let (image, waits) = read(&paused.upgrade.unwrap()).swap_remove(0);
    assert_eq!((image, waits.starts_with("the upgrade is paused")), (to.to_string(), true));
}

/// A node whose taint the DaemonSet does not tolerate has no pod, and the upgrade does not wait for it. The upgrade
/// does wait for a pod that is still to come.
#[test]
fn a_pod_that_is_away_counts() {
    for (desired, begun) in [(3, 1), (4, 0)] {
        let mut world = rewritten(json!({}));
        world.snapshot.nodes.push(node("n3", K47));
        world.snapshot.daemon_sets[0].live.as_mut().unwrap().desired = desired;
        assert_eq!(planned(&world).upgrade.unwrap().changes().count(), begun, "{desired}");
    }
}

#[test]
fn a_node_whose_taint_keeps_new_pods_off_keeps_its_driver() {
    let taint = |world: &mut World| {
        world.snapshot.nodes[0].taints = vec![Taint {
            key: "maintenance".to_owned(),
            effect: "NoSchedule".to_owned(),
            ..Taint::default()
        }];
    };
    let mut world = rewritten(json!({}));
    taint(&mut world);
    assert_eq!((stage(&world, "n0"), stage(&world, "n1")), (UpgradeStage::Skipped, UpgradeStage::Begins));
    world.snapshot.nodes.push(node("n3", K47));
    world.snapshot.daemon_sets[0].live.as_mut().unwrap().desired = 3;
    assert_eq!(
        stage(&world, "n1"),
        UpgradeStage::Waits,
        "the pod of n3 is missing: the status does not count n0"
    );

    let mut world = rewritten(json!({}));
    make(&mut world);
    assert_eq!(make(&mut world), ["mft-n0"]);
    world.snapshot.pods.retain(|pod| pod.node != "n0");
    taint(&mut world);
    assert_eq!((stage(&world, "n0"), stage(&world, "n1")), (UpgradeStage::UnderWay, UpgradeStage::Waits));
    assert_eq!(uncordoned(&world.snapshot, &world.plan().rollouts, &world.instance), []);
}

#[test]
fn pods_that_are_replaced_by_themselves_cannot_be_ordered() {
    let mut world = world(json!({}));
    world.snapshot.daemon_sets[0].live.as_mut().unwrap().update = UpdateStrategy::RollingUpdate;
    let planned = planned(&world);
    assert_eq!(planned.decision, RolloutDecision::Hold(HoldReason::NotOnDelete));
    assert_eq!((planned.changes, planned.upgrade), (Vec::new(), None));
}

/// Regression: without a cluster, `upgrade` was ignored and the manifest rewritten.
#[test]
fn an_upgrade_needs_a_running_cluster() {
    let mut world = world(json!({}));
    world.snapshot.daemon_sets[0].live = None;
    assert_eq!(planned(&world).decision, RolloutDecision::Hold(HoldReason::OnlyLive));
}

#[test]
fn a_node_whose_modules_stay_the_same_is_left_in_peace() {
    let mut world = rewritten(json!({"maxParallel": 3}));
    world.snapshot.nodes.push(node("n3", K48));
    let member = |text: &str| [(K47.to_owned(), crate::image::Digest::of(text.as_bytes()))].into();
    let image = world.image_of("driver").to_owned();
    world.observed.contents.get_mut(OLD).unwrap().members = member("a");
    world.observed.contents.get_mut(&image).unwrap().members = member("a");
    assert_eq!(planned(&world).upgrade.unwrap().changes().count(), 0);
    world.observed.contents.get_mut(&image).unwrap().members = member("b");
    assert_eq!(planned(&world).upgrade.unwrap().changes().count(), 3);
}

#[test]
fn those_leave_that_the_definition_means() {
    let mut world = rewritten(json!({
        "drain": "device-users", "deviceResources": ["example.org/*"], "podSelector": {"matchLabels": {"may": "go"}},
    }));
    let pod = |name: &str, label: &str, resource: &str, stays| WorkloadFacts {
        name: name.to_owned(),
        node: "n0".to_owned(),
        labels: [("may".to_owned(), label.to_owned())].into(),
        requests: [resource.to_owned()].into(),
        stays,
        ..WorkloadFacts::default()
    };
    world.snapshot.workloads = vec![
        pod("user", "go", "example.org/device", false),
        pod("kept", "stay", "example.org/device", false),
        pod("other", "go", "cpu", false),
        pod("of-a-daemon-set", "go", "example.org/device", true),
    ];
    make(&mut world);
    assert!(world.snapshot.nodes[0].unschedulable);
    assert_eq!(make(&mut world), ["user"]);
    world.snapshot.workloads.clear();
    make(&mut world);
    assert_eq!(make(&mut world), ["mft-n0"]);
}

/// A forecast on the node finds the device users by their open device files.
#[test]
fn those_leave_that_a_forecast_finds() {
    let mut world = rewritten(json!({"drain": "device-users", "forecast": "forecast"}));
    let pod = |namespace: &str, name: &str| WorkloadFacts {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        uid: name.to_owned(),
        node: "n0".to_owned(),
        ..WorkloadFacts::default()
    };
    let holder =
        |pod: Option<&str>| Holder { pod: pod.map(str::to_owned), description: "mft: used".to_owned() };
    world.snapshot.workloads = vec![pod("apps", "user"), pod("apps", "other")];
    make(&mut world);
    make(&mut world);
    let upgrade = planned(&world).upgrade.unwrap();
    let Some(Change::Check(job)) = upgrade.changes().next() else { panic!("{upgrade:?}") };
    assert_eq!((job.template.as_str(), job.node.as_str()), ("forecast", "n0"));
    assert_eq!(job.driver_pod.as_deref(), Some(world.snapshot.pods[0].version.uid.as_str()));

    world.snapshot.checks.insert(job.name.clone(), JobState::Running);
    let of_job = |namespace: &str, pods: &[Option<&str>]| WorkloadFacts {
        labels: [(JOB_NAME.to_owned(), job.name.clone())].into(),
        holders: pods.iter().map(|pod| holder(*pod)).collect(),
        ..pod(namespace, "forecast-of-n0")
    };
    world.snapshot.workloads.push(of_job("apps", &[Some("other")]));
    assert_eq!(make(&mut world), [""; 0], "it is not the driver's namespace");
    *world.snapshot.workloads.last_mut().unwrap() =
        of_job("kube-system", &[Some("user"), Some("forecast-of-n0x")]);
    assert_eq!(make(&mut world), ["user"]);

    world.snapshot.workloads = vec![pod("apps", "other"), of_job("kube-system", &[None])];
    let upgrade = planned(&world).upgrade.unwrap();
    let node_upgrade = upgrade.nodes.iter().find(|node_upgrade| node_upgrade.node == "n0").unwrap();
    assert_eq!(
        node_upgrade.waits.as_ref().unwrap().to_string(),
        "waits until its driver can be unloaded: mft: used"
    );
    world.snapshot.checks.insert(job.name.clone(), JobState::Succeeded);
    assert_eq!(make(&mut world), ["mft-n0"]);
}

/// Returns a world whose first node got a driver that does not work.
fn failed(on_failure: &str) -> World {
    let mut world = rewritten(json!({"onFailure": on_failure}));
    make(&mut world);
    make(&mut world);
    world.run_pod("n0", false);
    make(&mut world);
    later(&mut world, 13);
    make(&mut world);
    world
}

#[test]
fn an_image_that_fails_is_restored_or_stays_as_the_definition_says() {
    let mut world = failed("restore");
    let planned_now = planned(&world);
    assert!(
        matches!(planned_now.decision, RolloutDecision::Hold(HoldReason::RolloutFailed { .. })),
        "{:?}",
        planned_now.decision
    );
    assert!(!planned_now.is_rewrite(&world.snapshot), "a restored image does not wait for the rate limit");
    assert!(!planned_now.has_applies(), "nor for a webhook that changed an earlier write");
    for change in &planned_now.changes {
        world.apply(change).unwrap();
    }
    assert_eq!(world.image_of("driver"), OLD);
    let upgrade = planned(&world).upgrade.unwrap();
    let first = upgrade.nodes.iter().find(|node_upgrade| node_upgrade.node == "n0").unwrap();
    assert_eq!(first.stage, UpgradeStage::Begins, "the node gets the old image back");
    world.observed.contents.remove(OLD);
    let node_upgrades = planned(&world).upgrade.unwrap().nodes;
    assert_eq!(node_upgrades[0].stage, UpgradeStage::Begins, "also when the old image is not farrier's");

    let world = failed("stop");
    assert!(planned(&world).changes.is_empty());
    assert!(world.plan().has_failures());
    assert_ne!(world.image_of("driver"), OLD);
}

/// A webhook writes the registry of a mirror into the DaemonSet.
#[test]
fn a_restored_image_is_recognized_by_its_digest() {
    let mut live = live_daemon_set("mft").live.unwrap();
    let record = json!({"driver": {"set": "r.test/x@sha256:2", "replaced": "r.test/x@sha256:1",
        "at": "1970-01-01T00:00:00Z", "state": "failed"}});
    live.annotations.insert(RECORD_ANNOTATION.to_owned(), record.to_string());
    assert!(is_restored(&live, "driver", "mirror.test/x@sha256:1"));
    assert!(!is_restored(&live, "driver", "mirror.test/x@sha256:2"));
}

/// Applies the changes of the DaemonSet.
fn apply(world: &mut World) -> RolloutDecision {
    let planned = planned(world);
    for change in &planned.changes {
        world.apply(change).unwrap();
    }
    planned.decision
}

fn stage(world: &World, node: &str) -> UpgradeStage {
    let node_upgrades = planned(world).upgrade.unwrap().nodes;
    node_upgrades.iter().find(|node_upgrade| node_upgrade.node == node).unwrap().stage
}

#[test]
fn an_image_is_restored_whatever_else_the_rollout_waits_for() {
    let mut world = failed("restore");
    world.snapshot.nodes.push(node("n3", K48));
    let live = world.snapshot.daemon_sets[0].live.as_mut().unwrap();
    live.annotations.insert(PAUSED_ANNOTATION.to_owned(), "true".to_owned());
    assert_eq!(apply(&mut world), RolloutDecision::Hold(HoldReason::Paused), "a person can stop it");
    world.snapshot.daemon_sets[0].live.as_mut().unwrap().annotations.remove(PAUSED_ANNOTATION);
    assert!(matches!(apply(&mut world), RolloutDecision::Hold(HoldReason::RolloutFailed { .. })));
    assert_eq!(world.image_of("driver"), OLD);
    assert!(matches!(apply(&mut world), RolloutDecision::Hold(HoldReason::MixedKernels { .. })));
}

#[test]
fn a_check_that_cannot_be_made_is_not_the_drivers_failure() {
    let mut world = rewritten(json!({"waitFor": {"job": "not-there"}, "timeout": "5m"}));
    make(&mut world);
    make(&mut world);
    world.run_pod("n0", true);
    make(&mut world);
    later(&mut world, 60);
    make(&mut world);
    let image = world.image_of("driver").to_owned();
    apply(&mut world);
    assert_eq!((world.image_of("driver"), stage(&world, "n0")), (image.as_str(), UpgradeStage::Failed));
    assert!(world.plan().has_failures());
    assert_eq!(planned(&world).upgrade.unwrap().changes().count(), 0, "no other node is started");
}

/// A union image changes with each kernel: the new image has the same modules for the failed node.
#[test]
fn a_failure_stays_with_the_pod_when_the_image_becomes_another() {
    let mut world = failed("stop");
    let first = world.image_of("driver").to_owned();
    "2".clone_into(&mut world.resolved.images.get_mut(&name("mft")).unwrap().as_mut().unwrap().version);
    world.publish(Verdict::Loads);
    assert!(matches!(apply(&mut world), RolloutDecision::Rewrite { .. }));
    let second = world.image_of("driver").to_owned();
    assert_ne!(first, second);
    for image in [first, second] {
        holds(&mut world, &image, &[K47]);
        let members = [(K47.to_owned(), crate::image::Digest::of(b"the same"))].into();
        world.observed.contents.get_mut(&image).unwrap().members = members;
    }
    assert_eq!(stage(&world, "n0"), UpgradeStage::Failed);
    assert_eq!(planned(&world).upgrade.unwrap().changes().count(), 0);
    world.run_pod("n0", true);
    later(&mut world, 1);
    world.snapshot.pods.last_mut().unwrap().created = Some(world.now);
    assert_eq!(stage(&world, "n0"), UpgradeStage::Done, "the failure concerns the earlier pod");
}

/// The mirror's reference has another registry and the same digest.
#[test]
fn a_pod_whose_image_comes_from_a_mirror_is_not_outdated() {
    let mut world = rewritten(json!({}));
    let (_, digest) = world.image_of("driver").split_once('@').unwrap();
    let mirrored = format!("mirror.test/drivers/mft@{digest}");
    for pod in &mut world.snapshot.pods {
        pod.images.insert("driver".to_owned(), mirrored.clone());
    }
    assert_eq!(planned(&world).upgrade.unwrap().forecast.done, 3);
}

#[test]
fn a_daemon_set_has_one_order() {
    let mut world = world(json!({}));
    let found = &mut world.snapshot.daemon_sets[0];
    found.containers.push(Container { name: "other".to_owned(), ..found.containers[0].clone() });
    let mut second = serde_json::to_value(&world.image("mft").spec.rollout[0]).unwrap();
    second["container"] = "other".into();
    world.image("mft").spec.rollout.push(serde_json::from_value(second.clone()).unwrap());
    let together = world.plan().rollouts;
    let upgrades: Vec<bool> = together.iter().map(|rollout| rollout.upgrade.is_some()).collect();
    assert_eq!(upgrades, [true, false], "containers with one image are upgraded together");
    assert!(together.iter().all(|rollout| matches!(rollout.decision, RolloutDecision::Rewrite { .. })));
    second["upgrade"]["drain"] = "node".into();
    world.image("mft").spec.rollout[1] = serde_json::from_value(second.clone()).unwrap();
    for rollout in world.plan().rollouts {
        let held = matches!(rollout.decision, RolloutDecision::Hold(HoldReason::OrderedTwice { .. }));
        assert!(held && rollout.upgrade.is_none(), "{:?}", rollout.decision);
    }
    second.as_object_mut().unwrap().remove("upgrade");
    world.image("mft").spec.rollout[1] = serde_json::from_value(second).unwrap();
    assert!(world.plan().rollouts[0].upgrade.is_some());
}

#[test]
fn a_right_that_is_missing_in_another_namespace_holds_nothing() {
    let mut world = world(json!({"drain": "device-users", "forecast": "forecast"}));
    for what in [ObservedKind::Pods, ObservedKind::Checks] {
        for (namespace, holds) in [("another", false), ("kube-system", true)] {
            world.snapshot.unseen_in.insert((what, namespace.to_owned()), "no right".to_owned());
            let decision = planned(&world).decision;
            let held = matches!(&decision, RolloutDecision::Hold(HoldReason::Unseen { detail, .. }) if detail == "no right");
            assert_eq!(held, holds, "{what} {namespace}: {decision:?}");
        }
        world.snapshot.unseen_in.clear();
    }
}

#[test]
fn a_failure_is_forgotten_that_no_upgrade_is_about() {
    let given = |world: &World| uncordoned(&world.snapshot, &world.plan().rollouts, &world.instance).len();
    let mut world = failed("restore");
    assert_eq!(given(&world), 0);
    apply(&mut world);
    assert_eq!(given(&world), 0, "the node will get the old driver back");
    later(&mut world, 1);
    world.run_pod("n0", true);
    assert_eq!((stage(&world, "n0"), given(&world)), (UpgradeStage::Done, 1), "a person restored it");
    let mut world = failed("stop");
    world.image("mft").spec.rollout.clear();
    assert_eq!(given(&world), 1);
}

/// NFD removes its labels when it restarts. The DaemonSet then does not select the node, and its controller ends the pod.
#[test]
fn a_node_that_lost_its_labels_stays_in_the_upgrade() {
    const PCI: &str = "feature.node.kubernetes.io/pci-15b3.present";
    let mut cordoned = rewritten(json!({"drain": "node"}));
    make(&mut cordoned);
    for (mut world, expected) in [(failed("stop"), UpgradeStage::Failed), (cordoned, UpgradeStage::UnderWay)]
    {
        world.snapshot.daemon_sets[0].placement.node_selector = [(PCI.to_owned(), "true".to_owned())].into();
        for node in &mut world.snapshot.nodes[1..] {
            node.labels.insert(PCI.to_owned(), "true".to_owned());
        }
        world.snapshot.nodes[0].labels.remove(KERNEL_LABEL);
        world.snapshot.pods.retain(|pod| pod.node != "n0");
        assert_eq!(stage(&world, "n0"), expected);
        assert!(["n1", "n2"].iter().all(|node| stage(&world, node) == UpgradeStage::Waits));
        assert_eq!(uncordoned(&world.snapshot, &world.plan().rollouts, &world.instance), []);
        let mut unnoted = node("n3", K47);
        unnoted.labels.remove(KERNEL_LABEL);
        world.snapshot.nodes.push(unnoted);
        assert_eq!(planned(&world).upgrade.unwrap().nodes.len(), 3, "maxParallel does not count n3");
    }
}

#[test]
fn nodes_of_an_upgrade_that_is_no_more_are_given_back() {
    let given = |world: &World| uncordoned(&world.snapshot, &world.plan().rollouts, &world.instance);
    let mut world = rewritten(json!({"drain": "node"}));
    make(&mut world);
    assert!(given(&world).is_empty());
    for what in [ObservedKind::Pods, ObservedKind::Checks] {
        world.snapshot.unseen.insert(what, "no right".to_owned());
        let others = uncordoned(&world.snapshot, &[], &world.instance);
        assert_eq!(others, [], "an unreadable object is not gone");
        world.snapshot.unseen.clear();
        for (namespace, given) in [("kube-system", 0), ("another", 1)] {
            world.snapshot.unseen_in.insert((what, namespace.to_owned()), "no right".to_owned());
            let others = uncordoned(&world.snapshot, &[], &world.instance);
            assert_eq!(others.len(), given, "a namespace says nothing about another: {namespace}");
            world.snapshot.unseen_in.clear();
        }
    }
    let gone: [fn(&mut World); 4] = [
        |world| drop(world.snapshot.nodes[0].labels.remove("pci")),
        |world| world.snapshot.daemon_sets.clear(),
        |world| {
            world.snapshot.daemon_sets[0].live.as_mut().unwrap().update = UpdateStrategy::RollingUpdate;
        },
        |world| world.image("mft").spec.rollout.clear(),
    ];
    for take_away in gone {
        let before = (world.snapshot.clone(), world.definitions.clone());
        take_away(&mut world);
        let [Change::Node(change)] = &given(&world)[..] else { panic!("not given back") };
        assert_eq!((change.name.as_str(), change.cordon), ("n0", Some(false)));
        let others = uncordoned(&world.snapshot, &[], &"gpu".parse().unwrap());
        assert_eq!(others, [], "another farrier leaves the node alone");
        (world.snapshot, world.definitions) = before;
    }
}
