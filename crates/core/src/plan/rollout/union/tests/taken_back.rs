//! Tests of union images that were rolled back or failed.

use super::*;
use crate::plan::{pause, rollback};

fn make(world: &mut World, changes: impl IntoIterator<Item = Change>) {
    for change in changes {
        world.apply(&change).unwrap();
    }
}

/// After a rollback, a kernel that left drops out of the union. The desired union is then another image with modules
/// that were already rejected.
#[test]
fn what_was_taken_back_does_not_come_again_as_another_image() {
    let mut world = world(&[K47, K48], UpdateStrategy::OnDelete);
    old_holds(&mut world, &[K47, K48]);
    publish_union(&mut world);
    apply(&mut world);
    let new = world.snapshot.daemon_sets[0].containers[0].image.clone();
    world.snapshot.nodes[0] = node("n0", K48);
    apply(&mut world);
    assert_eq!(held(&world).len(), 2, "the kernel is kept for a while");

    let steps = rollback(&world.snapshot, &[]).unwrap();
    make(&mut world, steps.into_iter().filter_map(|step| step.change));
    assert_eq!(world.image_of("driver"), OLD);
    assert!(images_in_use(&world.snapshot, &world.definitions).contains(&new), "its contents are looked up");
    let planned = world.plan();
    assert_eq!(planned.unions, []);
    let decision = &planned.rollouts[0].decision;
    assert!(matches!(decision, RolloutDecision::Hold(HoldReason::RolledBack { .. })), "{decision:?}");

    // A union with an additional kernel is not rejected.
    let before = world.clone();
    world.snapshot.nodes[0] = node("n0", "6.1.0-49-amd64");
    world.publish(Verdict::Loads);
    assert_eq!(world.plan().unions.len(), 1);
    let mut world = before;
    let resumed = pause(&world.snapshot, "kube-system/mft", false).unwrap();
    make(&mut world, resumed);
    assert_eq!(world.plan().unions.len(), 1, "and after a person resumes the rollout");
}
