//! Tests with another writer that removes the fence, the requirement that keeps the original off handed-over nodes.

use super::*;

fn unfence(cluster: &mut Cluster) {
    let object = cluster.object("mft").unwrap();
    object["spec"]["template"]["spec"].as_object_mut().unwrap().remove("affinity");
}

#[test]
fn a_fence_that_is_taken_away_long_after_is_restored() {
    let mut cluster = Cluster::new(&[K47, K48], &[]);
    cluster.publish();
    settled(&mut cluster);
    for _ in 0..4 {
        unfence(&mut cluster);
        settled(&mut cluster);
        cluster.pass_time(7200);
    }
}

#[test]
fn what_else_is_to_be_done_does_not_wait_for_the_fence() {
    let mut cluster = Cluster::new(&[K47, K48], &[]);
    cluster.publish();
    settled(&mut cluster);
    unfence(&mut cluster);
    settled(&mut cluster);
    unfence(&mut cluster);
    cluster.object("mft").unwrap()["spec"]["template"]["spec"]["hostPID"] = true.into();
    let planned = cluster.converge();
    assert!(matches!(planned.decision, RolloutDecision::Hold(HoldReason::FenceUndone { .. })));
    for copy in cluster.copies().into_iter().map(str::to_owned).collect::<Vec<_>>() {
        assert_eq!(cluster.object(&copy).unwrap()["spec"]["template"]["spec"]["hostPID"], true);
    }
}

#[test]
fn a_fence_that_is_taken_away_twice_is_a_conflict() {
    let mut cluster = Cluster::new(&[K47, K48], &[]);
    cluster.publish();
    settled(&mut cluster);
    unfence(&mut cluster);
    settled(&mut cluster);
    unfence(&mut cluster);
    let planned = cluster.converge();
    let RolloutDecision::Hold(reason @ HoldReason::FenceUndone { .. }) = planned.decision else { panic!() };
    insta::assert_snapshot!(reason, @"its node affinity was reverted 2 times; make the other writer keep the requirement on farrier.dev/driver..., or leave spec.template.spec.affinity to farrier");
}
