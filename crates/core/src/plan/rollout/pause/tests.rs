use serde_json::json;

use super::{
    super::handover::{fenced, handover_label},
    *,
};
use crate::{
    image::OperatorResource,
    kmod::Verdict,
    plan::{
        NodeAffinity, RolloutDecision, UPGRADE,
        fixtures::{K47, World, resource as policy},
        rollback,
    },
};

const DRIVER: &str = "kube-system/mft";

fn world() -> World {
    let mut world = World::live(&[K47]);
    world.publish(Verdict::Loads);
    world
}

fn decision(world: &World) -> RolloutDecision {
    let plan = world.plan();
    assert!(!plan.has_failures());
    let rollout = &plan.rollouts[0];
    let writes = matches!(rollout.decision, RolloutDecision::Rewrite { .. } | RolloutDecision::Steps { .. });
    assert_eq!(rollout.changes.is_empty(), !writes, "{rollout:?}");
    rollout.decision.clone()
}

fn reconcile(world: &mut World) {
    let plan = world.plan();
    plan.rollouts.iter().flat_map(|rollout| &rollout.changes).for_each(|change| world.apply(change).unwrap());
}

/// Pauses or resumes; returns whether anything was written.
fn set(world: &mut World, name: &str, paused: bool) -> bool {
    let changes = pause(&world.snapshot, name, paused).unwrap();
    for change in &changes {
        world.apply(change).unwrap();
    }
    !changes.is_empty()
}

#[test]
fn a_paused_rollout_waits_and_goes_on() {
    let mut world = world();
    assert!(!set(&mut world, DRIVER, false), "the rollout is not paused");
    assert!(set(&mut world, DRIVER, true) && !set(&mut world, DRIVER, true));
    assert_eq!(paused(&world.snapshot), [(DRIVER.to_owned(), true)].into());
    assert_eq!(decision(&world), RolloutDecision::Hold(HoldReason::Paused));
    insta::assert_snapshot!(
        HoldReason::Paused,
        @r#"it is paused; to resume, remove its annotation farrier.dev/paused or set it to "false""#
    );
    assert!(set(&mut world, DRIVER, false));
    assert_eq!(paused(&world.snapshot), [(DRIVER.to_owned(), false)].into());
    reconcile(&mut world);
    // An image that is already set is reported as such; another image waits.
    assert!(set(&mut world, DRIVER, true));
    assert!(matches!(decision(&world), RolloutDecision::AlreadySet { .. }));
    world.resolved.images.values_mut().for_each(|found| found.as_mut().unwrap().version = "5".to_owned());
    world.publish(Verdict::Loads);
    assert_eq!(decision(&world), RolloutDecision::Hold(HoldReason::Paused));
}

#[test]
fn any_value_but_false_pauses() {
    for (value, held) in [("true", true), ("", true), ("<b>\u{202e}", true), ("false", false)] {
        let mut world = world();
        let live = world.snapshot.daemon_sets[0].live.as_mut().unwrap();
        live.annotations.insert(PAUSED_ANNOTATION.to_owned(), value.to_owned());
        assert_eq!(decision(&world) == RolloutDecision::Hold(HoldReason::Paused), held, "{value:?}");
    }
}

#[test]
fn what_was_taken_back_is_set_again_once_it_may_go_on() {
    let mut world = world();
    reconcile(&mut world);
    let steps = rollback(&world.snapshot, &[]).unwrap();
    world.apply(steps[0].change.as_ref().unwrap()).unwrap();
    assert!(matches!(decision(&world), RolloutDecision::Hold(HoldReason::RolledBack { .. })));
    let changes = pause(&world.snapshot, DRIVER, false).unwrap();
    let [Change::DaemonSet(change)] = &changes[..] else { panic!("nothing is to be done") };
    assert!(change.annotations.is_empty(), "{change:?}");
    // An apply would remove an image that it does not name.
    assert_eq!(change.images, [("driver".to_owned(), "registry.test/old:1".to_owned())].into());
    world.apply(&changes[0]).unwrap();
    assert!(matches!(decision(&world), RolloutDecision::Rewrite { .. }));
}

/// An apply cannot name an absent node affinity.
#[test]
fn what_has_been_rolled_out_by_kernel_can_be_paused_and_goes_on() {
    let fence = |world: &World| {
        let found = &world.snapshot.daemon_sets[0];
        fenced(&found.placement.affinity, &handover_label(&found.namespace, &found.name))
    };
    for (note, affinity, paused) in [
        (r#"{"rolledBack": "2026-01-01T00:00:00Z"}"#, None, false),
        (r#"{"rolledBack": "2026-01-01T00:00:00Z"}"#, None, true),
        ("{}", Some(()), true),
    ] {
        let mut world = world();
        let affinity = affinity.map(|()| fence(&world));
        let found = &mut world.snapshot.daemon_sets[0];
        found.placement.affinity = affinity.clone().unwrap_or(NodeAffinity::Any);
        let live = found.live.as_mut().unwrap();
        live.owned.affinity = affinity.is_some();
        live.annotations.insert(PER_KERNEL_ANNOTATION.to_owned(), note.to_owned());
        let changes = pause(&world.snapshot, DRIVER, paused).unwrap();
        let [Change::DaemonSet(change)] = &changes[..] else { panic!("{changes:?}") };
        assert_eq!(
            (&change.affinity, change.annotations.contains_key(PER_KERNEL_ANNOTATION)),
            (&affinity, paused)
        );
    }
}

#[test]
fn a_paused_resource_keeps_what_farrier_wrote() {
    let mut world = world();
    let driver = json!({"repository": "nvcr.test/x", "image": "driver", "version": "1"});
    let found =
        policy(OperatorResource::NicClusterPolicy, "nic-cluster-policy", json!({"ofedDriver": driver}));
    world.snapshot.resources = vec![found];
    let rollout =
        json!({"strategy": "custom-resource", "resource": "NicClusterPolicy", "name": "nic-cluster-policy"});
    world.image("mft").spec.rollout = vec![serde_json::from_value(rollout).unwrap()];
    world.publish(Verdict::Loads);
    let change = |world: &World, paused| {
        let changes = pause(&world.snapshot, "NicClusterPolicy/nic-cluster-policy", paused).unwrap();
        let [Change::Resource(change)] = &changes[..] else { panic!("{changes:?}") };
        change.clone()
    };
    assert_eq!(change(&world, true).spec, json!({}), "farrier has set none of its fields yet");
    reconcile(&mut world);
    let written = change(&world, true);
    assert_eq!(written.spec["ofedDriver"]["image"], "mft");
    world.apply(&Change::Resource(written)).unwrap();
    assert!(matches!(decision(&world), RolloutDecision::Settled { .. }));
    assert_eq!(change(&world, false).annotations[PAUSED_ANNOTATION], "false");
    world.snapshot.resources[0].annotations.clear();
    assert_eq!(change(&world, true).spec["ofedDriver"]["image"], "mft", "without the record, too");
}

/// An apply that omitted the image would remove it, and the API server refuses a container without one.
#[test]
fn a_daemon_set_without_its_record_keeps_its_image() {
    let mut world = world();
    reconcile(&mut world);
    world.snapshot.daemon_sets[0].live.as_mut().unwrap().annotations.clear();
    let changes = pause(&world.snapshot, DRIVER, true).unwrap();
    let [Change::DaemonSet(change)] = &changes[..] else { panic!("{changes:?}") };
    assert_eq!(change.images["driver"], world.image_of("driver"));
}

#[test]
fn what_is_not_there_or_cannot_be_read_is_not_written() {
    let mut world = world();
    for name in ["kube-system/other", "NicClusterPolicy/nic-cluster-policy", "mft", "", "../mft"] {
        assert_eq!(pause(&world.snapshot, name, true), Err(HoldReason::NOT_FOUND), "{name}");
    }
    let live = world.snapshot.daemon_sets[0].live.as_mut().unwrap();
    live.annotations.insert(RECORD_ANNOTATION.to_owned(), "{".to_owned());
    assert!(matches!(pause(&world.snapshot, DRIVER, true), Err(HoldReason::BadRecord { .. })));
    world.snapshot.daemon_sets[0].live = None;
    assert_eq!(pause(&world.snapshot, DRIVER, true), Err(HoldReason::NOT_FOUND), "a manifest");
}

#[test]
fn nodes_on_which_a_driver_failed_are_forgiven() {
    let mut world = world();
    let failed = r#"{"rollout": "kube-system/mft", "state": "failed", "since": "2026-01-01T00:00:00Z",
        "began": "2026-01-01T00:00:00Z", "to": "mft:2"}"#;
    world.snapshot.nodes[0].annotations.insert(UPGRADE.to_owned(), failed.to_owned());
    assert_eq!(pause(&world.snapshot, DRIVER, true).unwrap().len(), 1);
    let changes = pause(&world.snapshot, DRIVER, false).unwrap();
    let [Change::Node(node)] = &changes[..] else { panic!("{changes:?}") };
    assert_eq!(node.annotations[UPGRADE], None);
}
