mod gpu_operator;
mod kmm;

use jiff::SignedDuration;
use serde_json::json;

use super::*;
use crate::{
    image::RolloutSpec,
    kmod::Verdict,
    plan::{
        KERNEL_LABEL, ManifestFacts, ManifestLocation, NEXT_KERNEL_ANNOTATION, ObservedKind,
        PAUSED_ANNOTATION, Plan, Taint,
        fixtures::{K47, K48, World, name, node, resource},
        missing_images,
        reach::DRIVER_OWNER,
        rollout::RecordState,
    },
};

const NETWORK: &str = "{{version}}-{{kernel_label}}-{{os_id}}{{os_version}}-{{arch}}";
const GPU: &str = "{{version}}-{{kernel_label}}-{{os_tag}}";
const MODULE: &str = "{{version}}-{{kernel_label}}";

/// Returns a world with nodes of both kernels, a resource of this kind that names another driver, and all images
/// published.
fn world(kind: OperatorResource) -> World {
    let mut world = World::new(&[K47, K48]);
    let driver = json!({"repository": "nvcr.test/x", "image": "driver", "version": "1"});
    let (spec, tags) = match kind {
        OperatorResource::NicClusterPolicy => (json!({"ofedDriver": driver}), NETWORK),
        OperatorResource::NicNodePolicy => {
            (json!({"ofedDriver": driver, "nodeSelector": {"pool": "a"}}), NETWORK)
        }
        OperatorResource::ClusterPolicy => (json!({"driver": driver}), GPU),
        OperatorResource::NvidiaDriver => {
            let mut spec = driver;
            spec["usePrecompiled"] = true.into();
            (spec, GPU)
        }
        OperatorResource::Module => {
            let container = json!({
                "containerImage": "kmm.test/driver:1", "kernelMappings": [{"regexp": "^6\\..+$"}],
                "modprobe": {"moduleName": "mod", "dirName": "/"},
            });
            (json!({"moduleLoader": {"container": container}, "selector": {"pci": "yes"}}), MODULE)
        }
        OperatorResource::GpuCluster => panic!("no rollout target"),
    };
    let namespace = (kind == OperatorResource::Module).then_some("kmm");
    let name = if kind == OperatorResource::NicClusterPolicy { "nic-cluster-policy" } else { "policy" };
    let full_name = namespace.map_or(name.to_owned(), |namespace| format!("{namespace}/{name}"));
    world.snapshot.resources = vec![resource(kind, &full_name, spec)];
    world.snapshot.daemon_sets.clear();
    world.image("mft").spec.tags = vec!["{{kernel_release}}".to_owned(), tags.to_owned()];
    let rollout =
        json!({"strategy": "custom-resource", "resource": kind, "namespace": namespace, "name": name});
    world.image("mft").spec.rollout = vec![serde_json::from_value(rollout).unwrap()];
    world.publish(Verdict::Loads);
    world
}

fn network() -> World {
    world(OperatorResource::NicClusterPolicy)
}

fn set_spec(world: &mut World, spec: Value) {
    world.snapshot.resources[0].spec = spec.into();
}

fn label(world: &mut World, node: usize, key: &str, value: &str) {
    world.snapshot.nodes[node].labels.insert(key.to_owned(), value.to_owned());
}

fn change(plan: &Plan) -> ResourceChange {
    match &plan.rollouts[0].changes[..] {
        [Change::Resource(change)] => change.clone(),
        _ => panic!("not one change: {:?}", plan.rollouts[0].decision),
    }
}

/// Applies the planned change and returns it.
fn reconcile(world: &mut World) -> ResourceChange {
    let change = change(&world.plan());
    world.apply(&Change::Resource(change.clone())).unwrap();
    change
}

fn decision(world: &World) -> RolloutDecision {
    world.plan().rollouts.swap_remove(0).decision
}

fn hold(world: &World) -> HoldReason {
    match decision(world) {
        RolloutDecision::Hold(why) => why,
        other => panic!("not held: {other:?}"),
    }
}

#[test]
fn each_operator_gets_the_fields_from_which_it_computes_the_tags() {
    let spec = |kind| change(&world(kind).plan()).spec;
    let common = json!({"repository": "registry.test/drivers", "image": "mft", "version": "4.33.0"});
    let with = |flag: &str| {
        let mut fields = common.clone();
        fields[flag] = true.into();
        fields
    };
    assert_eq!(spec(OperatorResource::NicClusterPolicy), json!({"ofedDriver": with("forcePrecompiled")}));
    assert_eq!(spec(OperatorResource::ClusterPolicy), json!({"driver": with("usePrecompiled")}));
    assert_eq!(spec(OperatorResource::NvidiaDriver), common);
    let mut pool = world(OperatorResource::NicNodePolicy);
    label(&mut pool, 1, "pool", "a");
    assert_eq!(change(&pool.plan()).spec, json!({"ofedDriver": with("forcePrecompiled")}));
    // For each kernel: the image by digest, and the name that the operator will look for.
    assert_eq!(change(&network().plan()).required_images.len(), 4);
    assert_eq!(change(&pool.plan()).required_images.len(), 2, "the other node is not in the pool");
}

#[test]
fn a_resource_that_is_set_stays_as_it_is() {
    let mut world = network();
    let RolloutDecision::Steps { now } = decision(&world) else { panic!("not set") };
    insta::assert_snapshot!(now.join("\n"), @"set spec.ofedDriver: nvcr.test/x/driver version 1 -> registry.test/drivers/mft version 4.33.0, forcePrecompiled");
    let first = reconcile(&mut world);
    let record = RewriteRecord::of(&first.annotations).unwrap();
    assert_eq!(record.0[SPEC].replaced["forcePrecompiled"], Value::Null);
    assert_eq!(record.0[SPEC].replaced["version"], "1");
    for hours in [0, 2] {
        world.now += SignedDuration::from_hours(hours);
        let plan = world.plan();
        assert!(plan.rollouts[0].changes.is_empty() && plan.is_idle());
        let RolloutDecision::Settled { how } = &plan.rollouts[0].decision else { panic!("not settled") };
        assert_eq!(how, "version 4.33.0 for 2 kernels");
    }
}

#[test]
fn what_is_changed_back_twice_is_left_with_what_is_still_ours() {
    let mut world = network();
    reconcile(&mut world);
    let back = |world: &mut World| {
        let mut spec = (*world.snapshot.resources[0].spec).clone();
        spec["ofedDriver"]["version"] = "1".into();
        set_spec(world, spec);
        world.snapshot.resources[0].owned.remove("version");
    };
    back(&mut world);
    reconcile(&mut world);
    back(&mut world);
    let left = reconcile(&mut world);
    // The version, which another writer set, is not named. Fields without another owner are named, or the apply would
    // remove them.
    let ours = json!({"repository": "registry.test/drivers", "image": "mft", "forcePrecompiled": true});
    assert_eq!(left.spec, json!({"ofedDriver": ours}));
    assert_eq!(RewriteRecord::of(&left.annotations).unwrap().0[SPEC].state, RecordState::Conflict);
    assert_eq!(hold(&world), HoldReason::ChangedBack { times: 2 });
    assert!(world.plan().rollouts[0].changes.is_empty() && world.plan().has_failures());
}

#[test]
fn what_stood_for_an_hour_is_what_to_go_back_to() {
    for (minutes, replaced) in [(59, "1"), (60, "4.33.0")] {
        let mut world = network();
        reconcile(&mut world);
        world.now += SignedDuration::from_mins(minutes);
        world.resolved.images.get_mut(&name("mft")).unwrap().as_mut().unwrap().version = "5".to_owned();
        world.publish(Verdict::Loads);
        let change = reconcile(&mut world);
        assert_eq!(RewriteRecord::of(&change.annotations).unwrap().0[SPEC].replaced["version"], replaced);
    }
}

/// The operator would ask for the previous version of the next kernel's image.
#[test]
fn no_node_is_ready_while_a_paused_resource_names_the_previous_version() {
    let mut world = network();
    world.snapshot.nodes[0].annotations.insert(NEXT_KERNEL_ANNOTATION.to_owned(), K48.to_owned());
    reconcile(&mut world);
    world.snapshot.resources[0].annotations.insert(PAUSED_ANNOTATION.to_owned(), "true".to_owned());
    assert!(world.plan().nodes[0].ready, "the resource names the version");
    world.resolved.images.get_mut(&name("mft")).unwrap().as_mut().unwrap().version = "5".to_owned();
    world.publish(Verdict::Loads);
    let node = world.plan().nodes.swap_remove(0);
    let why = missing_images(node.next.as_ref().unwrap());
    assert!(!node.ready && why.contains("it is paused"), "{why}");
}

#[test]
fn every_reason_to_hold_says_what_is_the_matter() {
    let with = |kind, change: fn(&mut World)| {
        let mut world = world(kind);
        change(&mut world);
        let why = hold(&world);
        let failure = if why.is_failure() { "failure" } else { "finding" };
        let json = serde_json::to_value(&why).unwrap()["reason"].clone();
        format!("{failure} {json}: {why}")
    };
    let nic = |change| with(OperatorResource::NicClusterPolicy, change);
    let gpu = |change| with(OperatorResource::ClusterPolicy, change);
    let driver = |change| with(OperatorResource::NvidiaDriver, change);
    let reasons = [
        nic(|w| w.snapshot.resources.clear()),
        nic(|w| w.snapshot.resources[0].name.push('x')),
        nic(|w| drop(w.snapshot.unseen.insert(ObservedKind::Resources, "forbidden".to_owned()))),
        nic(|w| set_spec(w, json!({}))),
        gpu(|w| set_spec(w, json!({"driver": {"enabled": false}}))),
        gpu(|w| set_spec(w, json!({"driver": {"useNvidiaDriverCRD": true}}))),
        driver(|w| set_spec(w, json!({"usePrecompiled": false}))),
        driver(|w| set_spec(w, json!({"usePrecompiled": true, "driverType": "vgpu"}))),
        gpu(|w| set_spec(w, json!({"driver": {}, "gds": {"enabled": true}}))),
        driver(|w| set_spec(w, json!({"usePrecompiled": true, "gdrcopy": {"enabled": true}}))),
        driver(|w| {
            let policy = resource(OperatorResource::ClusterPolicy, "policy", json!({"driver": {}}));
            w.snapshot.resources.push(policy);
        }),
        nic(|w| w.location.pullable = false),
        nic(|w| w.snapshot.nodes.iter_mut().for_each(|node| drop(node.labels.remove("pci")))),
        nic(|w| drop(w.snapshot.nodes[1].labels.remove(KERNEL_LABEL))),
        nic(|w| w.image("mft").spec.tags = vec!["{{kernel_release}}".to_owned()]),
        gpu(|w| w.image("mft").spec.tags = vec!["{{kernel_release}}".to_owned()]),
        nic(|w| w.image("mft").spec.kernels = Some("<6".parse().unwrap())),
        nic(|w| w.observed.published.values_mut().for_each(|p| p.verdict = None)),
        nic(|w| {
            w.snapshot.nodes[1]
                .labels
                .insert("nvidia.com/ofed-driver-upgrade-state".to_owned(), "drain-required".to_owned());
        }),
        gpu(|w| {
            for (node, state) in w.snapshot.nodes.iter_mut().zip(["drain-required", "cordon-required"]) {
                node.labels.insert("nvidia.com/gpu-driver-upgrade-state".to_owned(), state.to_owned());
            }
        }),
    ];
    insta::assert_snapshot!(reasons.join("\n").replace("registry.test/drivers/", ""));
}

#[test]
fn an_upgrade_that_is_over_holds_nothing() {
    for state in ["", "upgrade-done", "upgrade-failed", "upgrade-required"] {
        let mut world = network();
        label(&mut world, 0, "nvidia.com/ofed-driver-upgrade-state", state);
        label(&mut world, 1, "nvidia.com/gpu-driver-upgrade-state", "drain-required");
        change(&world.plan());
    }
    // An upgrade in progress does not matter where there is nothing to write.
    let mut world = network();
    reconcile(&mut world);
    label(&mut world, 0, "nvidia.com/ofed-driver-upgrade-state", "drain-required");
    assert!(matches!(decision(&world), RolloutDecision::Settled { .. }));
}

/// <https://github.com/NVIDIA/gpu-operator/issues/2509>: nodes stay in `upgrade-required` for weeks.
#[test]
fn a_state_at_rest_names_who_must_act() {
    let mut world = network();
    for node in 0..2 {
        label(&mut world, node, "nvidia.com/ofed-driver-upgrade-state", "upgrade-required");
    }
    change(&world.plan());
    reconcile(&mut world);
    let RolloutDecision::Settled { how } = decision(&world) else { panic!("it is set") };
    insta::assert_snapshot!(how);
    label(&mut world, 0, "nvidia.com/ofed-driver-upgrade-state", "upgrade-failed");
    label(&mut world, 1, "nvidia.com/ofed-driver-upgrade-state", "upgrade-done");
    let RolloutDecision::Settled { how } = decision(&world) else { panic!("it is set") };
    insta::assert_snapshot!(how);
}

/// The operator lists the registry's tags only now and then, and stops all its DaemonSets while one tag is missing in its list.
#[test]
fn an_error_of_the_operator_is_shown() {
    let mut world = network();
    world.snapshot.resources[0].operator_error = Some("no such tag".to_owned());
    change(&world.plan());
    reconcile(&mut world);
    let mut how = |error: &str| {
        world.snapshot.resources[0].operator_error = Some(error.to_owned());
        let RolloutDecision::Settled { how } = decision(&world) else { panic!("it is set") };
        how
    };
    insta::assert_snapshot!(how("connection refused"), @"version 4.33.0 for 2 kernels; the operator failed: connection refused");
    insta::assert_snapshot!(how(&format!("{TAG_NOT_FOUND}: 1.0-6.1-debian12-amd64")), @"version 4.33.0 for 2 kernels; the operator failed: ForcePrecompiled is enabled and precompiled tag was not found: 1.0-6.1-debian12-amd64 (it lists the registry's tags every 30 minutes; DOCA_DRIVER_IMAGE_POLL_TIME_MINUTES in its Deployment shortens that)");
}

#[test]
fn the_resources_tolerations_and_affinity_count() {
    // The node runs a kernel that is not built yet.
    let other = |kind, taint: &str, field: Option<(&str, Value)>| {
        let mut world = world(kind);
        let mut other = node("other", "6.1.0-99-amd64");
        other.taints.extend((!taint.is_empty()).then(|| Taint {
            key: taint.to_owned(),
            value: String::new(),
            effect: "NoSchedule".to_owned(),
        }));
        world.snapshot.nodes.push(other);
        let mut spec = (*world.snapshot.resources[0].spec).clone();
        if let Some((key, value)) = field {
            spec[key] = value;
        }
        set_spec(&mut world, spec);
        decision(&world)
    };
    let held = |decision: RolloutDecision| !matches!(decision, RolloutDecision::Steps { .. });
    let nic = OperatorResource::NicClusterPolicy;
    assert!(held(other(nic, "", None)));
    assert!(!held(other(nic, "dedicated", None)), "the operator's pods do not tolerate the taint");
    assert!(held(other(nic, "nvidia.com/gpu", None)), "they tolerate this one by default");
    let tolerations = json!([{"key": "dedicated", "operator": "Exists"}]);
    assert!(held(other(nic, "dedicated", Some(("tolerations", tolerations.clone())))));
    assert!(held(other(OperatorResource::NvidiaDriver, "dedicated", Some(("tolerations", tolerations)))));
    let term = |operator: &str| {
        json!({"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchFields": [
            {"key": "metadata.name", "operator": operator, "values": ["other"]}]}]}})
    };
    assert!(!held(other(nic, "", Some(("nodeAffinity", term("NotIn"))))));
    assert!(held(other(nic, "", Some(("nodeAffinity", term("Near"))))), "an affinity that is not understood");
}

#[test]
fn a_node_that_lost_its_labels_holds_a_resource() {
    let mut world = network();
    let mut lost = node("lost", "6.1.0-99-amd64");
    lost.labels.clear();
    world.snapshot.nodes.push(lost);
    assert!(matches!(hold(&world), HoldReason::Unlabeled { .. }));
    world.snapshot.nodes.last_mut().unwrap().kernel_version = K47.to_owned();
    assert!(matches!(hold(&world), HoldReason::Unlabeled { .. }), "another system may have the same release");
    for node in &mut world.snapshot.nodes {
        node.os_image = "Debian GNU/Linux 12 (bookworm)".to_owned();
    }
    change(&world.plan());
}

#[test]
fn nodes_that_the_operator_finds_by_itself_count() {
    let mut world = network();
    let mut stranger = node("stranger", "6.1.0-99-amd64");
    stranger.labels.remove("pci");
    world.snapshot.nodes.push(stranger);
    change(&world.plan());
    label(&mut world, 2, "feature.node.kubernetes.io/pci-15b3.present", "true");
    assert!(matches!(hold(&world), HoldReason::NoImage { .. }));
}

/// The GPU Operator's driver DaemonSet does not run on such nodes, so a rewrite cannot break them.
#[test]
fn nodes_with_their_own_driver_hold_nobody_up() {
    let mut world = world(OperatorResource::ClusterPolicy);
    world.snapshot.nodes.push(node("own", "6.1.0-99-amd64"));
    let driver = "nvidia.com/gpu.deploy.driver";
    for (key, value) in
        [(driver, "true"), (driver, "paused-for-driver-upgrade"), ("nvidia.com/gpu.deploy.operands", "true")]
    {
        label(&mut world, 2, key, value);
        let found = decision(&world);
        assert!(matches!(found, RolloutDecision::Pending { .. }), "{key}={value}: {found:?}");
    }
    for (key, value) in
        [(driver, "pre-installed"), (driver, "false"), ("nvidia.com/gpu.deploy.operands", "false")]
    {
        let mut world = world.clone();
        label(&mut world, 2, key, value);
        change(&world.plan());
    }
}

/// Such nodes get a manager for virtual machines instead of a driver (NVIDIA/gpu-operator 568).
#[test]
fn nodes_with_gpus_for_virtual_machines_hold_nobody_up() {
    let mut world = world(OperatorResource::ClusterPolicy);
    world.snapshot.nodes.push(node("vm", "6.1.0-99-amd64"));
    label(&mut world, 2, "nvidia.com/gpu.workload.config", "vm-passthrough");
    let is_pending = |world: &World| matches!(decision(world), RolloutDecision::Pending { .. });
    assert!(is_pending(&world), "the operator ignores the label while virtual machines are disabled");
    let mut spec = (*world.snapshot.resources[0].spec).clone();
    spec["sandboxWorkloads"] = json!({"enabled": true});
    set_spec(&mut world, spec.clone());
    change(&world.plan());
    label(&mut world, 2, "nvidia.com/gpu.workload.config", "container");
    assert!(is_pending(&world));
    world.snapshot.nodes[2].labels.remove("nvidia.com/gpu.workload.config");
    assert!(is_pending(&world), "the default is containers");
    spec["sandboxWorkloads"]["defaultWorkload"] = "vm-vgpu".into();
    set_spec(&mut world, spec);
    assert!(!is_pending(&world));
}

#[test]
fn an_operator_whose_driver_is_switched_off_is_no_failure() {
    for (kind, spec) in [
        (OperatorResource::ClusterPolicy, json!({"driver": {"enabled": false}})),
        (OperatorResource::NicClusterPolicy, json!({"rdmaSharedDevicePlugin": {}})),
    ] {
        let mut world = world(kind);
        set_spec(&mut world, spec);
        assert!(matches!(hold(&world), HoldReason::DriverOff { .. }), "{kind:?}");
        assert!(!world.plan().has_failures(), "{kind:?}");
    }
}

/// The Network Operator accepts one name (`controllers/nicclusterpolicy_controller.go`) and sets the state `ignore` of others.
#[test]
fn a_nic_cluster_policy_with_another_name_is_held() {
    let mut world = network();
    world.snapshot.resources[0].name = "fleet".to_owned();
    let rollout = json!({"strategy": "custom-resource", "resource": "NicClusterPolicy", "name": "fleet"});
    world.image("mft").spec.rollout = vec![serde_json::from_value(rollout).unwrap()];
    insta::assert_snapshot!(hold(&world), @"the operator's driver is disabled: the Network Operator ignores a NicClusterPolicy that is not named nic-cluster-policy: rename it");
}

#[test]
fn an_image_or_a_tag_that_is_not_there_yet_is_waited_for() {
    let mut world = network();
    let computed = |world: &World| world.cells()[1].further[0].clone();
    let tag = computed(&world);
    let published = world.observed.published.remove(&tag);
    let RolloutDecision::Pending { on } = decision(&world) else { panic!("not pending") };
    assert_eq!(on, tag);
    assert!(published.is_some());
    world.observed.published.clear();
    assert!(matches!(decision(&world), RolloutDecision::Pending { .. }));
}

#[test]
fn kernels_with_different_versions_cannot_share_a_resource() {
    let mut world = network();
    // A tag pattern can make the version depend on the kernel.
    world.image("mft").spec.tags = vec![format!("{{{{kernel_release}}}}-{NETWORK}")];
    world.publish(Verdict::Loads);
    insta::assert_snapshot!(hold(&world), @"the resource has one version, and its kernels need several: 6.1.0-47-amd64-4.33.0 for 6.1.0-47-amd64 (debian 12, amd64), 6.1.0-48-amd64-4.33.0 for 6.1.0-48-amd64 (debian 12, amd64)");
}

#[test]
fn publish_only_counts_tags_and_looks_at_their_form() {
    let mut world = network();
    let publish_only = |resource| vec![RolloutSpec::PublishOnly { resource }];
    world.image("mft").spec.rollout = publish_only(None);
    let RolloutDecision::Settled { how } = decision(&world) else { panic!("not settled") };
    assert_eq!(how, "4 tags published");
    world.image("mft").spec.rollout = publish_only(Some(OperatorResource::NicNodePolicy));
    assert!(matches!(decision(&world), RolloutDecision::Settled { .. }));
    world.image("mft").spec.rollout = publish_only(Some(OperatorResource::ClusterPolicy));
    assert!(matches!(hold(&world), HoldReason::TagForm { .. }));
    world.image("mft").spec.rollout = publish_only(None);
    let mut failing = world.clone();
    failing.definitions.templates.clear();
    assert!(matches!(hold(&failing), HoldReason::NoImage { .. }));
    let mut refused = world.clone();
    refused.observed.published.values_mut().for_each(|found| found.verdict = Some(Verdict::Refused));
    assert!(matches!(hold(&refused), HoldReason::NotPassed { .. }));
    let tag = world.cells()[0].further[0].clone();
    world.observed.published.remove(&tag);
    assert_eq!(decision(&world), RolloutDecision::Pending { on: tag });
    world.snapshot.nodes.clear();
    assert!(world.plan().rollouts.is_empty(), "nothing calls for the image");
}
