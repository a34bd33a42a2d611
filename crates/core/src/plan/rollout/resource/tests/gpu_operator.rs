//! The GPU Operator: tags of Enterprise Linux, and resources that decide together.

use super::*;
use crate::plan::labels::GPU_PRESENT;

/// Returns a world whose nodes run RHEL 9.4.
fn rhel(kind: OperatorResource) -> World {
    let mut world = world(kind);
    for facts in &mut world.snapshot.nodes {
        facts.labels.insert(crate::plan::OS_ID_LABEL.to_owned(), "rhel".to_owned());
        facts.labels.insert(crate::plan::OS_VERSION_LABEL.to_owned(), "9.4".to_owned());
    }
    let family: Value = serde_json::to_value(&world.definitions.families[0]).unwrap();
    let mut family = family;
    family["spec"]["match"]["os"] = json!(["rhel"]);
    world.definitions.families = vec![serde_json::from_value(family).unwrap()];
    world.publish(Verdict::Loads);
    world
}

#[test]
fn enterprise_linux_has_its_major_version_in_the_gpu_operators_tags() {
    let world = rhel(OperatorResource::ClusterPolicy);
    assert!(change(&world.plan()).required_images.iter().any(|name| name.to_string().ends_with("-rhel9")));
    // The Network Operator expects the whole OS version.
    let cell = &world.cells()[0];
    assert!(
        operator::versions(
            OperatorResource::NicClusterPolicy,
            cell,
            OperatorResources::live(&world.snapshot)
        )
        .is_empty()
    );
    assert_eq!(
        operator::tag_suffix(TagForm::WithArchitecture, &cell.target).unwrap(),
        "-6.1.0-47-amd64-rhel9.4-amd64"
    );
}

#[test]
fn an_nvidia_driver_of_an_older_gpu_operator_has_the_minor_version_of_rhel_9_in_its_tags() {
    let mut world = rhel(OperatorResource::NvidiaDriver);
    let HoldReason::TagForm { looked_for, pattern, .. } = hold(&world) else { panic!("{:?}", hold(&world)) };
    assert_eq!((&*looked_for, pattern), ("-6.1.0-47-amd64-rhel9.4", TagForm::Whole.pattern()));
    for node in 0..world.snapshot.nodes.len() {
        label(&mut world, node, "nvidia.com/gpu.present", "true");
        label(&mut world, node, DRIVER_OWNER, "policy");
    }
    assert!(change(&world.plan()).required_images.iter().any(|name| name.to_string().ends_with("-rhel9")));
}

/// Returns a world whose second node runs Debian 13. Both nodes have GPUs.
fn mixed_systems(kind: OperatorResource) -> World {
    let mut world = world(kind);
    for node in 0..2 {
        label(&mut world, node, GPU_PRESENT, "true");
    }
    label(&mut world, 1, crate::plan::OS_VERSION_LABEL, "13");
    world.publish(Verdict::Loads);
    world
}

/// The operator takes the operating system of all tags of a ClusterPolicy from one node with a GPU (`getGPUNodeOSInfo`).
#[test]
fn nodes_of_two_operating_systems_cannot_share_a_cluster_policy() {
    let mut world = mixed_systems(OperatorResource::ClusterPolicy);
    insta::assert_snapshot!(hold(&world), @"the GPU Operator looks for the tag of one operating system, whichever node it sees first, and the nodes with GPUs have debian12, debian13; use NVIDIADriver resources (spec.driver.useNvidiaDriverCRD: true)");
    assert!(world.plan().has_failures());
    label(&mut world, 1, "nvidia.com/gpu.deploy.driver", "pre-installed");
    assert!(
        matches!(hold(&world), HoldReason::MixedSystems { .. }),
        "the operator may see a node that it skips"
    );
    let is_changed = |world: &World| matches!(decision(world), RolloutDecision::Steps { .. });
    assert!(is_changed(&mixed_systems(OperatorResource::NvidiaDriver)), "each node has its own tag");
    let mut world = mixed_systems(OperatorResource::ClusterPolicy);
    world.snapshot.nodes[1].labels.remove(GPU_PRESENT);
    assert!(is_changed(&world), "the operator ignores nodes without GPUs");
}

fn gpu_cluster() -> ResourceFacts {
    resource(OperatorResource::GpuCluster, "gpu-cluster", json!({"draDriver": {}}))
}

/// The GPU Operator reconciles no ClusterPolicy beside a GPUCluster (26.7, `controllers/clusterpolicy_controller.go`).
#[test]
fn a_cluster_policy_beside_a_gpu_cluster_is_held() {
    let mut world = world(OperatorResource::ClusterPolicy);
    world.snapshot.resources.push(gpu_cluster());
    insta::assert_snapshot!(hold(&world), @"the operator's driver is disabled: the GPU Operator ignores a ClusterPolicy while GPUCluster gpu-cluster exists: name an NVIDIADriver in the rollout, or delete the GPUCluster");
    assert!(!world.plan().has_failures());
}

/// The GPU Operator uses the oldest ClusterPolicy alone (26.7, `getSingletonClusterPolicy`), by name where two are equally old.
#[test]
fn a_second_cluster_policy_is_held() {
    let kind = OperatorResource::ClusterPolicy;
    let at = |second: i64| Some(jiff::Timestamp::from_second(second).unwrap());
    for (created, other, other_name, is_held) in [
        (at(2), at(1), "other", true),
        (at(1), at(2), "other", false),
        (at(1), at(1), "other", true),
        (at(1), at(1), "quite-other", false),
        (None, at(2), "other", true),
    ] {
        let mut world = world(kind);
        world.snapshot.resources[0].created = created;
        let spec = json!({"driver": {}});
        world.snapshot.resources.push(ResourceFacts { created: other, ..resource(kind, other_name, spec) });
        let decision = decision(&world);
        let held = matches!(decision, RolloutDecision::Hold(HoldReason::DriverOff { .. }));
        assert_eq!(held, is_held, "{created:?} {other:?} {other_name}: {decision:?}");
    }
    let mut world = world(kind);
    world.snapshot.resources.push(resource(kind, "older", json!({"driver": {}})));
    insta::assert_snapshot!(hold(&world), @"the operator's driver is disabled: the GPU Operator uses the oldest ClusterPolicy alone, older: name it in the rollout, or delete it");
}

/// A GPUCluster delegates its driver to NVIDIADriver resources. An operator with that kind assigns nodes by their labels.
#[test]
fn an_nvidia_driver_beside_a_gpu_cluster_is_rolled_out_to_the_nodes_with_gpus() {
    let mut world = rhel(OperatorResource::NvidiaDriver);
    let scope = crate::plan::SnapshotScope::of(&world.definitions);
    assert!(scope.resources.contains(&OperatorResource::GpuCluster));
    world.snapshot.resources.push(gpu_cluster());
    assert_eq!(hold(&world), HoldReason::NoNodes, "no node is known to have a GPU");
    label(&mut world, 0, "nvidia.com/gpu.present", "true");
    let required_images = change(&world.plan()).required_images;
    assert!(
        required_images.iter().any(|name| name.to_string().ends_with("-rhel9")),
        "the tags of 26.7: {required_images:?}"
    );
    // A second resource owns the node that it selects.
    let rival = json!({"usePrecompiled": true, "nodeSelector": {"pool": "a"}});
    world.snapshot.resources.push(resource(OperatorResource::NvidiaDriver, "rival", rival));
    label(&mut world, 0, "pool", "a");
    assert_eq!(hold(&world), HoldReason::NoNodes);
    // A ClusterPolicy that manages the driver still disables the resource.
    let policy = resource(OperatorResource::ClusterPolicy, "policy", json!({"driver": {}}));
    world.snapshot.resources.push(policy);
    insta::assert_snapshot!(hold(&world), @"the operator's driver is disabled: ClusterPolicy policy manages the driver and conflicts with GPUCluster gpu-cluster: delete the ClusterPolicy");
}

/// Moves the resources of the cluster to a directory, whose NVIDIADriver is then the target.
fn in_directory() -> World {
    let mut world = world(OperatorResource::NvidiaDriver);
    let rollout = json!({"strategy": "file", "path": "gpu", "resource": "NVIDIADriver", "name": "policy"});
    let rollout: RolloutSpec = serde_json::from_value(rollout).unwrap();
    let location = ManifestLocation::of(&rollout).unwrap();
    world.image("mft").spec.rollout = vec![rollout];
    let mut resources = std::mem::take(&mut world.snapshot.resources);
    for found in &mut resources {
        found.version = None;
    }
    world.manifests.insert(location, Ok(ManifestFacts { resources, ..ManifestFacts::default() }));
    world
}

fn add_to_directory(world: &mut World, kind: OperatorResource, name: &str, spec: Value) {
    let location = ManifestLocation::of(&world.image("mft").spec.rollout[0]).unwrap();
    let facts = world.manifests.get_mut(&location).unwrap().as_mut().unwrap();
    facts.resources.push(ResourceFacts { version: None, ..resource(kind, name, spec) });
}

/// The directory is what the cluster will get, so its ClusterPolicy counts, and not the one that it replaces.
#[test]
fn the_cluster_policy_of_a_directory_decides_about_its_nvidia_drivers() {
    let policy = |managing: bool| json!({"driver": {"useNvidiaDriverCRD": !managing}});
    for (here, live, is_held) in [
        (None, None, false),
        (Some(true), None, true),
        (Some(false), None, false),
        (None, Some(true), true),
        (Some(false), Some(true), false),
        (Some(true), Some(false), true),
    ] {
        let mut world = in_directory();
        if let Some(managing) = here {
            add_to_directory(&mut world, OperatorResource::ClusterPolicy, "policy", policy(managing));
        }
        world.snapshot.resources.extend(
            live.map(|managing| resource(OperatorResource::ClusterPolicy, "policy", policy(managing))),
        );
        let decision = decision(&world);
        let held = matches!(decision, RolloutDecision::Hold(HoldReason::DriverOff { .. }));
        assert_eq!(held, is_held, "{here:?} {live:?}: {decision:?}");
    }
}

/// Another NVIDIADriver of the directory owns the node that it selects.
#[test]
fn the_nvidia_drivers_of_a_directory_share_the_nodes() {
    let mut world = in_directory();
    world.snapshot.nodes.push(node("other", "6.1.0-99-amd64"));
    for number in 0..3 {
        label(&mut world, number, "nvidia.com/gpu.present", "true");
        label(&mut world, number, DRIVER_OWNER, if number == 2 { "rival" } else { "policy" });
    }
    label(&mut world, 2, "pool", "a");
    let waits = decision(&world);
    assert!(matches!(waits, RolloutDecision::Pending { .. }), "the other node has no image yet: {waits:?}");
    let rival = json!({"usePrecompiled": true, "nodeSelector": {"pool": "a"}});
    add_to_directory(&mut world, OperatorResource::NvidiaDriver, "rival", rival);
    change(&world.plan());
}
