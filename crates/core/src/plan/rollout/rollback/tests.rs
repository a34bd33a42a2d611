use serde_json::json;

use super::*;
use crate::{
    image::{OperatorResource, RolloutSpec},
    kmod::Verdict,
    plan::{
        HoldReason, Plan, RolloutDecision,
        fixtures::{K47, World, live_daemon_set, name, resource},
    },
};

/// Returns a world with a DaemonSet and a resource that farrier has set, and a DaemonSet that it has not.
fn world() -> World {
    let mut world = World::live(&[K47]);
    world.snapshot.daemon_sets.push(live_daemon_set("other"));
    let driver = json!({"repository": "nvcr.test/x", "image": "driver", "version": "1"});
    let policy =
        resource(OperatorResource::NicClusterPolicy, "nic-cluster-policy", json!({"ofedDriver": driver}));
    world.snapshot.resources = vec![policy];
    let policy: RolloutSpec = serde_json::from_value(
        json!({"strategy": "custom-resource", "resource": "NicClusterPolicy", "name": "nic-cluster-policy"}),
    )
    .unwrap();
    world.image("mft").spec.rollout.push(policy);
    world.publish(Verdict::Loads);
    reconcile(&mut world);
    world
}

fn reconcile(world: &mut World) -> Plan {
    let plan = world.plan();
    plan.rollouts.iter().flat_map(|rollout| &rollout.changes).for_each(|change| world.apply(change).unwrap());
    plan
}

fn roll_back(world: &mut World, selected: &[&str]) -> Vec<RollbackStep> {
    let selected: Vec<String> = selected.iter().map(ToString::to_string).collect();
    let steps = rollback(&world.snapshot, &selected).unwrap();
    steps.iter().filter_map(|step| step.change.as_ref()).for_each(|change| world.apply(change).unwrap());
    steps
}

/// A webhook writes the registry of a mirror into the DaemonSet.
#[test]
fn an_image_with_the_registry_of_a_mirror_is_rolled_back() {
    let mut world = world();
    let mirrored = world.image_of("driver").replace("registry.test", "mirror.test");
    world.set_by_another(&mirrored);
    roll_back(&mut world, &["kube-system/mft"]);
    assert_eq!(world.image_of("driver"), "registry.test/old:1");
}

#[test]
fn what_was_before_is_restored_and_stays() {
    let mut world = world();
    let steps = roll_back(&mut world, &[]);
    assert_eq!(world.image_of("driver"), "registry.test/old:1");
    let Some(Change::Resource(change)) = &steps[1].change else { panic!("no resource") };
    // A field that was absent before is not named, so that the apply removes it.
    assert_eq!(
        change.spec,
        json!({"ofedDriver": {"repository": "nvcr.test/x", "image": "driver", "version": "1"}})
    );
    let mut json = serde_json::to_value(&steps).unwrap();
    for step in json.as_array_mut().unwrap() {
        step.as_object_mut().unwrap().remove("change");
    }
    let digest = regex::Regex::new("@sha256:[0-9a-f]{64}").unwrap();
    let text = serde_json::to_string_pretty(&json).unwrap();
    insta::assert_snapshot!(digest.replace_all(&text, "@DIGEST"));

    // Simulate the removal by the apply.
    let mut spec = (*world.snapshot.resources[0].spec).clone();
    spec["ofedDriver"].as_object_mut().unwrap().remove("forcePrecompiled");
    world.snapshot.resources[0].spec = spec.into();
    let plan = reconcile(&mut world);
    assert!(plan.rollouts.iter().all(|rollout| {
        matches!(rollout.decision, RolloutDecision::Hold(HoldReason::RolledBack { .. }))
            && rollout.changes.is_empty()
    }));
    assert!(!plan.has_failures());
    insta::assert_snapshot!(
        HoldReason::RolledBack { at: world.now },
        @"farrier rollback reverted what was set at 1970-01-01T00:00:00Z; farrier waits for another image, or for the removal of the annotation farrier.dev/record"
    );
    assert!(
        roll_back(&mut world, &[]).iter().all(|step| step.change.is_none()),
        "a second rollback changes nothing"
    );
    // The rollback lasts until another image is desired.
    world.resolved.images.get_mut(&name("mft")).unwrap().as_mut().unwrap().version = "5".to_owned();
    world.publish(Verdict::Loads);
    assert!(reconcile(&mut world).rollouts.iter().all(|rollout| rollout.changes.len() == 1));
}

#[test]
fn only_what_is_selected_is_rolled_back() {
    let mut world = world();
    let steps = roll_back(&mut world, &["NicClusterPolicy/nic-cluster-policy", "kube-system/other"]);
    assert_eq!(steps.len(), 1, "farrier has set nothing in the other DaemonSet");
    assert_ne!(world.image_of("driver"), "registry.test/old:1");
    let unknown = rollback(&world.snapshot, &["kube-system/no".to_owned(), "kube-system/mft".to_owned()]);
    assert_eq!(unknown.unwrap_err(), ["kube-system/no"]);
}

#[test]
fn what_somebody_else_has_set_since_stays() {
    let mut world = world();
    world.set_by_another("registry.test/foreign:1");
    let steps = roll_back(&mut world, &["kube-system/mft"]);
    let holds = "registry.test/foreign:1".to_owned();
    assert_eq!(steps[0].fields["driver"], RollbackOutcome::Released { holds });
    assert_eq!(world.image_of("driver"), "registry.test/foreign:1");
    let Some(Change::DaemonSet(change)) = &steps[0].change else { panic!("no DaemonSet") };
    assert!(change.images.is_empty(), "the value belongs to the other writer");
    // Without the rollback, farrier would set its value again once.
    assert!(matches!(reconcile(&mut world).rollouts[0].decision, RolloutDecision::Hold(_)));
    assert_eq!(world.image_of("driver"), "registry.test/foreign:1");
    let policy = &mut world.snapshot.resources[0];
    let mut spec = (*policy.spec).clone();
    spec["ofedDriver"]["version"] = "2".into();
    policy.spec = spec.into();
    policy.owned.remove("version");
    let steps = roll_back(&mut world, &["NicClusterPolicy/nic-cluster-policy"]);
    let Some(Change::Resource(change)) = &steps[0].change else { panic!("no resource") };
    let driver = &change.spec["ofedDriver"];
    assert_eq!((driver["image"].as_str(), driver["version"].as_str()), (Some("mft"), None));
}

#[test]
fn a_record_that_cannot_be_read_is_said() {
    let mut world = world();
    let live = world.snapshot.daemon_sets[0].live.as_mut().unwrap();
    live.annotations.insert(RECORD_ANNOTATION.to_owned(), "[]".to_owned());
    let steps = roll_back(&mut world, &["kube-system/mft"]);
    assert!(steps[0].change.is_none());
    assert!(steps[0].error.as_ref().unwrap().contains(RECORD_ANNOTATION));
}

#[test]
fn objects_of_other_farriers_are_told_apart() {
    let mut world = world();
    let others = |world: &World, name: &str| set_by_others(&world.snapshot, &name.parse().unwrap());
    let ours = set_by_others(&world.snapshot, &world.instance);
    assert_eq!(ours, BTreeMap::new());
    let names = ["NicClusterPolicy/nic-cluster-policy", "kube-system/mft"];
    let all = names.map(|object| (object.to_owned(), "farrier".to_owned()));
    assert_eq!(others(&world, "gpu"), all.clone().into());
    // Records of older versions have no name, and count as this farrier's.
    let annotations = &mut world.snapshot.resources[0].annotations;
    let mut record = RewriteRecord::of(annotations).unwrap();
    for field in record.0.values_mut() {
        field.by.clear();
    }
    *annotations = record.annotations(annotations);
    let [_, daemon_set] = all;
    assert_eq!(others(&world, "gpu"), [daemon_set].into());
}
