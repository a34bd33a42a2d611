//! Tests of the nodes that are handed over to a copy, and of those that the rollout waits for.

use super::*;

#[test]
fn nodes_that_somebody_works_on_are_not_handed_over() {
    let mut cluster = Cluster::new(&[K47, K47], &[K47]);
    cluster.publish();
    cluster.world.snapshot.nodes[1].unschedulable = true;
    insta::assert_snapshot!({ cluster.converge(); now(&mut cluster) }, @"waits for node n1");
    assert_eq!(cluster.all_selected()["n1"], [OLD]);
    cluster.world.snapshot.nodes[1].unschedulable = false;
    settled(&mut cluster);
}

/// If such a node were handed over, the rollout would wait for it, and so would every other node of its kernel.
#[test]
fn nodes_that_get_no_pod_are_not_handed_over_and_hold_no_others() {
    for is_dead in [true, false] {
        let mut cluster = Cluster::new(&[K47, K47, K47], &[K47]);
        cluster.publish();
        if is_dead {
            cluster.world.snapshot.nodes[0].not_ready = true;
        } else {
            cluster.tainted.insert("n0".to_owned());
        }
        cluster.settle();
        settled(&mut cluster);
        // Longer than the deadline of an image.
        cluster.pass_time(3600);
        settled(&mut cluster);
        let images = cluster.all_selected();
        assert_eq!((&images["n0"], &images["n1"]), (&vec![OLD.to_owned()], &images["n2"]));
        assert_ne!(images["n0"], images["n1"]);
        cluster.world.snapshot.nodes[0].not_ready = false;
        cluster.tainted.clear();
        cluster.settle();
        settled(&mut cluster);
        assert_eq!(cluster.all_selected()["n0"], images["n1"]);
    }
}

#[test]
fn a_node_without_a_driver_does_not_wait_for_a_dead_one() {
    let mut cluster = Cluster::new(&[K47, K47, K47], &[]);
    cluster.publish();
    settled(&mut cluster);
    cluster.world.snapshot.nodes[0].not_ready = true;
    cluster.set_kernel("n3", K47);
    cluster.settle();
    cluster.converge();
    let images = cluster.all_selected();
    assert_eq!(images["n3"], images["n1"]);
    insta::assert_snapshot!(now(&mut cluster), @"waits for node n0; node n0 is not ready; repair it, delete it, or let ignoreNodes in site.yaml ignore it (notReadyFor)");
}

#[test]
fn a_new_node_gets_the_image_that_works_while_the_next_version_is_not_published() {
    let mut cluster = Cluster::new(&[K47], &[]);
    cluster.publish();
    settled(&mut cluster);
    let images = cluster.world.resolved.images.values_mut();
    images.for_each(|image| image.as_mut().unwrap().version = "2".to_owned());
    let hash = cluster.world.cells()[0].input_hash;
    let (at, message) = (cluster.world.now, "make: error 2".to_owned());
    let failure =
        Failure { at, message, permanent: true, under: None, under_site: None, deadline: None, memory: None };
    for (name, failure) in [("n1", None), ("n2", Some(failure))] {
        cluster.world.observed.failures.insert(hash, failure);
        cluster.set_kernel(name, K47);
        cluster.settle();
        let decision = cluster.converge().decision;
        let images = cluster.all_selected();
        assert_eq!(images[name], images["n0"], "{decision:?}");
    }
}

#[test]
fn a_node_whose_pod_is_to_come_is_waited_for() {
    let mut cluster = Cluster::new(&[K47, K47], &[K47]);
    cluster.publish();
    settled(&mut cluster);
    cluster.tainted.insert("n2".to_owned());
    cluster.set_kernel("n2", K47);
    cluster.desired = 1;
    insta::assert_snapshot!({ cluster.converge(); now(&mut cluster) }, @"waits for node n2");
    cluster.tainted.clear();
    cluster.settle();
    settled(&mut cluster);
}
