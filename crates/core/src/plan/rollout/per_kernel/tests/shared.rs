//! Several rollouts to the copies of one DaemonSet.

use super::*;
use crate::plan::fixtures::name;

/// Returns a cluster whose DaemonSet has a second container, for the image `gpu` or also for `mft`.
fn cluster(second: &str, upgrade: Option<serde_json::Value>) -> Cluster {
    let mut cluster = match upgrade {
        Some(upgrade) => Cluster::in_order(&[K47, K47, K48], &[K47], &upgrade),
        None => Cluster::new(&[K47, K47, K48], &[K47]),
    };
    cluster.world.add("gpu", &[]);
    let mut spec = serde_json::to_value(&cluster.world.image("mft").spec.rollout[0]).unwrap();
    spec["container"] = "second".into();
    let rollout = serde_json::from_value(spec).unwrap();
    if second == "gpu" {
        cluster.world.image("gpu").spec.rollout = vec![rollout];
    } else {
        cluster.world.image("gpu").spec.rollout.clear();
        cluster.world.image("mft").spec.rollout.push(rollout);
    }
    let containers = &mut cluster.object("mft").unwrap()["spec"]["template"]["spec"]["containers"];
    containers.as_array_mut().unwrap().push(serde_json::json!({"name": "second", "image": OLD}));
    cluster.settle();
    cluster.publish();
    cluster
}

/// Returns the images of both containers of each copy, without digests.
fn images(cluster: &mut Cluster) -> Vec<String> {
    let copies: Vec<String> = cluster.copies().into_iter().map(str::to_owned).collect();
    let image = |container: &serde_json::Value| {
        let image = container["image"].as_str().unwrap();
        let known = image.strip_prefix("registry.test/drivers/").and_then(|image| image.split_once('@'));
        known.map_or(image, |(name, _)| name).to_owned()
    };
    let both = |copy: &String| {
        let containers = &cluster.object(copy).unwrap()["spec"]["template"]["spec"]["containers"];
        containers.as_array().unwrap().iter().map(image).collect::<Vec<_>>().join(" ")
    };
    copies.iter().map(both).collect()
}

#[test]
fn the_copies_get_the_images_of_all_rollouts() {
    for (second, expected) in [("gpu", "mft gpu"), ("mft", "mft mft")] {
        let mut cluster = cluster(second, None);
        settled(&mut cluster);
        assert_eq!(images(&mut cluster), [expected, expected], "one copy for each kernel");
        let written = cluster.writes;
        for _ in 0..5 {
            step(&mut cluster);
        }
        assert_eq!(cluster.writes, written, "nothing is written again");
        // Another version of one image changes one container.
        cluster.world.resolved.images.get_mut(&name("gpu")).unwrap().as_mut().unwrap().version =
            "2".to_owned();
        cluster.publish();
        settled(&mut cluster);
        assert_eq!(images(&mut cluster), [expected, expected]);
        assert_eq!(cluster.writes > written, second == "gpu");
    }
}

#[test]
fn no_node_is_handed_over_before_all_images_exist() {
    let mut cluster = cluster("gpu", None);
    cluster.world.observed.published.retain(|reference, _| !reference.to_string().contains("/gpu"));
    cluster.converge();
    assert!(cluster.copies().is_empty());
    assert!(matches!(cluster.plan().decision, RolloutDecision::Pending { .. }));
}

/// A pod is ready only if all its containers are, so an image cannot be tried without the other. Other kernels are not
/// affected.
#[test]
fn a_kernel_without_one_of_the_images_keeps_the_original() {
    let mut cluster = cluster("gpu", None);
    let cells = cluster.world.cells();
    let failed =
        cells.iter().find(|cell| cell.image == name("gpu") && cell.target.release.as_str() == K48).unwrap();
    let failure =
        serde_json::json!({"at": "2026-07-01T12:00:00Z", "message": "nv.c:1: x", "permanent": true});
    cluster.world.observed.failures.insert(failed.input_hash, Some(serde_json::from_value(failure).unwrap()));
    cluster.world.observed.published.remove(&failed.reference);
    cluster.converge();
    assert_eq!(images(&mut cluster), ["mft gpu"]);
    for rollout in cluster.world.plan().rollouts {
        let why = rollout.hold_text().unwrap();
        assert!(why.contains("no image for 6.1.0-48-amd64 (debian 12, amd64): gpu: failed before"), "{why}");
    }
    cluster.world.observed.failures.clear();
    cluster.publish();
    settled(&mut cluster);
    assert_eq!(images(&mut cluster), ["mft gpu", "mft gpu"]);
}

#[test]
fn a_container_that_does_not_exist_holds_all_rollouts_of_the_copies() {
    let mut cluster = cluster("gpu", None);
    settled(&mut cluster);
    let mut spec = serde_json::to_value(&cluster.world.image("gpu").spec.rollout[0]).unwrap();
    spec["container"] = "secund".into();
    cluster.world.image("gpu").spec.rollout = vec![serde_json::from_value(spec).unwrap()];
    cluster.converge();
    assert_eq!(images(&mut cluster), ["mft gpu", "mft gpu"], "the copies keep their images");
    for rollout in cluster.world.plan().rollouts {
        let why = rollout.hold_text().unwrap();
        assert!(
            why.starts_with("the DaemonSet has no container \"secund\"; it has: driver, second"),
            "{why}"
        );
    }
}

#[test]
fn an_upgrade_brings_both_containers_up_to_date() {
    let mut cluster = cluster("mft", Some(serde_json::json!({"drain": "none"})));
    let planned = cluster.upgrade();
    assert!(planned.upgrade.is_some_and(|upgrade| upgrade.forecast.is_over()));
    assert_eq!(images(&mut cluster), ["mft mft", "mft mft"]);
    assert!(cluster.running().values().all(|image| *image != OLD), "{:?}", cluster.running());
}

#[test]
fn upgrades_of_different_images_are_not_made_at_once() {
    let mut cluster = cluster("gpu", Some(serde_json::json!({"drain": "none"})));
    assert!(now(&mut cluster).contains("several rollouts of this DaemonSet have `upgrade`"));
}
