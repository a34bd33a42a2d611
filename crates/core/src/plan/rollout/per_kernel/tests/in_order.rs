//! Tests of handing nodes over, and of new versions, in the order of an upgrade.

use proptest::prelude::*;
use serde_json::json;

use super::{
    KERNELS, check, event, happen,
    simulation::{Cluster, OLD},
};
use crate::plan::{
    Change, HoldReason, KERNEL_LABEL, ObservedKind, PlannedUpgrade, RolloutDecision, UPGRADE, UpgradeNote,
    fixtures::{K47, K48},
    uncordoned,
};

/// Publishes a new version for all kernels; returns its images.
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

    // The new version does not work for one of the kernels: its node gets the previous image, and the next node is not
    // tried.
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
fn a_first_image_that_fails_its_check_gives_its_node_back() {
    let upgrade = json!({"drain": "node", "waitFor": "annotation", "timeout": "2m"});
    let mut cluster = Cluster::in_order(&[K47, K47], &[K47], &upgrade);
    next_version(&mut cluster, "1");
    let planned = cluster.upgrade();
    assert!(
        matches!(planned.decision, RolloutDecision::Hold(HoldReason::CopyFailed { .. })),
        "{:?}",
        planned.decision
    );
    assert!(cluster.running().values().all(|image| *image == OLD), "{:?}", cluster.running());
}

/// Without its kernel label, the node has no pod of its copy.
#[test]
fn a_failure_stays_with_a_node_that_lost_its_labels() {
    let mut cluster = Cluster::in_order(&[K47, K47], &[K47], &json!({"onFailure": "stop"}));
    let images = next_version(&mut cluster, "1");
    cluster.broken.extend(images);
    cluster.upgrade();
    cluster.world.snapshot.nodes[0].labels.remove(KERNEL_LABEL);
    cluster.settle();
    let planned = cluster.plan();
    let upgrade = planned.upgrade.as_ref().unwrap();
    assert_eq!((upgrade.failure().unwrap().0, upgrade.changes().count()), ("n0", 0));
    let snapshot = &cluster.world.snapshot;
    assert_eq!(uncordoned(snapshot, std::slice::from_ref(&planned), &cluster.world.instance), []);
}

#[test]
fn an_image_that_does_not_work_where_nodes_boot_its_kernel_is_found() {
    let mut cluster = Cluster::in_order(&[K47, K47], &[K47], &json!({"drain": "node"}));
    next_version(&mut cluster, "1");
    cluster.upgrade();
    cluster.set_kernel("n0", K48);
    let fresh = next_version(&mut cluster, "1");
    cluster.broken.extend(fresh.into_iter().filter(|image| cluster.modules[image].contains(K48)));
    let planned = cluster.upgrade();
    assert!(
        matches!(planned.decision, RolloutDecision::Hold(HoldReason::CopyFailed { .. })),
        "{:?}",
        planned.decision
    );
}

#[test]
fn a_node_that_cannot_be_drained_keeps_the_originals_driver() {
    let mut cluster = Cluster::in_order(&[K47], &[K47], &json!({"drain": "node", "timeout": "5m"}));
    cluster.publish();
    cluster.world.snapshot.unseen.insert(ObservedKind::Workloads, "no right".to_owned());
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

/// Returns all changes to make now.
fn changes(cluster: &mut Cluster) -> Vec<Change> {
    let planned = cluster.plan();
    let steps = planned.upgrade.iter().flat_map(PlannedUpgrade::changes);
    planned.changes.iter().chain(steps).cloned().collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 6, ..ProptestConfig::default() })]

    /// As without an upgrade, no node loses its driver when farrier is killed after any change. No more nodes than allowed are
    /// in progress. In the end every node has the driver of its kernel, and no cordon.
    #[test]
    fn whatever_happens_in_order_no_node_loses_what_it_has_or_stays_cordoned(
        most in 1..3_usize,
        fleet in prop::collection::vec(0..4_usize, 1..5),
        old in prop::collection::btree_set(0..4_usize, 0..4),
        rounds in prop::collection::vec((event(), prop::collection::vec(any::<bool>(), 4)), 0..30),
    ) {
        let kernels = |numbers: &mut dyn Iterator<Item = &usize>| -> Vec<&str> {
            numbers.map(|kernel| KERNELS[*kernel]).collect()
        };
        let upgrade = json!({"drain": "node", "timeout": "5m", "maxParallel": most});
        let mut cluster =
            Cluster::in_order(&kernels(&mut fleet.iter()), &kernels(&mut old.iter()), &upgrade);
        for (event, survives) in &rounds {
            happen(&mut cluster, event);
            let mut before = cluster.all_selected();
            for (change, survives) in changes(&mut cluster).iter().zip(survives.iter().chain([&false])) {
                cluster.apply(change);
                let after = cluster.all_selected();
                check(&cluster, &before, &after)?;
                before = after;
                if !survives {
                    break;
                }
            }
            let nodes = cluster.world.snapshot.nodes.iter();
            let taken = nodes.filter(|node| UpgradeNote::in_progress(node).is_some()).count();
            prop_assert!(taken <= most, "{} are in progress", taken);
        }
        // Everything calms down, and people remove their cordons.
        cluster.broken.clear();
        for node in cluster.world.snapshot.nodes.clone() {
            cluster.set_kernel(&node.name, &node.kernel_version);
            let mut nodes = cluster.world.snapshot.nodes.iter_mut();
            let fresh = &mut **nodes.find(|fresh| fresh.name == node.name).unwrap();
            fresh.annotations.clone_from(&node.annotations);
            fresh.unschedulable = UpgradeNote::of(&node).is_some_and(|note| note.cordoned);
        }
        next_version(&mut cluster, "9");
        cluster.settle();
        let mut quiet = 0;
        for _ in 0..400 {
            let changes = changes(&mut cluster);
            quiet = if changes.is_empty() { quiet + 1 } else { 0 };
            for change in &changes {
                cluster.apply(change);
            }
            cluster.settle();
            cluster.pass_time(60);
            if quiet == 15 {
                break;
            }
        }
        prop_assert_eq!(quiet, 15, "the rollout never ends");
        for node in cluster.world.snapshot.nodes.clone() {
            let images = cluster.selected(&node);
            prop_assert!(images.len() == 1 && cluster.has_modules(&images[0], &node.name), "{:?}", images);
            prop_assert!(!node.unschedulable && UpgradeNote::in_progress(&node).is_none(), "{:?}", node);
        }
    }
}
