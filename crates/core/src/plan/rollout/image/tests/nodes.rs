//! Nodes that a rollout reaches or not: tainted, dead, without the labels of NFD, and of two architectures.

use super::*;
use crate::plan::labels::{GPU_LABELS, GPU_PRESENT};

const PCI: &str = "feature.node.kubernetes.io/pci-15b3.present";

/// Returns a live world whose DaemonSet selects nodes by a label of NFD: `n0` runs one kernel, and `n1` and `n2` another.
fn labeled_world() -> World {
    let mut world = World::live(&[K47, K48, K48]);
    world.snapshot.daemon_sets[0].placement.node_selector = [(PCI.to_owned(), "true".to_owned())].into();
    for node in &mut world.snapshot.nodes {
        node.labels.insert(PCI.to_owned(), "true".to_owned());
        node.os_image = "Debian GNU/Linux 12 (bookworm)".to_owned();
    }
    wish(&mut world, "1");
    world
}

/// Removes the labels of a node that NFD writes, as NFD does when it restarts.
fn unlabel(world: &mut World, node: usize) {
    world.snapshot.nodes[node].labels.retain(|key, _| !key.starts_with("feature.node.kubernetes.io/"));
}

#[test]
fn a_tainted_control_plane_holds_nothing() {
    let mut world = labeled_world();
    assert!(matches!(held(&mut world).0, HoldReason::MixedKernels { .. }));
    world.snapshot.nodes[0].taints = vec![Taint {
        key: "node-role.kubernetes.io/control-plane".to_owned(),
        value: String::new(),
        effect: "NoSchedule".to_owned(),
    }];
    rewrites(&mut world.clone());
    // A pod that is already on the node stays there.
    let there = pod(&world.snapshot.daemon_sets[0], "n0", true);
    world.snapshot.pods.push(there);
    assert!(matches!(held(&mut world).0, HoldReason::MixedKernels { .. }));
}

#[test]
fn a_node_that_lost_its_labels_is_not_gone() {
    let mut world = labeled_world();
    unlabel(&mut world, 0);
    let (why, wrote) = held(&mut world);
    assert!(!wrote && !why.is_failure());
    insta::assert_snapshot!(why, @"node n0 has no label feature.node.kubernetes.io/kernel-version.full and runs 6.1.0-47-amd64 on Debian GNU/Linux 12 (bookworm), which the image is not for: the rollout may reach the node once Node Feature Discovery has labeled the node; add the label, or add the node to ignoreNodes in site.yaml");
    for node in 1..3 {
        unlabel(&mut world, node);
    }
    assert!(matches!(held(&mut world).0, HoldReason::Unlabeled { count: 3, .. }), "no node has labels");
    let mut ignored = labeled_world();
    unlabel(&mut ignored, 0);
    ignored.snapshot.nodes[0].ignored_by = Some(0);
    rewrites(&mut ignored);
    let mut same = labeled_world();
    same.snapshot.nodes.remove(0);
    unlabel(&mut same, 0);
    assert_eq!(same.snapshot.nodes[0].kernel_version, K48);
    rewrites(&mut same);
}

/// Debian and its derivatives have kernels of one release.
#[test]
fn a_node_that_lost_its_labels_may_run_another_system_with_a_kernel_of_the_same_release() {
    let mut world = labeled_world();
    world.snapshot.nodes.remove(0);
    unlabel(&mut world, 0);
    for (os_image, expected) in [
        (
            "Devuan GNU/Linux 5 (daedalus)",
            "runs 6.1.0-48-amd64 on Devuan GNU/Linux 5 (daedalus), which the image is not for",
        ),
        (
            "Debian GNU/Linux 120 (x)",
            "runs 6.1.0-48-amd64 on Debian GNU/Linux 120 (x), which the image is not for",
        ),
        ("", "runs 6.1.0-48-amd64, which the image is not for"),
    ] {
        world.snapshot.nodes[0].os_image = os_image.to_owned();
        let why = held(&mut world).0.to_string();
        assert!(why.contains(expected), "{why}");
    }
    // A point release has the same kernels.
    "Debian GNU/Linux 12.11 (bookworm)".clone_into(&mut world.snapshot.nodes[0].os_image);
    rewrites(&mut world);
}

/// When NFD restarts, the GPU Operator writes `false`. It writes `true` some time after NFD has added its labels.
#[test]
fn a_node_whose_gpu_operator_lags_behind_nfd_is_not_gone() {
    let mut world = labeled_world();
    world.snapshot.daemon_sets[0].placement.node_selector =
        [(GPU_PRESENT.to_owned(), "true".to_owned())].into();
    for node in &mut world.snapshot.nodes {
        node.labels.extend([GPU_PRESENT, GPU_LABELS[1]].map(|key| (key.to_owned(), "true".to_owned())));
    }
    world.snapshot.nodes[0].labels.insert(GPU_PRESENT.to_owned(), "false".to_owned());
    let mut restarting = world.clone();
    unlabel(&mut restarting, 0);
    assert!(matches!(held(&mut restarting).0, HoldReason::Unlabeled { .. }));
    insta::assert_snapshot!(held(&mut world).0, @"node n0 has no label nvidia.com/gpu.present=true and runs 6.1.0-47-amd64 on Debian GNU/Linux 12 (bookworm), which the image is not for: the rollout may reach the node once the GPU Operator has labeled the node; add the label, or add the node to ignoreNodes in site.yaml");
    let mut rejected = world.clone();
    rejected.snapshot.nodes[0].rejected_claims.kernel = Some(crate::plan::ExceededLimit::Distinct(1));
    rewrites(&mut rejected);
    world.snapshot.nodes[0].labels.remove(GPU_LABELS[1]);
    rewrites(&mut world);
}

#[test]
fn a_dead_node_that_holds_a_rollout_is_named() {
    let mut world = labeled_world();
    world.snapshot.nodes[0].not_ready = true;
    world.snapshot.nodes[0].ready_changed = Some("2026-06-01T12:00:00Z".parse().unwrap());
    insta::assert_snapshot!(held(&mut world).0, @"its nodes run different kernels: 6.1.0-47-amd64 (debian 12, amd64) on 1, 6.1.0-48-amd64 (debian 12, amd64) on 2; node n0 is not ready since 2026-06-01T12:00:00Z; repair it, delete it, or let ignoreNodes in site.yaml ignore it (notReadyFor); use `strategy: per-kernel` or `union`, which need a running cluster, or one DaemonSet and rollout for each kernel");
    unlabel(&mut world, 0);
    let why = held(&mut world).0.to_string();
    assert!(why.ends_with("(notReadyFor)") && why.contains("node n0 is not ready since"), "{why}");
}

/// <https://github.com/kubernetes-sigs/node-feature-discovery/issues/2408>: some nodes do not get their labels back.
#[test]
fn a_ready_node_that_holds_a_rollout_is_named_with_the_time() {
    let mut world = labeled_world();
    world.snapshot.nodes[0].ready_changed = Some("2026-06-01T12:00:00Z".parse().unwrap());
    unlabel(&mut world, 0);
    let why = held(&mut world).0.to_string();
    assert!(why.starts_with("node n0, ready since 2026-06-01T12:00:00Z, has no label"), "{why}");
    assert!(why.contains("add the label, or add the node to ignoreNodes"), "{why}");
    let mut world = labeled_world();
    world.snapshot.nodes[0].ready_changed = Some("2026-06-01T12:00:00Z".parse().unwrap());
    world.snapshot.nodes[0].labels.insert(crate::plan::KERNEL_LABEL.to_owned(), "other".to_owned());
    let why = held(&mut world).0.to_string();
    assert!(why.starts_with("kernel of node n0, ready since 2026-06-01T12:00:00Z, unknown: "), "{why}");
    assert!(why.ends_with("or let ignoreNodes in site.yaml ignore it"), "{why}");
}

#[test]
fn nodes_of_two_architectures_get_the_index_of_their_common_tag() {
    let mut world = World::live(&[K47, K47]);
    world.image("mft").spec.tags = vec!["{{version}}-{{kernel_label}}".to_owned()];
    world.snapshot.nodes[1].architecture = "arm64".to_owned();
    world.snapshot.nodes[1].labels.insert("kubernetes.io/arch".to_owned(), "arm64".to_owned());
    let cells = world.cells();
    let [amd64, arm64] = cells.as_slice() else { panic!("{cells:?}") };
    assert_eq!(amd64.reference, arm64.reference);
    // Only one image, with a known architecture: the other is built, without a conflict.
    world.publish_cell(amd64, Verdict::Loads);
    let mut found = world.observed.published[&amd64.reference].clone();
    found.platforms = [(amd64.target.arch, found.clone())].into();
    world.observed.published.insert(amd64.reference.clone(), found.clone());
    let plan = world.plan();
    let phases: Vec<Phase> = plan.cells.iter().map(|cell| cell.outcome.phase()).collect();
    assert_eq!(phases, [Phase::Published, Phase::Missing]);
    assert!(matches!(&plan.rollouts[0].decision, RolloutDecision::Pending { on } if *on == arm64.reference));

    world.publish_cell(arm64, Verdict::Loads);
    let second = world.observed.published[&arm64.reference].clone();
    found.platforms.insert(arm64.target.arch, second);
    found.digest = Digest::of(b"index");
    found.input_hash = None;
    world.observed.published.insert(arm64.reference.clone(), found);
    let index = rewrites(&mut world);
    assert!(index.ends_with(&format!("@{}", Digest::of(b"index"))), "{index}");
    // Another name for the same image would restart the pods of the nodes that stay.
    let last = world.snapshot.nodes.pop().unwrap();
    is_quiet(&mut world);
    world.snapshot.nodes.push(last);
    is_quiet(&mut world);

    let one =
        world.observed.published.get_mut(&arm64.reference).unwrap().platforms.values_mut().next().unwrap();
    one.verdict = Some(Verdict::Refused);
    let (why, _) = held(&mut world);
    assert!(matches!(why, HoldReason::NotPassed { .. }), "{why:?}");
}
