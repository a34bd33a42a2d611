use proptest::prelude::*;

use super::*;
use crate::{
    image::RolloutSpec,
    kmod::Verdict,
    plan::{
        Container, HoldReason, PlannedRollout, RolloutDecision,
        fixtures::{K47, K48, World, live_daemon_set, name},
    },
};

const CONTAINERS: [&str; 3] = ["driver", "init", "side"];

fn rollout(daemon_set: &str, container: &str) -> RolloutSpec {
    let spec = serde_json::json!({
        "strategy": "image", "namespace": "kube-system", "daemonSet": daemon_set, "container": container,
    });
    serde_json::from_value(spec).unwrap()
}

/// Returns a world with the images `mft` and `gpu`, and DaemonSets `one` and `two` with three containers each. A rollout is an image,
/// a DaemonSet and a container.
fn world(releases: &[&str], rollouts: &[(&str, &str, &str)]) -> World {
    let mut world = World::live(releases);
    world.add("gpu", &[]);
    let daemon_set = |name: &str| {
        let mut found = live_daemon_set(name);
        let container = |name: &&str| Container {
            name: (*name).to_owned(),
            image: "registry.test/old:1".to_owned(),
            why_not_editable: None,
            tagged: false,
        };
        found.containers = CONTAINERS.iter().map(container).collect();
        found
    };
    world.snapshot.daemon_sets = vec![daemon_set("one"), daemon_set("two")];
    for image in ["mft", "gpu"] {
        world.image(image).spec.rollout.clear();
    }
    for (image, daemon_set, container) in rollouts {
        world.image(image).spec.rollout.push(rollout(daemon_set, container));
    }
    world.publish(Verdict::Loads);
    world
}

/// Reconciles once; returns the rollouts and the number of writes.
fn reconcile(world: &mut World) -> (Vec<PlannedRollout>, usize) {
    let rollouts = world.plan().rollouts;
    let changes: Vec<Change> = rollouts.iter().flat_map(|rollout| rollout.changes.clone()).collect();
    for change in &changes {
        world.apply(change).unwrap();
    }
    (rollouts, changes.len())
}

#[test]
fn two_images_of_a_daemon_set_are_one_write() {
    let rollouts = [("mft", "one", "driver"), ("gpu", "one", "init"), ("gpu", "one", "side")];
    let mut world = world(&[K47], &rollouts);
    let (rollouts, writes) = reconcile(&mut world);
    assert_eq!(writes, 1);
    assert!(rollouts.iter().all(|rollout| matches!(rollout.decision, RolloutDecision::Rewrite { .. })));
    let images: Vec<&str> = CONTAINERS.iter().map(|container| world.image_of(container)).collect();
    assert!(
        images[0].contains("/mft@") && images[1].contains("/gpu@") && images[1] == images[2],
        "{images:?}"
    );
    let live = world.snapshot.daemon_sets[0].live.clone().unwrap();
    assert_eq!(RewriteRecord::of(&live.annotations).unwrap().0.len(), 3);
    // The pods of one image fail: only its container gets its image back.
    let [mft, gpu] = [0, 1].map(|place| images[place].to_owned());
    world.run_pod("n0", true);
    reconcile(&mut world);
    assert_eq!((world.image_of("driver"), world.image_of("init")), (mft.as_str(), gpu.as_str()));
    assert_eq!(reconcile(&mut world).1, 0);
}

/// The container of the failed image keeps its old image. The other container gets its new image at once.
#[test]
fn a_rollout_on_hold_does_not_stop_another_container() {
    let mut world = world(&[K47], &[("mft", "one", "driver"), ("gpu", "one", "init")]);
    let known =
        std::mem::replace(&mut *world.resolved.images.get_mut(&name("gpu")).unwrap(), Err("404".to_owned()));
    let (rollouts, writes) = reconcile(&mut world);
    assert_eq!(writes, 1);
    for rollout in &rollouts {
        let is_hold = matches!(rollout.decision, RolloutDecision::Hold(HoldReason::NoImage { .. }));
        assert_eq!(is_hold, rollout.image == name("gpu"), "{rollout:?}");
    }
    assert!(world.image_of("driver").contains("/mft@"));
    assert_eq!(world.image_of("init"), "registry.test/old:1");
    assert_eq!(reconcile(&mut world).1, 0);
    world.resolved.images.insert(name("gpu"), known);
    reconcile(&mut world);
    assert!(world.image_of("init").contains("/gpu@"));
    assert_eq!(reconcile(&mut world).1, 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Any set of rollouts over any set of objects converges in one reconcile, and then writes nothing.
    #[test]
    fn one_reconcile_suffices(
        rollouts in prop::collection::vec(
            (
                prop::sample::select(vec!["mft", "gpu"]),
                prop::sample::select(vec!["one", "two"]),
                prop::sample::select(CONTAINERS.to_vec()),
            ),
            0..6,
        ),
        mixed in any::<bool>(),
        paused in any::<bool>(),
    ) {
        let mut world = world(if mixed { &[K47, K48] } else { &[K47, K47] }, &rollouts);
        if paused {
            let live = world.snapshot.daemon_sets[0].live.as_mut().unwrap();
            live.annotations.insert("farrier.dev/paused".to_owned(), "true".to_owned());
        }
        let (planned, writes) = reconcile(&mut world);
        prop_assert!(writes <= 2, "one write for each DaemonSet");
        let (after, more) = reconcile(&mut world);
        prop_assert_eq!(more, 0);
        for (before, after) in planned.iter().zip(&after) {
            match &before.decision {
                RolloutDecision::Rewrite { .. } => {
                    prop_assert!(matches!(after.decision, RolloutDecision::AlreadySet { .. }), "{:?}", after);
                }
                RolloutDecision::Hold(why) => {
                    let expected = matches!(
                        why,
                        HoldReason::ClaimedTwice { .. } | HoldReason::MixedKernels { .. } | HoldReason::Paused
                    );
                    prop_assert!(expected, "{}", why);
                    prop_assert_eq!(&before.decision, &after.decision);
                }
                other => prop_assert!(false, "{:?}", other),
            }
        }
    }
}
