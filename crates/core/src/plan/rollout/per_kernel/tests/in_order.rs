//! Pure: nodes that are handed over, and get new versions, in order.

use serde_json::json;

use super::simulation::{Cluster, OLD};
use crate::plan::{
    HoldReason, PlannedUpgrade, RolloutDecision, Seen, UPGRADE,
    fixtures::{K47, K48},
};

/// A new version for all kernels; its images.
fn next_version(cluster: &mut Cluster, version: &str) -> Vec<String> {
    let known: Vec<String> = cluster.modules.keys().cloned().collect();
    let images = cluster.world.resolved.images.values_mut();
    images.for_each(|image| version.clone_into(&mut image.as_mut().unwrap().version));
    cluster.publish();
    cluster.modules.keys().filter(|image| !known.contains(image)).cloned().collect()
}

#[test]
fn nodes_are_handed_over_and_get_new_versions_in_order() {
    let mut cluster = Cluster::in_order(&[K47, K47, K48], &[K47], &json!({"drain": "node"}));
    let first = next_version(&mut cluster, "1");
    let planned = cluster.upgrade();
    assert!(matches!(planned.decision, RolloutDecision::Settled { .. }), "{:?}", planned.decision);
    assert_eq!(planned.upgrade.unwrap().forecast.done, 3);
    let has = |cluster: &Cluster, images: &[String]| {
        cluster
            .running()
            .into_iter()
            .all(|(node, image)| images.iter().any(|own| own == image) && cluster.has_modules(image, node))
    };
    assert!(has(&cluster, &first), "{:?}", cluster.running());

    let second = next_version(&mut cluster, "2");
    cluster.upgrade();
    assert!(has(&cluster, &second), "{:?}", cluster.running());
    assert!(cluster.world.snapshot.nodes.iter().all(|node| node.labels[UPGRADE] == "uncordoned"));

    // It does not work for one of the kernels: its node gets the one before, the next is not tried.
    let third = next_version(&mut cluster, "3");
    let broken = third.iter().find(|image| cluster.modules[*image].contains(K47)).unwrap().clone();
    cluster.broken.insert(broken);
    let planned = cluster.upgrade();
    assert!(
        matches!(planned.decision, RolloutDecision::Hold(HoldReason::CopyFailed { .. })),
        "{:?}",
        planned.decision
    );
    let running = cluster.running();
    assert!(["n0", "n1"].iter().all(|node| second.iter().any(|image| image == running[node])), "{running:?}");
    assert!(third.iter().any(|image| image == running["n2"]), "{running:?}");
}

#[test]
fn a_node_that_cannot_be_drained_keeps_the_originals_driver() {
    let mut cluster = Cluster::in_order(&[K47], &[K47], &json!({"drain": "node", "timeout": "5m"}));
    cluster.publish();
    cluster.world.snapshot.unseen.insert(Seen::Workloads, "no right".to_owned());
    for _ in 0..20 {
        let planned = cluster.plan();
        let steps = planned.upgrade.iter().flat_map(PlannedUpgrade::changes);
        for change in planned.changes.iter().chain(steps).cloned().collect::<Vec<_>>() {
            cluster.apply(&change);
        }
        cluster.settle();
        cluster.pass_time(1);
    }
    assert_eq!(cluster.world.snapshot.nodes[0].labels[UPGRADE], "not-drained");
    assert_eq!((cluster.running()["n0"], cluster.world.snapshot.nodes[0].unschedulable), (OLD, false));
}
